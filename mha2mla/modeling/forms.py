"""Which of the two forms of MLA a layer runs, and why: expanded for long queries, absorbed for decode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import explain_mla_decode

MAX_DECODE_QUERY_LENGTH = 8  # longer queries amortise expanding the latent


@dataclass(frozen=True)
class FormChoice:
    """How a layer attends over its cache.

    Attributes:
        form: "absorbed" or "expanded".
        backend: what computes it: "tilelang" or "reference" for the absorbed form, else the attention implementation.
        reason: in words.
    """

    form: str
    backend: str
    reason: str

    @property
    def absorbed(self) -> bool:
        return self.form == "absorbed"


@lru_cache(maxsize=1024)  # asked in every step
def choose_form(
    num_attention_heads: int,
    num_rope_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    *,
    mla_form: str,
    decode_backend: str | None,
    attn_implementation: str,
    query_length: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> FormChoice:
    """The form for ``query_length`` new tokens per sequence over a LatentCache that already holds tokens.

    Args:
        num_attention_heads, num_rope_heads, kv_lora_rank, qk_rope_head_dim: of the layer's geometry; as numbers, since
            dynamo (torch 2.11) cannot hand a dataclass to a function that it does not trace.
        mla_form, decode_backend: of the config.
        attn_implementation: what computes the expanded form.
        page_size, dtype, device: of the cache.
    """

    def expanded(reason: str) -> FormChoice:
        return FormChoice("expanded", attn_implementation, reason)

    if mla_form == "expanded":
        return expanded("mla_form is 'expanded'")
    if query_length > MAX_DECODE_QUERY_LENGTH:
        return expanded(f"{query_length} new tokens; the absorbed form serves up to {MAX_DECODE_QUERY_LENGTH}")
    if decode_backend == "reference":
        return FormChoice("absorbed", "reference", "decode_backend is 'reference'")
    geometry = MLAGeometry(num_attention_heads, num_rope_heads, kv_lora_rank, qk_rope_head_dim)
    refusal = explain_mla_decode(geometry, page_size, dtype, device, query_length)
    if decode_backend == "tilelang":
        reason = "decode_backend is 'tilelang'" + (f", which refuses: {refusal}" if refusal else "")
        return FormChoice("absorbed", "tilelang", reason)
    if refusal is None:
        return FormChoice("absorbed", "tilelang", "the TileLang kernel serves this geometry")
    if mla_form == "absorbed":
        return FormChoice("absorbed", "reference", f"mla_form is 'absorbed', and TileLang refuses: {refusal}")
    if device.type != "cuda" and not (dtype.itemsize == 2 and (kv_lora_rank % 8 or qk_rope_head_dim % 8)):
        return FormChoice("absorbed", "reference", refusal)
    # The decode op takes rows of 16 bytes only, whoever computes it.
    return expanded(f"TileLang refuses: {refusal}")


@torch.compiler.assume_constant_result
def is_absorbed(*geometry: int, **arguments: Any) -> bool:
    """Whether :func:`choose_form` says absorbed; dynamo takes the answer and does not trace how it was found."""
    return choose_form(*geometry, **arguments).absorbed
