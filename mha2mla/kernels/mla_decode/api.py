"""The public decode op: validation, dispatch with a recorded reason, and its torch.library schemas."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mha2mla.kernels.devices import BACKENDS, capability
from mha2mla.kernels.layouts import Layout, argument_error, check_aligned, check_data, check_index
from mha2mla.kernels.mla_decode.dispatch import dispatch
from mha2mla.kernels.mla_decode.plan import empty_plan
from mha2mla.kernels.mla_decode.reference import mla_decode_reference
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.split_kv.plan import LIBRARY, DecodePlan, check_spans

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@lru_cache(maxsize=4096)
def _validate(*layouts: tuple | None) -> None:
    """Everything the host can know of the tensors, each given as the fields of Layout: q_latent, q_pe, latent_cache,
    rope_cache, block_table, cache_seqlens, cache_starts and out. Remembered: a decode loop asks in every layer.
    """
    q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens, cache_starts, out = (
        None if layout is None else Layout(*layout) for layout in layouts
    )
    if q_latent.dtype not in _DTYPES:
        raise argument_error("q_latent.dtype", q_latent.dtype, "bfloat16, float16, float32 or float64")
    check_data("q_latent", q_latent, "[B, S_q, H, d_c]", q_latent, "q_latent")
    check_data("q_pe", q_pe, "[B, S_q, H, d_r]", q_latent, "q_latent")
    check_data("latent_cache", latent_cache, "[P, page, d_c]", q_latent, "q_latent")
    check_data("rope_cache", rope_cache, "[P, page, G, d_r]", q_latent, "q_latent", tma_dims=2)
    batch, seqlen_q, heads, d_c = q_latent.shape
    d_r = q_pe.shape[3]
    pages, page_size, groups, rope_width = rope_cache.shape
    if q_pe.shape[:3] != q_latent.shape[:3]:
        raise argument_error("q_pe.shape", tuple(q_pe.shape), f"[{batch}, {seqlen_q}, {heads}, d_r]")
    if latent_cache.shape[2] != d_c:
        raise argument_error("latent_cache.shape", tuple(latent_cache.shape), f"[P, page, {d_c}]")
    if latent_cache.shape[0] != pages or latent_cache.shape[1] != page_size or rope_width != d_r:
        raise argument_error(
            "rope_cache.shape", tuple(rope_cache.shape), f"[{latent_cache.shape[0]}, {latent_cache.shape[1]}, G, {d_r}]"
        )
    if groups < 1 or heads % groups:
        raise argument_error("rope_cache.shape[2] (num_rope_heads)", groups, f"a divisor of H={heads}")
    if groups > 1 and rope_cache.strides[2] != d_r:
        raise argument_error(
            "rope_cache.stride(2)", rope_cache.strides[2], f"{d_r}: the rope heads of a token side by side"
        )
    check_index("block_table", block_table, q_latent, "q_latent", f"[{batch}, max_pages]", batch)
    check_index("cache_seqlens", cache_seqlens, q_latent, "q_latent", f"[{batch}]", batch)
    if cache_starts is not None:
        check_index("cache_starts", cache_starts, q_latent, "q_latent", f"[{batch}]", batch)
    if out is not None:
        check_data("out", out, "[B, S_q, H, d_c]", q_latent, "q_latent")
        if out.shape != q_latent.shape:
            raise argument_error("out.shape", tuple(out.shape), list(q_latent.shape))


def mla_decode(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
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
    """Absorbed MLA attention of the last ``S_q`` tokens of each sequence over its paged latent cache.

    For query head h, with G rope heads (DeepSeek-V2, arXiv 2405.04434, section 2.1; k_pe per group as converted models
    need it)::

        score[h, t] = softmax_scale * (q_latent[h] . c[t] + q_pe[h] . k_pe[t, h // (H / G)])
        out[h]      = sum_t softmax_t(score[h, t]) c[t]

    Args:
        q_latent: [B, S_q, H, d_c] queries against the latent (W_UK already absorbed).
        q_pe: [B, S_q, H, d_r] rotated queries.
        latent_cache: [P, page, d_c] pages of latents.
        rope_cache: [P, page, G, d_r] pages of rotated keys; G divides H.
        block_table: [B, max_pages] int32, the pages of each sequence; entries past its length, or whose whole tile of
            64 tokens no query sees, are never used. Tokens of an entry that is no page, such as -1, count as zeros and
            no other page is read; the reference on the CPU refuses it.
        cache_seqlens: [B] int32, tokens per sequence, the S_q new ones included; clamped to max_pages * page on the
            device. 0 gives zeros and lse -inf.
        softmax_scale: the source model's, usually head_dim ** -0.5; never derived from d_c + d_r.
        causal: new token s sees tokens before ``cache_seqlens - S_q + 1 + s`` (bottom-right aligned); else all.
        cache_starts: [B] int32, first visible token (left padding); None means 0.
        plan: from :func:`plan_mla_decode`, last refreshed with these ``cache_seqlens`` and ``cache_starts``: kernels
            attend over the plan's, and the reference refuses other ones. Carries the sliding window and the attention
            sinks, if any. None makes one for this call.
        out: [B, S_q, H, d_c] to write into; None allocates.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: "tilelang", "reference", or None: TileLang where :func:`explain_mla_decode` has nothing against it.

    The four data tensors share a dtype (bfloat16 or float16; the reference also takes float32 and float64) and may be
    strided views: last dimension contiguous, 16-bit rows on 16-byte boundaries, a token's G rope heads side by side.
    Kernels refuse a view that does not begin at a multiple of 16 bytes.

    Returns:
        ``out [B, S_q, H, d_c]``, and with ``return_lse`` also ``lse [B, H, S_q]`` (natural log, float32; float64 from
        the reference for float64 inputs).

    Raises:
        ValueError: naming the argument, what it was and what it must be; or why ``backend="tilelang"`` refuses.
    """
    if backend is not None and backend not in BACKENDS:
        raise argument_error("backend", repr(backend), f"None or one of {BACKENDS}")
    if not isinstance(softmax_scale, (int, float)) or not 0 < softmax_scale < math.inf:
        raise argument_error("softmax_scale", repr(softmax_scale), "a positive finite number")
    tensors = (q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens, cache_starts)
    layouts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in (*tensors, out)]
    # Dynamo traces the check itself: its sizes may be symbols, which cannot be remembered.
    (_validate.__wrapped__ if torch.compiler.is_compiling() else _validate)(*layouts)
    if plan is None and out is None:
        out, lse = torch.ops.mha2mla.mla_decode(*tensors, softmax_scale, causal, backend or "auto")
    else:
        if plan is None:
            window, sinks, buffers = -1, 0, (None, None, None, None)
        else:
            plan.check(q_latent, block_table, rope_cache.shape[1], causal)
            window, sinks = -1 if plan.window is None else plan.window, plan.sinks
            buffers = (plan.schedule, plan.splits, plan.partial_out, plan.partial_lse)
        out = torch.empty_like(q_latent, memory_format=torch.contiguous_format) if out is None else out
        lse = _empty_lse(q_latent)
        # The dispatcher costs as much as the kernel's launch; plain tensors in plain eager mode need it not.
        plain = type(q_latent) is Tensor and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode()
        decode = _decode_out if plain else torch.ops.mha2mla.mla_decode_out
        decode(*tensors, softmax_scale, causal, backend or "auto", window, sinks, *buffers, out, lse)
    return (out, lse) if return_lse else out


def _empty_lse(q_latent: Tensor) -> Tensor:
    batch, seqlen_q, heads, _ = q_latent.shape
    dtype = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    return torch.empty(batch, heads, seqlen_q, dtype=dtype, device=q_latent.device)


def _dispatch(backend: str, q_latent: Tensor, q_pe: Tensor, rope_cache: Tensor) -> DecodeShape | None:
    _, seqlen_q, heads, d_c = q_latent.shape
    _, page_size, num_rope_heads, _ = rope_cache.shape
    return dispatch(
        backend, heads, num_rope_heads, d_c, q_pe.shape[3], page_size, seqlen_q, q_latent.dtype, q_latent.device
    )


def _decode_out(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
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
    shape = _dispatch(backend, q_latent, q_pe, rope_cache)
    if shape is not None:
        check_aligned(q_latent=q_latent, q_pe=q_pe, latent_cache=latent_cache, rope_cache=rope_cache, out=out)
        from mha2mla.kernels.mla_decode.launch import launch_mla_decode

        if schedule is None or splits is None or partial_out is None or partial_lse is None:
            plan = empty_plan(q_latent, rope_cache, block_table, q_pe.shape[3], causal, None, 0, backend)
            plan.refresh(cache_seqlens, cache_starts)
            schedule, splits, partial_out, partial_lse = (
                plan.schedule, plan.splits, plan.partial_out, plan.partial_lse,
            )  # fmt: skip
        elif schedule.shape[0] == 0:
            raise ValueError(
                "plan was made for the reference backend; expected one for TileLang, which serves this call"
            )
        launch_mla_decode(
            shape, capability(q_latent.device), q_latent, q_pe, latent_cache, rope_cache, block_table, softmax_scale,
            causal, window, sinks, schedule, splits, partial_out, partial_lse, out, lse,
        )  # fmt: skip
    else:
        check_spans(schedule, splits, cache_seqlens, cache_starts, block_table.shape[1] * rope_cache.shape[1])
        reference_out, reference_lse = mla_decode_reference(
            q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens,
            softmax_scale=softmax_scale, causal=causal, cache_starts=cache_starts,
            window=None if window < 0 else window, sinks=sinks,
        )  # fmt: skip
        out.copy_(reference_out)
        lse.copy_(reference_lse)


def _decode(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    softmax_scale: float,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    lse = _empty_lse(q_latent)
    _decode_out(
        q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens, cache_starts, softmax_scale, causal,
        backend, -1, 0, None, None, None, None, out, lse,
    )  # fmt: skip
    return out, lse


def _decode_fake(q_latent, *_):
    return torch.empty_like(q_latent, memory_format=torch.contiguous_format), _empty_lse(q_latent)


_INPUTS = (
    "Tensor q_latent, Tensor q_pe, Tensor latent_cache, Tensor rope_cache, Tensor block_table, Tensor cache_seqlens,"
    " Tensor? cache_starts, float softmax_scale, bool causal, str backend"
)
LIBRARY.define(f"mla_decode({_INPUTS}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"mla_decode_out({_INPUTS}, int window, int sinks, Tensor? schedule, Tensor? splits, Tensor(a!)? partial_out,"
    " Tensor(b!)? partial_lse, Tensor(c!) out, Tensor(d!) lse) -> ()"
)
LIBRARY.impl("mla_decode", _decode, "CompositeExplicitAutograd")
LIBRARY.impl("mla_decode_out", _decode_out, "CompositeExplicitAutograd")
torch.library.register_fake("mha2mla::mla_decode", _decode_fake, lib=LIBRARY)
torch.library.register_fake("mha2mla::mla_decode_out", lambda *_: None, lib=LIBRARY)
