"""Time of a decode call on a Hopper, and whether rotary keys kept beside the latent are worth their bytes.

A kernel's time is what it reads, or what it does one after the other where that takes longer. Arithmetic only, no
TileLang; constants are fitted to measured calls (docs/notes/rotary-keys.md).
"""

from __future__ import annotations

from functools import lru_cache

from mha2mla.geometry import SCALE_BYTES, MLAGeometry
from mha2mla.kernels.mla_decode.selection import DecodeShape, halve, key_steps, refusal, select_kernel
from mha2mla.kernels.split_kv.choice import HOPPER, TILE_TOKENS, KernelChoice

READ_RATE = 4.3e12  # bytes a second that attention kernels read from the memory of an H200
L2_RATE = 3.57e12  # bytes a second that tiles which make keys read, wherever from: their rings are short
PRODUCTS = 800e12  # FLOP a second
CLOCK, MULTIPROCESSORS = 1.755e9, 132
FIXED, DIRTY_BYTES = 5e-6, 65e6  # a call's, whatever it reads: seconds, and bytes of a dirty L2
# Cycles of a multiprocessor for a tile of 64 tokens, behind one another: softmax and barriers of a tile; exchange of
# scores in a cluster; each piece of its columns, with stored keys and with keys that are made; a product of depth 16
# that makes 64 columns of keys or, for one computing warpgroup, scores or output. PORTABLE: latent_portable, for a
# number of the latent.
TILE, EXCHANGE, PIECE, KEY_PIECE, KEY_PRODUCT, PRODUCT, PORTABLE = 1200, 350, 60, 250, 48, 25, 57


CALL_BYTES = 200e6  # latents of the calls that kept_key_bits compares
CHEAP_SHARE = 0.13  # bytes of keys over those of latents, up to which keys are kept for any gain
FAR_OVER_LEAST = 2.2  # beyond that share: times the least that computing takes
CHEAP_GAIN, GAIN = 1.03, 1.08  # times that computing must take of keeping: up to that share in 16 bits, else


def _chain(shape: DecodeShape, choice: KernelChoice, has_rope_cache: bool) -> float:
    """Cycles that a CTA's tile takes when nothing waits for memory."""
    if choice.kernel in ("latent_portable", "swap_ab", "int8_keys_portable"):
        return PORTABLE * shape.kv_lora_rank
    if choice.kernel == "heads_on_m":
        return TILE + 2 * PRODUCT * key_steps(shape.kv_lora_rank + shape.qk_rope_head_dim)
    columns, chain = shape.kv_lora_rank, TILE
    if choice.cluster_size > 1:
        rope = shape.qk_rope_head_dim if has_rope_cache else 8
        cut = halve(choice.tiling, columns, rope, choice.variant)
        columns, chain = cut.columns, TILE + EXCHANGE + (PIECE if has_rope_cache else KEY_PIECE) * cut.units
    steps, makers = key_steps(columns), -(-shape.qk_rope_head_dim // 64)
    if not has_rope_cache:
        return chain + KEY_PRODUCT * makers * steps
    rope = key_steps(choice.tiling.groups_per_tile * shape.qk_rope_head_dim // choice.cluster_size)
    return chain + PRODUCT * choice.warpgroups * (2 * steps + rope)


@lru_cache(maxsize=1024)
def decode_seconds(geometry: MLAGeometry, tokens: int, read_rate: float = READ_RATE) -> float:
    """Seconds of a call of one new token a sequence over ``tokens`` cached ones of enough sequences for every
    multiprocessor, in 16 bits; ``read_rate``: bytes a second that the GPU's memory gives, of an H200 by default.

    Raises:
        ValueError: no kernel serves the geometry.
    """
    shape = DecodeShape.of(geometry, TILE_TOKENS, "bfloat16")
    keys = {"has_rope_cache": geometry.has_rope_cache, "key_codes": geometry.has_key_codes}
    choice = select_kernel(shape, HOPPER, **keys)
    at_once = MULTIPROCESSORS * choice.ctas_per_sm / choice.cluster_size / choice.tiling.num_tiles
    working = tokens / TILE_TOKENS / at_once * _chain(shape, choice, geometry.has_rope_cache) / CLOCK
    size = tokens * geometry.cache_bytes_per_token(2)
    from_l2 = 0.0 if geometry.has_rope_cache else size * choice.tiling.num_tiles / L2_RATE
    return FIXED + DIRTY_BYTES / read_rate + max(size / read_rate, from_l2, working)


def least_seconds(geometry: MLAGeometry, tokens: int) -> float:
    """The larger of what reading and multiplying take at the machine's rates."""
    flops = geometry.decode_flops_per_token()
    return tokens * max(geometry.cache_bytes_per_token(2) / READ_RATE, flops / PRODUCTS)


@lru_cache(maxsize=64)
def kept_key_bits(layers: tuple[MLAGeometry, ...], has_8_bits: bool = True) -> int:
    """Bits in which layers that cache the latent alone should keep their rotary keys beside it, one answer for all: 16,
    8 (which changes predictions) or, where they should be computed, 0.

    Keys that take at most 13 % of the latents' bytes in 16 bits are kept where computing takes more than 1.03 times
    what keeping takes on an H200. Else those that take at most 13 % in 8 bits, scales included, are kept so where
    computing takes more than 1.08 times that; others in 16 bits where it takes more than 1.08 times that and 2.2 times
    what bytes and products need at least. Where no kernel computes keys, and for codes, whose times are not modelled,
    the bytes of 16 bits alone decide.

    Args:
        has_8_bits: the backend takes keys in 8 bits.
    """
    latents = sum(2 * layer.kv_lora_rank for layer in layers)
    is_cheap = sum(2 * layer.qk_rope_head_dim for layer in layers) <= CHEAP_SHARE * latents
    is_cheap_in_8 = sum(layer.qk_rope_head_dim + SCALE_BYTES for layer in layers) <= CHEAP_SHARE * latents
    shapes = [DecodeShape.of(layer, TILE_TOKENS, "bfloat16") for layer in layers]
    if any(layer.has_codes for layer in layers) or any(refusal(shape, has_rope_cache=False) for shape in shapes):
        return 16 * is_cheap
    tokens = int(CALL_BYTES * len(layers) / latents)

    def seconds(ways: list[MLAGeometry]) -> float:
        return sum(decode_seconds(layer, tokens) for layer in ways)

    computed, kept = seconds(list(layers)), seconds([layer.with_stored_keys for layer in layers])
    if is_cheap:
        return 16 * (computed > CHEAP_GAIN * kept)
    if has_8_bits and is_cheap_in_8 and not any(refusal(shape, key_codes=True) for shape in shapes):
        if computed > GAIN * seconds([layer.with_key_codes for layer in layers]):
            return 8
    least = sum(least_seconds(layer, tokens) for layer in layers)
    return 16 * (computed > max(FAR_OVER_LEAST * least, GAIN * kept))
