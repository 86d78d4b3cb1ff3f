"""Named recipes: what each one sets, and which of them a machine gets that was told none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

NO_PRESET = "minimal"
AUTO = "auto"  # no preset yet: choose_preset names one when the device is known
# Keys that say how much may be cached. A target given beside a preset replaces the preset's as a whole.
TARGET_KEYS = ("cache_ratio", "kv_lora_rank", "qk_rope_head_dim")

# What every key is where neither a preset nor the user says otherwise.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "layout": "shared",
        "rope_selection": "rotation",
        "low_rank": "whitened-joint",
        "cache_ratio": None,
        "kv_lora_rank": None,
        "qk_rope_head_dim": None,
        "rope_share": 0.25,
        "layer_ranks": "uniform",
        "up_projections": "kv-head",
        "freq_fold": 1,
        "mean_phase": 0.5,
        "centered": True,
        "attended": True,
        "query_weighting": True,
        "output_weighting": True,
        "refit_queries": True,
        "refit_output": False,
        "balanced": True,
        "key_weight": 1.0,
        "shrinkage": 0.003,
        "longrope_table": "short",
        "calibration_text": "builtin:pydoc",
        "calibration_tokens": 24576,
        "calibration_length": "auto",
        "seed": 0,
        "sequential": False,
        "reconstruction_steps": 0,
        "reconstruction_tokens": 4096,
        "reconstruction_learning_rate": 0.006,
        "reconstruction_correction": 1.0,
        "reconstruction_precision": "float32",
    }
)

# What other methods do not have.
_PLAIN: dict[str, Any] = {
    "mean_phase": 0.0,
    "centered": False,
    "attended": False,
    "query_weighting": False,
    "output_weighting": False,
    "shrinkage": 0.0,
    "refit_queries": False,
    "refit_output": False,
    "calibration_tokens": 64 * 512,
    "calibration_length": 512,
}
# Text that the source itself wrote loses far less on other text than a manual does, and with a manual among it half as
# much again: what people wrote surprises a model more than what it writes itself (benchmarks/NOTES.md).
_TEXT = "generated+builtin:pydoc"
# Gradient steps, layer by layer: minutes on one H200 for a model of 135M parameters. bfloat16 products cost nothing
# that shows. Maps per query head and half a correction took 5 % of the divergence (benchmarks/NOTES.md).
_RECONSTRUCTED: dict[str, Any] = {
    "reconstruction_steps": 2200,
    "reconstruction_tokens": 8192,
    "reconstruction_precision": "bfloat16",
    "reconstruction_correction": 0.5,
    "up_projections": "query-head",
    "calibration_text": _TEXT,
    "calibration_tokens": 144 * 8192,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # The defaults alone: seconds, and text that no model must write. To try things with, not to keep.
        NO_PRESET: {},
        # arXiv 2502.14837: partial RoPE by the 2-norm, head by head, and one SVD of the stacked weights.
        "published-mha2mla": {"layout": "per-group", "rope_selection": "2-norm", "low_rank": "svd-joint", **_PLAIN},
        # arXiv 2502.07864: RoRoPE with FreqFold, then one PCA of keys and values scaled to the same energy.
        "published-transmla": {
            "layout": "shared",
            "rope_selection": "rorope",
            "freq_fold": 2,
            "low_rank": "whitened-joint",
            "rope_share": 1 / 3,
            **_PLAIN,
        },
        "shared": {"layout": "shared", "rope_share": 0.21, "layer_ranks": "measured", **_RECONSTRUCTED},
        "per-group": {"layout": "per-group", "layer_ranks": "measured", **_RECONSTRUCTED},
        # No gradient steps: minutes on two CPU cores for a model of 135M parameters. Fitted queries make up for fewer
        # rotary dims: of 32, 40 and 48 in a budget of 192, 40 lost least from 512 to 8192 tokens.
        "quick": {
            "layout": "shared",
            "refit_output": True,
            "rope_share": 0.21,
            "calibration_text": _TEXT,
            "calibration_tokens": 3 * 8192,
        },
        # Within an hour on two CPU cores for the same model.
        "cpu": {
            "layout": "shared",
            "rope_share": 0.21,
            "reconstruction_steps": 60,
            "reconstruction_tokens": 2048,
            "calibration_text": _TEXT,
            "calibration_tokens": 96 * 512,
            "calibration_length": [512, 2048],
        },
        # DeepSeek's widths, which FlashMLA and its engines compile for; those know no bias of o_proj.
        "deepseek-512+64": {
            "layout": "shared",
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "centered": False,
            **_RECONSTRUCTED,
        },
    }
)


# Names that checkpoints of earlier versions were recorded under.
RENAMED: Mapping[str, str] = MappingProxyType({"mha2mla": "published-mha2mla", "transmla": "published-transmla"})

# The presets that ``auto`` may name. A recipe that says nothing must be sound under each of them.
AUTO_PRESETS = ("quick", "shared", "per-group")
# Perplexity over the source's by layout and preset, and of what: what a better preset would give.
MEASURED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "shared": {"quick": "1.24 / 1.30", "shared": "1.06 / 1.08"},
        "per-group": {"quick": "1.51 / 2.10", "per-group": "1.09 / 1.12"},
    }
)
MEASURED_ON = (
    "SmolLM2-135M-Instruct at cache_ratio 0.5, windows of 512 / 8192 tokens, the worst of builtin:stdlib,"
    " builtin:licences and builtin:opticks"
)


@dataclass(frozen=True)
class PresetChoice:
    """Which preset a conversion takes, and a sentence for people that says why and what would be better."""

    preset: str
    reason: str


def choose_preset(preset: str, given: Mapping[str, Any], device_type: str) -> PresetChoice:
    """The preset of a recipe on a device: the one that was asked for, or, under ``auto``, the best that can run.

    Args:
        preset: of the recipe.
        given: its other keys.
        device_type: ``"cuda"``, ``"cpu"``, … of the conversion.
    """
    if preset != AUTO:
        return PresetChoice(preset, f"{preset}, as asked for")
    if given.get("cache_ratio") == 1.0:
        return PresetChoice("quick", "quick, chosen by auto: at cache_ratio 1.0 nothing is lost, whatever the preset")
    layout = given.get("layout", "shared")
    best = layout if layout in MEASURED else "shared"
    if device_type == "cuda":
        return PresetChoice(best, f"{best}, chosen by auto: the best there is, on a GPU")
    figures = ", ".join(f"{name} {ratio}" for name, ratio in MEASURED[best].items())
    return PresetChoice(
        "quick",
        f"quick, chosen by auto: minutes without a GPU. The next better ones: cpu (an hour), {best} (needs a GPU)."
        f" Perplexity over the source's: {figures} ({MEASURED_ON})",
    )


def common_default(key: str) -> Any:
    """What ``auto`` takes for ``key`` wherever it runs; None where that depends on the machine."""
    values = [preset_values(name, {})[key] for name in AUTO_PRESETS]
    return values[0] if all(value == values[0] for value in values) else None


def preset_values(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of a recipe: the defaults, on them those of preset ``name``, on them the ``given`` ones.

    What a preset says only beside another of its keys goes with that key: a target among the given ones replaces the
    preset's; another layout drops the ``rope_share`` that was found for the preset's.

    Raises:
        ValueError: there is no such preset.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"preset is {name!r}; expected one of {', '.join(map(repr, (AUTO, *PRESETS)))}")
    values = dict(PRESETS[name])
    dropped: set[str] = set()
    if any(given.get(key) is not None for key in TARGET_KEYS):
        dropped |= set(TARGET_KEYS)
    layout = values.get("layout", DEFAULTS["layout"])
    if given.get("layout", layout) != layout:
        dropped.add("rope_share")
    return {**DEFAULTS, **{key: value for key, value in values.items() if key not in dropped}, **given}
