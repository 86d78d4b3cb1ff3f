"""Named recipes: what each one sets, besides the defaults of ``Recipe``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Keys that say how much may be cached. A target given beside a preset replaces the preset's as a whole.
TARGET_KEYS = ("cache_ratio", "kv_lora_rank", "qk_rope_head_dim")

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
    "reconstruction_steps": 2500,
    "reconstruction_tokens": 8192,
    "reconstruction_precision": "bfloat16",
    "reconstruction_correction": 0.5,
    "up_projections": "query-head",
    "calibration_text": _TEXT,
    "calibration_tokens": 192 * 8192,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # arXiv 2502.14837: partial RoPE by the 2-norm, head by head, and one SVD of the stacked weights.
        "mha2mla": {"layout": "per-group", "rope_selection": "2-norm", "low_rank": "svd-joint", **_PLAIN},
        # arXiv 2502.07864: RoRoPE with FreqFold, then one PCA of keys and values scaled to the same energy.
        "transmla": {
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
            "calibration_tokens": 6 * 8192,
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


def preset_values(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of preset ``name`` with ``given`` ones on top; a target among them replaces the preset's.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; expected one of {', '.join(map(repr, PRESETS))}")
    values = dict(PRESETS[name])
    if any(given.get(key) is not None for key in TARGET_KEYS):
        values = {key: value for key, value in values.items() if key not in TARGET_KEYS}
    return {**values, **given, "preset": name}
