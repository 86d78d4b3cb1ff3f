"""Tensors of a checkpoint: the parameters that they make, and checks of their headers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from mha2mla.checkpoints import CheckpointError, NamedError, regular_file

# safetensors' names of the dtypes that weights may have; others are quantised, or no numbers.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FREQUENCIES = ".self_attn.inv_freq"  # tensors of a converted layer
LFS_POINTER = b"version https://git-lfs"  # how such a file begins
UNREAD = ("rotary_emb.inv_freq", ".latent_centers")  # computed; of codes, where latents are read in 16 bits


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file's header; dtype by safetensors' name."""

    shape: tuple[int, ...]
    dtype: str
    file: str

    @classmethod
    def of(cls, piece: Any, file: str) -> StoredTensor:
        """Header of a slice of ``safe_open``."""
        return cls(tuple(piece.get_shape()), piece.get_dtype(), file)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def check_dtype(self, name: str) -> None:
        """Refuses a tensor that is not of floating-point numbers."""
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name} in {self.file} has dtype {self.dtype}; expected one of {', '.join(DTYPES)}"
                " (dequantise a quantised checkpoint first)"
            )


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds the numbers of all ``dtypes``."""
    return reduce(torch.promote_types, dtypes)


def num_parameters(config: PreTrainedConfig) -> int:
    """Parameters of a causal language model, built without memory; tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def open_shard(path: Path) -> Any:
    """``safe_open`` of a file, whose size it holds against the header before anything is mapped.

    Raises:
        CheckpointError: truncated, or no safetensors file.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        if _is_lfs_pointer(path):
            reason = "is a pointer of Git LFS, not the weights: git lfs pull, or hf download"
            raise CheckpointError(f"shard {path} {reason}") from error
        raise CheckpointError(f"shard {path} is truncated or damaged: {error}") from error


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def check_loaded_files(model: PreTrainedModel, folder: str | None, files: Sequence[str]) -> None:
    """Checks the files that ``from_pretrained`` is about to read into a converted ``model``; reads ``inv_freq`` alone.

    Args:
        folder: that no file may lie outside of; None: of the first file.

    Raises:
        CheckpointError: a file that is none, truncated, or outside the folder; a tensor that is missing, unknown, of
            another shape, or of no floating-point numbers; a negative or non-finite frequency.
    """
    root = Path(folder if folder is not None and os.path.isdir(folder) else os.path.dirname(files[0]))
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{file} is no safetensors file; expected one: save the model as safetensors")
        with open_shard(regular_file(root, os.path.relpath(file, root))) as opened:
            names = opened.keys()
            stored |= {name: StoredTensor.of(opened.get_slice(name), os.path.basename(file)) for name in names}
            for name in names:
                if name.endswith(FREQUENCIES) and stored[name].dtype in DTYPES:
                    check_frequencies(name, opened.get_tensor(name))
    _check_stored(model, stored, str(root))


def check_loaded_state(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> None:
    """:func:`check_loaded_files` of tensors that the caller has in memory."""
    by_dtype = {dtype: name for name, dtype in DTYPES.items()}
    stored = {
        name: StoredTensor(tuple(tensor.shape), by_dtype.get(tensor.dtype, str(tensor.dtype)), "state_dict")
        for name, tensor in state.items()
    }
    for name, tensor in state.items():
        if name.endswith(FREQUENCIES):
            check_frequencies(name, tensor)
    _check_stored(model, stored, "state_dict")


def _check_stored(model: PreTrainedModel, stored: Mapping[str, StoredTensor], where: str) -> None:
    """Checks tensors against the model's; heads only where ``architectures`` of the checkpoint names the model's class.

    transformers reports a head that is absent or left over: AutoModel of a causal checkpoint, a new classifier.
    """
    parameters, name = StoredParameters(model, stored), type(model).__name__
    if name not in (model.config.architectures or [name]):
        parameters.shapes = {key: shape for key, shape in parameters.shapes.items() if _is_base(key) or key in stored}
        stored = {key: found for key, found in stored.items() if _is_base(key) or key in parameters.shapes}
    parameters.check(stored, where)


def _is_base(name: str) -> bool:
    """True if a tensor belongs to the base model, not to a head on it."""
    return name.startswith("model.")


def check_frequencies(name: str, frequencies: torch.Tensor) -> None:
    """Raises CheckpointError unless all are finite and at least 0."""
    wrong = frequencies[~((frequencies >= 0) & frequencies.isfinite())]
    if wrong.numel():
        raise CheckpointError(f"tensor {name} has a frequency of {wrong[0]:.3g}; expected finite ones, at least 0")


def is_finite(tensor: torch.Tensor) -> bool:
    """True where no value of a floating-point tensor is NaN or infinite."""
    # The extremes of a tensor with a NaN are NaN, and one pass makes no mask as large as the tensor.
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def check_finite(model: nn.Module) -> None:
    """Raises CheckpointError for the first parameter or buffer that has a NaN or an infinite value."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype in DTYPES.values() and not tensor.is_meta and not is_finite(tensor.detach()):
            raise CheckpointError(f"tensor {name} has a NaN or infinite value")


