"""Codes of 1 to 4 bits by a trellis of four states: of twice as many levels, which half an element may take follows
from the code before it, and which of them its code stands for from the two before it (Marcellin and Fischer, "Trellis
coded quantization of memoryless and Gauss-Markov sources", 1990; the trellis is Ungerboeck's).

A chain of 16 elements is coded together, and alone. With code 2 m + u of an element and u₁, u₂ the last bits of the
codes before it (0 before the first two), its level is number 4 m + 2 (u ⊕ u₂) + u₁ of 2^(bits + 1). Level i is
x (1 + bend x²) with x = i - 2^bits + 1/2, of which x², the bracket and the product are rounded to 8 significant bits:
what arithmetic in bfloat16 makes of i, exactly, in any kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

CHAIN = 16  # elements that are coded together: those that a thread of a kernel has
# Of each number of bits: the bend of levels, and the unit of x in standard deviations, that lose least of normally
# distributed elements (found by search; bends are numbers of bfloat16).
CURVES = {1: (0.0, 0.778), 2: (0.032958984375, 0.3734), 3: (0.01202392578125, 0.1899), 4: (0.00360107421875, 0.09855)}

_AT_ONCE = 2**14  # chains, of which the search holds some 1500 bytes each: more of them take longer


@dataclass(frozen=True)
class Trellis:
    """Levels that codes of ``bits`` bits, 1 to 4, stand for."""

    bits: int

    bend = property(lambda t: CURVES[t.bits][0])
    unit = property(lambda t: CURVES[t.bits][1])
    middle = property(lambda t: 2**t.bits - 0.5)  # number of the level that would be zero

    @property
    def levels(self) -> list[float]:
        """All of them, from the least on."""
        return self.table(torch.device("cpu")).tolist()

    def table(self, device: torch.device) -> Tensor:
        """The levels, float32, made on ``device``: a graph captures no copy to a GPU. (Not for torch.compile, which
        leaves out roundings to bfloat16.)"""
        x = torch.arange(2 ** (self.bits + 1), dtype=torch.float32, device=device) - self.middle
        bent = (x * x).bfloat16().float() * self.bend + 1
        return (x * bent.bfloat16().float()).bfloat16().float()

    def subset(self, j: int) -> tuple[list[float], list[float]]:
        """Every fourth level from the ``j``-th on, and what lies half way between neighbours of them."""
        levels = self.levels[j::4]
        return levels, [(low + high) / 2 for low, high in pairwise(levels)]

    def find_codes(self, chains: Tensor) -> Tensor:
        """Codes [n, 16], uint8, of chains [n, 16], float32 in units of x, whose levels are nearest: the path of the
        least sum of squares, added in float32 from the first element on. Of equal paths u₂ = 0, then u = 0."""
        return torch.cat([self._find_codes(part) for part in chains.split(_AT_ONCE)])

    def _find_codes(self, chains: Tensor) -> Tensor:
        elements, n = chains.t().flatten(), len(chains)
        table = self.table(chains.device)
        m = torch.zeros(4, len(elements), dtype=torch.uint8, device=chains.device)  # of each subset's nearest level
        for between in (table[4:] + table[:-4]).view(-1, 4, 1) / 2:
            m += elements > between
        numbers = 4 * m.int() + torch.arange(4, dtype=torch.int32, device=chains.device)[:, None]
        near = (elements - table.index_select(0, numbers.flatten()).view_as(m)).square_()
        near = near.view(2, 2, CHAIN, n)  # u ⊕ u₂, u₁
        steps = torch.stack((near, near.flip(0))).permute(3, 0, 2, 1, 4).contiguous()  # element, u, u₁, u₂
        cost = chains.new_full((2, 2, n), torch.inf)  # of states u₁, u₂
        cost[0, 0] = 0
        path = torch.zeros(2, 2, n, dtype=torch.int32, device=chains.device)  # last bits of the codes on the way there
        for e, step in enumerate(steps):
            first, second = step.add_(cost).unbind(2)
            path = torch.where(second < first, path[:, 1], path[:, 0])
            path[1].bitwise_or_(1 << e)
            cost = torch.minimum(first, second)
        least, best = cost[0, 0], path[0, 0]
        for own, other in zip(cost.flatten(0, 1)[1:], path.flatten(0, 1)[1:], strict=True):
            best = torch.where(own < least, other, best)
            least = torch.minimum(own, least)
        last = F.pad(best >> torch.arange(CHAIN, dtype=torch.int32, device=chains.device)[:, None] & 1, (0, 0, 2, 0))
        subset = 2 * (last[2:] ^ last[:-2]) + last[1:-1]
        m = m.view(4, CHAIN, n).gather(0, subset[None].long())[0]
        return (2 * m + last[2:]).to(torch.uint8).t().contiguous()

    def decode(self, codes: Tensor) -> Tensor:
        """Levels, float32, of codes [..., 16]."""
        last = F.pad(codes & 1, (2, 0))
        numbers = ((codes >> 1) << 2) + ((last[..., 2:] ^ last[..., :-2]) << 1) + last[..., 1:-1]
        return self.table(codes.device).index_select(0, numbers.flatten().int()).view(codes.shape)
