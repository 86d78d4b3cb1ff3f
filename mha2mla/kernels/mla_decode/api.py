"""The public decode op: validation, dispatch with a recorded reason, and its torch.library schemas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.mla_decode.reference import mla_decode_reference
from mha2mla.kernels.mla_decode.selection import MAX_SPLITS, DecodeShape, refusal, select_kernel
from mha2mla.kernels.mla_decode.tiling import SEQLENS_Q

BACKENDS = ("tilelang", "reference")
SPLIT_TOKENS = 64  # granularity of the split-KV cost model, tokens
SPLIT_OVERHEAD = 4  # start-up and partial output of a block, in units of SPLIT_TOKENS tokens


@dataclass(frozen=True)
class DecodePlan:
    """The work split of one decode shape and the workspace it needs; made once, reused by every layer and step.

    Only shapes decide a plan, never lengths, so a plan captured in a CUDA graph stays right for every length.

    Attributes:
        num_splits: parts each sequence's cache is cut into.
        partial_out: [B, num_splits, S_q, H, d_c] float32 workspace.
        partial_lse: [B, num_splits, S_q, H] float32 workspace.
    """

    num_splits: int
    partial_out: Tensor
    partial_lse: Tensor

    def check(self, q_latent: Tensor) -> None:
        """Raise ValueError if the plan was made for another shape or device than ``q_latent [B, S_q, H, d_c]``."""
        batch, seqlen_q, heads, d_c = q_latent.shape
        expected = (batch, self.num_splits, seqlen_q, heads, d_c)
        if tuple(self.partial_out.shape) != expected or self.partial_out.device != q_latent.device:
            raise ValueError(
                f"plan was made for [B, splits, S_q, H, d_c] = {tuple(self.partial_out.shape)} on "
                f"{self.partial_out.device}; expected {expected} on {q_latent.device}"
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compiled_seqlen_q(seqlen_q: int) -> int:
    return next(size for size in SEQLENS_Q if size >= seqlen_q)


def explain_mla_decode(
    geometry: MLAGeometry, page_size: int, dtype: torch.dtype, device: torch.device | str, seqlen_q: int = 1
) -> str | None:
    """Why the TileLang backend would refuse a geometry on a device, or None if it serves it.

    Args:
        geometry: H, G, d_c and d_r are looked at.
        page_size: tokens per page.
        dtype: of queries and caches.
        device: where they live.
        seqlen_q: new tokens per sequence.
    """
    device = torch.device(device)
    why = refusal(geometry, page_size, _dtype_name(dtype), seqlen_q)
    if why is not None:
        return why
    if device.type != "cuda":
        return f"device is {device}; TileLang kernels run on CUDA devices"
    if not torch.cuda.is_available():
        return f"device is {device}; no CUDA device is available"
    capability = _capability(device)
    if capability < 80:
        return f"device {device} has compute capability {capability / 10}; TileLang kernels need 8.0"
    try:
        select_kernel(_shape(geometry, page_size, dtype, seqlen_q), capability)
    except ValueError as error:
        return str(error)
    return None


def _shape(geometry: MLAGeometry, page_size: int, dtype: torch.dtype, seqlen_q: int) -> DecodeShape:
    return DecodeShape(
        heads=geometry.num_attention_heads,
        num_rope_heads=geometry.num_rope_heads,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        page_size=page_size,
        seqlen_q=_compiled_seqlen_q(seqlen_q),
        dtype=_dtype_name(dtype),
    )


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@lru_cache(maxsize=4096)
def _dispatch(
    backend: str,
    heads: int,
    num_rope_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    seqlen_q: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeShape | None:
    """The shape to compile for, or None where the reference serves; remembered, since a decode loop asks every step.

    "auto" prefers TileLang. Raises ValueError with the reason if ``backend`` is "tilelang" and no kernel serves it.
    """
    if backend == "reference":
        return None
    geometry = MLAGeometry(heads, num_rope_heads, kv_lora_rank, qk_rope_head_dim)
    why = explain_mla_decode(geometry, page_size, dtype, device, seqlen_q)
    if why is None:
        return _shape(geometry, page_size, dtype, seqlen_q)
    if backend == "tilelang":
        raise ValueError(f"backend is 'tilelang', which refuses this call: {why}")
    return None


def _dispatch_call(backend: str, q_latent: Tensor, q_pe_width: int, rope_cache: Tensor) -> DecodeShape | None:
    _, seqlen_q, heads, d_c = q_latent.shape
    _, page_size, num_rope_heads, _ = rope_cache.shape
    return _dispatch(
        backend, heads, num_rope_heads, d_c, q_pe_width, page_size, seqlen_q, q_latent.dtype, q_latent.device
    )


def choose_num_splits(batch: int, num_tiles: int, max_tokens: int, num_sms: int) -> int:
    """Parts to cut each sequence into so that a grid of ``batch * num_tiles * splits`` blocks ends soonest.

    A block costs its share of the tokens plus a fixed start-up; blocks run ``num_sms`` at a time. Lengths are not known
    on the host, so every sequence is taken to be as long as its page table allows.
    """
    tokens = max(1, -(-max_tokens // SPLIT_TOKENS))

    def cost(splits: int) -> int:
        waves = -(-batch * num_tiles * splits // num_sms)
        return waves * (-(-tokens // splits) + SPLIT_OVERHEAD) * 1024 + splits

    return min(range(1, min(MAX_SPLITS, tokens) + 1), key=cost)


@lru_cache(maxsize=4096)
def _num_splits(shape: DecodeShape, batch: int, max_tokens: int, device: torch.device) -> int:
    num_tiles = select_kernel(shape, _capability(device)).tiling.num_tiles
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return choose_num_splits(batch, num_tiles, max_tokens, num_sms)


def plan_mla_decode(q_latent: Tensor, rope_cache: Tensor, block_table: Tensor, qk_rope_head_dim: int) -> DecodePlan:
    """A plan for calls of :func:`mla_decode` with these shapes: ``q_latent [B, S_q, H, d_c]``, ``rope_cache
    [P, page, G, d_r]``, ``block_table [B, max_pages]``. Allocates the workspace on ``q_latent``'s device; reads no
    values.
    """
    batch, seqlen_q, heads, d_c = q_latent.shape
    shape = _dispatch_call("auto", q_latent, qk_rope_head_dim, rope_cache)
    max_tokens = block_table.shape[1] * rope_cache.shape[1]
    num_splits = 1 if shape is None else _num_splits(shape, batch, max_tokens, q_latent.device)
    workspace = {"dtype": torch.float32, "device": q_latent.device}
    return DecodePlan(
        num_splits=num_splits,
        partial_out=torch.empty(batch, num_splits, seqlen_q, heads, d_c, **workspace),
        partial_lse=torch.empty(batch, num_splits, seqlen_q, heads, **workspace),
    )


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _error(name: str, was: object, expected: object) -> ValueError:
    return ValueError(f"{name} is {was}; expected {expected}")


def _check_data(name: str, tensor: Tensor, layout: str, like: Tensor) -> None:
    """Rank, dtype and device as ``like``; last dimension contiguous, 16-bit rows on 16-byte boundaries (TMA)."""
    if tensor.dim() != layout.count(",") + 1:
        raise _error(f"{name}.shape", tuple(tensor.shape), layout)
    if tensor.dtype != like.dtype:
        raise _error(f"{name}.dtype", tensor.dtype, f"{like.dtype}, as q_latent")
    if tensor.device != like.device:
        raise _error(f"{name}.device", tensor.device, f"{like.device}, as q_latent")
    shape, strides = tensor.shape, tensor.stride()
    if strides[-1] != 1 and shape[-1] > 1:
        raise _error(f"{name}.stride(-1)", strides[-1], "1")
    if tensor.element_size() == 2:
        rows = strides[:-1] if name != "rope_cache" else strides[:2]
        for dim, stride in enumerate(rows):
            if stride % 8 and shape[dim] > 1:
                raise _error(f"{name}.stride({dim})", stride, "a multiple of 8 elements (16 bytes)")


def _check_index(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise _error(f"{name}.dtype", tensor.dtype, "torch.int32")
    if tensor.device != like.device:
        raise _error(f"{name}.device", tensor.device, f"{like.device}, as q_latent")
    if not tensor.is_contiguous():
        raise _error(f"{name}.stride()", tensor.stride(), "contiguous")


def _validate(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    cache_starts: Tensor | None,
    out: Tensor | None,
    backend: str | None,
) -> None:
    """Everything the host can know; runs on every call, so messages are made only when something is wrong."""
    if backend is not None and backend not in BACKENDS:
        raise _error("backend", repr(backend), f"None or one of {BACKENDS}")
    if q_latent.dtype not in _DTYPES:
        raise _error("q_latent.dtype", q_latent.dtype, "bfloat16, float16, float32 or float64")
    _check_data("q_latent", q_latent, "[B, S_q, H, d_c]", q_latent)
    _check_data("q_pe", q_pe, "[B, S_q, H, d_r]", q_latent)
    _check_data("latent_cache", latent_cache, "[P, page, d_c]", q_latent)
    _check_data("rope_cache", rope_cache, "[P, page, G, d_r]", q_latent)
    batch, seqlen_q, heads, d_c = q_latent.shape
    d_r = q_pe.shape[3]
    pages, page_size, groups, rope_width = rope_cache.shape
    if q_pe.shape[:3] != q_latent.shape[:3]:
        raise _error("q_pe.shape", tuple(q_pe.shape), f"[{batch}, {seqlen_q}, {heads}, d_r]")
    if latent_cache.shape[2] != d_c:
        raise _error("latent_cache.shape", tuple(latent_cache.shape), f"[P, page, {d_c}]")
    if latent_cache.shape[0] != pages or latent_cache.shape[1] != page_size or rope_width != d_r:
        raise _error(
            "rope_cache.shape", tuple(rope_cache.shape), f"[{latent_cache.shape[0]}, {latent_cache.shape[1]}, G, {d_r}]"
        )
    if groups < 1 or heads % groups:
        raise _error("rope_cache.shape[2] (num_rope_heads)", groups, f"a divisor of H={heads}")
    if groups > 1 and rope_cache.stride(2) != d_r:
        raise _error("rope_cache.stride(2)", rope_cache.stride(2), f"{d_r}: the rope heads of a token side by side")
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise _error("block_table.shape", tuple(block_table.shape), f"[{batch}, max_pages]")
    _check_index("block_table", block_table, q_latent)
    if cache_seqlens.dim() != 1 or cache_seqlens.shape[0] != batch:
        raise _error("cache_seqlens.shape", tuple(cache_seqlens.shape), f"[{batch}]")
    _check_index("cache_seqlens", cache_seqlens, q_latent)
    if cache_starts is not None:
        if cache_starts.dim() != 1 or cache_starts.shape[0] != batch:
            raise _error("cache_starts.shape", tuple(cache_starts.shape), f"[{batch}]")
        _check_index("cache_starts", cache_starts, q_latent)
    if not isinstance(softmax_scale, (int, float)) or not 0 < softmax_scale < math.inf:
        raise _error("softmax_scale", repr(softmax_scale), "a positive finite number")
    if out is not None:
        _check_data("out", out, "[B, S_q, H, d_c]", q_latent)
        if out.shape != q_latent.shape:
            raise _error("out.shape", tuple(out.shape), list(q_latent.shape))


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
        block_table: [B, max_pages] int32, the pages of each sequence; entries past its length are never used.
        cache_seqlens: [B] int32, tokens per sequence, the S_q new ones included; clamped to max_pages * page on the
            device. 0 gives zeros and lse -inf.
        softmax_scale: the source model's, usually head_dim ** -0.5; never derived from d_c + d_r.
        causal: new token s sees tokens before ``cache_seqlens - S_q + 1 + s`` (bottom-right aligned); else all.
        cache_starts: [B] int32, first visible token (left padding, sliding windows); None means 0.
        plan: from :func:`plan_mla_decode`, to reuse its workspace; None makes one per call.
        out: [B, S_q, H, d_c] to write into; None allocates.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: "tilelang", "reference", or None: TileLang where :func:`explain_mla_decode` has nothing against it.

    The four data tensors share a dtype (bfloat16 or float16; the reference also takes float32 and float64) and may be
    strided views: last dimension contiguous, 16-bit rows on 16-byte boundaries, a token's G rope heads side by side.

    Returns:
        ``out [B, S_q, H, d_c]``, and with ``return_lse`` also ``lse [B, H, S_q]`` (natural log, float32; float64 from
        the reference for float64 inputs).

    Raises:
        ValueError: naming the argument, what it was and what it must be; or why ``backend="tilelang"`` refuses.
    """
    _validate(
        q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens, softmax_scale, cache_starts, out, backend
    )  # fmt: skip
    tensors = (q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens, cache_starts)
    options = (softmax_scale, causal, backend or "auto")
    if plan is None and out is None:
        out, lse = torch.ops.mha2mla.mla_decode(*tensors, *options)
    else:
        if plan is not None:
            plan.check(q_latent)
        out = torch.empty_like(q_latent, memory_format=torch.contiguous_format) if out is None else out
        lse = _empty_lse(q_latent)
        workspace = (0, None, None) if plan is None else (plan.num_splits, plan.partial_out, plan.partial_lse)
        torch.ops.mha2mla.mla_decode_out(*tensors, *options, *workspace, out, lse)
    return (out, lse) if return_lse else out


