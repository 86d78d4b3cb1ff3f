"""A source folder whose files, config, names and weights have been looked at: what can be refused before any work.

Sources are models of the families, or converted checkpoints, of which only the layout of the cache may change.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from mha2mla.checkpoints import CONFIG_FILE, CheckpointError, check_converted, check_folder, damage_named, read_json
from mha2mla.conversion.config_check import LAYER, check_config
from mha2mla.conversion.families import ADAPTERS, FamilyAdapter, SourceSpec, UnsupportedSourceError, adapter_for
from mha2mla.conversion.fit.repeatable import REPEATABLE_ATTENTION
from mha2mla.conversion.source.files import (
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER_FILES,
    CheckpointReader,
    FileIdentity,
    companions,
    identify,
)
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.modeling.stored_tensors import FREQUENCIES, StoredParameters, check_frequencies, widest
from mha2mla.terminal import Span, progress_bar

_ADAPTER_FILE = "adapter_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"
_LARGEST = 1e15  # sums of squares of larger ones overflow float32
_MAPPED_BYTES = 1 << 26  # bytes of the source that stay in memory during the check


@dataclass(frozen=True)
class OpenedFolder:
    """A folder of a model and what it holds.

    Attributes:
        companions: names of the files that belong to it beside weights and config.
        sliding_windows: per layer, visible tokens or None.
    """

    folder: Path
    config: PreTrainedConfig
    reader: CheckpointReader
    companions: tuple[str, ...]
    sliding_windows: tuple[int | None, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the attention's projections; of several, one that holds them all."""
        stored = self.reader.headers().items()
        return widest(
            each.torch_dtype for name, each in stored if ".self_attn." in name and name.endswith("_proj.weight")
        )

    def model(self, device: torch.device, dtype: torch.dtype) -> StreamedModel:
        """The model without weights.

        Raises:
            CheckpointError: transformers cannot make it, or a tensor is absent, quantised, or has another shape.
            UnsupportedSourceError: a tensor would be lost.
        """
        with damage_named(f"the {self.config.model_type} of {self.folder / CONFIG_FILE} cannot be made"):
            keys = {"device": device, "dtype": dtype, "attn_implementation": REPEATABLE_ATTENTION}
            model = StreamedModel(self.config, self.reader, self.sliding_windows, **keys)
        model.stored.check(self.reader.headers(), str(self.folder), UnsupportedSourceError)
        return model

    def identity(self) -> tuple[dict[str, FileIdentity], dict[str, FileIdentity]]:
        """Identity of config, weights and the other files that end up in the result; reads them whole."""
        index = [INDEX_FILE] if (self.folder / INDEX_FILE).is_file() else []
        return (
            identify(self.folder, [CONFIG_FILE, *self.reader.files()]),
            identify(self.folder, [*index, *self.companions]),
        )

    def check_weights(self, *, progress: bool | Span = False) -> None:
        """Reads every tensor once.

        Raises:
            CheckpointError: a tensor is not of floating-point numbers, or has a NaN, infinite or absurdly large one,
                or a negative frequency.
            UnsupportedSourceError: the embedding, or a projection of a source's attention, is zero everywhere; or a
                head that the config ties is not the embedding.
        """
        self._check_head()
        last = {layer[0]: name for name in sorted(self.reader.names()) if (layer := LAYER.match(name))}
        current, mapped = None, 0
        for name in progress_bar(sorted(self.reader.names()), desc="check", unit="tensor", show=progress):
            layer = LAYER.match(name)
            if layer and layer[0] != current:
                current = layer[0]
                self.reader.keep(f"{current}self_attn.")
            if not name.endswith("rotary_emb.inv_freq"):  # computed from the config, whatever is stored
                tensor = self.reader.tensor(name)
                mapped += tensor.nbytes
                _check_magnitude(name, tensor)
                if name.endswith(FREQUENCIES):
                    check_frequencies(name, tensor)
            if layer and name == last[current]:
                self._check_attention(int(layer[1]))
            if mapped > _MAPPED_BYTES:
                self.reader.unmap()
                mapped = 0
        self.reader.release()

    def _check_head(self) -> None:
        """Refuses a stored head beside a config that ties it: transformers would not tie it, and this package would."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if self.config.tie_word_embeddings and {head, embedding} <= set(self.reader.names()):
            if not torch.equal(self.reader.tensor(head), self.reader.tensor(embedding)):
                raise UnsupportedSourceError(
                    f"tensor {head} differs from {embedding}, to which config.json ties it; set tie_word_embeddings to"
                    " false there to keep it"
                )
            self.reader.unmap()

    def _check_attention(self, layer: int) -> None:
        """Refuses what no attention can be, once all of a layer's tensors were read."""


