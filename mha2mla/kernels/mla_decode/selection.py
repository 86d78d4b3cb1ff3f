"""Selection of a decode kernel and its tiles for a shape, and refusals. Arithmetic only, no TileLang.

Five ops have kernels: over stored rotary keys or over the latent alone, each of 16-bit latents or of e4m3 codes; and
over 16-bit latents with rotary keys in int8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.split_kv.choice import (
    HOPPER,
    Candidates,
    KernelChoice,
    RowTiling,
    candidate,
    first_refusal,
    rank_choices,
    refusals,
    shared_memory_limit,
    tile_rows,
)

MAX_LATENT = 1024
WIDE_LATENT = 512  # wider ones are what two CTAs share
MAX_ROPE_SHARED = 256
MAX_ROPE_PER_HEAD = 128
MAX_ROPE_WIDTH = 2048
MAX_ROPE_ALONE = 128  # d_r of a cache of the latent alone
MAX_CODES = 512  # of a token
CLUSTER = 2  # CTAs that share a tile
PIECES = {"": 448, "narrow": 128}  # by variant: most columns of a CTA of a cluster that are loaded at once
ROPE_CHUNK = 128  # rotary columns of a tile that a CTA of a cluster loads at a time
MAX_ROPE_HALF = 512  # and that it owns
HEADS_ON_M_THREADS = 512  # its latent is padded to four panels of 64 columns, one piece for each warpgroup's share
FP8_THREADS = 384  # two warpgroups that compute, one that loads
PANEL_BYTES = 64 * 128  # one panel: 64 tokens of 128 bytes
CODE_PANEL = 128  # 8-bit codes of a token in a piece of a tile: a row of swizzled shared memory
SCALE_BYTES = 128  # where the scales of each page of a tile start
KEY_TILE = 64  # rows of W_KR that a warpgroup of ``latent_ws`` holds: the M of one wgmma
KEY_OVERHEAD = 72  # registers of such a thread beside W_KR: 32 sums, and whatever else
STREAMING_REGISTERS = 40
WIDE_STREAMING_REGISTERS = 56  # where they can be had, for the addresses of pieces of 320 columns and more
LEAN = 16  # registers fewer of a computing thread, and 8 of a streaming one, to have two CTAs on a multiprocessor
CONSUMER_OVERHEAD = 60  # of a computing thread, beside its accumulators


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
        g = geometry
        sizes = g.num_attention_heads, g.num_rope_heads, g.kv_lora_rank, g.qk_rope_head_dim
        return cls(*sizes, page_size, seqlen_q, dtype)


def refusal(
    shape: DecodeShape, *, has_rope_cache: bool = True, codes: bool = False, key_codes: bool = False
) -> str | None:
    """Why no TileLang kernel serves a shape on any GPU, or None. ``has_rope_cache``: rotary keys are cached, not made;
    ``codes``: latents are e4m3; ``key_codes``: cached rotary keys are int8."""
    width, rope, groups = shape.kv_lora_rank, shape.qk_rope_head_dim, shape.num_rope_heads
    multiples, makes_keys = "TileLang kernels take multiples of 8 up to", "TileLang kernels that make rotary keys"
    rope_limit = MAX_ROPE_SHARED if groups == 1 else MAX_ROPE_PER_HEAD
    d_c, d_r = f"kv_lora_rank is {width}", f"qk_rope_head_dim is {rope}"
    columns = f"num_rope_heads * qk_rope_head_dim is {groups * rope}"
    own = (
        (not codes or width % 16 == 0, d_c, "rows of e4m3 numbers must be multiples of 16 bytes"),
        (not codes or width <= MAX_CODES, d_c, f"kernels over e4m3 latents take at most {MAX_CODES}"),
        (has_rope_cache or width <= MAX_LATENT, d_c, f"{makes_keys} take at most {MAX_LATENT}"),
        (has_rope_cache or rope <= MAX_ROPE_ALONE, d_r, f"{makes_keys} take at most {MAX_ROPE_ALONE}"),
        (not key_codes or rope % 16 == 0, d_r, "rows of int8 keys must be multiples of 16 bytes"),
        (not key_codes or rope <= MAX_ROPE_ALONE, d_r, f"kernels over int8 keys take at most {MAX_ROPE_ALONE}"),
    )
    sizes = (
        (width % 8 == 0 and 0 < width <= MAX_LATENT, d_c, f"{multiples} {MAX_LATENT}"),
        (rope % 8 == 0 and 0 < rope <= rope_limit, d_r, f"{multiples} {rope_limit} for num_rope_heads={groups}"),
        (groups * rope <= MAX_ROPE_WIDTH, columns, f"TileLang kernels take at most {MAX_ROPE_WIDTH}"),
    )
    return first_refusal((*own, *refusals(shape), *sizes))


def padded_rope_columns(columns: int) -> int:
    """Shared-memory width of ``columns`` rope columns: a power of two from 16 to 64, then multiples of 64."""
    return max(16, 1 << (columns - 1).bit_length()) if columns <= 64 else -(-columns // 64) * 64


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
class Halves:
    """CTA ``h`` of a cluster owns latent columns from ``h * columns`` on and rotary columns from ``h * rope_own`` on.

    Attributes:
        units: pieces that a tile's columns are streamed in.
        unit: columns of a piece.
        rope_own: rotary columns of a CTA, a multiple of 8.
        rope_columns: as many in shared memory, in one chunk or in several of ``ROPE_CHUNK``.
    """

    units: int
    unit: int
    rope_own: int
    rope_columns: int

    @property
    def rope_chunk(self) -> int:
        """Rotary columns that are loaded at a time."""
        return min(self.rope_columns, ROPE_CHUNK)

    @property
    def columns(self) -> int:
        """Latent columns of a CTA, a multiple of 64; what lies behind d_c is zero."""
        return self.units * self.unit


def halve(tiling: RowTiling, kv_lora_rank: int, qk_rope_head_dim: int, variant: str = "") -> Halves:
    """The halves of a tile. Pieces are as wide as lets both CTAs read the same, within 64 columns; ``variant``: up to
    which width, one of ``PIECES``."""
    panels = -(-kv_lora_rank // (64 * CLUSTER))
    unit = 64 * max(n for n in range(1, PIECES[variant] // 64 + 1) if panels % n == 0)
    own = -(-(tiling.groups_per_tile * qk_rope_head_dim) // (8 * CLUSTER)) * 8
    chunk = min(ROPE_CHUNK, max(16, 1 << (own - 1).bit_length()))
    return Halves(panels * 64 // unit, unit, own, -(-own // chunk) * chunk)


def cluster_shared_memory(
    tiling: RowTiling, cut: Halves, num_stages: int, rope_stages: int, rope: tuple[int, int] | None = None
) -> int:
    """Bytes of shared memory that a CTA allocates (16-bit elements), with 1 KiB for alignment and barriers; ``rope``:
    rotary columns of the queries, and of keys in a slot of their ring, where they are not ``cut``'s."""
    of_queries, of_keys = rope or (cut.rope_columns, cut.rope_chunk)
    queries = tiling.rows * (cut.columns + of_queries)
    rings = 64 * (num_stages * cut.unit + rope_stages * of_keys)
    scores = 2 * 64 * tiling.rows * 4  # of the other CTA, for this tile and the next
    return 2 * (queries + rings + 64 * tiling.rows) + scores + 16 * tiling.rows + 1024


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


