"""Which backend serves a GQA decode call, decided from shapes and the device, and why. No tensor values, no kernels."""

from __future__ import annotations

from functools import lru_cache

import torch

from mha2mla.kernels.devices import capability, dtype_name
from mha2mla.kernels.gqa_decode.selection import GQAShape, refusal, select_kernel
from mha2mla.kernels.split_kv.tiling import SEQLENS_Q


def gqa_shape(
    heads: int,
    num_kv_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    seqlen_q: int = 1,
) -> GQAShape:
    """The static part of a call; S_q is rounded up to a number that kernels are compiled for."""
    rounded = next(size for size in SEQLENS_Q if size >= seqlen_q)
    return GQAShape(heads, num_kv_heads, qk_head_dim, v_head_dim, page_size, rounded, dtype_name(dtype))


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
    device = torch.device(device)
    why = refusal(heads, num_kv_heads, qk_head_dim, v_head_dim, page_size, dtype_name(dtype), seqlen_q)
    if why is not None:
        return why
    if device.type != "cuda":
        return f"device is {device}; TileLang kernels run on CUDA devices"
    if capability(device) < 80:
        return f"device {device} has compute capability {capability(device) / 10}; TileLang kernels need 8.0"
    try:
        shape = gqa_shape(heads, num_kv_heads, qk_head_dim, v_head_dim, page_size, dtype, seqlen_q)
        select_kernel(shape, capability(device))
    except ValueError as error:
        return str(error)
    return None


@lru_cache(maxsize=4096)
def dispatch(
    backend: str,
    heads: int,
    num_kv_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seqlen_q: int,
) -> GQAShape | None:
    """The shape to compile for, or None where the reference serves; remembered, since a decode loop asks every step.

    "auto" prefers TileLang. Raises ValueError with the reason if ``backend`` is "tilelang" and no kernel serves it.
    """
    if backend == "reference":
        return None
    call = (heads, num_kv_heads, qk_head_dim, v_head_dim, page_size, dtype)
    why = explain_gqa_decode(*call, device, seqlen_q)
    if why is None:
        return gqa_shape(*call, seqlen_q)
    if backend == "tilelang":
        raise ValueError(f"backend is 'tilelang', which refuses this call: {why}")
    return None