@dataclass(frozen=True)
class Source(OpenedFolder):
    """A model of one of the families; ``adapter`` and ``spec`` say what its attention is."""

    adapter: FamilyAdapter
    spec: SourceSpec

    def attention_names(self) -> set[str]:
        """Names of the attention's tensors of all layers, which a conversion replaces."""
        layers = range(self.spec.num_layers)
        return {name for layer in layers for name in self.adapter.attention_names(self.spec, layer).values()}

    def _check_attention(self, layer: int) -> None:
        cpu = torch.device("cpu")
        weights = self.adapter.attention_weights(self.reader, self.spec, layer, device=cpu, dtype=torch.float32)
        names = self.adapter.attention_names(self.spec, layer)
        for field in ("q_weight", "k_weight", "v_weight", "o_weight", "q_norm", "k_norm"):
            tensor = getattr(weights, field)
            offset = self.spec.norm_offset if field.endswith("norm") else 0.0
            if tensor is not None and not (tensor + offset).any():
                raise UnsupportedSourceError(
                    f"tensor {names[field]} ({field} of layer {layer}) is zero everywhere; an attention without it"
                    " cannot be converted"
                )


def read_tokenizer(checkpoint: str, name: str) -> Any:
    """The tokenizer of a folder or hub id, by transformers' own classes: code of the checkpoint's never runs.

    Args:
        name: what the caller calls the checkpoint, for error messages.

    Raises:
        CheckpointError: there is none, it is damaged, or it needs code of its own.
    """
    folder = Path(checkpoint)
    if folder.is_dir():
        check_folder(folder)
        companions(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except Exception as error:  # whatever damaged files make of other people's parsers
        config = folder / TOKENIZER_CONFIG
        own = config.is_file() and "auto_map" in read_json(folder, TOKENIZER_CONFIG)
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
            raise CheckpointError(
                f"{name} {checkpoint!r} has no tokenizer files; copy them from the original model"
            ) from error
        code = f"auto_map in {TOKENIZER_CONFIG} names code of its own, and custom code is never run"
        raise CheckpointError(f"{name} {checkpoint!r} has no usable tokenizer: {code if own else error}") from error
    # Words that a tokenizer (tokenizers 0.23) remembers are never freed: megabytes a conversion to save little.
    resize = getattr(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), "_resize_cache", None)
    if resize is not None:
        resize(0)
    return tokenizer


def check_model_folder(folder: Path) -> None:
    """Check of a folder before transformers opens it: converted, of a family, or of another model.

    Weights that are no safetensors files are left to transformers, which unpickles numbers alone.

    Raises:
        UnsupportedSourceError, CheckpointError: as :func:`open_source`, of what makes no model at all.
    """
    values = _config_values(folder)
    companions(folder)
    if values.get("model_type") == "mha2mla":
        _converted(folder, values)
        return
    is_known = values.get("model_type") in ADAPTERS
    if is_known:
        check_config(values)
    if any(os.path.lexists(folder / name) for name in (SINGLE_FILE, INDEX_FILE)):
        reader = CheckpointReader(folder)
        if is_known and not values.get("quantization_config"):
            config = _config(folder, values)
            check_config(config.to_dict(), reader.names())
            with damage_named(f"the {config.model_type} of {folder / CONFIG_FILE} cannot be made"):
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(config)
                StoredParameters(model, reader.names()).check(reader.headers(), str(folder))


def read_source_config(
    folder: Path, *, longrope_table: str = "short"
) -> tuple[PreTrainedConfig, FamilyAdapter, SourceSpec]:
    """Config, family and attention of a source, from its ``config.json`` alone.

    Raises:
        UnsupportedSourceError, CheckpointError: as :func:`open_source`, of the config.
    """
    values = _config_values(folder)
    adapter_for(values)
    check_config(values)
    config = _config(folder, values)
    check_config(config.to_dict())
    adapter = adapter_for(config.to_dict())  # a mistral with layer_types is a ministral to transformers
    with damage_named(f"{folder / CONFIG_FILE} describes no {config.model_type} that can be converted"):
        spec = adapter.specify(config, longrope_table=longrope_table)
    _check_spec(spec)
    return config, adapter, spec


