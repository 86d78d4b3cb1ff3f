"""Codes of 1 to 4 bits by a trellis of four states: of twice as many levels, which half an element may take follows
from the two codes before it (Marcellin and Fischer, "Trellis coded quantization of memoryless and Gauss-Markov
sources", 1990; the trellis is Ungerboeck's).

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

_AT_ONCE = 2**18  # chains, of which the search holds some 600 bytes each


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
        return self._levels(torch.device("cpu")).tolist()

    def _levels(self, device: torch.device) -> Tensor:
        return self.at(torch.arange(2 ** (self.bits + 1), device=device))

    def at(self, number: Tensor) -> Tensor:
        """Levels, float32, of these numbers. (Not for torch.compile, which leaves out roundings to bfloat16.)"""
        x = number.float() - self.middle
        bent = (x * x).bfloat16().float() * self.bend + 1
        return (x * bent.bfloat16().float()).bfloat16().float()

    def subset(self, j: int) -> tuple[list[float], list[float]]:
        """Every fourth level from the ``j``-th on, and what lies half way between neighbours of them."""
        levels = self.levels[j::4]
        return levels, [(low + high) / 2 for low, high in pairwise(levels)]

    def find_codes(self, chains: Tensor) -> Tensor:
        """Codes [n, 16], uint8, of chains [n, 16], float32 in units of x, whose levels are nearest: the path of the
        least sum of squares, added in float32 from the first element on. Of equal paths u₂ = 0, then u = 0."""
        found = [self._find_codes(part) for part in chains.split(_AT_ONCE)]
        return torch.cat(found) if found else chains.to(torch.uint8)

    def _find_codes(self, chains: Tensor) -> Tensor:
        elements, n = chains.t().contiguous(), len(chains)
        near = chains.new_empty(CHAIN, 4, n)
        numbers = torch.empty(CHAIN, 4, n, dtype=torch.uint8, device=chains.device)
        for j in range(4):
            levels = self._levels(chains.device)[j::4].contiguous()  # made there: a graph captures no copy to a GPU
            m = torch.bucketize(elements, (levels[:-1] + levels[1:]) / 2)
            torch.sub(elements, levels[m], out=near[:, j]).square_()
            numbers[:, j] = m
        cost = chains.new_full((2, 2, n), torch.inf)  # of states u₁, u₂
        cost[0, 0] = 0
        choices = torch.empty(CHAIN, 2, 2, n, dtype=torch.bool, device=chains.device)  # u₂ of states u, u₁
        for own, choice in zip(near.view(CHAIN, 2, 2, n), choices, strict=True):
            paths = torch.stack((own, own.flip(0))).transpose(1, 2) + cost  # u, u₁, u₂
            first, second = paths.unbind(2)
            torch.lt(second, first, out=choice)
            cost = torch.minimum(first, second)
        state, least = torch.zeros(n, dtype=torch.long, device=chains.device), cost[0, 0]
        for number, own in enumerate(cost.flatten(0, 1)[1:], 1):
            state = torch.where(own < least, number, state)
            least = torch.minimum(own, least)
        codes = torch.empty_like(numbers[:, 0])
        for e in reversed(range(CHAIN)):
            u2 = choices[e].flatten(0, 1).gather(0, state[None])[0].long()
            m = numbers[e].gather(0, (state ^ 2 * u2)[None])[0]
            codes[e] = 2 * m + (state >> 1)
            state = 2 * (state & 1) + u2
        return codes.t().contiguous()

    def decode(self, codes: Tensor) -> Tensor:
        """Levels, float32, of codes [..., 16]."""
        last = F.pad(codes & 1, (2, 0))
        return self.at(((codes >> 1) << 2) + ((last[..., 2:] ^ last[..., :-2]) << 1) + last[..., 1:-1])
