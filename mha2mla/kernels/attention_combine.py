"""The public combine op: validation, dispatch, and its torch.library schema."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.ops import Argument, accumulator, check_float, check_tensors, register_kernel, runs_compiled


def attention_combine(
    partial_out: Tensor,
    partial_lse: Tensor,
    num_splits: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges partial attention results, each over its own part of the keys, into the result over all keys.

    With the log-sum-exps of flash attention's partial results (flash-decoding; FlashAttention, arXiv 2205.14135)::

        lse = log sum_n exp(lse_n)        out = sum_n exp(lse_n - lse) out_n

    The parts may come from splits of one cache, from two caches (a shared prefix and the rest of each sequence) or
    from several devices; their order does not matter but for rounding.

    Args:
        partial_out: [N, B, S_q, H, d_v], the outputs of N parts, each normalised by itself.
        partial_lse: [N, B, H, S_q] float32 (float64 with float64 outputs), natural log. Where it is -inf the part saw
            no key: its output is not looked at and may hold anything.
        num_splits: [B] int32, how many of the N parts a sequence has; not read on the host, and clamped to N. Parts
            behind them are not read. None: all N.
        dtype: of the output; default that of ``partial_out``.
        backend: "tilelang", "reference", or None: TileLang for CUDA tensors in float32, bfloat16 and float16.

    Returns:
        ``out [B, S_q, H, d_v]`` in ``dtype`` and ``lse [B, H, S_q]`` in the dtype of ``partial_lse``. A row whose parts
        all have -inf gives zeros and -inf.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_tensors(_PARTS, (partial_out, partial_lse, num_splits))
    dtype = dtype or partial_out.dtype
    check_float("dtype", dtype)
    compiled = runs_compiled(backend, partial_out.device, partial_out.dtype, dtype)
    return torch.ops.mha2mla.attention_combine(partial_out, partial_lse, num_splits, dtype, compiled)


_PARTS = (
    Argument("partial_out", "N B S_q H d_v"),
    Argument("partial_lse", "N B H S_q", accumulator),
    Argument("num_splits", "B", torch.int32, optional=True),
)


def attention_combine_reference(
    partial_out: Tensor, partial_lse: Tensor, num_splits: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``sum_n exp(lse_n) out_n / sum_n exp(lse_n)`` and the log of the denominator (flash-decoding's merge).

    Shapes as in :func:`mha2mla.kernels.attention_combine`. float64 arithmetic for float64 outputs, else float32.
    """
    arithmetic = accumulator(partial_out.dtype)
    lse = partial_lse.to(arithmetic)
    if num_splits is not None:
        place = torch.arange(lse.shape[0], device=lse.device)[:, None]
        lse = torch.where((place < num_splits)[..., None, None], lse, -torch.inf)
    total = torch.logsumexp(lse, dim=0) if lse.shape[0] else lse.new_full(lse.shape[1:], -torch.inf)
    weight = torch.exp(lse - torch.where(total == -torch.inf, 0, total))  # [N, B, H, S_q]
    weight = weight.transpose(2, 3)[..., None]
    part = torch.where(weight > 0, partial_out.to(arithmetic), 0)  # a part without weight may hold anything
    return (weight * part).sum(0).to(dtype or partial_out.dtype), total


register_kernel(
    "attention_combine(Tensor partial_out, Tensor partial_lse, Tensor? num_splits, ScalarType dtype,"
    " bool compiled) -> (Tensor, Tensor)",
    attention_combine_reference,
    lambda out, lse, _, dtype: (out.new_empty(out.shape[1:], dtype=dtype), lse.new_empty(lse.shape[1:])),
    "mha2mla.kernels.split_kv.combine:launch_attention_combine",
)
