"""Which kernel serves a cache of the latent alone, and why one is refused. Arithmetic only, no TileLang."""

from __future__ import annotations

from mha2mla.kernels.mla_decode.selection import DecodeShape


def latent_shape(heads: int, kv_lora_rank: int, qk_rope_head_dim: int, page_size: int, seqlen_q: int, dtype: str):
    """The :class:`DecodeShape` of a call: one rope head."""
    return DecodeShape(heads, 1, kv_lora_rank, qk_rope_head_dim, page_size, seqlen_q, dtype)


def refusal_latent(shape: DecodeShape) -> str | None:
    """Why no kernel serves a shape on any GPU, or None."""
    return "the cache is of the latent alone, which no TileLang kernel serves yet"


def refusal_latent_fp8(shape: DecodeShape) -> str | None:
    """Why no kernel serves a shape on any GPU."""
    return "the cache is of e4m3 latents alone, which no TileLang kernel serves"


def select_latent(shape: DecodeShape, capability: int):
    raise ValueError(refusal_latent(shape))
