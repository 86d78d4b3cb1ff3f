"""Second stage: what all layers depend on — calibration text, the rotary share, the layers' ranks.

Each is a piece of the work folder: saved when it is found, and found there by the next run of the same conversion.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.calibration.lengths import calibrated_length
from mha2mla.conversion.calibration.windows import Windows, calibration_windows, listed
from mha2mla.conversion.latent.ranks import choose_layer_ranks
from mha2mla.conversion.layer import converted_config
from mha2mla.conversion.recipe import RECORDS, Recipe
from mha2mla.conversion.resume import ResumeError, WorkFolder, code_hash, source_identity, tensor_hash
from mha2mla.conversion.rope.share_search import choose_rope_share
from mha2mla.conversion.source.files import FileIdentity
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.pipeline.check import Plan
from mha2mla.texts import text_identity

_TEXT, _SHARE, _RANKS = "text", "rope-share", "layer-ranks"  # pieces of the work


@dataclass(frozen=True)
class Prepared:
    """A plan with what took work to find out.

    Attributes:
        recipe: the plan's, with what its searches chose.
        calibration: windows; None where nothing depends on them.
    """

    plan: Plan
    recipe: Recipe
    calibration: TokenBlocks | None

    @property
    def geometry(self) -> MLAGeometry:
        """Of every layer, but for the rank where ``geometries`` says so."""
        return self.recipe.geometry(self.plan.spec)

    @property
    def geometries(self) -> tuple[MLAGeometry, ...] | None:
        return self.recipe.geometries(self.plan.spec)

    @property
    def calibrated_length(self) -> int | None:
        lengths = () if self.calibration is None else self.calibration.window_lengths
        return calibrated_length(self.plan.spec, lengths)

    def recorded_recipe(self) -> dict[str, Any]:
        """With the target that was meant, so that a later default does not change what it says."""
        return {**self.recipe.to_dict(), "cache_ratio": self.recipe.target_cache_ratio}

    def config(self) -> MHA2MLAConfig:
        """Of the result, without dtype, architectures and records."""
        plan = self.plan
        return converted_config(plan.opened.config, plan.spec, self.geometry, self.recipe, self.geometries)


def open_work(plan: Plan, folder: Path, weights: dict[str, FileIdentity]) -> WorkFolder:
    """The folder of finished pieces.

    Raises:
        ResumeError: it has finished layers of another conversion, which are not to be discarded.
    """
    try:
        work = WorkFolder(folder, _request(plan, weights), resume=plan.arguments.resume == "auto")
    except ResumeError as error:
        hint = "repeat that conversion, or discard its layers with resume='never' (--resume never)"
        raise ResumeError(f"{error}: {hint}") from error
    if work.damaged:
        plan.arguments.say(f"{', '.join(work.damaged)} in {folder} were damaged and are made anew")
    return work


def prepare(plan: Plan, work: WorkFolder, folder: Path) -> Prepared:
    """Finds out what layers depend on, or takes it from ``work``.

    Args:
        folder: where activations go that are larger than ``spill_bytes``.
    """
    if plan.calibration is None:
        return Prepared(plan, plan.recipe, None)
    windows = _windows(plan, work)
    arguments = plan.arguments
    source = (plan.model, plan.opened.adapter, plan.spec)
    text, recipe = tensor_hash(windows.tokens), plan.recipe
    if recipe.searches_rope_share:
        saved = _saved(work, _SHARE, text)
        if saved is None:
            recipe = choose_rope_share(*source, recipe, windows, folder=folder, spill_bytes=arguments.spill_bytes)
            work.put(_SHARE, {}, {"calibration": text, "recipe": recipe.to_dict()})
            arguments.say(f"rope_share: {recipe.rope_share} loses least of {recipe.rope_search}")
        else:
            recipe = saved
    if recipe.searches_layer_ranks:
        saved = _saved(work, _RANKS, text)
        if saved is None:
            recipe = choose_layer_ranks(
                *source,
                recipe,
                windows,
                folder=folder,
                spill_bytes=arguments.spill_bytes,
                progress=arguments.progress,
            )
            work.put(_RANKS, {}, {"calibration": text, "recipe": recipe.to_dict()})
            arguments.say(f"layer_ranks: {recipe.layer_ranks}")
        else:
            recipe = saved
    return Prepared(plan, recipe, windows)


def layer_inputs(prepared: Prepared) -> dict[str, Any]:
    """What layers depend on that was found out on the way, beside the request."""
    ranks = None if prepared.geometries is None else [each.kv_lora_rank for each in prepared.geometries]
    tokens = None if prepared.calibration is None else prepared.calibration.tokens
    return {"geometry": prepared.geometry.to_dict(), "layer_ranks": ranks, "calibration": tensor_hash(tokens)}


def version() -> str:
    """Of this package."""
    try:
        return metadata.version("mha2mla")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _windows(plan: Plan, work: WorkFolder) -> TokenBlocks:
    saved = work.get(_TEXT)
    if saved is not None:
        return TokenBlocks(saved[0]["windows"], tuple(saved[1]["lengths"]))
    windows = calibration_windows(
        plan.opened,
        plan.calibration,
        lengths=plan.lengths,
        tokens=plan.recipe.calibration_tokens,
        seed=plan.recipe.seed,
        device=plan.model.device,
        progress=plan.arguments.progress,
    )
    work.put(_TEXT, {"windows": windows.tokens}, {"lengths": windows.lengths})
    return windows


def _saved(work: WorkFolder, name: str, text: str) -> Recipe | None:
    """What an earlier run found out on the same text."""
    saved = work.get(name)
    if saved is None or saved[1]["calibration"] != text:
        return None
    return Recipe.from_dict(saved[1]["recipe"])


def _request(plan: Plan, weights: dict[str, FileIdentity]) -> dict[str, Any]:
    """All that the tensors of a converted layer depend on, as far as it is known before any work."""
    arguments = plan.arguments
    return {
        "recipe": {key: value for key, value in plan.recipe.to_dict().items() if key not in ("preset", *RECORDS)},
        "source": source_identity(weights),
        "calibration": _text_identity(plan.calibration),
        "device": _device_name(plan.model.device),
        "compute_dtype": str(arguments.compute_dtype),
        "dtype": None if arguments.dtype is None else str(arguments.dtype),
        "python": platform.python_version(),  # texts come with it
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "mha2mla": version(),
        "code": code_hash(),
    }


def _text_identity(text: str | Windows | None) -> str | None:
    if text is None:
        return None
    if not isinstance(text, str):
        return "+".join(map(tensor_hash, listed(text)))
    try:
        return text_identity(text)
    except ValueError as error:
        raise ValueError(f"calibration {text!r}: {error}") from error


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
