"""convert = conversion + verification: check everything, write a temporary folder, read it back, compare, rename."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedConfig

from mha2mla.conversion.calibration.activations import SPILL_BYTES
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.calibration.lengths import (
    calibrated_length,
    calibration_lengths,
    check_length,
    nearest_length,
)
from mha2mla.conversion.calibration.windows import Windows, calibration_windows, evaluation_windows, listed
from mha2mla.conversion.families import FamilyAdapter, SourceSpec
from mha2mla.conversion.latent.ranks import choose_layer_ranks
from mha2mla.conversion.layer import converted_config
from mha2mla.conversion.layer_walk import LayerRecord, LayerWalk
from mha2mla.conversion.parity import ParityReport, compare
from mha2mla.conversion.presets import choose_preset
from mha2mla.conversion.recipe import RECORDS, Recipe
from mha2mla.conversion.result.card import PLOT_FILE, model_card
from mha2mla.conversion.result.destination import WORK_FOLDER, check_destination, temporary_folder, temporary_path
from mha2mla.conversion.result.plot import plot_layers
from mha2mla.conversion.result.writer import DEFAULT_SHARD_BYTES, ShardedWriter
from mha2mla.conversion.resume import (
    FinishedLayers,
    ResumeError,
    WorkFolder,
    code_hash,
    has_pieces,
    source_identity,
    tensor_hash,
)
from mha2mla.conversion.rope.share_search import choose_rope_share
from mha2mla.conversion.source.checkpoint import CheckpointError, CheckpointReader
from mha2mla.conversion.source.files import FileIdentity, SourceChangedError, check_unchanged, regular_file
from mha2mla.conversion.source.opening import Source, open_source
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.geometry import MLAGeometry
from mha2mla.texts import text_identity

if TYPE_CHECKING:
    from mha2mla.modeling import LayerAttention

FULL_RANK_TOLERANCE = 1e-4  # relative error of float32 logits
EVALUATION_TEXT = "builtin:prose"
EVALUATION_TOKENS = 2048
LONG_EVALUATION_TEXT = "builtin:stdlib"  # where windows must be longer than those tokens
RESUME = ("auto", "never")
_TEXT, _RECIPE = "text", "recipe"  # pieces of the work
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_KINDS = {
    **dict.fromkeys(("source", "destination"), "a path"),
    **dict.fromkeys(("evaluation", "calibration"), "the name of a text or token windows"),
    **dict.fromkeys(("overwrite", "progress"), "True or False"),
}


class ParityError(ValueError):
    """A conversion that must be exact is not, or one that must resemble its source does not at all; nothing was
    written under the destination's name."""


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
        preset: which one, why, what would be better, and the keys that were changed from it.
        calibration_tokens: 0 when the recipe needs none.
        calibrated_length: of the longest sequence that the conversion was made for; None where nothing bounds it.
        parity: source against the checkpoint read back from disk.
        long_evaluation_text, long_evaluation_length, long_parity: the same in one window of the longest length that was
            calibrated; None where that is no longer, or the caller gave token windows.
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
    preset: str
    calibration_tokens: int
    calibrated_length: int | None
    evaluation_text: str
    evaluation_length: int
    compute_dtype: str
    weights_dtype: str
    device: str
    parity: ParityReport
    long_evaluation_text: str
    long_evaluation_length: int | None
    long_parity: ParityReport | None
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

    def _long_ratio(self) -> str:
        if self.long_parity is None:
            return ""
        return f", {self.long_parity.perplexity_ratio:.4f} x at {self.long_evaluation_length}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; errors by layer are in ``layers`` only."""
        parity, long_parity = (
            each and {key: value for key, value in each.to_dict().items() if key != "layers"}
            for each in (self.parity, self.long_parity)
        )
        values = {**vars(self), "geometry": self.geometry.to_dict(), "layers": list(self.layers)}
        values |= {"parity": parity, "long_parity": long_parity}
        return {**values, "cache_ratio": self.cache_ratio}

    def __str__(self) -> str:
        parity, seconds = self.parity, ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items())
        return (
            f"{self.name}: {self.geometry}{self._ranks()}, cache {self.cache_ratio:.4f} of the source's; perplexity"
            f" {parity.perplexity_source:.3f} -> {parity.perplexity_converted:.3f} ({parity.perplexity_ratio:.4f} x at"
            f" {self.evaluation_length} tokens{self._long_ratio()}),"
            f" KL {parity.kl:.3g}, top-1 agreement {parity.top1_agreement:.4f}, logits' relative error"
            f" {parity.logits_relative_error:.3g}; decode: {self.decode_backend}; peak memory"
            f" {self.peak_rss_bytes / 2**30:.2f} GiB; seconds: {seconds}; preset: {self.preset}"
        )


