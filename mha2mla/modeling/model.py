"""The converted model: the source's own architecture with MLA in place of its attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mha2mla.modeling.attention import MLAAttention
from mha2mla.modeling.batch import SequenceBatch
from mha2mla.modeling.batch_model import BatchModel
from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.captured import CapturedSteps, StepCapture
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.decoder import FusedDecoder, run_base_model
from mha2mla.modeling.generation import LatentGenerationMixin
from mha2mla.modeling.outputs import load_balancing_loss, refuse_gradients
from mha2mla.modeling.positions import places
from mha2mla.modeling.registry import AttentionConstants
from mha2mla.modeling.served import LayerAttention, what_serves
from mha2mla.modeling.step import AttentionStep
from mha2mla.modeling.tensor_parallel import tensor_parallel_plan
from mha2mla.modeling.valid_length import LengthWatch
from mha2mla.modeling.visibility import check_mask, is_padding_mask, is_recorded
from mha2mla.stored_tensors import check_loaded_files, check_loaded_state


class MHA2MLAPreTrainedModel(PreTrainedModel):
    """What transformers needs to know about converted models."""

    config: MHA2MLAConfig
    config_class = MHA2MLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    # By transformers' name for "also under from_pretrained(dtype=bfloat16)"; casts after loading: MLAAttention._apply.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["inv_freq"]
    # Whether the source's architecture does, its own class says.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers looks for get_interface in the source of the class's module; here it is in attention.py.
        return True

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel,
        state_dict: dict[str, Tensor] | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        *others: Any,
        **keywords: Any,
    ) -> tuple[Any, Any]:
        """What ``from_pretrained`` reads weights with, in any way; before it does, headers show them all there.

        transformers fills what is missing with random numbers, and casts int8 and bool. Quantisers and DeepSpeed's
        stage 3 hold other tensors than the files, and adapters come with names of their own: these are not checked.

        Raises:
            CheckpointError: naming the file or the tensor.
        """
        others_tensors = load_config.hf_quantizer is not None or is_deepspeed_zero3_enabled() or others or keywords
        if not others_tensors and not load_config.ignore_mismatched_sizes:
            if state_dict is not None:
                check_loaded_state(model, state_dict)
            elif checkpoint_files:
                check_loaded_files(model, load_config.pretrained_model_name_or_path, checkpoint_files)
        load = PreTrainedModel._load_pretrained_model
        return load(model, state_dict, checkpoint_files, load_config, *others, **keywords)

    def initialize_weights(self) -> None:
        """Random weights wherever none were loaded."""
        super().initialize_weights()
        # Modules below the base model are left to its own _init_weights, which does not know MLA's bare parameters.
        theta = (self.config.source_config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        for layer in self.model.layers:
            layer.self_attn.init_weights(self.config.initializer_range or 0.02, theta)


def build_base_model(config: MHA2MLAConfig) -> nn.Module:
    """The source's own base model (``LlamaModel``, …) with an :class:`MLAAttention` in every layer.

    Raises:
        ValueError: its layers have no ``self_attn`` to replace.
    """
    source = config.build_source_config()
    source._attn_implementation = config._attn_implementation
    source.base_model_tp_plan = tensor_parallel_plan(source)
    model = MODEL_MAPPING[type(source)](source)
    layers = getattr(model, "layers", None)
    if layers is None or not all(hasattr(layer, "self_attn") for layer in layers):
        raise ValueError(
            f"source_config['model_type'] is {source.model_type!r}; expected a family whose layers have a self_attn"
        )
    for layer_idx, layer in enumerate(layers):
        layer.self_attn = MLAAttention(config, layer_idx, layer.self_attn)
    return model


class MHA2MLAForCausalLM(MHA2MLAPreTrainedModel, LatentGenerationMixin, BatchModel):
    """Causal language model of a converted checkpoint.

    ``model`` is an instance of the source's own base class (``LlamaModel``, …) in which every ``layers[i].self_attn``
    is an :class:`MLAAttention`; names in the state dict differ from the source's below ``self_attn`` only.

    Prefill and long queries run the expanded form; few new tokens over a :class:`LatentCache` run the absorbed form
    where an attention backend serves it (``config.attention_backend``, ``attention_report``). Other caches of
    transformers work too, in the expanded form.

    Raises:
        ValueError: the source's architecture has no ``layers[i].self_attn`` to replace.
    """

    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MHA2MLAConfig) -> None:
        super().__init__(config)
        self.model = build_base_model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._length_watch = LengthWatch(config)
        self.step_capture = StepCapture()
        self._decoder: FusedDecoder | None = None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        mla_captured: CapturedSteps | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Logits of the next token, as every causal language model of transformers.

        A LatentCache keeps no gradients. Over one that holds tokens, in eval mode, the logits say that they require
        a gradient, and a backward pass through them raises ValueError.

        Args:
            input_ids: [B, S].
            attention_mask: [B, cached + S] with 0 on tokens that nobody sees (longer masks are cut), or what the
                source's model takes. The expanded form obeys every mask; the absorbed form all whose visible tokens lie
                side by side in every sequence, see ``visibility.py``.
            position_ids: [B or 1, S]; default: count on from the cache. Over a cache of a model with
                ``config.has_rope_cache`` False they must count on from each row's first visible token, one by one.
            past_key_values: tokens before these; with ``use_cache`` and None a dynamic :class:`LatentCache` is made.
                What this call raises leaves a LatentCache with the tokens that it had.
            inputs_embeds: [B, S, hidden] instead of ``input_ids``.
            labels: [B, S], -100 where there is no loss.
            use_cache: default the config's; while training, False.
            output_attentions: also ``attentions``, per layer [B, H, S, T], which the expanded form with eager attention
                computes; default the config's.
            output_router_logits: of a mixture of experts, also ``router_logits`` and ``aux_loss``, which ``loss`` then
                has in it as the source's has; default the config's.
            logits_to_keep: that many last positions, or their indices; 0 means all.
            mla_captured: steps that ``generate`` replays instead; **kwargs: to the base model and its layers.

        Returns:
            ``logits`` [B, S or logits_to_keep, vocabulary], ``past_key_values``, and ``loss`` if there are ``labels``.

        Raises:
            ValueError: not exactly one of ``input_ids`` and ``inputs_embeds``; ``attention_mask`` has too few sequences
                or tokens; ``position_ids`` that a cache of latents alone cannot serve; what
                ``config.attention_backend`` names refuses the model; ``output_attentions`` without eager attention; or
                a LatentCache that holds tokens is given while training, or to a compiled
                model where gradients are enabled.
            RuntimeError: where the host may not look (one token at a time on a GPU, compiled steps, CUDA graphs), an
                ``attention_mask`` with a hole that first appears there and that the absorbed form would not obey, or
                such ``position_ids``. By an assertion on the device, so that on a GPU it shows at the next
                synchronisation.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids and inputs_embeds: {given} given; expected exactly one of them")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        self._length_watch.see(past_key_values, inputs_embeds if input_ids is None else input_ids)
        if use_cache and past_key_values is None:
            past_key_values = LatentCache(self.config)
        output_attentions = self._flag("output_attentions", output_attentions)
        if output_attentions and self.config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions is True with attn_implementation {self.config._attn_implementation!r}; expected "
                "'eager', which alone computes them"
            )
        output_router_logits = self._flag("output_router_logits", output_router_logits)
        asked = (inputs_embeds, labels, output_attentions or None, output_router_logits or None, *kwargs.values())
        if mla_captured is not None and all(value is None for value in asked):
            logits = mla_captured.logits(self, past_key_values, input_ids, attention_mask, position_ids, logits_to_keep)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        errors = nullcontext()
        if isinstance(past_key_values, LatentCache) and not torch.compiler.is_compiling():
            errors = past_key_values.unchanged_by_errors()
        with errors:
            return self._forward(
                input_ids,
                attention_mask,
                position_ids,
                past_key_values,
                inputs_embeds,
                labels,
                use_cache,
                output_attentions,
                output_router_logits,
                logits_to_keep,
                **kwargs,
            )

    def _flag(self, name: str, value: bool | None) -> bool:
        """``value``, by default what the config says, or the source's."""
        for config in (self.config, self.model.config):
            if value is None:
                value = getattr(config, name, None)
        return bool(value)

    def _forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        inputs_embeds: Tensor | None,
        labels: Tensor | None,
        use_cache: bool,
        output_attentions: bool,
        output_router_logits: bool,
        logits_to_keep: int | Tensor,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """:meth:`forward` with its defaults filled in. Counts the new tokens last, when nothing can fail any more."""
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        batch, query_length = tokens.shape[:2]
        latent = cache if isinstance(cache, LatentCache) else None
        if is_padding_mask(attention_mask) and (cache is None or latent is not None):
            attention_mask = check_mask(attention_mask, batch, query_length, latent)
        if not self.config.has_rope_cache and cache is not None:
            position_ids = places(cache, position_ids, attention_mask, query_length, tokens.device)
        elif latent is not None and position_ids is None:
            position_ids = latent.next_positions(query_length, tokens.device)
        of_new_tokens = _of_new_tokens(attention_mask, cache, query_length) if output_router_logits else None
        no_history = self._refuses_gradients(latent, inputs_embeds)
        with torch.no_grad() if no_history else nullcontext():
            if latent is not None and latent.is_empty and not (torch.is_grad_enabled() or is_recorded(tokens.device)):
                self._prepare_decoder()
            step = None
            if latent is not None:
                latent.serve_by(self.config.attention_backend)
                shape = (batch, query_length)
                step = latent.step(self.model.layers, attention_mask, position_ids, shape, output_attentions)
            attentions: dict[int, Tensor] = {}
            outputs = run_base_model(
                self.model,
                self._decoder,
                input_ids=input_ids,
                attention_mask=self._mask_of_base_model(attention_mask, latent, step, query_length, tokens.device),
                position_ids=position_ids,
                past_key_values=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                mla_step=step,
                **({"mla_attentions": attentions} if output_attentions else {}),
                **({"output_router_logits": True} if output_router_logits else {}),
                **kwargs,
            )
        hidden, hidden_states = outputs.last_hidden_state, outputs.hidden_states
        if no_history:
            hidden = refuse_gradients(hidden)
            hidden_states = hidden_states and tuple([refuse_gradients(each) for each in hidden_states])
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        results = self._with_losses(
            labels,
            of_new_tokens,
            getattr(outputs, "router_logits", None),
            kwargs,
            logits=self.lm_head(hidden[:, kept]),
            past_key_values=outputs.past_key_values,
            hidden_states=hidden_states,
            attentions=tuple(attentions.values()) if output_attentions else None,
        )
        if step is not None:
            latent.advance(query_length)
        return results

    def _with_losses(
        self,
        labels: Tensor | None,
        of_new_tokens: Tensor | None,
        routers: tuple[Tensor, ...] | None,
        arguments: dict[str, Any],
        **results: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """``results`` with the loss of ``labels``, and what comes from ``routers`` where there are some."""
        logits, loss = results["logits"], None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **arguments)
        if routers is None:
            return CausalLMOutputWithPast(loss=loss, **results)
        source = self.model.config
        balance = load_balancing_loss(source, routers, of_new_tokens)
        if loss is not None:
            loss = loss + source.router_aux_loss_coef * balance.to(logits.device)
        return MoeCausalLMOutputWithPast(loss=loss, router_logits=routers, aux_loss=balance, **results)

    def _refuses_gradients(self, cache: LatentCache | None, inputs_embeds: Tensor | None) -> bool:
        """Whether gradients of this call would lack the part of them that goes through cached tokens.

        Raises:
            ValueError: while training, and where a compiled graph could not say so in its backward pass.
        """
        if cache is None or cache.is_empty or not torch.is_grad_enabled():
            return False
        if self.training or torch.compiler.is_compiling():
            raise ValueError(
                "past_key_values is a LatentCache that holds tokens, and it keeps no gradients; expected a "
                f"DynamicCache or None while training{'' if self.training else ', or torch.no_grad() when compiled'}"
            )
        given = inputs_embeds is not None and inputs_embeds.requires_grad
        return given or any(parameter.requires_grad for parameter in self.parameters())

    def _mask_of_base_model(
        self,
        attention_mask: Any,
        cache: LatentCache | None,
        step: AttentionStep | None,
        query_length: int,
        device: torch.device,
    ) -> Any:
        """``attention_mask``, as the base model makes from it what the expanded layers look at."""
        if step is None:
            return attention_mask
        if None not in step.plans:
            # The base model passes a 4-D mask on as it is: spares building one that no layer looks at.
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        if cache.is_compileable and not cache.is_empty and "flash" in self.config._attn_implementation:
            # These kernels are causal from the last key on, and know of no other end of a static cache than the mask's.
            if attention_mask is None:
                attention_mask = torch.ones(cache.batch_size, cache.capacity, dtype=torch.long, device=device)
            token = torch.arange(attention_mask.shape[1], device=attention_mask.device)
            length = cache.get_seq_length().to(attention_mask.device) + query_length
            return attention_mask.masked_fill(token >= length, 0)
        return attention_mask

    def _prepare_decoder(self) -> None:
        self._decoder = FusedDecoder.prepare(self.model)

    def _batch_layers(self) -> tuple[str | None, Sequence[AttentionConstants], torch.device]:
        device, *others = dict.fromkeys(map(self._execution_device, range(len(self.model.layers))))
        if others:
            raise ValueError(f"layers run on {device} and {others[0]}; expected one device, or generate")
        return self.config.attention_backend, self.config.attention_constants(), device

    def _batch_logits(self, batch: SequenceBatch, arguments: dict[str, Any], kept: Tensor | None) -> Tensor:
        self._length_watch.see_batch(batch.lengths[:2].sum(0))
        hidden = run_base_model(self.model, self._decoder, **arguments).last_hidden_state[0]
        return self.lm_head(hidden if kept is None else hidden.index_select(0, kept))

    def _execution_device(self, layer_idx: int = 0) -> torch.device:
        """Where a layer runs; the device of a weight that is offloaded is "meta" until it does."""
        attention = self.model.layers[layer_idx].self_attn
        weight, hook = attention.v_b_proj, getattr(attention, "_hf_hook", None)
        if weight.device.type == "meta" and getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
        return weight.device

    def attention_report(self, query_length: int = 1) -> list[LayerAttention]:
        """What serves every layer, and why: in ``generate`` and, of batches, in ``forward_batch``.

        Args:
            query_length: new tokens per sequence.
        """
        device, dtype = self._execution_device(), self.model.layers[0].self_attn.v_b_proj.dtype
        return list(what_serves(self.config, device, dtype, query_length=query_length))


def _of_new_tokens(attention_mask: Any, cache: Cache | None, query_length: int) -> Tensor | None:
    """[B, S] of a padding mask [B, T]; None of other masks, and where there is none."""
    if not is_padding_mask(attention_mask):
        return None
    cached = 0 if cache is None else cache.get_seq_length()
    return attention_mask[:, torch.arange(query_length, device=attention_mask.device) + cached]
