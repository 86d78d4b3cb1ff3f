"""The two forms of mixed attention over a paged latent cache: absorbed for short queries, expanded for long ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.attention_combine.api import attention_combine
from mha2mla.kernels.latent_rope import LatentRope
from mha2mla.kernels.mixed_attention.layout import Wave
from mha2mla.kernels.mixed_attention.parts import ChunkPart
from mha2mla.kernels.mla_decode.api import mla_decode, mla_decode_values, serves_values
from mha2mla.kernels.skinny_linear.api import (
    grouped_maps,
    is_skinny,
    serves_groups,
    serves_maps,
    skinny_linear,
    skinny_maps,
)
from mha2mla.kernels.split_kv.plan import DecodePlan


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
    rope: LatentRope | None = None,
    plan: DecodePlan | None = None,
    backend: str | None = None,
) -> Tensor:
    """:func:`mha2mla.kernels.mla_attention` of sequences that all bring S_q <= 8 new tokens, in the absorbed form.

    W_UK goes to the query and W_UV to the output, so that attention runs over the cached latents themselves
    (DeepSeek-V2, arXiv 2405.04434, 2.1). What a host does for it is three products and the decode op.

    Args:
        q_nope: [B, S_q, H, d_n]; d_n may be 0.
        q_pe: [B, S_q, H, d_r], rotated.
        q_latent: [B, S_q, H, d_c], q_nope through W_UK; None: it is made here.
        latent_cache, rope_cache, k_up, v_up, latent_scale, rope: as in :func:`mha2mla.kernels.mla_attention`.
        block_table, cache_seqlens, softmax_scale, cache_starts, plan, backend: as in
            :func:`mha2mla.kernels.mla_decode`.

    Returns:
        [B, S_q, H, d_v].

    Raises:
        ValueError: as :func:`mha2mla.kernels.mla_decode`.
    """
    is_plain = backend != "reference" and not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if k_up is None:
        q_latent = q_pe.new_zeros(*q_pe.shape[:3], latent_cache.shape[-1])
    elif q_latent is None and is_plain and serves_maps(q_nope, k_up):
        q_latent = skinny_maps(q_nope, k_up)
    elif q_latent is None:
        q_latent = _through_maps(q_nope, k_up)
    if is_plain and serves_values(q_latent, latent_cache, v_up, block_table, plan):
        return mla_decode_values(
            q_latent, q_pe, latent_cache, rope_cache, v_up, block_table, cache_seqlens, softmax_scale=softmax_scale,
            plan=plan, latent_scale=latent_scale, rope=rope, cache_starts=cache_starts, backend=backend,
        )  # fmt: skip
    out = mla_decode(
        q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens, softmax_scale=softmax_scale,
        latent_scale=latent_scale, rope=rope, cache_starts=cache_starts, plan=plan, backend=backend,
    )  # fmt: skip
    if is_plain and len(v_up) == out.shape[2] and v_up.is_contiguous():
        x, maps = out.flatten(2), v_up.flatten(0, 1)
        if is_skinny(x, maps, len(v_up)):
            return skinny_linear(x, maps, groups=len(v_up)).unflatten(-1, v_up.shape[:2])
    return _through_maps(out, v_up, transposed=True)


def _through_maps(x: Tensor, maps: Tensor, transposed: bool = False) -> Tensor:
    """x [B, S, H, i] through maps [k, i, o], or [k, o, i], of H / k heads each: [B, S, H, o].

    Products that need no gradient read x where it lies and write the result where it is to lie, heads side by side:
    einsum copies both. A kernel of ours does, of one token cuBLAS, and of many where a map is one head's; else maps are
    repeated.
    """
    batch, tokens, heads, _ = x.shape
    count = maps.shape[0]
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (x.requires_grad or maps.requires_grad)):
        equation = "bskri,koi->bskro" if transposed else "bskri,kio->bskro"
        return torch.einsum(equation, x.unflatten(2, (count, -1)), maps).flatten(2, 3)
    if batch * tokens > 1 and serves_groups(x, maps, transposed):
        return grouped_maps(x, maps, transposed=transposed)
    if batch * tokens > 1 and count < heads:
        maps = maps[:, None].expand(-1, heads // count, -1, -1).flatten(0, 1)
    maps = maps.mT if transposed else maps
    out = x.new_empty(batch, tokens, heads, maps.shape[2])
    if maps.shape[0] < heads:
        torch.bmm(x.view(count, heads // count, -1), maps, out=out.view(count, heads // count, -1))
    else:
        torch.bmm(x.flatten(0, 1).transpose(0, 1), maps, out=out.flatten(0, 1).transpose(0, 1))
    return out


MAX_PARTIALS = 8  # partial results held before they are merged

# attend(tokens of the batch, where the keys are, cu_seqlens_q, cu_seqlens_k, longest query, and by name causal,
# out [tokens, H, d_v], return_lse) -> out, or out and lse [H, tokens]
Attend = Callable[..., "Tensor | tuple[Tensor, Tensor]"]


def gather_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """cache [P, page, ...] at slots [T]: [T, ...]; zeros for a negative slot, whose token has no page: it must not see
    another sequence's. Never copies the whole cache, whatever its strides."""
    if cache.dtype == torch.float8_e4m3fn:  # not every device's indexing knows it; its bytes it does
        return gather_rows(cache.view(torch.uint8), slots).view(cache.dtype)
    page, known = cache.shape[1], slots.clamp_min(0)
    if cache.stride(0) == page * cache.stride(1):  # pages lie one behind the other
        rows = cache.as_strided((cache.shape[0] * page, *cache.shape[2:]), cache.stride()[1:], cache.storage_offset())
        rows = rows.index_select(0, known)
    else:
        rows = cache[known // page, known % page]
    return rows.masked_fill_((slots < 0).view(-1, *[1] * (rows.ndim - 1)), 0)


def expand(latent: Tensor, decoder: Tensor) -> Tensor:
    """latent [T, d_c] through decoder [h_kv, width, d_c]: [T, h_kv, width] (DeepSeek-V2, arXiv 2405.04434, 2.1)."""
    return F.linear(latent, decoder.flatten(0, 1)).unflatten(-1, decoder.shape[:2])


def attend_wave(
    attend: Attend,
    wave: Wave,
    cu_seqlens_q: Tensor,
    chunks: tuple[ChunkPart, ...],
    out: Tensor,
    backend: str | None = None,
) -> None:
    """Attention of the sequences of a wave.

    Args:
        attend: over some keys of the cache.
        cu_seqlens_q, chunks: of the plan.
        out: [N, H, d_v] of the whole batch; the wave's rows are written.
        backend: of the merges, as in :func:`mha2mla.kernels.attention_combine`.
    """
    if not wave.tokens:
        return
    tokens = slice(wave.first_token, wave.first_token + wave.tokens)
    mine, longest = out[tokens], max(wave.query_lengths)
    if len(chunks) == 1:
        attend(tokens, chunks[0], cu_seqlens_q, chunks[0].cu_seqlens_k, longest, causal=True, out=mine)
        return
    partial_out = out.new_empty(min(MAX_PARTIALS, len(chunks)), 1, *mine.shape)
    lses: list[Tensor] = []
    for chunk, part in zip(wave.chunks, chunks, strict=True):
        if len(lses) == MAX_PARTIALS:
            merged, lse = _merge(partial_out, lses, backend)
            partial_out[0].copy_(merged)
            lses = [lse]
        _, lse = attend(
            tokens, part, cu_seqlens_q, part.cu_seqlens_k, longest, causal=chunk.causal,
            out=partial_out[len(lses), 0], return_lse=True,
        )  # fmt: skip
        lses.append(lse[None])  # [1, H, tokens]
    out[tokens] = _merge(partial_out, lses, backend)[0][0]


def _merge(partial_out: Tensor, lses: list[Tensor], backend: str | None) -> tuple[Tensor, Tensor]:
    return attention_combine(partial_out[: len(lses)], torch.stack(lses), backend=backend)
