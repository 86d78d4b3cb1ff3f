"""Converted checkpoints in vLLM: are its tokens the model's own, and how fast are they beside the source's.

    python benchmarks/vllm_serving.py exact path/to/llama-mla --json benchmarks/results/h200-vllm-exact.json
    python benchmarks/vllm_serving.py exact random:latent --eager
    python benchmarks/vllm_serving.py speed --shape llama-2-7b --memory 0.9 --contexts 8192

``exact`` judges every greedy token of vLLM by transformers' logits over the same prefix: in float32 it may lie below
the best one by at most twice what transformers' own bfloat16 errs at that position, which is what decides ties.
``speed`` times steps in which all sequences decode, with random weights, up to as many as the cache holds.
Needs vLLM (docs/serving.md); run from a clone, where the plug-in's entry point is made for the process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Recording
from benchmarks.vllm_engine import SHAPES, with_entry_point
from benchmarks.vllm_exact import exact
from benchmarks.vllm_speed import speed


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
    one.add_argument("--draft", type=int, help="tokens that are drafted a step")
    one.add_argument("--drafter", help="a folder of a model with the same vocabulary; default the sequence's n-grams")
    one.add_argument("--tp", type=int, default=1)
    two = verbs.add_parser("speed")
    two.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    two.add_argument("--layout", default="latent")
    two.add_argument("--layers", type=int)
    two.add_argument("--contexts", type=int, nargs="+", default=[8192])
    two.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    two.add_argument("--steps", type=int, default=64)
    two.add_argument("--patience", type=float, default=60.0)
    two.add_argument("--most", type=int, default=256, help="sequences at a time, however many the cache holds")
    two.add_argument(
        "--compile", action="store_true", help="vLLM's default; without, decode graphs of its layers as they are"
    )
    two.add_argument("--profile", action="store_true", help="print the kernels of a step")
    for each in (one, two):
        each.add_argument("--memory", type=float, default=0.3)
        each.add_argument("--cache-gb", type=float, help="of the cache; default what --memory leaves")
        each.add_argument("--graphs", type=int, nargs="+", help="batches of CUDA graphs; default vLLM's")
        each.add_argument("--json")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    with_entry_point()
    table = Recording(f"vllm-{arguments.verb}", arguments.json)
    {"exact": exact, "speed": speed}[arguments.verb](arguments, table)
    return 0 if table.show(f"vLLM {table.environment['vllm']}, {arguments.verb}") else 1


if __name__ == "__main__":
    sys.exit(main())
