"""Which TileLang kernel, with which tiles, serves a decode geometry, and why one is refused. Arithmetic only: no TileLang, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.mla_decode.tiling import SEQLENS_Q, RowTiling, tile_rows

MAX_HEADS = 128
MAX_LATENT = 512
MAX_ROPE_SHARED = 256
MAX_ROPE_PER_HEAD = 128
MAX_ROPE_WIDTH = 2048
DTYPES = ("bfloat16", "float16")

# Shared memory a block may use, bytes, by compute capability (CUDA C++ programming guide, "Technical Specifications").
SHARED_MEMORY = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}


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


@dataclass(frozen=True)
class KernelChoice:
    """A kernel file and its static arguments, with the reason it was chosen."""

    kernel: str
    tiling: RowTiling
    block_tokens: int
    num_stages: int
    threads: int
    rope_stages: int
    reason: str


def refusal(geometry: MLAGeometry, page_size: int, dtype: str, seqlen_q: int) -> str | None:
    """Why no TileLang kernel serves a shape on any GPU, or None."""
    rope_limit = MAX_ROPE_SHARED if geometry.num_rope_heads == 1 else MAX_ROPE_PER_HEAD
    checks = (
        (dtype in DTYPES, f"dtype is {dtype}; TileLang kernels take {' and '.join(DTYPES)}"),
        (
            geometry.num_attention_heads <= MAX_HEADS,
            f"num_attention_heads is {geometry.num_attention_heads}; TileLang kernels take at most {MAX_HEADS}",
        ),
        (
            geometry.kv_lora_rank % 8 == 0 and geometry.kv_lora_rank <= MAX_LATENT,
            f"kv_lora_rank is {geometry.kv_lora_rank}; TileLang kernels take multiples of 8 up to {MAX_LATENT}",
        ),
        (
            geometry.qk_rope_head_dim % 8 == 0 and geometry.qk_rope_head_dim <= rope_limit,
            f"qk_rope_head_dim is {geometry.qk_rope_head_dim}; TileLang kernels take multiples of 8 up to {rope_limit}"
            f" for num_rope_heads={geometry.num_rope_heads}",
        ),
        (
            geometry.rope_width <= MAX_ROPE_WIDTH,
            f"num_rope_heads * qk_rope_head_dim is {geometry.rope_width}; TileLang kernels take at most {MAX_ROPE_WIDTH}",
        ),
        (
            page_size >= 16 and page_size & (page_size - 1) == 0,
            f"page_size is {page_size}; TileLang kernels take powers of two from 16",
        ),
        (
            1 <= seqlen_q <= SEQLENS_Q[-1],
            f"seqlen_q is {seqlen_q}; decode kernels take 1 to {SEQLENS_Q[-1]} new tokens (longer queries are prefill)",
        ),
    )
    return next((why for fits, why in checks if not fits), None)


def shared_memory_limit(capability: int) -> int:
    """Bytes of shared memory a block may use on compute capability ``capability`` (90 for Hopper); 99 KiB if unknown."""
    return SHARED_MEMORY.get(capability, 101376)


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
    tiling: RowTiling, kv_lora_rank: int, qk_rope_head_dim: int, block_tokens: int, num_stages: int, threads: int
) -> int:
    """Bytes of shared memory that ``swap_ab`` allocates for 16-bit elements, with 2 KiB for alignment and barriers."""
    latent = padded_latent_columns(kv_lora_rank, threads)
    rope = padded_rope_columns(tiling.groups_per_tile * qk_rope_head_dim)
    queries = tiling.rows * (latent + rope) * 2
    tiles = num_stages * block_tokens * (latent + rope) * 2
    weights = block_tokens * tiling.rows * 2 + block_tokens // 16 * tiling.rows * 4
    return queries + tiles + weights + 2048


def _swap_ab_candidates(shape: DecodeShape, capability: int):
    """Configurations from the one expected fastest to the one that fits anywhere."""
    hopper = capability == 90
    threads = 256 if hopper and shape.kv_lora_rank > 128 else 128
    blocks = (64,) if hopper else (64, 32)
    # accumulators: d_c * rows floats over the threads, 128 registers a thread at most
    for num_stages in (2, 1):
        for block in blocks:
            for max_rows in (64, 32, 16):
                if padded_latent_columns(shape.kv_lora_rank, threads) * max_rows > 128 * threads:
                    continue
                if max_rows < (8 * shape.seqlen_q if shape.seqlen_q > 1 else 1):
                    continue
                for max_groups in (128, 64, 32, 16, 8, 4, 2, 1):
                    yield num_stages, block, max_rows, max_groups, threads


def select_kernel(shape: DecodeShape, capability: int) -> KernelChoice:
    """The kernel and tiles for ``shape`` on compute capability ``capability``.

    Fewest tiles first (each tile reads the whole cache again, through L2), then the deepest pipeline that fits.

    Raises:
        ValueError: with the numbers, if no configuration fits into the device's shared memory.
    """
    limit = shared_memory_limit(capability)
    best: tuple[tuple[int, int, int, int], KernelChoice, int] | None = None
    least = None
    for num_stages, block, max_rows, max_groups, threads in _swap_ab_candidates(shape, capability):
        if shape.page_size < block and block % shape.page_size:
            continue
        tiling = tile_rows(shape.heads, shape.num_rope_heads, shape.seqlen_q, max_rows, max_groups)
        used = swap_ab_shared_memory(
            tiling, shape.kv_lora_rank, shape.qk_rope_head_dim, block, num_stages, threads
        )
        least = used if least is None else min(least, used)
        if used > limit:
            continue
        rank = (tiling.num_tiles, -num_stages, tiling.rows, -block)
        if best is None or rank < best[0]:
            reason = (
                f"swap_ab: {tiling.num_tiles} tile(s) of {tiling.rows} rows, {num_stages} stage(s) of {block} tokens, "
                f"{used} of {limit} bytes of shared memory on sm_{capability}"
            )
            best = (rank, KernelChoice("swap_ab", tiling, block, num_stages, threads, 0, reason), used)
    if best is None:
        raise ValueError(
            f"shape {shape} needs at least {least} bytes of shared memory a block; sm_{capability} has {limit}"
        )
    return best[1]
