"""Settings of healing and their presets. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from mha2mla.checkpoints import did_you_mean
from mha2mla.conversion.calibration.texts import DIVERSE

PresetName = Literal["quick", "standard", "long"]
Trained = Literal["attention", "lora", "all"]
Optimizer = Literal["orthogonal", "muon", "adamw"]
Keep = Literal["best", "last"]
When = Literal["auto", "always", "never"]
# By time: a laptop's GPU, one H200, a night. tokens_at_once is what a pass holds in memory.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "quick": {
            "minutes": 5.0, "text_tokens": 1 << 20, "batch_tokens": 1 << 15, "tokens_at_once": 1 << 12,
            "length": 512, "long_length": 2048,
        },
        "standard": {
            "minutes": 15.0, "text_tokens": 1 << 24, "batch_tokens": 1 << 15, "tokens_at_once": 1 << 15,
            "length": 1024, "long_length": 8192,
        },
        "long": {
            "minutes": 480.0, "text_tokens": 1 << 27, "batch_tokens": 1 << 17, "tokens_at_once": 1 << 15,
            "length": 1024, "long_length": 8192,
        },
    }
)  # fmt: skip


_FEWEST_TOKENS = 4  # runs of four are counted
FEWEST_STEPS = 50  # below, a preset's batches shrink: a small budget was one step, whose rate is 0


@dataclass(frozen=True)
class Settings:
    """Settings of one healing.

    Attributes:
        preset: source of what is not given.
        minutes: minutes of steps on this machine, whose speed is measured before and by every twentieth of them
            (up to a quarter more follow than were planned, or fewer);
            text, compilation and evaluations come on top. None: ``tokens`` alone.
        tokens: most tokens to train on, in whole steps; None: ``minutes`` alone.
        optimizer: "orthogonal", whose step of a weight matrix is the average of orthogonalised gradients; "muon", the
            orthogonalised average; or "adamw".
        train: "attention", "lora" (adapters of attention's projections, merged at the end), or "all" weights.
        rate: learning rate; None: measured, half of the largest at which a first step adds at most a twentieth to the
            KL.
        latent_rate: learning rate of the maps to and from the latent, beside a given ``rate``; None: ``rate``.
        lora_rank: rank of an adapter, whose scale is 2.
        text_tokens: different tokens of text, at most; more training passes over them again.
        length, long_length: tokens of a window; the first divides the second.
        long_share: share of the tokens that stand in long windows.
        row: tokens of a long window that the source writes in one go: a small model that goes on for long repeats
            itself. Short windows are put together of rows of 512.
        own_share: share of the tokens, in short windows, that the converted model writes in place of the text's.
        batch_tokens: tokens of an optimizer step, in whole passes; fewer than the preset's for a small budget, and no
            more than the budget.
        tokens_at_once: most tokens of a forward and backward pass, in whole long windows; a GPU with too little memory
            gets fewer.
        checkpointing: whether the backward pass recomputes activations; "auto" where those of one window do not fit
            the GPU's memory, on a CPU and under FSDP where hidden states have 2048 elements or more.
        compile: torch.compile makes the decoder layers and the loss; "auto" on CUDA where the backward pass
            recomputes nothing and FSDP shards nothing.
        evaluations: most evaluations on held-out windows after the one before training, and checkpoints.
        keep: the weights with the smallest loss on held-out windows, those between the conversion's and an
            evaluation's among them, or the last ones.
        seed: seed of text, order and adapters.

    Raises:
        ValueError: a value outside these, by name.
    """

    preset: PresetName
    minutes: float | None
    text_tokens: int
    length: int
    long_length: int
    batch_tokens: int
    tokens_at_once: int
    tokens: int | None = None
    optimizer: Optimizer = "orthogonal"
    train: Trained = "attention"
    rate: float | None = None
    latent_rate: float | None = None
    lora_rank: int = 16
    long_share: float = 0.4
    row: int = 1024
    own_share: float = 0.0
    checkpointing: When = "auto"
    compile: When = "auto"
    evaluations: int = 10
    keep: Keep = "best"
    seed: int = 0

    def __post_init__(self) -> None:
        words_of = {"train": Trained, "optimizer": Optimizer, "keep": Keep, "checkpointing": When, "compile": When}
        for name, kind in words_of.items():
            value, words = getattr(self, name), get_args(kind)
            if value not in words:
                close = did_you_mean(value, words)
                raise ValueError(f"{name} is {value!r:.80}; expected one of {', '.join(map(repr, words))}{close}")
        counts = ("tokens", "text_tokens", "length", "long_length", "row", "batch_tokens", "tokens_at_once")
        for name in (*counts, "lora_rank", "evaluations"):
            if (value := getattr(self, name)) is not None:
                _check_count(name, value, _FEWEST_TOKENS if name in counts else 1)
        for name in ("minutes", "rate", "latent_rate"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} is {value!r:.80}; expected a number above 0")
        for name in ("long_share", "own_share"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value <= 1):
                raise ValueError(f"{name} is {value!r:.80}; expected a number from 0 to 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed!r:.80}; expected a whole number from 0 to 2**32 - 1")
        if self.latent_rate is not None and self.rate is None:
            raise ValueError(f"latent_rate is {self.latent_rate} and rate is None; expected a rate beside it")
        if self.long_length % self.length:
            raise ValueError(f"long_length is {self.long_length}; expected a multiple of length={self.length}")
        if self.minutes is None and self.tokens is None:
            raise ValueError("minutes and tokens are None; expected one of them")

    @classmethod
    def of(cls, preset: str, *, context: int | None = None, **given: Any) -> Settings:
        """The preset's values, but for those ``given`` that are not None.

        Args:
            context: positions that the source takes; windows of the preset are no longer.

        Raises:
            ValueError: no such preset, or as above.
        """
        if preset not in get_args(PresetName):
            close = did_you_mean(preset, PRESETS)
            raise ValueError(f"preset is {preset!r:.80}; expected one of {', '.join(map(repr, PRESETS))}{close}")
        names = [each.name for each in fields(cls)]
        if unknown := sorted(given.keys() - names):
            raise ValueError(f"{unknown[0]!r:.80} is no setting of healing{did_you_mean(unknown[0], names)}")
        given = {name: value for name, value in given.items() if value is not None}
        if "lora_rank" in given and given.get("train") != "lora":
            raise ValueError(f"lora_rank is {given['lora_rank']!r:.80} without train='lora'; it would change nothing")
        values = {"preset": preset, **PRESETS[preset], **given}
        if "tokens" in given and "minutes" not in given:
            values["minutes"] = None
        for name in ("length", "long_length"):
            if name not in given and context is not None:
                values[name] = min(values[name], context)
        if "long_length" not in given:
            _check_count("length", values["length"], _FEWEST_TOKENS)  # before it divides
            values["long_length"] = max(values["length"], values["long_length"] // values["length"] * values["length"])
        return cls(**values)

    def of_enough_steps(self, tokens: int, steps: int = FEWEST_STEPS) -> Settings:
        """These settings, with smaller steps where ``tokens`` would be fewer than ``steps`` of them."""
        return replace(self, batch_tokens=max(4, min(self.batch_tokens, tokens // steps)))

    @property
    def accumulation(self) -> int:
        """Passes of an optimizer step."""
        return max(1, self.batch_tokens // self.pass_tokens)

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass."""
        most = min(self.tokens_at_once, self.batch_tokens)
        return max(1, most // self.long_length) * self.long_length

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.accumulation * self.pass_tokens


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r:.80}; expected a whole number of at least {least}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


DEFAULT_TEXT = DIVERSE
