"""Attention of one sequence as textbooks have it: the yardstick at a kernel's dtype, an oracle in float64.

Beside it stands what rounding is expected to do to it: how far one implementation happens to be from float64 depends on
the order of its sums, and orders differ by more than the factor that is allowed between implementations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UNIT = torch.finfo(torch.float32).eps / 2  # sums are kept in float32 whatever the dtype of the inputs


@dataclass(frozen=True)
class Sequence:
    """What one sequence attends to, in one or several parts whose scores add up (MLA's latent and rotary part).

    Attributes:
        queries: [S, H, d] of each part.
        keys: [T, G, d] of each part; G, which divides H, may differ.
        values: [T, G, d_v].
        visible: [S, T] bool, or None where every query sees every token.
        softmax_scale: of the scores.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: Tensor
    visible: Tensor | None
    softmax_scale: float

    def to(self, dtype: torch.dtype) -> Sequence:
        queries, keys = (tuple(x.to(dtype) for x in parts) for parts in (self.queries, self.keys))
        return replace(self, queries=queries, keys=keys, values=self.values.to(dtype))

    def attend(self) -> Tensor:
        """[S, H, d_v] at the inputs' dtype, every intermediate held in it; rows that see nothing are 0."""
        return self._weighted(self._weights(self._scores()), self.values)

    def rounding(self) -> Tensor:
        """[S, H, d_v] of float64 inputs: root mean square that rounding to float32 is expected to put on
        :meth:`attend`, to first order in u.

        * A running sum of n numbers rounds each partial sum S_k off by u/sqrt(3) of it. In random order S_k has the
          mean (k/n) S and the variance (k/n)(1 - k/n) Q, where S is the sum and Q the sum of squares, so the squares of
          the errors add up to u² n/6 · (2/3 S² + 1/3 Q). Orders that add blocks first lose less; how much is luck.
        * A score is such a sum of as many products as a query has numbers, then scaled; a weight has its absolute error
          as a relative one, and two units from exp. A relative error e of a weight w moves the output by e w (v - out).
        * The result is rounded once more.
        """
        score = self._scores()
        if not score.shape[-1]:
            return score.new_zeros(*score.shape[:2], self.values.shape[-1])
        weight = self._weights(score)
        squared, seen = weight.square(), score.masked_fill(score == -torch.inf, 0)
        out, squares = self._weighted(weight, self.values), self._weighted(squared, self.values.square())
        around = squares - 2 * out * self._weighted(squared, self.values) + out**2 * squared.sum(-1)[..., None]
        width = sum(query.shape[-1] for query in self.queries)
        of_weight = 4 + seen.abs().amax(-1)[..., None].square() * ((width - 1) / 6 + 1 / 3)
        of_sum = (score.shape[-1] - 1) / 6 * (2 / 3 * out**2 + 1 / 3 * squares)
        return UNIT * (around.clamp(min=0) * of_weight + of_sum + out**2).sqrt()

    def lse_rounding(self, part: int, dtype: torch.dtype) -> Tensor:
        """[H, S] of float64 inputs: root mean square that rounding the keys of one part to ``dtype`` is expected to put
        on the log-sum-exp.

        A number is rounded off by anything up to half of its step u, in the mean square u²/12; errors of a key's
        numbers, and of different keys, are independent. A score adds up d of them, times the query's numbers; the
        log-sum-exp adds up the scores' errors, times the weights.
        """
        query, key = self.queries[part], self.keys[part]
        step = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(key.abs().clamp(min=1e-30))))
        grouped = query.unflatten(1, (key.shape[1], -1)).square()
        of_score = self.softmax_scale**2 / 12 * torch.einsum("sgrd,tgd->sgrt", grouped, step.square()).flatten(1, 2)
        return (self._weights(self._scores()).square() * of_score).sum(-1).sqrt().T

    def _scores(self) -> Tensor:
        """[S, H, T], scaled; -inf where a query does not see a token."""
        pairs = zip(self.queries, self.keys, strict=True)
        score = sum(
            torch.einsum("sgrd,tgd->sgrt", query.unflatten(1, (key.shape[1], -1)), key).flatten(1, 2)
            for query, key in pairs
        )
        score = score * self.softmax_scale
        return score if self.visible is None else score.masked_fill(~self.visible[:, None], -torch.inf)

    @staticmethod
    def _weights(score: Tensor) -> Tensor:
        return torch.softmax(score, -1).nan_to_num(0)  # rows that see nothing

    @staticmethod
    def _weighted(weight: Tensor, values: Tensor) -> Tensor:
        grouped = weight.unflatten(1, (values.shape[1], -1))
        return torch.einsum("sgrt,tgd->sgrd", grouped, values).flatten(1, 2)


def yardstick(sequences: Iterable[Sequence], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor] | None]:
    """:meth:`Sequence.attend` of each at ``dtype``, and :meth:`Sequence.rounding` where ``dtype`` is float32.

    In 16 bits the inputs' own rounding, which the yardstick has too, is a hundred times larger.
    """
    outs, roundings = [], []
    for sequence in sequences:
        outs.append(sequence.to(dtype).attend())
        if dtype == torch.float32:
            roundings.append(sequence.to(torch.float64).rounding())
    return outs, roundings if dtype == torch.float32 else None
