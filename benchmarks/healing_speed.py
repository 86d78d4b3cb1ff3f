"""Time of healing's two halves by part: a step of writing text, and a pass of training.

    python benchmarks/healing_speed.py text MODEL --json /tmp/log/text-writing.json
    python benchmarks/healing_speed.py passes MODEL CONVERTED --json /tmp/log/passes.json

``text``: a row for each number of rows that the source writes side by side, over pages, over transformers' static cache
and by the paged loop: milliseconds of a step by the wall clock, of its CUDA graph, of drawing the tokens, and the
kernels that take most; and how far the two caches' logits are from float32. ``passes``: source, student, loss and
backward pass, and the same for pieces compiled by torch.compile where that works. A row that fails says why; the file
is written after every row.
"""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.generate import wait
from benchmarks.loop import filled_loop
from benchmarks.recording import Recording, command
from mha2mla.conversion.calibration import generated_text
from mha2mla.conversion.calibration.batch_decoder import _CapturedDecoder, _PagedDecoder, decoder
from mha2mla.environment import compute_device, usual_dtype
from mha2mla.healing.loss import distillation_loss, divergence
from mha2mla.healing.settings import Settings
from mha2mla.healing.student import load_models
from mha2mla.healing.training import Distillation
from mha2mla.modeling import paged_model
from mha2mla.modeling.captured import CudaGraphs

STEPS = 24  # timed of each part
KERNELS = 8  # named
LONG = 8192


def milliseconds(run: Callable[[], Any], count: int = STEPS) -> float:
    """Wall clock of ``run`` among ``count`` in a row, after two."""
    run(), run(), wait()
    began = time.perf_counter()
    for _ in range(count):
        run()
    wait()
    return (time.perf_counter() - began) / count * 1e3


