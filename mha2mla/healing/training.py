"""The training run: transformers' Trainer over the distillation loss, with checkpoints that a kill cannot halve."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments, get_scheduler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.destination import DestinationError
from mha2mla.conversion.fit.repeatable import deterministic
from mha2mla.files import CURVE, atomic_write, write_output
from mha2mla.healing.between import least_between, trained_weights
from mha2mla.healing.distillation import Distillation, first_pass, gradients, warm_up
from mha2mla.healing.optimizer import SCHEDULES, first_directions, make_optimizer
from mha2mla.healing.settings import Settings
from mha2mla.terminal import announce, progress_bar, waiting

WARM_UP = 0.03  # share of the steps
_LOGS = 200
_TIMED = 3  # passes
_FEWEST_TIMED = 10  # steps
_MORE = 1.25  # times the planned steps, at most
_HARDLY_OTHER = 0.02  # of the steps: no reason to change them
_COMPLETE, _PLANNED = "complete.json", "planned_steps"


class Blocks(Dataset):
    """Blocks in a given order."""

    def __init__(self, blocks: TokenBlocks, order: Sequence[int], weights: Tensor | None = None) -> None:
        self._blocks, self._order, self._weights = blocks, order, weights

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self._order[index]
        item = {"input_ids": self._blocks.tokens[block], "lengths": self._blocks.lengths[block]}
        return item if self._weights is None else item | {"weights": self._weights[block]}


def _batch(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensors stacked, and lengths as numbers: to read a tensor of them the host would wait for the step before."""
    columns = {name: [item[name] for item in items] for name in items[0]}
    return {name: column if name == "lengths" else torch.stack(column) for name, column in columns.items()}


def passes(lengths: Sequence[int], size: int, needed: int, seed: int) -> list[int]:
    """Numbers of ``needed`` blocks: all of them in a random order, then all in another one, and so on; but those of a
    pass, ``size`` in a row, have windows of one length: so the passes of a run have as many shapes as lengths.

    Args:
        lengths: of each block's windows.
    """
    generator, order = torch.Generator().manual_seed(seed), []
    waiting: dict[int, list[int]] = {length: [] for length in lengths}
    while len(order) < needed:
        for block in torch.randperm(len(lengths), generator=generator).tolist():
            same = waiting[lengths[block]]
            same.append(block)
            if len(same) == size:
                order += same
                same.clear()
    return order[:needed]


class _Arguments(TrainingArguments):
    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)  # several without a launcher would be DataParallel


def _plan(arguments: TrainingArguments, settings: Settings, steps: int) -> None:
    """Sets the arguments that depend on the number of steps."""
    schedule = SCHEDULES[settings.optimizer]
    arguments.max_steps, arguments.warmup_steps = steps, min(math.ceil(WARM_UP * steps), steps - 1)
    decay = min(max(1, round(schedule.decay * steps)), steps - arguments.warmup_steps)
    arguments.lr_scheduler_kwargs = {"num_decay_steps": decay, "decay_type": schedule.shape}
    arguments.eval_steps = arguments.save_steps = math.ceil(steps / settings.evaluations)
    arguments.logging_steps = max(1, steps // _LOGS)


class _Trainer(Trainer):
    """The optimizer of the settings, over blocks in the order of their dataset."""

    def __init__(self, settings: Settings, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._settings = settings

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer((model or self.model).student, self._settings)
        return self.optimizer

    def get_train_dataloader(self) -> DataLoader:
        size, pinned = self.args.per_device_train_batch_size, not self.args.use_cpu
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, size, collate_fn=self.data_collator, pin_memory=pinned)
        )

    def _save_checkpoint(self, *args: Any) -> None:
        try:
            super()._save_checkpoint(*args)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save's of a full disk is a RuntimeError
            raise DestinationError(f"{self.args.output_dir} cannot be written: {error}") from error


