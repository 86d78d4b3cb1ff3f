"""Two language models' predictions for the same tokens, and metrics of the difference."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

# A comparison holds float32 slices of logits: at most this many positions, and this many elements (128 MiB). Neither
# the length of a window nor the vocabulary decides how much memory it takes.
POSITIONS_PER_SLICE = 512
LOGITS_PER_SLICE = 2**25

_TOKENS_AT_ONCE = 8192
_STRETCH = 512  # tokens per sample of a standard error: neighbouring tokens are correlated

LogitsOf = Callable[[slice], Tensor]
Run = Callable[[torch.nn.Module, Tensor], Any]  # a model or its base model, ids [B, L] -> its output


def windows_at_once(length: int) -> int:
    """Windows of ``length`` tokens per forward pass, at least one; none is cut."""
    return max(1, _TOKENS_AT_ONCE // length)


@dataclass(frozen=True)
class Predictions:
    """Predictions of source and converted model at n positions, all on the source's device.

    Attributes:
        source_logits, converted_logits: [n, vocabulary] float32.
        targets: [n] int64, the token that follows each position.
        source_log_probs, converted_log_probs: [n, vocabulary] float32, in nats.
    """

    source_logits: Tensor
    converted_logits: Tensor
    targets: Tensor

    @cached_property
    def source_log_probs(self) -> Tensor:
        return self.source_logits.log_softmax(-1)

    @cached_property
    def converted_log_probs(self) -> Tensor:
        return self.converted_logits.log_softmax(-1)


class Metric(ABC):
    """Metric of a conversion: values per predicted token, reduced to named columns.

    Subclass it and pass instances as ``evaluate_quality(..., metrics=[MyMetric()])``::

        class LostRank(Metric):
            columns = {"rank": "rank of the source's first token"}

            def measure(self, at):
                first = at.source_logits.argmax(-1, keepdim=True)
                return {"rank": (at.converted_logits > at.converted_logits.gather(1, first)).sum(-1)}

    Attributes:
        columns: key in rows and JSON → heading in tables, one for each value that :meth:`reduce` returns. No key of
            another metric or of :class:`~mha2mla.eval.quality.QualityRow`.
    """

    columns: ClassVar[Mapping[str, str]]

    @abstractmethod
    def measure(self, at: Predictions) -> Mapping[str, Tensor]:
        """Values at each position.

        Called once per slice of at most :data:`POSITIONS_PER_SLICE` positions, whose bounds no value may depend on.

        Args:
            at: predictions at n positions, not to be changed in place.

        Returns:
            key → [n], any real dtype or bool, on any device; the same keys at every call.
        """

    def reduce(self, values: Mapping[str, Tensor]) -> Mapping[str, float | None]:
        """One number per column; by default the mean over the scored positions.

        Args:
            values: what :meth:`measure` returned: key → [windows, positions] float64, on the CPU.

        Returns:
            Key of ``columns`` → number, or None where there is none.
        """
        return {key: value.mean().item() for key, value in values.items()}


class Perplexity(Metric):
    """exp of the mean negative log-likelihood of the next token, for both models."""

    columns: ClassVar = {"perplexity_source": "perplexity source", "perplexity_converted": "converted"}

    def measure(self, at: Predictions) -> Mapping[str, Tensor]:
        log_probs = (at.source_log_probs, at.converted_log_probs)
        nll = (-each.gather(-1, at.targets[:, None])[:, 0] for each in log_probs)
        return dict(zip(self.columns, nll, strict=True))

    def reduce(self, values: Mapping[str, Tensor]) -> Mapping[str, float | None]:
        return {key: perplexity(value) for key, value in super().reduce(values).items()}


class Divergence(Metric):
    """Mean of KL(source ‖ converted) in nats, and its standard error (None for a single stretch)."""

    columns: ClassVar = {"kl": "KL (nats)", "kl_stderr": "±"}

    def measure(self, at: Predictions) -> Mapping[str, Tensor]:
        return {"kl": kl_divergence(at.source_log_probs, at.converted_log_probs)}

    def reduce(self, values: Mapping[str, Tensor]) -> Mapping[str, float | None]:
        kl = values["kl"]
        means = torch.cat([part.mean(1) for part in kl.tensor_split(-(-kl.shape[1] // _STRETCH), dim=1)])
        error = (means.std() / len(means) ** 0.5).item() if len(means) > 1 else None
        return {"kl": kl.mean().item(), "kl_stderr": error}


class TopOneAgreement(Metric):
    """Share of positions where both models rank the same token first."""

    columns: ClassVar = {"top1_agreement": "top-1 agreement"}

    def measure(self, at: Predictions) -> Mapping[str, Tensor]:
        return {"top1_agreement": at.source_log_probs.argmax(-1) == at.converted_log_probs.argmax(-1)}


QUALITY_METRICS: tuple[Metric, ...] = (Perplexity(), Divergence(), TopOneAgreement())


@torch.inference_mode()
def compare_predictions(
    source: LogitsOf, converted: LogitsOf, targets: Tensor, metrics: Sequence[Metric]
) -> list[dict[str, Tensor]]:
    """Measures two models position by position, a slice of the positions at a time.

    Args:
        source, converted: logits [n, vocabulary] of a slice of the N positions, any floating dtype; one slice of each
            is alive at a time. Log-probabilities are taken in float32.
        targets: [N] int64, the token that follows each position.

    Returns:
        Per metric: key → values [N] float64 on the CPU.

    Raises:
        ValueError: a metric returned a value of another shape than [n].
    """
    found: list[dict[str, list[Tensor]]] = [{} for _ in metrics]
    step, start = 1, 0  # the first position tells the size of the vocabulary
    while start < len(targets):
        part = slice(start, min(start + step, len(targets)))
        expected = source(part).float()
        at = Predictions(expected, converted(part).float().to(expected.device), targets[part].to(expected.device))
        for metric, values in zip(metrics, found, strict=True):
            for key, value in metric.measure(at).items():
                if value.shape != at.targets.shape:
                    raise ValueError(
                        f"{type(metric).__name__}.measure gave {key!r} of shape {list(value.shape)}; expected"
                        f" {list(at.targets.shape)}, a value per position"
                    )
                values.setdefault(key, []).append(value.double().cpu())
        start, step = part.stop, max(1, min(POSITIONS_PER_SLICE, LOGITS_PER_SLICE // expected.shape[-1]))
    return [{key: torch.cat(parts) for key, parts in values.items()} for values in found]


def join_windows(parts: Sequence[list[dict[str, Tensor]]], windows: int) -> list[dict[str, Tensor]]:
    """Results of several calls of :func:`compare_predictions`, all together of so many windows, as
    [windows, positions]."""
    return [
        {key: torch.cat([part[key] for part in metric]).view(windows, -1) for key in metric[0]}
        for metric in zip(*parts, strict=True)
    ]


def perplexity(mean_nll: float) -> float:
    """exp, infinite in place of an overflow: a broken model has a perplexity too."""
    return math.exp(mean_nll) if mean_nll < 700 else math.inf if mean_nll == mean_nll else math.nan


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) in nats, [N], of log-probabilities [N, vocabulary]."""
    return torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def run_without_cache(module: torch.nn.Module, ids: Tensor) -> Any:
    return module(input_ids=ids, use_cache=False)


