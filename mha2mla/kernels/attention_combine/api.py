"""The public combine op: validation, dispatch, and its torch.library schema."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.devices import runs_compiled

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    for name, given in (("partial_out.dtype", partial_out.dtype), ("dtype", dtype or partial_out.dtype)):
        if given not in _DTYPES:
            raise ValueError(f"{name} is {given}; expected bfloat16, float16, float32 or float64")
    if partial_out.ndim != 5:
        raise ValueError(f"partial_out.shape is {tuple(partial_out.shape)}; expected [N, B, S_q, H, d_v]")
    splits, batch, seqlen_q, heads, _ = partial_out.shape
    if partial_lse.shape != (splits, batch, heads, seqlen_q):
        shape = tuple(partial_lse.shape)
        raise ValueError(f"partial_lse.shape is {shape}; expected {(splits, batch, heads, seqlen_q)}, [N, B, H, S_q]")
    wide = torch.float64 if partial_out.dtype == torch.float64 else torch.float32
    if partial_lse.dtype != wide:
        raise ValueError(f"partial_lse.dtype is {partial_lse.dtype}; expected {wide}")
    if num_splits is not None and (num_splits.shape != (batch,) or num_splits.dtype != torch.int32):
        raise ValueError(
            f"num_splits is {num_splits.dtype} {tuple(num_splits.shape)}; expected torch.int32 {(batch,)}, [B]"
        )
    for name, tensor in (("partial_lse", partial_lse), ("num_splits", num_splits)):
        if tensor is not None and tensor.device != partial_out.device:
            raise ValueError(f"{name}.device is {tensor.device}; expected {partial_out.device}, as partial_out")
    wanted = dtype or partial_out.dtype
    compiled = runs_compiled(backend, partial_out.device, partial_out.dtype, wanted)
    return torch.ops.mha2mla.attention_combine(partial_out, partial_lse, num_splits, wanted, compiled)


def _combine(
    partial_out: Tensor, partial_lse: Tensor, num_splits: Tensor | None, dtype: torch.dtype, compiled: bool
) -> tuple[Tensor, Tensor]:
    if not compiled:
        from mha2mla.kernels.attention_combine.reference import attention_combine_reference

        return attention_combine_reference(partial_out, partial_lse, num_splits, dtype=dtype)
    from mha2mla.kernels.attention_combine.launch import launch_attention_combine

    out, lse = _combine_fake(partial_out, partial_lse, num_splits, dtype, compiled)
    launch_attention_combine(partial_out, partial_lse, num_splits, out, lse)
    return out, lse


def _combine_fake(partial_out, partial_lse, num_splits, dtype, compiled):
    out = partial_out.new_empty(partial_out.shape[1:], dtype=dtype)
    return out, partial_lse.new_empty(partial_lse.shape[1:])


LIBRARY = torch.library.Library("mha2mla", "FRAGMENT")
LIBRARY.define(
    "attention_combine(Tensor partial_out, Tensor partial_lse, Tensor? num_splits, ScalarType dtype, bool compiled)"
    " -> (Tensor, Tensor)"
)
LIBRARY.impl("attention_combine", _combine, "CompositeExplicitAutograd")
torch.library.register_fake("mha2mla::attention_combine", _combine_fake, lib=LIBRARY)