class _Clock(TrainerCallback):
    """Seconds of the optimizer steps alone: no evaluation, checkpoint or kernel that is compiled for the first one; and
    of earlier runs in all. Rows of evaluations, which checkpoints hold, have both for a run that goes on.

    Between evaluations it runs on: to look at it waits for the device, which then has nothing to do for a while.
    """

    def __init__(self, device: torch.device) -> None:
        self._counted, self.earlier, self._device = 0.0, 0.0, device
        self._began: float | None = None
        self._started = 0.0

    @property
    def seconds(self) -> float:
        return self._counted + (0.0 if self._began is None else _now(self._device) - self._began)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for row in state.log_history:
            self._counted, self.earlier = row.get("seconds", (self._counted, self.earlier))
        self._started = _now(self._device)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.log_history[-1]["seconds"] = [self.seconds, self.earlier + _now(self._device) - self._started]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._began is None:
            self._began = _now(self._device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate or control.should_save or state.global_step >= state.max_steps:
            self._counted, self._began = self.seconds, None


class _Minutes(TrainerCallback):
    """Other steps, at most ``most``, where a twentieth of them takes more or less time than was planned, as when other
    work begins on the machine and ends: so the rate falls to its end in time. Rows of the history say what was decided,
    for a run that goes on."""

    def __init__(self, settings: Settings, clock: _Clock, most: int, show: bool) -> None:
        self._settings, self._clock, self._most, self._show = settings, clock, most, show
        self._every, self._timed = 1, (0, 0.0)  # steps between decisions; step and seconds of the last one

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._every = max(_FEWEST_TIMED, math.ceil(state.max_steps / 20))
        self._timed = state.global_step, self._clock.seconds

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
        step, seconds = self._timed
        made = state.global_step - step
        if made < self._every or state.global_step >= state.max_steps:
            return
        now = self._clock.seconds
        self._timed = state.global_step, now
        left = 60 * self._settings.minutes - now
        steps = state.global_step + max(1, int(left / (now - seconds) * made))
        # each process has a clock of its own
        steps = min(self._most, int(broadcast(torch.tensor(steps, device=args.device))))
        if abs(steps - state.max_steps) <= _HARDLY_OTHER * state.max_steps:
            return
        if self._show and state.is_world_process_zero:
            how = "longer" if steps < state.max_steps else "less time"
            announce(f"{steps:,} steps in place of {state.max_steps:,}: they take {how} than was planned")
        state.log_history.append({"step": state.global_step, _PLANNED: steps})
        _plan(args, self._settings, steps)
        state.compute_steps(args, steps)
        state.max_steps = steps
        schedule = get_scheduler(
            args.lr_scheduler_type, torch.optim.SGD([torch.zeros(1)]), args.warmup_steps, steps,
            args.lr_scheduler_kwargs,
        )  # fmt: skip
        lr_scheduler.lr_lambdas = schedule.lr_lambdas * len(lr_scheduler.lr_lambdas)


def _planned(state: TrainerState) -> int | None:
    """Steps that :class:`_Minutes` has planned last."""
    return next((row[_PLANNED] for row in reversed(state.log_history) if _PLANNED in row), None)


class _Log(TrainerCallback):
    """The curve so far as a JSON file, after every evaluation, and that of an earlier run before the first step."""

    def __init__(self, path: Path, step_tokens: int) -> None:
        self._path, self._step_tokens = path, step_tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **keys: Any) -> None:
        if state.log_history:
            self.on_evaluate(args, state, control, **keys)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            curve = json.dumps(list(_curve(state.log_history, self._step_tokens)))
            write_output(self._path, CURVE, lambda path: path.write_text(curve, encoding="utf-8"), "log")


