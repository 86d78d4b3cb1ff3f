"""Selection of the decode kernel and its tiles for a geometry, and the refusals. Arithmetic only, no TileLang."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.split_kv.choice import (
    HOPPER,
    KernelChoice,
    RowTiling,
    rank_choices,
    refusals,
    shared_memory_limit,
    tile_rows,
)

CLUSTER = 2  # CTAs that share a tile
MAX_ROPE_HALF = 128  # rotary columns that a CTA keeps of a tile


@dataclass(frozen=True)
class Halves:
    """CTA ``h`` of a cluster owns latent columns from ``h * columns`` on and rotary columns from ``h * rope_own`` on.

    Attributes:
        units: pieces that a tile's columns are streamed in.
        unit: columns of a piece.
        rope_own: rotary columns of a CTA, a multiple of 8.
        rope_columns: as many in shared memory.
    """

    units: int
    unit: int
    rope_own: int
    rope_columns: int

    @property
    def columns(self) -> int:
        """Latent columns of a CTA, a multiple of 64; what lies behind d_c is zero."""
        return self.units * self.unit


def halve(tiling: RowTiling, kv_lora_rank: int, qk_rope_head_dim: int) -> Halves:
    """The halves of a tile. Pieces are as wide as lets both CTAs read the same, within 64 columns."""
    panels = -(-kv_lora_rank // (64 * CLUSTER))
    unit = 128 if panels % 2 == 0 else 64
    own = -(-(tiling.groups_per_tile * qk_rope_head_dim) // (8 * CLUSTER)) * 8
    padded = 16
    while padded < own:
        padded *= 2
    return Halves(panels * 64 // unit, unit, own, padded)


def cluster_shared_memory(
    tiling: RowTiling, cut: Halves, num_stages: int, rope_stages: int, rope: tuple[int, int] | None = None
) -> int:
    """Bytes of shared memory that a CTA allocates (16-bit elements), with 1 KiB for alignment and barriers; ``rope``:
    rotary columns of the queries, and of keys in a slot of their ring, where they are not ``cut``'s."""
    of_queries, of_keys = rope or (cut.rope_columns, cut.rope_columns)
    queries = tiling.rows * (cut.columns + of_queries)
    rings = 64 * (num_stages * cut.unit + rope_stages * of_keys)
    scores = 2 * 64 * tiling.rows * 4  # of the other CTA, for this tile and the next
    return 2 * (queries + rings + 64 * tiling.rows) + scores + 16 * tiling.rows + 1024


MAX_LATENT = 1024
WIDE_LATENT = 512  # wider ones are what two CTAs share
HEADS_ON_M_THREADS = 512  # its latent is padded to four panels of 64 columns, one piece for each warpgroup's share
MAX_ROPE_SHARED = 256
MAX_ROPE_PER_HEAD = 128
MAX_ROPE_WIDTH = 2048


@dataclass(frozen=True)
class DecodeShape:
    """The static part of a decode call: what one compilation is for.

    Attributes: ``heads`` H, ``num_rope_heads`` G, ``kv_lora_rank`` d_c, ``qk_rope_head_dim`` d_r, ``page_size`` tokens,
    ``seqlen_q`` one of 1, 2, 4, 8 (the call's S_q rounded up), ``dtype`` "bfloat16" or "float16".
    """

    heads: int
    num_rope_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    seqlen_q: int
    dtype: str

    @classmethod
    def of(cls, geometry: MLAGeometry, page_size: int, dtype: str, seqlen_q: int = 1) -> DecodeShape:
        """Shape of a call over a layer of ``geometry``; ``seqlen_q`` is the call's own."""
        return cls(
            geometry.num_attention_heads,
            geometry.num_rope_heads,
            geometry.kv_lora_rank,
            geometry.qk_rope_head_dim,
            page_size,
            seqlen_q,
            dtype,
        )


