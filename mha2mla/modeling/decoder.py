"""The decoder stack of a served step, by fewer and longer kernels than transformers' modules launch.

Layers of families with a ``llama_decoder`` are known: norm, attention, residual, norm, gated MLP, residual. Where a
layer does only that, its norm takes the residual along, gate and up are one product, and the activation takes both.
A :class:`FusedDecoder` is made with a cache, and checked in every step: a module with a hook, or another one in its
place (an adapter), leaves the step to the base model.

Linear layers of one input are one product: :func:`fuse_weights` moves their weights when a cache is made, and every
parameter becomes a view of its rows of one storage, so writing to a parameter writes to the fused weight. A product is
fused while the rows still lie so: a parameter with another storage (``to``, ``load_state_dict(assign=True)``, LoRA) is
noticed by its address, and no state can be stale.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast

from mha2mla.kernels import is_skinny, rms_norm, silu_mul, skinny_linear
from mha2mla.modeling.captured import HOST_ROPE
from mha2mla.modeling.families import FAMILIES
from mha2mla.modeling.step import AttentionStep


def project(x: Tensor, *parts: nn.Module) -> tuple[Tensor, ...]:
    """Outputs of ``parts`` for x [..., in]: of one product where their weights are fused, else one after another.

    The product is fused without gradients, compilation and autocast, for plain ``nn.Linear`` (no hook, no adapter, no
    quantised or sharded weight), all with a bias or none.

    Returns:
        [..., out] of each part, which may be views of one tensor.
    """
    fused = fused_weight(x, parts)
    if fused is None:
        if x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
            for parameter in itertools.chain.from_iterable(part.parameters() for part in parts):
                parameter.is_captured = True  # replays read it where it is
        return tuple([part(x) for part in parts])
    out = skinny_linear(x, *fused) if x.is_cuda and is_skinny(x, fused[0]) else F.linear(x, *fused)
    return (out,) if len(parts) == 1 else out.split_with_sizes([part.out_features for part in parts], -1)


def project_gated(x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
    """silu(gate(x)) * up(x), of few rows by one kernel where the weights are fused."""
    if x.is_cuda and (fused := fused_weight(x, (gate, up))) is not None:
        weight, bias = fused
        if bias is None and gate.out_features == up.out_features and is_skinny(x, weight, gated=True):
            return skinny_linear(x, weight, gated=True)
    return silu_mul(*project(x, gate, up))


def fuse_weights(parts: Sequence[nn.Module]) -> None:
    """Moves the weights of plain ``nn.Linear`` parts, and their biases, into one storage each.

    Parameters that do not own their storage, are shared with other processes or were captured in a CUDA graph stay
    where they are, as all do where a part is not plain.
    """
    if not all(is_plain(part, nn.Linear) for part in parts):
        return
    kinds = [[part.weight for part in parts], [part.bias for part in parts if part.bias is not None]]
    if len(kinds[1]) not in (0, len(parts)):
        return
    for parameters in filter(None, kinds):
        if _adjacent(parameters) is None and _may_move(parameters):
            _move(parameters)


def fused_weight(x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """Weight [sum of out, in] and bias of one product of x over the parts' own memory; None where :func:`project` makes
    several."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return None
    weights, biases = [], []
    for part in parts:
        if type(part) is not nn.Linear or part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return None
        own = part._parameters  # a module's attributes are looked up in three dictionaries
        weights.append(own.get("weight"))
        if own.get("bias") is not None:
            biases.append(own["bias"])
    if len(biases) not in (0, len(parts)):
        return None
    if len(parts) == 1:
        return (weights[0], biases[0] if biases else None) if type(weights[0]) is nn.Parameter else None
    weight = _adjacent(weights)
    bias = _adjacent(biases) if biases else None
    return None if weight is None or (biases and bias is None) else (weight, bias)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """True where a call of ``module`` is nothing but ``kind.forward``."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) is kind and not hooked


def own_map(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of an ``nn.Linear`` with a bias, offloaded or not; None: a call of it computes something else."""
    if type(module) is not nn.Linear:
        return None
    if not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__):
        return module.weight, module.bias
    if hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device  # offloading has imported it

        with align_module_device(module):
            return module.weight, module.bias
    return None


