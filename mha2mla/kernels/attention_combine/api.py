"""The public combine op: validation, dispatch, and its torch.library schema."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.devices import runs_compiled
from mha2mla.kernels.layouts import Argument, accumulator, argument_error, check_float, check_tensors
from mha2mla.kernels.registration import register


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
    return _merge(_PARTS, partial_out, partial_lse, num_splits, dtype, backend)


def attention_combine_packed(
    partial_out: Tensor,
    partial_lse: Tensor,
    cu_splits: Tensor,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The same where every sequence has parts of its own number, one behind the other.

    Args:
        partial_out: [N, S_q, H, d_v], the outputs of the parts of all sequences; those of sequence b are
            ``cu_splits[b]`` to ``cu_splits[b + 1] - 1``.
        partial_lse: [N, H, S_q] float32 (float64 with float64 outputs), natural log, as in :func:`attention_combine`.
        cu_splits: [B+1] int32, ascending; not read on the host, and clamped to 0 … N. Parts that no sequence has are
            not read.
        dtype, backend: as in :func:`attention_combine`.

    Returns:
        ``out [B, S_q, H, d_v]`` and ``lse [B, H, S_q]`` as there; zeros and -inf for a sequence without parts.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    return _merge(_PACKED, partial_out, partial_lse, cu_splits, dtype, backend)


_PARTS = (
    Argument("partial_out", "N B S_q H d_v"),
    Argument("partial_lse", "N B H S_q", accumulator),
    Argument("num_splits", "B", torch.int32, optional=True),
)
_PACKED = (
    Argument("partial_out", "N S_q H d_v"),
    Argument("partial_lse", "N H S_q", accumulator),
    Argument("cu_splits", "B+1", torch.int32),
)


def _merge(
    arguments: tuple[Argument, ...], partial_out: Tensor, partial_lse: Tensor, splits: Tensor | None,
    dtype: torch.dtype | None, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sizes = check_tensors(arguments, (partial_out, partial_lse, splits))
    if sizes.get("B+1") == 0:
        raise argument_error("cu_splits.shape", (0,), "[B+1]")
    dtype = dtype or partial_out.dtype
    check_float("dtype", dtype)
    compiled = runs_compiled(backend, partial_out.device, partial_out.dtype, dtype)
    call = (partial_out, partial_lse, splits, dtype, arguments is _PACKED, compiled)
    return torch.ops.mha2mla.attention_combine(*call)


def _combine(
    partial_out: Tensor, partial_lse: Tensor, splits: Tensor | None, dtype: torch.dtype, packed: bool, compiled: bool
) -> tuple[Tensor, Tensor]:
    if not compiled:
        from mha2mla.kernels.attention_combine import reference

        combine = reference.attention_combine_packed_reference if packed else reference.attention_combine_reference
        return combine(partial_out, partial_lse, splits, dtype=dtype)
    from mha2mla.kernels.attention_combine.launch import launch_attention_combine

    out, lse = _empty(partial_out, partial_lse, splits, dtype, packed)
    launch_attention_combine(partial_out, partial_lse, splits, out, lse, packed)
    return out, lse


def _empty(
    partial_out: Tensor, partial_lse: Tensor, splits: Tensor | None, dtype: torch.dtype, packed: bool, *_: object
) -> tuple[Tensor, Tensor]:
    batch = (splits.shape[0] - 1,) if packed else ()  # else behind N, as the other dimensions
    out, lse = ((*batch, *x.shape[1:]) for x in (partial_out, partial_lse))
    return partial_out.new_empty(out, dtype=dtype), partial_lse.new_empty(lse)


register(
    "attention_combine(Tensor partial_out, Tensor partial_lse, Tensor? splits, ScalarType dtype, bool packed,"
    " bool compiled) -> (Tensor, Tensor)",
    _combine,
    _empty,
)
