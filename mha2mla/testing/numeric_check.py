"""The numeric check of an op's output: its distance from float64, relative to plain torch at the same dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NOT_CHECKED = "not checked"  # begins the status of a row whose output was not checked
UNIT = torch.finfo(torch.float32).eps / 2  # sums are kept in float32 whatever the dtype of the inputs
ERROR_FACTOR = 2.0  # an output may be this many times as far from float64 as plain torch at the same dtype


@dataclass(frozen=True)
class Judgement:
    """Verdict on an output, with its numbers.

    Attributes:
        ok: the output is right.
        reason: the fault, with its numbers; empty where ``ok``.
        error, torch_error: Frobenius-relative, of the output and of plain torch at the same dtype.
        lse_error: largest absolute error of the log-sum-exp over rows that see a token.
    """

    ok: bool
    reason: str
    error: float
    torch_error: float
    lse_error: float = 0.0


def errors(out: Tensor, expected: Tensor) -> tuple[float, float]:
    """Frobenius-relative and largest absolute error against float64."""
    if not out.numel():
        return 0.0, 0.0
    difference = (out.double() - expected).abs()
    return float(difference.norm() / expected.norm().clamp(min=1e-300)), float(difference.max())


def verdict(
    out: Tensor,
    lse: Tensor | None,
    expected: Tensor,
    expected_lse: Tensor | None,
    torch_out: Tensor,
    rounding: Tensor | None = None,
    torch_lse: Tensor | None = None,
    lse_rounding: Tensor | None = None,
    factor: float = ERROR_FACTOR,
) -> Judgement:
    """Judges ``out`` and ``lse`` against float64's, beside ``torch_out``, the same formula in torch.

    Right means: both errors at most ``factor`` times torch's, or than ``rounding`` predicts if that is more, and half a
    unit in the last place (torch's rounding of a few elements may be nothing by chance); inf and NaN where float64 has
    them; rows that see no token exactly 0 with a log-sum-exp of -inf; the other log-sum-exps within the rounding of
    float32 products, and ``factor`` times torch's error, or than ``lse_rounding`` predicts, where that rounds more.

    Args:
        out, expected, torch_out: [..., rows, heads, d]; ``torch_out`` in the dtype of the inputs.
        lse, expected_lse: [..., heads, rows]. ``lse`` is None where an implementation has none; without
            ``expected_lse`` every row sees a token.
        rounding: as ``expected``: root mean square of each element's error in a formula that is right
            (:meth:`PlainAttention.rounding`); None: torch's error alone.
        torch_lse: as ``expected_lse``, in torch with rotary keys made at the inputs' dtype; None: keys are inputs.
        lse_rounding: as ``expected_lse``: root mean square of the error that this rounding of keys is expected to put
            on it (:meth:`PlainAttention.lse_rounding`). A kernel that rounds other intermediates than torch, such as
            halves of a key, has errors as large as torch's and not the same ones; over the few rows of a short call
            torch's largest is small by chance now and then.
        factor: of another form of the same sum, which may be further from float64 than the same form.
    """
    wrong = []
    finite = expected.isfinite()
    (error, largest), (torch_error, torch_largest) = (errors(x[finite], expected[finite]) for x in (out, torch_out))
    if not (torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())):
        wrong.append(f"{int((~out.isfinite()).sum())} numbers of out are NaN or inf where float64 is finite")
    elif expected_lse is not None and float(out.transpose(-3, -2)[expected_lse == -torch.inf].abs().sum()) != 0:
        wrong.append("a row that sees no token is not zero")
    elif not bool(torch_out[finite].isfinite().all()):
        wrong.append("plain torch has NaN or inf where float64 is finite: nothing to compare with")
    elif bool(finite.any()):
        ulp, top = torch.finfo(torch_out.dtype).eps, float(expected[finite].abs().max())
        lost = lost_at_most = 0.0
        if rounding is not None:
            lost = float(rounding[finite].norm() / expected[finite].norm().clamp(min=1e-300))
            lost_at_most = _largest_of(rounding[finite])
        limit = factor * max(torch_error, lost) + ulp / 2
        highest = factor * max(torch_largest, lost_at_most) + ulp * top
        if not error <= limit:
            wrong.append(f"relative error {error:.2e}, plain torch has {torch_error:.2e}; expected at most {limit:.2e}")
        elif not largest <= highest:
            wrong.append(
                f"largest error {largest:.2e}, plain torch has {torch_largest:.2e}; expected at most {highest:.2e}"
            )
    lse_error = 0.0
    if lse is not None and expected_lse is not None:
        why, lse_error = _lse_distance(lse, expected_lse, torch_lse, lse_rounding, factor)
        wrong += [why] if why else []
    return Judgement(not wrong, "; ".join(wrong), error, torch_error, lse_error)


def _largest_of(rounding: Tensor) -> float:
    """Expected largest of n normally distributed errors: about sqrt(2 ln n) standard deviations."""
    return float(rounding.max()) * math.sqrt(2 * math.log(max(rounding.numel(), 2)))


def _lse_distance(
    lse: Tensor, expected: Tensor, torch_lse: Tensor | None, rounding: Tensor | None, factor: float
) -> tuple[str, float]:
    """The fault of a log-sum-exp, and its largest error over rows that see a token."""
    seen = expected != -torch.inf
    if not torch.equal(lse != -torch.inf, seen):
        return "lse is -inf at the wrong rows", 0.0
    if not bool(seen.any()):
        return "", 0.0
    # Scores are sums of float32 products: the rounding of one score bounds that of the log-sum-exp.
    bound = 64 * torch.finfo(torch.float32).eps * float(expected[seen].abs().max().clamp(min=1))
    if torch_lse is not None:
        of_torch = float((torch_lse[seen] - expected[seen]).abs().max())
        bound += factor * max(of_torch, 0.0 if rounding is None else _largest_of(rounding[seen]))
    error = float((lse[seen].double() - expected[seen]).abs().max())
    return ("" if error <= bound else f"lse is off by {error:.2e}; expected at most {bound:.2e}"), error


@dataclass(frozen=True)
class PlainAttention:
    """Attention of one sequence in plain torch, in one or several parts whose scores add up (MLA: latent and rotary).

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

    def to(self, dtype: torch.dtype) -> PlainAttention:
        queries, keys = (tuple(x.to(dtype) for x in parts) for parts in (self.queries, self.keys))
        return replace(self, queries=queries, keys=keys, values=self.values.to(dtype))

    def attend(self) -> Tensor:
        """[S, H, d_v] at the inputs' dtype, every intermediate held in it; rows that see nothing are 0."""
        return self._weighted(self._weights(self._scores()), self.values)

    def lse(self) -> Tensor:
        """[H, S] log-sum-exp of the scores; -inf of rows that see nothing."""
        return torch.logsumexp(self._scores(), -1).T

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
        sees_nothing = (score == -torch.inf).all(-1, keepdim=True)
        return torch.where(sees_nothing, 0, torch.softmax(score, -1))

    @staticmethod
    def _weighted(weight: Tensor, values: Tensor) -> Tensor:
        grouped = weight.unflatten(1, (values.shape[1], -1))
        return torch.einsum("sgrt,tgd->sgrd", grouped, values).flatten(1, 2)


def plain_attention(
    sequences: Iterable[PlainAttention], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Attention of at least one sequence in float64, and at ``dtype`` in torch.

    Returns:
        out [N, H, d_v] and lse [H, N] in float64, over the rows of all sequences; out at ``dtype``; and its expected
        rounding, None in 16 bits, where the inputs' own rounding, which torch has too, is a hundred times larger.
    """
    found = []
    for sequence in sequences:
        wide = sequence.to(torch.float64)
        precision = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        rounding = [wide.rounding() * precision] if dtype.itemsize >= 4 else []
        found.append((wide.attend(), wide.lse().T, sequence.to(dtype).attend(), *rounding))
    out, lse, torch_out, *rounding = map(torch.cat, zip(*found, strict=True))
    return out, lse.T, torch_out, rounding[0] if rounding else None
