"""``heal``: check, text, training, writing, comparison, in this order; a run that was cut off goes on."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from mha2mla.checkpoints import check_path, find_converted
from mha2mla.conversion.calibration.blocks import TokenBlocks, Windows, check_length, listed, nearest_length
from mha2mla.conversion.calibration.texts import check_text, recorded_name
from mha2mla.conversion.calibration.windows import checked_windows
from mha2mla.conversion.destination import WORK_FOLDER, check_destination, temporary_folder
from mha2mla.conversion.parity import ParityReport, compare
from mha2mla.conversion.resume import (
    REQUEST_FILE,
    ResumeError,
    WorkFolder,
    code_hash,
    differences,
    has_pieces,
    read_request,
    tensor_hash,
)
from mha2mla.conversion.source.files import check_unchanged, faults_of_the_source_named
from mha2mla.conversion.source.opening import OpenedFolder, Source, open_converted, open_source
from mha2mla.environment import (
    collect_environment,
    compute_device,
    device_name,
    installed_version,
    named_dtype,
    process_count,
)
from mha2mla.files import CURVE, atomic_write, output_file
from mha2mla.healing.distillation import Distillation
from mha2mla.healing.memory import fit_memory
from mha2mla.healing.rate import first_steps, measured_rate
from mha2mla.healing.record import OWN_WINDOWS, HealingReport, check_pair, write_healed, write_record
from mha2mla.healing.settings import DEFAULT_TEXT, FEWEST_STEPS, PresetName, Settings
from mha2mla.healing.student import Models, is_sharded, load_models
from mha2mla.healing.text import describe_text, hold_out, source_perplexity, text_name, training_text, with_own_windows
from mha2mla.healing.training import last_checkpoint, tokens_in, train
from mha2mla.modeling.families import FAMILIES
from mha2mla.pipeline.check import EVALUATION_TEXT, EVALUATION_TOKENS, LONG_EVALUATION_TEXT, HeldOut, source_folder
from mha2mla.pipeline.sizing import recognize_gpu
from mha2mla.terminal import announce, waiting

T = TypeVar("T")


class Processes:
    """Runs work in the main process alone and shares its results.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_main, self._several = True, process_count() > 1
        if self._several:
            from accelerate import PartialState

            # NCCL's ten minutes are too few: the others wait while the main process writes text and compares
            state = PartialState(cpu=device.type == "cpu", timeout=timedelta(days=1))
            self.is_main = state.is_main_process

    def share(self, make: Callable[[], T]) -> T:
        """``make()`` of the main process, in all of them; so is its error."""
        if not self._several:
            return make()
        made: list[tuple[T | None, Exception | None]] = [(None, None)]
        if self.is_main:
            try:
                made = [(make(), None)]
            except Exception as error:
                made = [(None, error)]
        torch.distributed.broadcast_object_list(made, src=0)
        value, error = made[0]
        if error is not None:
            raise error
        return value


_EVALUATION_LENGTH = 512
_PIECES, _CHECKPOINTS, _PLAN, _FIRST_STEPS, _MEMORY = "pieces", "checkpoints", "plan", "first-steps", "memory"


