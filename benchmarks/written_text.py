"""What the text that a source writes for its own calibration should be like: rows how long, how warmly sampled.

    python benchmarks/written_text.py --json benchmarks/results/h200-written-text.json

Every row is one conversion by ``quick`` on windows of its lengths, half of them written in that way, half a manual, and
is judged on texts that nothing calibrates on, as in ``benchmarks/conversion.py``.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.conversion import LENGTHS, TEXTS, Case, measure_case
from mha2mla.conversion.calibration.blocks import default_lengths
from mha2mla.conversion.calibration.generated_text import generate_windows
from mha2mla.conversion.recipe import Recipe
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.loading import load_model, load_tokenizer
from mha2mla.eval.quality import parse_lengths
from mha2mla.eval.report import print_table, write_json
from mha2mla.texts import mixed_windows
from mha2mla.trial_models import fetch_smollm2


@dataclass(frozen=True)
class Writing:
    """One way to write: tokens of a row, the temperature of its samples, and what is mixed with it."""

    row: int = 512
    temperature: float = 1.0
    text: str = "generated+builtin:pydoc"

    def __str__(self) -> str:
        return f"{self.text}, rows of {self.row}, temperature {self.temperature:g}"


WRITINGS = (
    Writing(),
    Writing(row=2048),
    Writing(row=8192),
    Writing(temperature=0.8),
    Writing(temperature=1.2),
    Writing(text="generated"),
    Writing(text="generated", row=8192),
)


class Written:
    """The windows of a writing, for ``measure_case``."""

    def __init__(self, source: str, tokenizer, writing: Writing, device: torch.device) -> None:
        self.source, self.tokenizer, self.writing, self.device = source, tokenizer, writing, device

    def windows(self, recipe: Recipe) -> tuple[list[torch.Tensor], float]:
        """int64 [windows, length] of every length, and the seconds it took."""
        started = time.perf_counter()
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(self.source, dtype=dtype).eval().to(self.device)

        def write(length: int, count: int) -> torch.Tensor:
            how = {"row": self.writing.row, "temperature": self.writing.temperature}
            return generate_windows(model, self.tokenizer, length, count, seed=recipe.calibration.seed + length, **how)

        lengths = default_lengths(model.config.max_position_embeddings)
        blocks = max(1, recipe.calibration.tokens // len(lengths) // max(lengths))
        made = [
            mixed_windows(
                self.tokenizer,
                self.writing.text,
                length,
                blocks * max(lengths) // length,
                seed=recipe.calibration.seed,
                generate=write,
            )
            for length in lengths
        ]
        return made, time.perf_counter() - started


def compare(
    json: str | None = None,
    only: str = "",
    model: str | None = None,
    device: str | None = None,
    tokens: int = 98304,
    max_tokens: int = 24576,
    seed: int = 0,
) -> bool:
    """Ways of writing at cache ratio 0.50.

    Args:
        json: file to write after every row.
        only: measure ways whose name contains this.
        model: folder or hub id; default SmolLM2-135M-Instruct.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        tokens: to calibrate on, over all lengths.
        max_tokens: of each evaluation text.
        seed: of texts and recipe.
    """
    source = model or str(fetch_smollm2())
    loaded = load_model(source, "source", device=device, dtype=torch.float32)
    tokenizer = load_tokenizer(source, "source")
    environment, rows = collect_environment(), []
    for writing in (writing for writing in WRITINGS if only in str(writing)):
        case = Case(
            str(writing), Recipe.from_preset("quick", **{"calibration.tokens": tokens, "calibration.seed": seed})
        )
        written = Written(source, tokenizer, writing, loaded.device)
        judged = {"texts": TEXTS, "lengths": parse_lengths(LENGTHS), "max_tokens": max_tokens, "device": device}
        rows.append(measure_case(case, source, loaded, tokenizer, written, **judged))
        print(f"{case.name}: {rows[-1]['status']} ({rows[-1]['seconds']:.0f} s)", file=sys.stderr, flush=True)
        if json:
            write_json(json, kind="written-text", rows=rows, environment=environment, model=Path(source).name)
    columns = {"name": "text"} | {key: f"x at {key}" for row in rows for key in row if key.isdecimal()}
    columns |= {"calibration_seconds": "text s", "status": "status"}
    title = "What calibration text should be like: perplexity over the source's, the text that loses most"
    print_table(rows, title=title, columns=columns, caption=describe_environment(environment))
    return all(row["status"] == "ok" for row in rows)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    sys.exit(0 if auto_cli(compare) else 1)
