"""Running a causal language model layer by layer, one layer's weights in memory at a time, source or converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mha2mla.conversion.calibration.blocks import ActivationStore, TokenBlocks, device_for_activations
from mha2mla.conversion.families import visible
from mha2mla.conversion.fit.repeatable import UNGROUPED_SDPA
from mha2mla.conversion.source.files import CheckpointReader
from mha2mla.modeling.stored_tensors import StoredParameters

_EMBEDDED_TOKENS = 8192  # at a time

BATCH_TOKENS = 2048  # that a layer sees at a time, where launches cost less than the work


class StreamedModel:
    """The modules of a Llama-shaped causal language model, filled from a checkpoint when they are needed.

    The model class is transformers' own (or this package's), built without memory on the meta device, so that what
    runs is what ``from_pretrained`` would run.

    Args:
        config: of a registered model with ``model.embed_tokens``, ``model.layers``, ``model.norm``,
            ``model.rotary_emb`` and ``lm_head``.
        sliding_windows: per layer, visible tokens or None.
        device, dtype: of the computation; rotary tables stay float32.
        attn_implementation: name in transformers' registry of attention functions.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        source: CheckpointReader,
        sliding_windows: tuple[int | None, ...],
        *,
        device: torch.device,
        dtype: torch.dtype,
        attn_implementation: str = UNGROUPED_SDPA,
    ) -> None:
        self.config, self.source, self.sliding_windows = config, source, sliding_windows
        self.device, self.dtype = device, dtype
        with torch.device("meta"):
            self.skeleton = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()
        self.stored = StoredParameters(self.skeleton, source.names())
        base = self.skeleton.model
        self.num_layers, self.hidden_size = len(base.layers), base.embed_tokens.embedding_dim
        self.vocab_size = base.embed_tokens.num_embeddings
        # Its tables are computed from the config, never stored; on the meta device they would be lost.
        rotary_config = getattr(base.rotary_emb, "config", config)
        self._rotary = type(base.rotary_emb)(rotary_config).to(device)

    def expected_names(self) -> frozenset[str]:
        """Names of the stored tensors, without the ones tied to another."""
        return frozenset(self.stored.shapes)

    @contextmanager
    def stores(
        self, blocks: TokenBlocks, count: int, *, folder: Path, spill_bytes: int
    ) -> Iterator[list[ActivationStore]]:
        """Room for ``count`` hidden states per token of ``blocks``, until the context ends: on the model's device where
        all of them fit there, or in ``folder`` where one exceeds ``spill_bytes``."""
        size = blocks.tokens.numel() * self.hidden_size * self.dtype.itemsize
        device = device_for_activations(self.device, count * size)
        keys = {"dtype": self.dtype, "folder": folder, "spill_bytes": spill_bytes, "device": device}
        stores = [ActivationStore(blocks, self.hidden_size, **keys) for _ in range(count)]
        try:
            yield stores
        finally:
            for store in stores:
                store.close()

    @torch.inference_mode()
    def embed(self, store: ActivationStore) -> None:
        table = self.source.tensor("model.embed_tokens.weight")
        scale = torch.tensor(getattr(self.skeleton.model.embed_tokens, "scalar_embed_scale", 1.0))  # Gemma's
        for part in store.blocks.batches(_EMBEDDED_TOKENS):
            store.write(part, table[store.blocks.tokens[part]].to(self.dtype) * scale.to(self.dtype))

    def layer(self, index: int) -> nn.Module:
        """Layer ``index`` with its weights. The source keeps those of its attention until it is released."""
        self.source.keep(f"model.layers.{index}.self_attn.")
        return self._fill(self.skeleton.model.layers[index], f"model.layers.{index}.")

    @torch.inference_mode()
    def run_layer(
        self,
        layer: nn.Module,
        index: int,
        store: ActivationStore,
        *,
        tokens: int,
        observe: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Replaces the activations in ``store`` by the output of ``layer``.

        Args:
            tokens: at a time, at most, but for a whole block.
            observe: called with the normed input of the attention, [windows, length, hidden], of every batch.
        """
        with nullcontext() if observe is None else inputs_observed(layer, observe):
            for part in store.blocks.batches(tokens):
                store.write(part, self.forward_layer(layer, index, store.read(part, self.device)))

    def forward_layer(self, layer: nn.Module, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Output of ``layer``, number ``index``, for windows of hidden states [windows, length, hidden]."""
        return first_output(layer(hidden, **self.layer_arguments(index, hidden)))

    def layer_arguments(self, index: int, hidden: torch.Tensor) -> dict[str, Any]:
        """Arguments of layer ``index``, and of its attention, beside ``hidden`` states of windows
        [windows, length, hidden] that start at position 0."""
        length, window = hidden.shape[1], self.sliding_windows[index]
        position = torch.arange(length, device=self.device)
        causal = window is None or window >= length  # by SDPA's own causal path
        kind = [self._rotary.config.layer_types[index]] if isinstance(self._rotary.rope_type, dict) else []
        return {
            "attention_mask": None if causal else visible(position, position, window)[None, None],
            "position_ids": position[None],
            "position_embeddings": self._rotary(hidden, position[None], *kind),
            "past_key_values": None,
            "use_cache": False,
        }

    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the head."""
        return self._fill(self.skeleton.model.norm, "model.norm.")

    def head_rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop`` of the language-model head, [stop − start, hidden]: a logit is a normed state times one.

        The head is the largest tensor of many models; slices of the vocabulary keep it out of memory.
        """
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        return self.source.rows(name, start, stop).to(self.device, self.dtype)

    def to_logits(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Final norm and whole head, kept in memory by the function: last hidden states → logits in float32."""
        norm, head = self.final_norm(), self.head_rows(0, self.vocab_size)
        return lambda hidden: (norm(hidden) @ head.T).float()

    def _tensor(self, name: str) -> torch.Tensor:
        # A bfloat16 frequency is off by whole turns.
        dtype = torch.float32 if name.endswith("inv_freq") else self.dtype
        return self.source.tensor(name).to(self.device, dtype)

    def _fill(self, module: nn.Module, prefix: str) -> nn.Module:
        # The meta module stays empty: a filled copy leaves memory when its user lets go of it.
        filled = deepcopy(module)
        state = {name: self.stored.assemble(prefix + name, self._tensor) for name in module.state_dict()}
        filled.load_state_dict(state, assign=True, strict=True)
        for name, tensor in [*filled.named_parameters(), *filled.named_buffers()]:
            if tensor.is_meta:
                raise ValueError(f"{prefix}{name} is not stored in the checkpoint")
        return filled.eval().requires_grad_(False)


@contextmanager
def inputs_observed(layer: nn.Module, receive: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """While open, ``receive`` is given what the attention of ``layer`` is given, before it runs."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        receive(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handle = layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def first_output(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Hidden states of a module that may return more."""
    return output[0] if isinstance(output, tuple) else output
