"""Layout latent on a GPU with rotary keys computed whenever they are read against keys kept in 16 and in 8 bits.

    python benchmarks/rotary_keys.py --json benchmarks/results/h200-rotary-keys.json
    python benchmarks/rotary_keys.py --only "op 512+128,step qwen2.5-7b"

A row of ``op`` is one decode call over 64 sequences, 300 MB with kept keys; of ``step`` one step of a whole model with
random weights, over caches of random numbers. All ways are checked against float64 first: of a step, the logits of a
model of one such layer after a real prompt. The limit of a way reads its cache, and in a step the weights, once at R.
"share" is limit over time: of the op with a dirty L2, of a step as a CUDA graph.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Row, clean, measure_decode, read_rate
from benchmarks.peers import Peer
from benchmarks.recording import Recording, command
from benchmarks.shapes import SpeedCase, decode_case
from benchmarks.step_timeline import captured, prepared, replay_ms
from mha2mla.eval.latency import model_rows, weight_bytes
from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import mla_decode
from mha2mla.kernels.mla_decode.cost import kept_key_bits
from mha2mla.kernels.parallel_compilation import CompileJob, compile_in_processes, compile_job, compile_launches
from mha2mla.kernels.split_kv.op import compiled_shape
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.testing.problems import KeyCodesProblem, LatentProblem, Problem, judge
from mha2mla.testing.timing import time_callable
from mha2mla.trial_models import ShapeName, converted_config, random_model, source_config

WAYS = {"computed": "none", "kept": "bfloat16", "kept8": "int8"}  # rotary_key_cache
KEPT = {"kept": Problem, "kept8": KeyCodesProblem}
WIDTHS = ((512, 64), (1024, 64), (512, 128), (192, 128))  # d_c, d_r
HEADS = (9, 28, 40)
OP_BYTES, OP_BATCH = 300e6, 64
STEPS: dict[ShapeName, tuple[int, int]] = {"llama-3-8b": (1024, 64), "qwen2.5-7b": (512, 128)}
ROWS = ((1, 2048), (8, 2048), (16, 8192), (64, 8192), (128, 8192))  # sequences, tokens of each
CHECKED = (2, 1024)  # the same of the check of a step
COLUMNS = (
    "level", "shape", "H", "batch", "context", "auto", *(
        f"{way}_{key}" for key in ("MB", "us", "limit_us", "share", "graph_share", "error") for way in WAYS
    ), "gain", "gain8", "status",
)  # fmt: skip


def op_problem(heads: int, d_c: int, d_r: int, batch: int = OP_BATCH, size: float = OP_BYTES) -> LatentProblem:
    """A call over the latent alone, as long as ``size`` bytes with kept keys allow, in whole pages."""
    length = max(1, int(size / (2 * (d_c + d_r) * batch) / 64)) * 64
    return LatentProblem(heads, 1, d_c, d_r, (length,) * batch, slack=0)


def with_kept_keys(problem: LatentProblem, way: str = "kept") -> Problem:
    """The same call over stored keys."""
    return KEPT[way](**{field.name: getattr(problem, field.name) for field in fields(Problem)})


def peers_of(case: SpeedCase, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Peer]:
    """The calls over kept keys, on numbers of their own; judged against float64."""
    device, found = inputs["q_latent"].device, {}
    backend = "reference" if device.type == "cpu" else "tilelang"
    for way in KEPT:
        problem = with_kept_keys(case.problem, way)
        mine = problem.inputs(torch.bfloat16, device)
        call = partial(mla_decode, **mine, plan=problem.plan(mine, backend), backend=backend)
        judgement = judge(mine, *call(return_lse=True))
        clean(mine)
        found[way] = call if judgement.ok else f"wrong: {judgement.reason}"
    return found


def op_row(problem: LatentProblem, rate: float, min_run_time: float, device: str) -> Row:
    """All ways of a decode call; ``rate``: R, bytes per second."""
    found = measure_decode(mla_decode, peers_of, decode_case(problem), True, min_run_time, device)
    wrong = next((f"{way}: {found[way]}" for way in KEPT if isinstance(found.get(way), str)), None)
    width = f"{problem.kv_lora_rank}+{problem.qk_rope_head_dim}"
    row: Row = {"level": "op", "shape": width, "H": problem.heads, "batch": len(problem.lengths)}
    row |= {"context": problem.lengths[0], "status": wrong or found["status"], "computed_error": found["error"]}
    for way in WAYS:
        each = problem if way == "computed" else with_kept_keys(problem, way)
        us, graph = (found.get(key) for key in (("us", "us_graph_warm") if each is problem else (way, f"{way}_graph")))
        us, graph = (None, None) if isinstance(us, str) else (us, graph)
        row |= {f"{way}_MB": each.cache_bytes() / 1e6, f"{way}_limit_us": (limit := each.cache_bytes() / rate * 1e6)}
        row |= {} if us is None else {f"{way}_us": us, f"{way}_share": limit / us}
        row |= {} if graph is None else {f"{way}_graph_share": limit / graph}
    return row


def step_config(name: ShapeName, **changes: Any) -> MHA2MLAConfig:
    """Config of a converted model of layout latent."""
    d_c, d_r = STEPS[name]
    return converted_config(source_config(name, **changes), layout="latent", kv_lora_rank=d_c, qk_rope_head_dim=d_r)


def check_step(config: MHA2MLAConfig, shape: tuple[int, int], device: str) -> Row:
    """Status of a model's steps in all ways after ``shape`` [sequences, tokens], and their errors."""
    model = random_model(config, device, torch.float32 if device == "cpu" else torch.bfloat16)
    row: Row = {"status": "ok"}
    for way, mode in WAYS.items():
        model.config.rotary_key_cache = mode
        options = {"batch_sizes": shape[:1], "seqlens": shape[1:], "min_run_time": 1e-3}
        (found,) = model_rows({way: model}, levels=("step",), **options)
        row[f"{way}_error"] = found.get("error")
        if found["status"] != "ok" and (way != "kept8" or model.dtype != torch.float32):  # 8 bits are no rounding of 32
            row["status"] = f"{way}: {found['status']}"
    return row


