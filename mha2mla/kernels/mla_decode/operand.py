"""How codes become the register operand of wgmma, and where queries follow. Arithmetic only."""

from __future__ import annotations


def column_of_code(d):
    """Where in its row a query column must stand to meet latent column ``d``; ``d`` may be an expression.

    ``ldmatrix`` gives a thread four neighbouring codes of a row, and a 16-bit register operand of depth 16 has four
    columns of a thread at 2t, 2t + 1, 2t + 8 and 2t + 9 (PTX ISA, wgmma register fragments). So within each 16 columns
    the codes 4t ... 4t + 3 take those places.
    """
    return d // 16 * 16 + d % 16 // 4 * 2 + d % 4 // 2 * 8 + d % 2
