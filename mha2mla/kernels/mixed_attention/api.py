"""The public mixed-batch ops: validation, and their torch.library schemas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.attention_varlen.api import attention_varlen, mla_prefill_varlen
from mha2mla.kernels.devices import check_backend
from mha2mla.kernels.gqa_decode.api import gqa_decode
from mha2mla.kernels.latent_rope import LatentRope, rotary_keys
from mha2mla.kernels.layouts import check_float, check_like
from mha2mla.kernels.mixed_attention.absorbed import mla_absorbed
from mha2mla.kernels.mixed_attention.expanded import Attend, attend_wave, expand, gather_rows
from mha2mla.kernels.mixed_attention.layout import Group
from mha2mla.kernels.mixed_attention.parts import ChunkPart, GroupPart, Parts, parts_of
from mha2mla.kernels.mixed_attention.plan import MixedPlan
from mha2mla.kernels.mla_decode.quantization import dequantize_latent
from mha2mla.kernels.registration import register
from mha2mla.kernels.split_kv.plan import DecodePlan


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
    _check_call(q_pe, softmax_scale, backend)
    tokens, heads, d_r = q_pe.shape
    if q_nope.ndim != 3 or q_nope.shape[:2] != q_pe.shape[:2]:
        raise ValueError(f"q_nope.shape is {tuple(q_nope.shape)}; expected [{tokens}, {heads}, d_n]")
    width = latent_cache.shape[-1]
    codes = latent_cache.dtype == torch.float8_e4m3fn
    _check_cache("latent_cache", latent_cache, 3, plan, q_pe, torch.float8_e4m3fn if codes else q_pe.dtype)
    if codes != (latent_scale is not None):
        raise ValueError(
            f"latent_scale is {'None' if latent_scale is None else 'given'} for a latent_cache of {latent_cache.dtype};"
            " expected one exactly where latent_cache is torch.float8_e4m3fn"
        )
    if codes and (latent_scale.shape != latent_cache.shape[:2] or latent_scale.dtype != torch.float32):
        raise ValueError(
            f"latent_scale is {latent_scale.dtype} {tuple(latent_scale.shape)}; expected torch.float32"
            f" {tuple(latent_cache.shape[:2])}"
        )
    if (rope_cache is None) == (rope is None):
        given = "neither" if rope is None else "both"
        raise ValueError(f"rope_cache and rope: {given} given; expected exactly one of them")
    turn = (None, None, None, 1.0) if rope is None else _check_rope(rope, width, q_pe)
    if rope is None:
        _check_cache("rope_cache", rope_cache, 4, plan, q_pe)
        groups = rope_cache.shape[2]
        if rope_cache.shape[:2] != latent_cache.shape[:2] or rope_cache.shape[3] != d_r or heads % max(1, groups):
            expected = f"[{latent_cache.shape[0]}, {latent_cache.shape[1]}, a divisor of {heads}, {d_r}]"
            raise ValueError(f"rope_cache.shape is {tuple(rope_cache.shape)}; expected {expected}")
    if v_up.ndim != 3 or v_up.shape[2] != width or v_up.shape[0] < 1 or heads % v_up.shape[0]:
        raise ValueError(f"v_up.shape is {tuple(v_up.shape)}; expected [a divisor of {heads}, d_v, {width}]")
    nope = q_nope.shape[2]
    if (None if k_up is None else tuple(k_up.shape)) != ((v_up.shape[0], nope, width) if nope else None):
        was = None if k_up is None else f"of shape {tuple(k_up.shape)}"
        raise ValueError(f"k_up is {was}; expected {(v_up.shape[0], nope, width) if nope else None}")
    for name, tensor in (("q_nope", q_nope), ("k_up", k_up), ("v_up", v_up)):
        if tensor is not None:
            check_like(name, tensor, q_pe, "the query")
    return torch.ops.mha2mla.mla_attention(
        q_nope, q_pe, latent_cache, latent_scale, rope_cache, k_up, v_up, *turn, *plan.fields(), softmax_scale, backend
    )


def _check_rope(rope: LatentRope, width: int, q_pe: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """As the op's schema takes it."""
    if rope.page_offsets is not None:
        raise ValueError("rope.page_offsets is given; expected None: rows of a batch lie at their places")
    if rope.weight.shape != (q_pe.shape[2], width):
        raise ValueError(f"rope.weight.shape is {tuple(rope.weight.shape)}; expected {[q_pe.shape[2], width]}")
    check_like("rope.weight", rope.weight, q_pe, "the query")
    check_like("rope.bias", rope.bias, q_pe, "the query")
    check_like("rope.inv_freq", rope.inv_freq, q_pe, "the query", torch.float32)
    return rope.weight, rope.bias, rope.inv_freq, rope.scaling


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
    _check_call(query, softmax_scale, backend)
    _check_cache("key_cache", key_cache, 4, plan, query)
    _check_cache("value_cache", value_cache, 4, plan, query)
    heads, width = query.shape[1:]
    if key_cache.shape[3] != width or heads % max(1, key_cache.shape[2]):
        raise ValueError(
            f"key_cache.shape is {tuple(key_cache.shape)}; expected [P, page, a divisor of {heads}, {width}]"
        )
    if value_cache.shape[:3] != key_cache.shape[:3]:
        expected = f"{(*key_cache.shape[:3], 'd_v')}"
        raise ValueError(f"value_cache.shape is {tuple(value_cache.shape)}; expected {expected}")
    return torch.ops.mha2mla.gqa_attention(query, key_cache, value_cache, *plan.fields(), softmax_scale, backend)


def _check_call(query: Tensor, softmax_scale: float, backend: str | None) -> None:
    check_backend(backend)
    if not isinstance(softmax_scale, (int, float)) or not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale!r}; expected a positive finite number")
    if query.ndim != 3:
        raise ValueError(f"the query's shape is {tuple(query.shape)}; expected [N, H, width]")
    check_float("the query's dtype", query.dtype)


def _check_cache(
    name: str, cache: Tensor, ndim: int, plan: MixedPlan, query: Tensor, dtype: torch.dtype | None = None
) -> None:
    if cache.ndim != ndim or cache.shape[1] != plan.page_size:
        raise ValueError(
            f"{name}.shape is {tuple(cache.shape)}; expected {ndim} dimensions, pages of {plan.page_size} as the plan"
        )
    check_like(name, cache, query, "the query", dtype)


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
    parts = parts_of(*fields)
    parts.check_lengths(fields[0], fields[2])
    out = _output(query, parts, width)
    for number, (group, part) in enumerate(zip(parts.layout.groups, parts.groups, strict=True)):
        plan = parts.decode_plan(number, query.shape[1], decoded_width)
        _write_group(out, decode(partial(_of_group, group=group, part=part), part, plan), group, part)
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
register(
    "mla_attention(Tensor q_nope, Tensor q_pe, Tensor latent_cache, Tensor? latent_scale, Tensor? rope_cache,"
    " Tensor? k_up, Tensor v_up, Tensor? rope_weight, Tensor? rope_bias, Tensor? inv_freq, float rope_scaling,"
    f" {_PLAN}) -> Tensor",
    _mla_attention,
    lambda q_nope, q_pe, latent_cache, latent_scale, rope_cache, k_up, v_up, *_: q_pe.new_empty(
        *q_pe.shape[:2], v_up.shape[1]
    ),
)
register(
    f"gqa_attention(Tensor query, Tensor key_cache, Tensor value_cache, {_PLAN}) -> Tensor",
    _gqa_attention,
    lambda query, key_cache, value_cache, *_: query.new_empty(*query.shape[:2], value_cache.shape[3]),
)