@torch.no_grad()
def step_ms(model: MHA2MLAForCausalLM, cache: Any, batch: int, context: int, seconds: float) -> float:
    """Milliseconds of a step of one new token: of a CUDA graph; on a CPU of a call."""
    step, sequences = prepared(cache, batch, context)
    ids = torch.randint(0, model.config.vocab_size, (batch,), device=model.device)

    def run() -> None:
        step.refresh()
        model.forward_batch(ids, step)

    if model.device.type == "cpu":
        ms = time_callable(run, "cpu", min_run_time=seconds).p50 / 1e3
    else:
        graph = captured(run)
        ms = replay_ms(graph, seconds)
        del graph
    for sequence in sequences:
        cache.close(sequence)
    return ms


def step_rows(
    name: ShapeName, config: MHA2MLAConfig, shapes: list[tuple[int, int]], rate: float, seconds: float, device: str
) -> Iterator[Row]:
    """Rows of a model's steps, one way after the other; the last way completes them."""
    model = random_model(config, device, torch.float32 if device == "cpu" else torch.bfloat16)
    size, item = weight_bytes(model), model.dtype.itemsize
    rows: list[Row] = [
        {"level": "step", "shape": name, "H": config.num_attention_heads, "batch": batch, "context": context}
        for batch, context in shapes
    ]
    for way, mode in WAYS.items():
        model.config.rotary_key_cache = mode
        cache = model.paged_cache(max(batch * -(-context // 64) for batch, context in shapes))
        for tensors in cache.tensors:
            for tensor in tensors.values():
                tensor.copy_(torch.randn(tensor.shape, device=tensor.device, dtype=model.dtype))
        for row in rows:
            read = row["batch"] * row["context"] * model.config.cache_bytes_per_token(item)
            us = 1e3 * step_ms(model, cache, row["batch"], row["context"], seconds)
            row |= {f"{way}_MB": read / 1e6, f"{way}_us": us, f"{way}_limit_us": (size + read) / rate * 1e6}
            row[f"{way}_share"] = row[f"{way}_limit_us"] / us
        del cache
    yield from rows


def jobs() -> list[CompileJob]:
    """Kernels of the decode calls of all rows, for this machine's GPU."""
    here, found = torch.device("cuda", torch.cuda.current_device()), []
    heads = {source_config(name).num_attention_heads: widths for name, widths in STEPS.items()}
    cases = [(op_problem(h, *widths), [OP_BATCH]) for h in HEADS for widths in WIDTHS]
    cases += [(op_problem(h, *widths), [batch for batch, _ in ROWS]) for h, widths in heads.items()]
    for problem, batches in cases:
        calls = [(batch, lambda resident: resident) for batch in batches]
        for each in (problem, *(with_kept_keys(problem, way) for way in KEPT)):
            found.append(compile_job(each.op, compiled_shape(each.shape()), here, calls))
    return found


def rotary_keys(
    only: str | None = None,
    min_run_time: float = 0.1,
    budget: float = 170.0,
    json: str | None = None,
) -> bool:
    """Checks and times decode calls and steps with computed and with kept rotary keys, these in 16 and in 8 bits.

    Args:
        only: rows whose name ("op 512+64", "step llama-3-8b") contains this, or one of these, separated by commas.
        min_run_time: seconds for each way of each row.
        budget: seconds after which nothing more is begun.
        json: also write every row to this file.

    Returns:
        Whether every row that was reached is right.
    """
    until, device = time.monotonic() + budget, "cuda:0"

    def is_wanted(name: str) -> bool:
        return time.monotonic() < until and (only is None or any(part in name for part in only.split(",")))

    failures = compile_in_processes(compile_launches, jobs())
    rate = read_rate()
    table = Recording("rotary-keys", json, **rate, not_compiled=list(failures.values()))
    for d_c, d_r in WIDTHS:
        for heads in HEADS:
            if is_wanted(f"op {d_c}+{d_r}"):
                row, problem = {"level": "op", "shape": f"{d_c}+{d_r}", "H": heads}, op_problem(heads, d_c, d_r)
                try:
                    row = op_row(problem, rate["R"], min_run_time, device)
                except Exception as error:  # of TileLang or CUDA: other rows go on
                    row["status"] = f"{type(error).__name__}: {error}"
                add(table, row, problem.geometry)
    for name in STEPS:
        if not is_wanted(f"step {name}"):
            continue
        layer = step_config(name).layer_geometry(0)
        small = step_config(name, num_hidden_layers=1, vocab_size=1024, intermediate_size=1024)
        checked = check_step(small, CHECKED, device)
        if checked["status"] != "ok":
            add(table, {"level": "step", "shape": name} | checked, layer)
        elif is_wanted(f"step {name}"):
            for row in step_rows(name, step_config(name), list(ROWS), rate["R"], min_run_time, device):
                add(table, row | checked, layer)
        torch.cuda.empty_cache()
    title = f"rotary keys computed, and kept in 16 and 8 bits; R = {rate['R'] / 1e12:.2f} TB/s ({rate['R_from']})"
    return table.show(title, [column for column in COLUMNS if any(column in row for row in table.rows)])


def add(table: Recording, row: Row, layer: MLAGeometry) -> None:
    """Puts a row into the table, with what "auto" would take and how many times faster kept keys are."""
    row["auto"] = {0: "computed", 8: "kept8", 16: "kept"}[kept_key_bits((layer,))]
    for way, gain in zip(KEPT, ("gain", "gain8"), strict=True):
        if f"{way}_us" in row and "computed_us" in row:
            row[gain] = row["computed_us"] / row[f"{way}_us"]
    table.add(row)


if __name__ == "__main__":
    sys.exit(command(rotary_keys))
