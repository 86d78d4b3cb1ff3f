"""The models: those of ``modeling_mha2mla.py`` with latent caches, kernels and, in ``generate``, captured steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mha2mla.modeling import modeling_mha2mla
from mha2mla.modeling.attention import MLAAttention, refuse_gradients
from mha2mla.modeling.batch import SequenceBatch
from mha2mla.modeling.cache import LatentCache, check_mask
from mha2mla.modeling.captured import DecodeGraphs, GraphStore, explain_capture
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.decoder import FusedDecoder, run_base_model
from mha2mla.modeling.modeling_mha2mla import is_padding_mask, is_recorded
from mha2mla.modeling.paged_cache import BatchModel
from mha2mla.modeling.registry import AttentionConstants
from mha2mla.modeling.served import AttentionReport, what_serves
from mha2mla.modeling.step import AttentionStep
from mha2mla.modeling.stored_tensors import check_loaded_files, check_loaded_state
from mha2mla.modeling.tensor_parallel import tensor_parallel_plan

# Fields of a model's config that ``generate`` takes as arguments.
_CACHE_OPTIONS = ("attention_window", "num_sink_tokens", "rotary_key_cache")


class LatentGenerationMixin(GenerationMixin):
    """``generate`` over a :class:`LatentCache`, for a model whose base model is the source's.

    On CUDA decode steps of one to eight tokens over a growing cache are captured in CUDA graphs and replayed; in greedy
    search and sampling a step is launched before the host knows whether its token was the last. The tokens are the
    same. ``generate(..., capture=False)``, or ``capture`` in a generation config, turns that off. Pages and graphs of
    the last call are kept for the next one of as many sequences, unless they take more memory than the model does,
    until :meth:`release_captured`.

    ``generate(..., attention_window=1020, num_sink_tokens=4, rotary_key_cache="bfloat16")``, or a generation config
    that has them, stand for what the config says by these names, for the cache of one call.
    """

    graph_store: GraphStore

    def release_captured(self) -> None:
        """Gives back the memory that ``generate`` keeps for its next call: cache pages and CUDA graphs."""
        self.graph_store.release()

    def explain_uncaptured(self) -> str | None:
        """Why ``generate`` would run its decode steps uncaptured, or None; layers that no kernel serves stay so too."""
        return explain_capture(self, self.graph_store.new_recorder.device_type) or self.graph_store.failure

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' continuous batching, and so its ``generate_batch``, over expanded keys and values.

        Raises:
            ValueError: a layer's expanded keys are not shaped as the source's, for which transformers makes its pages.
        """
        expected = (self.config.num_key_value_heads, self.config.head_dim)
        for index, layer in enumerate(self.model.layers):
            geometry = layer.self_attn.geometry
            shape = (layer.self_attn.num_expanded_heads, geometry.qk_nope_head_dim + geometry.qk_rope_head_dim)
            if shape != expected:
                raise ValueError(
                    f"layer {index} expands to {shape[0]} key heads of {shape[1]}; expected {expected[0]} of"
                    f" {expected[1]} for transformers' continuous batching: use mha2mla.loop.Loop"
                )
        return super().init_continuous_batching(*args, **kwargs)

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, capture: bool | None = None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """``generate``'s hook for its config, which takes the arguments ``capture``, by default True, and those of
        ``_CACHE_OPTIONS``, by default the config's."""
        given = {name: kwargs.pop(name, None) for name in _CACHE_OPTIONS}
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        prepared.capture = getattr(prepared, "capture", True) if capture is None else capture
        for name, value in given.items():
            if value is not None:
                setattr(prepared, name, value)
        return prepared, model_kwargs

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """transformers' inputs, and ``mla_captured``, by which ``forward`` knows that it may replay a step."""
        kwargs["past_key_values"] = past_key_values
        captured = getattr(past_key_values, "captured", None)
        if captured is not None and (launched := captured.arguments_of_launched(input_ids, kwargs)) is not None:
            return launched
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        return inputs if captured is None else {**inputs, "mla_captured": captured}

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """transformers' arguments of the next step, of which what launches it is told."""
        arguments = super()._update_model_kwargs_for_generation(*args, **kwargs)
        captured = getattr(arguments.get("past_key_values"), "captured", None)
        if captured is not None and captured.ahead is not None:
            captured.ahead.expect(arguments)
        return arguments

    def _sample(self, input_ids: Tensor, *, stopping_criteria: StoppingCriteriaList, **kwargs: Any) -> Any:
        """transformers' greedy search and sampling, where steps are launched ahead if they are captured."""
        captured = getattr(kwargs.get("past_key_values"), "captured", None)
        if captured is None:
            return super()._sample(input_ids, stopping_criteria=stopping_criteria, **kwargs)
        with captured.launching_ahead(self, stopping_criteria.max_length) as ahead:
            # The last of them: what the others do to the model comes before the launch.
            criteria = StoppingCriteriaList([*stopping_criteria, ahead])
            return super()._sample(input_ids, stopping_criteria=criteria, **kwargs)

    def create_masks_for_generate(
        self,
        config: MHA2MLAConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The mask that ``generate`` gives to ``forward`` when the cache is static.

        Over a LatentCache it stays 2-D, because the absorbed form takes its starts from it, and gets the cache's
        length, so that a compiled step sees one shape. Other caches get the masks of the source's architecture.
        """
        if isinstance(past_key_values, LatentCache):
            if attention_mask is None:
                return None
            return F.pad(attention_mask, (0, past_key_values.capacity - attention_mask.shape[-1]))
        return create_masks_for_generate(
            config=self.model.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            **kwargs,
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """``generate``'s hook for its cache: a LatentCache for "dynamic" (and by default) and "static".

        The other implementations, and caches that the caller brings, are left to transformers.

        Raises:
            ValueError: an option of ``_CACHE_OPTIONS`` is not what a cache that the caller brings was made with.
        """
        config = self.config.with_options(**{name: getattr(generation_config, name, None) for name in _CACHE_OPTIONS})
        kind = generation_config.cache_implementation
        if (
            generation_config.use_cache is False
            or model_kwargs.get("past_key_values") is not None
            or kind not in (None, "dynamic", "static")
        ):
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            cache = model_kwargs.get("past_key_values")
            has = cache.constants if isinstance(cache, LatentCache) else self.config.attention_constants()
            if config is not self.config and has != config.attention_constants():
                options = ", ".join(f"{name} is {getattr(config, name)!r}" for name in _CACHE_OPTIONS)
                raise ValueError(
                    f"{options} for {type(cache).__name__ if cache is not None else 'no cache'}; expected a LatentCache"
                    " of a config that says so, or that the model's config says so"
                )
            if isinstance(cache, LatentCache):
                captures = generation_config.capture and self.explain_uncaptured() is None
                cache.captured = self.graph_store.steps_for(self, cache) if captures else None
            return
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if kind != "static":
            if generation_config.capture and self.explain_uncaptured() is None:
                prompt = model_kwargs["position_ids"].shape[-1]
                cache = self.graph_store.new_cache(self, config, rows, prompt, max_cache_length)
            else:
                cache = LatentCache(config)
            model_kwargs["past_key_values"] = cache
            return
        # A step compiled for an earlier call is kept as long as the cache has its length.
        length = max(
            max_cache_length, generation_config.max_cache_len or 0, getattr(self, "_previous_max_cache_length", 0)
        )
        self._previous_max_cache_length = length
        cache = model_kwargs["past_key_values"] = LatentCache(config, max_cache_len=length)
        if generation_config.prefill_chunk_size is not None and not hasattr(self, "hf_device_map"):
            # Chunked prefill is compiled, and allocation must stay out of what is.
            cache.early_initialization(rows, 1, 1, dtype=self.dtype, device=self.device)


class UncalibratedLengthWarning(UserWarning):
    """A sequence is longer than ``config.calibrated_length``."""


# Qwen2.5-Coder-0.5B calibrated at 8192 (docs/quality.md): perplexity relative to the source at 8192 and 32768 tokens in
# the first layout; in the second one, at 8192 and 24576.
_BEYOND = {
    True: "Its layout, latent, lost no more beyond that length where it was measured (1.03 at four times the length).",
    False: "Beyond that length it may be much worse than its source (1.32 instead of 1.12 at three times the length).",
}


class LengthWatch:
    """Warns of the first sequence beyond ``config.calibrated_length``. Says nothing while a graph is traced."""

    def __init__(self, config: MHA2MLAConfig) -> None:
        self._config, self._has_warned = config, False

    def see(self, cache: Cache | None, tokens: Tensor) -> None:
        """Checks a step that brings ``tokens`` [B, S, ...] to what ``cache`` holds.

        Only the device knows the tokens of a static cache, so its capacity counts.
        """
        if not self._looks():
            return
        length = tokens.shape[1]
        if isinstance(cache, LatentCache) and cache.layers[0].max_cache_len is not None:
            length = max(length, cache.layers[0].max_cache_len)
        elif isinstance(cache, LatentCache | DynamicCache):
            length += cache.get_seq_length()
        self._compare(length)

    def see_batch(self, lengths: Tensor) -> None:
        """Checks a ragged step whose sequences have ``lengths`` [B], on the CPU."""
        if self._looks() and lengths.numel():
            self._compare(int(lengths.max()))

    def _looks(self) -> bool:
        return not (self._has_warned or self._config.calibrated_length is None or torch.compiler.is_compiling())

    def _compare(self, length: int) -> None:
        if length > (limit := self._config.calibrated_length):
            self._has_warned = True
            warnings.warn(
                f"a sequence of {length} tokens: this checkpoint was calibrated on at most {limit}"
                f" (config.calibrated_length). {_BEYOND[self._config.rope_from_latent]}",
                UncalibratedLengthWarning,
                stacklevel=3,
            )


class MHA2MLAPreTrainedModel(modeling_mha2mla.MHA2MLAPreTrainedModel):
    """Class attributes and loading that all converted models share."""

    config: MHA2MLAConfig
    config_class = MHA2MLAConfig
    attention_class = MLAAttention

    _tensor_parallel_plan = staticmethod(tensor_parallel_plan)

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel,
        state_dict: dict[str, Tensor] | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        *others: Any,
        **keywords: Any,
    ) -> tuple[Any, Any]:
        """Refuses weights whose headers do not have every tensor before ``from_pretrained`` reads them.

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


class MHA2MLAModel(MHA2MLAPreTrainedModel, modeling_mha2mla.MHA2MLAModel):
    """:class:`~mha2mla.modeling.modeling_mha2mla.MHA2MLAModel` of the package's config."""


class MHA2MLAForSequenceClassification(MHA2MLAPreTrainedModel, modeling_mha2mla.MHA2MLAForSequenceClassification):
    """:class:`~mha2mla.modeling.modeling_mha2mla.MHA2MLAForSequenceClassification` of the package's config."""


class MHA2MLAForCausalLM(
    MHA2MLAPreTrainedModel, LatentGenerationMixin, modeling_mha2mla.MHA2MLAForCausalLM, BatchModel
):
    """:class:`~mha2mla.modeling.modeling_mha2mla.MHA2MLAForCausalLM` over a paged cache of latents.

    Prefill and long queries run the expanded form; few new tokens over a :class:`LatentCache` run the absorbed form
    where an attention backend serves it (``config.attention_backend``, ``attention_report``). Other caches of
    transformers work too, in the expanded form.

    Raises:
        ValueError: the source's architecture has no ``layers[i].self_attn`` to replace.
    """

    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: MHA2MLAConfig) -> None:
        super().__init__(config)
        self._length_watch = LengthWatch(config)
        self.graph_store = GraphStore()
        self._decoder: FusedDecoder | None = None

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
        output_hidden_states: bool | list[int] | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        mla_captured: DecodeGraphs | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Logits of the next token: arguments, results and errors of the class above, and those of a LatentCache.

        A LatentCache keeps no gradients. Over one that holds tokens, in eval mode, the logits say that they require
        a gradient, and a backward pass through them raises ValueError.

        Args:
            attention_mask: [B, cached + S] with 0 on tokens that nothing sees (longer masks are cut), or what the
                source's model takes. The expanded form obeys every mask; the absorbed form all whose visible tokens lie
                side by side in every sequence, see ``cache.py``.
            past_key_values: with ``use_cache`` and None a dynamic :class:`LatentCache` is made. An error in this call
                leaves a LatentCache with the tokens that it had.
            mla_captured: steps that ``generate`` replays instead.

        Raises:
            ValueError: ``attention_mask`` has too few sequences or tokens; the backend that
                ``config.attention_backend`` names refuses the model; or a LatentCache that holds tokens is given while
                training, or to a compiled model where gradients are enabled.
            RuntimeError: where the host may not look, an ``attention_mask`` with a hole that first appears there and
                that the absorbed form would not obey. By an assertion on the device.
        """
        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens is not None:
            self._length_watch.see(past_key_values, tokens)
        wanted = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        wanted |= {"output_router_logits": output_router_logits}
        if mla_captured is not None:
            asked = [inputs_embeds, labels, *kwargs.values()]
            if not any(self._is_wanted(*each) for each in wanted.items()) and all(value is None for value in asked):
                logits = mla_captured.logits(
                    self, past_key_values, input_ids, attention_mask, position_ids, logits_to_keep
                )
                if logits is not None:
                    return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        latent = past_key_values if isinstance(past_key_values, LatentCache) else None
        errors = nullcontext()
        if latent is not None and not torch.compiler.is_compiling():
            if latent.captured is not None:
                latent.captured.settle()
            errors = latent.unchanged_by_errors()
        with errors:
            if tokens is not None and is_padding_mask(attention_mask) and latent is past_key_values:
                attention_mask = check_mask(attention_mask, *tokens.shape[:2], latent)
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                labels=labels,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                return_dict=True,
                **wanted,
                **kwargs,
            )

    def _new_cache(self) -> LatentCache:
        return LatentCache(self.config)

    def _run_base_model(
        self,
        *,
        input_ids: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        inputs_embeds: Tensor | None,
        **options: Any,
    ) -> tuple[BaseModelOutputWithPast, AttentionStep | None]:
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        shape, query_length = tokens.shape[:2], tokens.shape[1]
        latent = past_key_values if isinstance(past_key_values, LatentCache) else None
        if latent is not None and position_ids is None:
            position_ids = latent.next_positions(query_length, tokens.device)
        begins = latent is not None and latent.is_empty and not is_recorded(tokens.device)
        if begins and latent.made_by is not self.config:
            latent.check_model(self.model.layers, self.config)
        no_history = torch.is_grad_enabled() and self._refuses_gradients(latent, inputs_embeds)
        with torch.no_grad() if no_history else nullcontext():
            if begins and not torch.is_grad_enabled():
                self._prepare_decoder()
            step = None
            if latent is not None:
                latent.serve_by(self.config.attention_backend)
                weights = "mla_attentions" in options
                step = latent.step(self.model.layers, attention_mask, position_ids, shape, weights)
                if step is not None and latent.is_empty and latent.hides_nothing:
                    attention_mask = None  # the base model would find so by another look
                expands_static = step is not None and None in step.plans and latent.is_compileable
                if expands_static and not latent.is_empty and "flash" in self.config._attn_implementation:
                    attention_mask = self._mask_of_static_cache(attention_mask, latent, query_length)
            outputs = run_base_model(
                self.model,
                self._decoder,
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                mla_step=step,
                **options,
            )
        if no_history:
            outputs.last_hidden_state = refuse_gradients(outputs.last_hidden_state)
            if outputs.hidden_states is not None:
                outputs.hidden_states = tuple([refuse_gradients(each) for each in outputs.hidden_states])
        return outputs, step

    def _prepare_decoder(self) -> None:
        if self._decoder is None or not self._decoder.is_prepared():
            self._decoder = FusedDecoder.prepare(self.model)

    def _refuses_gradients(self, cache: LatentCache | None, inputs_embeds: Tensor | None) -> bool:
        """True where gradients of this call would lack the part that goes through cached tokens.

        Raises:
            ValueError: while training, and where a compiled graph could not say so in its backward pass.
        """
        if cache is None or cache.is_empty:
            return False
        if self.training or torch.compiler.is_compiling():
            raise ValueError(
                "past_key_values is a LatentCache that holds tokens, and it keeps no gradients; expected a "
                f"DynamicCache or None while training{'' if self.training else ', or torch.no_grad() when compiled'}"
            )
        given = inputs_embeds is not None and inputs_embeds.requires_grad
        return given or any(parameter.requires_grad for parameter in self.parameters())

    def _mask_of_static_cache(self, attention_mask: Tensor | None, cache: LatentCache, new_tokens: int) -> Tensor:
        """A mask that ends with the new tokens, for flash kernels: these are causal from the last key on, and know of
        no other end of a static cache than the mask's."""
        if attention_mask is None:
            attention_mask = torch.ones(
                cache.batch_size, cache.capacity, dtype=torch.long, device=cache.layers[0].device
            )
        token = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        length = cache.get_seq_length().to(attention_mask.device) + new_tokens
        return attention_mask.masked_fill(token >= length, 0)

    def _batch_layers(
        self, rotary_key_cache: str | None = None
    ) -> tuple[str | None, Sequence[AttentionConstants], torch.device]:
        device, *others = dict.fromkeys(map(self._execution_device, range(len(self.model.layers))))
        if others:
            raise ValueError(f"layers run on {device} and {others[0]}; expected one device, or generate")
        config = self.config.with_options(rotary_key_cache=rotary_key_cache)
        return config.attention_backend, config.attention_constants(), device

    def _batch_logits(self, batch: SequenceBatch, arguments: dict[str, Any], kept: Tensor | None) -> Tensor:
        self._length_watch.see_batch(batch.lengths[:2].sum(0))
        hidden = run_base_model(self.model, self._decoder, **arguments).last_hidden_state[0]
        return self.lm_head(hidden if kept is None else hidden.index_select(0, kept))

    def _execution_device(self, layer_idx: int = 0) -> torch.device:
        """Device that a layer runs on; an offloaded weight is on "meta" until then."""
        attention = self.model.layers[layer_idx].self_attn
        weight, hook = attention.v_b_proj, getattr(attention, "_hf_hook", None)
        if weight.device.type == "meta" and getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
        return weight.device

    def attention_report(self, query_length: int = 1) -> AttentionReport:
        """Backend chosen for each layer, with the reason: in ``generate`` and, for batches, in ``forward_batch``.

        Args:
            query_length: new tokens per sequence.
        """
        device, dtype = self._execution_device(), self.model.layers[0].self_attn.v_b_proj.dtype
        return AttentionReport(what_serves(self.config, device, dtype, query_length=query_length))
