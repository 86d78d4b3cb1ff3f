"""The public fp8 decode op: validation, dispatch with a recorded reason, and its torch.library schemas."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.devices import BACKENDS, capability, dtype_name, num_sms
from mha2mla.kernels.layouts import check_aligned
from mha2mla.kernels.mla_decode.dispatch import decode_shape
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.mla_decode_fp8.reference import CODES, mla_decode_fp8_reference
from mha2mla.kernels.mla_decode_fp8.selection import CAPABILITY, refusal_fp8, select_fp8
from mha2mla.kernels.split_kv.plan import DecodePlan, allocate_plan, check_spans, check_window

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def explain_mla_decode_fp8(
    geometry: MLAGeometry, page_size: int, dtype: torch.dtype, device: torch.device | str, seqlen_q: int = 1
) -> str | None:
    """Why the TileLang kernel would refuse a geometry on a device, or None; as :func:`explain_mla_decode`."""
    device = torch.device(device)
    why = refusal_fp8(geometry, page_size, dtype_name(dtype), seqlen_q)
    if why is not None:
        return why
    if device.type != "cuda":
        return f"device is {device}; the kernel runs on CUDA devices"
    if capability(device) != CAPABILITY:
        return f"device {device} has compute capability {capability(device) / 10}; the kernel needs 9.0 (Hopper)"
    try:
        select_fp8(decode_shape(geometry, page_size, dtype, seqlen_q))
    except ValueError as error:
        return str(error)
    return None


@lru_cache(maxsize=4096)
def _dispatch(
    backend: str | None,
    heads: int,
    num_rope_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    seqlen_q: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeShape | None:
    """The shape to compile for, or None where the reference serves."""
    if backend == "reference":
        return None
    geometry = MLAGeometry(heads, num_rope_heads, kv_lora_rank, qk_rope_head_dim)
    why = explain_mla_decode_fp8(geometry, page_size, dtype, device, seqlen_q)
    if why is None:
        return decode_shape(geometry, page_size, dtype, seqlen_q)
    if backend == "tilelang":
        raise ValueError(f"backend is 'tilelang', which refuses this call: {why}")
    return None


@torch.compiler.assume_constant_result
def _num_ctas(*call: object) -> int:
    """Blocks of the kernel per tile of query rows; 0 where the reference serves."""
    shape = _dispatch(*call)
    return 0 if shape is None else select_fp8(shape).num_ctas(num_sms(call[-1]))


def plan_mla_decode_fp8(
    q_latent: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor | None,
    *,
    qk_rope_head_dim: int,
    cache_starts: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    backend: str | None = None,
) -> DecodePlan:
    """:func:`plan_mla_decode` for calls of :func:`mla_decode_fp8`: same arguments, errors and meaning.

    A plan of one op may be passed to the other where both run TileLang, but has as many blocks as suit its own.
    """
    check_window(window, sinks)
    _check_backend(backend)
    batch, seqlen_q, heads, d_c = q_latent.shape
    _, page, groups, _ = rope_cache.shape
    num_ctas = _num_ctas(backend, heads, groups, d_c, qk_rope_head_dim, page, seqlen_q, q_latent.dtype, q_latent.device)
    plan = allocate_plan(
        (batch, seqlen_q, heads, d_c), num_ctas, block_table.shape[1] * page, causal, window, sinks, q_latent.device
    )
    if cache_seqlens is not None:
        plan.refresh(cache_seqlens, cache_starts)
    return plan


def mla_decode_fp8(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    latent_scale: Tensor,
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
    """:func:`mla_decode` over a latent cache of e4m3 numbers with one float32 scale per token; k_pe as there.

    One scale a token and not one per tile or channel: a token is quantised when it is appended, alone, and its scale
    leaves both matrix products (``score = scale * (q . codes)``, ``out = sum (p * scale) codes``). Codes, scales and
    k_pe are three tensors, so each is one dense copy for the tensor-memory unit, and k_pe keeps its own dtype.
    d_c + 4 + 2 G d_r bytes a token, instead of 2 d_c + 2 G d_r. Queries are not quantised.

    Args:
        latent_cache: [P, page, d_c] float8_e4m3fn, as :func:`quantize_latent` or :func:`mla_append` makes it.
        latent_scale: [P, page] float32, positive, not below 2^-32; a token without one (NaN) gives NaN.
        q_latent, q_pe, rope_cache, block_table, cache_seqlens, softmax_scale, causal, cache_starts, out, return_lse:
            as in :func:`mla_decode`, also what is said there of strides. Pages may be strided, tokens of a page too.
        plan: from :func:`plan_mla_decode_fp8`.
        backend: "tilelang", "reference", or None: TileLang where :func:`explain_mla_decode_fp8` has nothing against
            it (Hopper, bfloat16 or float16 queries, d_c a multiple of 16).

    Returns:
        As :func:`mla_decode`.

    Raises:
        ValueError: naming the argument, what it was and what it must be; or why ``backend="tilelang"`` refuses.
    """
    _check_backend(backend)
    if not isinstance(softmax_scale, (int, float)) or not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale!r}; expected a positive finite number")
    tensors = (q_latent, q_pe, latent_cache, latent_scale, rope_cache, block_table, cache_seqlens, cache_starts)
    _validate(*tensors, out)
    if plan is None:
        window, sinks, buffers = -1, 0, (None, None, None, None)
    else:
        plan.check(q_latent, block_table, rope_cache.shape[1], causal)
        window, sinks = -1 if plan.window is None else plan.window, plan.sinks
        buffers = (plan.schedule, plan.splits, plan.partial_out, plan.partial_lse)
    if plan is None and out is None:
        out, lse = torch.ops.mha2mla.mla_decode_fp8(*tensors, softmax_scale, causal, backend)
    else:
        out = torch.empty_like(q_latent, memory_format=torch.contiguous_format) if out is None else out
        lse = _empty_lse(q_latent)
        torch.ops.mha2mla.mla_decode_fp8_out(
            *tensors, softmax_scale, causal, backend, window, sinks, *buffers, out, lse
        )
    return (out, lse) if return_lse else out


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected None or one of {BACKENDS}")


def _validate(
    q_latent: Tensor, q_pe: Tensor, latent_cache: Tensor, latent_scale: Tensor, rope_cache: Tensor, block_table: Tensor,
    cache_seqlens: Tensor, cache_starts: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    """What the host can know; names the first argument that is not as it must be."""
    if q_latent.ndim != 4 or q_latent.dtype not in _DTYPES:
        raise ValueError(
            f"q_latent is {q_latent.dtype} {tuple(q_latent.shape)}; expected [B, S_q, H, d_c] in bfloat16, float16,"
            " float32 or float64"
        )
    batch, seqlen_q, heads, d_c = q_latent.shape
    dtype, device = q_latent.dtype, q_latent.device
    if q_pe.ndim != 4 or q_pe.shape[:3] != q_latent.shape[:3]:
        raise ValueError(f"q_pe.shape is {tuple(q_pe.shape)}; expected [{batch}, {seqlen_q}, {heads}, d_r]")
    if rope_cache.ndim != 4 or rope_cache.shape[3] != q_pe.shape[3]:
        raise ValueError(f"rope_cache.shape is {tuple(rope_cache.shape)}; expected [P, page, G, {q_pe.shape[3]}]")
    pages, page, groups, d_r = rope_cache.shape
    if groups < 1 or heads % groups:
        raise ValueError(f"rope_cache.shape[2] (num_rope_heads) is {groups}; expected a divisor of H={heads}")
    if groups > 1 and rope_cache.stride(2) != d_r:
        raise ValueError(
            f"rope_cache.stride(2) is {rope_cache.stride(2)}; expected {d_r}: a token's heads side by side"
        )
    index = [("block_table", block_table, None), ("cache_seqlens", cache_seqlens, (batch,))]
    index += [] if cache_starts is None else [("cache_starts", cache_starts, (batch,))]
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table.shape is {tuple(block_table.shape)}; expected [{batch}, max_pages]")
    for name, tensor, shape in index:
        if shape is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name}.shape is {tuple(tensor.shape)}; expected {list(shape)}")
        if tensor.dtype != torch.int32 or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}; expected contiguous torch.int32 on {device}"
            )
    data = [
        ("q_pe", q_pe, tuple(q_pe.shape), dtype, 3),
        ("latent_cache", latent_cache, (pages, page, d_c), CODES, 2),
        ("latent_scale", latent_scale, (pages, page), torch.float32, 1),
        ("rope_cache", rope_cache, tuple(rope_cache.shape), dtype, 2),
        ("q_latent", q_latent, tuple(q_latent.shape), dtype, 3),
    ]
    data += [] if out is None else [("out", out, tuple(q_latent.shape), dtype, 3)]
    for name, tensor, shape, expected, rows in data:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}.shape is {tuple(tensor.shape)}; expected {list(shape)}")
        if tensor.dtype != expected or tensor.device != device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; expected {expected} on {device}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name}.stride(-1) is {tensor.stride(-1)}; expected 1")
        step = 16 // expected.itemsize
        for dim in range(rows) if dtype.itemsize == 2 else ():
            if tensor.stride(dim) % step and tensor.shape[dim] > 1:
                raise ValueError(
                    f"{name}.stride({dim}) is {tensor.stride(dim)}; expected a multiple of {step} elements (16 bytes)"
                )


def _empty_lse(q_latent: Tensor) -> Tensor:
    batch, seqlen_q, heads, _ = q_latent.shape
    dtype = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    return torch.empty(batch, heads, seqlen_q, dtype=dtype, device=q_latent.device)


def _decode_out(
    q_latent: Tensor, q_pe: Tensor, latent_cache: Tensor, latent_scale: Tensor, rope_cache: Tensor, block_table: Tensor,
    cache_seqlens: Tensor, cache_starts: Tensor | None, softmax_scale: float, causal: bool, backend: str | None,
    window: int, sinks: int, schedule: Tensor | None, splits: Tensor | None, partial_out: Tensor | None,
    partial_lse: Tensor | None, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    _, seqlen_q, heads, d_c = q_latent.shape
    _, page, groups, d_r = rope_cache.shape
    shape = _dispatch(backend, heads, groups, d_c, d_r, page, seqlen_q, q_latent.dtype, q_latent.device)
    if shape is None:
        check_spans(schedule, splits, cache_seqlens, cache_starts, block_table.shape[1] * page)
        reference_out, reference_lse = mla_decode_fp8_reference(
            q_latent, q_pe, latent_cache, latent_scale, rope_cache, block_table, cache_seqlens,
            softmax_scale=softmax_scale, causal=causal, cache_starts=cache_starts,
            window=None if window < 0 else window, sinks=sinks,
        )  # fmt: skip
        out.copy_(reference_out)
        lse.copy_(reference_lse)
        return
    check_aligned(
        q_latent=q_latent, q_pe=q_pe, latent_cache=latent_cache, latent_scale=latent_scale, rope_cache=rope_cache,
        out=out,
    )  # fmt: skip
    from mha2mla.kernels.mla_decode_fp8.launch import launch_mla_decode_fp8

    if schedule is None or splits is None or partial_out is None or partial_lse is None:
        plan = plan_mla_decode_fp8(
            q_latent, rope_cache, block_table, cache_seqlens, qk_rope_head_dim=d_r, cache_starts=cache_starts,
            causal=causal, backend=backend,
        )  # fmt: skip
        schedule, splits, partial_out, partial_lse = plan.schedule, plan.splits, plan.partial_out, plan.partial_lse
    elif schedule.shape[0] == 0:
        raise ValueError("plan was made for the reference backend; expected one for TileLang, which serves this call")
    launch_mla_decode_fp8(
        shape, q_latent, q_pe, latent_cache, latent_scale, rope_cache, block_table, softmax_scale, causal, window,
        sinks, schedule, splits, partial_out, partial_lse, out, lse,
    )  # fmt: skip


def _decode(
    q_latent: Tensor, q_pe: Tensor, latent_cache: Tensor, latent_scale: Tensor, rope_cache: Tensor, block_table: Tensor,
    cache_seqlens: Tensor, cache_starts: Tensor | None, softmax_scale: float, causal: bool, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = torch.empty_like(q_latent, memory_format=torch.contiguous_format), _empty_lse(q_latent)
    _decode_out(
        q_latent, q_pe, latent_cache, latent_scale, rope_cache, block_table, cache_seqlens, cache_starts,
        softmax_scale, causal, backend, -1, 0, None, None, None, None, out, lse,
    )  # fmt: skip
    return out, lse


_INPUTS = (
    "Tensor q_latent, Tensor q_pe, Tensor latent_cache, Tensor latent_scale, Tensor rope_cache, Tensor block_table,"
    " Tensor cache_seqlens, Tensor? cache_starts, float softmax_scale, bool causal, str? backend"
)
LIBRARY = torch.library.Library("mha2mla", "FRAGMENT")
LIBRARY.define(f"mla_decode_fp8({_INPUTS}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"mla_decode_fp8_out({_INPUTS}, int window, int sinks, Tensor? schedule, Tensor? splits, Tensor(a!)? partial_out,"
    " Tensor(b!)? partial_lse, Tensor(c!) out, Tensor(d!) lse) -> ()"
)
LIBRARY.impl("mla_decode_fp8", _decode, "CompositeExplicitAutograd")
LIBRARY.impl("mla_decode_fp8_out", _decode_out, "CompositeExplicitAutograd")
torch.library.register_fake(
    "mha2mla::mla_decode_fp8",
    lambda q_latent, *_: (
        torch.empty_like(q_latent, memory_format=torch.contiguous_format),
        _empty_lse(q_latent),
    ),
    lib=LIBRARY,
)
torch.library.register_fake("mha2mla::mla_decode_fp8_out", lambda *_: None, lib=LIBRARY)
