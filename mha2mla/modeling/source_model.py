"""A source model over a paged cache: ragged batches by the call that converted models have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mha2mla.modeling.batch import SequenceBatch
from mha2mla.modeling.batch_model import BatchModel
from mha2mla.modeling.decoder import FusedDecoder, run_source_model
from mha2mla.modeling.model import MHA2MLAForCausalLM
from mha2mla.modeling.registry import AttentionConstants, GQAGeometry
from mha2mla.modeling.source_attention import NAME, layer_window
from mha2mla.modeling.tensor_parallel import ranks_of


class PagedSource(BatchModel):
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
        self._decoder: FusedDecoder | None = None
        self.constants = tuple(_constants(layer.self_attn, index) for index, layer in enumerate(layers))

    @property
    def config(self):
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def _prepare_decoder(self) -> None:
        self._decoder = FusedDecoder.prepare_source(self.model)

    def _batch_layers(
        self, rotary_key_cache: str | None = None
    ) -> tuple[str | None, Sequence[AttentionConstants], torch.device]:
        if rotary_key_cache not in (None, "none", "auto"):
            raise ValueError(
                f"rotary_key_cache is {rotary_key_cache!r}; expected None for a source, whose keys are all cached"
            )
        return self._backend_name, self.constants, self.device

    def _batch_logits(self, batch: SequenceBatch, arguments: dict[str, Any], kept: Tensor | None) -> Tensor:
        hidden = run_source_model(self._decoder, arguments["input_ids"], arguments["mla_step"])
        if hidden is not None:
            return self.model.lm_head(hidden[0] if kept is None else hidden[0].index_select(0, kept))
        return self.model(**arguments, logits_to_keep=0 if kept is None else kept).logits[0]


def paged_model(model: PreTrainedModel) -> MHA2MLAForCausalLM | PagedSource:
    """A model with ``paged_cache`` and ``forward_batch``: itself if converted, a source as :class:`PagedSource`."""
    return model if isinstance(model, MHA2MLAForCausalLM) else PagedSource(model)


def _constants(attention: nn.Module, layer_idx: int) -> AttentionConstants:
    """Constants of a layer of transformers' decoders, whose configs and attention modules share these names;
    under tensor parallelism of a rank's heads."""
    config, width = attention.config, attention.head_dim
    ranks = ranks_of(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks or kv_heads % ranks:
        raise ValueError(f"tp_size is {ranks}; expected a divisor of {heads} query and {kv_heads} key-value heads")
    geometry = GQAGeometry(heads // ranks, kv_heads // ranks, width, width)
    return AttentionConstants(geometry, float(attention.scaling), window=layer_window(attention, layer_idx))
