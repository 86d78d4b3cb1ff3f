"""The public steps: rotate, write and attend, by the ops that do each. What they check, those check."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mha2mla.kernels.gqa_decode.api import gqa_decode
from mha2mla.kernels.latent_rope import LatentRope
from mha2mla.kernels.layouts import argument_error
from mha2mla.kernels.mixed_attention.absorbed import mla_absorbed
from mha2mla.kernels.mixed_attention.api import gqa_attention, mla_attention
from mha2mla.kernels.mixed_attention.layout import MAX_DECODE_QUERY_LENGTH
from mha2mla.kernels.mixed_attention.plan import MixedPlan
from mha2mla.kernels.rope_append.api import gqa_append, mla_append, slots_of
from mha2mla.kernels.split_kv.plan import DecodePlan


def mla_step(
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor | None,
    latent_cache: Tensor,
    rope_cache: Tensor | None,
    k_up: Tensor | None,
    v_up: Tensor,
    inv_freq: Tensor | None,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    *,
    softmax_scale: float,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    cache_starts: Tensor | None = None,
    latent_scale: Tensor | None = None,
    rope: LatentRope | None = None,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    plan: DecodePlan | MixedPlan | None = None,
    backend: str | None = None,
) -> Tensor:
    """What a layer's MLA does between its projections: rotates, writes the new tokens to the cache, and attends.

    :func:`mla_append`, then :func:`mla_absorbed`, or :func:`mla_attention` with a plan of a ragged batch. Tokens come
    as [B, S_q, ...] with S_q <= 8, or, with such a plan, as [N, ...], one sequence behind the other.

    Args:
        q_nope: [B, S_q, H, d_n] or [N, H, d_n]; d_n may be 0.
        q_pe: [B, S_q, H, d_r] or [N, H, d_r], before RoPE.
        latent: [B, S_q, d_c] or [N, d_c] of the new tokens.
        k_pe: [B, S_q, G, d_r] or [N, G, d_r], before RoPE; None, with ``rope_cache``, where nothing rotary is cached.
        latent_cache: [P, page, d_c], written; float8_e4m3fn with ``latent_scale``.
        rope_cache: [P, page, G, d_r], written; None with ``rope``.
        k_up: W_UK [h_kv, d_n, d_c]; None exactly if d_n is 0.
        v_up: W_UV [h_kv, d_v, d_c].
        inv_freq: [G, d_r / 2] or [1, d_r / 2] float32, radians per token; None with ``rope``, which has it.
        block_table: [B, max_pages] int32; None with a plan of a ragged batch, which has it.
        cache_seqlens: [B] int32, tokens per sequence, the new ones included; None likewise. 0 for rows that pad a
            batch: they write nothing and get zeros.
        softmax_scale: the source model's.
        positions: [B, S_q] or [N] int32, for RoPE; None: each token's place in its sequence.
        slots: [B, S_q] or [N] int32, page * page_size + offset (:func:`slots_of`); None: what the table says of the
            last S_q places. Of a ragged batch both are to be given.
        cache_starts: [B] int32, first visible token (left padding); None: 0, or the plan's of a ragged batch.
        latent_scale: [P, page] float32, written: scales of e4m3 latents.
        rope: what rotary keys are computed from in a cache of the latent alone.
        attention_scaling: factor on cos and sin (YaRN, longrope); ``rope`` has its own.
        interleaved: rotary pairs are neighbours; else the halves of d_r (Llama). Not with ``rope``.
        plan: of :func:`plan_mla_decode`, for these lengths, or of :func:`plan_mla_attention`; they carry window, sinks
            and splits. None makes one of the former kind.
        backend: "tilelang", "reference", or None: TileLang where it serves each op.

    Returns:
        [B, S_q, H, d_v] or [N, H, d_v].

    Raises:
        ValueError: naming the argument, what it was and what it must be. Of an op that attends it comes after the new
            tokens were written.
    """
    if (rope is None) == (inv_freq is None):
        given = "neither" if rope is None else "both"
        raise ValueError(f"inv_freq and rope: {given} given; expected exactly one of them")
    if rope is not None:
        if interleaved:
            raise argument_error("interleaved", True, "False with rope, whose pairs are halves")
        inv_freq, attention_scaling = rope.inv_freq[None], rope.scaling
    where = _places(q_pe, latent_cache, block_table, cache_seqlens, cache_starts, positions, slots, plan)
    rotated = mla_append(
        where.flat(latent), None if k_pe is None else where.flat(k_pe), where.flat(q_pe), latent_cache, rope_cache,
        where.positions, where.slots, inv_freq, latent_scale=latent_scale, attention_scaling=attention_scaling,
        interleaved=interleaved, backend=backend,
    )  # fmt: skip
    layer = (latent_cache, rope_cache, k_up, v_up)
    options = {"softmax_scale": softmax_scale, "latent_scale": latent_scale, "rope": rope, "backend": backend}
    if isinstance(plan, MixedPlan):
        return mla_attention(q_nope, rotated, *layer, plan, **options)
    return mla_absorbed(
        q_nope, rotated.view(q_pe.shape), *layer, block_table, cache_seqlens, cache_starts=cache_starts, plan=plan,
        **options,
    )  # fmt: skip


def gqa_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    inv_freq: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    *,
    softmax_scale: float,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    cache_starts: Tensor | None = None,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    plan: DecodePlan | MixedPlan | None = None,
    backend: str | None = None,
) -> Tensor:
    """The same for an MHA/GQA model: :func:`gqa_append`, then :func:`gqa_decode` or :func:`gqa_attention`.

    Args:
        query: [B, S_q, H, d_k] or [N, H, d_k], before RoPE.
        key: [B, S_q, h_kv, d_k] or [N, h_kv, d_k], before RoPE.
        value: [B, S_q, h_kv, d_v] or [N, h_kv, d_v].
        key_cache: [P, page, h_kv, d_k], written.
        value_cache: [P, page, h_kv, d_v], written.
        inv_freq: [1, d_k / 2] or [h_kv, d_k / 2] float32; zeros for what the model does not rotate.
        plan: of :func:`plan_gqa_decode` or :func:`plan_gqa_attention`.
        block_table, cache_seqlens, softmax_scale, positions, slots, cache_starts, attention_scaling, interleaved,
            backend: as in :func:`mla_step`.

    Returns:
        [B, S_q, H, d_v] or [N, H, d_v].

    Raises:
        ValueError: as :func:`mla_step`.
    """
    where = _places(query, key_cache, block_table, cache_seqlens, cache_starts, positions, slots, plan)
    rotated = gqa_append(
        where.flat(query), where.flat(key), where.flat(value), key_cache, value_cache, where.positions, where.slots,
        inv_freq, attention_scaling=attention_scaling, interleaved=interleaved, backend=backend,
    )  # fmt: skip
    options = {"softmax_scale": softmax_scale, "backend": backend}
    if isinstance(plan, MixedPlan):
        return gqa_attention(rotated, key_cache, value_cache, plan, **options)
    return gqa_decode(
        rotated.view(query.shape), key_cache, value_cache, block_table, cache_seqlens, cache_starts=cache_starts,
        plan=plan, **options,
    )  # fmt: skip


class _Places(NamedTuple):
    """Where new tokens go, [N] int32 each; ``rows``: dimensions in front of a token's own."""

    positions: Tensor
    slots: Tensor
    rows: int

    def flat(self, x: Tensor) -> Tensor:
        """x [N, ...]."""
        return x.flatten(0, self.rows - 1)