@dataclass(frozen=True)
class _Plan:
    """A conversion after all checks and before any work; ``_prepare`` fills in what takes work to find out."""

    opened: Source
    source_name: str
    destination: Path
    recipe: Recipe
    preset: str
    geometry: MLAGeometry | None
    geometries: tuple[MLAGeometry, ...] | None
    model: StreamedModel
    calibration_text: str | Windows | None
    lengths: tuple[int, ...]
    calibration: TokenBlocks | None
    evaluation: torch.Tensor
    evaluation_text: str
    long_evaluation: torch.Tensor | None
    long_evaluation_text: str
    device: torch.device
    compute_dtype: torch.dtype
    weights_dtype: torch.dtype | None
    spill_bytes: int
    max_shard_bytes: int
    progress: bool
    notes: tuple[str, ...]  # for people, once, before any work

    @property
    def calibrated_length(self) -> int | None:
        lengths = () if self.calibration is None else self.calibration.window_lengths
        return calibrated_length(self.spec, lengths)

    @property
    def source(self) -> Path:
        return self.opened.folder

    @property
    def config(self) -> PreTrainedConfig:
        return self.opened.config

    @property
    def adapter(self) -> FamilyAdapter:
        return self.opened.adapter

    @property
    def spec(self) -> SourceSpec:
        return self.opened.spec

    @property
    def reader(self) -> CheckpointReader:
        return self.opened.reader

    def say(self, text: str) -> None:
        """On standard error, where there is one: nobody's listening is no reason to lose a conversion."""
        if self.progress:
            with suppress(OSError, ValueError, AttributeError):
                tqdm.write(text, file=sys.stderr)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: Recipe | Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    calibration: str | Windows | None = None,
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

    A run that was killed, interrupted, or ended by an error leaves what it had finished (calibration text, measured
    ranks, layers) beside the destination, and the same call goes on from there: activations are computed anew, and the
    weights are those of a run that nothing disturbed. Where it had finished nothing, it leaves nothing.

    Args:
        source: Hugging Face folder, or hub id (downloaded by ``huggingface_hub``).
        destination: folder to create.
        recipe: what to do, or a mapping of its keys; default ``Recipe()``: half the cache, by the best preset that the
            device can run.
        preset: of a recipe that names none.
        calibration: overrides the recipe's text: a name for ``texts.load_text``, or token windows, int64 [windows,
            length], or one of these for each length.
        evaluation: held-out text or token windows of the comparison.
        evaluation_tokens: at most so many of that text.
        device: of the computation; default CUDA where there is one, else the CPU.
        dtype: of the written weights; default the source's own. ``inv_freq`` and the bias that conversion folds into
            ``o_proj`` stay float32: what the source adds in two places would lose its last bits in one.
        compute_dtype: of the layers that are run. Statistics and factorisations are float64.
        overwrite: replace a destination that is empty or a converted checkpoint, after the new one is complete.
        resume: ``"auto"`` goes on from what an interrupted run finished if recipe, source, calibration text, dtypes,
            device, and the versions of this package and torch are the same, and refuses to lose layers if one is not;
            ``"never"`` discards it.
        progress: show progress bars and the summary on standard error.
        spill_bytes: activations at a layer boundary go to disk when they are larger.
        max_shard_bytes: size of a weight file.

    Raises:
        UnsupportedSourceError: the source cannot be converted, by name.
        CheckpointError: the source is incomplete or damaged.
        SourceChangedError: a file of the source changed meanwhile.
        DestinationError: the destination overlaps the source, exists, may not be replaced, or cannot be written.
        ResumeError: an interrupted run of another conversion left finished layers.
        ParityError: a full-rank conversion is not the source to rounding, or any conversion's predictions are further
            from the source's than a guess.
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
            _asked(recipe, preset),
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
    for note in plan.notes:
        plan.say(note)
    with (
        _leftovers_named(plan),
        temporary_folder(plan.destination, overwrite=overwrite, worth_keeping=has_pieces) as folder,
    ):
        with _timed(seconds, "prepare"):
            plan.opened.check_weights(progress=progress)
            weights, others = plan.opened.identity()
            work = _open_work(plan, folder / WORK_FOLDER, weights, resume)
        with _faults_of_the_source_named(plan, {**weights, **others}, work):
            with _timed(seconds, "prepare"), _degenerate_named():
                plan = _prepare(plan, work, folder)
                _warn_of_slow_layers(plan)
            layers = FinishedLayers(work, _inputs_of_layers(plan))
            resumed = len(layers)
            with _timed(seconds, "convert"), _degenerate_named():
                _convert_layers(plan, folder, layers)
            with _timed(seconds, "write"):
                weight_bytes = _write_weights(plan, folder, layers)
                _write_companions(plan, folder)
            with _timed(seconds, "verify"):
                check_unchanged(plan.source, {**weights, **others})
                parity, long_parity = _verify(plan, folder)
            seconds["total"] = time.perf_counter() - started
            report = _report(plan, parity, long_parity, layers, resumed, seconds, weight_bytes)
            _write_report(plan, folder, report)
            check_unchanged(plan.source, {**weights, **others})
    plan.say(str(report))
    return report


