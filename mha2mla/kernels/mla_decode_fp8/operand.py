"""How codes become the register operand of wgmma, where queries follow, and how half tiles are stored. Arithmetic only.

Arguments may be expressions.
"""

from __future__ import annotations


def column_of_code(d):
    """Where in its row a query column must stand to meet latent column ``d``.

    ``ldmatrix`` gives a thread four neighbouring codes of a row, and a 16-bit register operand of depth 16 has four
    columns of a thread at 2t, 2t + 1, 2t + 8 and 2t + 9 (PTX ISA, wgmma register fragments). So within each 16 columns
    the codes 4t ... 4t + 3 take those places.
    """
    return d // 16 * 16 + d % 16 // 4 * 2 + d % 4 // 2 * 8 + d % 2


def column_of_place(place):
    """The latent column at ``place`` of a row that is permuted so: the inverse of :func:`column_of_code`."""
    return place // 16 * 16 + place % 8 // 2 * 4 + place % 16 // 8 * 2 + place % 2


def stored_bytes(warp, lane):
    """Byte of a panel (64 tokens x 64 numbers of two bytes) where a lane's row of ``stmatrix`` begins, at column 0.

    Lane l gives the address of row l % 8 of the (l // 8)-th 8 x 8 block of the operand: tokens l % 16, columns from
    l // 16 * 8. Rows of 128 bytes are swizzled: their 16-byte pieces by ``piece ^ row % 8``, so columns from c on (a
    multiple of 16) are at the result ``^ 2 c``.
    """
    return (warp * 16 + lane % 16) * 128 + ((lane // 16) ^ (lane % 8)) * 16


def free_barrier(use, halves: int):
    """Barrier, and its phase, by which the ``use``-th half tile is given back; ``use % halves`` is its place.

    Two barriers a place, for its even and odd uses: a warpgroup may be a whole round ahead of the other, and a parity
    tells one phase from the next, but not from the one after.
    """
    return use % (2 * halves), use // (2 * halves)
