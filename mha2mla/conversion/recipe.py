"""What a conversion is asked to do: five stages, what they need of a source, and how they are written down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mha2mla.conversion.calibration.stage import Calibration
from mha2mla.conversion.fit.stage import Fit
from mha2mla.conversion.latent.stage import Latent
from mha2mla.conversion.presets import AUTO, PRESETS, choose_preset, with_keys
from mha2mla.conversion.rope.stage import Rope
from mha2mla.conversion.stage import Stage
from mha2mla.conversion.target import LAYOUTS, Target
from mha2mla.environment import compute_device
from mha2mla.geometry import MLAGeometry

if TYPE_CHECKING:
    from mha2mla.conversion.families import SourceSpec

# Keys of recipes that had no stages, and what to write for them now.
_MOVED = {
    "rope_selection": "rope.selection",
    "rope_share": "rope.share",
    "freq_fold": "rope.selection, such as rorope-2",
    "longrope_table": "rope.longrope_table",
    "low_rank": "latent.rule",
    "centered": "latent.centered",
    "layer_ranks": "latent.ranks",
    "up_projections": "latent.up_projections",
    "refit_queries": "fit.queries",
    "refit_output": "fit.output",
    "reconstruction_steps": "fit.steps",
    "reconstruction_tokens": "fit.tokens",
    "calibration_text": "calibration.text",
    "calibration_tokens": "calibration.tokens",
    "calibration_length": "calibration.lengths",
    "seed": "calibration.seed",
}
_FIXED = ("mean_phase", "attended", "query_weighting", "output_weighting", "balanced", "key_weight", "shrinkage")
_FIXED += ("sequential", "reconstruction_learning_rate", "reconstruction_correction", "reconstruction_precision")
_FIXED += ("rope_search", "layer_rank_losses")
# Values that went with what they asked for, and what to write for them now.
_GONE = {
    ("rope.share", "auto"): "null for the layout's own, or a number above 0 and less than 1",
    ("rope.selection", "uneven"): "'rotation', which loses less",
}


@dataclass(frozen=True, init=False)
class Recipe:
    """How a layer is turned into MLA, and how many elements per token it may cache.

    Keys are given by name, as everywhere else (mappings, YAML, flags, keyword arguments of ``convert``):
    ``"STAGE.KEY"``, or the stage with a mapping of its keys; the target's keys need no stage. ``Recipe(preset="quick",
    cache_ratio=0.25, rope={"selection": "2-norm"})`` is one, and so is ``Recipe(**{"rope.selection": "2-norm"})``.

    Args:
        preset: source of all other keys. Default "auto", the best that the device of this machine can run;
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
        whole = {name: value for name, value in keys.items() if isinstance(value, STAGES.get(name, ()))}
        given = asked_keys({name: value for name, value in keys.items() if name not in whole})
        if preset == AUTO:
            target = vars(whole["target"]) if "target" in whole else given
            preset, _ = choose_preset(AUTO, target, compute_device(None).type)
        for name, value in {**stages_of(preset, given), **whole, "preset": preset}.items():
            object.__setattr__(self, name, value)
        if self.target.layout not in self.rope.rule.layouts:
            raise ValueError(
                f"rope.selection is {self.rope.selection!r} in the {self.target.layout} layout; expected one of"
                f" {', '.join(map(repr, selections(self.target.layout)))}, or another layout"
            )
        if self.rope.share is not None and not LAYOUTS[self.target.layout].has_rope_cache:
            raise ValueError(
                f"rope.share is {self.rope.share!r} in the {self.target.layout} layout; expected none, since it caches"
                " nothing rotary, or layout: shared (or per-group) beside it"
            )

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
        return cls(**asked_keys(values))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def flat(self) -> dict[str, Any]:
        return {flat: getattr(getattr(self, stage), key) for flat, (stage, key) in KEYS.items()}

    def changes(self) -> dict[str, Any]:
        """Keys whose values are not the preset's."""
        usual = Recipe.from_preset(self.preset).flat()
        return {key: value for key, value in self.flat().items() if value not in (None, usual[key])}

    def for_records(self) -> Recipe:
        """The same with texts that are files by their names alone: whose folders these were is nobody's business."""
        text = "+".join(
            part.rpartition("/")[2] if part[:1] in "/~" else part for part in self.calibration.text.split("+")
        )
        return replace(self, calibration=replace(self.calibration, text=text))

    @property
    def searches_layer_ranks(self) -> bool:
        """Whether the ranks of the layers must be measured before there are geometries."""
        return self.latent.ranks == "measured" and self.target.cache_ratio != 1.0

    def geometry(self, spec: SourceSpec) -> MLAGeometry:
        """The geometry that this recipe gives a layer of ``spec``; but for the rank, where layers differ.

        Raises:
            ValueError: the target does not fit the source.
        """
        self.rope.rule.check(spec)
        per_query_head = self.latent.up_projections == "query-head"
        return self.target.geometry(spec, self.rope.share, per_query_head=per_query_head)

    def geometries(self, spec: SourceSpec, ranks: list[int] | None = None) -> tuple[MLAGeometry, ...]:
        """The geometry of each layer of ``spec``.

        Args:
            ranks: what a search found; default those of the recipe.

        Raises:
            ValueError: ``latent.ranks`` is still to be measured, has not one rank per layer, or one that does not fit.
        """
        common = self.geometry(spec)
        if ranks is None:
            if self.searches_layer_ranks:
                raise ValueError("latent.ranks is 'measured'; expected ranks (latent.ranks finds them)")
            if isinstance(self.latent.ranks, str):
                return (common,) * spec.num_layers
            ranks = self.latent.ranks
        if len(ranks) != spec.num_layers:
            raise ValueError(f"latent.ranks has {len(ranks)} ranks; expected {spec.num_layers}, one per layer")
        full = common.full_kv_lora_rank
        for layer, rank in enumerate(ranks):
            if rank > full:
                raise ValueError(f"latent.ranks[{layer}] is {rank}; expected at most {full}")
        return tuple(replace(common, kv_lora_rank=rank) for rank in ranks)

    def measured(self, geometry: MLAGeometry) -> dict[str, bool]:
        """What is to be measured beside moments, by the names that ``StatisticsCollector`` has for it."""
        lossy, reads = not is_exact(geometry), self.latent.low_rank.reads_attended
        return {
            "phases": geometry.qk_nope_head_dim > 0 and (self.rope.rule.reads_phases or self.fit.queries),
            "attended": lossy and (self.latent.centered or reads),
            "distances": lossy and not geometry.has_rope_cache and reads,
        }

    def refits_queries(self, geometry: MLAGeometry) -> bool:
        """Whether queries are fitted to keys that are not all the source's own."""
        lossy_keys = geometry.qk_nope_head_dim > 0 or not geometry.has_rope_cache
        return self.fit.queries and lossy_keys and not is_exact(geometry)

    def needs_sample(self, geometry: MLAGeometry) -> bool:
        """Whether inputs themselves must be kept, besides their moments."""
        return not is_exact(geometry) and (self.refits_queries(geometry) or self.fit.output)

    def needs_calibration(self, geometry: MLAGeometry) -> bool:
        """Whether any statistic of calibration text enters the weights."""
        if is_exact(geometry):
            return False
        selects = geometry.qk_nope_head_dim > 0 and self.rope.rule.reads_statistics
        reads = selects or self.latent.low_rank.reads_statistics or self.latent.centered
        return reads or self.fit.steps > 0 or self.measured(geometry)["phases"] or self.needs_sample(geometry)


