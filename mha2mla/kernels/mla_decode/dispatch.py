"""Which backend serves a decode call, decided from shapes and the device, and why. No tensor values, no kernels."""

from __future__ import annotations

from functools import lru_cache

import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.devices import capability, device_name, dtype_name
from mha2mla.kernels.mla_decode.selection import DecodeShape, refusal, select_kernel
from mha2mla.kernels.split_kv.tiling import SEQLENS_Q


def decode_shape(geometry: MLAGeometry, page_size: int, dtype: torch.dtype, seqlen_q: int) -> DecodeShape:
    """The static part of a call; S_q is rounded up to a number that kernels are compiled for."""
    return DecodeShape(
        heads=geometry.num_attention_heads,
        num_rope_heads=geometry.num_rope_heads,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        page_size=page_size,
        seqlen_q=next(size for size in SEQLENS_Q if size >= seqlen_q),
        dtype=dtype_name(dtype),
    )


def explain_mla_decode(
    geometry: MLAGeometry, page_size: int, dtype: torch.dtype, device: torch.device | str, seqlen_q: int = 1
) -> str | None:
    """Why the TileLang backend would refuse a geometry on a device, or None if it serves it.

    Args:
        geometry: H, G, d_c and d_r are looked at.
        page_size: tokens per page.
        dtype: of queries and caches.
        device: where they live; a CUDA device that this machine lacks is taken to be a Hopper.
        seqlen_q: new tokens per sequence.
    """
    device = torch.device(device)
    why = refusal(geometry, page_size, dtype_name(dtype), seqlen_q)
    if why is not None:
        return why
    if device.type != "cuda":
        return f"device is {device}; TileLang kernels run on CUDA devices"
    if capability(device) < 80:
        return f"device {device} has compute capability {capability(device) / 10}; TileLang kernels need 8.0"
    try:
        select_kernel(decode_shape(geometry, page_size, dtype, seqlen_q), capability(device), device_name(device))
    except ValueError as error:
        return str(error)
    return None


@lru_cache(maxsize=4096)
def dispatch(
    backend: str,
    heads: int,
    num_rope_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    seqlen_q: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeShape | None:
    """The shape to compile for, or None where the reference serves; remembered, since a decode loop asks every step.

    "auto" prefers TileLang. Raises ValueError with the reason if ``backend`` is "tilelang" and no kernel serves it.
    """
    if backend == "reference":
        return None
    geometry = MLAGeometry(heads, num_rope_heads, kv_lora_rank, qk_rope_head_dim)
    why = explain_mla_decode(geometry, page_size, dtype, device, seqlen_q)
    if why is None:
        return decode_shape(geometry, page_size, dtype, seqlen_q)
    if backend == "tilelang":
        raise ValueError(f"backend is 'tilelang', which refuses this call: {why}")
    return None
