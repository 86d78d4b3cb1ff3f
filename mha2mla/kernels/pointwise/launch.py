"""Compiles the kernels between products once per width and dtype, and launches them on torch's current stream."""

from __future__ import annotations

import math
from functools import cache

from torch import Tensor

from mha2mla.kernels.compilation import EXACT_PASS_CONFIGS, compile_for
from mha2mla.kernels.devices import capability, dtype_name, on_device
from mha2mla.kernels.pointwise.kernel import make_rms_norm, make_silu_mul
from mha2mla.kernels.rope_append.launch import vector_of, with_dense_rows
from mha2mla.kernels.skinny_linear.api import ROW_BUCKETS


@cache
def compile_rms_norm(major_minor: int, **static):
    """The compiled kernel; arguments as ``make_rms_norm``'s."""
    return compile_for(make_rms_norm(**static), major_minor, EXACT_PASS_CONFIGS)


@cache
def compile_silu_mul(major_minor: int, **static):
    """The compiled kernel; arguments as ``make_silu_mul``'s."""
    return compile_for(make_silu_mul(**static), major_minor, EXACT_PASS_CONFIGS)


def launch_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor) -> None:
    """Run the kernel over rows [N, width]; ``total`` is written where there is a residual."""
    if out.numel() == 0:
        return
    x, weight = x.contiguous(), weight.contiguous()
    base, total = (x, out) if residual is None else (residual.contiguous(), total)
    width = x.shape[1]
    with on_device(x.device):
        kernel = compile_rms_norm(
            capability(x.device),
            width=width,
            dtype=dtype_name(x.dtype),
            residual=residual is not None,
            vector=math.gcd(width, vector_of(x, base, weight, out, total)),
            # A chain of few rows is where kernels wait for each other.
            dependent=len(x) <= ROW_BUCKETS[-1] and capability(x.device) >= 90,
        )
        kernel(x, base, weight, out, total, eps)


def launch_silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Run the kernel over rows [N, width]."""
    if out.numel() == 0:
        return
    gate, up = with_dense_rows(gate), with_dense_rows(up)
    width = gate.shape[1]
    with on_device(gate.device):
        kernel = compile_silu_mul(
            capability(gate.device),
            width=width,
            dtype=dtype_name(gate.dtype),
            vector=math.gcd(width, vector_of(gate, up, out)),
        )
        kernel(gate, up, out)
