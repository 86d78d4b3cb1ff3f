"""The public mixed-batch ops: validation, the two forms, and their torch.library schemas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.attention_combine import attention_combine
from mha2mla.kernels.attention_varlen.api import attention_varlen, mla_prefill_varlen
from mha2mla.kernels.gqa_decode.api import gqa_decode
from mha2mla.kernels.mixed_attention.layout import Wave
from mha2mla.kernels.mixed_attention.plan import ChunkPart, MixedPlan, check_lengths
from mha2mla.kernels.mla_decode.api import check_key_codes, mla_absorbed
from mha2mla.kernels.mla_decode.quantization import CODES, KEY_CODES, dequantize_latent, holds_codes
from mha2mla.kernels.ops import (
    Argument,
    argument_error,
    check_backend,
    check_scale,
    check_tensors,
    in_plain_eager_mode,
    register,
)
from mha2mla.kernels.rope_append.api import LatentRope, compute_rotary_keys, kept_keys

MAX_PARTIALS = 8  # partial results held before they are merged
_MLA = (
    Argument("q_pe", "N H d_r"),
    Argument("q_nope", "N H d_n"),
    Argument("v_up", "h_kv|H d_v d_c"),
    Argument("k_up", "h_kv d_n d_c", optional=True),
    Argument("latent_scale", "P page", torch.float32, optional=True),
    Argument("rope_scale", "P page", torch.float32, optional=True),
    Argument("rope.weight", "d_r d_c", optional=True),
    Argument("rope.bias", "d_r", optional=True),
    Argument("rope.inv_freq", "pairs", torch.float32, optional=True),
    Argument("out", "N H d_v", optional=True),
)
_LATENT, _ROPE = (  # by whether they are codes
    {codes: Argument(name, dims, dtype if codes else None, name == "rope_cache") for codes in (False, True)}
    for name, dims, dtype in (("latent_cache", "P page d_c", CODES), ("rope_cache", "P page G|H d_r", KEY_CODES))
)
_GQA = (
    Argument("query", "N H d_k"),
    Argument("key_cache", "P page h_kv|H d_k"),
    Argument("value_cache", "P page h_kv d_v"),
)


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor | None,
    k_up: Tensor | None,
    v_up: Tensor,
    plan: MixedPlan,
    *,
    softmax_scale: float,
    latent_scale: Tensor | None = None,
    rope_scale: Tensor | None = None,
    rope: LatentRope | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal MLA attention of a ragged batch, queries of any length per sequence, over its paged latent cache.

    The cache holds the new tokens already (:func:`mha2mla.kernels.mla_append`); the last query of a sequence sees all
    of it (bottom-right aligned). With W_UK = ``k_up`` and W_UV = ``v_up`` (DeepSeek-V2, arXiv 2405.04434, 2.1)::

        score[h, t] = softmax_scale * (q_nope[h] . k_up[kv(h)] c[t] + q_pe[h] . k_pe[t, g(h)])
        out[h]      = sum_t softmax_t(score[h, t]) v_up[kv(h)] c[t]

    Short queries run the absorbed form (the decode op), long ones the expanded form (``attention_varlen`` over keys and
    values made of the cached latents, in bounded pieces); the plan's lengths decide.

    Args:
        q_nope: [N, H, d_n] un-rotated queries of all sequences, concatenated; d_n may be 0.
        q_pe: [N, H, d_r] rotated queries. Tokens behind those of the plan's sequences pad the batch.
        latent_cache: [P, page, d_c]; float8_e4m3fn with ``latent_scale``.
        rope_cache: [P, page, G, d_r], rotated; G divides H. None with ``rope``; int8 with that and
            ``rope_scale``.
        k_up: [h_kv, d_n, d_c]; None exactly if d_n is 0.
        v_up: [h_kv, d_v, d_c]; h_kv divides H.
        plan: of :func:`plan_mla_attention`, for this step's lengths: kernels attend over those that it was made or
            last refreshed for, and the reference refuses it where the batch's are others by now.
        softmax_scale: the source model's.
        latent_scale: [P, page] float32, of the latents where they are e4m3 numbers.
        rope_scale: [P, page] float32, of the keys where they are, as in :func:`mha2mla.kernels.mla_decode`; the
            expanded form dequantises those that it reads.
        rope: parameters of k_pe in a cache of the latent alone, or of int8 keys: used by the decode op, and for the
            expanded form before it attends. Without ``page_offsets``.
        out: [N, H, d_v], contiguous, to write into, where no gradient is needed; None allocates.
        backend: "tilelang", "reference", or None: TileLang where it serves the call.

    Returns:
        [N, H, d_v]. Rows of padding, and of queries that see no token, are zero.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_backend(backend)
    check_scale(softmax_scale)
    codes = holds_codes(latent_cache, latent_scale)
    if rope_scale is not None:
        check_key_codes(rope_cache, rope, latent_scale)
    elif (rope_cache is None) == (rope is None):
        given = "neither" if rope is None else "both"
        raise ValueError(f"rope_cache and rope: {given} given; expected exactly one of them")
    if rope is not None and rope.page_offsets is not None:
        raise ValueError("rope.page_offsets is given; expected None: rows of a batch lie at their positions")
    rotation = (None,) * 3 if rope is None else (rope.weight, rope.bias, rope.inv_freq)
    sizes = check_tensors(
        (*_MLA, _ROPE[rope_scale is not None], _LATENT[codes]),
        (q_pe, q_nope, v_up, k_up, latent_scale, rope_scale, *rotation, out, rope_cache, latent_cache),
        page=plan.page_size,
    )
    if sizes["d_n"] > 0 if k_up is None else sizes["d_n"] == 0:
        was = None if k_up is None else f"of shape {tuple(k_up.shape)}"
        raise ValueError(f"k_up is {was}; expected None exactly where q_nope has no columns, and it has {sizes['d_n']}")
    if out is not None and not out.is_contiguous():
        raise argument_error("out.stride()", out.stride(), "contiguous memory")
    call = (q_nope, q_pe, latent_cache, latent_scale, rope_cache, rope_scale, k_up, v_up)
    if not torch.is_grad_enabled() and in_plain_eager_mode(q_nope):
        return _mla_attention(*call, rope, plan, softmax_scale, backend, out)
    scaling = 1.0 if rope is None else rope.scaling
    made = _mla_attention_op(*call, *rotation, scaling, *plan.fields(), softmax_scale, backend)
    return made if out is None else out.copy_(made)


def gqa_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: MixedPlan,
    *,
    softmax_scale: float,
    backend: str | None = None,
) -> Tensor:
    """:func:`mla_attention` of an MHA/GQA model: queries of at most 8 tokens by the decode op, longer ones by
    ``attention_varlen``.

    Args:
        query: [N, H, d_k] rotated queries of all sequences, concatenated.
        key_cache: [P, page, h_kv, d_k], rotated; holds the new tokens already (:func:`mha2mla.kernels.gqa_append`).
        value_cache: [P, page, h_kv, d_v].
        plan: of :func:`plan_gqa_attention`, for this step's lengths.
        softmax_scale, backend: as in :func:`mla_attention`.

    Returns:
        [N, H, d_v]. Rows of padding, and of queries that see no token, are zero.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_backend(backend)
    check_scale(softmax_scale)
    check_tensors(_GQA, (query, key_cache, value_cache), page=plan.page_size)
    if not torch.is_grad_enabled() and in_plain_eager_mode(query):
        return _gqa_attention(query, key_cache, value_cache, plan, softmax_scale, backend)
    return _gqa_attention_op(query, key_cache, value_cache, *plan.fields(), softmax_scale, backend)


