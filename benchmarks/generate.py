"""Time of a token of generate: captured, uncaptured, and the graph alone; and the first token beside the source's.

    python benchmarks/generate.py --json benchmarks/results/h200-generate.json
    python benchmarks/generate.py --models "smollm2-135m computed" --batches "[1, 8, 16]"

Models of ``whole_models.py``: random weights, bfloat16. Milliseconds a token are the wall clock of a greedy generate
less that of one which makes its prompt's token only, over the tokens between, transformers' own work included; the
graph's are device time of the replays alone. The captured tokens must be the uncaptured ones. The source runs the same
prompts with torch's SDPA.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import PreTrainedModel

from benchmarks.recording import Recording, command
from benchmarks.whole_models import cases
from mha2mla.eval.latency import greedy, median_seconds, weight_bytes
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.trial_models import random_model


@torch.no_grad()
def measure(
    model: MHA2MLAForCausalLM, source: PreTrainedModel, batch: int, prompt: int, new_tokens: int = 128, runs: int = 3
) -> dict[str, Any]:
    """One row: a batch of random prompts, of which ``new_tokens`` follow; medians over ``runs`` at most."""
    ids = torch.randint(3, model.config.vocab_size, (batch, prompt), device=model.device)
    row = {"batch": batch, "prompt": prompt, "layers": model.config.num_hidden_layers}
    ways = {"captured": True, "uncaptured": False}
    captured, uncaptured = (greedy(model, ids, new_tokens, capture=capture) for capture in ways.values())  # warms up
    if not torch.equal(captured, uncaptured):
        return row | {"status": "wrong: other tokens than uncaptured"}
    for name, capture in ways.items():
        long, short = (median_seconds(model, ids, count, runs, capture=capture) for count in (new_tokens, 1))
        row[f"{name}_ms"] = (long - short) / (new_tokens - 1) * 1e3
        if capture:
            row["first_ms"] = short * 1e3
    greedy(source, ids, 1)
    row["source_first_ms"] = median_seconds(source, ids, 1, runs) * 1e3
    row["of_source"] = row["first_ms"] / row["source_first_ms"]

    cache = greedy(model, ids, new_tokens, capture=True, return_dict_in_generate=True).past_key_values
    graphs = {} if cache.captured is None else cache.captured._graphs
    replays = [graph.replay for graph in graphs.values() if graph is not None]
    if len(replays) != 1:
        return row | {"status": f"wrong: {len(replays)} steps are captured, {model.explain_uncaptured()}"}
    row["graph_ms"] = replay_seconds(replays[0], min(new_tokens, cache.capacity - prompt - new_tokens)) * 1e3
    row["of_graph"] = row["captured_ms"] / row["graph_ms"]
    read = weight_bytes(model) + batch * prompt * model.config.cache_bytes_per_token(model.dtype.itemsize)
    return row | {"read_ms_at_4TBs": read / 4e12 * 1e3, "status": "ok"}


@torch.inference_mode()
def replay_seconds(replay: Any, count: int) -> float:
    """Time of one replay among many; each may cache a token more."""
    wait()
    began = time.perf_counter()
    for _ in range(count):
        replay()
    wait()
    return (time.perf_counter() - began) / count


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tokens(
    models: str = "llama-3-8b kept,qwen2.5-7b kept",
    batches: Sequence[int] = (1, 8),
    prompt: int = 2048,
    new_tokens: int = 128,
    layers: int | None = None,
    json: str | None = None,
) -> bool:
    """Measures batches of prompts and prints their table; says whether all captured tokens are the uncaptured ones.

    Args:
        models: shapes and ways of ``whole_models.py``, separated by commas.
        batches: numbers of prompts.
        prompt: tokens of each.
        new_tokens: that follow.
        layers: of the model, whose embeddings and head are whole; default the shape's.
        json: also write every row to this file.
    """
    table = Recording("generate", json)
    changes = {"eos_token_id": None, "pad_token_id": 0} | ({} if layers is None else {"num_hidden_layers": layers})
    for title in models.split(","):
        shape, _, way = title.strip().partition(" ")
        ways = {case.way: case.config for case in cases(shape, **changes)}
        model, source = (random_model(ways[each], "cuda", torch.bfloat16) for each in (way, "source"))
        for batch in batches:
            table.add({"model": shape, "way": way, **measure(model, source, batch, prompt, new_tokens)})
        del model, source
        torch.cuda.empty_cache()
    return table.show("a token of generate")


if __name__ == "__main__":
    sys.exit(command(tokens))
