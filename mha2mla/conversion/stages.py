"""Stages of a recipe: frozen values, each checked by a rule of its own. Imports no torch: --help is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from mha2mla.checkpoints import did_you_mean
from mha2mla.conversion.extension import RecipeObject, is_registered, named_or_itself
from mha2mla.geometry import LATENT_BITS

Selection = Literal["high", "low", "uniform", "2-norm", "rotation", "rorope", "rorope-2", "rorope-4"]
LongropeTable = Literal["short", "long"]
LowRank = Literal["svd-joint", "svd-split", "covariance-joint", "balanced-pca", "whitened-joint"]
UpProjections = Literal["kv-head", "query-head"]
Basis = Literal["importance", "balanced", "rotation", "plain"]


@dataclass(frozen=True)
class Check:
    """Check of one field: the expectation in words, and a predicate of its value.

    Attributes:
        takes: recipe key of the objects that the field takes in place of a name; empty where it takes none.
        words: that the field takes, for a suggestion after a misspelt one.
    """

    expected: str
    allows: Callable[[Any], bool]
    takes: str = ""
    words: tuple[str, ...] = ()

    def or_none(self) -> Check:
        return Check(f"{self.expected}, or null", lambda value: value is None or self.allows(value))


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


def int_from(least: int, most: int) -> Check:
    return Check(f"an int from {least} to {most}", lambda value: is_int(value) and least <= value <= most)


def int_of(*choices: int) -> Check:
    return Check(f"one of {', '.join(map(str, choices))}", lambda value: is_int(value) and value in choices)


def each_is(check: Check) -> Check:
    return Check(
        f"a list of which each is {check.expected}",
        lambda value: isinstance(value, list | tuple) and len(value) <= 1 << 16 and all(map(check.allows, value)),
    )


def positive(most: float) -> Check:
    return Check(f"a number above 0, at most {most:g}", lambda value: is_number(value) and 0 < value <= most)


def one_of(*choices: Any) -> Check:
    return Check(
        f"one of {', '.join(map(repr, choices))}",
        lambda value: any(value is each or (isinstance(each, str) and value == each) for each in choices),
        words=tuple(each for each in choices if isinstance(each, str)),
    )


def object_or(key: str, check: Check, kind: str) -> Check:
    """A value that ``check`` allows, the registered name of an object, or the object."""

    def allows(value: Any) -> bool:
        if isinstance(value, RecipeObject):
            return value.key == key
        return check.allows(value) or (isinstance(value, str) and is_registered(key, value))

    return Check(f"{check.expected}, a registered name or a {kind}", allows, key, check.words)


BOOL = Check("true or false", lambda value: isinstance(value, bool))


class Stage:
    """Base of the frozen dataclasses that a recipe consists of. Annotations say what YAML and flags can give.

    Attributes:
        prefix: start of the stage's keys in messages and in flat recipes.
        checks: field → its check.

    Raises:
        ValueError: naming the key, its value and what was expected.
    """

    prefix: ClassVar[str]
    checks: ClassVar[Mapping[str, Check]]

    def __post_init__(self) -> None:
        for name, check in self.checks.items():
            if check.takes:
                object.__setattr__(self, name, named_or_itself(check.takes, getattr(self, name)))
            value = getattr(self, name)
            if not check.allows(value):
                self.require(name, False, check.expected + did_you_mean(value, check.words))

    def require(self, name: str, right: bool, expected: Any) -> None:
        """Refuses the value of field ``name`` unless it is ``right``."""
        if not right:
            raise ValueError(f"{self.prefix}{name} is {getattr(self, name)!r:.200}; expected {expected}")

    def to_plain(self) -> dict[str, Any]:
        """JSON values of the fields; objects as :meth:`RecipeObject.to_plain` has them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value.to_plain() if isinstance(value, RecipeObject) else value for name, value in values.items()}


@dataclass(frozen=True)
class Rope(Stage):
    """Rotary part: the pairs of a layer that stay rotary, and their share of a budget.

    Args:
        selection: the rule, by name or as a ``RopeRule``. ``"high"`` / ``"low"``: highest / lowest frequencies;
            ``"uniform"``: evenly spaced; ``"2-norm"``: largest |q| · |k| (arXiv 2502.14837); ``"rotation"``: what
            leaving a pair un-rotated costs, in the shared layout over a unitary basis of all heads; ``"rorope"``,
            ``"rorope-2"``, ``"rorope-4"``: RoRoPE with FreqFold (arXiv 2502.07864). Each is a class of
            ``conversion.rope``.
        share: rotary share of a ``cache_ratio``'s budget; None: the layout's own.
        longrope_table: longrope's table that becomes the layer's: ``"short"`` (lengths up to the original
            maximum) or ``"long"``.
    """

    prefix: ClassVar[str] = "rope."
    checks: ClassVar[Mapping[str, Check]] = {
        "selection": object_or("rope.selection", one_of(*get_args(Selection)), "RopeRule"),
        "share": Check(
            "null or a number above 0 and less than 1 (the latent needs the rest)",
            lambda value: value is None or (is_number(value) and 0 < value < 1),
        ),
        "longrope_table": one_of(*get_args(LongropeTable)),
    }

    selection: Selection = "rotation"
    share: float | None = None
    longrope_table: LongropeTable = "short"


_RANKS, _BITS = each_is(int_from(1, 1 << 24)), int_of(*LATENT_BITS)


