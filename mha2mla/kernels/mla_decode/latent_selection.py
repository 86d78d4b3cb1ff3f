"""Selection of the decode kernel over a cache of the latent alone, and the refusals. Arithmetic only, no TileLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from mha2mla.kernels.mla_decode.selection import (
    CLUSTER,
    WIDE_LATENT,
    DecodeShape,
    RopeBlocks,
    check_hopper,
    cluster_shared_memory,
    halve,
    padded_latent_columns,
    padded_rope_columns,
    refusal,
    refusal_codes,
    swap_ab_shared_memory,
    swap_ab_ws_shared_memory,
)
from mha2mla.kernels.split_kv.choice import KernelChoice, RowTiling, rank_choices, shared_memory_limit, tile_rows

MAX_LATENT_ALONE = 1024  # d_c
MAX_ROPE_ALONE = 128  # d_r
KEY_TILE = 64  # rows of W_KR that a warpgroup of ``latent_ws`` holds: the M of one wgmma
KEY_OVERHEAD = 72  # registers of such a thread beside W_KR: 32 sums, and whatever else
STREAMING_REGISTERS = 40
LEAN = 16  # registers fewer of a computing thread, and 8 of a streaming one, to have two CTAs on a multiprocessor
CONSUMER_OVERHEAD = 60  # of a computing thread, beside its accumulators
CODE_PANEL = 128  # e4m3 codes of a token in a piece of a tile: a row of swizzled shared memory
SCALE_BYTES = 128  # where the scales of each page of a piece start


@dataclass(frozen=True)
class LatentChoice(KernelChoice):
    """A :class:`KernelChoice` of "latent_ws", "latent_fp8", "latent_cluster" (sm_90) or "latent_portable" (from sm_80
    on).

    Attributes: ``variant`` of the portable kernel, where W_KR is: "resident" in shared memory or "streamed" through it;
    ``registers`` of a thread that computes, makes keys, streams (sm_90); ``code_stages``: pieces of 128 codes in
    flight.
    """

    registers: tuple[int, int, int] = (0, 0, 0)
    code_stages: int = 0


Candidates = Iterator[tuple[Any, LatentChoice | None, int]]  # rank, where it fits, bytes of shared memory


def latent_shape(
    heads: int, kv_lora_rank: int, qk_rope_head_dim: int, page_size: int, seqlen_q: int, dtype: str
) -> DecodeShape:
    """Shape of a call; one rope head."""
    return DecodeShape(heads, 1, kv_lora_rank, qk_rope_head_dim, page_size, seqlen_q, dtype)


def refusal_latent(shape: DecodeShape) -> str | None:
    """Why no kernel serves a shape on any GPU, or None."""
    for name, limit in (("kv_lora_rank", MAX_LATENT_ALONE), ("qk_rope_head_dim", MAX_ROPE_ALONE)):
        if getattr(shape, name) > limit:
            return f"{name} is {getattr(shape, name)}; TileLang kernels that make rotary keys take at most {limit}"
    return refusal(shape)


def refusal_latent_fp8(shape: DecodeShape) -> str | None:
    """Same as :func:`refusal_latent`, for e4m3 latents."""
    return refusal_codes(shape) or refusal_latent(shape)


def portable_shared_memory(
    tiling: RowTiling, shape: DecodeShape, block_tokens: int, threads: int, weight_columns: int
) -> int:
    """Bytes of shared memory that ``latent_portable`` allocates for 16-bit elements."""
    half = padded_rope_columns(shape.qk_rope_head_dim // 2)
    shared = swap_ab_shared_memory(tiling, shape.kv_lora_rank, 2 * half, block_tokens, threads)
    return shared + 4 * half * weight_columns + 8 * half * (1 + block_tokens // 16 + 16)


def _portable(shape: DecodeShape, tiling: RowTiling, capability: int, limit: int) -> Candidates:
    """(rank, choice or None, bytes)"""
    threads = 256 if capability == 90 and shape.kv_lora_rank > 128 else 128
    latent = padded_latent_columns(shape.kv_lora_rank, threads)
    half = padded_rope_columns(shape.qk_rope_head_dim // 2)
    for block in (64,) if capability == 90 else (64, 32):
        for variant, columns in (("resident", latent), ("streamed", 64)):
            used = portable_shared_memory(tiling, shape, block, threads, columns)
            registers = ((latent + 2 * block) * tiling.rows + 2 * block * half) // threads
            choice = LatentChoice(
                "latent_portable", tiling, block, 1, 0, threads, threads // 128, 1,
                f"latent_portable: {tiling.num_tiles} tile(s) of {tiling.rows} rows, {block} tokens a step, W_KR "
                f"{variant}, {used} bytes of shared memory",
                variant,
            )  # fmt: skip
            rank = (2, tiling.num_tiles, variant == "streamed", -block, tiling.rows)
            yield rank, choice if used <= limit and registers <= 160 else None, used


def key_blocks(tiling: RowTiling, qk_rope_head_dim: int) -> RopeBlocks:
    """Rotary keys of ``latent_ws``: one block of all rows, a chunk from each warpgroup that makes keys."""
    chunks = -(-qk_rope_head_dim // KEY_TILE)
    return RopeBlocks(1, tiling.rows, chunks * KEY_TILE, chunks, KEY_TILE)


def key_steps(kv_lora_rank: int) -> int:
    """Products of depth 16 between W_KR and a tile; 4 registers of W_KR each."""
    return -(-kv_lora_rank // 16)


def _registers(
    columns: int,
    qk_rope_head_dim: int,
    tiling: RowTiling,
    warpgroups: int,
    resident: int,
    held: int = 0,
    lean: int = 0,
    streamers: int = 1,
) -> tuple[int, int, int] | None:
    """Registers of a thread that computes (and holds ``held`` more numbers of the scores), makes keys of so many
    columns of the latent, and streams (in one of ``streamers`` warpgroups); None if they are not enough. ``lean``:
    fewer for computing and streaming."""
    makers = -(-qk_rope_head_dim // KEY_TILE)
    roles = warpgroups + makers + streamers
    launched = 65536 // (resident * roles * 128) // 8 * 8
    key = max(launched, -(-(4 * key_steps(columns) + KEY_OVERHEAD) // 8) * 8)
    streaming = STREAMING_REGISTERS - min(lean, 8)
    computing = min(240, (launched * roles - streamers * streaming - makers * key) // warpgroups // 8 * 8)
    latent = padded_latent_columns(columns, 128)
    needed = (latent + 2 * 64) * tiling.rows // warpgroups // 128 + held + CONSUMER_OVERHEAD - lean
    if streamers > 1:  # who widens codes takes what is left over
        spare = launched * roles - warpgroups * computing - makers * key - streamers * streaming
        streaming = min(launched, streaming + max(0, spare) // streamers // 8 * 8)
    return (computing, key, streaming) if computing >= max(launched, needed) and key <= 240 else None


def _registers_of(
    shape: DecodeShape, tiling: RowTiling, warpgroups: int, resident: int, lean: int, streamers: int = 1
) -> tuple[int, int, int] | None:
    """Those of :func:`_registers` for all columns; where they are not enough, ``lean`` ones if a tile is one load:
    several addresses at a time take their registers."""
    call = (shape.kv_lora_rank, shape.qk_rope_head_dim, tiling, warpgroups, resident)
    registers = _registers(*call, streamers=streamers)
    if registers is None and lean and shape.page_size >= 64 and shape.seqlen_q == 1:
        registers = _registers(*call, lean=lean, streamers=streamers)
    return registers


def _ws(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """(rank, choice or None, bytes); few tiles first (each reads the cache again), then bytes in flight."""
    latent, blocks = padded_latent_columns(shape.kv_lora_rank, 128), key_blocks(tiling, shape.qk_rope_head_dim)
    makers = blocks.chunks_per_block
    sizes = product((1, 2) if tiling.rows == 64 else (1,), (2, 1), (6, 4, 3, 2), (3 * makers, 2 * makers))
    for warpgroups, resident, num_stages, rope_stages in sizes:
        used = swap_ab_ws_shared_memory(tiling, blocks, shape.kv_lora_rank, num_stages, rope_stages)
        registers = _registers_of(shape, tiling, warpgroups, resident, LEAN if resident > 1 else 0)
        fits = registers is not None and resident * (used + 1024) <= limit + 1024
        choice = LatentChoice(
            "latent_ws", tiling, 64, num_stages, rope_stages, 128 * (warpgroups + makers + 1), warpgroups, resident,
            f"latent_ws: {tiling.num_tiles} tile(s) of {tiling.rows} rows, {warpgroups} warpgroup(s) compute, {makers} "
            f"make keys, {num_stages} latent and {rope_stages} rope stages, {resident} CTA(s) a multiprocessor, {used} "
            "bytes of shared memory each",
            registers=registers or (0, 0, 0),
        )  # fmt: skip
        in_flight = min(num_stages * latent, 2048 // resident)
        rank = (0, tiling.num_tiles, tiling.rows, -resident * in_flight, -resident, warpgroups, rope_stages)
        yield rank, choice if fits else None, used


def _fp8(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """Same as ``latent_ws``; few tiles first, then two tiles and pieces of the next two, then what is in flight."""
    latent, blocks = padded_latent_columns(shape.kv_lora_rank, 128), key_blocks(tiling, shape.qk_rope_head_dim)
    makers, pieces = blocks.chunks_per_block, -(-latent // CODE_PANEL)
    pages = max(1, 64 // shape.page_size)
    piece = 64 * CODE_PANEL + pages * max(SCALE_BYTES, 256 // pages)
    rope_stages = 2 * makers
    sizes = product((1, 2) if tiling.rows == 64 else (1,), (3, 2), range(12, 1, -1))
    for warpgroups, num_stages, code_stages in sizes:
        used = swap_ab_ws_shared_memory(tiling, blocks, shape.kv_lora_rank, num_stages, rope_stages)
        used += code_stages * piece + num_stages * 3 * 64 * 4
        registers = _registers_of(shape, tiling, warpgroups, 1, 8, streamers=2)  # two CTAs: not tried
        choice = LatentChoice(
            "latent_fp8", tiling, 64, num_stages, rope_stages, 128 * (warpgroups + makers + 2), warpgroups, 1,
            f"latent_fp8: {tiling.num_tiles} tile(s) of {tiling.rows} rows, {warpgroups} warpgroup(s) compute, "
            f"{makers} make keys, {num_stages} latent and {rope_stages} rope stages, {code_stages} pieces of "
            f"{CODE_PANEL} codes, {used} bytes of shared memory",
            registers=registers or (0, 0, 0),
            code_stages=code_stages,
        )  # fmt: skip
        in_flight = min(code_stages, 8, 4 * pieces)
        rank = (tiling.num_tiles, tiling.rows, -in_flight, warpgroups, -num_stages, code_stages)
        yield rank, choice if used <= limit and registers is not None else None, used


def _cluster(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """Same as ``latent_ws``; a ring of 1.5 to 4 tiles."""
    cut, blocks = halve(tiling, shape.kv_lora_rank, 8), key_blocks(tiling, shape.qk_rope_head_dim)
    makers, warpgroups = blocks.chunks_per_block, 2 if tiling.rows == 64 else 1
    held = 64 * tiling.rows // warpgroups // 128
    registers = _registers(cut.columns, shape.qk_rope_head_dim, tiling, warpgroups, 1, held)
    for halves, rope_stages in product((8, 6, 5, 4, 3), (3 * makers, 2 * makers)):
        num_stages = max(cut.units + 1, halves * cut.units // 2)
        used = cluster_shared_memory(tiling, cut, num_stages, rope_stages, (makers * KEY_TILE, KEY_TILE))
        choice = LatentChoice(
            "latent_cluster", tiling, 64, num_stages, rope_stages, 128 * (warpgroups + makers + 1), warpgroups, 1,
            f"latent_cluster: {tiling.num_tiles} tile(s) of {tiling.rows} rows, {CLUSTER} x {cut.columns} columns, "
            f"{warpgroups} warpgroup(s) compute, {makers} make keys, {num_stages} pieces of {cut.unit} columns and "
            f"{rope_stages} rope stages, {used} bytes of shared memory a CTA",
            cluster_size=CLUSTER,
            registers=registers or (0, 0, 0),
        )  # fmt: skip
        rank = (1, tiling.num_tiles, tiling.rows, -num_stages, -rope_stages)
        yield rank, choice if used <= limit and registers is not None else None, used


def _tilings(shape: DecodeShape) -> dict[RowTiling, None]:
    return dict.fromkeys(tile_rows(shape.heads, 1, shape.seqlen_q, max_rows, 1) for max_rows in (64, 32, 16))


def _candidates(shape: DecodeShape, capability: int, limit: int) -> Candidates:
    """Two CTAs share columns only where one takes them with no tiling: halves of a key are rounded each."""
    tilings = _tilings(shape)
    alone = capability == 90 and shape.kv_lora_rank <= WIDE_LATENT
    found = [entry for tiling in tilings if alone for entry in _ws(shape, tiling, limit)]
    yield from found
    for tiling in tilings:
        if capability == 90 and not any(choice for _, choice, _ in found):
            yield from _cluster(shape, tiling, limit)
        yield from _portable(shape, tiling, capability, limit)


def list_latent_kernels(shape: DecodeShape, capability: int) -> list[LatentChoice]:
    """Every configuration that fits the device, the one that the rule chooses first.

    Raises:
        ValueError: with the numbers, if no configuration fits into the device's shared memory.
    """
    limit = shared_memory_limit(capability)
    return rank_choices(shape, capability, _candidates(shape, capability, limit))


@lru_cache(maxsize=1024)
def select_latent(shape: DecodeShape, capability: int) -> LatentChoice:
    """The kernel and tiles for ``shape``; raises ValueError as :func:`list_latent_kernels`."""
    return list_latent_kernels(shape, capability)[0]


@lru_cache(maxsize=1024)
def select_latent_fp8(shape: DecodeShape, capability: int) -> LatentChoice:
    """The kernel and tiles for ``shape`` over e4m3 latents.

    Raises:
        ValueError: with the numbers, if nothing fits into shared memory or registers; or it is no Hopper.
    """
    check_hopper(capability)
    limit = shared_memory_limit(capability)
    candidates = [entry for tiling in _tilings(shape) for entry in _fp8(shape, tiling, limit)]
    return rank_choices(shape, capability, candidates)[0]
