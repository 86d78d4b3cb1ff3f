"""Tokens per second of the research loop: a source model at the largest batch that fits, and what it converts to.

    python benchmarks/loop.py --json benchmarks/results/h200-loop.json
    python benchmarks/loop.py --layers 2 --context 512 --only mla

Random weights of Llama-2-7B's shape in bfloat16: MHA by ``gqa_decode`` under transformers' own modules, and MLA with
one rotary key per head (512+16, an eighth of the cache), both through :class:`mha2mla.loop.Loop`. The cache is filled
with random numbers, since prompts of 64 × 8k tokens need not run for the time of a decode step; every row says so.
Before anything is timed a sequence's logits of a loop step, a CUDA graph over the whole batch, may be twice as far from
those of plain torch over the same cache as those of a batch of one. Tokens per second are the wall clock of the loop's
steps, host and sampling included; the graph's milliseconds are those of its replays alone.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from benchmarks.generate import replay_seconds, wait
from benchmarks.recording import Recording, command
from benchmarks.step_timeline import by_plain_torch, distances, fill
from mha2mla.loop import Loop, Sampling
from mha2mla.modeling import PagedSource, paged_model
from mha2mla.modeling.captured import Recorder
from mha2mla.trial_models import converted_config, random_model, source_config

RESERVE = 2 * 2**30  # bytes beside weights and cache: logits, partial results, graphs
PAGE = 64
WARM_UP = 4  # steps, the graph's capture among them


def build(name: str, layers: int, device: str) -> Any:
    """A random model: "mha", or "mla" at an eighth of its cache."""
    shape = source_config("llama-2-7b", num_hidden_layers=layers)
    if name == "mla":
        shape = converted_config(shape, layout="per-group", kv_lora_rank=512, qk_rope_head_dim=16)
    model = random_model(shape, device, torch.bfloat16)
    if name == "mla":
        return model
    model.set_attn_implementation("mha2mla")
    return paged_model(model)


def _module(model: Any) -> torch.nn.Module:
    return model.model if isinstance(model, PagedSource) else model


def largest_batch(model: Any, pages: int) -> int:
    """Sequences of so many pages that fit the memory that is free."""
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int((free - RESERVE) // (pages * model.paged_cache(1, PAGE).nbytes))


@torch.inference_mode()
def filled_loop(
    model: Any, batch: int, context: int, steps: int, recorder: Recorder | None = None
) -> tuple[Loop, list[Any]]:
    """A loop that runs ``batch`` requests, of which all but the last token of a prompt of ``context`` is cached:
    random numbers, a page for each page."""
    pages = -(-(context + steps) // PAGE)
    sizes = {"num_pages": batch * pages, "page_size": PAGE, "max_sequences": batch, "max_length": pages * PAGE}
    loop = Loop(model, **sizes, share_prefixes=False, recorder=recorder)
    fill(loop.cache)
    sequences = [loop.cache.open() for _ in range(batch)]
    for sequence in sequences:
        loop.cache.extend({sequence: context - 1})
    prompts = torch.randint(3, model.config.vocab_size, (batch, 1)).expand(batch, context).tolist()
    pairs = zip(prompts, sequences, strict=True)
    return loop, [loop.adopt(prompt, sequence, Sampling(steps, temperature=0.0)) for prompt, sequence in pairs]


@torch.inference_mode()
def judge(model: Any, loop: Loop) -> dict[str, Any]:
    """Distances from plain torch's logits of one sequence: of a batch of one, and of the loop's first step."""
    cache = loop.cache
    request = loop.scheduler.running[0]
    batch = cache.extend({request.sequence: 1})
    ids = torch.tensor(request.prompt[-1:], device=cache.device)
    expected = model.forward_batch(ids, by_plain_torch(cache).step(batch)).double()
    one = model.forward_batch(ids, cache.step(batch))
    cache.crop(request.sequence, len(request.prompt) - 1)
    chunks = loop.scheduler.schedule()
    logits, ordered, slots = loop.runner.run(chunks)
    row = next(index for index, chunk in enumerate(ordered) if chunk is not None and chunk.request is request)
    mine = logits[row : row + 1].clone()
    tokens = loop.runner.last[slots] = logits.argmax(-1)
    real = [(chunk, token) for chunk, token in zip(ordered, tokens.tolist(), strict=True) if chunk is not None]
    loop.scheduler.complete([chunk for chunk, _ in real], [token for _, token in real])
    return distances(expected, mine, one, "error_of_one", torch.bfloat16)


def measure(
    name: str, model: Any, batch: int, context: int, steps: int, recorder: Recorder | None = None
) -> dict[str, Any]:
    """One row."""
    row = {"model": name, "batch": batch, "context": context, "filled": "random numbers, not prompts"}
    row["weights_gb"] = sum(each.nbytes for each in _module(model).parameters()) / 1e9
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    loop, requests = filled_loop(model, batch, context, steps + WARM_UP + 2, recorder)
    row["cache_gb"] = loop.cache.nbytes / 1e9
    row |= judge(model, loop)
    if row["status"] != "ok":
        return row
    for _ in range(WARM_UP):
        loop.step()
    wait()
    before, began = loop.progress.new_tokens, time.perf_counter()
    for _ in range(steps):
        loop.step()
    wait()  # a step is launched before the one before is read
    seconds = time.perf_counter() - began
    made = loop.progress.new_tokens - before
    if loop.runner.uncaptured or made != batch * steps or not all(request.finished is None for request in requests):
        row["status"] = f"wrong: {made} tokens, uncaptured: {loop.runner.uncaptured}"
    row |= {"tokens_per_s": made / seconds, "step_ms": seconds / steps * 1e3}
    loop.drain()
    graphs = loop.runner.graphs
    row["graph_ms"] = replay_seconds(graphs[max(graphs)].replay, 10) * 1e3 if graphs else None
    row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def largest(name: str, model: Any, batch: int, *how: int) -> dict[str, Any]:
    """:func:`measure` of ``batch`` sequences, or as many fewer as memory has room for in the end."""
    while True:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return measure(name, model, batch, *how)
        except torch.OutOfMemoryError:
            batch -= 1


def tokens(
    batch: int = 64,
    context: int = 8192,
    steps: int = 48,
    layers: int = 32,
    only: str | None = None,
    json: str | None = None,
) -> bool:
    """Measures MHA at the largest batch that fits, up to ``batch``, then MLA at that batch and at ``batch``.

    Args:
        batch: sequences.
        context: cached tokens of each.
        steps: that are timed; each makes a token of each sequence.
        layers: of the models.
        only: "mha" or "mla".
        json: also write every row to this file, as they come.
    """
    table, most, source = Recording("loop", json), batch, None
    for name in [only] if only else ["mha", "mla"]:
        model = build(name, layers, "cuda")
        fits = min(batch, largest_batch(model, -(-(context + steps + WARM_UP + 2) // PAGE)))
        for size in dict.fromkeys((fits if name == "mha" else min(most, fits), fits)):
            row = {"layers": layers, **largest(name, model, size, context, steps)}
            if name == "mha":
                most = row["batch"]
                source = source or (row if "tokens_per_s" in row else None)
            if source is not None and "tokens_per_s" in row:
                row["of_source"] = row["tokens_per_s"] / source["tokens_per_s"]
            table.add(row)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return table.show(f"decode through the loop: Llama-2-7B's shape, {layers} layers, bfloat16, random weights")


if __name__ == "__main__":
    sys.exit(command(tokens))
