"""The recipe's stage for what fits a converted layer to the source's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mha2mla.conversion.stage import Stage
from mha2mla.conversion.value_rules import BOOL, Rule, int_from


@dataclass(frozen=True)
class Fit(Stage):
    """How a converted layer is fitted to what the source computes.

    Args:
        queries: turn un-rotated queries by half of their mean phase, and fit them to what the source's scores lack, by
            least squares on a sample of the calibration text: before the latent, and again on the keys that it gives
            back (``fit.closed_form``).
        output: fit ``o_proj`` to the source attention's output, likewise.
        steps: gradient steps that fit a layer to what the source computes, on inputs that passed the converted layers
            before it (``fit.reconstruction``); 0 for none.
        tokens: of a step, all in windows of one length; at least the longest window's.
    """

    prefix: ClassVar[str] = "fit."
    rules: ClassVar[Mapping[str, Rule]] = {
        "queries": BOOL,
        "output": BOOL,
        "steps": int_from(0, 1 << 24),
        "tokens": int_from(1, 1 << 30),
    }

    queries: bool = True
    output: bool = False
    steps: int = 0
    tokens: int = 4096
