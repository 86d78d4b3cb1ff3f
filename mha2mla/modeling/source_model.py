"""A source model over a paged cache: ragged batches by the call that converted models have."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.decoder import run_source_model
from mha2mla.modeling.model import MHA2MLAForCausalLM
from mha2mla.modeling.paged_cache import BatchStep, PagedCache
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants, GQAGeometry, refused
from mha2mla.modeling.source_attention import NAME, layer_window


class PagedSource:
    """A causal language model of transformers, with ``paged_cache`` and ``forward_batch`` of a converted one.

    The model stays what it is, and computes all but attention by its own modules, rotary positions included, or by the
    fewer kernels of ``decoder.py`` where these are the same. Its layers hand queries, keys and values to a backend of
    ``GQAGeometry`` (``gqa_paged``, ``gqa_reference``).

    Args:
        model: loaded with ``attn_implementation="mha2mla"``, in eval mode.
        attention_backend: name of what serves all layers; None: the best one.

    Attributes:
        model: the same.
        constants: per layer, what its attention is told.

    Raises:
        ValueError: another attention implementation; layers that are not the family's ordinary attention.
    """

    def __init__(self, model: PreTrainedModel, attention_backend: str | None = None) -> None:
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"model has attn_implementation {model.config._attn_implementation!r}; expected {NAME!r}, by"
                " from_pretrained or model.set_attn_implementation"
            )
        layers = getattr(model.get_decoder(), "layers", ())
        if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
            raise ValueError(f"model is a {type(model).__name__}; expected one whose layers all have a self_attn")
        self.model, self._backend_name = model, attention_backend
        self.constants = tuple(_constants(layer.self_attn, index) for index, layer in enumerate(layers))

    @property
    def config(self):
        """Of the model."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Of the model's first weight."""
        return self.model.device

    def backends(self, page_size: int = PAGE_SIZE) -> list[AttentionBackend]:
        """What serves each layer, over pages of so many tokens.

        Raises:
            ValueError: there is no backend of that name, or it, or every one, refuses a layer; with the reasons.
        """
        found = []
        for index, constants in enumerate(self.constants):
            where = (constants.geometry, page_size, self.dtype, self.device)
            backend, why = ATTENTION_BACKENDS.find(self._backend_name, *where)
            if backend is None:
                raise ValueError(f"layer {index}: {refused(self._backend_name, constants.geometry)}: {why}")
            if why and self.device.type == "cuda" and not index:
                warnings.warn(f"layers attend in plain torch, slowly ({backend.name}): {why}", stacklevel=3)
            found.append(backend)
        return found

    def paged_cache(self, num_pages: int, page_size: int = PAGE_SIZE) -> PagedCache:
        """A cache for ragged batches of the model, in its dtype and on its device; keys rotated.

        Args:
            num_pages: pages of each layer.
            page_size: tokens per page.

        Raises:
            ValueError: as :meth:`backends`.
        """
        layers = list(zip(self.backends(page_size), self.constants, strict=True))
        return PagedCache(layers, num_pages, page_size, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def forward_batch(self, input_ids: Tensor, step: BatchStep, *, all_logits: bool = False) -> Tensor:
        """One step over sequences that bring different numbers of new tokens; arguments, result and errors as of
        :meth:`MHA2MLAForCausalLM.forward_batch`."""
        batch = step.batch
        if input_ids.shape != (batch.num_tokens,):
            raise ValueError(f"input_ids.shape is {tuple(input_ids.shape)}; expected {(batch.num_tokens,)}, [N]")
        if not batch.num_tokens:
            step.check()
            weight = self.model.get_output_embeddings().weight
            return weight.new_zeros(0 if all_logits else batch.num_sequences, weight.shape[0])
        kept = 0 if all_logits else batch.last_tokens
        hidden = run_source_model(self.model, input_ids[None], step)
        if hidden is not None:
            return self.model.lm_head(hidden[0] if all_logits else hidden[0].index_select(0, kept))
        return self.model(
            input_ids=input_ids[None],
            # Passed on as it is, and no layer looks at it.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
            position_ids=batch.positions[None].long(),
            use_cache=False,
            logits_to_keep=kept,
            mla_step=step,
        ).logits[0]


def paged_model(model: PreTrainedModel) -> MHA2MLAForCausalLM | PagedSource:
    """What has ``paged_cache`` and ``forward_batch``: a converted model itself, a source as :class:`PagedSource`."""
    return model if isinstance(model, MHA2MLAForCausalLM) else PagedSource(model)


def _constants(attention: nn.Module, layer_idx: int) -> AttentionConstants:
    """Of a layer of transformers' decoders, whose configs and attention modules share these names; under tensor
    parallelism of a rank's heads."""
    config, width = attention.config, attention.head_dim
    ranks = getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks or kv_heads % ranks:
        raise ValueError(f"tp_size is {ranks}; expected a divisor of {heads} query and {kv_heads} key-value heads")
    geometry = GQAGeometry(heads // ranks, kv_heads // ranks, width, width)
    return AttentionConstants(geometry, float(attention.scaling), window=layer_window(attention, layer_idx))
