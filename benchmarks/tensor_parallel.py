"""A decode step of a converted model on one GPU, or split over several by transformers' tensor parallelism.

    python benchmarks/tensor_parallel.py
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --json benchmarks/results/h200-two-gpus.json

Random weights of Llama-2-7B's shape (H=32, G=32, 512+16, bfloat16) over caches of random numbers: one new token in each
of 64 sequences of 8192. "ms" is a replay of the step as a CUDA graph, collectives included; "eager ms" the wall clock
without one. The limit reads what the step reads on one GPU, its weights and its cache, at 4 TB/s. Before anything is
timed, the logits of a short sequence must be those of the decode op's torch reference.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from benchmarks.recording import Recording, command
from benchmarks.step_timeline import captured, fill, gpu_events, judge, layout_config, prepared, replay_ms
from mha2mla.modeling import MHA2MLAForCausalLM

READ_RATE = 4e12


def build(layers: int, gpus: int, layout: str = "per head 512+16") -> MHA2MLAForCausalLM:
    """A random model, on this rank's GPU the rank's part of it; the same numbers on all ranks where they share them."""
    config = layout_config(layout, layers)
    torch.manual_seed(0)
    if gpus == 1:
        with torch.device("cuda"):
            return MHA2MLAForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    split = {"tp_size": gpus}
    return MHA2MLAForCausalLM.from_pretrained(
        None, config=config, state_dict={}, dtype=torch.bfloat16, distributed_config=split
    ).eval()


def local_bytes(model: MHA2MLAForCausalLM) -> int:
    """Bytes of weights that a step reads on this GPU: all but the embeddings."""
    own = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    embeddings = model.get_input_embeddings().weight
    embeddings = embeddings.to_local() if hasattr(embeddings, "to_local") else embeddings
    return sum(each.nbytes for each in own) - embeddings.nbytes


@torch.no_grad()
def measure(model: MHA2MLAForCausalLM, batch: int, context: int, replays: int) -> dict[str, Any]:
    """One row."""
    cache = model.paged_cache(batch * -(-context // 64) + 32)
    fill(cache)
    step, sequences = prepared(cache, 1, 2048)
    found = judge(model, cache, step, torch.zeros(1, dtype=torch.long, device=model.device))
    cache.close(sequences[0])
    step, _ = prepared(cache, batch, context)
    ids = torch.zeros(batch, dtype=torch.long, device=model.device)

    def run() -> Tensor:
        step.refresh()
        return model.forward_batch(ids, step)

    own = sum(tensor[0].nbytes for tensors in cache.tensors for tensor in tensors.values()) * batch * -(-context // 64)
    limit = (local_bytes(model) + own) / READ_RATE * 1e3
    row = {"batch": batch, "context": context, "cache_gb": own / 1e9, "limit_ms": limit, **found}
    row["eager_ms"] = _eager_ms(run)
    graph = captured(run)
    _together()
    row["ms"] = replay_ms(graph, least=replays)  # the same number on every rank, since each waits for the others in it
    row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row | {"ratio": row["ms"] / limit} | _parts(graph)


def _parts(graph: torch.cuda.CUDAGraph, replays: int = 3) -> dict[str, float]:
    """Milliseconds of the last of some replays in collectives, waiting included, and in the decode op."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _together()  # starting the profiler takes one rank longer than another
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    events = gpu_events(profiler)
    last = events[-(len(events) // replays) :]
    names = {"collectives_ms": "nccl", "decode_ms": "mla_decode_"}
    return {
        key: sum(event.time_range.elapsed_us() for event in last if name in event.name) / 1e3
        for key, name in names.items()
    }


def _eager_ms(run: Any, runs: int = 5) -> float:
    times = []
    for _ in range(runs + 1):
        _together()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[1:]) * 1e3


def _together() -> None:
    torch.cuda.synchronize()
    if distributed.is_initialized():
        distributed.barrier()


def tensor_parallel(
    batch: int = 64, context: int = 8192, layers: int = 32, replays: int = 50, json: str | None = None
) -> bool:
    """Measures a step on as many GPUs as torchrun started, and prints its row.

    Args:
        batch: sequences.
        context: tokens of each, the new one included.
        layers: of the model.
        replays: of the step, whose median is taken.
        json: also write the row to this file.
    """
    gpus = int(os.environ.get("WORLD_SIZE", "1"))
    row = {"gpus": gpus, **measure(build(layers, gpus), batch, context, replays)}
    if gpus > 1:
        row["peer_access"] = torch.cuda.can_device_access_peer(0, 1)
        rows: list[Any] = [None] * gpus
        distributed.all_gather_object(rows, row)
        row = max(rows, key=lambda each: each["ms"])  # a step ends with its slowest rank
        distributed.barrier()
        distributed.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        table = Recording("tensor_parallel", json)
        table.add(row)
        table.show(f"a decode step of Llama-2-7B's shape, {layers} layers, H=32, G=32, 512+16, bfloat16")
    return row["status"] == "ok"


if __name__ == "__main__":
    sys.exit(command(tensor_parallel))
