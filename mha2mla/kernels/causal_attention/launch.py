"""Compiles the gradient kernels once per static shape, and launches them on torch's current stream."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mha2mla.kernels.causal_attention.gradient_kernels import GradientShape, make_key_gradients, make_query_gradients
from mha2mla.kernels.devices import dtype_name, on_device
from mha2mla.kernels.machine import SPECIALISED_PASS_CONFIGS, compile_for
from mha2mla.kernels.split_kv.choice import HOPPER


@cache
def compile_gradients(heads: int, widths: tuple[int, int], dtype: torch.dtype):
    """Both compiled kernels; they serve all batches and lengths."""
    shape = GradientShape(heads, widths, dtype_name(dtype))
    return tuple(
        compile_for(make(shape), HOPPER, SPECIALISED_PASS_CONFIGS)
        for make in (make_key_gradients, make_query_gradients)
    )


def launch_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor, softmax_scale: float, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        q, k: [T, H, d_qk] of windows of ``length`` tokens one behind the other; v, d_out: [T, H, d_v]. Contiguous.
        lse: [H, T] float32, log-sum-exps of the scores.
        delta: [H, T] float32, of each query and head the sum over d_v of d_out times the output.
    """
    of_keys, of_queries = compile_gradients(q.shape[1], (q.shape[2], v.shape[2]), q.dtype)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with on_device(q.device):
        of_keys(q, k, v, d_out, lse, delta, dk, dv, softmax_scale, length)
        of_queries(q, k, v, d_out, lse, delta, dq, softmax_scale, length)
    return dq, dk, dv
