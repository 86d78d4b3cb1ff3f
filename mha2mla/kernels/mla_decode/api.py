"""MLA decode: what the op takes, and its public functions. The rest follows from the declaration."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry, code_bytes
from mha2mla.kernels.mla_decode import codes_selection, selection
from mha2mla.kernels.mla_decode.codes_selection import CodedShape
from mha2mla.kernels.mla_decode.quantization import CODES, KEY_CODES
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.ops import (
    ALIGNMENT,
    Argument,
    argument_error,
    capability,
    check_beside,
    dtype_name,
    in_plain_eager_mode,
    sizes_of,
)
from mha2mla.kernels.rope_append.api import LatentRope
from mha2mla.kernels.skinny_linear.api import project_heads
from mha2mla.kernels.skinny_linear.selection import serves_few_tokens, serves_heads
from mha2mla.kernels.split_kv.choice import MERGED_ROWS
from mha2mla.kernels.split_kv.op import PagedOp, dispatch
from mha2mla.kernels.split_kv.plan import DecodePlan

_ROTATION = (  # fields of LatentRope
    Argument("rope_bias", "(d_r)"),
    Argument("inv_freq", "(pairs)", torch.float32),
    Argument("page_offsets", "(B max_pages)", torch.int32, optional=True),
)
_KEYS = {  # by whether they are cached, KEY_CODES: as integers
    True: (Argument("rope_cache", "P page (G|H d_r)"),),
    KEY_CODES: (
        Argument("rope_cache", "P page (G|H d_r)", KEY_CODES), Argument("rope_scale", "P page", torch.float32),
        *_ROTATION,
    ),
    False: (Argument("rope_weight", "d_r d_c"), *_ROTATION),
}  # fmt: skip
_LATENTS = {  # by the cache's dtype, None where it is the queries': the cache, and what dequantises its codes
    None: (Argument("latent_cache", "P page d_c"),),
    CODES: (Argument("latent_cache", "P page d_c", CODES), Argument("latent_scale", "P page", torch.float32)),
    torch.uint8: (Argument("latent_cache", "P (page row)", torch.uint8), Argument("centers", "2 d_c")),
}


_MODULES = {"latent_portable": "swap_ab", "latent_fp8": "latent_ws", "latent_cluster": "swap_ab_cluster"}
_MODULES |= {"int8_keys_ws": "int8_keys", "int8_keys_cluster": "int8_keys", "int8_keys_portable": "swap_ab"}
_MODULES |= dict.fromkeys(
    [f"codes_{kind}" for kind in ("portable", "ws", "cluster", "latent_ws", "latent_cluster")], "codes"
)


def _shape(has_rope_cache: bool, heads: int, *call: Any) -> DecodeShape:
    """Shape to compile of a call's ``static`` sizes and its dtype; one rope head where keys are not cached."""
    *sizes, dtype = (heads, *(() if has_rope_cache else (1,)), *call)
    return CodedShape(*sizes[:6], dtype, *sizes[6:]) if len(sizes) > 6 else DecodeShape(*sizes, dtype)


def _declare(name: str, latent_dtype: torch.dtype | None, keys: bool | torch.dtype) -> PagedOp:
    is_coded, has_rope_cache = latent_dtype == torch.uint8, keys is not False
    how: dict[str, bool] = {"has_rope_cache": has_rope_cache}
    how |= {} if is_coded else {"codes": latent_dtype == CODES, "key_codes": keys is KEY_CODES}
    chosen = codes_selection if is_coded else selection
    return PagedOp(
        name=name,
        arguments=(
            Argument("q_latent", "B S_q H d_c"),
            Argument("q_pe", "B S_q H d_r"),
            *_LATENTS[latent_dtype],
            *_KEYS[keys],
        ),
        out=Argument("out", "B S_q H d_c"),
        shape=partial(_shape, has_rope_cache),
        static=("H", *("G",) * has_rope_cache, "d_c", "d_r", "page", "S_q", *("row",) * is_coded),
        refusal=partial(chosen.refusal, **how),
        select=partial(chosen.select_kernel, **how),
        package="mha2mla.kernels.mla_decode",
        modules=_MODULES,
        reference="mha2mla.kernels.split_kv.reference:mla_decode_reference",
        numbers=() if keys is True else ("scaling",),
        guards_indices=latent_dtype == CODES and has_rope_cache,
        opaque_smem_writes=is_coded or keys is not True,
    )


