"""Second stage: what all layers depend on — calibration text, the rotary share, the layers' ranks.

Each is a piece of the work folder: saved when it is found, and found there by the next run of the same conversion.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.calibration.lengths import calibrated_length
from mha2mla.conversion.calibration.windows import Windows, calibration_windows, listed
from mha2mla.conversion.latent.ranks import choose_layer_ranks
from mha2mla.conversion.layer import converted_config
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.resume import ResumeError, WorkFolder, code_hash, source_identity, tensor_hash
from mha2mla.conversion.rope.share_search import choose_rope_share
from mha2mla.conversion.source.files import FileIdentity
from mha2mla.environment import installed_version
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.pipeline.check import Plan
from mha2mla.texts import text_identity

_TEXT, _SHARE, _RANKS = "text", "rope-share", "layer-ranks"  # pieces of the work


@dataclass(frozen=True)
class Prepared:
    """A plan with what took work to find out.

    Attributes:
        geometry: of every layer, but for the rank. ``geometries``: of each.
        calibration: windows; None where nothing depends on them.
        searches: what was chosen, and what each choice would have lost.
    """

    plan: Plan
    geometry: MLAGeometry
    geometries: tuple[MLAGeometry, ...]
    calibration: TokenBlocks | None
    searches: dict[str, Any]

    @property
    def calibrated_length(self) -> int | None:
        lengths = () if self.calibration is None else self.calibration.window_lengths
        return calibrated_length(self.plan.spec, lengths)

    def config(self) -> MHA2MLAConfig:
        """Of the result, without dtype, architectures and records."""
        plan = self.plan
        return converted_config(plan.opened.config, plan.spec, self.geometries, plan.recipe)


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
    recipe, spec = plan.recipe, plan.spec
    if plan.calibration is None:
        return Prepared(plan, recipe.geometry(spec), recipe.geometries(spec), None, {})
    windows, searches, ranks = _windows(plan, work), {}, None
    search = partial(_search, plan, work, windows, folder=folder)
    if recipe.searches_rope_share:
        share, searches["rope_share_losses"] = search(_SHARE, choose_rope_share, recipe)
        searches["rope_share"], recipe = share, recipe.with_share(share)
    if recipe.searches_layer_ranks:
        progress = plan.arguments.progress
        ranks, searches["layer_rank_losses"] = search(_RANKS, choose_layer_ranks, recipe, progress=progress)
        searches["layer_ranks"] = ranks
    return Prepared(plan, recipe.geometry(spec), recipe.geometries(spec, ranks), windows, searches)


def _search(
    plan: Plan, work: WorkFolder, windows: TokenBlocks, name: str, choose: Callable, recipe: Recipe, **keys: Any
) -> tuple[Any, dict[str, Any]]:
    """What ``choose`` finds and what every choice loses, or what an earlier run found on the same text."""
    text, saved = tensor_hash(windows.tokens), work.get(name)
    if saved is not None and saved[1]["calibration"] == text:
        return saved[1]["chosen"], saved[1]["losses"]
    source = (plan.model, plan.opened.adapter, plan.spec)
    chosen, losses = choose(*source, recipe, windows, spill_bytes=plan.arguments.spill_bytes, **keys)
    work.put(name, {}, {"calibration": text, "chosen": chosen, "losses": losses})
    plan.arguments.say(f"{name}: {chosen} loses least of {losses}")
    return chosen, losses


def layer_inputs(prepared: Prepared) -> dict[str, Any]:
    """What layers depend on that was found out on the way, beside the request."""
    tokens = None if prepared.calibration is None else prepared.calibration.tokens
    shapes = [geometry.to_dict() for geometry in prepared.geometries]
    return {"geometries": shapes, "calibration": tensor_hash(tokens)}


def _windows(plan: Plan, work: WorkFolder) -> TokenBlocks:
    saved = work.get(_TEXT)
    if saved is not None:
        return TokenBlocks(saved[0]["windows"], tuple(saved[1]["lengths"]))
    windows = calibration_windows(
        plan.opened,
        plan.calibration,
        lengths=plan.lengths,
        tokens=plan.recipe.calibration.tokens,
        seed=plan.recipe.calibration.seed,
        device=plan.model.device,
        progress=plan.arguments.progress,
    )
    work.put(_TEXT, {"windows": windows.tokens}, {"lengths": windows.lengths})
    return windows


def _request(plan: Plan, weights: dict[str, FileIdentity]) -> dict[str, Any]:
    """All that the tensors of a converted layer depend on, as far as it is known before any work."""
    arguments = plan.arguments
    return {
        "recipe": plan.recipe.flat(),
        "source": source_identity(weights),
        "calibration": _text_identity(plan.calibration),
        "device": _device_name(plan.model.device),
        "compute_dtype": str(arguments.compute_dtype),
        "dtype": None if arguments.dtype is None else str(arguments.dtype),
        "python": platform.python_version(),  # texts come with it
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "mha2mla": installed_version(),
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
