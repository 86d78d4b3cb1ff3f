"""The work split of an MLA decode step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.devices import capability, device_name, num_sms
from mha2mla.kernels.mla_decode.dispatch import dispatch
from mha2mla.kernels.mla_decode.selection import select_kernel
from mha2mla.kernels.split_kv.plan import DecodePlan, allocate_plan, check_window
from mha2mla.kernels.split_kv.tuning import batch_bucket


@torch.compiler.assume_constant_result
def num_ctas_for(bucket: int, *call: Any) -> int:
    """Blocks of the decode kernel per tile of query rows for a call as :func:`dispatch` takes it, with a batch of
    ``bucket``: what is resident at once; 0 where the reference serves. Dynamo takes the answer and does not trace how
    it was found."""
    shape, device = dispatch(*call), call[-1]
    if shape is None:
        return 0
    return select_kernel(shape, capability(device), device_name(device), bucket).num_ctas(num_sms(device))


def empty_plan(
    q_latent: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    qk_rope_head_dim: int,
    causal: bool,
    window: int | None,
    sinks: int,
    backend: str,
) -> DecodePlan:
    """The buffers of a plan, not yet filled."""
    batch, seqlen_q, heads, d_c = q_latent.shape
    _, page_size, num_rope_heads, _ = rope_cache.shape
    num_ctas = num_ctas_for(
        batch_bucket(batch), backend, heads, num_rope_heads, d_c, qk_rope_head_dim, page_size, seqlen_q, q_latent.dtype,
        q_latent.device,
    )  # fmt: skip
    return allocate_plan(
        (batch, seqlen_q, heads, d_c),
        num_ctas,
        block_table.shape[1] * page_size,
        causal,
        window,
        sinks,
        q_latent.device,
    )


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
    backend: str | None = None,
) -> DecodePlan:
    """Allocate a plan for calls of :func:`mla_decode` with these shapes and fill it from these lengths.

    Args:
        q_latent: [B, S_q, H, d_c]; only shape, dtype and device are looked at, here and in the next two.
        rope_cache: [P, page, G, d_r].
        block_table: [B, max_pages].
        cache_seqlens: [B] int32; None: the plan is not filled, and must be refreshed before a call.
        qk_rope_head_dim: d_r.
        cache_starts: [B] int32 or None.
        causal: as in :func:`mla_decode`.
        window: each query sees only the last ``window`` tokens up to itself; None: all. Time follows the tokens seen.
        sinks: the first ``sinks`` tokens (from cache_starts on) stay visible (attention sinks, arXiv 2309.17453).
        backend: as in :func:`mla_decode`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_window(window, sinks)
    plan = empty_plan(q_latent, rope_cache, block_table, qk_rope_head_dim, causal, window, sinks, backend or "auto")
    if cache_seqlens is not None:
        plan.refresh(cache_seqlens, cache_starts)
    return plan