def _places(
    query: Tensor, cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None,
    cache_starts: Tensor | None, positions: Tensor | None, slots: Tensor | None, plan: DecodePlan | MixedPlan | None,
) -> _Places:  # fmt: skip
    """Checks which of the two ways a step is called in; ``query``: [B, S_q, H, d] or [N, H, d]."""
    if isinstance(plan, MixedPlan):
        given = {"block_table": block_table, "cache_seqlens": cache_seqlens, "cache_starts": cache_starts}
        for name, tensor in given.items():
            if tensor is not None:
                raise argument_error(name, "given", "None with the plan of a ragged batch, which has it")
        for name, tensor in (("positions", positions), ("slots", slots)):
            if tensor is None:
                raise argument_error(name, None, "int32 [N] with the plan of a ragged batch")
        return _Places(positions, slots, 1)
    if query.ndim != 4 or query.shape[1] > MAX_DECODE_QUERY_LENGTH:
        raise argument_error(
            "the query's shape", tuple(query.shape),
            f"[B, S_q, H, width] with at most {MAX_DECODE_QUERY_LENGTH} new tokens, or the plan of a ragged batch",
        )  # fmt: skip
    if block_table is None or cache_seqlens is None:
        raise argument_error("block_table or cache_seqlens", None, "tensors, or the plan of a ragged batch")
    batch, tokens = query.shape[:2]
    place = cache_seqlens[:, None] - tokens + torch.arange(tokens, dtype=torch.int32, device=query.device)
    if slots is None:
        sequence = torch.arange(batch, dtype=torch.int32, device=query.device).repeat_interleave(tokens)
        slots = slots_of(block_table, sequence, place.flatten(), cache.shape[1])
    return _Places((place.clamp_min(0) if positions is None else positions).flatten(), slots.flatten(), 2)
