"""The decoder stack of a served step, by fewer and longer kernels than transformers' modules launch.

Layers of families with a ``llama_decoder`` are known: norm, attention, residual, norm, gated MLP, residual. Where a
layer does only that, its norm takes the residual along, gate and up are one product, and the activation takes both.
A :class:`FusedDecoder` is made with a cache, and checked in every step: a module with a hook, or another one in its
place (an adapter), leaves the step to the base model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast

from mha2mla.families import FAMILIES
from mha2mla.kernels import rms_norm
from mha2mla.modeling.fused_projections import fuse_weights, project, project_gated
from mha2mla.modeling.recorders import HOST_ROPE
from mha2mla.modeling.step import AttentionStep

_SILU = type(ACT2FN["silu"])
_IGNORED = ("attention_mask", "use_cache")  # options that no layer looks at where backends attend


class FusedDecoder:
    """A decoder stack of a known family, with its projections' weights fused.

    Made when a cache is (:meth:`prepare`), which is when modules are looked into; a step only checks that these are
    still in their places, and free of hooks.

    Args:
        model: base model of a known family, converted or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        inner = [model, model.layers, model.norm]
        for layer in model.layers:
            inner += [layer, layer.input_layernorm, layer.post_attention_layernorm, layer.mlp, layer.mlp.act_fn]
        self._modules = [(module, type(module), dict(module._modules)) for module in inner]
        norms = [norm for layer in model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self._norms = [model.norm, *norms]

    @classmethod
    def prepare(cls, model: nn.Module) -> FusedDecoder | None:
        """Fuses weights of the layers' attention and MLP; None for layers that are not known.

        Moves weights, so call it where no CUDA graph is captured.
        """
        for layer in getattr(model, "layers", ()):
            if (names := getattr(layer.self_attn, "input_projections", None)) is not None:
                fuse_weights([getattr(layer.self_attn, name) for name in names])
        if not _is_known(model):
            return None
        for layer in model.layers:
            fuse_weights((layer.mlp.gate_proj, layer.mlp.up_proj))
        return cls(model)

    @classmethod
    def prepare_source(cls, causal: nn.Module) -> FusedDecoder | None:
        """The same of a source, whose attention modules are replaced too; None for classes that are not known.

        Args:
            causal: causal language model of transformers, whose logits are its head's of the last hidden state.
        """
        decoder = cls.prepare(causal.get_decoder())
        if decoder is None:
            return None
        family, home = _own_classes(decoder.model)
        attentions = [layer.self_attn for layer in decoder.model.layers]
        if not _is_own(causal, f"{family}ForCausalLM", home):
            return None
        if not all(_is_own(each, f"{family}Attention", home) for each in attentions):
            return None
        for each in attentions:
            fuse_weights((each.q_proj, each.k_proj, each.v_proj))
        decoder._modules += [(module, type(module), dict(module._modules)) for module in (causal, *attentions)]
        return decoder

    def serves(self, hidden_states: Tensor) -> bool:
        """True where :meth:`run` makes of [B, S, hidden] what the model does, but for rounding: nothing was hooked or
        replaced, no norm would change the dtype, and no autocast the products'."""
        if len(self.model.layers) != self.model.config.num_hidden_layers:
            return False
        for module, kind, children in self._modules:
            if type(module) is not kind or module._modules != children or "forward" in module.__dict__:
                return False
            if module._forward_hooks or module._forward_pre_hooks:
                return False
        for norm in self._norms:
            if norm.weight.dtype != hidden_states.dtype:
                return False
        return not torch.is_autocast_enabled(hidden_states.device.type)

    def run(self, hidden_states: Tensor, attend: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """The last hidden state [B, S, hidden] after the final norm.

        Args:
            hidden_states: [B, S, hidden], embedded tokens.
            attend: output [B, S, hidden] of a layer's attention for normed states.
        """
        branch, residual = hidden_states, None
        for layer in self.model.layers:
            norm = layer.input_layernorm
            normed, residual = rms_norm(branch, norm.weight, norm.variance_epsilon, residual=residual)
            branch = attend(layer.self_attn, normed)
            norm = layer.post_attention_layernorm
            normed, residual = rms_norm(branch, norm.weight, norm.variance_epsilon, residual=residual)
            gated = project_gated(normed, layer.mlp.gate_proj, layer.mlp.up_proj)
            (branch,) = project(gated, (layer.mlp.down_proj,))
        norm = self.model.norm
        return rms_norm(branch, norm.weight, norm.variance_epsilon, residual=residual)[0]


def run_base_model(
    model: nn.Module,
    decoder: FusedDecoder | None,
    *,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    mla_step: AttentionStep | None,
    inputs_embeds: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> BaseModelOutputWithPast:
    """``model(...)`` of a converted model's base model, by ``decoder`` where that is the same but for rounding.

    It is where backends attend in all layers, the decoder serves, nothing is differentiated or compiled, and no
    ``options`` ask for more than the last hidden state.
    """
    config, plain = model.config, decoder is not None and mla_step is not None and None not in mla_step.plans
    plain = plain and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    plain = plain and not (
        getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False)
    )
    for name, value in options.items():
        plain = plain and (name in _IGNORED or value is None or value is False)
    if plain:
        hidden_states = model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if decoder.serves(hidden_states):
            given = {"position_ids": position_ids, "mla_step": mla_step}
            hidden_states = decoder.run(hidden_states, lambda attention, x: attention(x, **given)[0])
            return BaseModelOutputWithPast(hidden_states, past_key_values)
    return model(
        input_ids=input_ids,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        mla_step=mla_step,
        **options,
    )


def run_source_model(decoder: FusedDecoder | None, input_ids: Tensor, step: AttentionStep) -> Tensor | None:
    """The last hidden state [1, N, hidden] of a source over a ragged batch, by fewer kernels: RoPE is done where keys
    are written. None, and nothing done, where that would not be the same but for rounding.

    Args:
        decoder: of :meth:`FusedDecoder.prepare_source`.
        input_ids: [1, N].
        step: whose layers are served by backends of keys and values.
    """
    if decoder is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    rotary = decoder.model.rotary_emb
    # Tables that change with the length are made by the module itself; a factor on them, by whom the step was told.
    if rotary.rope_type in HOST_ROPE or rotary.attention_scaling != step.layers[0].constants.attention_scaling:
        return None
    hidden_states = decoder.model.embed_tokens(input_ids)
    if not decoder.serves(hidden_states):
        return None
    inv_freq = rotary.inv_freq[None].float()
    return decoder.run(hidden_states, lambda attention, normed: _attend(attention, normed, inv_freq, step))


def _attend(attention: nn.Module, hidden_states: Tensor, inv_freq: Tensor, step: AttentionStep) -> Tensor:
    """Attention of a source's layer: [1, N, hidden] to the same."""
    states = project(hidden_states[0], (attention.q_proj, attention.k_proj, attention.v_proj))
    query, key, value = (each.unflatten(-1, (-1, attention.head_dim)) for each in states)
    if hasattr(attention, "q_norm"):  # over each head
        query, key = attention.q_norm(query), attention.k_norm(key)
    tensors = {"query": query, "key": key, "value": value, "inv_freq": inv_freq}
    out = step.run(attention.layer_idx, tensors)[1].flatten(1)
    return project(out[None], (attention.o_proj,))[0]


def _own_classes(model: nn.Module) -> tuple[str | None, str]:
    """Prefix of transformers' classes of the model's family, and their module."""
    name = model.config.model_type
    family = FAMILIES.get(name)
    return family and family.llama_decoder, f"transformers.models.{name}.modeling_{name}"


def _is_own(module: nn.Module, name: str, home: str) -> bool:
    """True for a module of a class of the family."""
    return type(module).__name__ == name and type(module).__module__ == home


def _is_known(model: nn.Module) -> bool:
    """True where every module between embeddings and logits is one that :meth:`FusedDecoder.run` knows."""
    family, home = _own_classes(model)
    if family is None or len(model.layers) != model.config.num_hidden_layers:
        return False
    return (
        _is_own(model, f"{family}Model", home)
        and _is_own(model.norm, f"{family}RMSNorm", home)
        and all(
            _is_own(layer, f"{family}DecoderLayer", home)
            and _is_own(layer.input_layernorm, f"{family}RMSNorm", home)
            and _is_own(layer.post_attention_layernorm, f"{family}RMSNorm", home)
            and _is_own(layer.mlp, f"{family}MLP", home)
            and type(layer.mlp.act_fn) is _SILU
            for layer in model.layers
        )
    )
