"""Selection of the GQA decode kernel and its tiles for a shape, and the refusals. Arithmetic only, no TileLang."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from mha2mla.kernels.split_kv.choice import (
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

MAX_HEAD_DIM = 256
REGISTERS = 65536  # of a multiprocessor, and none that is served has fewer
STREAMED_THREADS = 160
# Bytes in flight of one multiprocessor that reads as fast as it can, and a little more: an H200 moves 36 bytes a
# nanosecond and multiprocessor, and a load takes up to two microseconds when all of them do.
ENOUGH_IN_FLIGHT = 128 * 1024


@dataclass(frozen=True)
class GQAShape:
    """The static part of a GQA decode call: what one compilation is for.

    Attributes: ``heads`` H, ``num_kv_heads`` G, ``qk_head_dim`` d_qk, ``v_head_dim`` d_v, ``page_size`` tokens,
    ``seqlen_q`` one of 1, 2, 4, 8 (the call's S_q rounded up), ``dtype`` "bfloat16" or "float16".
    """

    heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    page_size: int
    seqlen_q: int
    dtype: str


def padded_columns(width: int) -> int:
    """Shared-memory width of keys or values: the swizzled panels that TMA fills have 64 columns."""
    return -(-width // 64) * 64


def refusal(shape: GQAShape) -> str | None:
    """Why no TileLang kernel serves a shape on any GPU, or None."""
    heads, groups, limit = shape.heads, shape.num_kv_heads, f"TileLang kernels take multiples of 8 up to {MAX_HEAD_DIM}"
    widths = {"qk_head_dim": shape.qk_head_dim, "v_head_dim": shape.v_head_dim}
    return first_refusal(
        (
            *refusals(shape),
            (
                groups > 0 and heads % groups == 0,
                f"the number of kv heads is {groups}",
                f"expected a divisor of H={heads}",
            ),
            *((n % 8 == 0 and 0 < n <= MAX_HEAD_DIM, f"{name} is {n}", limit) for name, n in widths.items()),
        )
    )


def _registers(tiling: RowTiling, v_head_dim: int, block_tokens: int = 64) -> int:
    """A thread's: output, scores, denominators, what is kept per row (3 numbers of every fourth row), and the rest."""
    accumulators = (padded_columns(v_head_dim) + 2 * block_tokens) * tiling.rows // 128
    return accumulators + 3 * tiling.rows // 4 + 72


def _streamed(shape: GQAShape, tiling: RowTiling, limit: int) -> Candidates:
    """Few tiles (each reads the cache again), enough bytes in flight, then CTAs."""
    qk_cols, v_cols = padded_columns(shape.qk_head_dim), padded_columns(shape.v_head_dim)
    for ctas_per_sm, num_stages in product((1, 2, 3, 4), (8, 6, 4, 3, 2)):
        # of 16-bit elements, with 1 KiB for alignment and barriers
        used = 2 * (num_stages * 64 * (qk_cols + v_cols) + tiling.rows * (qk_cols + 64)) + 16 * tiling.rows + 1024
        registers = REGISTERS // (ctas_per_sm * STREAMED_THREADS) // 8 * 8
        in_flight = ctas_per_sm * num_stages * 128 * (shape.qk_head_dim + shape.v_head_dim)
        yield candidate(
            (0, tiling.num_tiles, -min(in_flight, ENOUGH_IN_FLIGHT), -ctas_per_sm, -num_stages),
            limit, "streamed", tiling, used, f"{num_stages} stages, {ctas_per_sm} CTA(s) a multiprocessor",
            fits=_registers(tiling, shape.v_head_dim) <= min(registers, 255), num_stages=num_stages,
            threads=STREAMED_THREADS, ctas_per_sm=ctas_per_sm,
        )  # fmt: skip


def _portable(shape: GQAShape, tiling: RowTiling, limit: int) -> Candidates:
    tiling = replace(tiling, rows=max(16, tiling.rows))  # two mma.sync of 8 columns side by side
    qk_cols, v_cols, rows = padded_columns(shape.qk_head_dim), padded_columns(shape.v_head_dim), tiling.rows
    for block in (64, 32):
        weights = block * rows * 2 + (block // 16 + 1) * rows * 4
        used = 2 * (block * (qk_cols + v_cols) + rows * qk_cols) + weights + 2048  # with 2 KiB for alignment
        yield candidate(
            (1, tiling.num_tiles, -block, rows), limit, "portable", tiling, used, f"{block} tokens a step",
            fits=_registers(tiling, shape.v_head_dim, block) <= 240, block_tokens=block,
        )  # fmt: skip


def list_kernels(shape: GQAShape, capability: int) -> list[KernelChoice]:
    """Every configuration that fits the device, the one that the rule chooses first.

    Raises:
        ValueError: with the numbers, if no configuration fits into the device's shared memory.
    """
    limit = shared_memory_limit(capability)
    tilings = dict.fromkeys(
        tile_rows(shape.heads, shape.num_kv_heads, shape.seqlen_q, max_rows, 1, packed=True)
        for max_rows in (64, 32, 16, 8)
    )
    candidates = []
    for tiling in tilings:
        if capability == 90:
            candidates += _streamed(shape, tiling, limit)
        candidates += _portable(shape, tiling, limit)
    return rank_choices(shape, capability, candidates)


@lru_cache(maxsize=1024)
def select_kernel(shape: GQAShape, capability: int) -> KernelChoice:
    """The kernel and tiles for ``shape`` on a compute capability (90 for Hopper); raises as :func:`list_kernels`."""
    return list_kernels(shape, capability)[0]
