"""What a rotary width of its own would give each layer, where rotary keys are computed from the latent.

    python benchmarks/rotary_width.py --json benchmarks/results/h200-rotary-width.json
    python benchmarks/rotary_width.py --preset latent       # after a few gradient steps

Every layer is converted alone, at each width, in an otherwise untouched source: the divergence of the predictions is
what that width loses there. A best mixture of widths, handed out as ranks are, is set beside one width for all layers.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.conversion import Calibration
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.latent.ranks import allocate, loss_at, measure_losses
from mha2mla.conversion.recipe import Recipe
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.report import print_table, write_json
from mha2mla.trial_models import fetch_smollm2

STEP = 32  # by which the widths of a mixture differ
_FITTED_TOKENS, _JUDGED_TOKENS = 98304, 24576


def mixtures(losses: Sequence[Mapping[int, float]], means: Sequence[int]) -> list[dict[str, Any]]:
    """A row for every mean width: what it loses in all layers alike and in the best mixture, and the mean width of the
    cheapest mixture that loses no more than it does alike.

    Args:
        losses: per layer, width → loss; widths between the measured ones are log-linear.
        means: of the layers' widths; multiples of :data:`STEP`.
    """
    rows, layers, most = [], len(losses), max(losses[0])
    mixed = {
        budget: allocate(losses, budget, step=STEP, least=STEP, most=most)
        for budget in range(STEP * layers, most * layers + 1, STEP)
    }
    lost = {
        budget: sum(loss_at(layer, width) for layer, width in zip(losses, widths, strict=True))
        for budget, widths in mixed.items()
    }
    for mean in means:
        alike = sum(loss_at(layer, mean) for layer in losses)
        enough = min(budget for budget, loss in lost.items() if loss <= alike * (1 + 1e-9))
        rows.append(
            {"mean width": mean, "loss, alike": alike, "loss, mixed": lost[mean * layers]}
            | {"gain": 1 - lost[mean * layers] / alike, "mean width at equal loss": enough / layers}
            | {"widths": mixed[mean * layers]}
        )
    return rows


def probe(
    preset: str = "quick",
    widths: list[int] | None = None,
    means: list[int] | None = None,
    tokens: int | None = None,
    model: str | None = None,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """Losses by layer and width at cache ratio 0.50, and what mixing widths would give.

    Args:
        preset: by which layers are converted; with gradient steps, a few of them.
        widths: that are measured; default 32, 64, 96, 128 and 192.
        means: of mixtures; default 64, 96 and 128.
        tokens: to calibrate on; default the preset's.
        model: folder or hub id; default SmolLM2-135M-Instruct.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        json: file to write.
    """
    widths, means = sorted(widths or (32, 64, 96, 128, 192)), means or (64, 96, 128)
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    drawn = Calibration(model or str(fetch_smollm2()), on)
    spec, given = drawn.source.spec, {} if tokens is None else {"calibration.tokens": tokens}
    rank = Recipe.from_preset(preset, layout="latent", cache_ratio=0.5, **given).geometry(spec).kv_lora_rank
    recipes = [
        Recipe.from_preset(preset, layout="latent", kv_lora_rank=rank, qk_rope_head_dim=width, **given)
        for width in widths
    ]
    windows, _ = drawn.windows(recipes[0])
    fitted, judged = TokenBlocks.of(windows).divided(_FITTED_TOKENS, _JUDGED_TOKENS)
    with tempfile.TemporaryDirectory(prefix="mha2mla-rotary-width-") as folder:
        found = measure_losses(
            drawn.source.model(on, torch.float32),
            drawn.source.adapter,
            spec,
            [recipe.geometry(spec) for recipe in recipes],
            recipes[0],
            fitted,
            judged,
            folder=Path(folder),
            progress=True,
        )
    losses = [dict(zip(widths, layer, strict=True)) for layer in found]
    layers = [
        {"layer": index} | {f"d_r = {width}": loss for width, loss in layer.items()}
        for index, layer in enumerate(losses)
    ]
    layers.append({"layer": "all"} | {f"d_r = {width}": sum(layer[width] for layer in losses) for width in widths})
    rows, environment = mixtures(losses, means), collect_environment()
    print_table(layers, title=f"Divergence of the predictions with one layer converted by {preset}, {rank} numbers")
    print_table(rows, title="One width for all layers, and a mixture", caption=describe_environment(environment))
    if json:
        measured = {"model": Path(drawn.source.folder).name, "preset": preset, "tokens": fitted.tokens.numel()}
        write_json(json, kind="rotary-width", rows=rows, layers=layers, environment=environment, measured=measured)
    return True


if __name__ == "__main__":
    from jsonargparse import auto_cli

    sys.exit(0 if auto_cli(probe) else 1)
