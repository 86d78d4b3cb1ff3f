"""Causal attention of windows of one length, differentiable; every gradient repeats to the bit."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.attention_varlen.api import attention_varlen, explain_attention_varlen
from mha2mla.kernels.ops import LIBRARY, accumulator, capability, check_scale, register
from mha2mla.kernels.split_kv.choice import HOPPER

TILE = 128  # lengths are multiples of it
MAX_WIDTHS = 384  # d_qk + d_v, padded: what FULL_REGISTERS of the kernels goes up to
_PADDING = 32  # widths become multiples of it


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float) -> Tensor:
    """Softmax attention where a query sees the keys up to its own place; differentiable in q, k and v.

    The forward pass is :func:`attention_varlen`. Gradients are two TileLang kernels without atomic additions where
    :func:`explain_causal_attention` names no reason against it, else plain torch in float32, which keeps all scores.

    Args:
        q: [B, S, H, d_qk].
        k: [B, S, H, d_qk].
        v: [B, S, H, d_v].
        softmax_scale: on the scores; positive.

    Returns:
        [B, S, H, d_v], contiguous.

    Raises:
        ValueError: naming the argument, its value and what was expected.
    """
    check_scale(softmax_scale)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[:3] != q.shape[:3] or x.dtype != q.dtype or (name == "k" and x.shape != q.shape):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} beside q of {q.dtype} {tuple(q.shape)}; expected equal dtypes"
                f" and [B, S, H, {'d_v' if name == 'v' else 'd_qk'}]"
            )
    shape = v.shape
    if 0 in shape[:3]:
        return v.contiguous()  # as empty
    q, k, v = (F.pad(x, (0, -x.shape[3] % _PADDING)).flatten(0, 1).contiguous() for x in (q, k, v))
    out, _ = _windows_op(q, k, v, softmax_scale, shape[1])
    return out[..., : shape[3]].contiguous().view(shape)


def explain_causal_attention(
    length: int, heads: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the gradient kernels do not serve a call, or None.

    Args:
        length: S. heads: H. widths: d_qk and d_v. dtype, device: of all tensors.
    """
    if why := explain_attention_varlen(widths[:1], widths[1], dtype, device):
        return why
    if capability(device) != HOPPER:
        return f"its gradients are compiled for compute capability 9.0; {device} has {capability(device) / 10}"
    if length % TILE:
        return f"the length is {length}; its gradients take multiples of {TILE}"
    padded = tuple(width + -width % _PADDING for width in widths)
    if sum(padded) > MAX_WIDTHS:
        return f"d_qk + d_v is {sum(padded)}; its gradients take up to {MAX_WIDTHS}"
    if find_spec("tilelang") is None:
        return "TileLang is not installed"
    return _compilation_failure(heads, padded, dtype)


@cache
def _compilation_failure(heads: int, widths: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Why kernels could not be compiled, or None; a machine may lack nvcc."""
    from mha2mla.kernels.attention_varlen.gradients import compile_gradients

    try:
        compile_gradients(heads, widths, dtype)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        return f"its kernels could not be compiled: {str(error).splitlines()[0]:.200}"
    return None


def gradients_reference(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor, softmax_scale: float, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, as ``gradients.launch_gradients``; float32 inside, float64 for float64 tensors."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_w, k_w, v_w, d_out_w = (x.to(dtype).unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v, d_out))
    lse, delta = (x.to(dtype).unflatten(1, (-1, length)).transpose(0, 1)[..., None] for x in (lse, delta))
    weight = (q_w @ k_w.mT * softmax_scale - lse).exp().tril()  # [B, H, queries, keys]
    d_score = weight * (d_out_w @ v_w.mT - delta) * softmax_scale
    found = d_score @ k_w, d_score.mT @ q_w, weight.mT @ d_out_w
    return tuple(x.transpose(1, 2).flatten(0, 1).to(q.dtype) for x in found)


def _windows(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, length: int) -> tuple[Tensor, Tensor]:
    """Output [T, H, d_v] and log-sum-exps [H, T] of q, k [T, H, d_qk] and v [T, H, d_v], windows of ``length``."""
    bounds = torch.arange(0, q.shape[0] + 1, length, dtype=torch.int32, device=q.device)
    options = {"softmax_scale": softmax_scale, "causal": True, "return_lse": True}
    return attention_varlen(q, k, v, bounds, bounds, length, **options)


def _window_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from that of the output."""
    d_out = d_out.contiguous()
    delta = (d_out.to(lse.dtype) * out).sum(-1).T.contiguous()  # [H, T]
    operands = (q, k, v, d_out, lse, delta, softmax_scale, length)
    if explain_causal_attention(length, q.shape[1], (q.shape[2], v.shape[2]), q.dtype, q.device) is None:
        from mha2mla.kernels.attention_varlen.gradients import launch_gradients

        return launch_gradients(*operands)
    return gradients_reference(*operands)


_windows_op = register(
    "causal_windows(Tensor q, Tensor k, Tensor v, float softmax_scale, int length) -> (Tensor, Tensor)",
    _windows,
    lambda q, k, v, *_: (v.new_empty(v.shape), q.new_empty(q.shape[1], q.shape[0], dtype=accumulator(q.dtype))),
)
_gradients_op = register(
    "causal_window_gradients(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale,"
    " int length) -> (Tensor, Tensor, Tensor)",
    _window_gradients,
    lambda d_out, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *operands, ctx.softmax_scale, ctx.length = inputs
    ctx.save_for_backward(*operands, *output)


def _backward(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """``lse`` is a constant to it."""
    with torch.no_grad():
        return *_gradients_op(d_out, *ctx.saved_tensors, ctx.softmax_scale, ctx.length), None, None


torch.library.register_autograd("mha2mla::causal_windows", _backward, setup_context=_keep, lib=LIBRARY)
