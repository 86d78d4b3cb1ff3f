"""A metric of one's own: the rank that the converted model gives to the source's first token.

python examples/my_metric.py [SOURCE]    # a Hugging Face folder; default: a tiny random Llama
"""

import sys
import tempfile
from collections.abc import Mapping
from typing import ClassVar

import torch

import mha2mla
from mha2mla.eval import Metric, Predictions
from mha2mla.trial_models import tiny_checkpoint


class LostRank(Metric):
    """Mean rank and worst rank, 0 where both models agree."""

    columns: ClassVar = {"rank": "mean rank", "worst_rank": "worst rank"}

    def measure(self, at: Predictions) -> Mapping[str, torch.Tensor]:
        """Logits [n, vocabulary] of both models at n positions -> [n]."""
        first = at.source_logits.argmax(-1, keepdim=True)
        return {"rank": (at.converted_logits > at.converted_logits.gather(1, first)).sum(-1)}

    def reduce(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """[windows, positions] of all windows -> the columns."""
        return {"rank": float(values["rank"].mean()), "worst_rank": float(values["rank"].max())}


def main(source: str | None, work: str) -> None:
    source, folder = source or tiny_checkpoint(f"{work}/source"), f"{work}/mla"
    calibration = {"text": "builtin:prose", "tokens": 512, "lengths": 64}
    mha2mla.convert(source, folder, preset="minimal", calibration=calibration, evaluation_tokens=256, progress=False)
    texts = {"texts": ["builtin:prose"], "lengths": [64], "max_tokens": 512, "dtype": torch.float32}
    (row,) = mha2mla.evaluate_quality(source, folder, metrics=[LostRank()], **texts).to_dict()["rows"]
    print(f"top-1 agreement {row['top1_agreement']:.3f}, mean rank {row['rank']:.3f}, worst {row['worst_rank']:.0f}")
    assert 0 <= row["rank"] <= row["worst_rank"] and (row["top1_agreement"] == 1) == (row["rank"] == 0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else None, folder)
