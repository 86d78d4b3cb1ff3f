"""Objects that a recipe takes in place of a name: rules and calibration sources. Imports no torch."""

from __future__ import annotations

import hashlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

if TYPE_CHECKING:
    import torch

PLUGINS = "mha2mla_rules"  # group of entry points: modules that register names
T = TypeVar("T", bound="type[RecipeObject]")


class RecipeObject:
    """Base of the kinds: ``RopeRule``, ``LowRankRule``, ``BasisRule``, ``CalibrationSource``.

    A class of a kind is a frozen dataclass, and its fields are JSON values. A conversion records the import path and
    the fields of an instance that has no registered name; a resumed run compares them. A converted checkpoint loads
    without the class.

    Attributes:
        key: recipe key that takes the kind.
        keyword: argument of ``Recipe`` that takes an instance: ``Recipe(rope=TwoNorm())``.
    """

    key: ClassVar[str]
    keyword: ClassVar[str]
    _named: ClassVar[dict[tuple[str, str], RecipeObject]] = {}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Registered names of this kind."""
        return tuple(name for key, name in cls._named if key == cls.key)

    @classmethod
    def find(cls, value: str | Self) -> Self:
        """``value`` itself, or the instance that has this name."""
        return cls._named[cls.key, value] if isinstance(value, str) else value

    def to_plain(self) -> dict[str, Any]:
        """Import path and fields, as records hold them."""
        return {"class": f"{type(self).__module__}:{type(self).__qualname__}", **asdict(self)}

    def code_hash(self) -> str:
        """sha256 of the source of the class and of those that it derives from, but for this package's and Python's own;
        of nothing where Python has none (an interactive session)."""
        code = ""
        for each in type(self).__mro__:
            if each.__module__.partition(".")[0] not in {"mha2mla", *sys.stdlib_module_names}:
                with suppress(OSError, TypeError):
                    code += inspect.getsource(each)
        return hashlib.sha256(code.encode()).hexdigest()


class CalibrationSource(RecipeObject, ABC):
    """Calibration text of the caller's own, passed as ``Recipe(calibration=MyText())``: a frozen dataclass.

    The same arguments must give the same windows: a conversion resumes to the bit.
    """

    key: ClassVar[str] = "calibration.text"
    keyword: ClassVar[str] = "calibration"

    @abstractmethod
    def windows(self, tokenizer: Any, length: int, count: int, *, seed: int) -> torch.Tensor:
        """At most ``count`` windows of tokens, int64 [windows, length] on the CPU.

        Args:
            tokenizer: the source model's, a tokenizer of transformers.
            length: tokens of a window; called once for each of the recipe's ``calibration.lengths``.
            seed: the recipe's ``calibration.seed``.
        """


def described(value: Any) -> str:
    """A rule's result for error messages: dtype, shape and device of a tensor, or the value itself."""
    if all(hasattr(value, name) for name in ("dtype", "shape", "device")):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return f"{value!r:.80}"


def register(name: str, **fields: Any) -> Callable[[T], T]:
    """Class decorator: YAML, flags and presets know the instance ``cls(**fields)`` by ``name``.

    Raises:
        ValueError: the class is no frozen dataclass of a kind that a recipe takes, or another class has the name.
    """

    def add(cls: T) -> T:
        if not hasattr(cls, "key") or not is_dataclass(cls) or not cls.__dataclass_params__.frozen:
            raise ValueError(
                f"{cls.__qualname__} is registered as {name!r}; expected a frozen dataclass of a RopeRule, LowRankRule,"
                " BasisRule or CalibrationSource"
            )
        other = RecipeObject._named.get((cls.key, name))
        if other is not None and other.to_plain()["class"] != cls(**fields).to_plain()["class"]:
            raise ValueError(f"{cls.key} {name!r} is {type(other).__qualname__} already; expected another name")
        RecipeObject._named[cls.key, name] = cls(**fields)
        return cls

    return add


def is_registered(key: str, name: str) -> bool:
    """True for a registered name under a recipe key; an unknown name loads the entry points of :data:`PLUGINS`."""
    if (key, name) not in RecipeObject._named:
        for point in entry_points(group=PLUGINS):
            point.load()
    return (key, name) in RecipeObject._named


def named_or_itself(key: str, value: Any) -> Any:
    """The registered name of an instance that has one, the instance of a record, or ``value`` itself.

    Raises:
        ValueError: a record names a class that is not imported, or other fields than it has.
    """
    if isinstance(value, Mapping) and isinstance(value.get("class"), str):
        module, _, name = value["class"].partition(":")
        found = getattr(sys.modules.get(module), name, None)  # importing what a file names would run any code
        if not (isinstance(found, type) and issubclass(found, RecipeObject)):
            raise ValueError(f"{key} is of class {value['class']!r:.200}; expected one that is imported")
        try:
            value = found(**{name: each for name, each in value.items() if name != "class"})
        except TypeError as error:
            raise ValueError(f"{key} is {dict(value)!r:.200}; expected the fields of its class: {error}") from error
    if isinstance(value, RecipeObject):
        same = (name for (kind, name), each in RecipeObject._named.items() if kind == key and each == value)
        return next(same, value)
    return value
