"""Second stage: what all layers depend on — calibration text, the layers' ranks.

Each is a piece of the work folder: saved when it is found, and found there by the next run of the same conversion.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mha2mla.conversion.calibration.blocks import TokenBlocks, Windows, calibrated_length, listed
from mha2mla.conversion.calibration.generated_text import PIECES
from mha2mla.conversion.calibration.texts import DATASET, DIVERSE, GENERATED, text_identity
from mha2mla.conversion.calibration.windows import calibration_windows, named_in_errors
from mha2mla.conversion.extension import CalibrationSource
from mha2mla.conversion.latent.ranks import Choice, choose_layer_ranks
from mha2mla.conversion.layer_walk import LayerWalk, converted_config
from mha2mla.conversion.resume import (
    ResumeError,
    WorkFolder,
    code_hash,
    keep_text,
    kept_text,
    read_piece,
    tensor_hash,
    text_code_hash,
)
from mha2mla.conversion.source.files import FileIdentity
from mha2mla.environment import device_name, installed_version
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.pipeline.check import Plan
from mha2mla.terminal import Span

_TEXT, _RANKS = "text", "layer-ranks"  # pieces of the work


@dataclass(frozen=True)
class Prepared:
    """A plan with what took work to find out.

    Attributes:
        geometry: of every layer, but for the rank; the first layer's where bits are by layer.
        searches: what was chosen, and what each choice would have lost.
    """

    plan: Plan
    geometry: MLAGeometry
    walk: LayerWalk
    searches: dict[str, Any]

    def config(self) -> MHA2MLAConfig:
        """Config of the result, with records of how it was made, without dtype and architectures."""
        plan, windows = self.plan, self.walk.windows
        config = converted_config(plan.opened.config, plan.spec, self.walk.geometries, plan.recipe)
        config.recipe = plan.recipe.for_records().to_dict()
        name = plan.arguments.source_name(plan.opened.folder)
        config.source_config = {**config.source_config, "_name_or_path": name}
        config.calibrated_length = calibrated_length(plan.spec, () if windows is None else windows.window_lengths)
        return config


def open_work(plan: Plan, folder: Path, weights: dict[str, FileIdentity]) -> WorkFolder:
    """The folder of finished pieces.

    Raises:
        ResumeError: it has finished layers of another conversion, which are not to be discarded.
    """
    try:
        work = WorkFolder(folder, _request(plan, weights), resume=plan.arguments.resume == "auto")
    except ResumeError as error:
        hint = "repeat that conversion, or discard its layers with resume='never'"
        raise ResumeError(f"{error}: {hint}") from error
    if work.damaged:
        plan.arguments.say(f"{', '.join(work.damaged)} in {folder} were damaged and are made anew")
    return work


def prepare(
    plan: Plan,
    work: WorkFolder,
    folder: Path,
    files: Mapping[str, FileIdentity],
    text: bool | Span,
    search: bool | Span,
) -> Prepared:
    """Finds out what layers depend on, or takes it from ``work``.

    Args:
        text, search: progress of the calibration text and of the search for ranks.
        folder: where activations go that are larger than ``spill_bytes``.
    """
    recipe, spec, arguments = plan.recipe, plan.spec, plan.arguments
    geometry = recipe.geometry(spec)
    walk = LayerWalk(
        plan.model,
        plan.opened.adapter,
        spec,
        (geometry,) * spec.num_layers,
        recipe,
        None if plan.calibration is None else _windows(plan, work, files, text),
        folder,
        weights_dtype=arguments.dtype,
        spill_bytes=arguments.spill_bytes,
    )
    searches, ranks, bits = {}, None, None
    if recipe.searches_layer_ranks and not geometry.is_full_rank:
        chosen, losses = _measured_ranks(plan, work, walk, search)
        ranks, bits = ([each[index] for each in chosen] for index in range(2))
        searches = {"layer_rank_losses": losses["ranks"], "layer_ranks": ranks}
        if "bits" in losses:
            searches |= {"layer_code_losses": losses["bits"], "layer_bits": bits}
    for each in (text, search):
        if isinstance(each, Span):
            each.skip()
    geometries = recipe.geometries(spec, ranks, bits)
    geometry = geometry if isinstance(recipe.latent.bits, int) else geometries[0]
    return Prepared(plan, geometry, replace(walk, geometries=geometries), searches)


def _measured_ranks(
    plan: Plan, work: WorkFolder, walk: LayerWalk, progress: bool | Span
) -> tuple[list[Choice], dict[str, dict[str, list[float | None]]]]:
    """Ranks, bits and losses of :func:`choose_layer_ranks`, or what an earlier run found on the same text."""
    text, saved = tensor_hash(walk.windows.tokens), work.get(_RANKS)
    if saved is not None and saved[1]["calibration"] == text:
        return saved[1]["chosen"], saved[1]["losses"]
    chosen, losses = choose_layer_ranks(walk, progress=progress)
    work.put(_RANKS, {}, {"calibration": text, "chosen": chosen, "losses": losses})
    ranks, bits = zip(*chosen, strict=True)
    shown = f"ranks of {min(ranks)} to {max(ranks)}"
    if "bits" in losses:
        shown += f", {', '.join(map(str, sorted(set(bits))))} bits"
    plan.arguments.say(f"{_RANKS}: {shown} by layer lose least")
    return chosen, losses


def layer_inputs(prepared: Prepared) -> dict[str, Any]:
    """Findings that layers depend on, beside the request."""
    windows = prepared.walk.windows
    shapes = [geometry.to_dict() for geometry in prepared.walk.geometries]
    return {"geometries": shapes, "calibration": None if windows is None else tensor_hash(windows.tokens)}


def _windows(plan: Plan, work: WorkFolder, files: Mapping[str, FileIdentity], progress: bool | Span) -> TokenBlocks:
    say, piece = plan.arguments.say, work.get(_TEXT)
    if piece is None:
        kept = _kept_text(plan, files)
        piece = None if kept is None else read_piece(kept, kept.stem)
        if piece is not None:
            say(f"calibration text: {kept}, which the source wrote for another conversion")
        else:
            if any(name.startswith(PIECES) for name in work.names()):
                say(f"going on with calibration text that an interrupted conversion left in {work.folder}")
            windows = calibration_windows(
                plan.opened,
                plan.calibration,
                lengths=plan.lengths,
                tokens=plan.recipe.calibration.tokens,
                seed=plan.recipe.calibration.seed,
                device=plan.model.device,
                progress=progress,
                work=work,
            )
            piece = {"windows": windows.tokens}, {"lengths": windows.lengths}
            if kept is not None and (why := keep_text(kept, *piece)):
                say(f"calibration text is not kept for other conversions of this source: {why}")
        work.put(_TEXT, *piece)
        work.discard(PIECES)
    tensors, about = piece
    return TokenBlocks(tensors["windows"], tuple(about["lengths"]))


def _kept_text(plan: Plan, files: Mapping[str, FileIdentity]) -> Path | None:
    """File in the cache folder for text that the source writes, named by a hash of all that decides it; None for other
    text, and beside a dataset, whose name stays when it changes."""
    parts = plan.calibration.split("+") if isinstance(plan.calibration, str) else []
    if not {GENERATED, DIVERSE} & set(parts) or any(part.startswith(DATASET) for part in parts):
        return None
    calibration = plan.recipe.calibration
    asked = [list(plan.lengths), calibration.tokens, calibration.seed]
    machine = {**_machine(plan), "code": text_code_hash()}
    return kept_text([{name: each.sha256 for name, each in files.items()}, machine, asked])


def _request(plan: Plan, weights: dict[str, FileIdentity]) -> dict[str, Any]:
    """All that the tensors of a converted layer depend on, as far as it is known before any work."""
    arguments = plan.arguments
    return {
        "recipe": plan.recipe.flat(),
        "code of": {key: each.code_hash() for key, each in plan.recipe.objects.items()},
        "source": {name: identity.sha256 for name, identity in weights.items()},
        "compute_dtype": str(arguments.compute_dtype),
        "dtype": None if arguments.dtype is None else str(arguments.dtype),
        **_machine(plan),
    }


def _machine(plan: Plan) -> dict[str, Any]:
    """The calibration text by name or hash, and the device and versions that it depends on beside the source."""
    return {
        "calibration": _text_identity(plan.calibration),
        "device": device_name(plan.model.device),
        "python": platform.python_version(),  # texts come with it
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "mha2mla": installed_version(),
        "code": code_hash(),
    }


def _text_identity(text: str | CalibrationSource | Windows | None) -> str | dict[str, Any] | None:
    if text is None:
        return None
    if isinstance(text, CalibrationSource):
        return text.to_plain()
    if not isinstance(text, str):
        return "+".join(map(tensor_hash, listed(text)))
    with named_in_errors("calibration", text):
        return text_identity(text)
