"""The public mixed-batch ops: validation, and their torch.library schemas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.attention_varlen.api import attention_varlen, mla_prefill_varlen
from mha2mla.kernels.devices import check_backend, register
from mha2mla.kernels.gqa_decode.api import gqa_decode
from mha2mla.kernels.latent_rope import LatentRope, rotary_keys
from mha2mla.kernels.layouts import Argument, check_scale, check_tensors
from mha2mla.kernels.mixed_attention.forms import Attend, attend_wave, expand, gather_rows, mla_absorbed
from mha2mla.kernels.mixed_attention.layout import Group
from mha2mla.kernels.mixed_attention.parts import ChunkPart, GroupPart, MixedPlan, Parts
from mha2mla.kernels.mla_decode.quantization import CODES, dequantize_latent, holds_codes
from mha2mla.kernels.split_kv.plan import DecodePlan

_MLA = (
    Argument("q_pe", "N H d_r"),
    Argument("q_nope", "N H d_n"),
    Argument("v_up", "h_kv|H d_v d_c"),
    Argument("k_up", "h_kv d_n d_c", optional=True),
    Argument("rope_cache", "P page G|H d_r", optional=True),
    Argument("latent_scale", "P page", torch.float32, optional=True),
    Argument("rope.weight", "d_r d_c", optional=True),
    Argument("rope.bias", "d_r", optional=True),
    Argument("rope.inv_freq", "pairs", torch.float32, optional=True),
)
_LATENT = {codes: Argument("latent_cache", "P page d_c", CODES if codes else None) for codes in (False, True)}
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
    rope: LatentRope | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal MLA attention of a ragged batch, queries of any length per sequence, over its paged latent cache.

    The cache holds the new tokens already (:func:`mha2mla.kernels.mla_append`); the last query of a sequence sees all
    of it (bottom-right aligned). With W_UK = ``k_up`` and W_UV = ``v_up`` (DeepSeek-V2, arXiv 2405.04434, 2.1)::

        score[h, t] = softmax_scale * (q_nope[h] . k_up[kv(h)] c[t] + q_pe[h] . k_pe[t, g(h)])
        out[h]      = sum_t softmax_t(score[h, t]) v_up[kv(h)] c[t]

    Short queries run the absorbed form (the decode op), long ones the expanded form (``attention_varlen`` over keys and
    values made of the cached latents, in bounded pieces); which is which follows from the plan's lengths.

    Args:
        q_nope: [N, H, d_n] un-rotated queries of all sequences, one behind the other; d_n may be 0.
        q_pe: [N, H, d_r] rotated queries. Tokens behind those of the plan's sequences pad the batch.
        latent_cache: [P, page, d_c]; float8_e4m3fn with ``latent_scale``.
        rope_cache: [P, page, G, d_r], rotated; G divides H. None with ``rope``.
        k_up: [h_kv, d_n, d_c]; None exactly if d_n is 0.
        v_up: [h_kv, d_v, d_c]; h_kv divides H.
        plan: of :func:`plan_mla_attention`, for this step's lengths: kernels attend over those that it was made or
            last refreshed for, and the reference refuses it where the batch's are others by now.
        softmax_scale: the source model's.
        latent_scale: [P, page] float32, of the latents where they are e4m3 numbers.
        rope: what k_pe is computed from, in a cache of the latent alone: by the decode op, and for the expanded form
            before it attends. Without ``page_offsets``.
        backend: "tilelang", "reference", or None: TileLang where it serves the call.

    Returns:
        [N, H, d_v]. Rows of padding, and of queries that see no token, are zero.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_backend(backend)
    check_scale(softmax_scale)
    codes = holds_codes(latent_cache, latent_scale)
    if (rope_cache is None) == (rope is None):
        given = "neither" if rope is None else "both"
        raise ValueError(f"rope_cache and rope: {given} given; expected exactly one of them")
    if rope is not None and rope.page_offsets is not None:
        raise ValueError("rope.page_offsets is given; expected None: rows of a batch lie at their places")
    turn = (None,) * 3 if rope is None else (rope.weight, rope.bias, rope.inv_freq)
    sizes = check_tensors(
        (*_MLA, _LATENT[codes]),
        (q_pe, q_nope, v_up, k_up, rope_cache, latent_scale, *turn, latent_cache),
        page=plan.page_size,
    )
    if sizes["d_n"] > 0 if k_up is None else sizes["d_n"] == 0:
        was = None if k_up is None else f"of shape {tuple(k_up.shape)}"
        raise ValueError(f"k_up is {was}; expected None exactly where q_nope has no columns, and it has {sizes['d_n']}")
    scaling = 1.0 if rope is None else rope.scaling
    return _mla_attention_op(
        q_nope, q_pe, latent_cache, latent_scale, rope_cache, k_up, v_up, *turn, scaling, *plan.fields(), softmax_scale,
        backend,
    )  # fmt: skip


def gqa_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: MixedPlan,
    *,
    softmax_scale: float,
    backend: str | None = None,
) -> Tensor:
    """The same for an MHA/GQA model: queries of at most 8 tokens by the decode op, longer ones by ``attention_varlen``.

    Args:
        query: [N, H, d_k] rotated queries of all sequences, one behind the other.
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
    return _gqa_attention_op(query, key_cache, value_cache, *plan.fields(), softmax_scale, backend)


