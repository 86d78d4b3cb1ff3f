"""Whole models beside their sources: bytes a token, decode calls, steps as CUDA graphs, and the most tokens a second.

    python benchmarks/whole_models.py --json benchmarks/results/h200-whole-models.json
    python benchmarks/whole_models.py --only "qwen2.5-7b,smollm2 source"

Random weights and caches of random numbers, bfloat16. Each model is there as its source, in layout latent with rotary
keys computed and kept in 16 and in 8 bits, and in layout shared with as many bytes as the latent alone. Of each, one
layer's logits after 2 × 1024 tokens are judged first, by the model in float64 over the same cache and by plain torch in
bfloat16; a decode call is judged as ``measuring.py`` does. "tok/s" is of a step of as many sequences of 8192 tokens as
fit into the memory, at most 1024: what ``generate`` and an engine do beside steps is not in it.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Row, measure_decode, read_rate
from benchmarks.recording import Recording, command
from benchmarks.shapes import decode_case, with_kept_keys
from benchmarks.step_timeline import by_plain_torch, captured, distances, prepared, replay_ms
from mha2mla.eval.latency import weight_bytes
from mha2mla.kernels import compile_ahead, gqa_decode, mla_decode
from mha2mla.modeling import paged_model
from mha2mla.modeling.config import cache_bytes_per_token
from mha2mla.modeling.paged_cache import PagedCache
from mha2mla.testing.problems import GQAProblem, KeyCodesProblem, LatentProblem, Problem
from mha2mla.trial_models import ShapeName, converted_config, random_model, source_config

# Widths of layout latent, d_c and d_r, at half of the source's cache and for Llama-2-7B at an eighth; the most telling
# first, as time may be up.
MODELS: dict[ShapeName, tuple[int, int]] = {
    "llama-3-8b": (1024, 64),
    "qwen2.5-7b": (512, 128),
    "smollm2-135m": (192, 128),
    "llama-2-7b": (1024, 64),
}
WAYS = {"computed": "none", "kept": "bfloat16", "kept8": "int8"}  # rotary_key_cache
SHARED_ROPE = 64
SHAPES = ((64, 8192), (1, 2048), (16, 8192), (8, 2048), (128, 8192))  # sequences, tokens of each
LONGEST = 8192  # tokens of each of as many sequences as fit
MOST = 1024  # sequences
RESERVE = 8e9  # bytes of memory beside weights and cache
CHECKED = (2, 1024)
OP = (64, 2048)
COLUMNS = (
    "model", "way", "bytes_a_token", "of_source", "op_us", "op_of_source",
    *(f"{batch}x{context}_{what}" for batch, context in sorted(SHAPES) for what in ("ms", "over")), "64x8192_of_source",
    "fit", "fit_ms", "tok/s",
    "tok/s_of_source", "error", "status",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model in one way.

    Attributes:
        name: of the shape. way: "source", "shared", or of ``WAYS``. config: of the model, rotary keys as the way's.
    """

    name: str
    way: str
    config: Any

    @property
    def title(self) -> str:
        return f"{self.name} {self.way}"

    def pages(self, model: Any, count: int) -> PagedCache:
        """An empty cache with the way's rotary keys, of which a source has none."""
        return model.paged_cache(count, rotary_key_cache=getattr(self.config, "rotary_key_cache", None))


def cases(name: ShapeName, **changes: Any) -> list[Case]:
    """A model in all ways; neighbours of one layout share weights."""
    source, (latent, rope) = source_config(name, **changes), MODELS[name]
    converted = converted_config(source, layout="latent", kv_lora_rank=latent, qk_rope_head_dim=rope)
    shared = converted_config(source, layout="shared", kv_lora_rank=latent - SHARED_ROPE, qk_rope_head_dim=SHARED_ROPE)
    ways = {way: converted.with_options(rotary_key_cache=mode) for way, mode in WAYS.items()}
    return [Case(name, way, config) for way, config in {"source": source, **ways, "shared": shared}.items()]


def made(case: Case, device: str) -> Any:
    """A random model of a case, with ``paged_cache`` and ``forward_batch``."""
    model = random_model(case.config, device, torch.float32 if device == "cpu" else torch.bfloat16)
    if case.way == "source":
        model.set_attn_implementation("mha2mla")
    return paged_model(model)