def open_source(folder: Path, *, longrope_table: str = "short") -> Source:
    """Looks at everything that can be refused without reading weights.

    Raises:
        UnsupportedSourceError: the source cannot be converted, by name of what stands in the way.
        CheckpointError: it is incomplete or damaged, or a file of it is no regular file inside the folder.
    """
    config, adapter, spec = read_source_config(folder, longrope_table=longrope_table)
    reader = CheckpointReader(folder)
    check_config(config.to_dict(), reader.names())
    return Source(folder, config, reader, _companions(folder), spec.sliding_windows, adapter, spec)


def open_converted(folder: Path) -> OpenedFolder:
    """The same of a checkpoint that this package wrote.

    Raises:
        UnsupportedSourceError, CheckpointError: as :func:`open_source`.
    """
    values = _config_values(folder)
    if values.get("quantization_config"):
        raise UnsupportedSourceError("quantization_config is set in config.json; expected none")
    config, reader = _converted(folder, values)
    windows = tuple(map(config.layer_sliding_window, range(config.num_hidden_layers)))
    return OpenedFolder(folder, config, reader, _companions(folder), windows)


def _converted(folder: Path, values: dict[str, Any]) -> tuple[PreTrainedConfig, CheckpointReader]:
    check_converted(values.get("model_type"), str(folder))
    source = values.get("source_config")
    if not isinstance(source, dict):
        raise CheckpointError(f"source_config is {source!r:.80} in {folder / CONFIG_FILE}; expected an object")
    reader = CheckpointReader(folder)
    for each in (_given(values), source):
        check_config(each, reader.names())
    config = _config(folder, values)
    check_config(_given(config.to_dict()), reader.names())
    return config, reader


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Values without None, which a converted config has for the fields that its source lacks."""
    return {name: value for name, value in values.items() if value is not None}


def _config_values(folder: Path) -> dict[str, Any]:
    """Content of ``config.json``, in a folder where opening files is safe."""
    if not (folder / CONFIG_FILE).exists():
        raise CheckpointError(f"{str(folder)!r} has no {CONFIG_FILE}")
    check_folder(folder)
    values = read_json(folder, CONFIG_FILE)
    model_type = values.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise UnsupportedSourceError(f"model_type is {model_type!r:.80} in config.json; expected a string")
    return values


def _config(folder: Path, values: dict[str, Any]) -> PreTrainedConfig:
    if (folder / _ADAPTER_FILE).exists():
        raise UnsupportedSourceError(
            f"{folder / _ADAPTER_FILE} says that an adapter changes the weights; merge it before conversion"
        )
    with damage_named(f"{folder / CONFIG_FILE} is not the config of a {values.get('model_type')}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.to_dict()
    return config


def _companions(folder: Path) -> tuple[str, ...]:
    """Companion files of a source; the JSON among them is JSON."""
    found = companions(folder)
    for name in found:
        if name.endswith(".json"):
            read_json(folder, name)
    if _GENERATION_CONFIG in found:
        with damage_named(f"{folder / _GENERATION_CONFIG} is no generation config"):
            GenerationConfig.from_pretrained(folder)
    return tuple(found)


def _check_magnitude(name: str, tensor: torch.Tensor) -> None:
    largest = max(map(float, tensor.aminmax()), key=abs) if tensor.numel() else 0.0
    if abs(largest) > _LARGEST:
        raise CheckpointError(f"tensor {name} has a value of {largest:.3g}; expected at most {_LARGEST:g} of a weight")
    if largest == 0 and name == "model.embed_tokens.weight":
        raise UnsupportedSourceError(f"tensor {name} is zero everywhere; a model that sees no tokens is none")


def _check_spec(spec: SourceSpec) -> None:
    checks = (
        ("rope_parameters", "frequencies", all(bool(torch.isfinite(table.inv_freq).all()) for table in spec.tables)),
        ("rope_parameters", "attention factors", all(0 < table.attention_factor < math.inf for table in spec.tables)),
        ("query_pre_attn_scalar", "softmax scale", 0 < spec.softmax_scale < math.inf),
        ("sliding_window", "windows", all(window is None or window >= 1 for window in spec.sliding_windows)),
        ("head_dim", "rotary pairs", spec.head_dim % 2 == 0),
    )
    for field, what, right in checks:
        if not right:
            raise UnsupportedSourceError(f"{field} in the source's config gives no usable {what}")
