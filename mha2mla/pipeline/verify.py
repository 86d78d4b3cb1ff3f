"""Fourth stage: the written folder, read back from disk and compared with the source."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig

from mha2mla.conversion.parity import ParityReport, compare
from mha2mla.conversion.recipe import is_exact
from mha2mla.conversion.source.checkpoint import CheckpointError, CheckpointReader
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.pipeline.prepare import Prepared

FULL_RANK_TOLERANCE = 1e-4  # relative error of float32 logits


class ParityError(ValueError):
    """A conversion that must be exact is not, or one that must resemble its source does not at all; nothing was
    written under the destination's name."""


def verify(prepared: Prepared, folder: Path) -> tuple[ParityReport, ParityReport | None]:
    """Reads ``folder`` back and compares it with the source, in short windows by layer and in one long window.

    Raises:
        CheckpointError: the written names are not the model's.
        ParityError: full rank was asked for, and the logits differ by more than rounding; or the predictions are
            further from the source's than a guess.
    """
    plan, arguments = prepared.plan, prepared.plan.arguments
    converted = read_back(folder, plan.model)
    compared = partial(
        compare, plan.model, converted, folder=folder, spill_bytes=arguments.spill_bytes, progress=arguments.progress
    )
    parity = compared(plan.evaluation.tokens)
    long_parity = None
    if plan.long_evaluation is not None:
        long_parity = compared(plan.long_evaluation.tokens, by_layer=False)
    converted.source.release()
    if all(map(is_exact, prepared.geometries)):
        tolerance = parity_tolerance(arguments.compute_dtype, plan.stored_dtype, plan.source_dtype)
        check_exact(parity, tolerance, "the full-rank conversion")
    guess = math.log(plan.model.vocab_size)
    for measured in (parity, long_parity):
        if measured is not None and not measured.kl <= guess:
            raise ParityError(
                f"the converted model's predictions are {measured.kl:.3g} nats a token from the source's (KL); expected"
                f" at most {guess:.3g}, as far as a guess among {plan.model.vocab_size} tokens can be from certainty"
            )
    return parity, long_parity


def read_back(folder: Path, source: StreamedModel) -> StreamedModel:
    """What was written, to be run as ``source`` is.

    Raises:
        CheckpointError: the written names are not the model's.
    """
    config, reader = AutoConfig.from_pretrained(folder, trust_remote_code=False), CheckpointReader(folder)
    written = StreamedModel(config, reader, source.sliding_windows, device=source.device, dtype=source.dtype)
    if reader.names() != written.expected_names():
        different = sorted(reader.names() ^ written.expected_names())
        raise CheckpointError(f"written tensors are not the model's: {', '.join(different[:5])}")
    return written


def check_exact(parity: ParityReport, tolerance: float, what: str) -> None:
    """Refuses logits of ``what`` that are not the source's to rounding.

    Raises:
        ParityError: with both numbers.
    """
    # Written so that NaN fails.
    if not parity.logits_relative_error <= tolerance:
        raise ParityError(
            f"logits of {what} differ from the source's by {parity.logits_relative_error:.3g} (relative); expected at"
            f" most {tolerance:.3g}"
        )


def parity_tolerance(computed: torch.dtype, written: torch.dtype, source: torch.dtype) -> float:
    """Largest relative error of logits that are to be exact: 1e-4 in float32; a few roundings where numbers are
    narrower."""
    computed, written, source = (torch.finfo(dtype).eps for dtype in (computed, written, source))
    return max(FULL_RANK_TOLERANCE, 8 * computed, 8 * written if written > source else 0)
