"""The public GQA decode op: validation, dispatch, and its torch.library schemas."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mha2mla.kernels.devices import BACKENDS, capability
from mha2mla.kernels.gqa_decode.dispatch import dispatch
from mha2mla.kernels.gqa_decode.plan import empty_plan
from mha2mla.kernels.gqa_decode.reference import gqa_decode_reference
from mha2mla.kernels.layouts import Layout, argument_error, check_aligned, check_data, check_index
from mha2mla.kernels.split_kv.plan import LIBRARY, DecodePlan, check_spans

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@lru_cache(maxsize=4096)
def _validate(*layouts: tuple | None) -> None:
    """Everything the host can know of the tensors, each given as the fields of Layout: q, k_cache, v_cache,
    block_table, cache_seqlens, cache_starts and out. Remembered: a decode loop asks in every layer.
    """
    q, k_cache, v_cache, block_table, cache_seqlens, cache_starts, out = (
        None if layout is None else Layout(*layout) for layout in layouts
    )
    if q.dtype not in _DTYPES:
        raise argument_error("q.dtype", q.dtype, "bfloat16, float16, float32 or float64")
    check_data("q", q, "[B, S_q, H, d_qk]", q, "q")
    check_data("k_cache", k_cache, "[P, page, G, d_qk]", q, "q")
    check_data("v_cache", v_cache, "[P, page, G, d_v]", q, "q")
    batch, seqlen_q, heads, qk_head_dim = q.shape
    pages, page_size, groups, width = k_cache.shape
    if width != qk_head_dim:
        raise argument_error("k_cache.shape", tuple(k_cache.shape), f"[P, page, G, {qk_head_dim}]")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise argument_error("v_cache.shape", tuple(v_cache.shape), f"[{pages}, {page_size}, {groups}, d_v]")
    if groups < 1 or heads % groups:
        raise argument_error("k_cache.shape[2] (kv heads)", groups, f"a divisor of H={heads}")
    check_index("block_table", block_table, q, "q", f"[{batch}, max_pages]", batch)
    check_index("cache_seqlens", cache_seqlens, q, "q", f"[{batch}]", batch)
    if cache_starts is not None:
        check_index("cache_starts", cache_starts, q, "q", f"[{batch}]", batch)
    if out is not None:
        check_data("out", out, "[B, S_q, H, d_v]", q, "q")
        if out.shape != (batch, seqlen_q, heads, v_cache.shape[3]):
            raise argument_error("out.shape", tuple(out.shape), [batch, seqlen_q, heads, v_cache.shape[3]])


def gqa_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    cache_starts: Tensor | None = None,
    plan: DecodePlan | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """MHA, GQA or MQA attention of the last ``S_q`` tokens of each sequence over its paged keys and values.

    For query head h of H, with G kv heads (GQA, arXiv 2305.13245)::

        score[h, t] = softmax_scale * q[h] . k[t, h // (H / G)]
        out[h]      = sum_t softmax_t(score[h, t]) v[t, h // (H / G)]

    A cache without pages, [slots, max_len, G, d] with max_len a multiple of a page, is one with pages seen as
    ``cache.view(-1, page, G, d)`` and ``block_table[b] = slot[b] * (max_len // page) + arange(max_len // page)``.

    Args:
        q: [B, S_q, H, d_qk] queries, rotated.
        k_cache: [P, page, G, d_qk] pages of rotated keys; G divides H, and H / G need not be a power of two.
        v_cache: [P, page, G, d_v] pages of values.
        block_table: [B, max_pages] int32, the pages of each sequence; entries past its length, or whose whole tile of
            64 tokens no query sees, are never used. Tokens of an entry that is no page, such as -1, count as zeros and
            no other page is read; the reference on the CPU refuses it.
        cache_seqlens: [B] int32, tokens per sequence, the S_q new ones included; clamped to max_pages * page on the
            device. 0 gives zeros and lse -inf.
        softmax_scale: usually d_qk ** -0.5.
        causal: new token s sees tokens before ``cache_seqlens - S_q + 1 + s`` (bottom-right aligned); else all.
        cache_starts: [B] int32, first visible token (left padding); None means 0.
        plan: from :func:`plan_gqa_decode`, last refreshed with these ``cache_seqlens`` and ``cache_starts``: kernels
            attend over the plan's, and the reference refuses other ones. Carries the sliding window and the attention
            sinks, if any. None makes one for this call.
        out: [B, S_q, H, d_v] to write into; None allocates.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: "tilelang", "reference", or None: TileLang where :func:`explain_gqa_decode` has nothing against it.

    The three data tensors share a dtype (bfloat16 or float16; the reference also takes float32 and float64) and may be
    strided views: last dimension contiguous, 16-bit rows on 16-byte boundaries. Kernels refuse a view that does not
    begin at a multiple of 16 bytes.

    Returns:
        ``out [B, S_q, H, d_v]``, and with ``return_lse`` also ``lse [B, H, S_q]`` (natural log, float32; float64 from
        the reference for float64 inputs).

    Raises:
        ValueError: naming the argument, what it was and what it must be; or why ``backend="tilelang"`` refuses.
    """
    if backend is not None and backend not in BACKENDS:
        raise argument_error("backend", repr(backend), f"None or one of {BACKENDS}")
    if not isinstance(softmax_scale, (int, float)) or not 0 < softmax_scale < math.inf:
        raise argument_error("softmax_scale", repr(softmax_scale), "a positive finite number")
    tensors = (q, k_cache, v_cache, block_table, cache_seqlens, cache_starts)
    layouts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in (*tensors, out)]
    # Dynamo traces the check itself: its sizes may be symbols, which cannot be remembered.
    (_validate.__wrapped__ if torch.compiler.is_compiling() else _validate)(*layouts)
    if plan is None and out is None:
        out, lse = torch.ops.mha2mla.gqa_decode(*tensors, softmax_scale, causal, backend or "auto")
    else:
        out = _empty_out(q, v_cache) if out is None else out
        if plan is None:
            window, sinks, buffers = -1, 0, (None, None, None, None)
        else:
            plan.check(out, block_table, k_cache.shape[1], causal)
            window, sinks = -1 if plan.window is None else plan.window, plan.sinks
            buffers = (plan.schedule, plan.splits, plan.partial_out, plan.partial_lse)
        lse = _empty_lse(q)
        # The dispatcher costs as much as the kernel's launch; plain tensors in plain eager mode need it not.
        plain = type(q) is Tensor and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode()
        decode = _decode_out if plain else torch.ops.mha2mla.gqa_decode_out
        decode(*tensors, softmax_scale, causal, backend or "auto", window, sinks, *buffers, out, lse)
    return (out, lse) if return_lse else out


def _empty_out(q: Tensor, v_cache: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], v_cache.shape[3])


def _empty_lse(q: Tensor) -> Tensor:
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty(batch, heads, seqlen_q, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _decode_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    softmax_scale: float,
    causal: bool,
    backend: str,
    window: int,
    sinks: int,
    schedule: Tensor | None,
    splits: Tensor | None,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    _, seqlen_q, heads, qk_head_dim = q.shape
    _, page_size, groups, v_head_dim = v_cache.shape
    shape = dispatch(backend, heads, groups, qk_head_dim, v_head_dim, page_size, q.dtype, q.device, seqlen_q)
    if shape is None:
        check_spans(schedule, splits, cache_seqlens, cache_starts, block_table.shape[1] * page_size)
        made = gqa_decode_reference(
            q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale=softmax_scale, causal=causal,
            cache_starts=cache_starts, window=None if window < 0 else window, sinks=sinks,
        )  # fmt: skip
        out.copy_(made[0])
        lse.copy_(made[1])
        return
    check_aligned(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    from mha2mla.kernels.gqa_decode.launch import launch_gqa_decode

    if schedule is None or splits is None or partial_out is None or partial_lse is None:
        plan = empty_plan(q, k_cache, block_table, v_head_dim, causal, None, 0, backend)
        plan.refresh(cache_seqlens, cache_starts)
        schedule, splits, partial_out, partial_lse = plan.schedule, plan.splits, plan.partial_out, plan.partial_lse
    elif schedule.shape[0] == 0:
        raise ValueError("plan was made for the reference backend; expected one for TileLang, which serves this call")
    launch_gqa_decode(
        shape, capability(q.device), q, k_cache, v_cache, block_table, softmax_scale, causal, window, sinks, schedule,
        splits, partial_out, partial_lse, out, lse,
    )  # fmt: skip


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    softmax_scale: float,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    out, lse = _empty_out(q, v_cache), _empty_lse(q)
    _decode_out(
        q, k_cache, v_cache, block_table, cache_seqlens, cache_starts, softmax_scale, causal, backend, -1, 0,
        None, None, None, None, out, lse,
    )  # fmt: skip
    return out, lse


_INPUTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cache_seqlens, Tensor? cache_starts,"
    " float softmax_scale, bool causal, str backend"
)
LIBRARY.define(f"gqa_decode({_INPUTS}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"gqa_decode_out({_INPUTS}, int window, int sinks, Tensor? schedule, Tensor? splits, Tensor(a!)? partial_out,"
    " Tensor(b!)? partial_lse, Tensor(c!) out, Tensor(d!) lse) -> ()"
)
LIBRARY.impl("gqa_decode", _decode, "CompositeExplicitAutograd")
LIBRARY.impl("gqa_decode_out", _decode_out, "CompositeExplicitAutograd")
torch.library.register_fake(
    "mha2mla::gqa_decode", lambda q, k_cache, v_cache, *_: (_empty_out(q, v_cache), _empty_lse(q)), lib=LIBRARY
)
torch.library.register_fake("mha2mla::gqa_decode_out", lambda *_: None, lib=LIBRARY)
