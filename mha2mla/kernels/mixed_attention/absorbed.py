"""Short queries over a paged latent cache: the up-projections go to queries and outputs, around the decode op."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.latent_rope import LatentRope
from mha2mla.kernels.mla_decode.api import mla_decode
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
        latent_cache, rope_cache, k_up, v_up, latent_scale, rope: as in :func:`mha2mla.kernels.mla_attention`.
        block_table, cache_seqlens, softmax_scale, cache_starts, plan, backend: as in
            :func:`mha2mla.kernels.mla_decode`.

    Returns:
        [B, S_q, H, d_v].

    Raises:
        ValueError: as :func:`mha2mla.kernels.mla_decode`.
    """
    if k_up is None:
        q_latent = q_pe.new_zeros(*q_pe.shape[:3], latent_cache.shape[-1])
    else:
        grouped = q_nope.unflatten(2, (k_up.shape[0], -1))
        q_latent = torch.einsum("bskrn,knc->bskrc", grouped, k_up).flatten(2, 3)
    out = mla_decode(
        q_latent, q_pe, latent_cache, rope_cache, block_table, cache_seqlens, softmax_scale=softmax_scale,
        latent_scale=latent_scale, rope=rope, cache_starts=cache_starts, plan=plan, backend=backend,
    )  # fmt: skip
    return torch.einsum("bskrc,kvc->bskrv", out.unflatten(2, (v_up.shape[0], -1)), v_up).flatten(2, 3)
