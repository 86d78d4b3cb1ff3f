"""Source against converted checkpoint on held-out text, both run layer by layer: what a conversion cost."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mha2mla.conversion.calibration import SPILL_BYTES, ActivationStore
from mha2mla.conversion.streaming import StreamedModel

_LOGITS = 1 << 23  # numbers of one block of logits


@dataclass(frozen=True)
class ParityReport:
    """Differences between two models on the same windows.

    Attributes:
        tokens: predicted tokens, ``windows * (length - 1)``.
        perplexity_source, perplexity_converted: exp of the mean negative log-likelihood.
        kl: mean KL(source ‖ converted) per token, nats.
        top1_agreement: share of tokens where both put the same token first.
        logits_relative_error: Frobenius norm of the difference of all logits, over the source's.
        layer_errors: relative error of the hidden states after each layer.
    """

    tokens: int
    perplexity_source: float
    perplexity_converted: float
    kl: float
    top1_agreement: float
    logits_relative_error: float
    layer_errors: tuple[float, ...]

    @property
    def perplexity_ratio(self) -> float:
        """Converted over source."""
        return self.perplexity_converted / self.perplexity_source

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layer_errors": list(self.layer_errors), "perplexity_ratio": self.perplexity_ratio}


@torch.inference_mode()
def compare(
    source: StreamedModel,
    converted: StreamedModel,
    tokens: torch.Tensor,
    *,
    folder: Path,
    batch: int,
    spill_bytes: int = SPILL_BYTES,
    progress: bool = True,
) -> ParityReport:
    """Runs both models over ``tokens`` [windows, length], one layer of each in memory at a time.

    Args:
        folder: where activations go when they exceed ``spill_bytes``.
        batch: windows at a time.
    """
    windows, length = tokens.shape
    stores = []
    try:
        for model in (source, converted):
            stores.append(
                ActivationStore(
                    windows,
                    length,
                    model.hidden_size,
                    dtype=model.dtype,
                    folder=folder,
                    spill_bytes=spill_bytes,
                )
            )
            model.embed(tokens, stores[-1])
        errors = []
        for index in tqdm(range(source.num_layers), desc="verify", unit="layer", disable=not progress):
            for model, store in zip((source, converted), stores, strict=True):
                model.run_layer(model.layer(index), index, store, batch=batch)
                model.source.release()
            errors.append(_relative_error(stores))
        return _compare_logits(source, converted, stores, tokens, tuple(errors))
    finally:
        for store in stores:
            store.close()


def _relative_error(stores: list[ActivationStore]) -> float:
    difference = norm = 0.0
    for window in range(len(stores[0])):
        reference, other = (store.read(window, window + 1, torch.device("cpu")).double() for store in stores)
        difference += float((other - reference).square().sum())
        norm += float(reference.square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def _compare_logits(
    source: StreamedModel,
    converted: StreamedModel,
    stores: list[ActivationStore],
    tokens: torch.Tensor,
    errors: tuple[float, ...],
) -> ParityReport:
    heads = [model.head() for model in (source, converted)]
    windows, length = tokens.shape
    step = max(1, _LOGITS // source.vocab_size)
    sums = dict.fromkeys(("source", "converted", "kl", "agree", "difference", "norm"), 0.0)
    for window in range(windows):
        hidden = [store.read(window, window + 1, source.device)[0, :-1] for store in stores]
        targets = tokens[window, 1:].to(source.device)
        for start in range(0, length - 1, step):
            part = slice(start, start + step)
            reference, other = (head(states[part]).float() for head, states in zip(heads, hidden, strict=True))
            sums["difference"] += _sum((other - reference).square())
            sums["norm"] += _sum(reference.square())
            sums["agree"] += float((reference.argmax(-1) == other.argmax(-1)).sum())
            reference, other = reference.log_softmax(-1), other.log_softmax(-1)
            target = targets[part, None]
            sums["source"] -= _sum(reference.gather(1, target))
            sums["converted"] -= _sum(other.gather(1, target))
            sums["kl"] += _sum(reference.exp() * (reference - other))
    count = windows * (length - 1)
    return ParityReport(
        tokens=count,
        perplexity_source=_exp(sums["source"] / count),
        perplexity_converted=_exp(sums["converted"] / count),
        kl=sums["kl"] / count,
        top1_agreement=sums["agree"] / count,
        logits_relative_error=math.sqrt(sums["difference"] / sums["norm"]) if sums["norm"] else math.inf,
        layer_errors=errors,
    )


def _sum(rows: torch.Tensor) -> float:
    """Rows in their own precision, their sums in float64: exact enough, and much faster than all in float64."""
    return float(rows.sum(-1).double().sum())


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