@contextmanager
def _leftovers_named(plan: _Plan) -> Iterator[None]:
    """Says after an interrupt or an error how to go on."""
    try:
        yield
    except BaseException:
        work = temporary_path(plan.destination) / WORK_FOLDER
        if has_pieces(work):
            plan.say(f"what was finished is kept in {work}: the same command goes on from there")
        raise


@contextmanager
def _faults_of_the_source_named(plan: _Plan, files: dict[str, FileIdentity], work: WorkFolder) -> Iterator[None]:
    """Whatever a source that changes does to a conversion is said to be its doing, and nothing of that is kept."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ParityError | SourceChangedError):
            work.discard()
        if not isinstance(error, SourceChangedError):
            try:
                check_unchanged(plan.source, files)
            except SourceChangedError as changed:
                work.discard()
                raise changed from error
        raise


@contextmanager
def _degenerate_named() -> Iterator[None]:
    """Weights may be numbers one by one and no model together."""
    try:
        yield
    except torch.linalg.LinAlgError as error:
        raise CheckpointError(
            "a layer's inputs, queries, keys or values are zero or too large everywhere on the calibration text:"
            f" nothing can be fitted to them ({error})"
        ) from error


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


def _asked(recipe: Recipe | Mapping[str, Any] | None, preset: str | None) -> Recipe:
    """The recipe of ``convert``'s two arguments; its preset may still be ``"auto"``."""
    if recipe is None or isinstance(recipe, Mapping):
        recipe = Recipe.from_dict(recipe or {})
    elif not isinstance(recipe, Recipe):
        raise ValueError(f"recipe is a {type(recipe).__name__}; expected a Recipe or a mapping of its keys")
    return recipe if preset is None else recipe.with_preset(preset)


