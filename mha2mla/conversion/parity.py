"""Source against converted checkpoint on held-out text, both run layer by layer: what a conversion cost, and where."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AttentionInterface

from mha2mla.conversion.calibration.blocks import SPILL_BYTES, ActivationStore, TokenBlocks
from mha2mla.conversion.families import visible
from mha2mla.conversion.fit.repeatable import REPEATABLE_ATTENTION, UNGROUPED_SDPA, ungrouped_sdpa
from mha2mla.conversion.predictions import (
    QUALITY_METRICS,
    LogitsOf,
    Metric,
    Predictions,
    compare_predictions,
    join_windows,
)
from mha2mla.conversion.source.streaming import BATCH_TOKENS, StreamedModel
from mha2mla.terminal import Span, progress_bar

_BLOCK = 1 << 23  # numbers of one block of scores
_HEAD_BLOCK = 1 << 24  # numbers of one slice of the head
Head = Callable[[], Iterable[torch.Tensor]]  # slices [rows, hidden] of a language-model head
_OBSERVED = "mha2mla-observed"
_OBSERVER = "mha2mla_score_observer"


@dataclass(frozen=True)
class LayerParity:
    """Relative errors (Frobenius norm of the difference over the source's) of one layer on held-out text.

    Attributes:
        score_error: attention scores of the converted layer on the source's inputs. Each query's scores count from
            their mean over the keys it sees, since softmax does not see a constant. None when the model's attention
            is not SDPA.
        output_error: attention output (after ``o_proj``) of the converted layer on the source's inputs: what this
            layer loses by itself.
        stream_output_error: attention output with each model on its own inputs, so after all layers before.
        hidden_error: hidden states after the layer, likewise.
    """

    layer: int
    score_error: float | None
    output_error: float
    stream_output_error: float
    hidden_error: float


@dataclass(frozen=True)
class ParityReport:
    """Differences between two models on the same windows.

    Attributes:
        tokens: predicted tokens, ``windows * (length - 1)``.
        perplexity_source, perplexity_converted: exp of the mean negative log-likelihood.
        kl: mean KL(source ‖ converted) per token, nats.
        top1_agreement: share of tokens where both put the same token first.
        logits_relative_error: Frobenius norm of the difference of all logits, over the source's.
        layers: errors by layer; empty if they were not asked for.
    """

    tokens: int
    perplexity_source: float
    perplexity_converted: float
    kl: float
    top1_agreement: float
    logits_relative_error: float
    layers: tuple[LayerParity, ...]

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity_converted / self.perplexity_source

    def to_dict(self) -> dict[str, Any]:
        values = {**asdict(self), "perplexity_ratio": self.perplexity_ratio}
        return {**values, "layers": [asdict(layer) for layer in self.layers]}


@torch.inference_mode()
def compare(
    source: StreamedModel,
    converted: StreamedModel,
    tokens: torch.Tensor,
    *,
    folder: Path,
    by_layer: bool = True,
    spill_bytes: int = SPILL_BYTES,
    progress: bool | Span = True,
) -> ParityReport:
    """Runs both models over ``tokens`` [windows, length], one layer of each in memory at a time.

    Args:
        folder: where activations go when they exceed ``spill_bytes``; heads that do are read again and again.
        by_layer: measure errors of every layer too; scores of long windows take their time.
    """
    models, layers = (source, converted), []
    with source.stores(TokenBlocks.of(tokens), 2, folder=folder, spill_bytes=spill_bytes) as stores:
        for model, store in zip(models, stores, strict=True):
            model.embed(store)
        for index in progress_bar(range(source.num_layers), desc="verify", unit="layer", show=progress):
            if by_layer:
                layers.append(_compare_layer(source, converted, index, stores))
                continue
            for model, store in zip(models, stores, strict=True):
                model.run_layer(model.layer(index), index, store, tokens=BATCH_TOKENS)
                model.source.release()
        return _compare_logits(source, converted, stores, tokens, tuple(layers), spill_bytes)


class _Error:
    """Accumulates a relative error: both sums of squares in float64."""

    def __init__(self, difference: float = 0.0, norm: float = 0.0) -> None:
        self.difference, self.norm = difference, norm

    def add(self, other: torch.Tensor, reference: torch.Tensor) -> None:
        """Two tensors of one shape; row sums in their own precision, much faster, the rest in float64."""
        other, reference = other.float(), reference.float()
        self.difference += float((other - reference).square().sum(-1).double().sum())
        self.norm += float(reference.square().sum(-1).double().sum())

    def value(self) -> float:
        if not math.isfinite(self.difference) or not self.norm:
            return math.inf if self.difference else 0.0
        return math.sqrt(self.difference / self.norm)


def _compare_layer(
    source: StreamedModel, converted: StreamedModel, index: int, stores: list[ActivationStore]
) -> LayerParity:
    """Errors of layer ``index``; leaves the next layer's inputs in both ``stores``."""
    models, layers = (source, converted), [model.layer(index) for model in (source, converted)]
    scores, output, stream_output, hidden_error = _Error(), _Error(), _Error(), _Error()
    measured = True
    for part in stores[0].blocks.batches(BATCH_TOKENS):
        seen, hidden = [], []
        for model, layer, store in zip(models, layers, stores, strict=True):
            with _attention_of(layer) as observed:
                hidden.append(model.forward_layer(layer, index, store.read(part, model.device)))
            seen.append(observed)
            store.write(part, hidden[-1])
        hidden_error.add(hidden[1], hidden[0])
        stream_output.add(seen[1]["output"], seen[0]["output"])
        # The converted attention once more, on what the source's attention was given.
        with _attention_of(layers[1]) as observed:
            layers[1].self_attn(**{**seen[1]["arguments"], "hidden_states": seen[0]["arguments"]["hidden_states"]})
        output.add(observed["output"], seen[0]["output"])
        measured = measured and "query" in seen[0] and "query" in observed
        if measured:
            _add_score_errors(scores, observed, seen[0], source.sliding_windows[index])
    for model in models:
        model.source.release()
    return LayerParity(
        layer=index,
        score_error=scores.value() if measured else None,
        output_error=output.value(),
        stream_output_error=stream_output.value(),
        hidden_error=hidden_error.value(),
    )


@contextmanager
def _attention_of(layer: nn.Module) -> Iterator[dict[str, Any]]:
    """Fills a dict with the keyword ``arguments`` and the ``output`` of the attention of ``layer`` while it runs, and,
    where attention is SDPA, with its ``query`` and ``key`` [windows, heads, length, width] after RoPE and ``scaling``.
    """
    attention, observed = layer.self_attn, {}

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        observed["arguments"] = {**kwargs, **({"hidden_states": args[0]} if args else {})}
        return args, {**kwargs, _OBSERVER: observed}

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        observed["output"] = output[0] if isinstance(output, tuple) else output

    # StreamedModel fills copies: the config that changes here is this copy's own.
    usual = attention.config._attn_implementation
    handles = [
        attention.register_forward_pre_hook(before, with_kwargs=True),
        attention.register_forward_hook(after, with_kwargs=True),
    ]
    if usual in (UNGROUPED_SDPA, REPEATABLE_ATTENTION):
        attention.config._attn_implementation = _OBSERVED
    try:
        yield observed
    finally:
        attention.config._attn_implementation = usual
        for handle in handles:
            handle.remove()


def _observed_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, *others: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """SDPA that first puts its query, key and scaling into the observer."""
    observed = kwargs.pop(_OBSERVER)
    observed |= {"query": query, "key": key, "scaling": kwargs["scaling"]}
    return ungrouped_sdpa(module, query, key, *others, **kwargs)


AttentionInterface.register(_OBSERVED, _observed_attention)


def _add_score_errors(error: _Error, other: dict[str, Any], reference: dict[str, Any], window: int | None) -> None:
    """Adds the scores of one batch, a block of queries at a time; query and key as in ``_attention_of``."""
    heads, length = reference["query"].shape[1:3]
    position = torch.arange(length, device=reference["query"].device)
    step = max(1, min(length, _BLOCK // (heads * length)))
    for row in range(reference["query"].shape[0]):
        for start in range(0, length, step):
            rows = slice(start, min(start + step, length))
            seen = visible(position[rows], position[: rows.stop], window)
            error.add(*(_scores(side, row, rows, seen) for side in (other, reference)))


def _scores(side: dict[str, Any], window: int, queries: slice, seen: torch.Tensor) -> torch.Tensor:
    """Scaled scores [heads, queries, keys] less each query's mean over the keys it sees; 0 at the others."""
    query, key = side["query"][window, :, queries].float(), side["key"][window, :, : queries.stop].float()
    scores = query @ key.repeat_interleave(query.shape[0] // key.shape[0], 0).mT * side["scaling"]
    scores = scores.masked_fill(~seen, 0)
    return (scores - scores.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)).masked_fill(~seen, 0)


def _compare_logits(
    source: StreamedModel,
    converted: StreamedModel,
    stores: list[ActivationStore],
    tokens: torch.Tensor,
    layers: tuple[LayerParity, ...],
    spill_bytes: int,
) -> ParityReport:
    """Heads that exceed ``spill_bytes`` are read a slice of the vocabulary at a time, again for every slice of
    positions: they stay out of memory."""
    models = (source, converted)
    size = sum(model.vocab_size * model.hidden_size * model.dtype.itemsize for model in models)
    heads = [_head(model, size <= spill_bytes) for model in models]
    for model, store in zip(models, stores, strict=True):
        norm = model.final_norm()
        for window in range(len(tokens)):
            here = slice(window, window + 1)
            store.write(here, norm(store.read(here, model.device)))
    metrics, found = (*QUALITY_METRICS, _LogitsError()), []
    for window, row in enumerate(tokens):
        hidden = [store.read(slice(window, window + 1), source.device)[0, :-1] for store in stores]
        found.append(compare_predictions(*map(_logits_of, heads, hidden), row[1:].to(source.device), metrics))
        for model in models:
            model.source.release()
    measured: dict[str, Any] = {}
    for metric, values in zip(metrics, join_windows(found, len(tokens)), strict=True):
        measured |= metric.reduce(values)
    del measured["kl_stderr"]
    return ParityReport(tokens=tokens[:, 1:].numel(), layers=layers, **measured)


class _LogitsError(Metric):
    """Norm of the logits' difference relative to the source's logits, over all positions."""

    columns: ClassVar = {"logits_relative_error": "logits' error"}

    def measure(self, at: Predictions) -> Mapping[str, torch.Tensor]:
        difference = (at.converted_logits - at.source_logits).square().sum(-1)
        return {"difference": difference, "energy": at.source_logits.square().sum(-1)}

    def reduce(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, float | None]:
        error = _Error(*(float(values[key].sum()) for key in ("difference", "energy")))
        return {"logits_relative_error": error.value()}


def _head(model: StreamedModel, kept: bool) -> Head:
    """The head's slices, in memory or read at every call."""
    rows = max(1, _HEAD_BLOCK // model.hidden_size)
    starts = range(0, model.vocab_size, rows)

    def read() -> Iterator[torch.Tensor]:
        return (model.head_rows(first, min(first + rows, model.vocab_size)) for first in starts)

    if not kept:
        return read
    slices = list(read())
    return lambda: slices


def _logits_of(head: Head, hidden: torch.Tensor) -> LogitsOf:
    """Logits of normed states [positions, hidden], slice by slice."""
    return lambda part: torch.cat([nn.functional.linear(hidden[part], rows).float() for rows in head()], -1)
