"""``convert``: the stages in their order, and what holds around them — time, leftovers, faults of the source."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from mha2mla.checkpoints import CheckpointError
from mha2mla.conversion.calibration.blocks import SPILL_BYTES, Windows
from mha2mla.conversion.destination import (
    DEFAULT_SHARD_BYTES,
    WORK_FOLDER,
    check_destination,
    is_converted,
    temporary_folder,
)
from mha2mla.conversion.extension import CalibrationSource
from mha2mla.conversion.fit.reconstruction import ReconstructionError
from mha2mla.conversion.latent.codes import in_quantised_basis
from mha2mla.conversion.presets import PresetName, better_than
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.resume import FinishedLayers, WorkFolder, has_pieces
from mha2mla.conversion.source.files import check_unchanged, faults_of_the_source_named
from mha2mla.environment import compute_device, few_threads_beside
from mha2mla.pipeline.check import EVALUATION_TEXT, EVALUATION_TOKENS, Arguments, HeldOut, Plan, check, source_folder
from mha2mla.pipeline.prepare import layer_inputs, open_work, prepare
from mha2mla.pipeline.relayout import change_layout
from mha2mla.pipeline.report import (
    ConversionReport,
    make_report,
    note_on_prompts,
    note_on_steps,
    serving_on_cuda,
    write_report,
)
from mha2mla.pipeline.verify import ParityError, verify
from mha2mla.pipeline.write import convert_layers, write_config, write_weights
from mha2mla.terminal import split, whole_bar

MADE = "converted to Multi-head Latent Attention"


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: Recipe | Mapping[str, Any] | None = None,
    *,
    preset: PresetName | None = None,
    calibration: str | CalibrationSource | Windows | Mapping[str, Any] | None = None,
    evaluation: str | torch.Tensor = EVALUATION_TEXT,
    evaluation_tokens: int = EVALUATION_TOKENS,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    compute_dtype: str | torch.dtype = torch.float32,
    overwrite: bool = False,
    resume: Literal["auto", "never"] = "auto",
    progress: bool = True,
    spill_bytes: int = SPILL_BYTES,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    **recipe_keys: Any,
) -> ConversionReport:
    """Converts an MHA/GQA checkpoint to MLA and proves what came out.

    A checkpoint of this package that caches rotary keys is a source, too, for the recipe ``{"layout": "latent"}``: it
    becomes one that caches the latent alone, as many numbers, and is the same model to rounding.

    Everything that can be refused is refused before any work. Layers are read, calibrated, converted and put on disk
    one at a time; the result is read back from a temporary folder, compared with the source on held-out text, and only
    then renamed. The source is never opened for writing.

    A run that was killed, interrupted, or ended by an error leaves what it had finished (calibration text, measured
    ranks, layers) beside the destination, and the same call goes on from there: activations are computed anew, and the
    weights are those of a run that nothing disturbed. Where it had finished nothing, it leaves nothing. Text that the
    source wrote is kept in the cache folder for its other conversions.

    Args:
        source: Hugging Face folder, or hub id (downloaded by ``huggingface_hub``).
        destination: folder to create.
        recipe: a ``Recipe``, or a mapping of its keys, such as ``{"cache_ratio": 0.25}``; default half the cache.
        preset: of a recipe that names none; default "auto", the best that the device can run.
        calibration: overrides the recipe's text: a name for ``texts.load_text``, a ``CalibrationSource``, or token
            windows, int64 [windows, length], or one of these for each length. A mapping: keys of the recipe's stage of
            this name.
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
        progress: show progress bars and notes on standard error.
        spill_bytes: activations at a layer boundary go to disk when they are larger.
        max_shard_bytes: size of a weight file.
        recipe_keys: keys of the recipe, in place of a mapping or beside one: ``convert(source, destination,
            cache_ratio=0.5, layout="shared", fit={"steps": 8})``, or ``**{"fit.steps": 8}``.

    Raises:
        UnsupportedSourceError: the source cannot be converted, by name.
        CheckpointError: the source is incomplete or damaged.
        SourceChangedError: a file of the source changed meanwhile.
        DestinationError: the destination overlaps the source, exists, may not be replaced, or cannot be written.
        ResumeError: an interrupted run of another conversion, or of ``heal``, left what it had finished.
        ParityError: a full-rank conversion is not the source to rounding, or any conversion's predictions are further
            from the source's than a guess.
        ValueError: any other argument, by name.

    Warns:
        UserWarning: on a GPU no kernel will serve a layer's geometry, with the limit that it exceeds.
    """
    arguments = Arguments.with_keys(**locals())  # this function's own arguments so far
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    with _timed(seconds, "prepare"):
        recipe, why = Recipe.choose(arguments.recipe, compute_device(device).type)  # refused before a source is fetched
        if not os.path.isdir(arguments.source):  # before it is downloaded
            check_destination(arguments.destination, None, overwrite=overwrite)
        folder = source_folder(arguments.source)
    if is_converted(folder):
        return change_layout(arguments, folder, started)
    with _timed(seconds, "prepare"):
        plan = check(arguments, folder, recipe, why)
    for note in plan.notes:
        arguments.say(note)
    return _run(plan, started, seconds)


def _run(plan: Plan, started: float, seconds: dict[str, float]) -> ConversionReport:
    arguments, opened = plan.arguments, plan.opened
    with (
        temporary_folder(
            plan.destination,
            overwrite=arguments.overwrite,
            worth_keeping=has_pieces,
            discard=arguments.resume == "never",
        ) as folder,
        whole_bar("converting", show=arguments.progress) as bar,
        few_threads_beside(plan.model.device),
    ):
        checking, text, search, converting, basis, writing, verifying = split(
            bar, *stage_shares(plan.recipe, plan.held_out)
        )
        with _timed(seconds, "prepare"):
            opened.check_weights(progress=checking)
            weights, others = opened.identity()
            work = open_work(plan, folder / WORK_FOLDER, weights)
        files = {**weights, **others}
        with _leftovers_named(arguments, work), faults_of_the_source_named(plan.opened.folder, files, work.discard):
            with _timed(seconds, "prepare"), _overflow_named():
                prepared = prepare(plan, work, folder, files, text, search)
                config, device = prepared.config(), plan.model.device
                serving = serving_on_cuda(config, arguments.written_dtype(opened), device)
                write_config(arguments, opened, config, folder)
            layers = FinishedLayers(work, layer_inputs(prepared))
            resumed = len(layers)
            with _timed(seconds, "convert"), _overflow_named():
                convert_layers(prepared, layers, converting)
            with _timed(seconds, "write"):
                attention = in_quantised_basis(prepared.walk, layers.__getitem__, basis)
                replaced, writing_bar = opened.attention_names(), replace(arguments, progress=writing)
                written = write_weights(writing_bar, plan.model, folder, attention, replaced)
            with _timed(seconds, "verify"):
                check_unchanged(opened.folder, files)
                is_exact = all(each.is_full_rank for each in prepared.walk.geometries)
                exact = "the full-rank conversion" if is_exact else None
                parities = verify(
                    replace(arguments, progress=verifying), opened, plan.model, folder, plan.held_out, exact=exact
                )
            seconds["total"] = time.perf_counter() - started
            target, windows = plan.recipe.target, prepared.walk.windows
            report = make_report(
                *(arguments, opened, plan.model, config, serving, plan.held_out, parities, written),
                records=[layers.record(layer) for layer in layers],
                geometry=prepared.geometry,
                source_cache_numel_per_token=len(layers) * prepared.geometry.source_cache_numel_per_token,
                searches=prepared.searches,
                preset=plan.preset,
                better=better_than(plan.recipe.preset, target.layout, target.cache_ratio),
                calibration_tokens=0 if windows is None else windows.tokens.numel(),
                rope_note=plan.spec.rope_note,
                step_note=note_on_steps(config, prepared.geometry, plan.spec),
                prompt_note=note_on_prompts(opened.config, config, prepared.geometry, plan.spec),
                resumed_layers=resumed,
                seconds=seconds,
                source_sha256={name: each.sha256 for name, each in weights.items()},
            )
            write_report(arguments, device, folder, report, MADE)
    return report


def stage_shares(recipe: Recipe, held_out: Sequence[HeldOut]) -> tuple[float, ...]:
    """Shares of the time: checking, text, search for ranks, converting, basis of codes, writing, verifying.

    As measured on SmolLM2-135M: without gradient steps on two cores, with them on an H200.
    """
    searches, has_basis = recipe.searches_layer_ranks, recipe.latent.bits != 16
    if recipe.fit.steps:
        return 1, 3, 20 * searches, 75, 2 * has_basis, 1, 2
    verifying = 29 * sum(each.work for each in held_out) / 110e6  # 2,048 tokens in windows of 512, and one of 8,192
    return 0.2, 20, 175 * searches, 44, 8 * has_basis, 0.8, verifying


@contextmanager
def _leftovers_named(arguments: Arguments, work: WorkFolder) -> Iterator[None]:
    """Names the work that is kept after an interrupt or an error, and the command that resumes it."""
    try:
        yield
    except BaseException as error:
        if has_pieces(work.folder):
            if isinstance(error, ParityError):  # finished layers, which the same command would only judge again
                again = "resume='never' (--resume never) begins anew"
            elif arguments.resume == "never":
                again = "the same command without resume='never' (--resume never) goes on from there"
            else:
                again = "the same command goes on from there"
            arguments.say(f"what was finished is kept in {work.folder}: {again}")
        raise


@contextmanager
def _overflow_named() -> Iterator[None]:
    """Refuses weights that are finite one by one and give a layer that is not."""
    try:
        yield
    except ReconstructionError as error:
        raise CheckpointError(
            f"a layer's inputs, queries, keys or values are too large on the calibration text: {error}"
        ) from error


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