STAGES: Mapping[str, type[Stage]] = {
    "target": Target,
    "rope": Rope,
    "latent": Latent,
    "fit": Fit,
    "calibration": Calibration,
}
KEYS: Mapping[str, tuple[str, str]] = {  # as they are written → stage and field
    made.prefix + each.name: (stage, each.name) for stage, made in STAGES.items() for each in fields(made)
}


def stages_of(preset: str, keys: Mapping[str, Any]) -> dict[str, Stage]:
    """The stages of ``preset`` with ``keys`` on top, by name; imports no torch.

    Raises:
        ValueError: no such preset, a bad key, or widths where neither says in which layout.
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"preset is {preset!r:.200}; expected one of {', '.join(map(repr, (AUTO, *PRESETS)))}")
    values = with_keys(PRESETS[preset], asked_keys(keys))
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


def is_exact(geometry: MLAGeometry) -> bool:
    """Whether a converted layer is the source layer to rounding: all pairs rotate and nothing is lost."""
    return geometry.qk_nope_head_dim == 0 and geometry.kv_lora_rank >= geometry.full_kv_lora_rank


def selections(layout: str) -> tuple[str, ...]:
    """The values of ``rope.selection`` that ``layout`` knows."""
    from mha2mla.conversion.rope.rules import SELECTIONS

    return tuple(name for name, rule in SELECTIONS.items() if layout in rule.layouts)


def asked_keys(values: Mapping[str, Any], others: Iterable[str] = ()) -> dict[str, Any]:
    """The keys of a mapping in one dict, the preset among them; None counts as not given.

    Args:
        others: names that are valid beside the keys, for messages.

    Raises:
        ValueError: no mapping, or a key that is unknown, given twice, or of recipes that had no stages, or a value that
            is gone.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"recipe is {values!r:.200}; expected a mapping of recipe keys")
    found: dict[str, Any] = {}
    for key, value in _without_stages(values):
        if key in found:
            raise ValueError(f"recipe key {key!r} is given twice, by itself and under its stage; expected one of them")
        if isinstance(value, str) and (key, value) in _GONE:
            raise ValueError(f"{key} is {value!r}, which earlier versions had; expected {_GONE[key, value]}")
        elif key in KEYS or key == "preset":
            found[key] = value
        elif key in _MOVED:
            raise ValueError(
                f"recipe key {key!r} is of recipes that had no stages; expected {_MOVED[key]} in its place"
            )
        elif key in _FIXED:
            raise ValueError(f"recipe key {key!r} is of recipes that had no stages; expected nothing, it is fixed now")
        else:
            names = list(dict.fromkeys([*others, "preset", *KEYS]))
            close = "".join(f", did you mean {name!r}?" for name in get_close_matches(str(key), names, 1))
            raise ValueError(f"recipe key {key!r} is unknown{close or ';'} expected one of {', '.join(names)}")
    return {key: value for key, value in found.items() if value is not None}


def _without_stages(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a recipe's mapping, those under a stage with its prefix."""
    for key, value in values.items():
        if key not in STAGES:
            yield key, value
        elif isinstance(value, Mapping):
            yield from ((STAGES[key].prefix + str(inner), each) for inner, each in value.items())
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
    """The keys that a YAML recipe file gives, as :func:`asked_keys` has them.

    Raises:
        ValueError: the file is no YAML mapping of recipe keys.
    """
    if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for a writer
        raise ValueError(f"recipe file {path} is no regular file")
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, PlainLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"recipe file {path} is not YAML: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"recipe file {path} is {values!r:.80}; expected a mapping of recipe keys")
    return asked_keys(values or {})