class Predictor:
    """Logits of a causal language model of transformers for any slice of the positions of a batch.

    The base model runs once for its hidden states, and the head on the slices that are asked for: logits of a whole
    window of 8192 tokens would take 5 GB with a vocabulary of 152k. A model whose logits are more than its head's
    output (soft-capped, scaled) is found out at once, and its logits are kept whole.

    Args:
        run: how windows go through it, such as over a quantised cache.
    """

    def __init__(self, model: torch.nn.Module, run: Run = run_without_cache) -> None:
        self.model, self._run = model, run
        self._by_slices = self._head_is_all()

    @torch.inference_mode()
    def next_tokens(self, ids: Tensor) -> LogitsOf:
        """Predictions at all positions but the last one of each window.

        Args:
            ids: [B, L] int64, windows that do not see one another; no padding.

        Returns:
            slice of the B·(L−1) positions, window after window -> logits [n, vocabulary], the model's dtype and device.
        """
        ids = ids.to(self.model.device)
        if self._by_slices:
            hidden = self._hidden(ids)[:, :-1].flatten(0, 1)
            head = self.model.get_output_embeddings()
            return lambda part: head(hidden[part])
        logits = self._run(self.model, ids).logits[:, :-1].flatten(0, 1)
        return lambda part: logits[part]

    @torch.inference_mode()
    def last_token(self, ids: Tensor) -> Tensor:
        """Logits [B, vocabulary] of what follows windows of ids [B, L]."""
        ids = ids.to(self.model.device)
        if self._by_slices:
            return self.model.get_output_embeddings()(self._hidden(ids)[:, -1])
        return self._run(self.model, ids).logits[:, -1]

    def _hidden(self, ids: Tensor) -> Tensor:
        return self._run(self.model.base_model, ids).last_hidden_state

    @torch.inference_mode()
    def _head_is_all(self) -> bool:
        head = self.model.get_output_embeddings()
        if head is None or self.model.base_model is self.model:
            return False
        ids = torch.arange(8, device=self.model.device)[None] % self.model.config.get_text_config().vocab_size
        return torch.equal(head(self._hidden(ids)), self._run(self.model, ids).logits)