def heal(
    source: str | os.PathLike[str],
    converted: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    preset: PresetName = "standard",
    text: str | Windows = DEFAULT_TEXT,
    token_weights: Tensor | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    resume: Literal["auto", "never"] = "auto",
    log: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **settings: Any,
) -> HealingReport:
    """Trains a converted checkpoint towards its source: KL to the source's full logits, the source running beside it.

    Nothing of ``source`` and ``converted`` is written to. The result appears whole or not at all, is read back from
    disk and compared with the source on the texts of the conversion's record, whose own figures stay apart. After a
    kill, an interrupt or an error the same call goes on from the last checkpoint and ends with the same weights.

    Args:
        source, converted: folders or hub ids of a source and a conversion of it.
        destination: folder to create.
        preset: "quick", "standard" or "long", by time: 5, 15 and 480 minutes of training.
        text: to train on: ``"generated-diverse"`` or ``"generated"``, which the source writes at temperature 1, names
            of texts or files, or these joined by ``+``; or token windows, int64 [windows, length], one tensor for each
            length.
        token_weights: [windows, length] beside one tensor of windows: weights of the tokens' losses, of held-out ones,
            too; 0 masks one; only their ratios count. Not beside ``own_share``.
        device: default CUDA where there is one; of several GPUs the first that is visible.
        dtype: of the written weights; default those of ``converted``. Training keeps them in float32.
        overwrite: replace a destination that is empty or a converted checkpoint, after the new one is complete.
        resume: "auto" goes on from what an interrupted run of the same healing left; "never" discards it.
        log: JSON file that has the curve of the losses so far, after every evaluation; outside the three folders, and
            a file that is there is replaced if it is such a curve.
        progress: bars on standard error.
        settings: of :class:`~mha2mla.healing.settings.Settings`, such as ``minutes=15`` or ``train="lora"``.

    Raises:
        ValueError: a bad setting, text, device or log, or a launcher's choice for FSDP, by name; the loss became NaN.
        CheckpointError: ``converted`` is no conversion of ``source``; or either is damaged, or changes meanwhile.
        DestinationError: the destination cannot be written or may not be replaced.
        ResumeError: an interrupted healing with other settings, or another interrupted command's files, lie there.
        ImportError: adapters are asked for and PEFT is not installed.
    """
    started = time.perf_counter()
    if resume not in ("auto", "never"):
        raise ValueError(f"resume is {resume!r:.80}; expected 'auto' or 'never'")
    check_path(source, "source")
    check_path(converted, "converted")
    check_path(destination, "destination", "a folder to make")
    source, converted, destination = map(os.path.expanduser, (source, converted, destination))
    if dtype is not None:
        dtype = named_dtype(dtype)
    place = _device(device)
    if isinstance(text, str):
        check_text(text)
    elif not isinstance(text, Tensor) and not (isinstance(text, Sequence) and text):
        raise ValueError(f"text is {text!r:.80}; expected the name of a text, or one window of tokens at least")
    opened_source, opened = _open(source, converted)
    if isinstance(text, Tensor):
        text = checked_windows(text, "text", opened_source)
    elif not isinstance(text, str):
        text = [checked_windows(part, "text", opened_source) for part in text]
    chosen, sharded = _settings(preset, settings, opened_source, text), is_sharded()
    weights = _weights(token_weights, text)
    if weights is not None and chosen.own_share:
        raise ValueError(f"own_share is {chosen.own_share} beside token_weights; expected 0: own text has no weights")
    if not isinstance(text, str):  # before models are loaded and timed
        _divided(weights, len(hold_out(TokenBlocks.of(text))[0]))
    for folder in (opened_source.folder, opened.folder):
        check_destination(destination, folder, overwrite=overwrite)
    curve = output_file(log, CURVE, opened_source.folder, opened.folder, name="log", made=destination)
    final = Path(destination)
    processes = Processes(place)
    with ExitStack() as stack:
        held = temporary_folder(final, overwrite=overwrite, worth_keeping=_has_work, discard=resume == "never")
        folder = processes.share(lambda: stack.enter_context(held))
        work, checkpoints = folder / WORK_FOLDER, folder / WORK_FOLDER / _CHECKPOINTS
        stack.enter_context(_leftovers_named(work, resume, show=progress and processes.is_main))
        weight_files, others = opened_source.identity()
        converted_files, converted_others = opened.identity()
        files, of_converted = {**weight_files, **others}, {**converted_files, **converted_others}
        record = check_pair(opened_source, opened, weight_files)
        compared = _compared_texts(opened_source, record)
        digests = {name: each.sha256 for name, each in files.items()}
        request = {
            "source": digests,
            "converted": {name: each.sha256 for name, each in converted_files.items()},
            "settings": asdict(chosen),
            "text": text_name(text),
            "token_weights": None if weights is None else tensor_hash(weights),
            "device": device_name(place),
            "processes": process_count(),
            "fsdp": sharded,
            "versions": {name: installed_version(name) for name in ("mha2mla", "torch", "transformers", "accelerate")},
            "code": code_hash("healing", "kernels/row_codes/api.py"),
        }
        with (
            faults_of_the_source_named(opened_source.folder, files),
            faults_of_the_source_named(opened.folder, of_converted),
        ):
            pieces = processes.share(lambda: _open_work(work, request, resume))
            models = load_models(opened_source.folder, opened.folder, place, chosen)
            distillation = Distillation(models, torch.bfloat16 if place.type == "cuda" else None)
            own_gpu, did_recompute = place.type == "cuda" and not sharded, models.recomputes
            if own_gpu:
                at_once, recomputes = processes.share(lambda: _memory(chosen, distillation, models, pieces, progress))
                if recomputes and not models.recomputes:  # found by another process or run
                    models.recompute()
                found = at_once, recomputes
                if found != (chosen.tokens_at_once, did_recompute) and progress and processes.is_main:
                    how = "" if recomputes == did_recompute else ", and activations are recomputed, which is slower"
                    announce(f"passes of {at_once:,} tokens{how}: larger ones do not fit the GPU's memory")
                chosen = replace(chosen, tokens_at_once=at_once)
            if chosen.compile == "always" or (chosen.compile == "auto" and own_gpu and not models.recomputes):
                distillation.compile_layers()
            tokens = processes.share(lambda: _budget(chosen, distillation, opened_source, pieces, progress))
            fewest = FEWEST_STEPS if settings.get("batch_tokens") is None else 1
            chosen = chosen.of_enough_steps(tokens // request["processes"], fewest)
            text_started = time.perf_counter()
            blocks = processes.share(
                lambda: training_text(
                    opened_source, text, chosen, min(tokens, chosen.text_tokens), place,
                    digests=digests, work=pieces, progress=progress,
                )
            )  # fmt: skip
            if chosen.own_share:
                blocks = processes.share(
                    lambda: with_own_windows(
                        blocks, opened.folder, chosen, place,
                        digests=request["converted"], work=pieces, progress=progress,
                    )
                )  # fmt: skip
            text_seconds = time.perf_counter() - text_started
            blocks, held_out = hold_out(blocks)
            weights, held_out_weights = _divided(weights, len(blocks))
            about = {
                "name": recorded_name(text) if isinstance(text, str) else OWN_WINDOWS,
                **describe_text(blocks, opened_source.config.vocab_size),
                "held_out_tokens": held_out.tokens.numel(),
                "perplexity_source": source_perplexity(models.teacher, held_out),
                "seconds": text_seconds,
            }
            tried: list[dict[str, float]] = []
            if chosen.rate is None:
                tried = processes.share(
                    lambda: _once(
                        pieces, _FIRST_STEPS, "measuring the rate", progress,
                        lambda: first_steps(
                            distillation, blocks, held_out, chosen, weights=weights, held_out_weights=held_out_weights
                        ),
                    )
                )  # fmt: skip
                chosen = replace(chosen, rate=measured_rate(tried))
            keeps_best = chosen.keep == "best"
            newest = processes.share(lambda: last_checkpoint(checkpoints, with_best=keeps_best))
            if newest and progress and processes.is_main:
                announce(f"going on from {newest.name} of an interrupted run")
            result = train(
                distillation, blocks, held_out, chosen, tokens, checkpoints,
                going_on=newest, weights=weights, held_out_weights=held_out_weights, log=curve, progress=progress,
            )  # fmt: skip
            counts = device_use(models, place, result.tokens_per_second / request["processes"])
            made = models.trained() if result.kept_step else {}
            distillation = models = None
            gc.collect()

            def finish() -> HealingReport:
                written = write_healed(opened, made, folder, dtype, progress=progress)
                made.clear()
                check_unchanged(opened_source.folder, files)
                rows = _compare(opened_source, opened, open_converted(folder), compared, place, folder, progress)
                config = opened.config.with_options(rotary_key_cache="none")
                report = HealingReport(
                    destination=str(final),
                    settings=chosen,
                    first_steps=tuple(tried),
                    trained=result,
                    text=about,
                    rows=tuple(rows),
                    cache_ratio=config.cache_bytes_per_token(2) / config.source_cache_bytes_per_token(2),
                    device=device_name(place),
                    seconds=time.perf_counter() - started,
                    weights_sha256=written.sha256,
                    **counts,
                )
                write_record(opened, record, report, collect_environment(place.index or 0), folder)
                return report

            report = processes.share(finish)
    return report


def _device(device: str | torch.device | None) -> torch.device:
    """The device of this process, of several the GPU with its local rank."""
    place = compute_device(device)
    if place.type not in ("cpu", "cuda") or place.index not in (None, 0):
        raise ValueError(f"device is {str(place)!r}; expected cpu or cuda (CUDA_VISIBLE_DEVICES chooses among GPUs)")
    if place.type == "cuda" and process_count() > 1:
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    return place


def _open(source: str | os.PathLike[str], converted: str | os.PathLike[str]) -> tuple[Source, OpenedFolder]:
    opened = open_converted(source_folder(find_converted(converted, "converted")))
    rope = (opened.config.recipe or {}).get("rope") or {}
    return open_source(source_folder(source), longrope_table=rope.get("longrope_table", "short")), opened


def _settings(preset: str, given: Mapping[str, Any], source: Source, text: str | Windows) -> Settings:
    """Settings for a source.

    Raises:
        ValueError: also for windows at which the source uses longrope's other table, all weights of experts, or fewer
            tokens than the smallest step.
    """
    context = getattr(source.config, "max_position_embeddings", None)
    if not isinstance(text, str):
        lengths = sorted({part.shape[-1] for part in listed(text)})
        given = {**given, "length": lengths[0], "long_length": lengths[-1]}
    settings = Settings.of(preset, context=context, **given)
    for name in ("length", "long_length"):
        check_length(source.spec, getattr(settings, name), f"{name} is {getattr(settings, name)}")
    least = settings.long_length * process_count()
    if settings.tokens is not None and settings.tokens < least:
        raise ValueError(f"tokens is {settings.tokens}; expected at least {least}: a step has a window of long_length")
    if settings.train == "all" and FAMILIES[source.config.model_type].mixture_of_experts:
        raise ValueError(f"train is 'all' and source is a {source.config.model_type}; expected 'attention' or 'lora'")
    return settings


def _weights(token_weights: Tensor | None, text: str | Windows) -> Tensor | None:
    """Weights of mean 1."""
    if token_weights is None:
        return None
    if not isinstance(token_weights, Tensor):
        raise ValueError(f"token_weights is {token_weights!r:.80}; expected a tensor [windows, length]")
    if not isinstance(text, Tensor) or token_weights.shape != text.shape:
        expected = tuple(text.shape) if isinstance(text, Tensor) else "none beside a text that is no tensor of windows"
        raise ValueError(f"token_weights is {tuple(token_weights.shape)}; expected {expected}")
    token_weights = token_weights.to("cpu", torch.float32)
    least, mean = token_weights.min().item(), token_weights.mean().item()
    if not (least >= 0 and 0 < mean < math.inf):
        raise ValueError(f"token_weights has least {least} and mean {mean}; expected finite ones >= 0, not all 0")
    return token_weights / mean


def _divided(weights: Tensor | None, count: int) -> tuple[Tensor | None, Tensor | None]:
    """Weights of the first ``count`` windows, which are trained on, and of the held-out ones, each of mean 1."""
    if weights is None:
        return None, None
    for part, use in ((weights[:count], "trained on"), (weights[count:], "held out")):
        if not part.any():
            raise ValueError(f"token_weights is 0 in the {len(part)} windows {use}; expected a token that counts")
    return weights[:count] / weights[:count].mean(), weights[count:] / weights[count:].mean()


@contextmanager
def _leftovers_named(work: Path, resume: str, *, show: bool) -> Iterator[None]:
    """Names the work that is kept after an interrupt or an error, and the command that resumes it."""
    try:
        yield
    except BaseException as error:
        if show and not isinstance(error, ResumeError) and _has_work(work):
            without = "" if resume == "auto" else " without --resume never"
            announce(f"what was done is kept in {work}: the same command{without} goes on from there")
        raise


def _has_work(work: Path) -> bool:
    return has_pieces(work / _PIECES) or any((work / _CHECKPOINTS).glob("checkpoint-*"))


def _open_work(work: Path, request: dict[str, Any], resume: str) -> WorkFolder:
    """State that an interrupted run left, if it is of the same request.

    Raises:
        ResumeError: it has checkpoints of another one, which are not to be discarded.
    """
    request = json.loads(json.dumps(request))
    theirs = read_request(work / REQUEST_FILE)
    if theirs != request or resume == "never":
        if theirs and resume == "auto" and (at := last_checkpoint(work / _CHECKPOINTS)):
            raise ResumeError(
                f"{work} holds {at.name} of an interrupted healing that differs in"
                f" {', '.join(differences(theirs, request))}: repeat that healing, or discard it with resume='never'"
            )
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(exist_ok=True)
    atomic_write(work / REQUEST_FILE, lambda path: path.write_text(json.dumps(request), encoding="utf-8"))
    return WorkFolder(work / _PIECES, request)


def _once(pieces: WorkFolder, name: str, what: str, progress: bool, measure: Callable[[], T]) -> T:
    """``measure()``, whose result a run that goes on finds in ``pieces``."""
    if (saved := pieces.get(name)) is not None:
        return saved[1]
    with waiting(what, show=progress):
        found = measure()
    pieces.put(name, {}, found)
    return found


def _memory(
    settings: Settings, distillation: Distillation, models: Models, pieces: WorkFolder, progress: bool
) -> tuple[int, bool]:
    """Tokens at once that fit a GPU's memory, and whether activations are recomputed."""

    def measure() -> tuple[int, bool]:
        found = fit_memory(settings, models, distillation)
        return found.tokens_at_once, models.recomputes

    return tuple(_once(pieces, _MEMORY, "trying how many tokens fit the memory", progress, measure))


def _budget(settings: Settings, distillation: Distillation, source: Source, pieces: WorkFolder, progress: bool) -> int:
    """Tokens to train on, of all processes."""
    if settings.minutes is None:
        return settings.tokens

    def measure() -> int:
        tokens = tokens_in(settings.minutes, distillation, settings, source.config.vocab_size)
        tokens *= process_count()  # one process was timed
        return tokens if settings.tokens is None else min(tokens, settings.tokens)

    return _once(pieces, _PLAN, "measuring tokens per second", progress, measure)


def device_use(models: Models, device: torch.device, speed: float) -> dict[str, Any]:
    """Parameters and what of the device was used, as in a :class:`HealingReport`; ``speed`` in its tokens/s."""
    sizes = {name: each.numel() for name, each in models.student.named_parameters()}
    trained = sum(each.numel() for each in models.student.parameters() if each.requires_grad)
    gpu = peak = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = recognize_gpu(properties.name, properties.total_memory)
        peak = torch.cuda.max_memory_allocated(device)
    experts = getattr(FAMILIES[models.teacher.config.model_type], "mixture_of_experts", False)
    share = None
    if gpu is not None and not experts:
        embedding = models.teacher.get_input_embeddings().weight.numel()
        tied = models.teacher.get_output_embeddings().weight is models.teacher.get_input_embeddings().weight
        looked_up = 0 if tied else embedding
        student = sum(sizes.values()) - looked_up
        teacher = sum(each.numel() for each in models.teacher.parameters()) - looked_up
        share = 2 * (teacher + 2 * student + trained) * speed / gpu.products  # forward, forward and backward, gradients
    return {
        "trained_parameters": trained,
        "parameters": sum(sizes.values()),
        "shared_parameters": sum(sizes[name] for name in models.shared & sizes.keys()),
        "flop_share": share,
        "peak_gpu_bytes": peak,
    }


def _compared_texts(source: Source, record: Mapping[str, Any]) -> list[HeldOut]:
    """Windows of each of a record's comparisons; of the default text where none can be repeated.

    Raises:
        CheckpointError: the source has no usable tokenizer.

    Warns:
        UserWarning: a text is a file that is not there, or no longer usable.
    """
    texts = []
    for kind in ("", "long_"):
        if (parity := record.get(f"{kind}parity")) and "token windows" not in record[f"{kind}evaluation_text"]:
            text, length = record[f"{kind}evaluation_text"], record[f"{kind}evaluation_length"]
            try:
                texts.append(HeldOut.of(source, text, length, parity["tokens"] // (length - 1) * length))
            except ValueError as error:
                warnings.warn(f"no comparison on the text that converted was evaluated on: {error}", stacklevel=3)
    if texts:
        return texts
    length = nearest_length(source.spec, _EVALUATION_LENGTH)
    text = EVALUATION_TEXT if length <= EVALUATION_TOKENS else LONG_EVALUATION_TEXT
    return [HeldOut.of(source, text, length, EVALUATION_TOKENS)]


def _compare(
    source: Source,
    converted: OpenedFolder,
    healed: OpenedFolder,
    texts: Sequence[HeldOut],
    device: torch.device,
    folder: Path,
    progress: bool,
) -> Iterator[dict[str, Any]]:
    """A row for each of the texts: source, converted and healed model in float32, streamed."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    source_model = source.model(device, torch.float32)
    for held_out in texts:
        before, after = (
            compare(
                source_model, each.model(device, torch.float32), held_out.tokens,
                folder=folder, by_layer=False, progress=progress,
            )
            for each in (converted, healed)
        )  # fmt: skip
        yield _row(held_out, before, after)


def _row(held_out: HeldOut, before: ParityReport, after: ParityReport) -> dict[str, Any]:
    row: dict[str, Any] = {"text": held_out.text, "length": held_out.tokens.shape[1], "tokens": before.tokens}
    row["perplexity_source"] = before.perplexity_source
    for name, parity in (("before", before), ("after", after)):
        row |= {f"perplexity_{name}": parity.perplexity_converted, f"ratio_{name}": parity.perplexity_ratio}
        row |= {f"kl_{name}": parity.kl, f"top1_agreement_{name}": parity.top1_agreement}
    return row