def column_of_code(d):
    """Position in its row of the query column for latent column ``d``; ``d`` may be an expression.

    ``ldmatrix`` gives a thread four neighbouring codes of a row, and a 16-bit register operand of depth 16 has four
    columns of a thread at 2t, 2t + 1, 2t + 8 and 2t + 9 (PTX ISA, wgmma register fragments). So within each 16 columns
    the codes 4t ... 4t + 3 take those places.
    """
    return d // 16 * 16 + d % 16 // 4 * 2 + d % 4 // 2 * 8 + d % 2


def accumulators(latent_columns: int, rows: int, block: int, threads: int) -> int:
    """Registers a thread needs for the output, the scores and the denominators."""
    return (latent_columns + 2 * block) * rows // threads


def tilings(shape: DecodeShape, rows: tuple[int, ...], several_groups: bool, packed: bool = False) -> list[RowTiling]:
    """Tiles of at most so many ``rows``, each once; ``several_groups``: of one to all rope groups, else of one."""
    groups = (128, 64, 32, 16, 8, 4, 2, 1) if several_groups else (1,)
    sizes = shape.heads, shape.num_rope_heads, shape.seqlen_q
    return list(dict.fromkeys(tile_rows(*sizes, *most, packed=packed) for most in product(rows, groups)))


