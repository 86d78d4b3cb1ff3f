"""A step of an engine: decodes and prompts in one call of the mixed-batch op, against several calls.

    python benchmarks/mixed_batch.py --json benchmarks/results/h200-mixed-batch.json
    python benchmarks/mixed_batch.py --device cpu --dtype float32 --decodes 3 --context 40 --prompt 30 --layer small

What is timed is what a layer does with its projections: RoPE and writing of the new tokens, then attention. The plan is
made before and timed apart, since all layers share it. Before anything is timed, every way's results are compared with
those of the sequences one by one, which see the same cache; each row is printed, and written to the file, as soon as it
is measured. The main number is the median with a cold L2 (``triton.testing.do_bench``); beside it, the same from a CUDA
graph with a warm one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Recording, command
from mha2mla.geometry import MLAGeometry
from mha2mla.kernel_testing.timing import time_callable
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.batch import SequenceBatch
from mha2mla.modeling.paged_cache import PagedCache
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants, GQAGeometry

LAYERS: dict[str, MLAGeometry | GQAGeometry] = {
    # Llama-2-7B's heads, one shared rotary key
    "shared": MLAGeometry(32, 1, 512, 64, 64, 128, 32),
    # Llama-2-7B as MHA2MLA converts it: a rotary key of 16 for every head
    "per-head": MLAGeometry(32, 32, 512, 16, 112, 128, 32),
    # Llama-3-8B's heads
    "grouped": MLAGeometry(32, 8, 512, 16, 112, 128, 8),
    "MHA": GQAGeometry(32, 32, 128, 128),
    "GQA": GQAGeometry(32, 8, 128, 128),
    "small": MLAGeometry(4, 2, 16, 8, 8, 16, 2),
    "small GQA": GQAGeometry(4, 2, 16, 16),
}
ONE_BY_ONE = "one sequence at a time"

_PLAN_ROUNDS = 7


@dataclass(frozen=True)
class Call:
    """One call of a layer: which of the step's tokens it serves, and what it is given."""

    tokens: Tensor
    tensors: dict[str, Tensor]
    batch: SequenceBatch
    plan: Any


class Step:
    """A layer's inputs for ``decodes`` sequences with a context and one new token each, and prompts without a context.

    Args:
        backend, geometry: of the layer.
        contexts: cached tokens of each sequence.
        queries: new tokens of each.
        dtype, device: of everything.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        geometry: MLAGeometry | GQAGeometry,
        contexts: list[int],
        queries: list[int],
        dtype: torch.dtype,
        device: torch.device,
        page_size: int = 64,
    ) -> None:
        self.backend, self.device, self.dtype = backend, device, dtype
        width = geometry.qk_head_dim if isinstance(geometry, GQAGeometry) else geometry.v_head_dim
        self.constants = AttentionConstants(geometry, softmax_scale=width**-0.5)
        self.contexts, self.queries = contexts, queries
        pages = sum(-(-(old + new) // page_size) for old, new in zip(contexts, queries, strict=True))
        self.cache = PagedCache([(backend, self.constants)], pages, page_size, dtype=dtype, device=device)
        make = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=make, device=device) * scale).to(dtype)

        for tensor in self.cache.tensors[0].values():
            tensor.copy_(normal(*tensor.shape))
        self.sequences = [self.cache.open() for _ in contexts]
        for sequence, length in zip(self.sequences, contexts, strict=True):
            self.cache.allocator.grow(sequence, length)
        for sequence, length in zip(self.sequences, queries, strict=True):
            self.cache.allocator.grow(sequence, length)
        tokens = sum(queries)
        self.weights: dict[str, Tensor] = {}

        def frequencies(*shape: int) -> Tensor:
            return torch.rand(shape, generator=make, device=device)

        if isinstance(geometry, GQAGeometry):
            self.weights["inv_freq"] = frequencies(1, geometry.qk_head_dim // 2)
            heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
            self.tensors = {
                "query": normal(tokens, heads, geometry.qk_head_dim),
                "key": normal(tokens, kv_heads, geometry.qk_head_dim),
                "value": normal(tokens, kv_heads, geometry.v_head_dim),
            }
        else:
            self.weights["inv_freq"] = frequencies(geometry.num_rope_heads, geometry.qk_rope_head_dim // 2)
            heads, kv_heads, latent = geometry.num_attention_heads, geometry.num_key_value_heads, geometry.kv_lora_rank
            self.tensors = {
                "q_nope": normal(tokens, heads, geometry.qk_nope_head_dim),
                "q_pe": normal(tokens, heads, geometry.qk_rope_head_dim),
                "latent": normal(tokens, latent),
                "k_pe": normal(tokens, geometry.num_rope_heads, geometry.qk_rope_head_dim),
            }
            self.weights["k_up"] = normal(kv_heads, geometry.qk_nope_head_dim, latent, scale=latent**-0.5)
            self.weights["v_up"] = normal(kv_heads, geometry.v_head_dim, latent, scale=latent**-0.5)

    def calls(self, parts: list[list[int]]) -> list[Call]:
        """A call for each part of the step's sequences, given by their places."""
        begins = [sum(self.queries[:index]) for index in range(len(self.queries))]
        made = []
        for part in parts:
            batch = SequenceBatch.build(
                [self.queries[index] for index in part],
                [self.contexts[index] for index in part],
                [self.cache.allocator.pages(self.sequences[index]) for index in part],
                self.cache.allocator.page_size,
                device=self.device,
            )
            spans = [torch.arange(begins[index], begins[index] + self.queries[index]) for index in part]
            tokens = batch.flatten(spans).to(self.device)
            mine = {name: tensor.index_select(0, tokens) for name, tensor in self.tensors.items()}
            plan = self.backend.plan(self.cache.tensors[0], batch, self.constants, self.dtype)
            made.append(Call(tokens, mine | self.weights, batch, plan))
        return made

    def plan_us(self, calls: list[Call]) -> float:
        """Microseconds that the host is busy with the plans of all calls; the median of a few rounds."""
        rounds = []
        for _ in range(_PLAN_ROUNDS):
            began = time.perf_counter()
            for call in calls:
                self.backend.plan(self.cache.tensors[0], call.batch, self.constants, self.dtype)
            rounds.append((time.perf_counter() - began) * 1e6)
        return median(rounds)

    def run(self, calls: list[Call]) -> list[Tensor]:
        """What a layer does, call by call."""
        cache = self.cache.tensors[0]
        return [self.backend.run(call.tensors, cache, call.batch, call.plan, self.constants) for call in calls]

    def result(self, calls: list[Call]) -> Tensor:
        """[N, H, d_v] in the step's own order."""
        outs = self.run(calls)
        whole = outs[0].new_empty(sum(self.queries), *outs[0].shape[1:])
        for call, out in zip(calls, outs, strict=True):
            whole[call.tokens] = out
        return whole