class StoredParameters:
    """The names and shapes that a checkpoint of ``model`` has, and how its parameters are put together from them.

    For most families a parameter is the tensor of its name. A mixture of experts is stored expert by expert (the only
    layout on the hub, and what ``save_pretrained`` writes), and held in memory as stacks of all experts, sometimes
    under another name; a checkpoint that holds a stack under the parameter's own name is understood too.

    Args:
        model: may be on the meta device.

    Attributes:
        shapes: stored name -> expected shape; without tensors that are tied to another.
        sources: parameter (or persistent buffer) -> the stored names it is made of.
    """

    def __init__(self, model: PreTrainedModel, stored: Collection[str]) -> None:
        self._model = model
        tied = set(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else set()
        state = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name not in tied}
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._converters = {pattern: item for item in converters for pattern in item.source_patterns}
        self._patterns: dict[str, str] = {}  # stored name -> pattern of its converter
        shapes = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
        sources: dict[str, list[str]] = {}
        for name in sorted(shapes, key=dot_natural_key):
            parameter, pattern = rename_source_key(name, renamings, converters)
            sources.setdefault(parameter, []).append(name)
            if pattern is not None:
                self._patterns[name] = pattern
        for parameter, names in sources.items():
            if names != [parameter] and parameter in stored:
                for name in names:
                    self._patterns.pop(name, None)
                    del shapes[name]
                shapes[parameter] = tuple(state[parameter].shape)
                sources[parameter] = [parameter]
        self.shapes = shapes
        self.sources = {parameter: tuple(names) for parameter, names in sources.items()}

    def check(
        self, stored: Mapping[str, StoredTensor], where: str, unknown: type[NamedError] = CheckpointError
    ) -> None:
        """Holds the tensors of a checkpoint against the model's: all there, of its shapes, floats, and no others.

        Args:
            unknown: the error of a tensor that the model has no place for.

        Raises:
            CheckpointError: naming the tensor.
        """
        if missing := sorted(self.shapes.keys() - stored.keys()):
            raise CheckpointError(f"tensor {missing[0]} is absent from {where} ({len(missing)} absent in all)")
        tied = set(self._model._tied_weights_keys or {})
        others = stored.keys() - self.shapes.keys() - tied
        if extra := sorted(name for name in others if not name.endswith(UNREAD)):
            raise unknown(
                f"tensor {extra[0]} of {where} is unknown to {type(self._model).__name__}"
                f" ({len(extra)} unknown in all); it would be lost"
            )
        for name, shape in sorted(self.shapes.items()):
            if stored[name].shape != shape:
                raise CheckpointError(f"tensor {name} has shape {stored[name].shape}; the config says {shape}")
            stored[name].check_dtype(name)

    def assemble(self, parameter: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """One parameter from its stored tensors.

        Args:
            read: stored name -> tensor.
        """
        names = self.sources[parameter]
        if names[0] not in self._patterns:
            return read(names[0])
        converter = deepcopy(self._converters[self._patterns[names[0]]])
        for name in names:
            converter.add_tensor(parameter, name, self._patterns[name], read(name))
        made = converter.convert(parameter, model=self._model, config=self._model.config)[parameter]
        return made[0] if isinstance(made, list) else made
