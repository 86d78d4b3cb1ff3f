"""The converted model: the source's own architecture with MLA in place of its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_MAPPING, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mha2mla.kernels import DecodePlan
from mha2mla.modeling.attention import MLAAttention
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.cache import PAGE_SIZE, LatentCache
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.decode_step import DecodeStep, places_of_layers, refreshed_plans
from mha2mla.modeling.forms import MAX_DECODE_QUERY_LENGTH, LayerAttention, choose_form, is_absorbed
from mha2mla.modeling.paged_cache import BatchStep, PagedCache


class MHA2MLAPreTrainedModel(PreTrainedModel):
    """What transformers needs to know about converted models."""

    config: MHA2MLAConfig
    config_class = MHA2MLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    # By transformers' name for "also under from_pretrained(dtype=bfloat16)"; casts after loading: MLAAttention._apply.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["inv_freq"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers looks for get_interface in the source of the class's module; here it is in attention.py.
        return True

    def initialize_weights(self) -> None:
        """Random weights wherever none were loaded."""
        super().initialize_weights()
        # Modules below the base model are left to its own _init_weights, which does not know MLA's bare parameters.
        theta = (self.config.source_config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        for layer in self.model.layers:
            layer.self_attn.init_weights(self.config.initializer_range or 0.02, theta)


class MHA2MLAForCausalLM(MHA2MLAPreTrainedModel, GenerationMixin):
    """Causal language model of a converted checkpoint.

    ``model`` is an instance of the source's own base class (``LlamaModel``, …) in which every ``layers[i].self_attn``
    is an :class:`MLAAttention`; names in the state dict differ from the source's below ``self_attn`` only.

    Prefill and long queries run the expanded form; up to 8 new tokens over a :class:`LatentCache` run the absorbed form
    where a kernel serves it (``config.mla_form``, ``attention_report``). Other caches of transformers work too, in the
    expanded form.

    Raises:
        ValueError: the source's architecture has no ``layers[i].self_attn`` to replace.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MHA2MLAConfig) -> None:
        super().__init__(config)
        source = config.build_source_config()
        source._attn_implementation = config._attn_implementation
        # The source's plan shards projections that are not there any more.
        source.base_model_tp_plan = None
        self.model = MODEL_MAPPING[type(source)](source)
        layers = getattr(self.model, "layers", None)
        if layers is None or not all(hasattr(layer, "self_attn") for layer in layers):
            raise ValueError(
                f"source_config['model_type'] is {source.model_type!r}; expected a family whose layers have a self_attn"
            )
        for layer_idx, layer in enumerate(layers):
            layer.self_attn = MLAAttention(config, layer_idx, layer.self_attn)
        self._windows = tuple(layer.self_attn.sliding_window for layer in layers)
        # Layers of one geometry are served alike: which form they run, a step asks once per geometry.
        geometries = [layer.self_attn.geometry for layer in layers]
        self._geometries = tuple(dict.fromkeys(geometries))
        self._geometry_of_layer = tuple(self._geometries.index(geometry) for geometry in geometries)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
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
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, as every causal language model of transformers.

        Args:
            input_ids: [B, S].
            attention_mask: [B, cached + S] with 0 on padding (longer masks are cut), or what the source's model takes.
            position_ids: [B or 1, S]; default: count on from the cache.
            past_key_values: tokens before these; with ``use_cache`` and None a dynamic :class:`LatentCache` is made.
            inputs_embeds: [B, S, hidden] instead of ``input_ids``.
            labels: [B, S], -100 where there is no loss.
            use_cache: default the config's; while training, False.
            logits_to_keep: that many last positions, or their indices; 0 means all.
            **kwargs: to the base model and its layers.

        Returns:
            ``logits`` [B, S or logits_to_keep, vocabulary], ``past_key_values``, and ``loss`` if there are ``labels``.

        Raises:
            ValueError: ``config.mla_form`` is "absorbed", and this call cannot be served so; or a LatentCache that
                holds tokens is given while training.
        """
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = LatentCache(self.config)
        batch, query_length = (inputs_embeds if input_ids is None else input_ids).shape[:2]
        if position_ids is None and isinstance(past_key_values, LatentCache):
            position_ids = past_key_values.next_positions(query_length, self.device)
        step = self._decode_step(past_key_values, attention_mask, position_ids, batch, query_length)
        if step is not None and all(plan is not None for plan in step.plans):
            # The base model passes a 4-D mask on as it is: spares building one that no layer looks at.
            attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            mla_step=step,
            **kwargs,
        )
        if step is not None:
            past_key_values.advance(query_length)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def paged_cache(self, num_pages: int, page_size: int = PAGE_SIZE) -> PagedCache:
        """A cache for ragged batches of this model, in its dtype and on its device.

        Args:
            num_pages: pages of each layer; all take ``num_pages * page_size * config.cache_bytes_per_token(2)`` bytes.
            page_size: tokens per page.

        Raises:
            ValueError: ``config.attention_backend`` is no backend's name, or it refuses a layer, with the reason.
        """
        registry, name = ATTENTION_BACKENDS, self.config.attention_backend
        attentions = [layer.self_attn for layer in self.model.layers]
        layers = [
            (registry.choose(name, each.geometry, page_size, self.dtype, self.device), each.constants())
            for each in attentions
        ]
        return PagedCache(layers, num_pages, page_size, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def forward_batch(self, input_ids: Tensor, step: BatchStep, *, all_logits: bool = False) -> Tensor:
        """One step over sequences that bring different numbers of new tokens: decodes and (chunks of) prompts alike.

        Args:
            input_ids: [N] new tokens, in the order of ``step.batch`` (:meth:`SequenceBatch.flatten`).
            step: of :meth:`PagedCache.step`. Their latents are in the cache afterwards.
            all_logits: of every token; else of each sequence's last one, which is where the next token comes from.

        Returns:
            [B, vocabulary], a row for each of the batch's rows (:attr:`SequenceBatch.order` says whose); or
            [N, vocabulary]. Rows of padding are finite and mean nothing.

        Raises:
            ValueError: ``input_ids`` has another length than the batch.
        """
        batch = step.batch
        if input_ids.shape != (batch.num_tokens,):
            raise ValueError(f"input_ids.shape is {tuple(input_ids.shape)}; expected {(batch.num_tokens,)}, [N]")
        if not batch.num_tokens:  # nothing to embed, and no last token to look up
            step.check()
            return self.lm_head.weight.new_zeros(0 if all_logits else batch.num_sequences, self.vocab_size)
        hidden = self.model(
            input_ids=input_ids[None],
            # Passed on as it is, and no layer looks at it.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
            position_ids=batch.positions[None].long(),
            use_cache=False,
            mla_step=step,
        ).last_hidden_state[0]
        return self.lm_head(hidden if all_logits else hidden.index_select(0, batch.last_tokens))

    def _decode_step(
        self, cache: Cache | None, attention_mask: Any, position_ids: Tensor | None, batch: int, query_length: int
    ) -> DecodeStep | None:
        """What the layers share while they append these new tokens to a LatentCache; None: they append them one by one,
        and keep gradients.

        Depends on shapes and on what the host knows of the cache, never on values on the device, except that the mask
        of more than one new token is checked for left padding, once per call.
        """
        forced = self.config.mla_form == "absorbed" and query_length <= MAX_DECODE_QUERY_LENGTH
        if not isinstance(cache, LatentCache):
            if forced and cache is not None:
                raise ValueError(
                    f"past_key_values is a {type(cache).__name__}; expected a LatentCache, since mla_form is 'absorbed'"
                )
            return None
        is_padding_mask = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        if is_padding_mask and query_length > 1 and not torch.compiler.is_compiling():
            cache.padding_is_left = cache.padding_is_left and _is_left_padding(attention_mask)
        if self.training and torch.is_grad_enabled() and not cache.is_empty:
            raise ValueError(
                "past_key_values is a LatentCache that holds tokens, and it keeps no gradients; expected a "
                "DynamicCache or None while training"
            )
        if cache.is_empty and torch.is_grad_enabled():
            return None
        absorbed = (False,) * len(cache.layers)
        # Over an empty cache there is nothing to attend over but the new tokens: expanding them is cheaper.
        if not cache.is_empty:
            if cache.padding_is_left and (is_padding_mask or attention_mask is None):
                of_geometries = self._of_geometries(is_absorbed, query_length, cache.page_size)
                absorbed = tuple(of_geometries[index] for index in self._geometry_of_layer)
            elif forced:
                raise ValueError(
                    "attention_mask hides more than left padding; expected [B, tokens] of zeros, then ones, since "
                    "mla_form is 'absorbed'"
                )
        # A plan is for pages that do not grow under it.
        if not self._open(cache, batch, query_length):
            return None
        places = places_of_layers(cache, position_ids)
        plans: tuple[DecodePlan | None, ...] = (None,) * len(absorbed)
        starts = None
        if any(absorbed):
            if is_padding_mask:
                starts = attention_mask.to(torch.int32).argmax(dim=-1).to(torch.int32).expand(batch).contiguous()
            plans = refreshed_plans(
                cache,
                absorbed,
                self._windows,
                self.config.num_attention_heads,
                query_length,
                self.config.decode_backend,
                places,
                starts,
            )
        return DecodeStep(plans, starts, places)

    def _open(self, cache: LatentCache, batch: int, query_length: int) -> bool:
        """Makes room in all layers; False where an empty cache cannot know where its layers will run (offloading)."""
        for layer, decoder in zip(cache.layers, self.model.layers, strict=True):
            weight = decoder.self_attn.v_b_proj
            if layer.is_initialized:
                dtype, device = layer.dtype, layer.device
            elif weight.device.type == "meta":
                return False
            else:
                device = weight.device
                autocast = torch.is_autocast_enabled(device.type)
                dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
            layer.open(batch, query_length, dtype, device)
        return True

    def _of_geometries(self, choose: Callable[..., Any], query_length: int, page_size: int) -> list[Any]:
        """What ``choose`` (:func:`choose_form` or its like) says of every geometry in the model."""
        weight = self.model.layers[0].self_attn.v_b_proj
        return [
            choose(
                geometry.num_attention_heads,
                geometry.num_rope_heads,
                geometry.kv_lora_rank,
                geometry.qk_rope_head_dim,
                mla_form=self.config.mla_form,
                decode_backend=self.config.decode_backend,
                attn_implementation=self.config._attn_implementation,
                query_length=query_length,
                page_size=page_size,
                dtype=weight.dtype,
                device=weight.device,
            )
            for geometry in self._geometries
        ]

    def attention_report(self, query_length: int = 1, page_size: int = PAGE_SIZE) -> list[LayerAttention]:
        """What serves decode in every layer, and why.

        Args:
            query_length: new tokens per sequence.
            page_size: of the LatentCache.
        """
        choices = self._of_geometries(choose_form, query_length, page_size)
        return [
            LayerAttention(layer_idx, self._geometries[index], self._windows[layer_idx], **vars(choices[index]))
            for layer_idx, index in enumerate(self._geometry_of_layer)
        ]

    def create_masks_for_generate(
        self,
        config: MHA2MLAConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """What ``generate`` hands to ``forward`` as a mask when the cache is static.

        Over a LatentCache it stays 2-D, because the absorbed form takes its starts from it, and gets the cache's
        length, so that a compiled step sees one shape. Other caches get the masks of the source's architecture.
        """
        if isinstance(past_key_values, LatentCache):
            if attention_mask is None:
                return None
            # Ones: what is to come is hidden by causality, and zeros behind the tokens would look like right padding.
            return F.pad(attention_mask, (0, past_key_values.capacity - attention_mask.shape[-1]), value=1)
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
        """
        kind = generation_config.cache_implementation
        if (
            generation_config.use_cache is False
            or model_kwargs.get("past_key_values") is not None
            or kind not in (None, "dynamic", "static")
        ):
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        if kind != "static":
            model_kwargs["past_key_values"] = LatentCache(self.config)
            return
        # A step compiled for an earlier call is kept as long as the cache has its length.
        length = max(
            max_cache_length, generation_config.max_cache_len or 0, getattr(self, "_previous_max_cache_length", 0)
        )
        self._previous_max_cache_length = length
        cache = model_kwargs["past_key_values"] = LatentCache(self.config, max_cache_len=length)
        if generation_config.prefill_chunk_size is not None and not hasattr(self, "hf_device_map"):
            # Chunked prefill is compiled, and allocation must stay out of what is.
            rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            cache.early_initialization(rows, 1, 1, dtype=self.dtype, device=self.device)


def _is_left_padding(attention_mask: Tensor) -> bool:
    """Whether every row of [B, T] is zeros, then ones. Reads the device."""
    mask = attention_mask.to(torch.bool)
    return not bool((mask[:, :-1] & ~mask[:, 1:]).any())
