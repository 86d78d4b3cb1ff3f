"""Named recipes: what each one sets, and which of them a machine gets that was told none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from mha2mla.conversion.target import DEFAULT_LAYOUT, WIDTHS

PresetName = Literal[
    "auto", "minimal", "published-mha2mla", "published-transmla", "care", "shared", "per-group", "latent", "quick",
    "cpu", "deepseek-512+64",
]  # fmt: skip

NO_PRESET = "minimal"
AUTO = "auto"  # no preset yet: choose_preset names one when the device is known

# Keys that switch off what the published methods do not have.
_PUBLISHED: dict[str, Any] = {
    "latent.centered": False,
    "fit.queries": False,
    "calibration.tokens": 64 * 512,
    "calibration.lengths": 512,
}
# Text that the source itself wrote loses far less on other text than a manual does, and with a manual among it half as
# much again: what people wrote surprises a model more than what it writes itself. In languages and formats that the
# source knows, or those lose several times as much as English (docs/notes/calibration.md).
_TEXT = "generated-diverse+generated+builtin:pydoc"
# At every size this lost less than 16 bits, on both models where it was measured (docs/notes/rank-and-bits.md).
_BY_LAYER: dict[str, Any] = {"latent.bits": "auto"}
# Gradient steps, layer by layer: minutes on one H200 for a model of 135M parameters.
_FITTED: dict[str, Any] = {
    "latent.ranks": "measured",
    "latent.up_projections": "query-head",
    "fit.steps": 2200,
    "fit.tokens": 8192,
    "calibration.text": _TEXT,
    "calibration.tokens": 144 * 8192,
}

# Keys that each preset sets beside the stages' own defaults.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # The defaults alone: little text, which no model must write. To try things with, not to keep.
        NO_PRESET: {},
        # arXiv 2502.14837: partial RoPE by the 2-norm, head by head, and one SVD of the stacked weights.
        "published-mha2mla": {
            "layout": "per-group",
            "rope.selection": "2-norm",
            "latent.rule": "svd-joint",
            **_PUBLISHED,
        },
        # arXiv 2502.07864: RoRoPE with FreqFold, then one PCA of keys and values scaled to the same energy.
        "published-transmla": {
            "layout": "shared",
            "rope.selection": "rorope-2",
            "rope.share": 1 / 3,
            "latent.rule": "balanced-pca",
            **_PUBLISHED,
        },
        # arXiv 2603.17946 as we read it: covariance-weighted joint SVD on TransMLA's rotary part, ranks by layer. Its
        # ranks follow the singular values; ours what layers lose.
        "care": {
            "layout": "shared",
            "rope.selection": "rorope-2",
            "rope.share": 1 / 3,
            "latent.rule": "covariance-joint",
            "latent.ranks": "measured",
            **_PUBLISHED,
        },
        "shared": {"layout": "shared", **_FITTED},
        "per-group": {"layout": "per-group", **_FITTED},
        "latent": {"layout": "latent", **_BY_LAYER, **_FITTED},
        # No gradient steps: 28 minutes on two CPU cores for a model of 135M parameters.
        "quick": {
            **_BY_LAYER,
            "fit.output": True,
            "calibration.text": _TEXT,
            "calibration.tokens": 6 * 8192,
        },
        # An hour or two on two CPU cores for the same model.
        "cpu": {
            **_BY_LAYER,
            "fit.steps": 60,
            "fit.tokens": 2048,
            "calibration.text": _TEXT,
            "calibration.tokens": 96 * 512,
            "calibration.lengths": [512, 2048],
        },
        # DeepSeek's widths, which FlashMLA and its engines compile for; those know no bias of o_proj.
        "deepseek-512+64": {
            **_FITTED,
            "layout": "shared",
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "latent.centered": False,
            "latent.ranks": "uniform",
        },
    }
)

# Perplexity relative to the source model, by layout and preset, and of what: what a better preset would give.
MEASURED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "latent": {"quick": "1.00 / 1.00"},
        "shared": {"quick": "1.24 / 1.30", "shared": "1.06 / 1.08"},
        "per-group": {"quick": "1.51 / 2.10", "per-group": "1.09 / 1.12"},
    }
)
MEASURED_ON = (
    "SmolLM2-135M-Instruct at cache_ratio 0.5, windows of 512 / 8192 tokens, the worst of builtin:stdlib,"
    " builtin:licences and builtin:opticks"
)


def choose_preset(preset: str, given: Mapping[str, Any], device_type: str) -> tuple[str, str]:
    """The preset of a recipe on a device, the one that was asked for, or, under ``auto``, the best that can run; and a
    sentence for people that says why."""
    if preset != AUTO:
        return preset, f"{preset}, as asked for"
    if given.get("cache_ratio") == 1.0:
        return "quick", "quick, chosen by auto: at cache_ratio 1.0 nothing is lost, whatever the preset"
    best = _best(given.get("layout", DEFAULT_LAYOUT))
    if device_type == "cuda":
        return best, f"{best}, chosen by auto: the best there is, on a GPU"
    return "quick", "quick, chosen by auto: without a GPU, no gradient steps"


def better_than(preset: str, layout: str, cache_ratio: float | None) -> str:
    """For people: which presets lose less than ``preset``, what they take, and what was measured of both."""
    best = _best(layout)
    if cache_ratio == 1.0:
        return "nothing: no number was lost"
    fitted = PRESETS[preset].get("fit.steps") == PRESETS[best].get("fit.steps")  # no preset fits longer
    figures = dict(MEASURED.get(best, {}))
    if not fitted:
        slower = {"cpu": "", "quick": "cpu (an hour or two), "}.get(preset, "quick, cpu (an hour or two), ")
        found = f"preset {slower}{best} (needs a GPU)"
    elif layout == DEFAULT_LAYOUT:
        return "a larger cache_ratio; of presets this is the best"
    else:
        found = f"a larger cache_ratio, or layout {DEFAULT_LAYOUT}"
        figures = {best: figures[best], f"{DEFAULT_LAYOUT} by quick": MEASURED[DEFAULT_LAYOUT]["quick"]}
    shown = ", ".join(f"{name} {ratio}" for name, ratio in figures.items())
    return found + (f". Perplexity relative to the source model: {shown} ({MEASURED_ON})" if shown else "")


def _best(layout: Any) -> str:
    """A layout's own preset, which has its name."""
    return layout if layout in PRESETS else DEFAULT_LAYOUT


def with_keys(keys: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``keys`` with the ``given`` ones on top; a target among these replaces the other as a whole."""
    dropped = WIDTHS if any(key in given for key in WIDTHS) else ()
    return {**{key: value for key, value in keys.items() if key not in dropped}, **given}


def with_preset(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``preset`` with the ``given`` ones on top. Where these say the widths, the ranks or another layout,
    nothing is left to choose by layer, and bits are 16."""
    keys = PRESETS[preset]
    is_open = given.get("layout", DEFAULT_LAYOUT) == DEFAULT_LAYOUT and given.get("kv_lora_rank") is None
    if not (is_open and isinstance(given.get("latent.ranks", ""), str)):
        keys = {key: value for key, value in keys.items() if (key, value) != ("latent.bits", "auto")}
    return with_keys(keys, given)


def is_device_dependent(key: str) -> bool:
    """True where the default of ``key`` depends on the machine: a preset that ``auto`` may choose sets it."""
    return any(key in PRESETS[name] for name in ("quick", *MEASURED))
