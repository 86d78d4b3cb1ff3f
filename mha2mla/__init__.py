"""Converts MHA/GQA checkpoints to Multi-head Latent Attention, runs them, and measures what was gained and lost.

Importing this package registers ``model_type: mha2mla`` with transformers' auto classes. It imports no kernel compiler
and touches no GPU; everything else is looked up when it is first asked for (PEP 562). In the command ``mha2mla`` the
verbs register the model, those that load one: ``--help`` has no use for torch and transformers, which take seconds.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha2mla.conversion.extension import CalibrationSource, register
    from mha2mla.conversion.latent.basis import BasisRule
    from mha2mla.conversion.latent.rules import LowRankRule
    from mha2mla.conversion.presets import PRESETS as presets
    from mha2mla.conversion.recipe import Recipe
    from mha2mla.conversion.rope import RopeRule
    from mha2mla.eval.inspection import Inspection
    from mha2mla.eval.inspection import inspect_checkpoint as inspect
    from mha2mla.eval.latency import model_latency
    from mha2mla.eval.loading import load
    from mha2mla.eval.quality import QualityReport, evaluate_quality
    from mha2mla.geometry import MLAGeometry
    from mha2mla.healing.record import HealingReport
    from mha2mla.healing.run import heal
    from mha2mla.modeling import LatentCache, MHA2MLAConfig, MHA2MLAForCausalLM
    from mha2mla.pipeline import ConversionReport, convert

    __version__: str

# Name → where it is, and what it is called there.
_LAZY = {
    "BasisRule": "mha2mla.conversion.latent.basis:BasisRule",
    "CalibrationSource": "mha2mla.conversion.extension:CalibrationSource",
    "ConversionReport": "mha2mla.pipeline:ConversionReport",
    "HealingReport": "mha2mla.healing.record:HealingReport",
    "Inspection": "mha2mla.eval.inspection:Inspection",
    "LatentCache": "mha2mla.modeling:LatentCache",
    "LowRankRule": "mha2mla.conversion.latent.rules:LowRankRule",
    "MHA2MLAConfig": "mha2mla.modeling:MHA2MLAConfig",
    "MHA2MLAForCausalLM": "mha2mla.modeling:MHA2MLAForCausalLM",
    "MLAGeometry": "mha2mla.geometry:MLAGeometry",
    "QualityReport": "mha2mla.eval.quality:QualityReport",
    "Recipe": "mha2mla.conversion.recipe:Recipe",
    "RopeRule": "mha2mla.conversion.rope:RopeRule",
    "convert": "mha2mla.pipeline:convert",
    "evaluate_quality": "mha2mla.eval.quality:evaluate_quality",
    "heal": "mha2mla.healing.run:heal",
    "inspect": "mha2mla.eval.inspection:inspect_checkpoint",
    "load": "mha2mla.eval.loading:load",
    "model_latency": "mha2mla.eval.latency:model_latency",
    "presets": "mha2mla.conversion.presets:PRESETS",
    "register": "mha2mla.conversion.extension:register",
}

__all__ = [
    "BasisRule", "CalibrationSource", "ConversionReport", "HealingReport", "Inspection", "LatentCache", "LowRankRule",
    "MHA2MLAConfig", "MHA2MLAForCausalLM", "MLAGeometry", "QualityReport", "Recipe", "RopeRule", "__version__",
    "convert", "evaluate_quality", "heal", "inspect", "load", "model_latency", "presets", "register",
]  # fmt: skip


def _is_command() -> bool:
    """True if this process is ``mha2mla VERB`` or ``python -m mha2mla VERB``, which imports the package to find it."""
    script = sys.argv[0] if sys.argv else ""
    return os.path.basename(script) == "mha2mla" or (script == "-m" and "mha2mla" in sys.orig_argv)


if not _is_command():
    importlib.import_module("mha2mla.modeling")  # registers the model


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
