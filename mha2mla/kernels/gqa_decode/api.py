"""GQA decode: what the op takes, and its public functions. The rest follows from the declaration."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.gqa_decode.selection import GQAShape, refusal, select_kernel
from mha2mla.kernels.ops import Argument, dtype_name, sizes_of
from mha2mla.kernels.split_kv.op import PagedOp
from mha2mla.kernels.split_kv.plan import DecodePlan

GQA = PagedOp(
    name="gqa_decode",
    arguments=(
        Argument("q", "B S_q H d_qk"),
        Argument("k_cache", "P page G|H d_qk"),
        Argument("v_cache", "P page G d_v"),
    ),
    out=Argument("out", "B S_q H d_v"),
    shape=GQAShape,
    static=("H", "G", "d_qk", "d_v", "page", "S_q"),
    refusal=refusal,
    select=select_kernel,
    package="mha2mla.kernels.gqa_decode",
    modules={"streamed": "kernels", "portable": "kernels"},
    reference="mha2mla.kernels.split_kv.reference:gqa_decode_reference",
)


def gqa_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
    """MHA, GQA or MQA attention of the last ``S_q`` tokens of each sequence over its paged keys and values.

    For query head h of H, with G kv heads (GQA, arXiv 2305.13245)::

        score[h, t] = softmax_scale * q[h] . k[t, h // (H / G)]
        out[h]      = sum_t softmax_t(score[h, t]) v[t, h // (H / G)]

    A cache without pages, [slots, max_len, G, d] with max_len a multiple of a page, is one with pages seen as
    ``cache.view(-1, page, G, d)`` and ``block_table[b] = slot[b] * (max_len // page) + arange(max_len // page)``.

    Args:
        q: [B, S_q, H, d_qk] queries, rotated.
        k_cache: [P, page, G, d_qk] pages of rotated keys; G divides H, and H / G need not be a power of two.
        v_cache: [P, page, G, d_v] pages of values.
        block_table, cache_seqlens, causal, cache_starts, out, return_lse: as in :func:`mha2mla.kernels.mla_decode`;
            with ``out`` [B, S_q, H, d_v].
        softmax_scale: usually d_qk ** -0.5.
        plan: from :func:`plan_gqa_decode`, likewise.
        backend: "tilelang", "reference", or None: TileLang where :func:`explain_gqa_decode` has nothing against it.

    The three data tensors share a dtype and may be strided views, as there.

    Returns:
        ``out [B, S_q, H, d_v]``, and with ``return_lse`` also ``lse [B, H, S_q]`` (natural log, float32; float64 from
        the reference for float64 inputs).

    Raises:
        ValueError: naming the argument, what it was and what it must be; or why ``backend="tilelang"`` refuses.
    """
    return GQA(
        (q, k_cache, v_cache), block_table, cache_seqlens, cache_starts, softmax_scale, causal, backend, plan, out,
        return_lse,
    )  # fmt: skip


def explain_gqa_decode(
    heads: int,
    num_kv_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seqlen_q: int = 1,
) -> str | None:
    """Why the TileLang backend would refuse a shape on a device, or None if it serves it.

    Args:
        heads, num_kv_heads, qk_head_dim, v_head_dim: H, G, d_qk, d_v.
        page_size: tokens per page.
        dtype: of queries and caches.
        device: where they live; a CUDA device that this machine lacks is taken to be a Hopper.
        seqlen_q: new tokens per sequence.
    """
    shape = GQAShape(heads, num_kv_heads, qk_head_dim, v_head_dim, page_size, seqlen_q, dtype_name(dtype))
    return GQA.explain(shape, device)


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
    num_splits: int | None = None,
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
        window, sinks, num_splits: as in :func:`mha2mla.kernels.plan_mla_decode`.
        backend: as in :func:`gqa_decode`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    sizes = sizes_of("k_cache", k_cache, "P page G d_qk") | sizes_of("q", q, "B S_q H d_qk")
    sizes["d_v"] = sizes["d_qk"] if v_head_dim is None else v_head_dim
    return GQA.plan(sizes, q, block_table, cache_seqlens, cache_starts, causal, window, sinks, backend, num_splits)
