"""A decode step of a converted model: its time in a CUDA graph against what memory allows, and its kernels one by one.

    python benchmarks/step_timeline.py --json benchmarks/results/h200-step.json --timeline

Weights and caches are random numbers, of Llama-2-7B's and Llama-3-8B's shapes. The limit reads all weights of a step
and the cache once at R, the read rate of this run. A step is made in two ways: "fewer" is what the model serves with;
"parts" is the base model's own modules with every projection by itself, which a hook on each asks for. At batch 1 their
logits are compared before anything is timed: the new way may be twice as far as the old from what the decode op's torch
reference gives.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import read_rate
from benchmarks.recording import Recording, command
from mha2mla.eval.latency import weight_bytes
from mha2mla.eval.report import print_table
from mha2mla.modeling import MHA2MLAConfig, MHA2MLAForCausalLM
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.paged_cache import PagedCache
from mha2mla.modeling.registry import GQAGeometry
from mha2mla.modeling.step import AttentionStep
from mha2mla.testing.numeric_check import ERROR_FACTOR
from mha2mla.trial_models import ShapeName, converted_config, random_model, source_config

SMALL = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 96, "vocab_size": 64, "head_dim": 16}
# name -> source, its kv heads in a small model, layout, and widths at full size and of the small model.
LAYOUTS: dict[str, tuple[ShapeName, int, str, tuple[int, int], tuple[int, int]]] = {
    "per head 512+16": ("llama-2-7b", 8, "per-group", (512, 16), (32, 8)),
    "shared 448+64": ("llama-3-8b", 2, "shared", (448, 64), (32, 8)),
    "latent 512": ("llama-3-8b", 2, "latent", (512, 64), (32, 8)),
}
ROWS = ((1, 2048), (8, 2048), (16, 8192), (64, 8192), (128, 8192))
COLUMNS = (
    "layout", "batch", "context", "way", "ms", "limit_ms", "ratio", "kernels", "busy_ms", "gap_ms", "status",
)  # fmt: skip


def layout_config(layout: str, layers: int, small: bool = False) -> MHA2MLAConfig:
    """Config of a layout's model."""
    name, kv_heads, kind, widths, few = LAYOUTS[layout]
    changes = SMALL | {"num_key_value_heads": kv_heads} if small else {}
    source = source_config(name, num_hidden_layers=layers, **changes)
    rank, rope = few if small else widths
    return converted_config(source, layout=kind, kv_lora_rank=rank, qk_rope_head_dim=rope)


def build(layout: str, layers: int, small: bool, device: torch.device, dtype: torch.dtype) -> MHA2MLAForCausalLM:
    """A random model of a layout."""
    return random_model(layout_config(layout, layers, small), device, dtype)


@contextmanager
def in_parts(model: nn.Module) -> Iterator[None]:
    """The base model's own forward, and every projection by itself."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_hook(_nothing) for module in (model.model.norm, *linears)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nothing(*_: object) -> None:
    """A hook that leaves everything as it is."""


def fill(cache: PagedCache) -> None:
    """Pages of random numbers."""
    for tensors in cache.tensors:
        for tensor in tensors.values():
            tensor.normal_()


def prepared(cache: PagedCache, batch: int, context: int) -> tuple[AttentionStep, list[int]]:
    """A step of one new token in each of ``batch`` sequences, which have ``context`` tokens with it."""
    sequences = [cache.open() for _ in range(batch)]
    cache.extend(dict.fromkeys(sequences, context - 1))
    return cache.step(cache.extend(dict.fromkeys(sequences, 1))), sequences


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """``call`` as a graph, after a call that compiles and moves what is to be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog is no error of this thread
        call()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, seconds: float = 0.0, least: int = 5) -> float:
    """Median time of a replay, of ``least`` and as many as fit ``seconds``; each reads more than the L2 holds."""
    times: list[float] = []
    until = time.monotonic() + seconds
    while len(times) < least or time.monotonic() < until:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def gpu_events(profiler: Any) -> list[Any]:
    """What a torch profiler has seen on the GPU, in order."""
    events = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return sorted(events, key=lambda event: event.time_range.start)


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[dict[str, Any]]:
    """The kernels of a replay in order: name, microseconds, and the gap before each."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    found, before = [], None
    for event in gpu_events(profiler):
        gap = 0.0 if before is None else event.time_range.start - before
        before = max(before or 0.0, event.time_range.end)
        found.append({"kernel": event.name[:90], "us": event.time_range.elapsed_us(), "gap_us": gap})
    return found


def by_plain_torch(cache: PagedCache) -> PagedCache:
    """The same pages, over which the ops' references attend."""
    kind = "gqa" if isinstance(cache.layers[0].constants.geometry, GQAGeometry) else "mla"
    plain, found = ATTENTION_BACKENDS.get(f"{kind}_reference"), copy.copy(cache)
    found.layers = tuple(replace(layer, backend=plain) for layer in cache.layers)
    return found


