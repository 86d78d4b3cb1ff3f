"""The decoder stack of a served step, by fewer and longer kernels than transformers' modules launch.

Layers of the families below are known: norm, attention, residual, norm, gated MLP, residual. Where all that such a
layer would do is that, its norm takes the residual along, gate and up are one product, and the activation takes both.
Every module keeps its parameters and is asked again at each step: what has a hook, an adapter in its place or another
class is left to the base model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast

from mha2mla.kernels import rms_norm
from mha2mla.modeling.recordable import HOST_ROPE
from mha2mla.modeling.stacking import is_plain, project, project_gated, stacked
from mha2mla.modeling.step import AttentionStep

# model_type -> how transformers names the family's classes; the forward of their model, layer, norm and MLP is Llama's.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_SILU = type(ACT2FN["silu"])
_IGNORED = ("attention_mask", "use_cache")  # options that no layer looks at where backends attend


def run_base_model(
    model: nn.Module,
    *,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    mla_step: AttentionStep | None,
    inputs_embeds: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> BaseModelOutputWithPast:
    """``model(...)`` of a converted model's base model, by fewer kernels where that is the same but for rounding.

    It is where backends attend in all layers, the family is known, nobody differentiates, traces, autocasts or hooks,
    and no ``options`` ask for more than the last hidden state.
    """
    plain = all(value is None or value is False for name, value in options.items() if name not in _IGNORED)
    wanted = any(getattr(model.config, name, False) for name in ("output_hidden_states", "output_attentions"))
    traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if plain and not wanted and mla_step is not None and not traced and _is_known(model):
        if any(plan is None for plan in mla_step.plans):
            tokens = input_ids if inputs_embeds is None else inputs_embeds
            for layer in model.layers:  # with the prompt, so that no weight moves behind a recorded step
                stacked(tokens, (layer.mlp.gate_proj, layer.mlp.up_proj))
        else:
            hidden_states = model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            if _runs_as_it_is(model, hidden_states):
                given = {"position_ids": position_ids, "mla_step": mla_step}
                hidden_states = _run_layers(model, hidden_states, lambda attention, x: attention(x, **given)[0])
                return BaseModelOutputWithPast(hidden_states, past_key_values)
    return model(
        input_ids=input_ids,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        mla_step=mla_step,
        **options,
    )


def run_source_model(model: nn.Module, input_ids: Tensor, step: AttentionStep) -> Tensor | None:
    """The last hidden state [1, N, hidden] of a source over a ragged batch, by fewer kernels: RoPE is done where keys
    are written. None, and nothing done, where that would not be the same but for rounding.

    Args:
        model: causal language model of transformers, whose logits are its head's of that state.
        input_ids: [1, N].
        step: whose layers are served by backends of keys and values.
    """
    causal, model = model, model.get_decoder()
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _is_known(model):
        return None
    family, home = _own_classes(model)
    if not _is_own(causal, f"{family}ForCausalLM", home):
        return None
    rotary, attentions = model.rotary_emb, [layer.self_attn for layer in model.layers]
    # Tables that change with the length are made by the module itself; a factor on them, by whom the step was told.
    if rotary.rope_type in HOST_ROPE or rotary.attention_scaling != step.layers[0].constants.attention_scaling:
        return None
    if not all(_is_own(each, f"{family}Attention", home) for each in attentions):
        return None
    hidden_states = model.embed_tokens(input_ids)
    if not _runs_as_it_is(model, hidden_states):
        return None
    inv_freq = rotary.inv_freq[None].float()
    return _run_layers(model, hidden_states, lambda attention, normed: _attend(attention, normed, inv_freq, step))


def _attend(attention: nn.Module, hidden_states: Tensor, inv_freq: Tensor, step: AttentionStep) -> Tensor:
    """Of a source's layer: [1, N, hidden] to the same."""
    states = project(hidden_states[0], (attention.q_proj, attention.k_proj, attention.v_proj))
    query, key, value = (each.unflatten(-1, (-1, attention.head_dim)) for each in states)
    if hasattr(attention, "q_norm"):  # over each head
        query, key = attention.q_norm(query), attention.k_norm(key)
    tensors = {"query": query, "key": key, "value": value, "inv_freq": inv_freq}
    out = step.run(attention.layer_idx, tensors)[1].flatten(1)
    return project(out[None], (attention.o_proj,))[0]


def _run_layers(model: nn.Module, hidden_states: Tensor, attend: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    """``attend``: what a layer's attention makes of normed states [B, S, hidden]."""
    branch, residual = hidden_states, None
    for layer in model.layers:
        normed, residual = _normed(layer.input_layernorm, branch, residual)
        branch = attend(layer.self_attn, normed)
        normed, residual = _normed(layer.post_attention_layernorm, branch, residual)
        gated = project_gated(normed, layer.mlp.gate_proj, layer.mlp.up_proj)
        (branch,) = project(gated, (layer.mlp.down_proj,))
    return _normed(model.norm, branch, residual)[0]


def _normed(norm: nn.Module, branch: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    return rms_norm(branch, norm.weight, norm.variance_epsilon, residual=residual)


def _runs_as_it_is(model: nn.Module, hidden_states: Tensor) -> bool:
    """Whether no norm would change the dtype, and no autocast the products'."""
    norms = [norm for layer in model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    same = all(norm.weight.dtype == hidden_states.dtype for norm in (model.norm, *norms))
    return same and not torch.is_autocast_enabled(hidden_states.device.type)


def _own_classes(model: nn.Module) -> tuple[str | None, str]:
    """How transformers names the classes of the model's family, and the module that they are in."""
    name = model.config.model_type
    return FAMILIES.get(name), f"transformers.models.{name}.modeling_{name}"


def _is_own(module: nn.Module, name: str, home: str) -> bool:
    """Whether it is of a class of the family, and a call of it nothing but that class's forward."""
    kind = type(module)
    return kind.__name__ == name and kind.__module__ == home and is_plain(module, kind)


def _is_known(model: nn.Module) -> bool:
    """Whether every module between embeddings and logits is one that :func:`_run_layers` knows, and nothing more."""
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
            and is_plain(layer.mlp.act_fn, _SILU)
            for layer in model.layers
        )
    )
