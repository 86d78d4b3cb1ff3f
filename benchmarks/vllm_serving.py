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

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import command
from benchmarks.vllm_exact import exact
from benchmarks.vllm_speed import speed

if __name__ == "__main__":
    sys.exit(command(exact, speed))
