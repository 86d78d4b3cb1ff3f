"""convert = conversion + verification: check everything, write a temporary folder, read it back, compare, rename."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from mha2mla.conversion.adapters import FamilyAdapter, SourceSpec, UnsupportedSourceError, adapter_for
from mha2mla.conversion.calibration import SPILL_BYTES
from mha2mla.conversion.card import PLOT_FILE, model_card
from mha2mla.conversion.generated import generator_of
from mha2mla.conversion.layer import converted_config
from mha2mla.conversion.layer_ranks import choose_layer_ranks
from mha2mla.conversion.parity import ParityReport, compare
from mha2mla.conversion.plot import plot_layers
from mha2mla.conversion.recipe import RECORDS, Recipe
from mha2mla.conversion.repeatable import REPEATABLE_ATTENTION
from mha2mla.conversion.resume import FinishedLayers, ResumeError, code_hash, source_identity, tensor_hash
from mha2mla.conversion.search import choose_rope_share
from mha2mla.conversion.sequence import LayerRecord, LayerSequence
from mha2mla.conversion.source import CheckpointError, CheckpointReader
from mha2mla.conversion.streaming import StreamedModel
from mha2mla.conversion.writer import (
    DEFAULT_SHARD_BYTES,
    WORK_FOLDER,
    ShardedWriter,
    check_destination,
    temporary_folder,
    temporary_path,
)
from mha2mla.geometry import MLAGeometry
from mha2mla.texts import load_text, mixed_windows, token_windows

if TYPE_CHECKING:
    from mha2mla.modeling import LayerAttention

FULL_RANK_TOLERANCE = 1e-4  # relative error of float32 logits
EVALUATION_TEXT = "builtin:prose"
EVALUATION_TOKENS = 2048
RESUME = ("auto", "never")
_BATCH_TOKENS = 2048  # tokens that a layer sees at a time

# What a checkpoint carries beside weights and config.
_COMPANIONS = (
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)


class ParityError(ValueError):
    """A conversion that must be exact is not; nothing was written under the destination's name."""