def _empty_lse(q_latent: Tensor) -> Tensor:
    batch, seqlen_q, heads, _ = q_latent.shape
    dtype = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    return torch.empty(batch, heads, seqlen_q, dtype=dtype, device=q_latent.device)


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
    num_splits: int,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    shape = _dispatch_call(backend, q_latent, q_pe.shape[3], rope_cache)
    if shape is not None:
        from mha2mla.kernels.mla_decode.launch import launch_mla_decode

        if partial_out is None or partial_lse is None:
            plan = plan_mla_decode(q_latent, rope_cache, block_table, q_pe.shape[3])
            partial_out, partial_lse = plan.partial_out, plan.partial_lse
        launch_mla_decode(
            shape, _capability(q_latent.device), q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens,
            cache_starts, softmax_scale, causal, partial_out, partial_lse, out, lse,
        )  # fmt: skip
    else:
        reference_out, reference_lse = mla_decode_reference(
            q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens,
            softmax_scale=softmax_scale, causal=causal, cache_starts=cache_starts,
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
        backend, 0, None, None, out, lse,
    )  # fmt: skip
    return out, lse


def _decode_fake(q_latent, *_):
    return torch.empty_like(q_latent, memory_format=torch.contiguous_format), _empty_lse(q_latent)


_INPUTS = (
    "Tensor q_latent, Tensor q_pe, Tensor latent_cache, Tensor rope_cache, Tensor block_table, Tensor cache_seqlens,"
    " Tensor? cache_starts, float softmax_scale, bool causal, str backend"
)
_LIBRARY = torch.library.Library("mha2mla", "FRAGMENT")
_LIBRARY.define(f"mla_decode({_INPUTS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"mla_decode_out({_INPUTS}, int num_splits, Tensor(a!)? partial_out, Tensor(b!)? partial_lse,"
    " Tensor(c!) out, Tensor(d!) lse) -> ()"
)
_LIBRARY.impl("mla_decode", _decode, "CompositeExplicitAutograd")
_LIBRARY.impl("mla_decode_out", _decode_out, "CompositeExplicitAutograd")
torch.library.register_fake("mha2mla::mla_decode", _decode_fake, lib=_LIBRARY)
torch.library.register_fake("mha2mla::mla_decode_out", lambda *_: None, lib=_LIBRARY)
