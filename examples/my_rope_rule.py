"""A RoPE rule of one's own: the pairs with the largest keys stay rotary.

python examples/my_rope_rule.py [SOURCE]    # a Hugging Face folder; default: a tiny random Llama
"""

import sys
import tempfile
from dataclasses import dataclass

import torch

import mha2mla
from mha2mla.conversion.rope import RopeProblem, Scored
from mha2mla.trial_models import tiny_checkpoint


@mha2mla.register("largest-keys")  # the name in YAML, and after --rope.selection once this module is imported
@dataclass(frozen=True)
class LargestKeys(Scored):
    """Scores a pair by its keys' energy, to a power.

    Args:
        power: 0 keeps the highest frequencies.
    """

    power: float = 1.0

    def scores(self, problem: RopeProblem) -> torch.Tensor:
        """float64 [frequencies, kv heads], on the CPU."""
        energy = problem.statistics.key_covariance.diagonal(dim1=1, dim2=2).real  # E|k|²
        return energy.cpu() ** self.power


def main(source: str | None, work: str) -> None:
    source = source or tiny_checkpoint(f"{work}/source")
    calibration = {"text": "builtin:prose", "tokens": 512, "lengths": 64}
    found = {}
    for name, rule in {"named": "largest-keys", "object": LargestKeys(), "other": LargestKeys(power=0.0)}.items():
        recipe = mha2mla.Recipe(preset="minimal", layout="shared", calibration=calibration, **{"rope.selection": rule})
        report = mha2mla.convert(source, f"{work}/{name}", recipe, evaluation_tokens=256, progress=False)
        print(f"{name}: {report.recipe['rope']['selection']}, perplexity x {report.parity.perplexity_ratio:.3f}")
        found[name] = report.weights_sha256
    assert found["named"] == found["object"] != found["other"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else None, folder)