_OPS = {
    (latent_dtype, keys): _declare(name, latent_dtype, keys)
    for name, latent_dtype, keys in (
        ("mla_decode", None, True),
        ("mla_decode_fp8", CODES, True),
        ("mla_decode_codes", torch.uint8, True),
        ("mla_decode_latent", None, False),
        ("mla_decode_latent_fp8", CODES, False),
        ("mla_decode_latent_codes", torch.uint8, False),
        ("mla_decode_int8_keys", None, KEY_CODES),
    )
}
MLA, FP8, ROW_CODES, LATENT, LATENT_FP8, LATENT_CODES, INT8_KEYS = _OPS.values()


def _op(latent_dtype: torch.dtype | None, keys: bool | torch.dtype) -> PagedOp:
    return _OPS.get((latent_dtype, keys), _OPS[None, keys])  # of another dtype: the queries' own


def mla_decode(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor | None,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    rope: LatentRope | None = None,
    latent_scale: Tensor | None = None,
    rope_scale: Tensor | None = None,
    centers: Tensor | None = None,
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
        latent_cache: [P, page, d_c] pages of latents; float8_e4m3fn with ``latent_scale``.
        rope_cache: [P, page, G, d_r] pages of rotated keys; G divides H. None in a cache of the latent alone;
            int8 with ``rope_scale``.
        block_table: [B, max_pages] int32, the pages of each sequence; entries past its length, or whose whole tile of
            64 tokens no query sees, are never used. Tokens of an entry that is no page, such as -1, count as zeros and
            no other page is read; the reference on the CPU refuses it.
        cache_seqlens: [B] int32, tokens per sequence, the S_q new ones included; clamped to max_pages * page on the
            device. 0 gives zeros and lse -inf.
        softmax_scale: the source model's, usually head_dim ** -0.5; never derived from d_c + d_r.
        rope: what the rotary keys of a cache of the latent alone are computed from; there is one rope head then. Keys
            are rotated by their token's place in its sequence (plus ``page_offsets``), as ``q_pe`` is to be.
        latent_scale: [P, page] float32, of e4m3 latents as :func:`quantize_latent` or :func:`mla_append` makes them:
            positive, not below 2^-32; a token without one (NaN) gives NaN. One scale a token and not one per tile or
            channel: a token is quantised when it is appended, alone, and its scale leaves both matrix products. Codes,
            scales and k_pe are three tensors, so each is one dense copy for the tensor-memory unit, and k_pe keeps its
            own dtype: d_c + 4 + 2 G d_r bytes a token, instead of 2 d_c + 2 G d_r. Queries are not quantised.
        centers: [2, d_c] of latents that are integer codes, latent_cache [P, page, bytes of a row] uint8
            (:class:`RowQuantizer` of 2, 3, 4 or 8 bits in whole blocks of 32), contiguous.
        causal: new token s sees tokens before ``cache_seqlens - S_q + 1 + s`` (bottom-right aligned); else all.
        cache_starts: [B] int32, first visible token (left padding); None means 0.
        plan: from :func:`plan_mla_decode`, last refreshed with these ``cache_seqlens`` and ``cache_starts``: kernels
            attend over the plan's, and the reference refuses other ones. Carries the sliding window and the attention
            sinks, if any. None makes one for this call.
        out: [B, S_q, H, d_c] to write into; None allocates.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: "tilelang", "reference", or None: TileLang where :func:`explain_mla_decode` has nothing against it.

    Queries and caches share a dtype (bfloat16 or float16; the reference also takes float32 and float64) and may be
    strided views: last dimension contiguous, 16-bit rows on 16-byte boundaries, a token's G rope heads side by side.
    Kernels refuse a view that does not begin at a multiple of 16 bytes.

    Returns:
        ``out [B, S_q, H, d_c]``, and with ``return_lse`` also ``lse [B, H, S_q]`` (natural log, float32; float64 from
        the reference for float64 inputs).

    Raises:
        ValueError: naming the argument, what it was and what it must be; or why ``backend="tilelang"`` refuses.
    """
    op, data, numbers = _chosen(q_latent, q_pe, latent_cache, rope_cache, rope, latent_scale, rope_scale, centers)
    return op(
        data, block_table, cache_seqlens, cache_starts, softmax_scale, causal, backend, plan, out, return_lse, numbers
    )


def _chosen(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor | None,
    rope: LatentRope | None,
    latent_scale: Tensor | None,
    rope_scale: Tensor | None,
    centers: Tensor | None,
) -> tuple[PagedOp, tuple[Tensor | None, ...], tuple[float, ...]]:
    """The op that serves arguments of :func:`mla_decode`, its tensors and its numbers."""
    if rope_scale is not None:
        check_key_codes(rope_cache, rope, latent_scale if centers is None else centers)
    elif (rope is None) == (rope_cache is None):
        was = None if rope is None else tuple(rope_cache.shape)
        raise argument_error(
            "rope_cache", was, "a tensor, or rope in its place" if rope is None else "None beside rope"
        )
    if centers is not None and latent_scale is not None:
        raise argument_error("latent_scale", "given beside centers", "one of the two")
    if centers is not None:
        latent_dtype, latent = torch.uint8, (latent_cache, centers)
    elif latent_scale is not None:
        latent_dtype, latent = CODES, (latent_cache, latent_scale)
    else:
        latent_dtype, latent = None, (latent_cache,)
    if rope is None:
        return _OPS[latent_dtype, True], (q_latent, q_pe, *latent, rope_cache), ()
    is_kept = rope_scale is not None
    keys = (rope_cache, rope_scale) if is_kept else (rope.weight,)
    data = (q_latent, q_pe, *latent, *keys, rope.bias, rope.inv_freq, rope.page_offsets)
    return _OPS[latent_dtype, KEY_CODES if is_kept else False], data, (rope.scaling,)


def check_key_codes(rope_cache: Tensor | None, rope: LatentRope | None, of_latents: Tensor | None) -> None:
    """Raises ValueError unless what comes with ``rope_scale`` is there, and latents are no codes."""
    if rope_cache is None or rope is None:
        name = "rope_cache" if rope_cache is None else "rope"
        raise argument_error(name, None, "both rope_cache and rope beside rope_scale")
    if rope_cache.dim() == 4 and rope_cache.shape[2] != 1:
        raise argument_error("rope_cache.shape", tuple(rope_cache.shape), "[P, page, 1, d_r] beside rope_scale")
    if of_latents is not None:
        raise argument_error("rope_scale", "given for latents that are codes", "None, or latents of the queries' dtype")


def serves_w_uv(
    q_latent: Tensor, latent_cache: Tensor, v_up: Tensor, block_table: Tensor, plan: DecodePlan | None
) -> bool:
    """True where the kernel that merges partials also multiplies by W_UV, with these shapes and this plan: few rows on
    a Hopper, heads that share maps; where each has its own, a merge and a product are faster (docs/notes/step.md)."""
    batch, seqlen_q, heads, width = q_latent.shape
    return (
        plan is not None
        and plan.num_ctas > 0
        and 0 < batch * seqlen_q <= MERGED_ROWS
        and in_plain_eager_mode(q_latent)
        and q_latent.is_cuda
        and capability(q_latent.device) == 90
        and latent_cache.shape[0] > 0
        and block_table.shape[1] > 0
        and v_up.shape[0] < heads
        and heads % v_up.shape[0] == 0
        and width % 32 == 0
        and width <= 1024
        and v_up.shape[1] % 16 == 0
        and v_up.shape[1] <= 128
        and v_up.dtype == q_latent.dtype
        and v_up.is_contiguous()
        and v_up.data_ptr() % ALIGNMENT == 0
    )


def mla_absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor | None,
    k_up: Tensor | None,
    v_up: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    q_latent: Tensor | None = None,
    cache_starts: Tensor | None = None,
    latent_scale: Tensor | None = None,
    rope_scale: Tensor | None = None,
    centers: Tensor | None = None,
    rope: LatentRope | None = None,
    plan: DecodePlan | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """:func:`mha2mla.kernels.mla_attention` of sequences that all bring S_q <= 8 new tokens, in the absorbed form.

    W_UK goes to the query and W_UV to the output, so that attention runs over the cached latents themselves
    (DeepSeek-V2, arXiv 2405.04434, 2.1).

    Args:
        q_nope: [B, S_q, H, d_n]; d_n may be 0.
        q_pe: [B, S_q, H, d_r], rotated.
        q_latent: [B, S_q, H, d_c], q_nope through W_UK; None: computed here.
        latent_cache, rope_cache, k_up, v_up, latent_scale, rope_scale, rope: as in
            :func:`mha2mla.kernels.mla_attention`.
        block_table, cache_seqlens, softmax_scale, cache_starts, centers, plan, backend: as in
            :func:`mha2mla.kernels.mla_decode`.
        out: [B, S_q, H, d_v], contiguous, to write into, where no gradient is needed; None allocates.

    Returns:
        [B, S_q, H, d_v].

    Raises:
        ValueError: as :func:`mha2mla.kernels.mla_decode`.
    """
    if out is not None:
        check_beside("q_pe", q_pe, out=(out, q_pe.shape[:3] + v_up.shape[1:2]))
        if not out.is_contiguous():
            raise argument_error("out.stride()", out.stride(), "contiguous memory")
    is_plain = backend != "reference" and not torch.is_grad_enabled() and in_plain_eager_mode(q_pe)
    if k_up is None:
        q_latent = q_pe.new_zeros(*q_pe.shape[:3], v_up.shape[-1])
    elif q_latent is None:
        q_latent = _up_project(q_nope, k_up, is_plain=is_plain)
    through = None
    if is_plain and serves_w_uv(q_latent, latent_cache, v_up, block_table, plan):
        through = v_up, q_latent.new_empty(*q_latent.shape[:3], v_up.shape[1]) if out is None else out
    op, data, numbers = _chosen(q_latent, q_pe, latent_cache, rope_cache, rope, latent_scale, rope_scale, centers)
    call = (block_table, cache_seqlens, cache_starts, softmax_scale, True, backend, plan)
    made = op(data, *call, out=None, return_lse=False, numbers=numbers, through=through)
    if through is not None:
        return through[1]
    return _up_project(made, v_up, transposed=True, is_plain=is_plain, out=out)


def _up_project(
    x: Tensor, weight: Tensor, transposed: bool = False, is_plain: bool = False, out: Tensor | None = None
) -> Tensor:
    """x [B, S, H, i] times weight [k, i, o], or [k, o, i], of H / k heads each: [B, S, H, o].

    Products that need no gradient read x where it lies and write the result where it is to lie, heads side by side:
    einsum copies both. Of many tokens, weights that heads share are repeated where no kernel serves them.
    """
    batch, tokens, heads, _ = x.shape
    count = weight.shape[0]
    if heads % count:
        raise argument_error("v_up.shape[0]" if transposed else "k_up.shape[0]", count, f"a divisor of H={heads}")
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        equation = "bskri,koi->bskro" if transposed else "bskri,kio->bskro"
        made = torch.einsum(equation, x.unflatten(2, (count, -1)), weight).flatten(2, 3)
        return made if out is None else out.copy_(made)
    few = is_plain and serves_few_tokens(x, weight, transposed)
    if few or (batch * tokens > 1 and x.is_cuda and in_plain_eager_mode(x) and serves_heads(x, weight, transposed)):
        return project_heads(x, weight, transposed=transposed, out=out)
    if batch * tokens != 1 and count < heads:
        weight = weight[:, None].expand(-1, heads // count, -1, -1).flatten(0, 1)
    weight = weight.mT if transposed else weight
    if out is None:
        out = x.new_empty(batch, tokens, heads, weight.shape[2])
    if weight.shape[0] < heads:
        torch.bmm(x.view(count, heads // count, -1), weight, out=out.view(count, heads // count, -1))
    else:
        torch.bmm(x.flatten(0, 1).transpose(0, 1), weight, out=out.flatten(0, 1).transpose(0, 1))
    return out


def explain_mla_decode(
    geometry: MLAGeometry,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seqlen_q: int = 1,
    latent_dtype: torch.dtype | None = None,
) -> str | None:
    """Why the TileLang backend would refuse a geometry on a device, or None if it serves it.

    Args:
        geometry: H, G, d_c and d_r are looked at, and whether the cache is of the latent alone.
        page_size: tokens per page.
        dtype: of queries and caches.
        device: where they live; a CUDA device that this machine lacks is taken to be a Hopper.
        seqlen_q: new tokens per sequence.
        latent_dtype: float8_e4m3fn where the latent cache has scales; None: as ``dtype``.
    """
    if latent_dtype == torch.uint8:
        raise argument_error("latent_dtype", latent_dtype, f"{CODES} or None; of integer codes decodes_codes tells")
    return _op(latent_dtype, KEY_CODES if geometry.has_key_codes else geometry.has_rope_cache).explain(
        DecodeShape.of(geometry, page_size, dtype_name(dtype), seqlen_q), device
    )


def decodes_codes(
    geometry: MLAGeometry, page_size: int, dtype: torch.dtype, device: torch.device | str, seqlen_q: int = 1
) -> bool:
    """True where :func:`mla_decode` has a fast kernel over a cache of a geometry's integer codes, on a Hopper.

    On an H100 those over kept rotary keys took 0.44 to 0.59 of the time of a copy in 16 bits and its decode.
    """
    g = geometry
    if not g.has_codes:
        return False
    sizes = {"H": g.num_attention_heads, "G": g.num_rope_heads, "d_c": g.kv_lora_rank, "d_r": g.qk_rope_head_dim}
    sizes |= {"page": page_size, "S_q": seqlen_q, "row": code_bytes(g.kv_lora_rank, g.latent_bits)}
    op = _OPS[torch.uint8, g.has_rope_cache]
    served = dispatch(op, None, *[sizes[name] for name in op.static], dtype, torch.device(device))
    return served is not None and served[1].kernel != "codes_portable"


def plan_mla_decode(
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
    latent_dtype: torch.dtype | None = None,
    row_bytes: int | None = None,
    num_splits: int | None = None,
    backend: str | None = None,
) -> DecodePlan:
    """Allocate a plan for calls of :func:`mla_decode` with these shapes and fill it from these lengths.

    Args:
        q_latent: [B, S_q, H, d_c]; only shape, dtype and device are looked at, here and in the next two.
        rope_cache: [P, page, G, d_r], or int8; for a cache of the latent alone its latent_cache [P, page, d_c].
        block_table: [B, max_pages].
        cache_seqlens: [B] int32; None: the plan is not filled, and must be refreshed before a call.
        qk_rope_head_dim: d_r.
        cache_starts: [B] int32 or None.
        causal: as in :func:`mla_decode`.
        window: each query sees only the last ``window`` tokens up to itself; None: all. Time follows the tokens seen.
        sinks: the first ``sinks`` tokens (from cache_starts on) stay visible (attention sinks, arXiv 2309.17453).
        num_splits: even pieces that each sequence is cut into, each a block's (FlashAttention's argument of that name);
            a sequence of fewer tiles of 64 tokens has as many pieces as tiles. Where a sequence is cut then does not
            depend on the others. Takes a workspace for B * num_splits blocks. None: blocks for all multiprocessors,
            balanced over all sequences.
        latent_dtype: float8_e4m3fn where the latent cache has scales, uint8 where it has centers; None: as the queries.
        row_bytes: of a cached latent that is integer codes.
        backend: as in :func:`mla_decode`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    if rope_cache is None or rope_cache.dim() not in (3, 4):
        was = None if rope_cache is None else tuple(rope_cache.shape)
        raise argument_error(
            "rope_cache", was, "[P, page, G, d_r], or latent_cache [P, page, d_c] where k_pe is not cached"
        )
    sizes = sizes_of("q_latent", q_latent, MLA.out.dims)
    sizes |= {"page": rope_cache.shape[1], "G": rope_cache.shape[2], "d_r": qk_rope_head_dim, "row": row_bytes}
    keys = KEY_CODES if rope_cache.dtype == KEY_CODES else rope_cache.dim() != 3
    return _op(latent_dtype, keys).plan(
        sizes, q_latent, block_table, cache_seqlens, cache_starts, causal, window, sinks, backend,
        num_splits,
    )  # fmt: skip