def kernels(run: Callable[[], Any], count: int) -> dict[str, float]:
    """Milliseconds of a run of the kernels that take most, by name; empty where the profiler sees none."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            run()
        wait()
    found = {each.key: each.self_device_time_total / count / 1e3 for each in profile.key_averages()}
    found = {name: time for name, time in found.items() if time and not name.startswith("aten::")}
    return {name[:120]: found[name] for name in sorted(found, key=found.get, reverse=True)[:KERNELS]}


class Rows:
    """Attempts of one table, until ``seconds`` are over."""

    def __init__(self, kind: str, json: str | None, seconds: float) -> None:
        self.table, self._stop = Recording(kind, json), time.perf_counter() + seconds

    def attempt(self, about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        if time.perf_counter() > self._stop:
            return print(f"left out: {about}")
        began = time.perf_counter()
        try:
            row = about | measure()
        except Exception as error:
            row = about | {"status": f"{type(error).__name__}: {str(error)[:300]}", "traceback": traceback.format_exc()}
        self.table.add(row | {"took_s": time.perf_counter() - began})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@torch.inference_mode()
def by_decoder(model: Any, kind: Any, rows: int, length: int) -> dict[str, Any]:
    """The steps in the middle of rows of ``length`` tokens, as calibration text is written."""
    began = time.perf_counter()
    step = kind(model, rows, length, CudaGraphs()) if torch.cuda.is_available() else decoder(model, rows, length)
    wait()
    row = {"capture_s": time.perf_counter() - began}
    tokens = torch.randint(3, model.config.vocab_size, (rows,), device=model.device)
    if isinstance(step, _PagedDecoder):  # as if so many tokens were there
        for each in step.counts:
            each += length // 2
    elif isinstance(step, _CapturedDecoder):
        step.calls = length // 2
        for layer in step.cache.layers:
            layer.cumulative_length.fill_(length // 2)
    logits = step(tokens)
    draw = torch.Generator(model.device).manual_seed(0)
    queues, ends = [[] for _ in range(rows)], frozenset({0, 2})

    def read(sampled: Tensor) -> Tensor:
        listed = sampled.tolist()
        for index, queue in enumerate(queues):
            if queue or listed[index] in ends:
                listed[index] = 3
        return torch.tensor(listed, device=model.device)

    noise = torch.empty(logits.shape, device=logits.device)

    def drawn() -> Tensor:
        return generated_text.sample(logits, draw, noise).indices

    remaining = min(STEPS, length // 8 - 6)
    row["graph_ms"] = milliseconds(lambda: step(tokens), remaining)
    row["draw_ms"] = milliseconds(drawn)
    row["host_ms"] = milliseconds(lambda: read(tokens))
    row["wall_ms"] = milliseconds(lambda: (step(tokens), read(drawn())), remaining)
    row["tokens_per_s"] = rows / row["wall_ms"] * 1e3
    row["kernels_ms"] = kernels(lambda: step(tokens), 4)
    return row


@torch.inference_mode()
def by_loop(model: Any, rows: int, length: int) -> dict[str, Any]:
    """Steps of the paged loop in the middle of rows of ``length`` tokens, at temperature 1."""
    model.set_attn_implementation("mha2mla")
    steps = 3 * STEPS + 8  # timed, of the host alone, profiled, and first ones
    loop, _ = filled_loop(paged_model(model), rows, length // 2, steps, temperature=1.0)
    began = time.perf_counter()
    for _ in range(4):
        loop.step()
    wait()
    row = {"capture_s": time.perf_counter() - began, "uncaptured": loop.runner.uncaptured}
    row["wall_ms"] = milliseconds(loop.step)
    row["tokens_per_s"] = rows / row["wall_ms"] * 1e3
    began = time.perf_counter()
    for _ in range(STEPS):
        chunks = loop.scheduler.schedule()
        loop.scheduler.complete(chunks, [3] * len(chunks))
    row["host_ms"] = (time.perf_counter() - began) / STEPS * 1e3
    graphs = loop.runner.graphs
    if graphs:
        replay = graphs[max(graphs)].replay
        row |= {"graph_ms": milliseconds(replay), "kernels_ms": kernels(replay, 4)}
    return row


@torch.inference_mode()
def agreement(paged: Any, source: Any, rows: int, length: int) -> dict[str, Any]:
    """Largest error of a step's logits relative to their norm, paged and static, against float32."""
    ids = torch.randint(3, source.config.vocab_size, (rows, length), device=source.device)
    exact = copy.deepcopy(source).float()(ids).logits
    errors = []
    for model, kind in ((paged, _PagedDecoder), (source, _CapturedDecoder)):
        step = kind(model, rows, length, CudaGraphs())
        found = torch.stack([step(column).clone() for column in ids.T], 1).float()
        errors.append(float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max()))
    return {
        "error": errors[0],
        "error_static": errors[1],
        **({} if errors[0] <= 2 * errors[1] else {"status": "wrong"}),
    }


def text(
    model: str,
    batches: Sequence[int] = (2048, 512),
    long_batches: Sequence[int] = (192,),
    seconds: float = 60.0,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """A row for each batch and way of writing.

    Args:
        model: folder of a source.
        batches: rows of 576 tokens at a time. long_batches: of 8192.
        seconds: after which no row is begun.
        device: default CUDA when there is one.
        json: file to write after every row.
    """
    place, rows = compute_device(device), Rows("text-writing", json, seconds)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=usual_dtype(place)).eval().to(place)

    short, source, paged = generated_text.ROW + 64, load(), load()
    todo = [(way, batch, short) for batch in batches for way in ("paged", "static")]
    todo += [(way, batch, LONG) for batch in long_batches for way in ("paged", "static")]
    todo += [("loop", batches[0], short), ("loop", long_batches[0], LONG)]
    for way, batch, length in todo:
        model, kind = (source, _CapturedDecoder) if way == "static" else (paged, _PagedDecoder)
        run = partial(by_loop, model) if way == "loop" else partial(by_decoder, model, kind)
        rows.attempt({"way": way, "batch": batch, "length": length}, partial(run, batch, length))
    if place.type == "cuda":
        rows.attempt({"way": "paged beside static", "batch": 8, "length": 80}, lambda: agreement(paged, source, 8, 80))
    columns = ("way", "batch", "length", "tokens_per_s", "wall_ms", "graph_ms", "draw_ms", "host_ms")
    return rows.table.show("Steps of writing text", (*columns, "capture_s", "error", "status"))