def refusal(shape: DecodeShape) -> str | None:
    """Why no TileLang kernel serves a shape on any GPU, or None."""
    rope_limit = MAX_ROPE_SHARED if shape.num_rope_heads == 1 else MAX_ROPE_PER_HEAD
    rope_width = shape.num_rope_heads * shape.qk_rope_head_dim
    checks = (
        *refusals(shape),
        (
            shape.kv_lora_rank % 8 == 0 and shape.kv_lora_rank <= MAX_LATENT,
            f"kv_lora_rank is {shape.kv_lora_rank}; TileLang kernels take multiples of 8 up to {MAX_LATENT}",
        ),
        (
            shape.qk_rope_head_dim % 8 == 0 and shape.qk_rope_head_dim <= rope_limit,
            f"qk_rope_head_dim is {shape.qk_rope_head_dim}; TileLang kernels take multiples of 8 up to {rope_limit}"
            f" for num_rope_heads={shape.num_rope_heads}",
        ),
        (
            rope_width <= MAX_ROPE_WIDTH,
            f"num_rope_heads * qk_rope_head_dim is {rope_width}; TileLang kernels take at most {MAX_ROPE_WIDTH}",
        ),
    )
    return next((why for fits, why in checks if not fits), None)


def padded_rope_columns(columns: int) -> int:
    """Shared-memory width of ``columns`` rope columns: a power of two from 16 to 64, then multiples of 64."""
    width = 16
    while width < min(columns, 64):
        width *= 2
    return width if columns <= 64 else -(-columns // 64) * 64


def padded_latent_columns(kv_lora_rank: int, threads: int) -> int:
    """Shared-memory width of the latent: every warpgroup owns whole 64-row pieces of the transposed output."""
    piece = 64 * max(1, threads // 128)
    return -(-kv_lora_rank // piece) * piece


def swap_ab_shared_memory(
    tiling: RowTiling, kv_lora_rank: int, qk_rope_head_dim: int, block_tokens: int, threads: int
) -> int:
    """Bytes of shared memory that ``swap_ab`` allocates for 16-bit elements, with 2 KiB for alignment and barriers."""
    latent = padded_latent_columns(kv_lora_rank, threads)
    rope = padded_rope_columns(tiling.groups_per_tile * qk_rope_head_dim)
    queries = tiling.rows * (latent + rope) * 2
    tiles = block_tokens * (latent + rope) * 2
    weights = block_tokens * tiling.rows * 2 + block_tokens // 16 * tiling.rows * 4
    return queries + tiles + weights + 2048


@dataclass(frozen=True)
class RopeBlocks:
    """Products that compute a tile's rope scores in ``swap_ab_ws``, with zeros where head and rope head differ.

    Attributes: ``num_blocks`` of ``block_rows`` rows and ``block_columns`` columns, streamed as ``chunks_per_block``
    chunks of ``chunk_columns``.
    """

    num_blocks: int
    block_rows: int
    block_columns: int
    chunks_per_block: int
    chunk_columns: int


def rope_blocks(tiling: RowTiling, qk_rope_head_dim: int) -> RopeBlocks:
    """Products for the rope scores of a tile: one of all rows with all columns, or, beyond 128 columns, one per octet.

    An octet is 8 rows (the least N of wgmma) with the columns of their own rope heads only; it needs 1, 2, 4 or 8 heads
    a rope head and one token a tile.
    """
    columns, group = tiling.groups_per_tile * qk_rope_head_dim, tiling.heads_per_group

    def cut(num_blocks: int, rows: int, columns: int) -> RopeBlocks:
        chunk = padded_rope_columns(columns) if columns <= 64 else 128 if columns % 128 == 0 else 64
        return RopeBlocks(num_blocks, rows, columns, -(-columns // chunk), chunk)

    if columns > 128 and tiling.tokens_per_tile == 1 and tiling.tiles_per_group == 1 and group in (1, 2, 4, 8):
        return cut(-(-tiling.heads_per_tile // 8), 8, 8 // group * qk_rope_head_dim)
    return cut(1, tiling.rows, columns)


def takes_turns(tiling: RowTiling, rope: RopeBlocks, rope_stages: int) -> bool:
    """True where two computing warpgroups of ``swap_ab_ws`` may take turns at their score products.

    Where both read the same chunks, the ring has to hold all of a tile's: the first one would wait for a chunk whose
    place the second one frees only in its turn, that is, for ever.
    """
    return rope.block_rows < tiling.rows or rope.num_blocks * rope.chunks_per_block <= rope_stages


def swap_ab_ws_shared_memory(
    tiling: RowTiling, rope: RopeBlocks, kv_lora_rank: int, num_stages: int, rope_stages: int
) -> int:
    """Bytes of shared memory that ``swap_ab_ws`` allocates (16-bit elements), with 1 KiB for alignment and barriers."""
    latent = padded_latent_columns(kv_lora_rank, 128)
    queries = tiling.rows * latent + rope.num_blocks * rope.block_rows * rope.chunks_per_block * rope.chunk_columns
    rings = num_stages * 64 * latent + rope_stages * 64 * rope.chunk_columns
    return 2 * (queries + rings + 64 * tiling.rows) + 16 * tiling.rows + 1024


def heads_on_m_shared_memory(tiling: RowTiling, kv_lora_rank: int, qk_rope_head_dim: int, num_stages: int) -> int:
    """Bytes of shared memory that ``heads_on_m`` allocates (16-bit elements), with 1 KiB for alignment and barriers."""
    latent = padded_latent_columns(kv_lora_rank, HEADS_ON_M_THREADS)
    rope = padded_rope_columns(tiling.groups_per_tile * qk_rope_head_dim)
    return 2 * ((tiling.rows + num_stages * 64) * (latent + rope) + tiling.rows * 64) + 12 * tiling.rows + 1024


def _accumulators(latent_columns: int, rows: int, block: int, threads: int) -> int:
    """Registers a thread needs for the output, the scores and the denominators."""
    return (latent_columns + 2 * block) * rows // threads


def _swap_ab_ws(shape: DecodeShape, tiling: RowTiling, limit: int):
    """(rank, choice or None, bytes); few tiles first (each reads the cache again), then CTAs, then bytes in flight."""
    latent = padded_latent_columns(shape.kv_lora_rank, 128)
    rope = rope_blocks(tiling, shape.qk_rope_head_dim)
    for warpgroups, num_stages, rope_stages in product((1, 2) if tiling.rows == 64 else (1,), (4, 3, 2), (6, 4, 3, 2)):
        used = swap_ab_ws_shared_memory(tiling, rope, shape.kv_lora_rank, num_stages, rope_stages)
        registers = _accumulators(latent, tiling.rows // warpgroups, 64, 128)
        fits = used <= limit and registers <= 160
        resident = 2 if 2 * (used + 1024) <= limit + 1024 and registers <= 120 and warpgroups == 1 else 1
        in_flight = min(num_stages * latent + rope_stages * rope.chunk_columns, 2048 // resident)
        choice = KernelChoice(
            "swap_ab_ws", tiling, 64, num_stages, rope_stages, 128 * (warpgroups + 1), warpgroups, resident,
            f"swap_ab_ws: {tiling.num_tiles} tile(s) of {tiling.rows} rows, {warpgroups} warpgroup(s), "
            f"{num_stages} latent and {rope_stages} rope stages, rope scores by {rope.num_blocks} product(s), "
            f"{resident} CTA(s) a multiprocessor, {used} bytes of shared memory each",
        )  # fmt: skip
        rank = (0, tiling.num_tiles, tiling.rows, -resident * in_flight, -resident, warpgroups)
        yield rank, choice if fits else None, used


def _swap_ab_cluster(shape: DecodeShape, tiling: RowTiling, limit: int):
    """Same as ``swap_ab_ws``, which comes first where both take as many tiles; a ring of 1.5 to 3 tiles."""
    cut = halve(tiling, shape.kv_lora_rank, shape.qk_rope_head_dim)
    if shape.kv_lora_rank <= WIDE_LATENT or cut.rope_columns > MAX_ROPE_HALF:
        return
    warpgroups = 2 if tiling.rows == 64 else 1
    for halves, rope_stages in product((6, 5, 4, 3), (3, 2)):
        num_stages = halves * cut.units // 2
        used = cluster_shared_memory(tiling, cut, num_stages, rope_stages)
        choice = KernelChoice(
            "swap_ab_cluster", tiling, 64, num_stages, rope_stages, 128 * (warpgroups + 1), warpgroups, 1,
            f"swap_ab_cluster: {tiling.num_tiles} tile(s) of {tiling.rows} rows, {CLUSTER} x {cut.columns} columns, "
            f"{warpgroups} warpgroup(s), {num_stages} pieces of {cut.unit} columns and {rope_stages} rope stages, "
            f"{used} bytes of shared memory a CTA",
            cluster_size=CLUSTER,
        )  # fmt: skip
        rank = (0, tiling.num_tiles, tiling.rows, 0, -num_stages, -rope_stages)
        yield rank, choice if used <= limit else None, used


def _heads_on_m(shape: DecodeShape, tiling: RowTiling, limit: int):
    """For full tiles of 64 rows only: below, most of its work would be on padding.

    ``lazy`` with two tiles and more, which is where the matrix instructions bind and not the memory: on an H200 it took
    6.1 % less time than ``plain`` at H=128 d_c=512 d_r=64 128 x 8192, 1.7 at 16 x 8192, 0.5 at 1 x 8192.
    """
    columns = tiling.groups_per_tile * shape.qk_rope_head_dim
    if tiling.rows != 64 or columns > 64:
        return
    variant = "lazy" if tiling.num_tiles > 1 else "plain"
    # The latent is padded to 256 columns; where others pad to fewer, this kernel comes after them.
    padded = padded_latent_columns(shape.kv_lora_rank, HEADS_ON_M_THREADS) > shape.kv_lora_rank + 63
    for num_stages in (3, 2):
        used = heads_on_m_shared_memory(tiling, shape.kv_lora_rank, shape.qk_rope_head_dim, num_stages)
        choice = KernelChoice(
            "heads_on_m", tiling, 64, num_stages, num_stages, HEADS_ON_M_THREADS, 3, 1,
            f"heads_on_m ({variant}): {tiling.num_tiles} tile(s) of 64 rows, {num_stages} stages, "
            f"{used} bytes of shared memory",
            variant,
        )  # fmt: skip
        yield (1 if padded else -1, tiling.num_tiles, -num_stages), choice if used <= limit else None, used


def _swap_ab(shape: DecodeShape, tiling: RowTiling, capability: int, limit: int):
    threads = 256 if capability == 90 and shape.kv_lora_rank > 128 else 128
    latent = padded_latent_columns(shape.kv_lora_rank, threads)
    for block in (64,) if capability == 90 else (64, 32):
        used = swap_ab_shared_memory(tiling, shape.kv_lora_rank, shape.qk_rope_head_dim, block, threads)
        fits = used <= limit and _accumulators(latent, tiling.rows, block, threads) <= 144
        choice = KernelChoice(
            "swap_ab", tiling, block, 1, 0, threads, threads // 128, 1,
            f"swap_ab: {tiling.num_tiles} tile(s) of {tiling.rows} rows, {block} tokens a step, "
            f"{used} bytes of shared memory",
        )  # fmt: skip
        yield (2, tiling.num_tiles, -block, tiling.rows), choice if fits else None, used


def _candidates(shape: DecodeShape, capability: int, limit: int):
    """(rank, choice or None, bytes) of every configuration; smaller ranks are expected to be faster."""
    tilings = dict.fromkeys(
        tile_rows(shape.heads, shape.num_rope_heads, shape.seqlen_q, max_rows, max_groups)
        for max_rows in (64, 32, 16)
        for max_groups in (128, 64, 32, 16, 8, 4, 2, 1)
    )
    for tiling in tilings:
        if capability == 90:
            yield from _swap_ab_ws(shape, tiling, limit)
            yield from _swap_ab_cluster(shape, tiling, limit)
            yield from _heads_on_m(shape, tiling, limit)
        yield from _swap_ab(shape, tiling, capability, limit)


def list_kernels(shape: DecodeShape, capability: int) -> list[KernelChoice]:
    """Every configuration that fits the device, the one that the rule would choose first.

    Raises:
        ValueError: with the numbers, if no configuration fits into the device's shared memory.
    """
    limit = shared_memory_limit(capability)
    return rank_choices(shape, capability, _candidates(shape, capability, limit))


@lru_cache(maxsize=4096)
def select_kernel(shape: DecodeShape, capability: int) -> KernelChoice:
    """The kernel and tiles for ``shape`` on a compute capability (90 for Hopper); raises as :func:`list_kernels`."""
    return list_kernels(shape, capability)[0]


THREADS = 384  # two warpgroups that compute, one that loads
TILE_BYTES = 64 * 128  # one panel: 64 tokens of 128 bytes
MAX_CODES = 512  # of a token
SCALE_ALIGNMENT = 128  # bytes: where the scales of each page of a tile start


def column_of_code(d):
    """Where in its row a query column must stand to meet latent column ``d``; ``d`` may be an expression.

    ``ldmatrix`` gives a thread four neighbouring codes of a row, and a 16-bit register operand of depth 16 has four
    columns of a thread at 2t, 2t + 1, 2t + 8 and 2t + 9 (PTX ISA, wgmma register fragments). So within each 16 columns
    the codes 4t ... 4t + 3 take those places.
    """
    return d // 16 * 16 + d % 16 // 4 * 2 + d % 4 // 2 * 8 + d % 2


def shared_memory(tiling: RowTiling, kv_lora_rank: int, qk_rope_head_dim: int, page_size: int, num_stages: int) -> int:
    """Bytes of shared memory that the kernel allocates, with the 1 KiB before its tiles that barriers are in."""
    panels = -(-kv_lora_rank // 128)
    rope_panels = -(-(tiling.groups_per_tile * qk_rope_head_dim) // 64)
    scales = max(1, 64 // page_size) * max(SCALE_ALIGNMENT, min(64, page_size) * 4)
    rings = 2 * num_stages * ((panels + rope_panels) * TILE_BYTES + scales)
    queries = tiling.rows * 128 * (2 * panels + rope_panels)
    weights_and_exchange = 2 * tiling.rows * 128 + tiling.rows * 512
    return rings + queries + weights_and_exchange + 44 * tiling.rows + 1024


def refusal_codes(shape: DecodeShape) -> str | None:
    """Why no kernel over e4m3 latents serves a shape on any GPU, or None."""
    if shape.kv_lora_rank % 16:
        return f"kv_lora_rank is {shape.kv_lora_rank}; rows of e4m3 numbers must be multiples of 16 bytes"
    if shape.kv_lora_rank > MAX_CODES:
        return f"kv_lora_rank is {shape.kv_lora_rank}; kernels over e4m3 latents take at most {MAX_CODES}"
    return None


def refusal_fp8(shape: DecodeShape) -> str | None:
    """Why the kernel serves a shape on no GPU, or None."""
    return refusal_codes(shape) or refusal(shape)


def check_hopper(capability: int) -> None:
    """Raise ValueError for another compute capability: kernels over e4m3 latents multiply with register operands."""
    if capability != HOPPER:
        raise ValueError(
            f"the GPU has compute capability {capability / 10}; kernels over e4m3 latents need {HOPPER / 10} (Hopper)"
        )


@lru_cache(maxsize=1024)
def select_fp8(shape: DecodeShape, capability: int = HOPPER) -> KernelChoice:
    """Fewest tiles of rows (each reads the cache again), then most stages.

    Raises:
        ValueError: with the numbers, if nothing fits into shared memory; or it is no Hopper.
    """
    check_hopper(capability)
    limit, candidates = shared_memory_limit(capability), []
    for max_rows, max_groups in product((32, 16), (128, 64, 32, 16, 8, 4, 2, 1)):
        tiling = tile_rows(shape.heads, shape.num_rope_heads, shape.seqlen_q, max_rows, max_groups, packed=True)
        tiling = replace(tiling, rows=max(16, tiling.rows))  # weights are stored in pairs of 8 rows
        for num_stages in (4, 3, 2, 1):
            used = shared_memory(tiling, shape.kv_lora_rank, shape.qk_rope_head_dim, shape.page_size, num_stages)
            reason = (
                f"{tiling.num_tiles} tile(s) of {tiling.rows} rows, 2 x {num_stages} stages, {used} bytes of shared"
                " memory"
            )
            single = num_stages == 1  # nothing is read ahead
            choice = KernelChoice("fp8", tiling, num_stages=num_stages, threads=THREADS, warpgroups=2, reason=reason)
            rank = (single, tiling.num_tiles, -num_stages, tiling.rows)
            candidates.append((rank, choice if used <= limit else None, used))
    return rank_choices(shape, capability, candidates)[0]
