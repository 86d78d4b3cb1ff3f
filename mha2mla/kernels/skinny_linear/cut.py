"""CTAs of a product of few rows, which are to fill one wave, and their stages."""

from dataclasses import dataclass

from mha2mla.kernels.split_kv.choice import HOPPER, SHARED_MEMORY

ROW_BUCKETS = (8, 16, 64, 128)  # rows of x, at most, of each kernel
BLOCK = 64  # rows of a weight in a product: the M of one wgmma
_CLUSTER = 8  # CTAs at most
_RESERVED = 1024 + 512  # of a CTA: the driver's, and barriers
_FILLED = 0.9  # of the multiprocessors, where each has one CTA
_FEW = 64  # rows of x, beside which two CTAs have room for as much of the weight as one


@dataclass(frozen=True)
class Cut:
    """Arguments of ``make_streamed_linear``; as measured on an H200 (docs/notes/step.md)."""

    blocks: int
    split: int
    depth: int
    stages: int
    resident: int


def cut(outputs: int, columns: int, rows: int, gated: bool, sms: int) -> Cut:
    """The cut of a weight [outputs, columns] for ``rows`` rows of x.

    One CTA a multiprocessor where CTAs that share a tile's columns come to nearly all of them, or x has many rows: what
    a CTA costs beside its bytes is least then. Else two, and as many share a tile as come into one wave.
    """
    blocks = 2 if gated or outputs > 2 * sms * BLOCK else 1
    tiles = _tiles(outputs, blocks)
    resident, split = (1 if tiles <= sms else 2), 1
    if not gated:
        most = min(_CLUSTER, -(-columns // 128))
        split = _split(tiles, most, sms)
        if tiles > sms or (rows <= _FEW and tiles * split < _FILLED * sms):
            resident, split = 2, _split(tiles, most, 2 * sms)
    room = SHARED_MEMORY[HOPPER] // resident - _RESERVED - (rows * BLOCK * blocks * 4 if split > 1 else 0)
    for depth in (128, 64):
        stages = room // ((BLOCK * blocks + rows) * depth * 2)
        if stages >= 3:
            break
    return Cut(blocks, split, depth, min(stages, -(-columns // (depth * split))), resident)


def filled(outputs: int, columns: int, rows: int, gated: bool, sms: int) -> float:
    """The share of the room for CTAs, in all waves, that a product has CTAs for."""
    it = cut(outputs, columns, rows, gated, sms)
    ctas, wave = _tiles(outputs, it.blocks) * it.split, _wave(it.split, it.resident * sms)
    return ctas / (-(-ctas // wave) * wave)


def _tiles(outputs: int, blocks: int) -> int:
    return -(-outputs // (BLOCK * blocks))


def _wave(split: int, room: int) -> int:
    """CTAs that there is room for at once: clusters of four and more do not come out even with a GPC's multiprocessors
    (120 of 132, 248 and 240 of 264, by cudaOccupancyMaxActiveClusters on an H200)."""
    return room if split <= 2 else room * 10 // 11


def _split(tiles: int, most: int, room: int) -> int:
    """The most CTAs, a power of two up to ``most``, that share a tile's columns in one wave; or 1."""
    split = 1
    while split * 2 <= most and tiles * split * 2 <= _wave(split * 2, room):
        split *= 2
    return split