def cache_of(model: Any, case: Case, pages: int) -> PagedCache:
    """Pages of random numbers."""
    cache = case.pages(model, pages)
    for tensors in cache.tensors:
        for name, tensor in tensors.items():
            if name.endswith("_scale"):
                tensor.uniform_(0.005, 0.01)
            elif tensor.itemsize == 1:  # codes of small positive numbers
                tensor.view(torch.uint8).random_(0, 100)
            else:
                tensor.normal_()
    return cache


def in_float64(model: Any, case: Case, cache: PagedCache) -> tuple[Any, PagedCache]:
    """The same model and the same pages in float64, by plain torch."""
    wide = paged_model(copy.deepcopy(model.model if case.way == "source" else model).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that plain torch serves it
        pages = case.pages(wide, cache.allocator.num_pages)
    for mine, theirs in zip(pages.tensors, cache.tensors, strict=True):
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])
    return wide, pages


@torch.no_grad()
def check(case: Case, device: str, shape: tuple[int, int] = CHECKED) -> Row:
    """Error of the logits of a model of this config after ``shape`` [sequences, tokens], and whether it is rounding."""
    torch.manual_seed(0)
    model = made(case, device)
    cache = cache_of(model, case, shape[0] * -(-shape[1] // 64))
    wide, pages = in_float64(model, case, cache)
    ids = torch.randint(0, case.config.vocab_size, shape[:1], device=device)
    exact = wide.forward_batch(ids, prepared(pages, *shape)[0])
    step, _ = prepared(cache, *shape)
    plain = model.forward_batch(ids, by_plain_torch(cache).step(step.batch))
    return distances(exact, model.forward_batch(ids, step), plain, "torch_error", model.dtype)


def op_problem(case: Case, shape: tuple[int, int] = OP) -> Problem | GQAProblem:
    """The decode call of a layer."""
    config, lengths = case.config, (shape[1],) * shape[0]
    heads = config.num_attention_heads
    if case.way == "source":
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return GQAProblem(heads, config.num_key_value_heads, width, width, lengths, slack=0)
    layer = config.layer_geometry(0)
    kind = Problem if case.way == "shared" else LatentProblem
    problem = kind(heads, 1, layer.kv_lora_rank, layer.qk_rope_head_dim, lengths, slack=0)
    kept = {"kept": Problem, "kept8": KeyCodesProblem}.get(case.way)
    return problem if kept is None else with_kept_keys(problem, kept)


def op_row(case: Case, seconds: float, device: str, shape: tuple[int, int] = OP) -> Row:
    """Microseconds of the decode call with a dirty L2; a status where it is wrong."""
    problem = op_problem(case, shape)
    decode = gqa_decode if case.way == "source" else mla_decode
    found = measure_decode(decode, lambda *_: {}, decode_case(problem), False, seconds, device)
    if found["status"] != "ok":
        return {"status": f"op: {found['status']}"}
    return {"op_us": found["us"], "op_graph_us": found["us_graph_warm"], "op_error": found["error"]}


@torch.no_grad()
def step_ms(model: Any, cache: PagedCache, batch: int, context: int, seconds: float) -> float:
    """Milliseconds of a step of one new token: of a CUDA graph; on a CPU of a call."""
    step, sequences = prepared(cache, batch, context)
    ids = torch.randint(0, model.config.vocab_size, (batch,), device=model.device)

    def run() -> None:
        step.refresh()
        model.forward_batch(ids, step)

    if model.device.type == "cpu":
        run()
        began = time.perf_counter()
        run()
        ms = (time.perf_counter() - began) * 1e3
    else:
        graph = captured(run)
        ms = replay_ms(graph, seconds)
        del graph
    for sequence in sequences:
        cache.close(sequence)
    return ms


def room(device: str) -> float:
    """Bytes for a cache."""
    return 2e6 if device == "cpu" else torch.cuda.mem_get_info()[0] - RESERVE


def step_rows(model: Any, case: Case, shapes: list[tuple[int, int]], seconds: float, device: str) -> Iterator[Row]:
    """Times of all shapes that fit, then of as many sequences as do, one after another."""
    size = cache_bytes_per_token(case.config, model.dtype.itemsize)
    torch.cuda.empty_cache()
    most = min(MOST, int(room(device) / (size * LONGEST)))
    fitting = [(batch, context) for batch, context in shapes if batch * context <= most * LONGEST]
    cache = cache_of(model, case, -(-max([most * LONGEST, *(b * c for b, c in fitting)]) // 64))
    for batch, context in shapes:
        is_there = (batch, context) in fitting
        yield {f"{batch}x{context}_ms": step_ms(model, cache, batch, context, seconds) if is_there else "does not fit"}
    if most:
        ms = step_ms(model, cache, most, LONGEST, seconds)
        yield {"fit": most, "fit_ms": ms, "tok/s": most / ms * 1e3}


def compile_all(names: list[ShapeName], device: str) -> None:
    """Kernels of all steps, side by side: of models of one layer, over short contexts."""

    def run() -> None:
        for name in names:
            for case in cases(name, num_hidden_layers=1):
                model = made(case, device)
                cache = case.pages(model, MOST)
                for batch in dict.fromkeys([*(batch for batch, _ in SHAPES), 128, 512, CHECKED[0]]):
                    step, sequences = prepared(cache, batch, 32)
                    model.forward_batch(torch.zeros(batch, dtype=torch.long, device=device), step)
                    for sequence in sequences:
                        cache.close(sequence)

    with torch.no_grad():
        compile_ahead(torch.device(device), ("whole models", names, MODELS, SHAPES), run)


def compare(row: Row, source: Row, rate: float) -> None:
    """Adds what a row is beside its source's, and how many times as long its steps take as reading weights and cache at
    ``rate``, bytes a second."""
    for batch, context in SHAPES:
        ms = row.get(f"{batch}x{context}_ms")
        if isinstance(ms, int | float):
            read = 1e9 * row["weights_GB"] + batch * context * row["bytes_a_token"]
            row[f"{batch}x{context}_over"] = ms / 1e3 * rate / read
    shares = {"bytes_a_token": "of_source", "op_us": "op_of_source", "64x8192_ms": "64x8192_of_source"}
    for key, name in {**shares, "tok/s": "tok/s_of_source"}.items():
        if isinstance(row.get(key), int | float) and isinstance(source.get(key), int | float):
            row[name] = row[key] / source[key]


def whole_models(
    only: str | None = None,
    min_run_time: float = 0.05,
    budget: float = 250.0,
    device: str = "cuda",
    json: str | None = None,
) -> bool:
    """Checks and times all models in all ways; prints one table.

    Args:
        only: rows whose name ("llama-3-8b source", "smollm2-135m kept") contains this, or one of these, separated by
            commas.
        min_run_time: seconds for each number.
        budget: seconds after which nothing more is begun.
        device: of the models.
        json: also write every row to this file, after each number.

    Returns:
        Whether every row that was reached is right.
    """
    until = time.monotonic() + budget
    wanted = [case for name in MODELS for case in cases(name)]
    wanted = [case for case in wanted if only is None or any(part in case.title for part in only.split(","))]
    compile_all(list(dict.fromkeys(case.name for case in wanted)), device)
    table = Recording("whole-models", json, **read_rate())
    sources: dict[str, Row] = {}
    held: tuple[Any, Any] = (None, None)
    for case in wanted:
        if time.monotonic() >= until:
            break
        row: Row = {"model": case.name, "way": case.way, "status": "ok"}
        sources.setdefault(case.name, row if case.way == "source" else {})
        row["bytes_a_token"] = cache_bytes_per_token(case.config, 2)
        table.add(row)
        try:
            small = next(each for each in cases(case.name, num_hidden_layers=1) if each.way == case.way)
            row |= check(small, device)
            if row["status"] == "ok":
                row |= op_row(case, min_run_time, device)
                layout = (case.name, case.way if case.way in ("source", "shared") else "latent")
                if held[0] != layout:
                    held = (None, None)
                    torch.cuda.empty_cache()
                    held = (layout, made(case, device))
                row["weights_GB"] = weight_bytes(held[1].model if case.way == "source" else held[1]) / 1e9
                for found in step_rows(held[1], case, list(SHAPES), min_run_time, device):
                    row |= found
                    compare(row, sources[case.name], table.fields["R"])
                    table.write()
                    if time.monotonic() >= until:
                        break
        except Exception as error:  # of TileLang or CUDA: other rows go on
            row["status"] = f"{type(error).__name__}: {error}"
        compare(row, sources[case.name], table.fields["R"])
        table.write()
        print({key: value for key, value in row.items() if key in COLUMNS}, flush=True)
    return table.show(f"whole models; R = {table.fields['R'] / 1e12:.2f} TB/s", COLUMNS)


if __name__ == "__main__":
    sys.exit(command(whole_models))