def _output(query: Tensor, parts: Parts, width: int) -> Tensor:
    """[N, H, width], zero where no sequence's tokens are."""
    tokens, used = query.shape[0], parts.layout.tokens
    if used > tokens:
        raise ValueError(f"the query has {tokens} tokens; expected at least {used}, those of the plan's sequences")
    out = query.new_empty(tokens, query.shape[1], width)
    out[used:].zero_()
    return out


def _attention(
    query: Tensor,
    width: int,
    decoded_width: int,
    call: tuple[Any, ...],
    decode: Callable[[Callable[[Tensor], Tensor], GroupPart, DecodePlan], Tensor],
    attend: Attend,
) -> Tensor:
    """A plan's calls, one after another.

    Args:
        query: [N, H, ...].
        width, decoded_width: of the output, and of what the decode op makes.
        call: fields of the plan, softmax_scale and backend.
        decode: a group's values, given what takes its rows of a tensor [N, ...], its tensors and its plan.
        attend: of :func:`attend_wave`.
    """
    *fields, _, backend = call
    plan = MixedPlan(*fields)
    parts = plan.parts()
    parts.check_lengths(plan.lengths, plan.cache_seqlens)
    out = _output(query, parts, width)
    for number, (group, part) in enumerate(zip(parts.layout.groups, parts.groups, strict=True)):
        decode_plan = parts.decode_plan(number, query.shape[1], decoded_width)
        _write_group(out, decode(partial(_of_group, group=group, part=part), part, decode_plan), group, part)
    if parts.window >= 0:
        attend = partial(attend, window=parts.window, sinks=parts.sinks)
    for wave, (cu_seqlens_q, chunks) in zip(parts.layout.waves, parts.waves, strict=True):
        attend_wave(attend, wave, cu_seqlens_q, chunks, out, backend)
    return out


