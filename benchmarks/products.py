"""Products of a decoder layer at few rows: ours beside cuBLAS, each with the norm before it and what follows it, in
CUDA graphs over weights that the L2 does not hold.

    python benchmarks/products.py --json benchmarks/results/h200-products.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Recording, command
from benchmarks.step_timeline import captured, replay_ms
from mha2mla.kernels import rms_norm, silu_mul, skinny_linear

# name -> N, K, whether its halves are gate and up
PRODUCTS = {
    "Llama-2-7B, query and latent": (5120, 4096, False),
    "Llama-2-7B, output": (4096, 4096, False),
    "Llama-2-7B, gate and up": (22016, 4096, True),
    "Llama-2-7B, down": (4096, 11008, False),
    "Llama-3-8B, query and latent": (6656, 4096, False),
    "Llama-3-8B, gate and up": (28672, 4096, True),
    "Llama-3-8B, down": (4096, 14336, False),
    # Shapes that no choice was made by.
    "Llama-3.2-1B, gate and up": (16384, 2048, True),
    "Llama-3.2-1B, down": (2048, 8192, False),
    "Llama-3.2-3B, output": (3072, 3072, False),
    "Llama-3.2-3B, gate and up": (16384, 3072, True),
    "Llama-3.2-3B, down": (3072, 8192, False),
    "Qwen2.5-7B, query and latent": (4096, 3584, False),
    "Qwen2.5-7B, gate and up": (37888, 3584, True),
    "Qwen2.5-7B, down": (3584, 18944, False),
    "Llama-2-13B, output": (5120, 5120, False),
    "Llama-2-13B, gate and up": (27648, 5120, True),
    "Llama-2-13B, down": (5120, 13824, False),
    "Llama-3-70B, output": (8192, 8192, False),
    "Llama-3-70B, gate and up": (57344, 8192, True),
    "Llama-3-70B, down": (8192, 28672, False),
}
READ = 1e9  # bytes of weights in a replay: 20 times the L2
PREDICTED_RATE, PREDICTED_FIXED = 4.2, 4.0  # TB/s, and µs beside reading: of a norm and a product


def theirs(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """The model's own product where there is no product of ours."""
    out = F.linear(x, weight)
    return silu_mul(*out.chunk(2, dim=-1)) if gated else out


def ours(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return skinny_linear(x, weight, gated=gated, backend="tilelang")


def microseconds(call: Callable[..., Tensor], x: Tensor, weights: list[Tensor], gated: bool, seconds: float) -> float:
    """Time of a norm and one product among others of their kind, in turn: as in a step, where a product may prefetch
    before the norm has ended."""
    scale = x.new_ones(x.shape[1])
    graph = captured(lambda: [call(rms_norm(x, scale, 1e-5)[0], weight, gated) for weight in weights])
    return replay_ms(graph, seconds) * 1e3 / len(weights)


@torch.inference_mode()
def products(rows: list[int] | None = None, only: str = "", min_run_time: float = 0.1, json: str | None = None) -> bool:
    """Times them and prints their table.

    Args:
        rows: of x; default 1, 8, 16, 64 and 128.
        only: products whose name contains it.
        min_run_time: seconds of replays for each figure.
        json: also write every row to this file.

    Returns:
        Whether each product of ours is right: at most twice as far from float64 as cuBLAS's.
    """
    found = Recording("products", json)
    for name, (outputs, columns, gated) in PRODUCTS.items():
        if only not in name:
            continue
        size = outputs * columns * 2
        weights = [
            torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16).mul_(columns**-0.5)
            for _ in range(max(2, round(READ / size)))
        ]
        for count in rows or (1, 8, 16, 64, 128):
            x = torch.randn(count, columns, device="cuda", dtype=torch.bfloat16)
            exact = F.linear(x.double(), weights[0].double())
            if gated:
                gate, up = exact.chunk(2, dim=-1)
                exact = F.silu(gate) * up
            row: dict[str, Any] = {"product": name, "rows": count, "MB": size / 1e6}
            row["predicted"] = size / PREDICTED_RATE / 1e6 + PREDICTED_FIXED
            for which, call in (("cuBLAS", theirs), ("ours", ours)):
                row[which] = microseconds(call, x, weights, gated, min_run_time)
                row[f"{which} error"] = float((call(x, weights[0], gated).double() - exact).norm() / exact.norm())
            row["TB/s"] = size / row["ours"] / 1e6
            row["status"] = "ok" if row["ours error"] <= 2 * row["cuBLAS error"] else "wrong"
            found.add(row)
        del weights
        torch.cuda.empty_cache()
    return found.show("products of few rows, µs")


if __name__ == "__main__":
    sys.exit(command(products))