def expand(latent: Tensor, weight: Tensor) -> Tensor:
    """latent [T, d_c] times weight [h_kv, width, d_c]: [T, h_kv, width] (DeepSeek-V2, arXiv 2405.04434, 2.1)."""
    heads, width, inner = weight.shape
    return F.linear(latent, weight.reshape(-1, inner)).view(-1, heads, width)


def gather_rows(cache: Tensor, rows: Tensor, lost: Tensor) -> Tensor:
    """cache [P, page, ...] at rows [T] of all pages: [T, ...]; zeros where ``lost`` [T], of tokens without a page: they
    must not see another sequence's; [0] where none is. Never copies the whole cache, whatever its strides."""
    if cache.dtype == torch.float8_e4m3fn:  # some devices index its bytes only
        return gather_rows(cache.view(torch.uint8), rows, lost).view(cache.dtype)
    page, strides = cache.shape[1], cache.stride()
    if strides[0] == page * strides[1]:  # consecutive pages
        flat = cache.as_strided((cache.shape[0] * page, *cache.shape[2:]), strides[1:], cache.storage_offset())
        found = flat.index_select(0, rows)
    else:
        found = cache[rows // page, rows % page]
    return found if not lost.shape[0] else found.masked_fill_(lost.view(-1, *[1] * (found.ndim - 1)), 0)


def _attention(
    queries: tuple[Tensor, ...],
    width: int,
    decoded_width: int,
    plan: MixedPlan,
    backend: str | None,
    decode: Callable[..., Tensor],
    attend: Callable[..., Any],
    out: Tensor | None = None,
) -> Tensor:
    """A plan's calls, one after another.

    Args:
        queries: [N, H, ...]; the first positional arguments of ``decode``.
        width, decoded_width: of the output, and of the decode op's.
        decode: the decode op; takes a group's block_table, cache_seqlens, cache_starts, plan and ``out`` by name.
        attend: (tokens of the batch, ChunkPart, cu_seqlens_q, cu_seqlens_k, longest query), and by name ``causal``,
            ``out`` [tokens, H, d_v] and ``return_lse`` -> out, or out and lse [H, tokens].
        out: [N, H, width], contiguous; None: allocated.

    Returns:
        [N, H, width], zero where no sequence's tokens are.
    """
    layout, groups, waves = plan.parts
    if plan.cache_seqlens.device.type == "cpu":
        check_lengths(layout, plan.lengths, plan.cache_seqlens)
    tokens, heads, used = *queries[0].shape[:2], layout.tokens
    if used > tokens:
        raise ValueError(f"the query has {tokens} tokens; expected at least {used}, those of the plan's sequences")
    limits = {"window": None if plan.window < 0 else plan.window, "sinks": plan.sinks}

    def decoded(index: int, into: Tensor | None) -> Tensor:
        """Results of a group: in ``into`` [tokens, H, width], where that is given."""
        group, part = layout.groups[index], groups[index]
        rows = (len(group.rows), group.seqlen_q)
        own = slice(group.first_token, group.first_token + rows[0] * rows[1])
        taken = [x[own] if part.tokens is None else x.index_select(0, part.tokens) for x in queries]
        values = decode(
            *[x.unflatten(0, rows) for x in taken], block_table=part.block_table, cache_seqlens=part.cache_seqlens,
            cache_starts=part.cache_starts, plan=plan.decode_plan(index, heads, decoded_width),
            out=None if into is None else into.unflatten(0, rows),
        ).flatten(0, 1)  # fmt: skip
        return values if part.sources is None else values.index_select(0, part.sources)

    if len(groups) == 1 and not waves and used == tokens:  # results are the batch's, in its order
        overlap = groups[0].sources is not None
        values = decoded(0, None if overlap else out)
        return out.copy_(values) if overlap and out is not None else values
    if out is None:
        out = queries[0].new_empty(tokens, heads, width)
    if used < tokens:
        out[used:].zero_()
    for index, (group, part) in enumerate(zip(layout.groups, groups, strict=True)):
        if part.targets is None:
            decoded(index, out[group.first_token : group.first_token + len(group.rows) * group.seqlen_q])
        else:  # pieces overlap; of two results always the same one is written
            out.index_copy_(0, part.targets.long(), decoded(index, None))
    if plan.window >= 0:
        attend = partial(attend, **limits)
    for wave, (cu_seqlens_q, chunks) in zip(layout.waves, waves, strict=True):
        _attend_wave(attend, wave, cu_seqlens_q, chunks, out, backend)
    return out


def _attend_wave(
    attend: Callable[..., Any], wave: Wave, cu_seqlens_q: Tensor, chunks: list[ChunkPart], out: Tensor,
    backend: str | None,
) -> None:  # fmt: skip
    """Attention of the sequences of a wave; partial results over its chunks are merged into ``out`` [N, H, d_v]."""
    tokens = slice(wave.first_token, wave.first_token + wave.tokens)
    longest = max(wave.query_lengths)
    if len(chunks) == 1:
        attend(tokens, chunks[0], cu_seqlens_q, chunks[0].cu_seqlens_k, longest, causal=True, out=out[tokens])
        return
    partial_out = out.new_empty(min(MAX_PARTIALS, len(chunks)), 1, wave.tokens, *out.shape[1:])
    lses: list[Tensor] = []
    for chunk, part in zip(wave.chunks, chunks, strict=True):
        if len(lses) == MAX_PARTIALS:
            merged, lse = attention_combine(partial_out, torch.stack(lses), backend=backend)
            partial_out[0].copy_(merged)
            lses = [lse]
        _, lse = attend(
            tokens, part, cu_seqlens_q, part.cu_seqlens_k, longest, causal=chunk.causal,
            out=partial_out[len(lses), 0], return_lse=True,
        )  # fmt: skip
        lses.append(lse[None])  # [1, H, tokens]
    out[tokens] = attention_combine(partial_out[: len(lses)], torch.stack(lses), backend=backend)[0][0]


def _mla_attention(
    q_nope: Tensor, q_pe: Tensor, latent_cache: Tensor, latent_scale: Tensor | None, rope_cache: Tensor | None,
    rope_scale: Tensor | None, k_up: Tensor | None, v_up: Tensor, rope: LatentRope | None, plan: MixedPlan,
    softmax_scale: float, backend: str | None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    decode = partial(
        mla_absorbed, latent_cache=latent_cache, rope_cache=rope_cache, k_up=k_up, v_up=v_up,
        softmax_scale=softmax_scale, latent_scale=latent_scale, rope_scale=rope_scale, rope=rope, backend=backend,
    )  # fmt: skip

    def attend(tokens: slice, part: ChunkPart, *bounds: Tensor | int, **options: object) -> Any:
        where = part.rows, part.lost
        latent = gather_rows(latent_cache, *where)
        if latent_scale is not None:
            latent = dequantize_latent(latent, gather_rows(latent_scale, *where), q_pe.dtype)
        if rope is None:
            k_pe = gather_rows(rope_cache, *where)
        elif rope_scale is not None:
            codes, scale = gather_rows(rope_cache, *where)[:, 0], gather_rows(rope_scale, *where)
            k_pe = kept_keys(codes, scale, rope, part.positions, q_pe.dtype, backend=backend)[:, None]
        else:
            k_pe = compute_rotary_keys(latent, rope, part.positions, backend=backend)[:, None]
        k_nope = k_pe.new_empty(latent.shape[0], v_up.shape[0], 0) if k_up is None else expand(latent, k_up)
        return mla_prefill_varlen(
            q_nope[tokens], q_pe[tokens], k_nope, k_pe, expand(latent, v_up), *bounds, softmax_scale=softmax_scale,
            backend=backend, **options,
        )  # fmt: skip

    return _attention((q_nope, q_pe), v_up.shape[1], latent_cache.shape[-1], plan, backend, decode, attend, out)


def _gqa_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: MixedPlan, softmax_scale: float, backend: str | None
) -> Tensor:
    options = {"softmax_scale": softmax_scale, "backend": backend}
    decode = partial(gqa_decode, k_cache=key_cache, v_cache=value_cache, **options)

    def attend(tokens: slice, part: ChunkPart, *bounds: Tensor | int, **further: object) -> Any:
        where = part.rows, part.lost
        keys, values = gather_rows(key_cache, *where), gather_rows(value_cache, *where)
        return attention_varlen(query[tokens], keys, values, *bounds, **options, **further)

    width = value_cache.shape[3]
    return _attention((query,), width, width, plan, backend, decode, attend)


_PLAN = (
    "Tensor lengths, Tensor block_table, Tensor cache_seqlens, Tensor? cache_starts, Tensor index,"
    " Tensor(a!) workspace, Tensor shapes, int short, int max_expanded_tokens, int window, int sinks,"
    " int page_size, float softmax_scale, str? backend"
)


def _mla_attention_of_fields(*call: Any) -> Tensor:
    weight, bias, inv_freq, scaling = call[8:12]
    rope = None if weight is None else LatentRope(weight, bias, inv_freq, scaling)
    return _mla_attention(*call[:8], rope, MixedPlan(*call[12:-2]), *call[-2:])


_mla_attention_op = register(
    "mla_attention(Tensor q_nope, Tensor q_pe, Tensor latent_cache, Tensor? latent_scale, Tensor? rope_cache,"
    " Tensor? rope_scale, Tensor? k_up, Tensor v_up, Tensor? rope_weight, Tensor? rope_bias, Tensor? inv_freq,"
    " float rope_scaling,"
    f" {_PLAN}) -> Tensor",
    _mla_attention_of_fields,
    lambda q_nope, q_pe, latent_cache, latent_scale, rope_cache, rope_scale, k_up, v_up, *_: q_pe.new_empty(
        *q_pe.shape[:2], v_up.shape[1]
    ),
)
_gqa_attention_op = register(
    f"gqa_attention(Tensor query, Tensor key_cache, Tensor value_cache, {_PLAN}) -> Tensor",
    lambda *call: _gqa_attention(*call[:3], MixedPlan(*call[3:-2]), *call[-2:]),
    lambda query, key_cache, value_cache, *_: query.new_empty(*query.shape[:2], value_cache.shape[3]),
)
