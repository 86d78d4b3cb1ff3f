"""How a product of few rows is cut into CTAs, which are to fill one wave, and what each of them has room for."""

from dataclasses import dataclass

from mha2mla.kernels.skinny_linear.streamed import BLOCK

_CLUSTER = 8  # CTAs at most
_MULTIPROCESSOR = 227 * 1024  # bytes of shared memory
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
    """Of a weight [outputs, columns] for ``rows`` rows of x.

    One CTA a multiprocessor where CTAs that share a tile's columns come to nearly all of them, or x has many rows: what
    a CTA costs beside its bytes is least then. Else two, and as many share a tile as come into one wave.
    """
    blocks = 2 if gated or outputs > 2 * sms * BLOCK else 1
    tiles = -(-outputs // (BLOCK * blocks))
    resident, split = 2, 1
    if not gated:
        most = min(_CLUSTER, -(-columns // 128))
        split = _power_of_two(min(most, sms // tiles))
        if tiles <= sms and (rows > _FEW or tiles * split >= _FILLED * sms):
            resident = 1
        else:
            split = _power_of_two(min(most, 2 * sms // tiles))
    room = _MULTIPROCESSOR // resident - _RESERVED - (rows * BLOCK * blocks * 4 if split > 1 else 0)
    for depth in (128, 64):
        stages = room // ((BLOCK * blocks + rows) * depth * 2)
        if stages >= 3:
            break
    return Cut(blocks, split, depth, min(stages, -(-columns // (depth * split))), resident)


def _power_of_two(limit: int) -> int:
    """The largest up to ``limit``, or 1."""
    return 1 << (max(1, limit).bit_length() - 1)