def distances(expected: Tensor, new: Tensor, old: Tensor, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Relative ones, ``old``'s under ``name``, and whether ``new`` is at most twice as far off, but for ``dtype``'s
    rounding."""
    here, there = (float((logits.double() - expected).norm() / expected.norm()) for logits in (new, old))
    right = here <= ERROR_FACTOR * there + torch.finfo(dtype).eps
    return {"error": here, name: there, "status": "ok" if right else f"wrong: {here:.2g} against {there:.2g}"}


def judge(model: MHA2MLAForCausalLM, cache: PagedCache, step: AttentionStep, ids: Tensor) -> dict[str, Any]:
    """Distances of both ways' logits from those of plain torch on the same cache, relative, and whether all is well."""
    reference = by_plain_torch(cache)
    with in_parts(model):
        expected = model.forward_batch(ids, reference.step(step.batch)).double()
        parts = model.forward_batch(ids, step)
    fewer = model.forward_batch(ids, step)
    return distances(expected, fewer, parts, "parts_error", model.dtype)


def measure(
    model: MHA2MLAForCausalLM, cache: PagedCache, batch: int, context: int, rate: float, seconds: float, ways: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows of one batch and context, a way at a time."""
    step, sequences = prepared(cache, batch, context)
    ids = torch.randint(0, model.config.vocab_size, (batch,), device=model.device)
    size = weight_bytes(model) + batch * context * model.config.cache_bytes_per_token(model.dtype.itemsize)
    found = judge(model, cache, step, ids) if batch == 1 else {}

    def run() -> None:
        step.refresh()
        model.forward_batch(ids, step)

    common = {"batch": batch, "context": context, "bytes": size, "limit_ms": size / rate * 1e3} | found
    if common.get("status", "ok") != "ok":
        yield common
        ways = []
    for way in ways:
        row = common | {"way": way}
        if way == "parts":
            with in_parts(model):
                graph = captured(run)
        else:
            graph = captured(run)
        row["ms"] = replay_ms(graph, seconds)
        row["ratio"] = row["ms"] / row["limit_ms"]
        timeline = kernels_of(graph)
        row |= summary(timeline, model.config.num_hidden_layers)
        del graph
        yield row
    for sequence in sequences:
        cache.close(sequence)


def summary(timeline: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """Kernels of a replay, milliseconds inside them (kernels that wait for others overlap) and between them, and from
    its middle about as many kernels as a layer has."""
    busy, gaps = (sum(max(0.0, each[key]) for each in timeline) / 1e3 for key in ("us", "gap_us"))
    length, middle = -(-len(timeline) // layers), len(timeline) // 2
    return {"kernels": len(timeline), "busy_ms": busy, "gap_ms": gaps, "layer": timeline[middle : middle + length]}


def products(model: MHA2MLAForCausalLM, rate: float) -> list[dict[str, Any]]:
    """Bytes of the weights that a layer's products read, in order, and the microseconds that R allows for them."""
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    reads = {
        "query and latent": (attention.q_proj.weight, attention.kv_a_proj.weight),
        "W_UK": (attention.k_b_proj,),
        "W_UV": (attention.v_b_proj,),
        "output": (attention.o_proj.weight,),
        "gate and up": (mlp.gate_proj.weight, mlp.up_proj.weight),
        "down": (mlp.down_proj.weight,),
    }
    sizes = {name: sum(weight.nbytes for weight in weights) for name, weights in reads.items()}
    return [{"product": name, "MB": size / 1e6, "limit_us": size / rate * 1e6} for name, size in sizes.items()]


@torch.no_grad()
def step_timeline(
    layout: list[str] | None = None,
    row: list[int] | None = None,
    way: list[str] | None = None,
    layers: int = 32,
    min_run_time: float = 0.3,
    budget: float = 1e9,
    timeline: bool = False,
    json: str | None = None,
) -> bool:
    """Times the steps, prints their table, and with ``timeline`` a layer's kernels of each.

    Args:
        layout: names of LAYOUTS; default all.
        row: which of ROWS; default all.
        way: "parts", "fewer"; default both.
        layers: of the models.
        min_run_time: seconds of replays for each row.
        budget: seconds after which nothing more is begun.
        timeline: print the kernels of about one layer.
        json: also write every row, with about a layer of its kernels, to this file.

    Returns:
        Whether every row that was reached is right.
    """
    until = time.monotonic() + budget
    rate, chosen = read_rate(), [ROWS[index] for index in row or range(len(ROWS))]
    table = Recording("decode-step", json, **rate)
    for name in layout or LAYOUTS:
        model = build(name, layers, False, torch.device("cuda"), torch.bfloat16)
        page = 64
        cache = model.paged_cache(max(batch * -(-context // page) for batch, context in chosen), page)
        fill(cache)
        if timeline:
            print_table(products(model, rate["R"]), title=f"{name}: what a layer's products read")
        for batch, context in chosen:
            if time.monotonic() >= until:
                break
            for found in measure(model, cache, batch, context, rate["R"], min_run_time, way or ["parts", "fewer"]):
                table.add({"layout": name, "layers": layers, **found})
                if timeline and "layer" in found:
                    print_table(found["layer"], title=f"{name}, {batch} × {context}")
        del model, cache
        torch.cuda.empty_cache()
    return table.show("a decode step", COLUMNS)


if __name__ == "__main__":
    sys.exit(command(step_timeline))
