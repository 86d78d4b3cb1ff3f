"""What the stages of a recipe have in common: frozen values, each checked by a rule of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mha2mla.conversion.value_rules import Rule


class Stage:
    """Base of the frozen dataclasses that a recipe consists of.

    Attributes:
        prefix: what a key is called with, in messages and where all stages' keys lie beside one another.
        rules: field → what it may be.

    Raises:
        ValueError: naming the key, its value and what was expected.
    """

    prefix: ClassVar[str]
    rules: ClassVar[Mapping[str, Rule]]

    def __post_init__(self) -> None:
        for name, rule in self.rules.items():
            self.require(name, rule.allows(getattr(self, name)), rule.expected)

    def require(self, name: str, right: bool, expected: Any) -> None:
        """Refuses the value of field ``name`` unless it is ``right``."""
        if not right:
            raise ValueError(f"{self.prefix}{name} is {getattr(self, name)!r:.200}; expected {expected}")