class _Bar(TrainerCallback):
    """A progress bar with the loss, and a refusal of one that is no number."""

    def __init__(self, show: bool, step_tokens: int) -> None:
        self._show, self._step_tokens, self._bar = show, step_tokens, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        total, done = state.max_steps * self._step_tokens, state.global_step * self._step_tokens
        show = self._show and state.is_world_process_zero
        self._bar = progress_bar(total=total, initial=done, desc="heal", unit="token", unit_scale=True, show=show)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.total = state.max_steps * self._step_tokens
        self._bar.update(self._step_tokens)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        for name in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise ValueError(
                    f"the loss became {logs[name]} at step {state.global_step}; expected a smaller rate, beside"
                    " resume='never', which discards this one's checkpoints"
                )
        shown = {"KL": logs.get("loss"), "held-out KL": logs.get("eval_loss")}
        if self._bar is not None:
            self._bar.set_postfix(
                {name: f"{value:.4g}" for name, value in shown.items() if value is not None}, refresh=False
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.close()


class _Checkpoints(TrainerCallback):
    """Evaluates and saves at the end, too; marks a checkpoint when all of it is written, then removes all but it and
    the best one, which every process names alike: the Trainer's looks for its folder, which under FSDP may not be there
    yet."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        _name_best(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            control.should_evaluate = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.distributed_state.wait_for_everyone()  # each process writes files of its own
        _name_best(args, state)
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        files = [path for path in folder.rglob("*") if path.is_file()]
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
        atomic_write(folder / _COMPLETE, lambda path: path.write_text(json.dumps(sizes), encoding="utf-8"))
        kept = {folder.name, Path(state.best_model_checkpoint or folder).name}
        for other in Path(args.output_dir).glob("checkpoint-*"):
            if other.name not in kept:
                shutil.rmtree(other)


def _name_best(args: Any, state: Any) -> None:
    if state.best_global_step:
        state.best_model_checkpoint = str(Path(args.output_dir) / f"checkpoint-{state.best_global_step}")


def last_checkpoint(folder: Path, *, with_best: bool = False) -> Path | None:
    """The newest checkpoint in ``folder`` that was written to its end; one that was not is removed.

    Args:
        with_best: so is one without the best checkpoint so far, whose weights the end of its run would keep.
    """
    whole = []
    for each in folder.glob("checkpoint-*"):
        try:
            sizes = json.loads((each / _COMPLETE).read_text(encoding="utf-8"))
            if all((each / name).stat().st_size == size for name, size in sizes.items()):
                whole.append(each)
                continue
        except (OSError, ValueError):
            pass
        shutil.rmtree(each)
    names = {each.name for each in whole}
    for each in [*whole] if with_best else []:
        best = TrainerState.load_from_json(each / TRAINER_STATE_NAME).best_global_step
        if f"checkpoint-{best}" not in names:
            whole.remove(each)
            shutil.rmtree(each)
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


@dataclass(frozen=True)
class Trained:
    """Result of :func:`train`.

    Attributes:
        steps, tokens: trained on.
        passes: over the text.
        held_out_before, held_out_best, held_out_last: mean KL on the held-out windows.
        best_step: after which the loss on held-out windows was smallest; 0: before the first.
        kept_step: whose weights are kept; 0: those before training.
        kept_share: of the way from the weights before training to those of that step, and held_out_kept there.
        between: the shares that were tried, by falling loss; none where the last weights are kept.
        seconds: evaluations and checkpoints among them; of a run that went on those before its checkpoint, too.
        tokens_per_second: of the steps alone.
        curve: logged losses and rates by step.
    """

    steps: int
    tokens: int
    passes: float
    held_out_before: float
    held_out_best: float
    held_out_last: float
    best_step: int
    kept_step: int
    kept_share: float
    held_out_kept: float
    between: list[dict[str, float]]
    seconds: float
    tokens_per_second: float
    curve: list[dict[str, float]]

    @property
    def kept(self) -> str:
        """Description of the kept weights."""
        if not self.kept_step:
            return "the conversion's weights"
        way = "" if self.kept_share == 1 else f"those {self.kept_share:.0%} of the way from the conversion's to "
        return f"{way}those of step {self.kept_step:,} of {self.steps:,}"


@deterministic(warn_only=True)  # the mode of train: in another one layers are compiled again
def tokens_in(minutes: float, distillation: Distillation, settings: Settings, vocabulary: int) -> int:
    """Tokens that ``minutes`` of training take on this machine, by passes over random tokens in windows of both
    lengths and the directions of a step, which is not made. A GPU is timed after a first pass, which compiles; a CPU by
    one long window, once."""
    device, seconds = distillation.student.device, 0.0
    is_warmed = device.type == "cuda" or distillation.compiled
    windows = settings.pass_tokens // settings.long_length if is_warmed else 1
    ids = torch.randint(vocabulary, (windows, settings.long_length)).to(device)
    shares = {settings.length: 1.0}
    if settings.length < settings.long_length:
        shares = {settings.length: 1 - settings.long_share, settings.long_length: settings.long_share}
    for length, share in shares.items():
        if is_warmed:
            first_pass(distillation, ids, length)
        seconds += share * _timed(partial(gradients, distillation, ids, length), device, is_warmed)
    directions = partial(first_directions, distillation.student, settings)
    with torch.no_grad():
        if is_warmed:
            directions()
        step = _timed(directions, device, is_warmed)
    distillation.zero_grad()
    return max(settings.long_length, int(60 * minutes / (seconds / ids.numel() + step / settings.step_tokens)))


def _timed(call: Callable[[], object], device: torch.device, is_warmed: bool) -> float:
    """Seconds of a call, on average; of one that is not warmed up once."""
    started, times = _now(device), _TIMED if is_warmed else 1
    for _ in range(times):
        call()
    return (_now(device) - started) / times


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train(
    distillation: Distillation,
    blocks: TokenBlocks,
    held_out: TokenBlocks,
    settings: Settings,
    tokens: int,
    folder: Path,
    *,
    going_on: Path | None = None,
    weights: Tensor | None = None,
    held_out_weights: Tensor | None = None,
    log: Path | None = None,
    progress: bool,
) -> Trained:
    """Trains the student and leaves it the weights at ``kept_share`` of the way to those of ``kept_step``, unless that
    is 0.

    With the same arguments on the same machine, a run that was killed and went on ends with the weights, to the bit, of
    one that nothing disturbed and that made as many steps.

    Args:
        tokens: to train on, in whole steps; at least one step is made. Of ``settings.minutes`` fewer or more, within
            ``settings.tokens``, where a twentieth of the steps takes more or less time than was planned.
        folder: of the checkpoints: trained weights, the optimizer's state, random states.
        going_on: the checkpoint there to go on from (:func:`last_checkpoint`).
        weights, held_out_weights: [blocks, size] of the tokens' losses, each of mean 1; None: ones.
        log: JSON file that has the curve so far after every evaluation.

    Raises:
        ValueError: the loss became NaN or infinite.
        DestinationError: a checkpoint cannot be written.
    """
    device = distillation.student.device
    per_pass = settings.pass_tokens // blocks.size
    arguments = _Arguments(
        output_dir=str(folder),
        use_cpu=device.type == "cpu",
        per_device_train_batch_size=per_pass,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.rate,
        max_grad_norm=1.0,
        max_steps=1,
        lr_scheduler_type="warmup_stable_decay",
        eval_on_start=going_on is None,  # not before train(), which would leave the model out of data parallelism
        eval_strategy="steps",
        save_strategy="steps",
        load_best_model_at_end=settings.keep == "best",
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        prediction_loss_only=True,
        label_names=["input_ids"],  # so that evaluation has a loss
        remove_unused_columns=False,
        accelerator_config={"non_blocking": device.type == "cuda"},
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
        seed=settings.seed,
    )
    step_tokens = settings.step_tokens * arguments.world_size
    steps = max(1, tokens // step_tokens)
    limit = math.inf if settings.tokens is None else settings.tokens // step_tokens
    most = max(steps, min(math.ceil(_MORE * steps), limit))
    if going_on is not None:
        steps = _planned(TrainerState.load_from_json(going_on / TRAINER_STATE_NAME)) or steps
    _plan(arguments, settings, steps)
    order = passes(blocks.lengths, per_pass, most * step_tokens // blocks.size, settings.seed)
    done = 0 if going_on is None else int(going_on.name.partition("-")[2])
    if done < steps and distillation.compiled:
        with waiting("compiling layers and loss", show=progress and arguments.process_index == 0):
            warm_up(distillation, blocks, per_pass)
    clock, callbacks = _Clock(device), [] if log is None else [_Log(log, step_tokens)]
    if settings.minutes is not None:
        callbacks.append(_Minutes(settings, clock, most, progress))
    trainer = _Trainer(
        settings,
        model=distillation,
        args=arguments,
        train_dataset=Blocks(blocks, order, weights),
        eval_dataset=Blocks(held_out, range(len(held_out)), held_out_weights),
        data_collator=_batch,
        callbacks=[clock, *callbacks, _Bar(progress, step_tokens), _Checkpoints()],
    )
    trainer.remove_callback(PrinterCallback)
    keeps_best = settings.keep == "best"
    first_weights = trained_weights(distillation) if keeps_best else {}
    started = _now(device)
    with deterministic(warn_only=True):
        trainer.train(resume_from_checkpoint=None if going_on is None else str(going_on))
    seconds = clock.earlier + _now(device) - started
    state, steps = trainer.state, trainer.state.max_steps
    evaluated = [row for row in state.log_history if "eval_loss" in row]
    before = evaluated[0]["eval_loss"]
    best = min(evaluated[1:], key=lambda row: row["eval_loss"])
    step, kept, rows = (best if keeps_best else evaluated[-1])["step"], {"share": 1.0}, []
    if keeps_best:
        with waiting("between the weights before and after", show=progress and arguments.process_index == 0):
            losses = before, best["eval_loss"]
            *_, kept = rows = least_between(distillation, first_weights, losses, partial(_held_out_loss, trainer))
    return Trained(
        steps=steps,
        tokens=steps * step_tokens,
        passes=steps * step_tokens / blocks.tokens.numel(),
        held_out_before=before,
        held_out_best=min(before, best["eval_loss"]),
        held_out_last=evaluated[-1]["eval_loss"],
        best_step=best["step"] if best["eval_loss"] < before else 0,
        kept_step=step if kept["share"] else 0,
        kept_share=kept["share"],
        held_out_kept=kept.get("held_out_kl", evaluated[-1]["eval_loss"]),
        between=rows,
        seconds=seconds,
        tokens_per_second=steps * step_tokens / clock.seconds,
        curve=list(_curve(state.log_history, step_tokens)),
    )


def _held_out_loss(trainer: Trainer) -> float:
    """Loss of the current weights; adds no row to the history, unlike Trainer.evaluate."""
    loader = trainer.get_eval_dataloader()
    return trainer.evaluation_loop(loader, "Evaluation", prediction_loss_only=True).metrics["eval_loss"]


def _curve(history: list[dict[str, float]], step_tokens: int) -> Iterator[dict[str, float]]:
    names = {"loss": "kl", "eval_loss": "held_out_kl", "learning_rate": "rate", "grad_norm": "gradient_norm"}
    for row in history:
        found = {new: row[name] for name, new in names.items() if name in row}
        if found:
            yield {"step": row["step"], "tokens": row["step"] * step_tokens, **found}