def passes(
    model: str,
    conversion: str,
    tokens: int = 1 << 14,
    lengths: Sequence[int] = (1024, 8192),
    train: Sequence[str] = ("attention", "all"),
    compiled: Sequence[bool] = (False, True),
    seconds: float = 60.0,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """A row for each part trained, length of windows and way of compiling.

    Args:
        model, conversion: folders of a source and its conversion.
        tokens: of a pass.
        lengths: of its windows.
        train: what is trained.
        compiled: decoder layers and loss by torch.compile.
        seconds: after which no row is begun.
        device: default CUDA when there is one.
        json: file to write after every row.
    """
    place, rows = compute_device(device), Rows("healing-passes", json, seconds)
    for by_compiler in compiled:
        run = torch.compile(divergence) if by_compiler else divergence
        about = {"train": "loss of 1,024 tokens", "compiled": by_compiler, "tokens": 1024}
        rows.attempt(about, partial(one_divergence, run, AutoConfig.from_pretrained(model).vocab_size, place))
    for trained, by_compiler in itertools.product(train, compiled):
        settings = Settings.of("standard", tokens=tokens, train=trained)
        models = load_models(Path(model), Path(conversion), place, settings)
        diverge = Distillation(models, None, by_compiler).diverge
        for length in lengths:
            about = {"train": trained, "compiled": by_compiler, "length": length, "tokens": tokens}
            rows.attempt(about, partial(one_pass, models, diverge, tokens, length, place))
        del models, diverge
    columns = ("train", "compiled", "length", "tokens_per_s", "total_ms", "source_ms", "student_ms", "loss_ms")
    return rows.table.show("A pass of training", (*columns, "backward_ms", "peak_gb", "first_s", "status"))


def one_divergence(run: Callable[..., Any], vocabulary: int, place: torch.device) -> dict[str, Any]:
    """The loss's own operations on a chunk."""
    expected, found = torch.randn(2, 1024, vocabulary, device=place, dtype=usual_dtype(place))
    return {"loss_ms": milliseconds(lambda: run(expected, found, expected.new_ones(1024)))}


def one_pass(models: Any, diverge: Callable[..., Any], tokens: int, length: int, place: torch.device) -> dict[str, Any]:
    """Parts of a pass, one after another and each waited for."""
    ids = torch.randint(models.teacher.config.vocab_size, (tokens // length, length), device=place)
    dtype = torch.bfloat16 if place.type == "cuda" else None
    parts = dict.fromkeys(("source_ms", "student_ms", "loss_ms", "backward_ms"), 0.0)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def step(timed: bool = True) -> None:
        marks = [time.perf_counter()]

        def mark() -> None:
            if timed:
                wait()
            marks.append(time.perf_counter())

        with torch.autocast(place.type, dtype, enabled=dtype is not None):
            with torch.no_grad():
                expected = models.teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state
            mark()
            found = models.student.base_model(input_ids=ids, use_cache=False).last_hidden_state
            mark()
            heads = (models.student.get_output_embeddings(), models.teacher.get_output_embeddings())
            loss = distillation_loss(found.flatten(0, 1), expected.flatten(0, 1), *heads, diverge=diverge)
            mark()
        (loss / tokens).backward()
        mark()
        models.student.zero_grad()
        for name, start, stop in zip(parts, marks, marks[1:], strict=False):
            parts[name] += (stop - start) * 1e3

    began = time.perf_counter()
    step()
    row = {"first_s": time.perf_counter() - began}
    step()
    parts |= dict.fromkeys(parts, 0.0)
    for _ in range(4):
        step()
    row |= {name: value / 4 for name, value in parts.items()}
    row["total_ms"] = milliseconds(lambda: step(timed=False), 4)
    row["tokens_per_s"] = tokens / row["total_ms"] * 1e3
    row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if place.type == "cuda" else None
    row["kernels_ms"] = kernels(lambda: step(timed=False), 2)
    return row


if __name__ == "__main__":
    sys.exit(command(text, passes, cpu=True))
