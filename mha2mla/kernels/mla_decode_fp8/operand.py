"""How codes become the register operand of wgmma, and where queries and weights follow. Arithmetic only.

Every 32 columns of the score product, and every 32 tokens of the output product, are two products of depth 16. Codes of
a *widened* product become float16 by shifts and masks, those of another by the conversion instruction, whose unit is
too slow to serve all of them. Shifting the 7 bits of a magnitude into a float16 divides the number by 2^8 (e4m3 has
exponent bias 7, float16 15) and keeps subnormals exact, so what it meets carries a factor 2^8.
"""

from __future__ import annotations

WIDENING = 8  # powers of two that a widened code has lost


def is_widened(index, widened: int):
    """1 for columns, or tokens, of a widened product, else 0; ``index`` may be an expression.

    Args:
        index: column d of the latent, or token of the tile.
        widened: products of every two that are widened: 0, 1 (the second) or 2.
    """
    return index // 16 % 2 if widened == 1 else widened // 2


def column_of_code(d, widened: int = 0):
    """Where in its row a query column must stand to meet latent column ``d``; ``d`` may be an expression.

    ``ldmatrix`` gives a thread four neighbouring codes of a row, and a 16-bit register operand of depth 16 has four
    columns of a thread at 2t, 2t + 1, 2t + 8 and 2t + 9 (PTX ISA, wgmma register fragments). So within each 16 columns
    the codes 4t ... 4t + 3 take those places: converted, in this order, and widened as 4t, 4t + 2, 4t + 1, 4t + 3.
    """
    shifted = is_widened(d, widened)
    converted_place, widened_place = d % 4 // 2 * 8 + d % 2, d % 2 * 8 + d % 4 // 2
    return d // 16 * 16 + d % 16 // 4 * 2 + (1 - shifted) * converted_place + shifted * widened_place
