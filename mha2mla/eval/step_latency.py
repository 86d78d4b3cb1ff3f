"""Time of a whole decode step: a token in, logits out, over a filled cache of fixed size."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha2mla.eval.measurement import measured
from mha2mla.kernel_testing.judgement import ERROR_FACTOR, Judgement, verdict

# The absorbed and the expanded form are equal in exact arithmetic and round differently: how differently depends on the
# conditioning of the latent's basis. Between the two forms, an error this many times larger is still rounding.
ACROSS_FORMS_FACTOR = 8.0


@torch.inference_mode()
def decode_step_latency(
    models: Mapping[str, torch.nn.Module],
    *,
    batch_sizes: Sequence[int] = (1,),
    seqlens: Sequence[int] = (512,),
    min_run_time: float = 0.5,
    prefill_chunk: int = 1024,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One whole decode step of each model: a token in, logits out, ``seqlen`` tokens cached with the new one.

    Each model fills a cache of fixed size with the same random tokens, then makes the same step again and again, the
    cache being put back by one token after each. First the step's logits are checked against the same model in float64
    without a cache (norms and angles in float32, as transformers has them). The yardstick is its cacheless logits at
    its own dtype; for a converted model, whose step is another form of the same sum, those with a wider factor, and the
    same step with the decode op's torch reference.

    Args:
        models: name → causal language model, all on one device; for instance ``{"source": …, "converted": …}``.
        batch_sizes, seqlens: every pair of them is measured.
        min_run_time: seconds of measurement per row.
        prefill_chunk: tokens per sequence that are prefilled at a time.
        seed: of the tokens.

    Returns:
        Rows with the keys of :data:`COLUMNS`, and ``ms_per_token`` (median; a step yields ``batch`` tokens at once).
        The float64 check makes a copy of a model's weights at eight bytes each.
    """
    rows = []
    longest, largest = max(seqlens), max(batch_sizes)
    # The first and the last sequence of every batch are checked.
    checked = sorted({0} | {batch - 1 for batch in batch_sizes})
    for name, model in models.items():
        device, dtype = model.device, model.dtype
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.config.vocab_size, (largest, longest), generator=generator).to(device)
        positions = torch.tensor([seqlen - 1 for seqlen in seqlens], device=device)
        # Attention is causal: the logits after a prefix do not depend on what follows, so one pass serves all lengths.
        yardstick = _logits_without_cache(model, ids[checked], positions)
        exact = _logits_without_cache(copy.deepcopy(model).double(), ids[checked], positions)
        for batch in batch_sizes:
            for column, seqlen in enumerate(seqlens):
                row = {
                    "op": "decode step",
                    "implementation": name,
                    "batch": batch,
                    "seqlen": seqlen,
                    "dtype": str(dtype).removeprefix("torch."),
                    "device": device.type,
                }
                step = _DecodeStep.prefilled(model, ids[:batch, :seqlen], prefill_chunk)
                row["cache_bytes"] = batch * seqlen * step.bytes_per_token
                here = [index for index, sequence in enumerate(checked) if sequence in (0, batch - 1)]
                check = _check_step(step, sorted({0, batch - 1}), yardstick[here, column], exact[here, column])
                row |= measured(step, check, row["cache_bytes"], device, min_run_time)
                if "us_p50" in row:
                    row["ms_per_token"] = row["us_p50"] / 1e3
                rows.append(row)
    return rows


def cache_bytes_per_token(model: torch.nn.Module, itemsize: int) -> int:
    """Bytes that all layers of a model cache per token, for elements of ``itemsize`` bytes; source or converted."""
    config = model.config
    if hasattr(config, "cache_bytes_per_token"):
        return config.cache_bytes_per_token(itemsize)
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize


def _logits_without_cache(model: torch.nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """[sequences, positions, vocabulary] logits of whole texts, one text at a time."""
    return torch.cat([model(input_ids=text[None], use_cache=False, logits_to_keep=positions).logits for text in ids])


@dataclass(frozen=True)
class _DecodeStep:
    """A model, its filled cache and the next token: calling it makes the step, and leaves the cache as it was."""

    model: torch.nn.Module
    cache: Any
    token: Tensor
    position: Tensor

    @classmethod
    def prefilled(cls, model: torch.nn.Module, ids: Tensor, chunk: int) -> _DecodeStep:
        """All but the last of ``ids [B, T]`` go into the cache; the last is the step's token."""
        batch, seqlen = ids.shape
        cache = _fixed_cache(model, seqlen)
        for start in range(0, seqlen - 1, chunk):
            part = slice(start, min(start + chunk, seqlen - 1))
            positions = torch.arange(part.start, part.stop, device=ids.device).expand(batch, -1)
            model(
                input_ids=ids[:, part], past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1
            )
        position = torch.full((batch, 1), seqlen - 1, device=ids.device)
        return cls(model, cache, ids[:, -1:].clone(), position)

    @property
    def bytes_per_token(self) -> int:
        """What the cache holds of a token, all layers: latents of eight bits, for instance, and their scales."""
        if self.model.config.model_type != "mha2mla":
            return cache_bytes_per_token(self.model, self.model.dtype.itemsize)
        pages = (tensor for layer in self.cache.layers for tensor in layer.tensors.values())
        return sum(tensor[0, 0].nbytes for tensor in pages)

    def __call__(self) -> Tensor:
        logits = self.model(
            input_ids=self.token, past_key_values=self.cache, position_ids=self.position, use_cache=True
        ).logits[:, 0]
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(1)
        return logits


def _check_step(step: _DecodeStep, sequences: list[int], yardstick: Tensor, exact: Tensor) -> Judgement:
    """The logits ``[sequences, vocabulary]`` of a step, for some of its sequences."""
    out = step()[sequences]
    config = step.model.config
    other_form = _judge_logits(out, yardstick, exact)
    if config.model_type != "mha2mla":
        return other_form
    across_forms = _judge_logits(out, yardstick, exact, ACROSS_FORMS_FACTOR)
    if not across_forms.ok:
        return across_forms
    backend = config.attention_backend
    codes = "latent_scale" in step.cache.layers[0].tensors  # another backend must read what this one cached
    config.attention_backend = "mla_fp8_reference" if codes else "mla_reference"
    try:
        same_form = _judge_logits(out, step()[sequences], exact)
    finally:
        config.attention_backend = backend
    # The reference keeps its softmax weights in float32, a kernel in the model's dtype like torch's own attention: in
    # 16 bits the expanded form is the fairer yardstick, in 32 bits the reference.
    return max(same_form, other_form, key=lambda check: check.torch_error)


def _judge_logits(out: Tensor, yardstick: Tensor, exact: Tensor, factor: float = ERROR_FACTOR) -> Judgement:
    return verdict(out, None, exact, None, yardstick, factor=factor)


def _fixed_cache(model: torch.nn.Module, length: int) -> Any:
    """The cache of fixed size that ``generate(cache_implementation="static")`` gives a model."""
    if model.config.model_type == "mha2mla":
        from mha2mla.modeling import LatentCache

        return LatentCache(model.config, max_cache_len=length)
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)
