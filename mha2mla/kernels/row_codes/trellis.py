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
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CHAIN = 16  # elements that are coded together: those that a thread of a kernel has
# Of each number of bits: the bend of levels, and the unit of x in standard deviations, that lose least of normally
# distributed elements (found by search; bends are numbers of bfloat16).
CURVES = {1: (0.0, 0.778), 2: (0.032958984375, 0.3734), 3: (0.01202392578125, 0.1899), 4: (0.00360107421875, 0.09855)}
_AT_ONCE = 2**14  # chains, of which the search holds some 1500 bytes each: more of them take longer


def _table(bits: int, device: torch.device) -> Tensor:
    """Not for torch.compile, which leaves out roundings to bfloat16."""
    x = torch.arange(2 ** (bits + 1), dtype=torch.float32, device=device) - (2**bits - 0.5)
    bent = (x * x).bfloat16().float() * CURVES[bits][0] + 1
    return (x * bent.bfloat16().float()).bfloat16().float()


@cache
def _host_table(bits: int) -> Tensor:
    return _table(bits, torch.device("cpu"))


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
        return _host_table(self.bits).tolist()

    def table(self, device: torch.device) -> Tensor:
        """The levels, float32, made on a GPU: a graph captures no copy to it."""
        return _host_table(self.bits) if device.type == "cpu" else _table(self.bits, device)

    def subset(self, j: int) -> tuple[list[float], list[float]]:
        """Every fourth level from the ``j``-th on, and what lies half way between neighbours of them."""
        levels = self.levels[j::4]
        return levels, [(low + high) / 2 for low, high in pairwise(levels)]

    def find_codes(self, chains: Tensor) -> Tensor:
        """Codes [n, 16], uint8, of chains [n, 16], float32 in units of x, whose levels are nearest: the path of the
        least sum of squares, added in float32 from the first element on. Of equal paths u₂ = 0, then u = 0.

        On the host, by NumPy: a token that a CPU generates has a dozen chains a layer, of which torch's calls take
        several times as long."""
        found = [self._find_codes(part.numpy()) for part in chains.cpu().split(_AT_ONCE)]
        return torch.from_numpy(np.concatenate(found)).to(chains.device)

    def _find_codes(self, chains: np.ndarray) -> np.ndarray:
        table, elements, n = _host_table(self.bits).numpy(), np.ascontiguousarray(chains.T), len(chains)
        m = np.zeros((4, CHAIN, n), np.uint8)  # of each subset's nearest level
        for between in (table[4:] + table[:-4]).reshape(-1, 4, 1, 1) / 2:
            m += elements > between
        near = elements - table[4 * m + np.arange(4, dtype=np.uint8)[:, None, None]]
        near = np.square(near, out=near).reshape(2, 2, CHAIN, n)  # u ⊕ u₂, u₁
        steps = np.ascontiguousarray(np.stack((near, near[::-1])).transpose(3, 0, 2, 1, 4))  # element, u, u₁, u₂
        cost = np.full((2, 2, n), np.inf, np.float32)  # of states u₁, u₂
        cost[0, 0] = 0
        path = np.zeros((2, 2, n), np.int32)  # last bits of the codes on the way there
        for e in range(CHAIN):
            paths = np.add(steps[e], cost, out=steps[e])
            first, second = paths[:, :, 0], paths[:, :, 1]
            path = np.where(second < first, path[:, 1], path[:, 0])
            path[1] |= 1 << e
            cost = np.minimum(first, second)
        cost, path = cost.reshape(4, n), path.reshape(4, n)
        path = np.take_along_axis(path, cost.argmin(0)[None], 0)  # the first of equal ones
        last = np.zeros((CHAIN + 2, n), np.intp)
        last[2:] = path >> np.arange(CHAIN)[:, None] & 1
        subset = 2 * (last[2:] ^ last[:-2]) + last[1:-1]
        m = np.take_along_axis(m, subset[None], 0)[0]
        return np.ascontiguousarray((2 * m + last[2:]).astype(np.uint8).T)

    def decode(self, codes: Tensor) -> Tensor:
        """Levels, float32, of codes [..., 16]."""
        last = F.pad(codes & 1, (2, 0))
        numbers = ((codes >> 1) << 2) + ((last[..., 2:] ^ last[..., :-2]) << 1) + last[..., 1:-1]
        return self.table(codes.device).index_select(0, numbers.flatten().int()).view(codes.shape)
