"""Tiles of a varlen attention problem: arithmetic shared by kernels, launch and tests. No TileLang."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WIDTH = 256  # of d_qk in all, and of d_v
ROWS = 64  # of one warpgroup: the M of wgmma
# (warpgroups, causal) -> most registers of accumulators at which ptxas was seen not to spill. A mask takes some as
# well; with three warpgroups, which have 160 registers, so do the addresses of more than 128 columns of queries.
ACCUMULATORS = {(2, False): 196, (2, True): 172, (3, False): 128, (3, True): 128}


@dataclass(frozen=True)
class VarlenShape:
    """Static part of a call: H, widths, the heads that share keys and values, mask, dtype.

    Attributes:
        heads: query heads H.
        widths: columns of each part of a query and a key; the score is the sum of the parts' products.
        key_heads: heads of each part's keys; each divides H.
        value_heads: heads of the values; divides H.
        v_head_dim: d_v.
        causal: whether a query sees only keys up to its own place, counted from the end.
        dtype: "bfloat16" or "float16".
        windowed: whether a query sees a window of keys, and sinks, whose numbers are run-time values; causal only.
    """

    heads: int
    widths: tuple[int, ...]
    key_heads: tuple[int, ...]
    value_heads: int
    v_head_dim: int
    causal: bool
    dtype: str
    windowed: bool = False

    @property
    def parts(self) -> range:
        return range(len(self.widths))


@dataclass(frozen=True)
class VarlenTiling:
    """Sizes of a kernel.

    Attributes:
        warpgroups: that compute, 64 query rows each.
        block_keys: keys of a tile.
        stages: tiles of keys, and of values, in flight.
        turns: whether two warpgroups take turns at the tensor cores.
    """

    warpgroups: int
    block_keys: int
    stages: int = 2
    turns: bool = True

    @property
    def block_rows(self) -> int:
        return self.warpgroups * ROWS


def chunks(width: int) -> list[tuple[int, int]]:
    """(offset, columns) of the pieces that ``width`` columns are cut into, padded: widths that wgmma and TMA swizzle.

    Whole multiples of 64, then 32 and 16 for the rest; TMA fills the padding of the last piece with zeros.
    """
    rest = -(-width // 16) * 16 % 64
    whole = -(-width // 16) * 16 - rest
    pieces = [(0, whole)] if whole else []
    for columns in (32, 16):
        if rest & columns:
            pieces.append((whole, columns))
            whole += columns
    return pieces


def padded(width: int) -> int:
    return sum(columns for _, columns in chunks(width))


def shared_bytes(shape: VarlenShape, tiling: VarlenTiling) -> int:
    """Upper bound of what the warp-specialised kernel allocates a block."""
    qk = sum(padded(width) for width in shape.widths)
    rows, keys = tiling.block_rows, tiling.stages * tiling.block_keys
    return 2 * (rows * qk + keys * (qk + padded(shape.v_head_dim))) + 2048


def accumulators(shape: VarlenShape, tiling: VarlenTiling) -> int:
    """Registers of a thread that hold tiles: scores and output in float32, weights in 16 bits."""
    return tiling.block_keys // 2 + tiling.block_keys // 4 + padded(shape.v_head_dim) // 2


def hopper_tiling(shape: VarlenShape, limit: int = 232448) -> VarlenTiling:
    """Tiles for sm_90: the most query rows, then the most keys, that registers and ``limit`` of shared memory hold.

    Three warpgroups where the tile keeps 128 keys: at narrow heads the exponentials bound the speed, and more threads
    have more of them in flight (64/64 on an H200: 463 TFLOP/s against 418 with two). Without a mask the longest tile,
    since what a tile costs once, rescaling and the waits, is then paid least often (128/128: 668 with 176 keys, 600
    with 128). Causal, 128 keys are the most: the tile in which a row ends is worked on in whole.
    """
    candidates = [VarlenTiling(3, 128)] if sum(map(padded, shape.widths)) <= 128 else []
    candidates += [VarlenTiling(2, keys) for keys in range(128 if shape.causal else 176, 16, -16)]
    for tiling in candidates:
        if (
            accumulators(shape, tiling) <= ACCUMULATORS[tiling.warpgroups, shape.causal]
            and shared_bytes(shape, tiling) <= limit
        ):
            return tiling
    raise ValueError(f"no tiling of {shape} fits {limit} bytes of shared memory")


def portable_tiling(shape: VarlenShape, limit: int = 101376) -> tuple[int, int]:
    """Query rows and keys of a tile of the portable kernel; ``limit``: the least shared memory from sm_80 on."""
    qk = sum(-(-width // 16) * 16 for width in shape.widths)
    for keys in (64, 32, 16):
        if 2 * (64 * qk + keys * (qk + -(-shape.v_head_dim // 16) * 16)) <= limit:
            break
    return 64, keys
