"""What two language models predict at every position of the same tokens, and how far apart that is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The largest thing that a comparison makes is a float32 slice of logits: at most so many positions of it, and so many
# numbers (128 MiB). Neither the length of a window nor the vocabulary decides how much memory it takes.
POSITIONS_PER_SLICE = 512
LOGITS_PER_SLICE = 2**25

_TOKENS_AT_ONCE = 8192

LogitsOf = Callable[[slice], Tensor]
Run = Callable[[torch.nn.Module, Tensor], Any]  # a model or its base model, ids [B, L] -> its output


def windows_at_once(length: int) -> int:
    """How many windows of ``length`` tokens a model is given at a time; none is ever cut."""
    return max(1, _TOKENS_AT_ONCE // length)


@dataclass(frozen=True)
class Comparison:
    """Two models at N positions; all on the device of the source's logits.

    Attributes:
        nll_source, nll_converted: [N] float32, negative log-likelihood of the token that follows.
        kl: [N] float32, KL(source ‖ converted) in nats.
        agrees: [N] bool, both put the same token first.
        logits_difference, logits_energy: [N] float32, sums of squares over the vocabulary, of converted less source and
            of source.
    """

    nll_source: Tensor
    nll_converted: Tensor
    kl: Tensor
    agrees: Tensor
    logits_difference: Tensor
    logits_energy: Tensor


@torch.inference_mode()
def compare_predictions(source: LogitsOf, converted: LogitsOf, targets: Tensor) -> Comparison:
    """Compares two models position by position, a slice of the positions at a time.

    Args:
        source, converted: logits [n, vocabulary] of a slice of the N positions, any floating dtype; one slice of each
            is alive at a time. Log-probabilities are taken in float32.
        targets: [N] int64, the token that follows each position.
    """
    parts: list[tuple[Tensor, ...]] = []
    step, start = 1, 0  # the first position tells how wide the vocabulary is
    while start < len(targets):
        part = slice(start, min(start + step, len(targets)))
        log_p = source(part).float()
        log_q = converted(part).float().to(log_p.device)
        squares = (log_q - log_p).square().sum(-1), log_p.square().sum(-1)
        log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
        target = targets[part, None].to(log_p.device)
        nll = [-logs.gather(-1, target)[:, 0] for logs in (log_p, log_q)]
        agrees = log_p.argmax(-1) == log_q.argmax(-1)
        parts.append((*nll, kl_divergence(log_p, log_q), agrees, *squares))
        start, step = part.stop, max(1, min(POSITIONS_PER_SLICE, LOGITS_PER_SLICE // log_p.shape[-1]))
    return Comparison(*map(torch.cat, zip(*parts, strict=True)))


def perplexity(mean_nll: float) -> float:
    """exp that says infinity instead of raising: a broken model has a perplexity too."""
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
        model: ready to evaluate, on its device.
        run: how windows go through it, such as over a quantised cache.
    """

    def __init__(self, model: torch.nn.Module, run: Run = run_without_cache) -> None:
        self.model, self._run = model, run
        self._by_slices = self._head_is_all()

    @torch.inference_mode()
    def next_tokens(self, ids: Tensor) -> LogitsOf:
        """What the model says of the tokens that follow, all but the last one of each window.

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
