"""Recipe of a conversion: five stages, what they need of a source, and how they are written down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mha2mla.checkpoints import did_you_mean
from mha2mla.conversion.calibration.texts import recorded_name
from mha2mla.conversion.extension import CalibrationSource, RecipeObject
from mha2mla.conversion.presets import AUTO, NO_PRESET, PRESETS, choose_preset, with_preset
from mha2mla.conversion.stages import Calibration, Fit, Latent, Rope, Stage
from mha2mla.conversion.target import LAYOUTS, Target
from mha2mla.environment import compute_device
from mha2mla.geometry import LATENT_BITS, MLAGeometry

if TYPE_CHECKING:
    from mha2mla.conversion.families import SourceSpec
    from mha2mla.conversion.latent.basis import BasisRule
    from mha2mla.conversion.latent.rules import LowRankRule
    from mha2mla.conversion.layer import LayerRules
    from mha2mla.conversion.rope import RopeRule

STAGES: Mapping[str, type[Stage]] = {
    "target": Target,
    "rope": Rope,
    "latent": Latent,
    "fit": Fit,
    "calibration": Calibration,
}
KEYS: Mapping[str, tuple[str, str]] = {  # key as it is written → stage and field
    made.prefix + each.name: (stage, each.name) for stage, made in STAGES.items() for each in fields(made)
}


@dataclass(frozen=True, init=False)
class Recipe:
    """Rules that turn layers into MLA, and the elements per token that these may cache.

    Keys are given by name, as everywhere else (mappings, YAML, flags, keyword arguments of ``convert``):
    ``"STAGE.KEY"``, or the stage with a mapping of its keys; the target's keys need no stage. ``Recipe(preset="quick",
    cache_ratio=0.25, rope={"selection": "2-norm"})`` is one, and so is ``Recipe(**{"rope.selection": "2-norm"})``.
    A rule is a name or an object: ``Recipe(rope=TwoNorm(), low_rank=MyFactorizer(), calibration=MyText())``.

    Args:
        preset: gives all other keys. Default "auto", the best that the device of this machine can run;
            ``convert(device=...)`` chooses for its own device where it gets a mapping.
        keys: of the recipe; a stage may also be the stage itself (``fit=Fit(steps=8)``).

    Attributes:
        preset: the one whose keys were taken; never "auto".

    Raises:
        ValueError: naming the key, its value and what was expected.
    """

    target: Target
    rope: Rope
    latent: Latent
    fit: Fit
    calibration: Calibration
    preset: str

    def __init__(self, *, preset: str = AUTO, **keys: Any) -> None:
        self._take(normalize_keys({"preset": preset, **keys}), None)

    def _take(self, keys: Mapping[str, Any], device_type: str | None) -> str:
        """Sets the stages from normalised ``keys``; the reason for the preset.

        Args:
            device_type: that "auto" chooses for; None: this machine's.
        """
        given = {key: value for key, value in keys.items() if key != "preset"}
        preset = keys.get("preset", AUTO)
        if preset == AUTO:
            stages_of(NO_PRESET, given)  # a layout that is left open is refused on every machine
            device_type = device_type or compute_device(None).type
        preset, why = choose_preset(preset, given, device_type)
        for name, value in {**stages_of(preset, given), "preset": preset}.items():
            object.__setattr__(self, name, value)
        layout = self.target.layout
        if layout not in self.rope_rule.layouts:
            raise ValueError(
                f"rope.selection is {self.rope.selection!r} in the {layout} layout; expected one of"
                f" {', '.join(map(repr, selections(layout)))}, or another layout"
            )
        if self.rope.share is not None and not LAYOUTS[layout].has_rope_cache:
            raise ValueError(
                f"rope.share is {self.rope.share!r} in the {layout} layout; expected none, since it caches"
                " nothing rotary, or layout: shared (or per-group) beside it"
            )
        bits, has_ratio = self.latent.bits, self.target.cache_ratio is not None
        if not isinstance(bits, int) and (LAYOUTS[layout].has_rope_cache or not (has_ratio or bits != "auto")):
            raise ValueError(
                f"latent.bits is {bits!r:.200} in the {layout} layout with cache_ratio {self.target.cache_ratio};"
                " expected layout: latent and a cache_ratio, or latent.bits 16"
            )
        return why

    @classmethod
    def choose(cls, keys: Recipe | Mapping[str, Any], device_type: str | None = None) -> tuple[Recipe, str]:
        """Recipe of :func:`normalize_keys`'s ``keys`` on a type of device (None: this machine's), or ``keys`` that is
        one; and the reason for its preset.

        Raises:
            ValueError: a bad value, or widths without a layout.
        """
        if isinstance(keys, Recipe):
            return keys, f"{keys.preset}, as asked for"
        recipe = object.__new__(cls)
        return recipe, recipe._take(keys, device_type)

    @classmethod
    def from_preset(cls, name: str, **keys: Any) -> Recipe:
        """The preset ``name`` with ``keys`` on top; a target among them replaces the preset's.

        Raises:
            ValueError: no such preset, a bad key, or widths where neither says in which layout.
        """
        return cls(preset=name, **keys)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values, such as :meth:`to_dict` gives them; without a preset that of "auto".

        Raises:
            ValueError: no mapping, an unknown key or preset, or a bad value.
        """
        return cls.choose(normalize_keys(values))[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON values: a mapping for each stage, and the preset. A rule without a name is its class and fields."""
        return {**{name: getattr(self, name).to_plain() for name in STAGES}, "preset": self.preset}

    def flat(self) -> dict[str, Any]:
        """The values of :meth:`to_dict` by ``"STAGE.KEY"``."""
        return _flat({name: getattr(self, name) for name in STAGES})

    def changes(self) -> dict[str, Any]:
        """Keys whose values are not the preset's."""
        usual = _flat(stages_of(self.preset, {}))
        return {key: value for key, value in self.flat().items() if value not in (None, usual[key])}

    def for_records(self) -> Recipe:
        """The recipe with texts that are files by their names alone: records name no folders of this machine."""
        if isinstance(self.calibration.text, RecipeObject):
            return self
        recipe = copy(self)
        calibration = replace(self.calibration, text=recorded_name(self.calibration.text))
        object.__setattr__(recipe, "calibration", calibration)
        return recipe

    @property
    def objects(self) -> dict[str, RecipeObject]:
        """The rules, and calibration text that is an object, by their keys."""
        found = (self.rope_rule, self.low_rank_rule, self.basis_rule, self.calibration_text)
        return {each.key: each for each in found if isinstance(each, RecipeObject)}

    @property
    def rope_rule(self) -> RopeRule:
        """The rule that ``rope.selection`` names, or is."""
        from mha2mla.conversion.rope import RopeRule  # with torch, which takes longer than a --help

        return RopeRule.find(self.rope.selection)

    @property
    def low_rank_rule(self) -> LowRankRule:
        """The rule that ``latent.rule`` names, or is."""
        from mha2mla.conversion.latent.rules import LowRankRule  # with torch

        return LowRankRule.find(self.latent.rule)

    @property
    def basis_rule(self) -> BasisRule:
        """The rule that ``latent.basis`` names, or is."""
        from mha2mla.conversion.latent.basis import BasisRule  # with torch

        return BasisRule.find(self.latent.basis)

    @property
    def calibration_text(self) -> str | CalibrationSource:
        """``calibration.text``: a text by name, or the source of windows that it names or is."""
        text = self.calibration.text
        return CalibrationSource.find(text) if text in CalibrationSource.names() else text

    @property
    def searches_layer_ranks(self) -> bool:
        """True where the ranks of the layers must be measured before there are geometries."""
        is_open = self.latent.ranks == "measured" or self.latent.bits == "auto"
        return is_open and self.target.cache_ratio != 1.0

    def geometry(self, spec: SourceSpec) -> MLAGeometry:
        """The geometry that this recipe gives a layer of ``spec``; but for the rank, where layers differ, and for bits
        that are by layer: 16 here.

        Raises:
            ValueError: the target does not fit the source.
        """
        self.rope_rule.check(spec)
        latent = self.latent
        made = partial(
            self.target.geometry, *(spec, self.rope.share), per_query_head=latent.up_projections == "query-head"
        )
        if latent.bits == "auto":
            made(bits=min(LATENT_BITS))  # refuses a budget of less than a block
        return made(bits=latent.bits if isinstance(latent.bits, int) else None)

    def geometries(
        self, spec: SourceSpec, ranks: list[int] | None = None, bits: list[int] | None = None
    ) -> tuple[MLAGeometry, ...]:
        """The geometry of each layer of ``spec``.

        Args:
            ranks, bits: what a search found; default those of the recipe.

        Raises:
            ValueError: ``latent.ranks`` is still to be measured, has not one rank per layer, or one that does not fit.
        """
        common = self.geometry(spec)
        if ranks is None:
            if self.searches_layer_ranks and not common.is_full_rank:
                raise ValueError("latent.ranks is 'measured'; expected ranks (latent.ranks finds them)")
            if isinstance(self.latent.ranks, str):
                return (common,) * spec.num_layers
            ranks = self.latent.ranks
            bits = None if isinstance(self.latent.bits, int) else self.latent.bits
        if len(ranks) != spec.num_layers:
            raise ValueError(f"latent.ranks has {len(ranks)} ranks; expected {spec.num_layers}, one per layer")
        full = common.full_kv_lora_rank
        for layer, rank in enumerate(ranks):
            if rank > full:
                raise ValueError(f"latent.ranks[{layer}] is {rank}; expected at most {full}")
        bits = [common.latent_bits] * len(ranks) if bits is None else bits
        return tuple(
            replace(common, kv_lora_rank=rank, latent_bits=each) for rank, each in zip(ranks, bits, strict=True)
        )

    def measured(self, geometry: MLAGeometry) -> dict[str, bool]:
        """Statistics to collect beside moments, by the arguments of ``StatisticsCollector``."""
        lossy, reads = not geometry.is_full_rank, self.low_rank_rule.reads_attended
        return {
            "phases": geometry.qk_nope_head_dim > 0 and (self.rope_rule.reads_phases or self.fit.queries),
            "attended": lossy and (self.latent.centered or reads),
            "distances": lossy and not geometry.has_rope_cache and reads,
        }

    def layer_rules(self, geometry: MLAGeometry) -> LayerRules:
        """The part of the recipe that converts one layer of this ``geometry``."""
        from mha2mla.conversion.layer import LayerRules  # with torch

        lossy_keys = geometry.qk_nope_head_dim > 0 or not geometry.has_rope_cache
        return LayerRules(
            rope=self.rope_rule,
            low_rank=self.low_rank_rule,
            per_group=LAYOUTS[self.target.layout].per_group,
            centered=self.latent.centered,
            turn_queries=self.fit.queries,
            refit_queries=self.fit.queries and lossy_keys and not geometry.is_full_rank,
            refit_output=self.fit.output and not geometry.is_full_rank,
        )

    def needs_sample(self, geometry: MLAGeometry) -> bool:
        """True where inputs themselves must be kept, besides their moments."""
        rules = self.layer_rules(geometry)
        return rules.refit_queries or rules.refit_output

    def needs_calibration(self, geometry: MLAGeometry) -> bool:
        """True where any statistic of calibration text enters the weights."""
        if geometry.has_codes:
            return True
        if geometry.is_full_rank:  # "auto" has no codes there
            return False
        selects = geometry.qk_nope_head_dim > 0 and self.rope_rule.reads_statistics
        reads = selects or self.low_rank_rule.reads_statistics or self.latent.centered
        return reads or self.fit.steps > 0 or self.measured(geometry)["phases"] or self.needs_sample(geometry)


def _flat(stages: Mapping[str, Stage]) -> dict[str, Any]:
    """JSON values of stages by ``"STAGE.KEY"``."""
    return {stage.prefix + key: value for stage in stages.values() for key, value in stage.to_plain().items()}


def selections(layout: str) -> tuple[str, ...]:
    """The names of ``rope.selection`` that ``layout`` knows."""
    from mha2mla.conversion.rope import RopeRule

    return tuple(name for name in RopeRule.names() if layout in RopeRule.find(name).layouts)


def stages_of(preset: str, keys: Mapping[str, Any]) -> dict[str, Stage]:
    """The stages of ``preset`` with normalised ``keys`` on top, by name; imports no torch.

    Raises:
        ValueError: no such preset, a bad value, or widths where neither says in which layout.
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        names, close = ", ".join(map(repr, (AUTO, *PRESETS))), did_you_mean(preset, (AUTO, *PRESETS))
        raise ValueError(f"preset is {preset!r:.200}; expected one of {names}{close}")
    values = with_preset(preset, keys)
    stages = {
        stage: made(**{key: values[flat] for flat, (owner, key) in KEYS.items() if owner == stage and flat in values})
        for stage, made in STAGES.items()
    }
    if "kv_lora_rank" in values and "layout" not in values:  # no default says what the widths mean
        raise ValueError(
            f"kv_lora_rank is {values['kv_lora_rank']} and qk_rope_head_dim {values['qk_rope_head_dim']} but"
            " layout is not given; expected layout: shared, which caches both, or latent, which caches the first"
        )
    return stages


def normalize_keys(*given: Mapping[str, Any], others: Iterable[str] = ()) -> dict[str, Any]:
    """The keys of all mappings in one flat dict, the preset among them; None counts as not given.

    Args:
        others: names that are valid beside the keys, for messages.

    Raises:
        ValueError: no mapping, or a key that is unknown or given twice.
    """
    found: dict[str, Any] = {}
    seen = set()
    for values in given:
        if not isinstance(values, Mapping):
            raise ValueError(f"recipe is {values!r:.200}; expected a mapping of recipe keys")
        for key, value, is_given in _flat_items(values):
            if key in seen:
                raise ValueError(
                    f"recipe key {key!r} is given twice, by itself, under its stage or in the recipe; expected it once"
                )
            if key not in KEYS and key != "preset":
                names = list(dict.fromkeys([*others, "preset", *KEYS]))
                close = did_you_mean(key, names)
                raise ValueError(f"recipe key {key!r} is unknown{close or ';'} expected one of {', '.join(names)}")
            seen.add(key)
            if is_given:
                found[key] = value
    return found


def _flat_items(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Flat keys, their values, and whether these count as given: None does in a stage's object alone."""
    for key, value in values.items():
        if isinstance(value, RecipeObject) and key == value.keyword:
            yield value.key, value, True
        elif key not in STAGES:
            yield key, value, value is not None
        elif isinstance(value, STAGES[key]):
            yield from ((value.prefix + name, each, True) for name, each in vars(value).items())
        elif isinstance(value, Mapping):
            prefix = STAGES[key].prefix
            yield from ((prefix + str(inner), each, each is not None) for inner, each in value.items())
        else:
            raise ValueError(f"recipe stage {key!r} is {value!r:.200}; expected a mapping of its keys")


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases and without a key that its mapping has twice.

    A few lines of aliases stand for more values than there is memory.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._path: list[str] = []  # keys that lead to the node that is read
        self._keys: set[tuple[int, str]] = set()  # each with the mapping that has it

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.constructor.ConstructorError(None, None, "aliases are not read in recipes", mark)
        if not isinstance(index, yaml.ScalarNode):  # not the value of a key
            return super().compose_node(parent, index)
        self._path.append(index.value)
        if (id(parent), index.value) in self._keys:
            text = f"key {'.'.join(self._path)!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, text, index.start_mark)
        self._keys.add((id(parent), index.value))
        node = super().compose_node(parent, index)
        self._path.pop()
        return node


def recipe_file(path: str | Path) -> dict[str, Any]:
    """The keys that a YAML recipe file gives, as :func:`normalize_keys` has them.

    Raises:
        ValueError: the file is no YAML mapping of recipe keys.
    """
    if not Path(path).is_file():  # opening a pipe would wait for a writer
        raise ValueError(f"recipe file {path} is no file")
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, PlainLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"recipe file {path} is not YAML: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"recipe file {path} is {values!r:.80}; expected a mapping of recipe keys")
    return normalize_keys(values or {})