def _check(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: Recipe,
    *,
    calibration: str | Windows | None,
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
    for name, value in (("dtype", dtype), ("compute_dtype", compute_dtype)):
        if value is None and name == "dtype":
            continue
        if value not in _DTYPES:
            raise ValueError(f"{name} is {value!r:.80}; expected one of {', '.join(map(str, _DTYPES))}")
    sizes = (("spill_bytes", spill_bytes, 0), ("max_shard_bytes", max_shard_bytes, 0))
    for name, value, least in (*sizes, ("evaluation_tokens", evaluation_tokens, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r:.80}; expected an int of at least {least}")
    for name, value, kinds in (
        ("source", source, (str, os.PathLike)),
        ("destination", destination, (str, os.PathLike)),
        ("evaluation", evaluation, (str, os.PathLike, torch.Tensor)),
        ("calibration", calibration, (str, os.PathLike, torch.Tensor, list, tuple, type(None))),
        ("overwrite", overwrite, bool),
        ("progress", progress, bool),
    ):
        if not isinstance(value, kinds):
            raise ValueError(f"{name} is {value!r:.80}; expected {_KINDS[name]}")
    target = _device(device)
    choice = choose_preset(recipe.preset, recipe.given(), target.type)
    recipe = recipe.with_preset(choice.preset)
    changed = ", ".join(f"{name}={value!r}" for name, value in recipe.changes().items())
    notes = [f"preset: {choice.reason}"]
    folder = _source_folder(source)
    check_destination(destination, folder, overwrite=overwrite)
    opened = open_source(folder, longrope_table=recipe.longrope_table)
    spec = opened.spec
    geometry = None if recipe.searches_rope_share else recipe.geometry(spec)
    geometries = None if geometry is None or recipe.searches_layer_ranks else recipe.geometries(spec)
    model = opened.model(target, compute_dtype)
    text = None
    if geometry is None or recipe.searches_layer_ranks or recipe.needs_calibration(geometry):
        text = calibration if calibration is not None else recipe.calibration_text
    if text is None or isinstance(text, str):
        asked = recipe.calibration_length if text is not None else "auto"
        lengths = calibration_lengths(spec, asked, getattr(opened.config, "max_position_embeddings", None))
    else:
        lengths = tuple(sorted({windows.shape[-1] for windows in listed(text)}))
    for name, given in (("calibration", text), ("evaluation", evaluation)):
        for windows in () if given is None or isinstance(given, str) else listed(given):
            if windows.ndim == 2:  # others are refused where they are read
                check_length(spec, windows.shape[1], f"{name} has windows of {windows.shape[1]} tokens")
    evaluation_length = nearest_length(spec, min(lengths[0], evaluation_tokens))
    if evaluation == EVALUATION_TEXT and evaluation_length > EVALUATION_TOKENS:
        evaluation = LONG_EVALUATION_TEXT
    held_out = evaluation_windows(opened, evaluation, length=evaluation_length, tokens=evaluation_tokens)
    long_text = LONG_EVALUATION_TEXT if evaluation == EVALUATION_TEXT else evaluation
    long_held_out = None
    if text is not None and isinstance(long_text, str) and lengths[-1] > evaluation_length:
        try:
            long_held_out = evaluation_windows(opened, long_text, length=lengths[-1], tokens=lengths[-1])
        except ValueError as error:  # long enough for short windows, and no reason to refuse a conversion
            notes.append(f"not compared with the source in a window of {lengths[-1]} tokens: {error}")
    return _Plan(
        opened=opened,
        source_name=folder.name if Path(source).exists() else str(source),
        destination=Path(destination),
        recipe=recipe,
        preset=choice.reason + (f"; with {changed}" if changed else ""),
        geometry=geometry,
        geometries=geometries,
        model=model,
        calibration_text=text,
        lengths=lengths,
        calibration=None,
        evaluation=held_out,
        evaluation_text=evaluation if isinstance(evaluation, str) else "token windows of the caller",
        long_evaluation=long_held_out,
        long_evaluation_text=long_text if isinstance(long_text, str) else "",
        device=target,
        compute_dtype=compute_dtype,
        weights_dtype=dtype,
        spill_bytes=spill_bytes,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
        notes=tuple(notes),
    )


def _prepare(plan: _Plan, work: WorkFolder, folder: Path) -> _Plan:
    """Finds out what layers depend on, or takes it from ``work``: calibration windows, and what a recipe left open."""
    if plan.calibration_text is None:
        return plan
    saved = work.get(_TEXT)
    if saved is None:
        windows = calibration_windows(
            plan.opened,
            plan.calibration_text,
            lengths=plan.lengths,
            tokens=plan.recipe.calibration_tokens,
            seed=plan.recipe.seed,
            device=plan.device,
            progress=plan.progress,
        )
        work.put(_TEXT, {"windows": windows.tokens}, {"lengths": windows.lengths})
    else:
        windows = TokenBlocks(saved[0]["windows"], tuple(saved[1]["lengths"]))
    recipe = _searched(plan, windows, work, folder)
    geometry = recipe.geometry(plan.spec)
    return replace(plan, recipe=recipe, geometry=geometry, geometries=recipe.geometries(plan.spec), calibration=windows)


def _searched(plan: _Plan, windows: TokenBlocks, work: WorkFolder, folder: Path) -> Recipe:
    """The recipe with what it leaves to a search; ``work`` has it after that."""
    recipe, text = plan.recipe, tensor_hash(windows.tokens)
    if not (recipe.searches_rope_share or recipe.searches_layer_ranks):
        return recipe
    saved = work.get(_RECIPE)
    if saved is not None and saved[1]["calibration"] == text:
        return Recipe.from_dict(saved[1]["recipe"])
    arguments = (plan.model, plan.adapter, plan.spec)
    if recipe.searches_rope_share:
        recipe = choose_rope_share(*arguments, recipe, windows, folder=folder, spill_bytes=plan.spill_bytes)
        plan.say(f"rope_share: {recipe.rope_share} loses least of {recipe.rope_search}")
    if recipe.searches_layer_ranks:
        recipe = choose_layer_ranks(
            *arguments, recipe, windows, folder=folder, spill_bytes=plan.spill_bytes, progress=plan.progress
        )
        plan.say(f"layer_ranks: {recipe.layer_ranks}")
    work.put(_RECIPE, {}, {"calibration": text, "recipe": recipe.to_dict()})
    return recipe


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device is {str(device)!r:.80}, which cannot be used here: {error}") from error
    if target.type == "meta":
        raise ValueError("device is 'meta', which computes nothing; expected cpu or cuda")
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


def _open_work(plan: _Plan, folder: Path, weights: dict[str, FileIdentity], resume: str) -> WorkFolder:
    try:
        work = WorkFolder(folder, _request(plan, weights), resume=resume == "auto")
    except ResumeError as error:
        hint = "repeat that conversion, or discard its layers with resume='never' (--resume never)"
        raise ResumeError(f"{error}: {hint}") from error
    if work.damaged:
        plan.say(f"{', '.join(work.damaged)} in {folder} were damaged and are made anew")
    return work


def _request(plan: _Plan, weights: dict[str, FileIdentity]) -> dict[str, Any]:
    """All that the tensors of a converted layer depend on, as far as it is known before any work."""
    return {
        "recipe": {key: value for key, value in plan.recipe.to_dict().items() if key not in ("preset", *RECORDS)},
        "source": source_identity(weights),
        "calibration": _text_identity(plan.calibration_text),
        "device": _device_name(plan.device),
        "compute_dtype": str(plan.compute_dtype),
        "dtype": None if plan.weights_dtype is None else str(plan.weights_dtype),
        "python": platform.python_version(),  # texts come with it
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "mha2mla": _version(),
        "code": code_hash(),
    }


def _text_identity(text: str | Windows | None) -> str | None:
    if text is None:
        return None
    if not isinstance(text, str):
        return "+".join(map(tensor_hash, listed(text)))
    try:
        return text_identity(text)
    except ValueError as error:
        raise ValueError(f"calibration {text!r}: {error}") from error


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _inputs_of_layers(plan: _Plan) -> dict[str, Any]:
    """What was found out on the way, beside the request."""
    ranks = None if plan.geometries is None else [each.kv_lora_rank for each in plan.geometries]
    tokens = None if plan.calibration is None else plan.calibration.tokens
    return {"geometry": plan.geometry.to_dict(), "layer_ranks": ranks, "calibration": tensor_hash(tokens)}


def _convert_layers(plan: _Plan, folder: Path, layers: FinishedLayers) -> None:
    """Converts the layers that are not in ``layers`` and puts them there, one by one."""
    count, done = plan.spec.num_layers, len(layers)
    if done:
        plan.say(f"going on after {done} of {count} layers that an interrupted conversion left in {layers.work.folder}")
    sequence = LayerWalk(
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

    for name in plan.opened.companions:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(regular_file(plan.source, name), folder / name)
    config = converted_config(plan.config, plan.spec, plan.geometry, plan.recipe, plan.geometries)
    config.recipe = _recorded_recipe(plan)
    config.calibrated_length = plan.calibrated_length
    config.dtype = _stored_dtype(plan, plan.adapter.attention_names(plan.spec, 0)["o_weight"])
    config.architectures = [MHA2MLAForCausalLM.__name__]
    config.save_pretrained(folder)


def _recorded_recipe(plan: _Plan) -> dict[str, Any]:
    """The recipe with the target that was meant, so that a later default does not change what it says."""
    return {**plan.recipe.to_dict(), "cache_ratio": plan.recipe.target_cache_ratio}


def _verify(plan: _Plan, folder: Path) -> tuple[ParityReport, ParityReport | None]:
    """Reads ``folder`` back and compares it with the source, in short windows by layer and in one long window.

    Raises:
        CheckpointError: the written names are not the model's.
        ParityError: full rank was asked for, and the logits differ by more than rounding; or the predictions are
            further from the source's than a guess.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    reader = CheckpointReader(folder)
    converted = StreamedModel(config, reader, plan.spec.sliding_windows, device=plan.device, dtype=plan.compute_dtype)
    if reader.names() != converted.expected_names():
        different = sorted(reader.names() ^ converted.expected_names())
        raise CheckpointError(f"written tensors are not the model's: {', '.join(different[:5])}")
    compared = partial(
        compare, plan.model, converted, folder=folder, spill_bytes=plan.spill_bytes, progress=plan.progress
    )
    parity = compared(plan.evaluation)
    long_parity = None if plan.long_evaluation is None else compared(plan.long_evaluation, by_layer=False)
    reader.release()
    if plan.recipe.is_exact(plan.geometry):
        tolerance = parity_tolerance(plan)
        # Written so that NaN fails.
        if not parity.logits_relative_error <= tolerance:
            raise ParityError(
                f"logits of the full-rank conversion differ from the source's by {parity.logits_relative_error:.3g}"
                f" (relative); expected at most {tolerance:.3g}"
            )
    guess = math.log(plan.model.vocab_size)
    for measured in (parity, long_parity):
        if measured is not None and not measured.kl <= guess:
            raise ParityError(
                f"the converted model's predictions are {measured.kl:.3g} nats a token from the source's (KL); expected"
                f" at most {guess:.3g}, as far as a guess among {plan.model.vocab_size} tokens can be from certainty"
            )
    return parity, long_parity


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
    long_parity: ParityReport | None,
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
        preset=plan.preset,
        calibration_tokens=0 if plan.calibration is None else plan.calibration.tokens.numel(),
        calibrated_length=plan.calibrated_length,
        evaluation_text=plan.evaluation_text,
        evaluation_length=plan.evaluation.shape[1],
        compute_dtype=str(plan.compute_dtype).removeprefix("torch."),
        weights_dtype=str(weights_dtype).removeprefix("torch."),
        device=str(plan.device),
        parity=parity,
        long_evaluation_text=plan.long_evaluation_text,
        long_evaluation_length=None if long_parity is None else plan.long_evaluation.shape[1],
        long_parity=long_parity,
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
    from mha2mla.environment import collect_environment, describe_environment
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
        plan.say(f"the model card has no plot: {error}")
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
