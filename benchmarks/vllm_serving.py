"""Converted checkpoints in vLLM: are its tokens the model's own, and how fast are they beside the source's.

    python benchmarks/vllm_serving.py exact path/to/llama-mla --json benchmarks/results/h200-vllm-exact.json
    python benchmarks/vllm_serving.py exact random:latent --eager
    python benchmarks/vllm_serving.py speed --shape llama-2-7b --memory 0.4 --context 8192

``exact`` judges every greedy token of vLLM by transformers' logits over the same prefix: in float32 it may lie below
the best one by at most twice what transformers' own bfloat16 errs at that position, which is what decides ties.
``speed`` uses random weights (``load_format=dummy``); its steps are those in which all sequences decode, prefill
excluded.
Needs vLLM (docs/serving.md); run from a clone, where the plug-in's entry point is made for the process.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.vllm_engine import SHAPES, engine, prompts_of, random_config, with_entry_point
from benchmarks.vllm_exact import exact
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.report import print_table, write_json


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode steps of the source's shape, or of a converted one, at every batch that is asked for."""
    folder = tempfile.mkdtemp()
    positions = arguments.context + 2048
    config = random_config(
        arguments.shape, "latent" if arguments.layout == "source" else arguments.layout, arguments.layers, positions
    )
    if arguments.layout == "source":
        config = LlamaConfig(**{key: value for key, value in config.source_config.items() if key != "model_type"})
        config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    options = {"gpu_memory_utilization": arguments.memory, "max_model_len": positions, "graphs": arguments.graphs}
    if arguments.cache_gb:
        options["kv_cache_memory_bytes"] = int(arguments.cache_gb * 2**30)
    llm = engine(folder, load_format="dummy", **options)
    cache = llm.llm_engine.vllm_config.cache_config
    with alone(arguments.lock):
        return _rows(llm, config, cache, arguments)


@contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """While others that were started with the same lock only start: so engines come up side by side, not one by one."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rows(llm: Any, config: Any, cache: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"shape": arguments.shape, "layout": arguments.layout, "context": arguments.context,
         "cached tokens": cache.num_gpu_blocks * cache.block_size, **_decode_rate(llm, config, batch, arguments)}
        for batch in arguments.batches
    ]  # fmt: skip


def _decode_rate(llm: Any, config: Any, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step in which ``batch`` sequences of ``context`` tokens decode, and tokens a second."""
    from vllm import SamplingParams

    own = llm.llm_engine
    parameters = SamplingParams(temperature=0, max_tokens=arguments.steps + 64, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts_of(config.vocab_size, [arguments.context] * batch, seed=batch)):
        own.add_request(f"{batch}-{index}", {"prompt_token_ids": prompt}, parameters)
    begin, started = time.time(), set()
    while len(started) < batch:
        started |= {output.request_id for output in own.step()}
        if time.time() - begin > arguments.patience:
            own.abort_request([f"{batch}-{index}" for index in range(batch)])
            return {"batch": batch, "status": f"only {len(started)} had decoded after {arguments.patience} s"}
    prefill = time.time() - begin
    for _ in range(8):
        own.step()
    begin, made = time.time(), 0
    for _ in range(arguments.steps):
        made += len(own.step())
    took = time.time() - begin
    own.abort_request([f"{batch}-{index}" for index in range(batch)])
    while own.has_unfinished_requests():
        own.step()
    return {"batch": batch, "prefill_s": prefill, "step_ms": 1e3 * took / arguments.steps, "tokens_s": made / took,
            "status": "ok" if made == batch * arguments.steps else f"{made} tokens"}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = root.add_subparsers(required=True, dest="verb")
    one = verbs.add_parser("exact")
    one.add_argument("checkpoints", nargs="+")
    one.add_argument("--tokens", type=int, default=128)
    one.add_argument("--layers", type=int, default=4)
    one.add_argument("--requests", type=int, default=0)
    one.add_argument("--eager", action="store_true")
    one.add_argument("--no-prefix-caching", action="store_true")
    one.add_argument("--chunk", type=int)
    one.add_argument("--blocks", type=int)
    one.add_argument("--draft", type=int, help="tokens that are drafted from the sequence's own n-grams")
    one.add_argument("--tp", type=int, default=1)
    two = verbs.add_parser("speed")
    two.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    two.add_argument("--layout", default="latent")
    two.add_argument("--layers", type=int)
    two.add_argument("--context", type=int, default=8192)
    two.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    two.add_argument("--steps", type=int, default=64)
    two.add_argument("--patience", type=float, default=60.0)
    two.add_argument("--lock", help="a file: one process with it measures at a time")
    for each in (one, two):
        each.add_argument("--memory", type=float, default=0.3)
        each.add_argument("--cache-gb", type=float, help="of the cache; default what --memory leaves")
        each.add_argument("--graphs", type=int, nargs="+", help="batches of CUDA graphs; default vLLM's")
        each.add_argument("--json")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    with_entry_point()
    rows = {"exact": exact, "speed": speed}[arguments.verb](arguments)
    environment = collect_environment()
    print_table(rows, title=f"vLLM {environment['vllm']}, {arguments.verb}", caption=describe_environment(environment))
    if arguments.json:
        write_json(arguments.json, kind=f"vllm-{arguments.verb}", rows=rows, environment=environment)
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