@dataclass(frozen=True)
class ConversionReport:
    """What ``convert`` did and measured.

    Attributes:
        name: last part of the destination.
        source, destination: folders.
        source_name: what the caller called the source, a hub id or a folder's last part.
        geometry: of every layer; but for the rank, where ``recipe["layer_ranks"]`` says so.
        cache_numel_per_token, source_cache_numel_per_token: numbers cached per token, all layers.
        recipe: with the target ratio filled in.
        calibration_tokens: 0 when the recipe needs none.
        parity: source against the checkpoint read back from disk.
        layers: a row per layer: what ``parity`` says of it, the losses of its conversion, and its seconds.
        decode_backend: what will serve decoding on CUDA, by layers where they differ, and why it is no kernel.
        resumed_layers: how many of the layers an interrupted run had left.
        seconds: of the phases of this run (``prepare`` has the calibration text and the searches), and in total.
        peak_rss_bytes: largest resident memory of this process so far.
        weight_bytes: of the written tensors.
    """

    name: str
    source: str
    source_name: str
    destination: str
    model_type: str
    num_layers: int
    geometry: MLAGeometry
    cache_numel_per_token: int
    source_cache_numel_per_token: int
    recipe: dict[str, Any]
    calibration_tokens: int
    evaluation_text: str
    evaluation_length: int
    compute_dtype: str
    weights_dtype: str
    device: str
    parity: ParityReport
    layers: tuple[dict[str, Any], ...]
    decode_backend: str
    rope_note: str
    resumed_layers: int
    seconds: dict[str, float]
    peak_rss_bytes: int
    weight_bytes: int
    mha2mla_version: str

    @property
    def cache_ratio(self) -> float:
        """Cached numbers after / before."""
        return self.cache_numel_per_token / self.source_cache_numel_per_token

    def _ranks(self) -> str:
        ranks = [layer["kv_lora_rank"] for layer in self.layers]
        return f" with ranks {min(ranks)} to {max(ranks)} by layer" if len(set(ranks)) > 1 else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; errors by layer are in ``layers`` only."""
        parity = {key: value for key, value in self.parity.to_dict().items() if key != "layers"}
        values = {**vars(self), "geometry": self.geometry.to_dict(), "parity": parity, "layers": list(self.layers)}
        return {**values, "cache_ratio": self.cache_ratio}

    def __str__(self) -> str:
        parity, seconds = self.parity, ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items())
        return (
            f"{self.name}: {self.geometry}{self._ranks()}, cache {self.cache_ratio:.4f} of the source's; perplexity"
            f" {parity.perplexity_source:.3f} -> {parity.perplexity_converted:.3f} ({parity.perplexity_ratio:.4f} x),"
            f" KL {parity.kl:.3g}, top-1 agreement {parity.top1_agreement:.4f}, logits' relative error"
            f" {parity.logits_relative_error:.3g}; decode: {self.decode_backend}; peak memory"
            f" {self.peak_rss_bytes / 2**30:.2f} GiB; seconds: {seconds}"
        )


@dataclass(frozen=True)
class _Plan:
    """A conversion after all checks and before any work."""

    source: Path
    source_name: str
    destination: Path
    config: PreTrainedConfig
    adapter: FamilyAdapter
    spec: SourceSpec
    recipe: Recipe
    geometry: MLAGeometry
    geometries: tuple[MLAGeometry, ...] | None
    reader: CheckpointReader
    model: StreamedModel
    calibration: torch.Tensor | None
    evaluation: torch.Tensor
    evaluation_text: str
    device: torch.device
    compute_dtype: torch.dtype
    weights_dtype: torch.dtype | None
    spill_bytes: int
    max_shard_bytes: int
    progress: bool


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    calibration: str | torch.Tensor | None = None,
    evaluation: str | torch.Tensor = EVALUATION_TEXT,
    evaluation_tokens: int = EVALUATION_TOKENS,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
    resume: str = "auto",
    progress: bool = True,
    spill_bytes: int = SPILL_BYTES,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ConversionReport:
    """Converts an MHA/GQA checkpoint to MLA and proves what came out.

    Everything that can be refused is refused before any work. Layers are read, calibrated, converted and put on disk
    one at a time; the result is read back from a temporary folder, compared with the source on held-out text, and only
    then renamed. The source is never opened for writing.

    A run that was killed or interrupted leaves its finished layers beside the destination, and the same call goes on
    from there: activations are computed anew, and the weights are those of a run that nothing disturbed. An error
    leaves nothing.

    Args:
        source: Hugging Face folder, or hub id (downloaded by ``huggingface_hub``).
        destination: folder to create.
        recipe: what to do; default ``Recipe()``.
        calibration: overrides the recipe's text: a name for ``texts.load_text``, or token windows, int64 [windows,
            length].
        evaluation: held-out text or token windows of the comparison.
        evaluation_tokens: at most so many of that text.
        device: of the computation; default CUDA where there is one, else the CPU.
        dtype: of the written weights; default the source's own. ``inv_freq`` and the bias that conversion folds into
            ``o_proj`` stay float32: what the source adds in two places would lose its last bits in one.
        compute_dtype: of the layers that are run. Statistics and factorisations are float64.
        overwrite: replace an existing destination, after the new one is complete.
        resume: ``"auto"`` goes on from the layers of an interrupted run if recipe, source, calibration windows, dtypes,
            device, and the versions of this package and torch are the same, and refuses to lose them if one is not;
            ``"never"`` discards them.
        progress: show progress bars and the summary on standard error.
        spill_bytes: activations at a layer boundary go to disk when they are larger.
        max_shard_bytes: size of a weight file.

    Raises:
        UnsupportedSourceError: the source cannot be converted, by name.
        CheckpointError: the source is incomplete or damaged.
        DestinationError: the destination overlaps the source, exists, or cannot be written.
        ResumeError: an interrupted run of another conversion left finished layers.
        ParityError: a full-rank conversion is not the source to rounding.
        ValueError: any other argument, by name.

    Warns:
        UserWarning: on a GPU no kernel will serve a layer's geometry, with the limit that it exceeds.
    """
    started = time.perf_counter()
    if resume not in RESUME:
        raise ValueError(f"resume is {resume!r}; expected one of {', '.join(map(repr, RESUME))}")
    seconds: dict[str, float] = {}
    with _timed(seconds, "prepare"):
        plan = _check(
            source,
            destination,
            recipe if recipe is not None else Recipe(),
            calibration=calibration,
            evaluation=evaluation,
            evaluation_tokens=evaluation_tokens,
            device=device,
            dtype=dtype,
            compute_dtype=compute_dtype,
            overwrite=overwrite,
            progress=progress,
            spill_bytes=spill_bytes,
            max_shard_bytes=max_shard_bytes,
        )
    _warn_of_slow_layers(plan)
    fingerprint = _fingerprint(plan)
    admit = (lambda work: _has_layers(work, fingerprint)) if resume == "auto" else None
    with _interrupts_named(plan), temporary_folder(plan.destination, overwrite=overwrite, admit=admit) as folder:
        layers = FinishedLayers(folder / WORK_FOLDER, fingerprint)
        resumed = len(layers)
        with _timed(seconds, "convert"):
            _convert_layers(plan, folder, layers)
        with _timed(seconds, "write"):
            weight_bytes = _write_weights(plan, folder, layers)
            _write_companions(plan, folder)
        with _timed(seconds, "verify"):
            parity = _verify(plan, folder)
        seconds["total"] = time.perf_counter() - started
        report = _report(plan, parity, layers, resumed, seconds, weight_bytes)
        _write_report(plan, folder, report)
    if progress:
        tqdm.write(str(report), file=sys.stderr)
    return report


@contextmanager
def _interrupts_named(plan: _Plan) -> Iterator[None]:
    """Says after Ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        work = temporary_path(plan.destination) / WORK_FOLDER
        if plan.progress and work.is_dir():
            tqdm.write(f"finished layers are kept in {work}: the same command goes on from there", file=sys.stderr)
        raise


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def _check(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: Recipe,
    *,
    calibration: str | torch.Tensor | None,
    evaluation: str | torch.Tensor,
    evaluation_tokens: int,
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    compute_dtype: torch.dtype,
    overwrite: bool,
    progress: bool,
    spill_bytes: int,
    max_shard_bytes: int,
) -> _Plan:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe is a {type(recipe).__name__}; expected a Recipe")
    for name, value in (("dtype", dtype), ("compute_dtype", compute_dtype)):
        if value is None and name == "dtype":
            continue
        if not isinstance(value, torch.dtype) or not value.is_floating_point:
            raise ValueError(f"{name} is {value!r}; expected a floating-point torch.dtype")
    for name, size in (("spill_bytes", spill_bytes), ("max_shard_bytes", max_shard_bytes)):
        if size < 0:
            raise ValueError(f"{name} is {size}; expected a number of bytes")
    target = _device(device)
    folder = _source_folder(source)
    check_destination(Path(destination), folder, overwrite=overwrite)
    values = _read_config(folder)
    adapter = adapter_for(values)
    config = AutoConfig.from_pretrained(folder)
    spec = adapter.specify(config, longrope_table=recipe.longrope_table)
    searches = recipe.searches_rope_share
    geometry = None if searches else recipe.geometry(spec)
    reader = CheckpointReader(folder)
    model = StreamedModel(
        config,
        reader,
        spec.sliding_windows,
        device=target,
        dtype=compute_dtype,
        attn_implementation=REPEATABLE_ATTENTION,
    )
    _check_names(model, reader)
    windows = None
    measures_ranks = recipe.searches_layer_ranks
    if searches or measures_ranks or recipe.needs_calibration(geometry):
        windows = _windows(
            folder,
            spec,
            calibration if calibration is not None else recipe.calibration_text,
            "calibration",
            length=recipe.calibration_length,
            tokens=recipe.calibration_tokens,
            vocabulary=config.vocab_size,
            seed=recipe.seed,
            device=target,
            progress=progress,
        )
    held_out = _windows(
        folder,
        spec,
        evaluation,
        "evaluation",
        length=min(recipe.calibration_length, evaluation_tokens),
        tokens=evaluation_tokens,
        vocabulary=config.vocab_size,
        seed=None,
        device=target,
        progress=progress,
    )
    if searches:
        recipe = choose_rope_share(model, adapter, spec, recipe, windows, folder=Path(tempfile.gettempdir()))
        geometry = recipe.geometry(spec)
        if progress:
            tqdm.write(f"rope_share: {recipe.rope_share} loses least of {recipe.rope_search}", file=sys.stderr)
    if measures_ranks:
        recipe = choose_layer_ranks(
            model, adapter, spec, recipe, windows, folder=Path(tempfile.gettempdir()), progress=progress
        )
        if progress:
            tqdm.write(f"layer_ranks: {recipe.layer_ranks}", file=sys.stderr)
    return _Plan(
        source=folder,
        source_name=folder.name if Path(source).exists() else str(source),
        destination=Path(destination),
        config=config,
        adapter=adapter,
        spec=spec,
        recipe=recipe,
        geometry=geometry,
        geometries=recipe.geometries(spec),
        reader=reader,
        model=model,
        calibration=windows,
        evaluation=held_out,
        evaluation_text=evaluation if isinstance(evaluation, str) else "token windows of the caller",
        device=target,
        compute_dtype=compute_dtype,
        weights_dtype=dtype,
        spill_bytes=spill_bytes,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {str(device)!r}, which cannot be used here: {error}") from error
    return target


def _source_folder(source: str | os.PathLike[str]) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    name = str(source)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise CheckpointError(f"source {name!r} is no folder; expected a Hugging Face folder or a hub id OWNER/NAME")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Mistral's repositories hold the weights a second time, under names of another library.
        unread = ["*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "consolidated*"]
        return Path(snapshot_download(name, ignore_patterns=unread))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise CheckpointError(f"source {name!r} is no folder and cannot be fetched from the hub: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"source {str(folder)!r} has no config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values


def _check_names(model: StreamedModel, reader: CheckpointReader) -> None:
    """The source has every tensor of its model, in its shape, and none that would be lost."""
    shapes = model.stored.shapes
    missing = sorted(shapes.keys() - reader.names())
    if missing:
        raise CheckpointError(f"tensor {missing[0]} is absent from {reader.folder} ({len(missing)} absent in all)")
    tied = set(model.skeleton._tied_weights_keys or {})
    passed_over = {name for name in reader.names() if name in tied or name.endswith("rotary_emb.inv_freq")}
    extra = sorted(reader.names() - set(shapes) - passed_over)
    if extra:
        raise UnsupportedSourceError(
            f"tensor {extra[0]} of {reader.folder} is unknown to {type(model.skeleton).__name__}"
            f" ({len(extra)} unknown in all); the conversion would lose it"
        )
    for name in sorted(shapes):
        if reader.shape(name) != shapes[name]:
            raise CheckpointError(f"tensor {name} has shape {reader.shape(name)}; the config says {shapes[name]}")


def _windows(
    folder: Path,
    spec: SourceSpec,
    text: str | torch.Tensor,
    name: str,
    *,
    length: int,
    tokens: int,
    vocabulary: int,
    seed: int | None,
    device: torch.device,
    progress: bool,
) -> torch.Tensor:
    """Token windows of a text by name: drawn by ``seed`` for calibration, its first ones for the evaluation."""
    if isinstance(text, torch.Tensor):
        if text.dtype != torch.int64 or text.ndim != 2 or text.shape[0] < 1 or text.shape[1] < 2:
            raise ValueError(f"{name} is {text.dtype} {tuple(text.shape)}; expected int64 [windows >= 1, length >= 2]")
        windows = text
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"source {str(folder)!r} has no usable tokenizer, so {name} must be token windows: {error}"
            ) from error
        try:
            count = max(1, tokens // length)
            if seed is None:
                windows = token_windows(tokenizer, load_text(text), length, count)
            else:
                generate = generator_of(folder, tokenizer, length, seed=seed, device=device, progress=progress)
                windows = mixed_windows(tokenizer, text, length, count, seed=seed, generate=generate)
        except ValueError as error:
            raise ValueError(f"{name} {text!r}: {error}") from error
    if int(windows.min()) < 0 or int(windows.max()) >= vocabulary:
        raise ValueError(
            f"{name} has token {int(windows.max())}; expected tokens below vocab_size={vocabulary} of {spec.model_type}"
        )
    return windows.cpu()


def _batch(windows: torch.Tensor) -> int:
    return max(1, _BATCH_TOKENS // windows.shape[1])


def _fingerprint(plan: _Plan) -> dict[str, Any]:
    """All that the tensors of a converted layer depend on."""
    recipe = {key: value for key, value in plan.recipe.to_dict().items() if key not in ("preset", *RECORDS)}
    device = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else plan.device.type
    return {
        "recipe": recipe,
        "geometry": plan.geometry.to_dict(),
        "layer_ranks": None if plan.geometries is None else [each.kv_lora_rank for each in plan.geometries],
        "source": source_identity(plan.reader),
        "calibration": tensor_hash(plan.calibration),
        "device": device,
        "compute_dtype": str(plan.compute_dtype),
        "dtype": None if plan.weights_dtype is None else str(plan.weights_dtype),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "mha2mla": _version(),
        "code": code_hash(),
    }


def _has_layers(work: Path, fingerprint: dict[str, Any]) -> bool:
    try:
        return len(FinishedLayers(work, fingerprint)) > 0
    except ResumeError as error:
        hint = "repeat that conversion, or discard its layers with resume='never' (--resume never)"
        raise ResumeError(f"{error}: {hint}") from error


def _convert_layers(plan: _Plan, folder: Path, layers: FinishedLayers) -> None:
    """Converts the layers that are not in ``layers`` and puts them there, one by one."""
    count, done = plan.spec.num_layers, len(layers)
    if done and plan.progress:
        where = f"an interrupted conversion left in {layers.folder}"
        tqdm.write(f"going on after {done} of {count} layers that {where}", file=sys.stderr)
    for name in sorted(plan.model.expected_names()):
        if not name.startswith("model.layers."):  # read last, and a NaN there should not show after hours
            plan.reader.tensor(name)
    plan.reader.release()
    sequence = LayerSequence(
        plan.model,
        plan.adapter,
        plan.spec,
        plan.geometry,
        plan.recipe,
        plan.calibration,
        folder,
        weights_dtype=plan.weights_dtype,
        spill_bytes=plan.spill_bytes,
        geometries=plan.geometries,
        done=layers,
    )
    with tqdm(desc="convert", unit="layer", total=count, initial=done, disable=not plan.progress) as bar:
        for converted in sequence if done < count else ():
            record = {name: value for name, value in asdict(converted.record).items() if name != "layer"}
            layers.add(converted.layer, converted.tensors, record)
            bar.set_postfix({"s": f"{converted.record.seconds:.1f}"} | _losses(converted.record), refresh=False)
            bar.update()
    plan.reader.release()


def _losses(record: LayerRecord) -> dict[str, str]:
    if record.loss_after is None:
        return {}
    return {"loss": f"{record.loss_before:.3g} -> {record.loss_after:.3g}"}


def _write_weights(plan: _Plan, folder: Path, layers: FinishedLayers) -> int:
    """Streams every tensor to ``folder``: attention converted, all others copied. Returns their bytes."""
    writer = ShardedWriter(folder, max_shard_bytes=plan.max_shard_bytes)
    attention: set[str] = set()
    for layer in range(plan.spec.num_layers):
        attention |= set(plan.adapter.attention_names(plan.spec, layer).values())
    copied = sorted(plan.model.expected_names() - attention)
    for name in copied:
        if not name.startswith("model.layers."):
            _copy(plan, writer, name)
    for layer in range(plan.spec.num_layers):
        prefix = plan.adapter.layer_prefix(layer)
        for name in copied:
            if name.startswith(prefix):
                _copy(plan, writer, name)
        for name, tensor in layers[layer].items():
            writer.add(f"{prefix}self_attn.{name}", tensor)
        plan.reader.release()
    writer.finish()
    return writer.total_bytes


def _stored_dtype(plan: _Plan, name: str) -> torch.dtype:
    return plan.weights_dtype if plan.weights_dtype is not None else plan.reader.tensor(name).dtype


def _copy(plan: _Plan, writer: ShardedWriter, name: str) -> None:
    tensor = plan.reader.tensor(name)
    if plan.weights_dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(plan.weights_dtype)
    writer.add(name, tensor)


def _write_companions(plan: _Plan, folder: Path) -> None:
    """config.json, and everything that the source carries beside its weights."""
    from mha2mla.modeling import MHA2MLAForCausalLM

    for pattern in _COMPANIONS:
        for path in sorted(plan.source.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, folder / path.name)
    config = converted_config(plan.config, plan.spec, plan.geometry, plan.recipe, plan.geometries)
    config.recipe = _recorded_recipe(plan)
    config.dtype = _stored_dtype(plan, plan.adapter.attention_names(plan.spec, 0)["o_weight"])
    config.architectures = [MHA2MLAForCausalLM.__name__]
    config.save_pretrained(folder)


def _recorded_recipe(plan: _Plan) -> dict[str, Any]:
    """The recipe with the target that was meant, so that a later default does not change what it says."""
    return {**plan.recipe.to_dict(), "cache_ratio": plan.recipe.target_cache_ratio}


def _verify(plan: _Plan, folder: Path) -> ParityReport:
    """Reads ``folder`` back and compares it with the source.

    Raises:
        CheckpointError: the written names are not the model's.
        ParityError: full rank was asked for, and the logits differ by more than rounding.
    """
    config = AutoConfig.from_pretrained(folder)
    reader = CheckpointReader(folder)
    converted = StreamedModel(config, reader, plan.spec.sliding_windows, device=plan.device, dtype=plan.compute_dtype)
    if reader.names() != converted.expected_names():
        different = sorted(reader.names() ^ converted.expected_names())
        raise CheckpointError(f"written tensors are not the model's: {', '.join(different[:5])}")
    parity = compare(
        plan.model,
        converted,
        plan.evaluation,
        folder=folder,
        batch=_batch(plan.evaluation),
        spill_bytes=plan.spill_bytes,
        progress=plan.progress,
    )
    reader.release()
    if plan.recipe.is_exact(plan.geometry):
        tolerance = parity_tolerance(plan)
        # Written so that NaN fails.
        if not parity.logits_relative_error <= tolerance:
            raise ParityError(
                f"logits of the full-rank conversion differ from the source's by {parity.logits_relative_error:.3g}"
                f" (relative); expected at most {tolerance:.3g}"
            )
    return parity


def parity_tolerance(plan: _Plan) -> float:
    """Largest relative error of logits at full rank: 1e-4 in float32; a few roundings where numbers are narrower."""
    narrow = [plan.compute_dtype]
    if plan.weights_dtype is not None:
        narrow.append(plan.weights_dtype)
    source = _source_dtype(plan)
    narrow = [dtype for dtype in narrow if torch.finfo(dtype).eps > torch.finfo(source).eps or dtype is narrow[0]]
    return max([FULL_RANK_TOLERANCE] + [8 * torch.finfo(dtype).eps for dtype in narrow])


def _source_dtype(plan: _Plan) -> torch.dtype:
    return plan.reader.tensor(plan.adapter.attention_names(plan.spec, 0)["o_weight"]).dtype


def _report(
    plan: _Plan,
    parity: ParityReport,
    layers: FinishedLayers,
    resumed: int,
    seconds: dict[str, float],
    weight_bytes: int,
) -> ConversionReport:
    from mha2mla.modeling.served import describe

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    geometry, count = plan.geometry, plan.spec.num_layers
    geometries = plan.geometries or (geometry,) * count
    weights_dtype = plan.weights_dtype or _source_dtype(plan)
    return ConversionReport(
        name=plan.destination.resolve().name,
        source=str(plan.source),
        source_name=plan.source_name,
        destination=str(plan.destination),
        model_type=plan.spec.model_type,
        num_layers=count,
        geometry=geometry,
        cache_numel_per_token=sum(each.cache_numel_per_token for each in geometries),
        source_cache_numel_per_token=count * geometry.source_cache_numel_per_token,
        recipe=_recorded_recipe(plan),
        calibration_tokens=0 if plan.calibration is None else plan.calibration.numel(),
        evaluation_text=plan.evaluation_text,
        evaluation_length=plan.evaluation.shape[1],
        compute_dtype=str(plan.compute_dtype).removeprefix("torch."),
        weights_dtype=str(weights_dtype).removeprefix("torch."),
        device=str(plan.device),
        parity=parity,
        layers=tuple(
            {**asdict(layer), "kv_lora_rank": geometries[layer.layer].kv_lora_rank, **layers.record(layer.layer)}
            for layer in parity.layers
        ),
        decode_backend=f"on CUDA {describe(_what_serves(plan))}",
        rope_note=plan.spec.rope_note,
        resumed_layers=resumed,
        seconds=seconds,
        peak_rss_bytes=peak if sys.platform == "darwin" else peak * 1024,
        weight_bytes=weight_bytes,
        mha2mla_version=_version(),
    )


def _write_report(plan: _Plan, folder: Path, report: ConversionReport) -> None:
    """conversion.json, the model card, and its plot where matplotlib is installed."""
    from mha2mla.eval.environment import collect_environment, describe_environment
    from mha2mla.eval.inspection import RECORD_FILE
    from mha2mla.eval.report import write_json

    environment = collect_environment(plan.device.index or 0)
    values = report.to_dict()
    fields = {key: value for key, value in values.items() if key != "layers"}
    write_json(folder / RECORD_FILE, kind="conversion", rows=values["layers"], environment=environment, **fields)
    plot: str | None = PLOT_FILE
    try:
        plot_layers(values["layers"], folder / PLOT_FILE)
    except ImportError as error:
        plot = None
        if plan.progress:
            tqdm.write(f"the model card has no plot: {error}", file=sys.stderr)
    base_model = None if Path(report.source_name).exists() or "/" not in report.source_name else report.source_name
    card = model_card(
        values, base_model=base_model, plot=plot, record=RECORD_FILE, environment=describe_environment(environment)
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _what_serves(plan: _Plan) -> tuple[LayerAttention, ...]:
    """What will serve the layers on CUDA, where that is worth a question, in the 16 bits that kernels take."""
    from mha2mla.modeling import what_serves

    config = converted_config(plan.config, plan.spec, plan.geometry, plan.recipe, plan.geometries)
    written = plan.weights_dtype or _source_dtype(plan)
    half = written if written in (torch.bfloat16, torch.float16) else torch.bfloat16
    return what_serves(config, plan.device if plan.device.type == "cuda" else "cuda", half)


def _warn_of_slow_layers(plan: _Plan) -> None:
    layers = _what_serves(plan)
    slow = [layer for layer in layers if not layer.compiled]
    if slow:
        warnings.warn(
            f"no kernel will serve {len(slow)} of {len(layers)} converted layers on a GPU ({slow[0]}): {slow[0].why}; a"
            " smaller cache_ratio, or kv_lora_rank and qk_rope_head_dim, give a geometry that one serves"
            " (docs/limits.md)",
            stacklevel=3,
        )


def _version() -> str:
    try:
        return metadata.version("mha2mla")
    except metadata.PackageNotFoundError:
        return "(not installed)"
