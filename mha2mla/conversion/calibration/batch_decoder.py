"""One step of a source model for many rows at once, as fast as sampling calibration text wants it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mha2mla.modeling import MHA2MLAForCausalLM, SequenceBatch, paged_model
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.captured import CudaGraphs, Recorder
from mha2mla.modeling.config import cache_bytes_per_token
from mha2mla.modeling.source_attention import NAME

_GROUPED = "mha2mla_grouped_sdpa"
_STAGES = 8  # graphs of a run: each sees as much of the cache as is filled by its end
_ALIGNMENT = 64  # keys; what fused attention wants of a mask's rows, and to spare
_MUCH = 1 << 18  # tokens from which on pages serve: their kernels take half a minute to compile, once
_CPU_ROWS = 64
_CUDA_ROWS = 2048
_MEMORY_SHARE = 0.25  # share of an accelerator's memory for the keys, the values and the predictions of all rows

NextLogits = Callable[[torch.Tensor], torch.Tensor]


def rows_at_once(model: nn.Module, length: int) -> int:
    """Number of rows of ``length`` tokens that ``model`` decodes side by side; the same on every machine of a kind."""
    if model.device.type != "cuda":
        return _CPU_ROWS
    config = model.config.get_text_config(decoder=True)
    cached = length * cache_bytes_per_token(config, model.dtype.itemsize)
    predictions = config.vocab_size * (model.dtype.itemsize + 3 * 4)  # logits, and float32 around the softmax
    room = _MEMORY_SHARE * torch.cuda.get_device_properties(model.device).total_memory
    return max(1, min(_CUDA_ROWS, int(room / (cached + predictions))))


def decoder(model: nn.Module, rows: int, length: int, recorder: Recorder | None = None) -> NextLogits:
    """The next tokens of all rows, [rows] -> their logits [rows, vocabulary]; remembers what it was given.

    On CUDA a step is the replay of a graph: from ``_MUCH`` tokens on over pages, by the package's kernels, where these
    serve the model; else by transformers over a static cache, where the two can be captured: one graph for every eighth
    of ``length``, so that a step reads what is filled of the cache and not all of it. A tensor that was returned is
    overwritten by the next call.

    Args:
        model: causal language model of transformers, converted or not.
        rows: how many tokens a call takes.
        length: how many calls there will be at most.

    Warns:
        UserWarning: a graph that could not be made, and why; the next way decodes.
    """
    recorder = recorder or CudaGraphs()
    if model.device.type == recorder.device_type:
        is_much = rows * length >= _MUCH
        for kind in (_PagedDecoder, _CapturedDecoder) if is_much else (_CapturedDecoder,):
            try:
                return kind(model, rows, length, recorder)
            except (RuntimeError, ValueError) as error:
                reason = str(error).strip().partition("\n")[0]
                told = f"{kind.manner} was not captured, and text is written more slowly: {reason}"
                warnings.warn(told, stacklevel=2)
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
    cache = DynamicCache(config=model.config)
    return lambda tokens: model(tokens[:, None], past_key_values=cache, use_cache=True).logits[:, -1]


class _PagedDecoder:
    """A graph of one step over pages, all rows of one length.

    Attributes:
        counts: positions, slots and lengths [rows] on the device, which a replay increments.
    """

    manner = "a decode step over pages"

    def __init__(self, model: nn.Module, rows: int, length: int, recorder: Recorder) -> None:
        usual, pages = model.config._attn_implementation, -(-length // PAGE_SIZE)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)
        try:
            if not isinstance(model, MHA2MLAForCausalLM):
                model.set_attn_implementation(NAME)
            paged = paged_model(model)
            with warnings.catch_warnings():  # a layer that plain torch serves is refused here
                warnings.simplefilter("ignore")
                cache = paged.paged_cache(rows * pages, PAGE_SIZE)
            if why := recorder.explain(cache):
                raise ValueError(why)
            owned = [range(row * pages, (row + 1) * pages) for row in range(rows)]
            batch = SequenceBatch.build([1] * rows, [0] * rows, owned, PAGE_SIZE, device=model.device)
            self.counts = counts = (batch.positions, batch.slots, batch.cache_seqlens)
            first, step, tokens = [each.clone() for each in counts], cache.step(batch), self.tokens

            def run() -> torch.Tensor:  # knows nothing of self: pages in a cycle outlive the next decoder's allocation
                step.refresh()
                logits = paged.forward_batch(tokens, step)
                for each in counts:  # a row's pages lie side by side, and so do its slots
                    each += 1
                return logits

            def reset() -> None:
                for each, value in zip(counts, first, strict=True):
                    each.copy_(value)

            self.run = run  # holds what a replay reads: a graph does not
            self.logits, self.replay = recorder.record(run, reset, model.device)
            reset()
        finally:
            model.set_attn_implementation(usual)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        self.replay()
        return self.logits


class _FilledLayer(StaticLayer):
    """Keys and values of one layer, of which attention is shown the first ``visible`` tokens."""

    visible: int

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys[:, :, : self.visible], values[:, :, : self.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible, 0


def filled_cache(model: nn.Module, length: int) -> StaticCache:
    """A static cache, sliding layers as long as the others.

    transformers' sliding layers count their tokens on the host to know when to shift: a graph that was captured with
    few of them would write behind the end. The mask hides what has left the window.
    """
    cache = StaticCache(config=model.config, max_cache_len=length)
    cache.layers = [
        _FilledLayer(max_cache_len=length) if isinstance(layer, StaticLayer) else layer for layer in cache.layers
    ]
    return cache


class _CapturedDecoder:
    manner = "a decode step over a static cache"

    def __init__(self, model: nn.Module, rows: int, length: int, recorder: Recorder) -> None:
        self.cache = filled_cache(model, length)
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
        self.stage = -(-length // (_STAGES * _ALIGNMENT)) * _ALIGNMENT
        self.calls = 0
        usual = model.config._attn_implementation
        ends = [min(length, start + self.stage) for start in range(0, length, self.stage)]
        try:
            if usual == "sdpa":
                model.set_attn_implementation(_GROUPED)
            self.stages = [self._capture(model, end, recorder) for end in ends]
        finally:
            model.set_attn_implementation(usual)
        self.cache.reset()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        logits, replay = self.stages[self.calls // self.stage]
        self.calls += 1
        self.tokens.copy_(tokens[:, None])
        replay()
        return logits

    def _capture(self, model: nn.Module, visible: int, recorder: Recorder) -> tuple[torch.Tensor, Callable[[], None]]:
        for layer in self.cache.layers:
            if isinstance(layer, _FilledLayer):
                layer.visible = visible

        def step() -> torch.Tensor:
            return model(self.tokens, past_key_values=self.cache, use_cache=True).logits[:, -1]

        return recorder.record(step, self.cache.reset, model.device)


def _grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA, where one token's heads of a group are the queries of one kv head: nothing is repeated."""
    rows, heads, tokens, _ = query.shape
    kv_heads = key.shape[1]
    if tokens != 1 or heads == kv_heads or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, kv_heads, heads // kv_heads, -1),
        key,
        value,
        attn_mask=attention_mask,
        scale=kwargs.get("scaling"),
    )
    return output.reshape(rows, 1, heads, -1), None


AttentionInterface.register(_GROUPED, _grouped_attention)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)