def portable_choices(
    shape: DecodeShape, tiling: RowTiling, capability: int, limit: int, kernel: str = "swap_ab"
) -> Candidates:
    """``swap_ab``; ``codes_portable``, whose tiles threads dequantise from global memory; and kernels that make keys,
    ``latent_portable``, whose W_KR is resident or streamed, and ``int8_keys_portable``, which has no W_KR."""
    threads = 256 if capability == 90 and shape.kv_lora_rank > 128 else 128
    latent = padded_latent_columns(shape.kv_lora_rank, threads)
    rope, half, most_registers = shape.qk_rope_head_dim, 0, 144
    if kernel in ("latent_portable", "int8_keys_portable"):
        half = padded_rope_columns(rope // 2)
        rope, most_registers = 2 * half, 160
    variants = {"resident": latent, "streamed": 64} if kernel == "latent_portable" else {"": 0}  # columns of W_KR
    for block, (variant, columns) in product((64,) if capability == 90 else (64, 32), variants.items()):
        used = swap_ab_shared_memory(tiling, shape.kv_lora_rank, rope, block, threads)
        used += 4 * half * columns + 8 * half * (1 + block // 16 + 16)
        registers = accumulators(latent, tiling.rows, block, threads) + 2 * block * half // threads
        yield candidate(
            (2, tiling.num_tiles, variant == "streamed", -block, tiling.rows),
            limit, kernel, tiling, used, f"{block} tokens a step{', W_KR ' * bool(variant)}{variant}",
            fits=registers <= most_registers, block_tokens=block, threads=threads, warpgroups=threads // 128,
            variant=variant,
        )  # fmt: skip


def _swap_ab_ws(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """Few tiles first (each reads the cache again), then CTAs, then bytes in flight."""
    latent = padded_latent_columns(shape.kv_lora_rank, 128)
    rope = rope_blocks(tiling, shape.qk_rope_head_dim)
    for warpgroups, num_stages, rope_stages in product((1, 2) if tiling.rows == 64 else (1,), (4, 3, 2), (6, 4, 3, 2)):
        used = swap_ab_ws_shared_memory(tiling, rope, shape.kv_lora_rank, num_stages, rope_stages)
        registers = accumulators(latent, tiling.rows // warpgroups, 64, 128)
        resident = 2 if 2 * (used + 1024) <= limit + 1024 and registers <= 120 and warpgroups == 1 else 1
        in_flight = min(num_stages * latent + rope_stages * rope.chunk_columns, 2048 // resident)
        yield candidate(
            (0, tiling.num_tiles, tiling.rows, -resident * in_flight, -resident, warpgroups),
            limit, "swap_ab_ws", tiling, used,
            f"{warpgroups} warpgroup(s), {num_stages} latent and {rope_stages} rope stages, rope scores by "
            f"{rope.num_blocks} product(s), {resident} CTA(s) a multiprocessor",
            num_stages=num_stages, rope_stages=rope_stages, threads=128 * (warpgroups + 1), warpgroups=warpgroups,
            ctas_per_sm=resident, fits=registers <= 160,
        )  # fmt: skip


def _swap_ab_cluster(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """Behind ``swap_ab_ws`` where both take as many tiles, and everywhere up to 512 columns; the longest ring of 1.5 to
    3 tiles, then the widest pieces: on an H100 they took 4.2 % less time at 576 + 24 and 1.2 % less at 960 + 8 than
    ``narrow`` ones in rings of the same length."""
    warpgroups, behind = 2 if tiling.rows == 64 else 1, int(shape.kv_lora_rank <= WIDE_LATENT)
    if shape.kv_lora_rank <= WIDE_LATENT // 2:
        return
    for variant, rope_stages, halves in product(PIECES, (3, 2), (6, 5, 4, 3)):
        cut = halve(tiling, shape.kv_lora_rank, shape.qk_rope_head_dim, variant)
        if cut.rope_columns > MAX_ROPE_HALF:
            continue
        num_stages = max(cut.units + 1, halves * cut.units // 2)
        used = cluster_shared_memory(tiling, cut, num_stages, rope_stages)
        yield candidate(
            (behind, tiling.num_tiles, tiling.rows, 0, -num_stages * cut.unit, -cut.unit, -rope_stages),
            limit, "swap_ab_cluster", tiling, used,
            f"{CLUSTER} x {cut.columns} columns, {warpgroups} warpgroup(s), {num_stages} pieces of {cut.unit} columns"
            f" and {rope_stages} rope stages",
            num_stages=num_stages, rope_stages=rope_stages, threads=128 * (warpgroups + 1), warpgroups=warpgroups,
            cluster_size=CLUSTER, variant=variant,
        )  # fmt: skip


def _heads_on_m(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """For full tiles of 64 rows only: below, most of its work would be on padding. Before other kernels of as many
    tiles; its products take one rope head's columns of 64 at most, so that many rope heads would make many tiles.

    ``lazy`` with two tiles and more, which is where the matrix instructions bind and not the memory: on an H200 it took
    7.1 % less time than ``plain`` at H=128 d_c=512 d_r=64 128 x 8192, 1.7 at 16 x 8192, 0.7 at 1 x 8192.
    """
    columns = tiling.groups_per_tile * shape.qk_rope_head_dim
    if tiling.rows != 64 or columns > 64:
        return
    latent = padded_latent_columns(shape.kv_lora_rank, HEADS_ON_M_THREADS)
    # The latent is padded to 256 columns; where others pad to fewer, this kernel comes after them.
    padded, width = latent > shape.kv_lora_rank + 63, latent + padded_rope_columns(columns)
    variant = "lazy" if tiling.num_tiles > 1 else "plain"
    for num_stages in (3, 2):
        used = 2 * ((tiling.rows + num_stages * 64) * width + tiling.rows * 64) + 12 * tiling.rows + 1024
        yield candidate(
            (int(padded), tiling.num_tiles, 0, -num_stages), limit, "heads_on_m", tiling, used,
            f"{variant}, {num_stages} stages", variant=variant, num_stages=num_stages, rope_stages=num_stages,
            threads=HEADS_ON_M_THREADS, warpgroups=3,
        )  # fmt: skip


def scale_bytes(page_size: int) -> int:
    """Bytes of shared memory of a tile's scales: each of its pages has at least ``SCALE_BYTES``."""
    return max(1, 64 // page_size) * max(SCALE_BYTES, 4 * min(64, page_size))


def _fp8(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """Fewest tiles of rows first, then most stages; beside its memory the 1 KiB before its tiles that barriers are
    in."""
    tiling = replace(tiling, rows=max(16, tiling.rows))  # weights are stored in pairs of 8 rows
    panels = -(-shape.kv_lora_rank // 128)
    rope_panels = -(-(tiling.groups_per_tile * shape.qk_rope_head_dim) // 64)
    queries = tiling.rows * 128 * (2 * panels + rope_panels)
    weights_and_exchange = 2 * tiling.rows * 128 + tiling.rows * 512
    for num_stages in (4, 3, 2, 1):
        rings = 2 * num_stages * ((panels + rope_panels) * PANEL_BYTES + scale_bytes(shape.page_size))
        used = rings + queries + weights_and_exchange + 44 * tiling.rows + 1024
        yield candidate(
            (num_stages == 1, tiling.num_tiles, -num_stages, tiling.rows),  # of one stage, nothing is read ahead
            limit, "fp8", tiling, used, f"2 x {num_stages} stages", num_stages=num_stages, threads=FP8_THREADS,
            warpgroups=2,
        )  # fmt: skip


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
    streaming: int = STREAMING_REGISTERS,
    steps: int | None = None,
) -> tuple[int, int, int] | None:
    """Registers of a thread that computes (and holds ``held`` more scores), makes keys of so many
    columns of the latent, and streams (``streaming``, in one of ``streamers`` warpgroups); None if they are not enough.
    ``lean``: fewer for computing and streaming. ``steps``: products that make keys, or as many as the columns take."""
    makers = -(-qk_rope_head_dim // KEY_TILE)
    roles = warpgroups + makers + streamers
    launched = 65536 // (resident * roles * 128) // 8 * 8
    least = -(-(4 * (key_steps(columns) if steps is None else steps) + KEY_OVERHEAD) // 8) * 8
    streaming -= min(lean, 8)
    latent = padded_latent_columns(columns, 128)
    needed = (latent + 2 * 64) * tiling.rows // warpgroups // 128 + held + CONSUMER_OVERHEAD - lean
    for key in (max(launched, least), least):
        computing = min(240, (launched * roles - streamers * streaming - makers * key) // warpgroups // 8 * 8)
        if computing >= needed:
            break
    if streamers > 1:  # who widens codes takes what is left over
        spare = launched * roles - warpgroups * computing - makers * key - streamers * streaming
        streaming = min(launched, streaming + max(0, spare) // streamers // 8 * 8)
    return (computing, key, streaming) if computing >= max(launched, needed) and key <= 240 else None


def _registers_of(
    shape: DecodeShape, tiling: RowTiling, warpgroups: int, resident: int, lean: int, streamers: int = 1
) -> tuple[int, int, int] | None:
    """Registers of :func:`_registers` for all columns. If they are too few, ``lean`` ones if a tile is one load, since
    several addresses at a time take registers, too."""
    call = (shape.kv_lora_rank, shape.qk_rope_head_dim, tiling, warpgroups, resident)
    registers = _registers(*call, streamers=streamers)
    if registers is None and lean and shape.page_size >= 64 and shape.seqlen_q == 1:
        registers = _registers(*call, lean=lean, streamers=streamers)
    return registers


def _latent_ws(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """Few tiles first (each reads the cache again), then bytes in flight."""
    latent, blocks = padded_latent_columns(shape.kv_lora_rank, 128), key_blocks(tiling, shape.qk_rope_head_dim)
    makers = blocks.chunks_per_block
    sizes = product((1, 2) if tiling.rows == 64 else (1,), (2, 1), (6, 4, 3, 2), (3 * makers, 2 * makers))
    for warpgroups, resident, num_stages, rope_stages in sizes:
        used = swap_ab_ws_shared_memory(tiling, blocks, shape.kv_lora_rank, num_stages, rope_stages)
        registers = _registers_of(shape, tiling, warpgroups, resident, LEAN if resident > 1 else 0)
        in_flight = min(num_stages * latent, 2048 // resident)
        yield candidate(
            (0, tiling.num_tiles, tiling.rows, -resident * in_flight, -resident, warpgroups, rope_stages),
            limit, "latent_ws", tiling, used,
            f"{warpgroups} warpgroup(s) compute, {makers} make keys, {num_stages} latent and {rope_stages} rope stages,"
            f" {resident} CTA(s) a multiprocessor",
            num_stages=num_stages, rope_stages=rope_stages, threads=128 * (warpgroups + makers + 1),
            warpgroups=warpgroups, ctas_per_sm=resident, registers=registers,
        )  # fmt: skip


def _latent_fp8(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """Few tiles first, then two tiles and pieces of the next two, then what is in flight."""
    latent, blocks = padded_latent_columns(shape.kv_lora_rank, 128), key_blocks(tiling, shape.qk_rope_head_dim)
    makers, pieces, given = blocks.chunks_per_block, -(-latent // CODE_PANEL), scale_bytes(shape.page_size)
    rope_stages = 2 * makers
    sizes = product((1, 2) if tiling.rows == 64 else (1,), (3, 2), range(12, 1, -1))
    for warpgroups, num_stages, code_stages in sizes:
        used = swap_ab_ws_shared_memory(tiling, blocks, shape.kv_lora_rank, num_stages, rope_stages)
        used += code_stages * 64 * CODE_PANEL
        used += sum(-(-size // 1024) * 1024 for size in (code_stages * given, num_stages * 3 * 64 * 4))  # tiles' place
        registers = _registers_of(shape, tiling, warpgroups, 1, 8, streamers=2)  # two CTAs: not tried
        in_flight = min(code_stages, 8, 4 * pieces)
        yield candidate(
            (tiling.num_tiles, tiling.rows, -in_flight, warpgroups, -num_stages, code_stages),
            limit, "latent_fp8", tiling, used,
            f"{warpgroups} warpgroup(s) compute, {makers} make keys, {num_stages} latent and {rope_stages} rope stages,"
            f" {code_stages} pieces of {CODE_PANEL} codes",
            num_stages=num_stages, rope_stages=rope_stages, threads=128 * (warpgroups + makers + 2),
            warpgroups=warpgroups, registers=registers, code_stages=code_stages,
        )  # fmt: skip


def _latent_cluster(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """A ring of 1.5 to 4 tiles, in pieces as wide as may be: on an H100 narrower ones took 3 to 14 % longer."""
    blocks = key_blocks(tiling, shape.qk_rope_head_dim)
    makers, warpgroups = blocks.chunks_per_block, 2 if tiling.rows == 64 else 1
    held = 64 * tiling.rows // warpgroups // 128
    cut = halve(tiling, shape.kv_lora_rank, 8)
    of_thread = (cut.columns, shape.qk_rope_head_dim, tiling, warpgroups, 1, held)
    registers = _registers(*of_thread, streaming=WIDE_STREAMING_REGISTERS) or _registers(*of_thread)
    for halves, rope_stages in product((8, 6, 5, 4, 3), (3 * makers, 2 * makers)):
        num_stages = max(cut.units + 1, halves * cut.units // 2)
        used = cluster_shared_memory(tiling, cut, num_stages, rope_stages, (makers * KEY_TILE, KEY_TILE))
        yield candidate(
            (1, tiling.num_tiles, tiling.rows, -num_stages, -rope_stages),
            limit, "latent_cluster", tiling, used,
            f"{CLUSTER} x {cut.columns} columns, {warpgroups} warpgroup(s) compute, {makers} make keys, {num_stages}"
            f" pieces of {cut.unit} columns and {rope_stages} rope stages",
            num_stages=num_stages, rope_stages=rope_stages, threads=128 * (warpgroups + makers + 1),
            warpgroups=warpgroups, cluster_size=CLUSTER, registers=registers,
        )  # fmt: skip


def _key_code_registers(*of_thread: Any) -> tuple[int, int, int] | None:
    """Registers as by :func:`_registers`; makers of keys from codes get 32 more where there are any."""
    found = (_registers(*of_thread, streaming=WIDE_STREAMING_REGISTERS, steps=steps) for steps in (8, 0))
    return next((registers for registers in found if registers is not None), None)


def _int8_keys(shape: DecodeShape, tiling: RowTiling, limit: int) -> Candidates:
    """Few tiles first, one CTA's before a cluster's up to 512 columns, then bytes in flight. Not measured."""
    latent, blocks = padded_latent_columns(shape.kv_lora_rank, 128), key_blocks(tiling, shape.qk_rope_head_dim)
    of_piece = 64 * CODE_PANEL + scale_bytes(shape.page_size)
    makers, several = blocks.chunks_per_block, (1, 2) if tiling.rows == 64 else (1,)
    for warpgroups, resident, num_stages, code_stages, turns in product(several, (2, 1), (4, 3, 2), (4, 3, 2), (2, 1)):
        used = swap_ab_ws_shared_memory(tiling, blocks, shape.kv_lora_rank, num_stages, turns * makers)
        used += code_stages * of_piece
        of_thread = (shape.kv_lora_rank, shape.qk_rope_head_dim, tiling, warpgroups, resident)
        registers = _key_code_registers(*of_thread)
        in_flight = min(num_stages * latent, 2048 // resident)
        yield candidate(
            (0, tiling.num_tiles, 0, tiling.rows, -resident * in_flight, -resident, warpgroups, -turns, -code_stages),
            limit, "int8_keys_ws", tiling, used,
            f"{warpgroups} warpgroup(s) compute, {makers} make keys, {num_stages} latent and {turns * makers} rope"
            f" stages, {code_stages} tiles of codes, {resident} CTA(s) a multiprocessor",
            num_stages=num_stages, rope_stages=turns * makers, threads=128 * (warpgroups + makers + 1),
            warpgroups=warpgroups, ctas_per_sm=resident, registers=registers, code_stages=code_stages,
            fits=shape.kv_lora_rank <= WIDE_LATENT,
        )  # fmt: skip
    cut, warpgroups = halve(tiling, shape.kv_lora_rank, 8), several[-1]
    for halves, rope_stages, code_stages in product((6, 5, 4, 3), (3, 2), (4, 3, 2)):
        num_stages = max(cut.units + 1, halves * cut.units // 2)
        used = cluster_shared_memory(tiling, cut, num_stages, rope_stages, (KEY_TILE, KEY_TILE))
        used += code_stages * of_piece
        held = 64 * tiling.rows // warpgroups // 128
        registers = _key_code_registers(cut.columns, KEY_TILE, tiling, warpgroups, 1, held)
        yield candidate(
            (0, tiling.num_tiles, 1, tiling.rows, -num_stages, -rope_stages, -code_stages),
            limit, "int8_keys_cluster", tiling, used,
            f"{CLUSTER} x {cut.columns} columns, {warpgroups} warpgroup(s) compute, 1 makes keys, {num_stages} pieces"
            f" of {cut.unit} columns, {rope_stages} rope stages, {code_stages} tiles of codes",
            num_stages=num_stages, rope_stages=rope_stages, threads=128 * (warpgroups + 2), warpgroups=warpgroups,
            cluster_size=CLUSTER, registers=registers, code_stages=code_stages,
        )  # fmt: skip


def _candidates(
    shape: DecodeShape, capability: int, limit: int, has_rope_cache: bool, codes: bool, key_codes: bool
) -> Candidates:
    """Every configuration; smaller ranks are expected to be faster."""
    hopper, packed = capability == HOPPER, codes and has_rope_cache
    if codes and not hopper:
        raise ValueError(
            f"the GPU has compute capability {capability / 10}; kernels over e4m3 latents need {HOPPER / 10} (Hopper)"
        )
    tiles = tilings(shape, (32, 16) if packed else (64, 32, 16), has_rope_cache and not key_codes, packed)
    # Two CTAs share columns of a latent alone only where one takes them with no tiling: halves of a key are rounded
    # each.
    fits_one = hopper and shape.kv_lora_rank <= WIDE_LATENT
    alone = [entry for tiling in tiles if fits_one and not has_rope_cache for entry in _latent_ws(shape, tiling, limit)]
    if not has_rope_cache and not codes:
        yield from alone
    for tiling in tiles:
        if codes:
            yield from (_fp8 if has_rope_cache else _latent_fp8)(shape, tiling, limit)
        elif key_codes:
            if hopper:
                yield from _int8_keys(shape, tiling, limit)
            yield from portable_choices(shape, tiling, capability, limit, "int8_keys_portable")
        elif not has_rope_cache:
            if hopper and not any(choice for _, choice, _ in alone):
                yield from _latent_cluster(shape, tiling, limit)
            yield from portable_choices(shape, tiling, capability, limit, "latent_portable")
        else:
            if hopper:
                yield from _swap_ab_ws(shape, tiling, limit)
                yield from _swap_ab_cluster(shape, tiling, limit)
                yield from _heads_on_m(shape, tiling, limit)
            yield from portable_choices(shape, tiling, capability, limit)


def list_kernels(
    shape: DecodeShape, capability: int, *, has_rope_cache: bool = True, codes: bool = False, key_codes: bool = False
) -> list[KernelChoice]:
    """Every configuration that fits the device, the one that the rule would choose first; arguments as of
    :func:`refusal`.

    Raises:
        ValueError: with the numbers, if no configuration fits into shared memory or registers; or codes on another GPU
            than a Hopper.
    """
    limit = shared_memory_limit(capability)
    return rank_choices(shape, capability, _candidates(shape, capability, limit, has_rope_cache, codes, key_codes))


@lru_cache(maxsize=4096)
def select_kernel(shape: DecodeShape, capability: int, **how: bool) -> KernelChoice:
    """The kernel and tiles for ``shape``; arguments and errors as :func:`list_kernels`."""
    return list_kernels(shape, capability, **how)[0]
