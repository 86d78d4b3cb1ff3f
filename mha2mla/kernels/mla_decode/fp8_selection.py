"""Which tiles serve a geometry over an fp8 latent cache, and why one is refused. Arithmetic only, no TileLang."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

from mha2mla.kernels.devices import HOPPER
from mha2mla.kernels.mla_decode.selection import DecodeShape, refusal
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.kernels.split_kv.limits import rank_choices, shared_memory_limit
from mha2mla.kernels.split_kv.tiling import RowTiling, tile_rows

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
