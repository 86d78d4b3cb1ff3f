"""The shape of one Multi-head Latent Attention layer, and every check on that shape. No tensors, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

LATENT_BITS = (16, 8, 4, 3, 2)
CODE_BLOCK = 32  # elements; rows of codes are padded to a multiple of it
KEY_BITS = (16, 8)
SCALE_BYTES = 4  # of a token's rotary key in 8 bits, and of its latent in codes


@dataclass(frozen=True)
class MLAGeometry:
    """Static shape of one MLA layer (symbols as in DeepSeek-V2, arXiv 2405.04434, extended by G rope heads).

    A cached token is ``c`` of ``kv_lora_rank`` elements and ``k_pe`` of ``num_rope_heads * qk_rope_head_dim`` elements;
    query head ``h`` reads rope head ``h // (num_attention_heads // num_rope_heads)``. With ``rope_from_latent`` it is
    ``c`` alone, and ``k_pe`` of the one rope head is computed from it when it is read.

    Args:
        num_attention_heads: H, query heads.
        num_rope_heads: G, rotary keys per token; divides H. 1 is DeepSeek's shared ``k_pe``.
        kv_lora_rank: d_c, width of the cached latent.
        qk_rope_head_dim: d_r, rotary width per rope head; even, since RoPE rotates pairs.
        qk_nope_head_dim: un-rotated width of a query head in the expanded form; 0 when every pair is rotated.
        v_head_dim: value width of a head in the expanded form; ``None`` means ``kv_lora_rank`` (absorbed view).
        num_key_value_heads: kv heads of the source; divides H. ``None`` means H.
        num_up_projection_heads: heads that W_UK and W_UV are given for, and that the latent is expanded to; a multiple
            of ``num_key_value_heads`` that divides H (H itself is DeepSeek's). ``None`` means ``num_key_value_heads``.
        rope_from_latent: nothing rotary is cached: ``k_pe[t] = m R(t) (W_KR c[t] + b_KR)``; needs G = 1.
        latent_bits: of a cached latent element: 16 stands for the model's dtype, others for integer codes.
        key_bits: of a cached rotary key's element: 16 stands for the model's dtype, 8 for int8 and a float32
            scale a token, of the keys of a layer that could compute them; needs G = 1 and ``latent_bits`` 16.

    Attributes:
        has_rope_cache: rotary keys are cached, beside the latent; False where they are computed from it.
        has_codes: latents are cached as integer codes.
        has_key_codes: rotary keys are cached in 8 bits.

    Raises:
        ValueError: naming the argument, its value and what was expected.
    """

    num_attention_heads: int
    num_rope_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int = 0
    v_head_dim: int | None = None
    num_key_value_heads: int | None = None
    num_up_projection_heads: int | None = None
    rope_from_latent: bool = False
    latent_bits: int = 16
    key_bits: int = 16

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.kv_lora_rank)
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.num_up_projection_heads is None:
            object.__setattr__(self, "num_up_projection_heads", self.num_key_value_heads)
        if not isinstance(self.rope_from_latent, bool):
            raise ValueError(f"rope_from_latent is {self.rope_from_latent!r}; expected a bool")
        for field in fields(self):
            if field.name == "rope_from_latent":
                continue
            value = getattr(self, field.name)
            least = 0 if field.name == "qk_nope_head_dim" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field.name} is {value!r}; expected an int >= {least}")
        for name in ("num_rope_heads", "num_key_value_heads", "num_up_projection_heads"):
            if self.num_attention_heads % getattr(self, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected a divisor of num_attention_heads="
                    f"{self.num_attention_heads}"
                )
        if self.num_up_projection_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_up_projection_heads is {self.num_up_projection_heads}; expected a multiple of"
                f" num_key_value_heads={self.num_key_value_heads}"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; expected an even number (RoPE turns pairs)")
        if self.rope_from_latent and self.num_rope_heads != 1:
            raise ValueError(f"num_rope_heads is {self.num_rope_heads}; expected 1 with rope_from_latent")
        for name, allowed in (("latent_bits", LATENT_BITS), ("key_bits", KEY_BITS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)}; expected one of {allowed}")
        if self.key_bits == 8 and (self.rope_from_latent or self.num_rope_heads != 1 or self.latent_bits != 16):
            raise ValueError(
                f"key_bits is 8 with num_rope_heads={self.num_rope_heads}, latent_bits={self.latent_bits} and"
                f" rope_from_latent={self.rope_from_latent}; expected 16, or 1, 16 and False"
            )
        # No fields, which asdict would list; no properties, which each layer of a step would call.
        object.__setattr__(self, "has_rope_cache", not self.rope_from_latent)
        object.__setattr__(self, "has_codes", self.latent_bits < 16)
        object.__setattr__(self, "has_key_codes", self.key_bits < 16)

    @property
    def with_stored_keys(self) -> MLAGeometry:
        """The layer over a cache that keeps its rotary keys beside the latent."""
        return replace(self, rope_from_latent=False)

    @property
    def with_key_codes(self) -> MLAGeometry:
        """The same of keys in 8 bits."""
        return replace(self, rope_from_latent=False, key_bits=8)

    def is_cached_as(self, other: MLAGeometry) -> bool:
        """True if ``other`` is this layer over a cache: of any bits, with rotary keys that it could compute or not."""
        if not self.rope_from_latent and (other.rope_from_latent or other.has_key_codes):
            return False
        of_caches = ("latent_bits", "key_bits", "rope_from_latent")
        names = (field.name for field in fields(self) if field.name not in of_caches)
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def rope_width(self) -> int:
        """Rotary elements cached per token: G * d_r; 0 without a rotary cache."""
        return self.num_rope_heads * self.qk_rope_head_dim if self.has_rope_cache else 0

    @property
    def cache_numel_per_token(self) -> int:
        """Elements cached per token and layer: d_c + G * d_r, or d_c alone."""
        return self.kv_lora_rank + self.rope_width

    @property
    def source_cache_numel_per_token(self) -> int:
        """Numbers that the MHA/GQA layer behind this one caches: keys and values of every kv head.

        The source's key and value heads are both taken to be ``v_head_dim`` wide, as in every supported family.
        """
        return 2 * self.num_key_value_heads * self.v_head_dim

    @property
    def full_kv_lora_rank(self) -> int:
        """The latent that with these rotary elements is already everything that the source caches."""
        return self.source_cache_numel_per_token - self.rope_width

    @property
    def is_full_rank(self) -> bool:
        """The layer is the source's to rounding: every pair rotates and the latent loses nothing."""
        return self.qk_nope_head_dim == 0 and self.kv_lora_rank >= self.full_kv_lora_rank

    def cache_bytes_per_token(self, itemsize: int) -> int:
        """Bytes cached per token and layer for elements of ``itemsize`` bytes (2 for bfloat16); latents that are codes
        with their scale and padding, keys in 8 bits with their scale."""
        latent = self.kv_lora_rank * itemsize
        if self.has_codes:
            latent = code_bytes(self.kv_lora_rank, self.latent_bits)
        return latent + (self.rope_width + SCALE_BYTES if self.has_key_codes else self.rope_width * itemsize)

    def decode_flops_per_token(self) -> int:
        """Multiply-adds counted twice, of one query token per cached token, in the absorbed form: 2 H (2 d_c + d_r);
        with ``rope_from_latent`` also 2 d_c d_r for the rotary key, once for all heads."""
        rotary = 2 * self.kv_lora_rank * self.qk_rope_head_dim if self.rope_from_latent else 0
        return 2 * self.num_attention_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim) + rotary

    def to_dict(self) -> dict[str, int | bool]:
        """The fields by name, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"H={self.num_attention_heads} G={self.num_rope_heads} d_c={self.kv_lora_rank} d_r={self.qk_rope_head_dim}"
            f"{' from the latent' if self.rope_from_latent else ''} ({self.cache_numel_per_token} elements per token"
            f"{f', latents in {self.latent_bits} bits' if self.has_codes else ''}"
            f"{', rotary keys in 8 bits' if self.has_key_codes else ''})"
        )


def code_bytes(width: int, bits: int) -> int:
    """Bytes of a row of ``width`` elements as codes, padded, with a scale of 32 bits
    (:class:`mha2mla.kernels.RowQuantizer`)."""
    return SCALE_BYTES + -(-width // CODE_BLOCK) * CODE_BLOCK * bits // 8


def coded_width(row_bytes: int, bits: float) -> int:
    """Elements of the widest row of codes in so many bytes, a multiple of 32; ``bits`` of an element, or their mean."""
    return int(max(0, row_bytes - SCALE_BYTES) * 8 // bits) // CODE_BLOCK * CODE_BLOCK


def kept_keys_share(layers: Sequence[MLAGeometry], source_bytes: int) -> str:
    """Bytes cached per token relative to ``source_bytes``, in words, were the rotary keys of layers that cache the
    latent alone kept beside it: in 16 bits and, beside 16-bit latents, in 8. Empty where keys are cached."""
    if any(layer.has_rope_cache for layer in layers):
        return ""
    ways = {"with rotary keys kept": [layer.with_stored_keys for layer in layers]}
    if not any(layer.has_codes for layer in layers):
        ways["in 8 bits"] = [layer.with_key_codes for layer in layers]
    cached = {name: sum(layer.cache_bytes_per_token(2) for layer in way) for name, way in ways.items()}
    return ", ".join(f"{value / source_bytes:.4f} {name}" for name, value in cached.items())
