"""The recipe's stage for the text that a conversion looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from mha2mla.conversion.stage import Stage
from mha2mla.conversion.value_rules import Rule, each_is, int_from

_LENGTH = int_from(2, 1 << 30)
_LENGTHS = each_is(_LENGTH)


@dataclass(frozen=True)
class Calibration(Stage):
    """What text, how much of it, and in windows of which lengths.

    Args:
        text: what ``mha2mla.texts.mixed_windows`` takes: texts by name, several of them joined by ``+``;
            ``"generated"`` is sampled from the source model, which is loaded whole for it.
        tokens: of calibration text; every length gets the same share of them, in blocks as large as the longest window,
            at least one.
        lengths: of windows: one, several that divide the longest, or ``"auto"``: ``blocks.default_lengths``, from 512
            tokens up to the model's context. What a model is calibrated at is what it is good at.
        seed: chooses the windows, and the order of the fit's batches.
    """

    prefix: ClassVar[str] = "calibration."
    rules: ClassVar[Mapping[str, Rule]] = {
        "text": Rule("the name of a text", lambda value: isinstance(value, str) and bool(value)),
        "tokens": int_from(1, 1 << 40),
        "lengths": Rule(
            "'auto', an int from 2 on or a list of them",
            lambda value: value == "auto" or _LENGTH.allows(value) or (bool(value) and _LENGTHS.allows(value)),
        ),
        "seed": int_from(0, 1 << 62),
    }

    text: str = "builtin:pydoc"
    tokens: int = 24576
    lengths: int | list[int] | Literal["auto"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lengths != "auto":
            listed = [self.lengths] if isinstance(self.lengths, int) else self.lengths
            longest = max(listed)
            divide = not any(longest % length for length in listed)
            self.require("lengths", divide, "lengths that divide the longest one")
            self.require("tokens", self.tokens >= longest, f"at least one window of calibration.lengths={self.lengths}")