def _mla_attention(
    q_nope: Tensor, q_pe: Tensor, latent_cache: Tensor, latent_scale: Tensor | None, rope_cache: Tensor | None,
    k_up: Tensor | None, v_up: Tensor, rope_weight: Tensor | None, rope_bias: Tensor | None, inv_freq: Tensor | None,
    rope_scaling: float, *call: Any,
) -> Tensor:  # fmt: skip
    *_, softmax_scale, backend = call
    rope = None if rope_weight is None else LatentRope(rope_weight, rope_bias, inv_freq, rope_scaling)

    def decode(rows_of: Callable[[Tensor], Tensor], part: GroupPart, plan: DecodePlan) -> Tensor:
        return mla_absorbed(
            rows_of(q_nope), rows_of(q_pe), latent_cache, rope_cache, k_up, v_up, part.block_table, part.cache_seqlens,
            softmax_scale=softmax_scale, cache_starts=part.cache_starts, latent_scale=latent_scale, rope=rope,
            plan=plan, backend=backend,
        )  # fmt: skip

    def attend(tokens: slice, part: ChunkPart, *bounds: Tensor | int, **options: object) -> Any:
        latent = gather_rows(latent_cache, part.slots)
        if latent_scale is not None:
            latent = dequantize_latent(latent, gather_rows(latent_scale, part.slots), q_pe.dtype)
        if rope is None:
            k_pe = gather_rows(rope_cache, part.slots)
        else:
            k_pe = rotary_keys(latent, rope, part.positions)[:, None]
        k_nope = k_pe.new_empty(len(latent), v_up.shape[0], 0) if k_up is None else expand(latent, k_up)
        return mla_prefill_varlen(
            q_nope[tokens], q_pe[tokens], k_nope, k_pe, expand(latent, v_up), *bounds, softmax_scale=softmax_scale,
            backend=backend, **options,
        )  # fmt: skip

    return _attention(q_pe, v_up.shape[1], latent_cache.shape[-1], call, decode, attend)


def _gqa_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, *call: Any) -> Tensor:
    *_, softmax_scale, backend = call

    def decode(rows_of: Callable[[Tensor], Tensor], part: GroupPart, plan: DecodePlan) -> Tensor:
        return gqa_decode(
            rows_of(query), key_cache, value_cache, part.block_table, part.cache_seqlens, softmax_scale=softmax_scale,
            cache_starts=part.cache_starts, plan=plan, backend=backend,
        )  # fmt: skip

    def attend(tokens: slice, part: ChunkPart, *bounds: Tensor | int, **options: object) -> Any:
        keys, values = gather_rows(key_cache, part.slots), gather_rows(value_cache, part.slots)
        return attention_varlen(
            query[tokens], keys, values, *bounds, softmax_scale=softmax_scale, backend=backend, **options
        )

    width = value_cache.shape[3]
    return _attention(query, width, width, call, decode, attend)


def _of_group(x: Tensor, group: Group, part: GroupPart) -> Tensor:
    """The group's rows of x [N, ...]: [B_g, S_q, ...]; a view where its tokens lie side by side."""
    rows = (len(group.rows), group.seqlen_q)
    if part.pieces is not None:
        return x.index_select(0, part.pieces.tokens).unflatten(0, rows)
    return x[group.first_token : group.first_token + rows[0] * rows[1]].unflatten(0, rows)


def _write_group(out: Tensor, values: Tensor, group: Group, part: GroupPart) -> None:
    values = values.flatten(0, 1)
    if part.pieces is None:
        out[group.first_token : group.first_token + len(values)] = values
    else:  # pieces overlap; which of two results stays must not depend on the run
        out.index_copy_(0, part.pieces.targets.long(), values.index_select(0, part.pieces.sources))


_PLAN = (
    "Tensor lengths, Tensor block_table, Tensor cache_seqlens, Tensor? cache_starts, Tensor index,"
    " Tensor(a!) workspace, Tensor shapes, int short, int max_expanded_tokens, int window, int sinks,"
    " int page_size, float softmax_scale, str? backend"
)
_mla_attention_op = register(
    "mla_attention(Tensor q_nope, Tensor q_pe, Tensor latent_cache, Tensor? latent_scale, Tensor? rope_cache,"
    " Tensor? k_up, Tensor v_up, Tensor? rope_weight, Tensor? rope_bias, Tensor? inv_freq, float rope_scaling,"
    f" {_PLAN}) -> Tensor",
    _mla_attention,
    lambda q_nope, q_pe, latent_cache, latent_scale, rope_cache, k_up, v_up, *_: q_pe.new_empty(
        *q_pe.shape[:2], v_up.shape[1]
    ),
)
_gqa_attention_op = register(
    f"gqa_attention(Tensor query, Tensor key_cache, Tensor value_cache, {_PLAN}) -> Tensor",
    _gqa_attention,
    lambda query, key_cache, value_cache, *_: query.new_empty(*query.shape[:2], value_cache.shape[3]),
)
