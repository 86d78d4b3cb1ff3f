"""Products that kernels serve, and the CTAs and stages of those that stream a weight. No TileLang."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mha2mla.kernels.ops import ALIGNMENT, capability, num_sms
from mha2mla.kernels.split_kv.choice import HOPPER, SHARED_MEMORY, shared_memory_limit

ROW_BUCKETS = (8, 16, 64, 128)  # rows of x, at most, of each streaming kernel
BLOCK = 64  # rows of a weight in a product: the M of one wgmma
DTYPES = (torch.bfloat16, torch.float16)
HEAD_ROWS, HEAD_COLUMNS = 8, 2048  # most tokens (as an m16n8k16 instruction takes) and d_c of W_UV's kernel for few
COLUMN_STEP, OUTPUT_STEP = 32, 16  # K and N are multiples of
W_UK_TOKENS, W_UK_ROWS, WIDTH_STEP = 16, 256, 8  # most tokens and d_n of the one for W_UK; d_c is a multiple of
GROUP = 64  # most heads that share a weight in the kernel for any number of tokens
_CLUSTER = 8  # CTAs at most
_RESERVED = 1024 + 512  # bytes of a CTA: the driver's, and barriers
_NEARLY_ALL = 0.9  # of the multiprocessors, where each has one CTA
_FEW_ROWS = 64  # of x, beside which two CTAs have room for as much of the weight as one
_MANY_COLUMNS = 2048  # from which on a product is worth a kernel of its own
_FULL_WAVES = 0.62  # of the room for CTAs, from which on more rows than 64 are


def serves_linear(x: Tensor, weight: Tensor) -> bool:
    """True where a kernel can compute the product of x [..., K] and weight [N, K]."""
    outputs, columns = weight.shape
    return (
        x.is_cuda
        and x.dtype in DTYPES
        and 0 < x.numel() <= ROW_BUCKETS[-1] * columns
        and columns % COLUMN_STEP == 0
        and outputs % OUTPUT_STEP == 0
        and weight.is_contiguous()
        and weight.data_ptr() % ALIGNMENT == 0
        and capability(x.device) == HOPPER
    )


def is_skinny(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """True where a kernel computes the product of x [..., K] and weight [N, K] faster than cuBLAS."""
    return serves_linear(x, weight) and is_faster(*weight.shape, x.numel() // weight.shape[1], gated, num_sms(x.device))


def is_faster(outputs: int, columns: int, rows: int, gated: bool, sms: int) -> bool:
    """True where ``rows`` rows times a weight [outputs, columns] take less time than cuBLAS's, as measured on an H200:
    where reading is what takes the time, 8 MiB and more, and of many rows where CTAs fill their waves."""
    return (
        outputs * columns >= 2**22
        and columns >= _MANY_COLUMNS
        and (rows <= ROW_BUCKETS[-2] or occupancy(outputs, columns, ROW_BUCKETS[-1], gated, sms) >= _FULL_WAVES)
    )


def serves_few_tokens(x: Tensor, weight: Tensor, transposed: bool = False) -> bool:
    """True where a kernel for few tokens can compute x [..., H, i] times weight [k, i, o], or [H, o, i] with
    ``transposed``.

    cuBLAS takes 3.5 µs for the 3.7 MB of a W_UK, of which reading takes one, and 4 µs for the 4 MB of W_UV, where it
    cannot begin before attention ends.
    """
    heads, inner = x.shape[-2:]
    if x.numel() > W_UK_TOKENS * heads * inner:  # a prompt, first of all: every layer asks
        return False
    maps = weight.shape[0]  # len() of a tensor is Python's
    if not (x.is_cuda and x.dtype in DTYPES and x.numel() and maps) or capability(x.device) < 80:
        return False
    if transposed:
        fits = maps == heads and x.numel() <= HEAD_ROWS * heads * inner and inner <= HEAD_COLUMNS
        fits = fits and inner % COLUMN_STEP == 0 and weight.shape[1] % OUTPUT_STEP == 0
    else:
        fits = heads % maps == 0 and inner <= W_UK_ROWS and weight.shape[2] % WIDTH_STEP == 0
    return fits and weight.is_contiguous() and weight.data_ptr() % ALIGNMENT == 0


def serves_heads(x: Tensor, weight: Tensor, transposed: bool = False) -> bool:
    """True where the kernel for any number of tokens serves these; of many tokens and a weight a head cuBLAS is as
    fast."""
    heads, inner = x.shape[-2:]
    maps, outer = weight.shape[0], weight.shape[1 if transposed else 2]
    return (
        x.is_cuda
        and x.dtype in DTYPES
        and x.numel() > 0
        and x.stride(-1) == 1
        and not any(stride % 8 for stride in x.stride()[:-1])
        and x.data_ptr() % ALIGNMENT == 0
        and heads // maps <= GROUP
        and (maps < heads or x.numel() <= GROUP * heads * inner)
        and inner % 16 == 0
        and outer % WIDTH_STEP == 0
        and weight.is_contiguous()
        and weight.data_ptr() % ALIGNMENT == 0
        and 2 * GROUP * inner * x.itemsize <= shared_memory_limit(capability(x.device))
    )


@dataclass(frozen=True)
class LinearTiling:
    """Arguments of ``make_streamed_linear``; as measured on an H200 (docs/notes/step.md)."""

    blocks: int
    split: int
    depth: int
    stages: int
    resident: int


def linear_tiling(outputs: int, columns: int, rows: int, gated: bool, sms: int) -> LinearTiling:
    """Tiling of a weight [outputs, columns] for ``rows`` rows of x.

    One CTA a multiprocessor where CTAs that share a tile's columns come to nearly all of them, or x has many rows: a
    CTA's cost beside its bytes is least then. Else two, and as many share a tile as fit into one wave.
    """
    blocks = 2 if gated or outputs > 2 * sms * BLOCK else 1
    tiles = _tiles(outputs, blocks)
    resident, split = (1 if tiles <= sms else 2), 1
    if not gated:
        most = min(_CLUSTER, -(-columns // 128))
        split = _split(tiles, most, sms)
        if tiles > sms or (rows <= _FEW_ROWS and tiles * split < _NEARLY_ALL * sms):
            resident, split = 2, _split(tiles, most, 2 * sms)
    room = SHARED_MEMORY[HOPPER] // resident - _RESERVED - (rows * BLOCK * blocks * 4 if split > 1 else 0)
    for depth in (128, 64):
        stages = room // ((BLOCK * blocks + rows) * depth * 2)
        if stages >= 3:
            break
    return LinearTiling(blocks, split, depth, min(stages, -(-columns // (depth * split))), resident)


def occupancy(outputs: int, columns: int, rows: int, gated: bool, sms: int) -> float:
    """Share of the room for CTAs, in all waves, that a product fills."""
    tiling = linear_tiling(outputs, columns, rows, gated, sms)
    ctas, wave = _tiles(outputs, tiling.blocks) * tiling.split, _wave(tiling.split, tiling.resident * sms)
    return ctas / (-(-ctas // wave) * wave)


def _tiles(outputs: int, blocks: int) -> int:
    return -(-outputs // (BLOCK * blocks))


def _wave(split: int, room: int) -> int:
    """CTAs that are resident at once: clusters of four and more do not come out even with a GPC's multiprocessors
    (120 of 132, 248 and 240 of 264, by cudaOccupancyMaxActiveClusters on an H200)."""
    return room if split <= 2 else room * 10 // 11


def _split(tiles: int, most: int, room: int) -> int:
    """The most CTAs, a power of two up to ``most``, that share a tile's columns in one wave; or 1."""
    split = 1
    while split * 2 <= most and tiles * split * 2 <= _wave(split * 2, room):
        split *= 2
    return split
