"""The rule by which an op's output is right: how far from float64 it may be, beside plain torch at the same dtype.

One function judges them all: decode and prefill kernels, the rows of ``eval latency``, whole decode steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_CHECKED = "not checked"  # how the status of a row begins whose output nobody judged
ERROR_FACTOR = 2.0  # an output may be this many times as far from float64 as plain torch at the same dtype


@dataclass(frozen=True)
class Judgement:
    """Whether an output is right, and the numbers that say so.

    Attributes:
        ok: whether it is.
        reason: what is wrong, in words with the numbers; empty if nothing is.
        error, torch_error: Frobenius-relative, of the output and of plain torch at the same dtype.
        largest, torch_largest: the largest absolute ones.
        lse_error: largest absolute error of the log-sum-exp over rows that see a token.
    """

    ok: bool
    reason: str
    error: float
    torch_error: float
    largest: float
    torch_largest: float
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

    Right means: both errors at most ``factor`` times torch's, or what ``rounding`` lets expect if that is more, and
    half a unit in the last place (torch's rounding of a few numbers may be nothing by chance); inf and NaN where
    float64 has them; rows that see no token exactly 0 with a log-sum-exp of -inf; the other log-sum-exps within the
    rounding of float32 products, and ``factor`` times torch's error, or what ``lse_rounding`` lets expect, where that
    rounds more than these.

    Args:
        out, expected, torch_out: [..., rows, heads, d]; ``torch_out`` in the dtype of the inputs.
        lse, expected_lse: [..., heads, rows]. ``lse`` is None where an implementation has none; without
            ``expected_lse`` every row sees a token.
        rounding: as ``expected``: root mean square of each number's error in a formula that is right
            (:meth:`mha2mla.kernel_testing.textbook.Sequence.rounding`); None: torch's error alone says.
        torch_lse: as ``expected_lse``, in torch with what the formula rounds before scores are products of it: rotary
            keys that are not inputs. None: there is nothing of the kind.
        lse_rounding: as ``expected_lse``: root mean square of the error that the same rounding is expected to put on it
            (:meth:`mha2mla.kernel_testing.textbook.Sequence.lse_rounding`). Who rounds other numbers than torch, such
            as halves of a key, has errors as large as torch's and not the same ones; over the few rows of a short call
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
    return Judgement(not wrong, "; ".join(wrong), error, torch_error, largest, torch_largest, lse_error)


def _largest_of(rounding: Tensor) -> float:
    """Of n normally distributed errors the largest is about sqrt(2 ln n) standard deviations."""
    return float(rounding.max()) * math.sqrt(2 * math.log(max(rounding.numel(), 2)))


def _lse_distance(
    lse: Tensor, expected: Tensor, torch_lse: Tensor | None, rounding: Tensor | None, factor: float
) -> tuple[str, float]:
    """What is wrong with a log-sum-exp, and its largest error over rows that see a token."""
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
