"""The public ops between a decoder layer's products: validation, dispatch, plain torch, torch.library schemas."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.ops import check_beside, register_kernel, runs_compiled


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """RMSNorm (arXiv 1910.07467) of x, or of residual + x, with the roundings that transformers' Llama has.

    The sum, the normed row and its product with the weight are each rounded to the dtype; squares and their mean are
    float32, also for float64.

    Args:
        x: [..., width].
        weight: [width]; with few rows not written by the kernel that is launched before, which may still run.
        eps: added to the mean square.
        residual: as x.
        backend: "tilelang", "reference", or None: TileLang for CUDA tensors in float32, bfloat16 and float16.

    Returns:
        The normed rows, and residual + x, which is x itself where there is no residual.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_beside("x", x, weight=(weight, x.shape[-1:]), residual=(residual, x.shape))
    compiled = runs_compiled(backend, x.device, x.dtype)
    normed, total = _rms_norm_op(x, residual, weight, eps, compiled)
    return normed, x if residual is None else total


def silu_mul(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202), both steps rounded to the dtype.

    Args:
        gate, up: [..., width]; parts of one projection are read where they lie.
        backend: as in :func:`rms_norm`.

    Returns:
        [..., width], a new tensor.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_beside("gate", gate, up=(up, gate.shape))
    return _silu_mul_op(gate, up, runs_compiled(backend, gate.device, gate.dtype))


def rms_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Oracle of :func:`rms_norm`, on any rows; without a residual the second result is empty, since x is not new."""
    total = x.contiguous() if residual is None else (residual + x).contiguous()
    wide = total.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype), x.new_empty(0) if residual is None else total


def _empty_norm(x: Tensor, residual: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    return normed, x.new_empty(0) if residual is None else torch.empty_like(normed)


_rms_norm_op = register_kernel(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, bool compiled) -> (Tensor, Tensor)",
    rms_norm_reference,
    _empty_norm,
    "mha2mla.kernels.pointwise.kernel:launch_rms_norm",
)
_silu_mul_op = register_kernel(
    "silu_mul(Tensor gate, Tensor up, bool compiled) -> Tensor",
    lambda gate, up: (F.silu(gate) * up).contiguous(),
    lambda gate, _: torch.empty_like(gate, memory_format=torch.contiguous_format),
    "mha2mla.kernels.pointwise.kernel:launch_silu_mul",
)
