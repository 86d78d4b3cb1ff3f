"""The work split of a GQA decode step: the same device-made plan as of MLA decode, for this op's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.devices import capability, num_sms
from mha2mla.kernels.gqa_decode.dispatch import dispatch
from mha2mla.kernels.gqa_decode.selection import select_kernel
from mha2mla.kernels.split_kv.plan import DecodePlan, allocate_plan, check_window


@torch.compiler.assume_constant_result
def num_ctas_for(*call: Any) -> int:
    """Blocks of the decode kernel per tile of query rows for a call as :func:`dispatch` takes it; 0 where the reference
    serves. Dynamo takes the answer and does not trace how it was found."""
    shape, device = dispatch(*call), call[7]
    if shape is None:
        return 0
    return select_kernel(shape, capability(device)).num_ctas(num_sms(device))


def empty_plan(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    v_head_dim: int,
    causal: bool,
    window: int | None,
    sinks: int,
    backend: str,
) -> DecodePlan:
    """The buffers of a plan, not yet filled."""
    batch, seqlen_q, heads, qk_head_dim = q.shape
    _, page_size, groups, _ = k_cache.shape
    num_ctas = num_ctas_for(
        backend, heads, groups, qk_head_dim, v_head_dim, page_size, q.dtype, q.device, seqlen_q
    )  # fmt: skip
    return allocate_plan(
        (batch, seqlen_q, heads, v_head_dim),
        num_ctas,
        block_table.shape[1] * page_size,
        causal,
        window,
        sinks,
        q.device,
    )


def plan_gqa_decode(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    v_head_dim: int | None = None,
    cache_starts: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    backend: str | None = None,
) -> DecodePlan:
    """Allocate a plan for calls of :func:`gqa_decode` with these shapes and fill it from these lengths.

    Args:
        q: [B, S_q, H, d_qk]; only shape, dtype and device are looked at, here and in the next two.
        k_cache: [P, page, G, d_qk].
        block_table: [B, max_pages].
        cache_seqlens: [B] int32.
        v_head_dim: d_v; None: d_qk.
        cache_starts: [B] int32 or None.
        causal: as in :func:`gqa_decode`.
        window: each query sees only the last ``window`` tokens up to itself; None: all. Time follows the tokens seen.
        sinks: the first ``sinks`` tokens (from cache_starts on) stay visible (attention sinks, arXiv 2309.17453).
        backend: as in :func:`gqa_decode`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_window(window, sinks)
    width = q.shape[3] if v_head_dim is None else v_head_dim
    plan = empty_plan(q, k_cache, block_table, width, causal, window, sinks, backend or "auto")
    plan.refresh(cache_seqlens, cache_starts)
    return plan