def affine_map(module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [out, in] and bias [out] that a call of ``module`` applies, where :func:`own_map` is None; by a call.

    Args:
        module: an affine map with a bias, of the signature of ``nn.Linear``: an adapter around one, say.
        like: [..., in], of the dtype and device that ``module`` is called with.
    """
    # Large, so that adding a bias of hundreds costs the weights few digits; float16 ends at 65504.
    width, scale = like.shape[-1], 2.0 ** (8 if like.dtype == torch.float16 else 16)
    probe = torch.cat((scale * torch.eye(width, dtype=like.dtype, device=like.device), like.new_zeros(1, width)))
    out = module(probe)
    bias = out[-1]
    return ((out[:-1] - bias) / scale).T.contiguous(), bias


def _adjacent(parameters: Sequence[Tensor]) -> Tensor | None:
    """All rows as one tensor over the parameters' memory; None where they are not one behind the other."""
    first = parameters[0]
    if type(first) is not nn.Parameter:
        return None
    storage, address, rows, dtype = first.untyped_storage().data_ptr(), first.data_ptr(), 0, first.dtype
    for each in parameters:
        # A quantised or sharded tensor is of a class of its own.
        if type(each) is not nn.Parameter or each.data_ptr() != address or each.dtype != dtype:
            return None
        if not each.is_contiguous() or each.untyped_storage().data_ptr() != storage:
            return None
        address, rows = address + each.nbytes, rows + each.shape[0]
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _may_move(parameters: Sequence[Tensor]) -> bool:
    """True where each is all that there is in its storage, and no CUDA graph was captured of its address."""
    first = parameters[0]
    return first.device.type != "meta" and all(
        type(each) is nn.Parameter
        and (each.dtype, each.device, each.shape[1:]) == (first.dtype, first.device, first.shape[1:])
        and not getattr(each, "is_captured", False)
        and each.is_contiguous()
        and each.untyped_storage().nbytes() == each.nbytes
        and not (each.device.type == "cpu" and each.is_shared())
        and not each.is_inference()
        for each in parameters
    )


def _move(parameters: Sequence[Tensor]) -> None:
    # Not inference tensors: training the model afterwards needs more.
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([each.detach() for each in parameters])
        for each, rows in zip(parameters, whole.split([each.shape[0] for each in parameters]), strict=True):
            if whole.is_cuda:  # the old storage may not be handed out again before it has been read
                each.data.record_stream(torch.cuda.current_stream(whole.device))
            each.data = rows
    if whole.is_cuda:  # A product of few rows reads its weight before the kernel before has ended: let it not be cat's.
        whole.new_zeros(1)


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
        self._layers = [
            (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
            for layer in model.layers
        ]
        self._norms = [model.norm, *[norm for before, _, behind, _ in self._layers for norm in (before, behind)]]
        # Siblings of a linear layer and its name, the layer, a parameter's name, the parameter, and its address
        self._fused: list[tuple[dict[str, nn.Module], str, nn.Module, str, Tensor, int]] = []

    @classmethod
    def prepare(cls, model: nn.Module) -> FusedDecoder | None:
        """Fuses weights of the layers' attention and MLP; None for layers that are not known.

        Moves weights, so call it where no CUDA graph is captured.
        """
        groups = [
            (layer.self_attn, names)
            for layer in getattr(model, "layers", ())
            if (names := getattr(layer.self_attn, "input_projections", None)) is not None
        ]
        known = _is_known(model)
        groups += [(layer.mlp, ("gate_proj", "up_proj")) for layer in (model.layers if known else ())]
        for parent, names in groups:
            fuse_weights([getattr(parent, name) for name in names])
        if not known:
            return None
        decoder = cls(model)
        for parent, names in groups:
            for name in names:
                part = parent._modules[name]
                decoder._fused += [
                    (parent._modules, name, part, kind, parameter, parameter.data_ptr())
                    for kind, parameter in part._parameters.items()
                    if type(parameter) is nn.Parameter
                ]
        return decoder

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

    def is_prepared(self) -> bool:
        """True where no module and no fused weight was replaced or moved since :meth:`prepare`."""
        for siblings, name, part, kind, parameter, address in self._fused:
            if siblings.get(name) is not part or part._parameters.get(kind) is not parameter:
                return False
            if parameter.data_ptr() != address:
                return False
        return self._is_unchanged()

    def serves(self, hidden_states: Tensor) -> bool:
        """True where :meth:`run` makes of [B, S, hidden] what the model does, but for rounding: nothing was hooked or
        replaced, no norm would change the dtype, and no autocast the products'."""
        for norm in self._norms:
            if norm.weight.dtype != hidden_states.dtype:
                return False
        return self._is_unchanged() and not torch.is_autocast_enabled(hidden_states.device.type)

    def _is_unchanged(self) -> bool:
        if len(self.model.layers) != self.model.config.num_hidden_layers:
            return False
        for module, kind, children in self._modules:
            if type(module) is not kind or module._modules != children or "forward" in module.__dict__:
                return False
            if module._forward_hooks or module._forward_pre_hooks:
                return False
        return True

    def run(self, hidden_states: Tensor, attend: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """The last hidden state [B, S, hidden] after the final norm.

        Args:
            hidden_states: [B, S, hidden], embedded tokens.
            attend: output [B, S, hidden] of a layer's attention for normed states.
        """
        branch, residual = hidden_states, None
        for before, attention, behind, mlp in self._layers:
            normed, residual = rms_norm(branch, before.weight, before.variance_epsilon, residual=residual)
            branch = attend(attention, normed)
            normed, residual = rms_norm(branch, behind.weight, behind.variance_epsilon, residual=residual)
            gated = project_gated(normed, mlp.gate_proj, mlp.up_proj)
            (branch,) = project(gated, mlp.down_proj)
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

    It is where backends attend in all layers, or none needs a mask, the decoder serves, nothing is differentiated or
    compiled, and no ``options`` ask for more than the last hidden state.
    """
    config, plain = model.config, decoder is not None and mla_step is not None
    plain = plain and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    plain = plain and (None not in mla_step.plans or _needs_no_mask(config, mla_step, options.get("attention_mask")))
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
    if mla_step is not None and None not in mla_step.plans:
        # The base model passes a 4-D mask on as it is: spares building one that no layer looks at.
        device = input_ids.device if inputs_embeds is None else inputs_embeds.device
        options["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    return model(
        input_ids=input_ids,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        mla_step=mla_step,
        **options,
    )


def _needs_no_mask(config: Any, step: AttentionStep, attention_mask: Any) -> bool:
    """True where SDPA attends causally to the new tokens alone, of a family without windows: transformers makes no
    mask then."""
    if attention_mask is not None or config._attn_implementation != "sdpa":
        return False
    return getattr(config, "sliding_window", None) is None and step.layers[0].is_empty


def run_source_model(decoder: FusedDecoder | None, input_ids: Tensor, step: AttentionStep) -> Tensor | None:
    """The last hidden state [1, N, hidden] of a source over a ragged batch, by fewer kernels: RoPE is done where keys
    are written. None, and nothing done, where that would not be the same but for rounding.

    Args:
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
    states = project(hidden_states[0], attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = [each.view(each.shape[0], -1, attention.head_dim) for each in states]
    if hasattr(attention, "q_norm"):  # over each head
        query, key = attention.q_norm(query), attention.k_norm(key)
    tensors = {"query": query, "key": key, "value": value, "inv_freq": inv_freq}
    out = step.run(attention.layer_idx, tensors)[1].flatten(1)
    return project(out[None], attention.o_proj)[0]


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