@torch.inference_mode()
def mixed_batch(
    decodes: int = 60,
    context: int = 4096,
    prefills: int = 2,
    prompt: int = 2000,
    prompt_context: int = 0,
    layer: list[str] | None = None,
    dtype: str = "bfloat16",
    device: str = "cuda",
    backend: str | None = None,
    min_run_time: float = 0.3,
    budget: float = 1e9,
    json: str | None = None,
) -> bool:
    """Times a step of ``decodes`` sequences with one new token and ``prefills`` prompts, in one call and in several.

    Args:
        decodes: sequences that bring one token.
        context: tokens that each of these has cached.
        prefills: sequences that bring a prompt, or a chunk of one.
        prompt: its tokens.
        prompt_context: tokens cached before the chunk.
        layer: names of layers; default those of full size.
        dtype: of inputs and caches.
        device: where to run.
        backend: name of the attention backend; default the first that serves a layer.
        min_run_time: seconds of measuring for each row.
        budget: seconds after which nothing more is begun.
        json: also write every row to this file.

    Returns:
        Whether every way that was tried gave the same results.
    """
    until = time.monotonic() + budget
    names = [name for name in LAYERS if not name.startswith("small")] if layer is None else layer
    where, number = torch.device(device), getattr(torch, dtype)
    contexts, queries = [context] * decodes + [prompt_context] * prefills, [1] * decodes + [prompt] * prefills
    everyone = list(range(decodes + prefills))
    ways = {
        "one call": [everyone],
        "decodes, then each prompt": [everyone[:decodes], *([index] for index in everyone[decodes:])],
        ONE_BY_ONE: [[index] for index in everyone],
    }
    table = Recording("mixed-batch", json)
    for name in names:
        if time.monotonic() >= until:
            print(f"{name}: no time left", flush=True)
            break
        geometry = LAYERS[name]
        chosen = ATTENTION_BACKENDS.choose(backend, geometry, 64, number, where)
        step = Step(chosen, geometry, contexts, queries, number, where)
        calls = {way: step.calls([part for part in parts if part]) for way, parts in ways.items()}
        expected = step.result(calls[ONE_BY_ONE])
        one_call: float | None = None
        for way, mine in calls.items():
            result = expected if way == ONE_BY_ONE else step.result(mine)
            difference = float((result - expected).float().norm() / expected.float().norm())
            row = {"layer": f"{name} ({chosen.name})", "way": way, "calls": len(mine), "difference": difference}
            # Other splits of a sequence round partial sums elsewhere: half a unit of the last place, twice.
            row["same"] = difference <= torch.finfo(number).eps
            if row["same"] and time.monotonic() < until:
                graph = way != ONE_BY_ONE  # hundreds of small kernels, which nobody would run so
                row |= _timed(lambda step=step, mine=mine: step.run(mine), where, min_run_time, graph)
                row["plan_us"] = step.plan_us(mine)
                one_call = row["us"] if one_call is None else one_call
                row["ratio"] = row["us"] / one_call
            table.add(row)
        del step, calls, expected, result
    table.show(f"{decodes} decodes over {context} + {prefills} prompts of {prompt} over {prompt_context}, {dtype}")
    return all(row["same"] for row in table.rows)


def _timed(call: Callable[[], Any], device: torch.device, min_run_time: float, graph: bool) -> dict[str, Any]:
    timing = time_callable(call, device, min_run_time=min_run_time, graph=graph)
    return {"us": timing.p50, "us_p20": timing.p20, "us_p80": timing.p80, "us_graph": timing.graph}


if __name__ == "__main__":
    sys.exit(command(mixed_batch, cpu=True))
