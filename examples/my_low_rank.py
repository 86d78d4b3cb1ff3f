"""A low-rank rule and a calibration text of one's own: PCA of keys and values on a file's lines.

python examples/my_low_rank.py [SOURCE]    # a Hugging Face folder; default: a tiny random Llama
"""

import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

import mha2mla
from mha2mla.conversion.latent.rules import LatentProblem
from mha2mla.trial_models import tiny_checkpoint


@dataclass(frozen=True)
class PlainPca(mha2mla.LowRankRule):
    """Principal components of [scale · keys; values] under the inputs' covariance."""

    scale: float = 1.0

    def factors(self, problem: LatentProblem, rank: int, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoder [rows, rank] and encoder [rank, E], float64."""
        keys, values = problem.keys.flatten(0, 1), problem.value.flatten(0, 1)
        target = torch.cat([self.scale * keys, values])  # [rows, E]
        components = torch.linalg.eigh(target @ problem.covariance @ target.T)[1].flip(1)[:, :rank]
        undo = torch.ones(len(target), 1, dtype=target.dtype, device=target.device)
        undo[: len(keys)] = 1 / self.scale
        return undo * components, components.T @ target


@dataclass(frozen=True)
class Repeated(mha2mla.CalibrationSource):
    """One sentence, again and again, each time from another of its words."""

    sentence: str

    def windows(self, tokenizer: Any, length: int, count: int, *, seed: int) -> torch.Tensor:
        """int64 [count, length]."""
        tokens = torch.tensor(tokenizer(self.sentence)["input_ids"])
        starts = torch.arange(count)[:, None] + seed
        return tokens[(starts + torch.arange(length)) % len(tokens)]


def main(source: str | None, work: str) -> None:
    source = source or tiny_checkpoint(f"{work}/source")
    text = Repeated("A latent cache holds keys and values in one row. ")
    calibration = {"text": text, "tokens": 512, "lengths": 64}
    recipe = mha2mla.Recipe(preset="minimal", low_rank=PlainPca(scale=2.0), calibration=calibration)
    report = mha2mla.convert(source, f"{work}/mla", recipe, evaluation_tokens=256, progress=False)
    print(report.recipe["latent"]["rule"], report.recipe["calibration"]["text"], report.parity.perplexity_ratio)
    assert report.recipe["latent"]["rule"]["scale"] == 2.0 and report.calibration_tokens == 512


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else None, folder)