@dataclass(frozen=True)
class Latent(Stage):
    """Latent: the low-rank rule of un-rotated keys and values, and the ranks of the layers.

    Args:
        rule: by name or as a ``LowRankRule``. ``"svd-joint"``: truncated SVD of the stacked weights [W_K; W_V] (arXiv
            2502.14837); ``"svd-split"``: two SVDs, the rank divided in proportion to their widths;
            ``"covariance-joint"``: the first, weighted by the inputs' second moment on calibration text (arXiv
            2603.17946); ``"balanced-pca"``: that with keys and values scaled to the same energy (arXiv 2502.07864);
            ``"whitened-joint"``: errors count as scores and outputs do, on what attention makes of the text. Each is a
            class of ``latent.rules``.
        centered: put the values' mean, as far as the latent loses it, into ``o_proj.bias`` (a value bias goes there
            anyway): an un-rotated key's mean is invisible to softmax. Off: no bias is created, for engines that cannot
            hold one.
        ranks: ``"uniform"``: every layer has the target's. ``"measured"``: layers get different ranks with the same
            sum, by what each loses when it alone is converted (``latent.ranks``). Or the ranks, one per layer.
        up_projections: heads of W_UK and W_UV: per ``"kv-head"``, as the source's maps are, or per
            ``"query-head"``, as DeepSeek's: the same cache and the same decode kernel, more weights and longer
            prefills, and gradient steps lose less with them. Without gradient steps the same model.
        bits: bits of a cached element in the layout ``latent``: ``"auto"`` chooses them and the rank of each layer
            together, by what each loses; 16 is the cache's dtype; 8, 4, 3 or 2 are integer codes in a basis that
            becomes part of the weights. A ``cache_ratio`` counts their bytes with a scale a token, and ranks are
            multiples of 32. Losses that ``"auto"`` measures by ``latent.ranks`` and for codes sum to the least that the
            bytes of ``cache_ratio`` allow. Or bits beside ranks, one per layer.
        basis: basis of the codes, by name or as a ``BasisRule``. ``"importance"``: F^½ rotated, F = E[g gᵀ] of
            gradients of the predictions; ``"balanced"``: the least loss by second order; ``"rotation"``;
            ``"plain"``: none. Each is a class of ``latent.basis``.
    """

    prefix: ClassVar[str] = "latent."
    checks: ClassVar[Mapping[str, Check]] = {
        "rule": object_or("latent.rule", one_of(*get_args(LowRank)), "LowRankRule"),
        "centered": BOOL,
        "ranks": Check(
            "'uniform', 'measured' or a list of ints from 1 on",
            lambda value: value in ("uniform", "measured") or (bool(value) and _RANKS.allows(value)),
        ),
        "up_projections": one_of(*get_args(UpProjections)),
        "bits": Check(
            f"one of {', '.join(map(str, LATENT_BITS))}, 'auto' or a list of the first",
            lambda value: value == "auto" or _BITS.allows(value) or (bool(value) and each_is(_BITS).allows(value)),
            words=("auto",),
        ),
        "basis": object_or("latent.basis", one_of(*get_args(Basis)), "BasisRule"),
    }

    rule: LowRank = "whitened-joint"
    centered: bool = True
    ranks: list[int] | Literal["uniform", "measured"] = "uniform"
    up_projections: UpProjections = "kv-head"
    bits: int | list[int] | Literal["auto"] = 16
    basis: Basis = "importance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits == "auto":
            self.require("ranks", isinstance(self.ranks, str), "'uniform' or 'measured' beside latent.bits 'auto'")
        elif not isinstance(self.bits, int):
            alike = not isinstance(self.ranks, str) and len(self.ranks) == len(self.bits)
            self.require("bits", alike, f"as many as latent.ranks, which is {self.ranks!r:.200}")


@dataclass(frozen=True)
class Fit(Stage):
    """Fit of a converted layer to the output of the source's.

    Args:
        queries: turn un-rotated queries by half of their mean phase, and fit them to what the source's scores lack, by
            least squares on a sample of the calibration text: before the latent, and again on the keys that it gives
            back (``fit.closed_form``).
        output: fit ``o_proj`` to the source attention's output, by least squares too.
        steps: gradient steps that fit a layer to what the source computes, on inputs that passed the converted layers
            before it (``fit.reconstruction``); 0 for none.
        tokens: tokens of a step, all in windows of one length; at least the longest window's.
    """

    prefix: ClassVar[str] = "fit."
    checks: ClassVar[Mapping[str, Check]] = {
        "queries": BOOL,
        "output": BOOL,
        "steps": int_from(0, 1 << 24),
        "tokens": int_from(1, 1 << 30),
    }

    queries: bool = True
    output: bool = False
    steps: int = 0
    tokens: int = 4096


_LENGTH = int_from(2, 1 << 30)
_LENGTHS = each_is(_LENGTH)


@dataclass(frozen=True)
class Calibration(Stage):
    """Calibration text: which, how much of it, and in windows of which lengths.

    Args:
        text: files and names of texts, joined by ``+`` (``calibration.texts.text_shares``). ``"generated"`` is sampled
            from the source model, which is loaded whole for it; ``"generated-diverse"`` too, in more languages and
            formats. Or a ``CalibrationSource``.
        tokens: tokens of text; every length of window gets the same share, in blocks as large as the longest window,
            at least one.
        lengths: one length of windows, several that divide the longest, or ``"auto"``: from 512 tokens up to the
            model's context (``calibration.blocks.default_lengths``). A conversion is good up to the length that it is
            calibrated at.
        seed: chooses the windows, and the order of the fit's batches.
    """

    prefix: ClassVar[str] = "calibration."
    checks: ClassVar[Mapping[str, Check]] = {
        "text": object_or(
            "calibration.text",
            Check("the name of a text", lambda value: isinstance(value, str) and bool(value)),
            "CalibrationSource",
        ),
        "tokens": int_from(1, 1 << 40),
        "lengths": Check(
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
