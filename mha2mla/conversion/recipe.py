"""What a conversion is asked to do: one frozen dataclass, its YAML round trip, and the rule from bytes to ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from mha2mla.conversion.families import SourceSpec
from mha2mla.conversion.presets import AUTO, AUTO_PRESETS, NO_PRESET, RENAMED, preset_values
from mha2mla.geometry import MLAGeometry

LAYOUTS = ("per-group", "shared")
ROPE_SELECTIONS = ("high", "low", "uniform", "2-norm", "rotation", "uneven", "rorope")
SHARED_SELECTIONS = ("uneven", "rorope")  # rules that give heads different numbers of pairs, or mix them
LOW_RANKS = ("svd-joint", "svd-split", "whitened-joint")
UP_PROJECTIONS = ("kv-head", "query-head")
DEFAULT_CACHE_RATIO = 0.5
RECORDS = ("rope_search", "layer_rank_losses")  # keys that a conversion writes, and nothing reads
OF_PRESET: Any = None  # default of a key that the preset gives its value
GRANULE = 8  # the kernels take latent and rotary widths in multiples of 8


def rope_selections(layout: str) -> tuple[str, ...]:
    """The values of ``rope_selection`` that ``layout`` knows."""
    return tuple(name for name in ROPE_SELECTIONS if layout == "shared" or name not in SHARED_SELECTIONS)


@dataclass(frozen=True)
class Recipe:
    """How a layer is turned into MLA, and how many numbers per token it may cache.

    Keys that are not given (or None) are those of ``preset``. Under ``"auto"`` they stay None until the device is known
    (:meth:`with_preset`), and what depends on them is refused; ``convert`` sees to it. The target is either
    ``cache_ratio`` or the pair ``kv_lora_rank`` and ``qk_rope_head_dim``; with neither, ``cache_ratio`` is 0.5.

    Args:
        layout: ``"per-group"`` keeps one rotary key per kv head (G = h_kv; MHA gives G = H), every head the same number
            of pairs. ``"shared"`` keeps one rotary key for all heads (G = 1, DeepSeek's layout).
        rope_selection: which rotary pairs stay rotary. The candidates are (frequency, kv head): every head keeps its
            own best in the per-group layout, the best of all heads together stay in the shared one.

            * ``"high"`` / ``"low"``: highest / lowest frequencies (in the shared layout the same ones for all heads);
            * ``"uniform"``: evenly spaced over the frequencies;
            * ``"2-norm"``: largest root mean square |q| · |k| (arXiv 2502.14837, S_2-norm);
            * ``"rotation"``: largest E|q|² E|k|² (1 − |g|²), g = E exp(iθΔ) over attention-weighted distances Δ
              without the sink column: 1 − |g|² is the variance of the turn, which no constant factor replaces. In the
              shared layout the candidates are the principal components of all kv heads' keys within one frequency (a
              unitary basis: RoPE commutes with it);
            * ``"uneven"``: the same score without mixing heads, each head as many pairs as it earns; shared layout
              only;
            * ``"rorope"``: RoRoPE with FreqFold (arXiv 2502.07864): real principal components of the keys of all heads
              within ``freq_fold`` neighbouring frequencies, equally many of every such group; shared layout only.
        low_rank: how the un-rotated keys and the values become one latent.

            * ``"svd-joint"``: truncated SVD of the stacked weights [W_K; W_V] (arXiv 2502.14837);
            * ``"svd-split"``: two SVDs, the rank divided in proportion to the keys' and values' widths;
            * ``"whitened-joint"``: principal components of the outputs on calibration text, which is the SVD of the
              stacked weights times the square root of the input covariance.
        cache_ratio: cached numbers after / before, in (0, 1]; never exceeded. 1.0 is full rank: every pair stays
            rotary, the latent holds the values, the model is the source to rounding. Otherwise ``rope_share`` of the
            budget is rotary, rounded to the nearest multiple of 8 per rope head (at least 8), and what is left,
            rounded down to a multiple of 8, is latent.
        kv_lora_rank: latent width d_c; needs ``qk_rope_head_dim``.
        qk_rope_head_dim: rotary width d_r of a rope head, even; needs ``kv_lora_rank``.
        rope_share: rotary share of a ``cache_ratio`` budget, or ``"auto"``: the share that loses least on held-out
            calibration text (``rope.share_search``), chosen before the conversion, which takes a minute or two.
        layer_ranks: ``"uniform"``: ``kv_lora_rank`` is every layer's. ``"measured"``: layers get different ranks with
            the same sum, by what each loses when it alone is converted (``latent.ranks``). Or the ranks
            themselves, one per layer.
        up_projections: whether W_UK and W_UV are given per ``"kv-head"``, as the source's maps are, or per
            ``"query-head"``, as DeepSeek's: the same cache and the same decode kernel, more weights and longer
            prefills, and gradient steps lose less with them. Without gradient steps the same model.
        freq_fold: neighbouring frequencies that ``"rorope"`` treats as one; divides head_dim / 2.
        mean_phase: from 0 to 1, how far the query of an un-rotated pair is multiplied by its mean turn g, estimated per
            query head: the factor is 1 + mean_phase (g − 1). g alone is the best constant for the tokens that are
            attended to and overfits them; of 0, 0.5 and 1 halfway was best in both layouts.
        centered: put the values' mean, as far as the latent loses it, into ``o_proj.bias`` (a value bias goes there
            anyway), and fit ``"whitened-joint"`` to deviations from the mean: an un-rotated key's mean is invisible to
            softmax. Off: no bias is created, for engines that cannot hold one.
        attended: ``"whitened-joint"`` fits values to what attention makes of the inputs (their weighted averages, sink
            included) instead of to the inputs themselves, and keys half to how the inputs differ under one query's
            attention; ``centered`` takes the mean of those averages, head by head.
        query_weighting: ``"whitened-joint"`` measures key errors by the queries' second moment.
        output_weighting: ``"whitened-joint"`` measures value errors after ``o_proj``.
        refit_queries: fit un-rotated queries to what the source's scores lack, by least squares on a sample of the
            calibration text: before the latent, and again on the keys that the latent gives back.
        refit_output: fit ``o_proj`` to the source attention's output, likewise.
        balanced: ``"whitened-joint"`` scales keys and values to the same energy first (TransMLA's balancing, arXiv
            2502.07864).
        key_weight: energy of the keys relative to the values in ``"whitened-joint"``, after that.
        shrinkage: ``"whitened-joint"`` adds so much of the mean variance to every direction of the inputs' covariances.
            A direction that the calibration text hardly varies in (most of them, when it has few tokens for the width)
            is otherwise free to be anything, and other text does vary in it.
        longrope_table: which of longrope's two tables becomes the layer's: ``"short"`` (lengths up to the original
            maximum) or ``"long"``.
        calibration_text: what ``mha2mla.texts.mixed_windows`` takes: texts by name, several of them joined by ``+``;
            ``"generated"`` is sampled from the source model, which is loaded whole for it.
        calibration_tokens: tokens of calibration text; every length gets the same share of them, in blocks as large as
            the longest window, at least one.
        calibration_length: window length, several that divide the longest, or ``"auto"``: ``blocks.default_lengths``,
            from 512 tokens up to the model's context. What a model is calibrated at is what it is good at.
        seed: chooses the calibration windows and the order of reconstruction's batches.
        sequential: statistics of a layer are taken on inputs that passed the converted layers before it. Implied by
            reconstruction.
        reconstruction_steps: gradient steps that fit a layer to what the source computes, on inputs that passed the
            converted layers before it (``conversion.fit.reconstruction``); 0 for none.
        reconstruction_tokens: tokens of a step, all in windows of one length; at least the longest window's.
        reconstruction_learning_rate: Adam's, relative to the root mean square of each tensor; after a short rise it
            falls to zero along a cosine.
        reconstruction_correction: from 0 to 1, how much of what earlier layers lost a layer is to make good: its
            target, a hidden state after the layer's MLP, is this share of the way from what the source layer makes of
            the converted stream to what it makes of the source's. What is lost for good is noise to a fit.
        reconstruction_precision: of the products in a step, ``"float32"`` (TF32 on CUDA) or ``"bfloat16"``; hidden
            states, losses and the tuned tensors stay float32.
        preset: where the keys come from that are not given (``presets.PRESETS``). ``"auto"`` takes the best that the
            machine can run (``presets.choose_preset``); None is ``"minimal"``, the defaults alone.
        rope_search: what ``rope_share="auto"`` measured, "qk_rope_head_dim+kv_lora_rank" → loss. A record.
        layer_rank_losses: what ``layer_ranks="measured"`` measured, rank → loss of each layer. A record.

    Raises:
        ValueError: naming the field, its value and what was expected.
    """

    layout: str = OF_PRESET
    rope_selection: str = OF_PRESET
    low_rank: str = OF_PRESET
    cache_ratio: float | None = OF_PRESET
    kv_lora_rank: int | None = OF_PRESET
    qk_rope_head_dim: int | None = OF_PRESET
    rope_share: float | Literal["auto"] = OF_PRESET
    layer_ranks: list[int] | Literal["uniform", "measured"] = OF_PRESET
    up_projections: str = OF_PRESET
    freq_fold: int = OF_PRESET
    mean_phase: float = OF_PRESET
    centered: bool = OF_PRESET
    attended: bool = OF_PRESET
    query_weighting: bool = OF_PRESET
    output_weighting: bool = OF_PRESET
    refit_queries: bool = OF_PRESET
    refit_output: bool = OF_PRESET
    balanced: bool = OF_PRESET
    key_weight: float = OF_PRESET
    shrinkage: float = OF_PRESET
    longrope_table: str = OF_PRESET
    calibration_text: str = OF_PRESET
    calibration_tokens: int = OF_PRESET
    calibration_length: int | list[int] | Literal["auto"] = OF_PRESET
    seed: int = OF_PRESET
    sequential: bool = OF_PRESET
    reconstruction_steps: int = OF_PRESET
    reconstruction_tokens: int = OF_PRESET
    reconstruction_learning_rate: float = OF_PRESET
    reconstruction_correction: float = OF_PRESET
    reconstruction_precision: str = OF_PRESET
    preset: str = AUTO
    rope_search: dict[str, float] | None = None
    layer_rank_losses: dict[str, list[float]] | None = None

    def __post_init__(self) -> None:
        if self.preset == AUTO:
            self._check_under_auto()
            return
        preset = NO_PRESET if self.preset is None else self.preset
        for name, value in (preset_values(preset, self.given()) | {"preset": preset}).items():
            object.__setattr__(self, name, value)
        for name, choices in (
            ("layout", LAYOUTS),
            ("rope_selection", ROPE_SELECTIONS),
            ("low_rank", LOW_RANKS),
            ("up_projections", UP_PROJECTIONS),
            ("longrope_table", ("short", "long")),
            ("reconstruction_precision", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(map(repr, choices))}")
        if self.rope_selection not in rope_selections(self.layout):
            raise ValueError(
                f"rope_selection is {self.rope_selection!r} in the {self.layout} layout; expected one of"
                f" {', '.join(map(repr, rope_selections(self.layout)))}, or layout='shared'"
            )
        _check_layer_ranks(self.layer_ranks)
        for name in (
            "centered",
            "attended",
            "query_weighting",
            "output_weighting",
            "refit_queries",
            "refit_output",
            "sequential",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected true or false")
        for name in ("cache_ratio", "rope_share", "key_weight", "reconstruction_learning_rate"):
            value = getattr(self, name)
            if (name == "cache_ratio" and value is None) or (name == "rope_share" and value == "auto"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} is {value!r}; expected a number > 0")
        for name in ("mean_phase", "shrinkage", "reconstruction_correction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}; expected a number from 0 to 1")
        if self.cache_ratio is not None and self.cache_ratio > 1:
            raise ValueError(f"cache_ratio is {self.cache_ratio!r}; expected at most 1.0 (full rank)")
        if self.rope_share != "auto" and self.rope_share >= 1:
            raise ValueError(f"rope_share is {self.rope_share!r}; expected less than 1 (the latent needs the rest)")
        for name, least in (
            ("kv_lora_rank", 1),
            ("qk_rope_head_dim", 2),
            ("calibration_tokens", 1),
            ("seed", 0),
            ("freq_fold", 1),
            ("reconstruction_steps", 0),
            ("reconstruction_tokens", 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("kv_lora_rank", "qk_rope_head_dim"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; expected an int >= {least}")
        if (self.kv_lora_rank is None) != (self.qk_rope_head_dim is None):
            given, missing = ("kv_lora_rank", "qk_rope_head_dim")[:: 1 if self.kv_lora_rank is not None else -1]
            raise ValueError(f"{given} is {getattr(self, given)} but {missing} is not given; expected both or neither")
        if self.kv_lora_rank is not None and self.cache_ratio is not None:
            raise ValueError(
                f"cache_ratio is {self.cache_ratio!r} beside kv_lora_rank={self.kv_lora_rank}; expected one of them"
            )
        if self.qk_rope_head_dim is not None and self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; expected an even number (RoPE turns pairs)")
        if not isinstance(self.calibration_text, str) or not self.calibration_text:
            raise ValueError(f"calibration_text is {self.calibration_text!r}; expected the name of a text")
        lengths = self.calibration_length
        if lengths != "auto":
            listed = [lengths] if isinstance(lengths, int) else lengths
            if not isinstance(listed, list | tuple) or not listed or not all(_is_length(each) for each in listed):
                raise ValueError(f"calibration_length is {lengths!r}; expected 'auto', an int >= 2 or a list of them")
            longest = max(listed)
            if any(longest % length for length in listed):
                raise ValueError(f"calibration_length is {lengths!r}; expected lengths that divide the longest one")
            if self.calibration_tokens < longest:
                raise ValueError(
                    f"calibration_tokens is {self.calibration_tokens}; expected at least one window of"
                    f" calibration_length={lengths}"
                )

    def _check_under_auto(self) -> None:
        """Refuses what no preset that ``auto`` may name would take."""
        refusals = []
        for name in AUTO_PRESETS:
            try:
                self.with_preset(name)
            except ValueError as error:
                refusals.append(error)
        if len(refusals) == len(AUTO_PRESETS):
            raise refusals[0]

    @property
    def is_resolved(self) -> bool:
        """Whether every key has its value: the preset is named."""
        return self.preset != AUTO

    def given(self) -> dict[str, Any]:
        """The keys that have a value, without preset and records; of a resolved recipe these are all keys."""
        values = {each.name: getattr(self, each.name) for each in given_fields() if each.name != "preset"}
        return {name: value for name, value in values.items() if value is not None}

    def with_preset(self, name: str) -> Recipe:
        """This recipe under preset ``name``, where its own is ``"auto"`` or that one.

        Raises:
            ValueError: it already has another preset, there is none of that name, or a key does not go with it.
        """
        if self.preset == name:
            return self
        if self.is_resolved:
            raise ValueError(f"preset is {name!r} beside a recipe of preset {self.preset!r}; expected one of them")
        return replace(self, preset=name)

    def changes(self) -> dict[str, Any]:
        """Keys whose values are not the preset's; under ``"auto"`` the given ones."""
        if not self.is_resolved:
            return self.given()
        values = preset_values(self.preset, {})
        return {name: value for name, value in self.given().items() if value != values[name]}

    def _require_resolved(self) -> None:
        if not self.is_resolved:
            raise ValueError("preset is 'auto', which depends on the device; expected Recipe.with_preset first")

    @property
    def target_cache_ratio(self) -> float | None:
        """The ratio asked for; None when ranks are given."""
        if self.kv_lora_rank is not None:
            return None
        return DEFAULT_CACHE_RATIO if self.cache_ratio is None else float(self.cache_ratio)

    @property
    def searches_rope_share(self) -> bool:
        """Whether the rotary share must be chosen before there is a geometry."""
        return self.rope_share == "auto" and self.target_cache_ratio not in (None, 1.0)

    @property
    def searches_layer_ranks(self) -> bool:
        """Whether the ranks of the layers must be measured before there are geometries."""
        return self.layer_ranks == "measured" and self.target_cache_ratio != 1.0

    def geometries(self, spec: SourceSpec) -> tuple[MLAGeometry, ...] | None:
        """The geometry of each layer of ``spec``, or None where :meth:`geometry` is every layer's.

        Raises:
            ValueError: ``preset`` is still ``"auto"`` or ``layer_ranks`` ``"measured"``, or it has not one rank per
                layer, or one that does not fit.
        """
        self._require_resolved()
        if self.searches_layer_ranks:
            raise ValueError("layer_ranks is 'measured'; expected ranks (layer_ranks.choose_layer_ranks finds them)")
        if isinstance(self.layer_ranks, str):
            return None
        if len(self.layer_ranks) != spec.num_layers:
            raise ValueError(
                f"layer_ranks has {len(self.layer_ranks)} ranks; expected {spec.num_layers}, one per layer"
            )
        common = self.geometry(spec)
        full = common.full_kv_lora_rank
        for layer, rank in enumerate(self.layer_ranks):
            if rank > full:
                raise ValueError(f"layer_ranks[{layer}] is {rank}; expected at most {full}")
        return tuple(replace(common, kv_lora_rank=rank) for rank in self.layer_ranks)

    def geometry(self, spec: SourceSpec) -> MLAGeometry:
        """The geometry that this recipe gives a layer of ``spec``; but for the rank, where ``layer_ranks`` says so.

        Raises:
            ValueError: ``preset`` or ``rope_share`` is still ``"auto"``, or the target does not fit the source (more
                pairs or more rank than it has, or a budget too small).
        """
        self._require_resolved()
        if self.searches_rope_share:
            raise ValueError("rope_share is 'auto'; expected a number (search.choose_rope_share finds one)")
        heads, kv_heads, head_dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        rope_heads = kv_heads if self.layout == "per-group" else 1
        if self.rope_selection == "rorope" and head_dim // 2 % self.freq_fold:
            raise ValueError(f"freq_fold is {self.freq_fold}; expected a divisor of the {head_dim // 2} frequencies")
        key_width = kv_heads * head_dim
        all_pairs = key_width // rope_heads
        if self.kv_lora_rank is not None:
            rope, rank = self.qk_rope_head_dim, self.kv_lora_rank
            if rope > all_pairs:
                raise ValueError(
                    f"qk_rope_head_dim is {rope}; expected at most {all_pairs}, all the pairs that {kv_heads} kv heads"
                    f" of width {head_dim} have in the {self.layout} layout"
                )
        elif self.target_cache_ratio == 1.0:
            rope, rank = all_pairs, key_width
        else:
            budget = math.floor(self.target_cache_ratio * 2 * key_width + 1e-9)
            rope = max(GRANULE, GRANULE * math.floor(self.rope_share * budget / rope_heads / GRANULE + 0.5))
            rope = min(rope, all_pairs // 2 * 2)
            rank = (budget - rope * rope_heads) // GRANULE * GRANULE
            if rank < GRANULE:
                raise ValueError(
                    f"cache_ratio is {self.target_cache_ratio}, {budget} numbers per token and layer, of which the"
                    f" smallest rotary part ({rope_heads} x {rope}) leaves {budget - rope * rope_heads} for the latent;"
                    f" expected at least {GRANULE}: use a larger ratio or the shared layout"
                )
        full = 2 * key_width - rope * rope_heads
        if rank > full:
            raise ValueError(
                f"kv_lora_rank is {rank}; expected at most {full}, which with {rope_heads} x {rope} rotary numbers is"
                " already everything that the source caches"
            )
        nope = 0 if rope == all_pairs else head_dim - rope if self.layout == "per-group" else head_dim
        return MLAGeometry(
            num_attention_heads=heads,
            num_rope_heads=rope_heads,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            qk_nope_head_dim=nope,
            v_head_dim=head_dim,
            num_key_value_heads=kv_heads,
            num_up_projection_heads=heads if self.up_projections == "query-head" else kv_heads,
        )

    def is_exact(self, geometry: MLAGeometry) -> bool:
        """Whether the converted layer is the source layer to rounding: all pairs rotate and no value is lost."""
        self._require_resolved()
        return geometry.qk_nope_head_dim == 0 and (
            geometry.kv_lora_rank >= geometry.num_key_value_heads * geometry.v_head_dim
        )

    def needs_phases(self, geometry: MLAGeometry) -> bool:
        """Whether attention-weighted distances must be measured."""
        return geometry.qk_nope_head_dim > 0 and (self.rope_selection in ("rotation", "uneven") or self.mean_phase > 0)

    def needs_attended(self, geometry: MLAGeometry) -> bool:
        """Whether attention-weighted averages of the inputs must be measured."""
        return self.attended and not self.is_exact(geometry) and (self.centered or self.low_rank == "whitened-joint")

    def needs_sample(self, geometry: MLAGeometry) -> bool:
        """Whether inputs themselves must be kept, besides their moments."""
        queries = self.refit_queries and geometry.qk_nope_head_dim > 0
        return not self.is_exact(geometry) and (queries or self.refit_output)

    def needs_calibration(self, geometry: MLAGeometry) -> bool:
        """Whether any statistic of calibration text enters the weights."""
        if self.is_exact(geometry):
            return False
        if self.follows_conversion(geometry):
            return True
        selects = geometry.qk_nope_head_dim > 0 and self.rope_selection in ("2-norm", "rotation", *SHARED_SELECTIONS)
        moments = selects or self.needs_phases(geometry) or self.centered or self.low_rank == "whitened-joint"
        return moments or self.needs_sample(geometry)

    def follows_conversion(self, geometry: MLAGeometry) -> bool:
        """Whether a layer's conversion depends on the converted layers before it."""
        return (self.sequential or self.reconstruction_steps > 0) and not self.is_exact(geometry)

    @classmethod
    def from_preset(cls, name: str, **keys: Any) -> Recipe:
        """The preset ``name`` with ``keys`` on top; a target among them replaces the preset's.

        Raises:
            ValueError: no such preset, or a bad key.
        """
        return cls.from_dict({**keys, "preset": name})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values, such as :meth:`to_dict` and records of earlier versions give them.

        Raises:
            ValueError: no mapping, an unknown key or preset, or a bad value.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"recipe is {values!r}; expected a mapping of recipe keys")
        known = [each.name for each in fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(f"recipe key {key!r} is unknown; expected one of {', '.join(known)}")
        preset = values.get("preset", AUTO)
        return cls(**{**values, "preset": RENAMED.get(preset, preset) if isinstance(preset, str) else preset})

    def to_dict(self) -> dict[str, Any]:
        """Every key; under ``"auto"`` those that are given."""
        return asdict(self) if self.is_resolved else {**self.given(), "preset": self.preset}

    @classmethod
    def from_yaml(cls, path: str | Path) -> Recipe:
        """A recipe from a YAML file.

        Raises:
            ValueError: the file is no YAML mapping of recipe keys.
        """
        return cls.from_dict(recipe_values(path))

    def to_yaml(self, path: str | Path | None = None) -> str:
        """YAML text of this recipe, also written to ``path`` when one is given."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 2


def _check_layer_ranks(ranks: list[int] | str) -> None:
    if isinstance(ranks, str):
        if ranks not in ("uniform", "measured"):
            raise ValueError(f"layer_ranks is {ranks!r}; expected 'uniform', 'measured' or a list of ranks")
        return
    if not isinstance(ranks, list | tuple) or not ranks:
        raise ValueError(f"layer_ranks is {ranks!r}; expected 'uniform', 'measured' or a list of ranks")
    for layer, rank in enumerate(ranks):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"layer_ranks[{layer}] is {rank!r}; expected an int >= 1")


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases: a few lines of them stand for more values than there is memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.constructor.ConstructorError(None, None, "aliases are not read in recipes", mark)
        return super().compose_node(parent, index)


def given_fields() -> tuple[Field[Any], ...]:
    """The keys of a recipe that a user gives, as opposed to what a conversion writes into its record."""
    return tuple(each for each in fields(Recipe) if each.name not in RECORDS)


def recipe_values(path: str | Path) -> dict[str, Any]:
    """The keys that a YAML recipe file gives, without presets and defaults.

    Raises:
        ValueError: the file is no YAML mapping.
    """
    if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for a writer
        raise ValueError(f"recipe file {path} is no regular file")
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, _PlainLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"recipe file {path} is not YAML: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"recipe file {path} is {values!r:.80}; expected a mapping of recipe keys")
    return values or {}
