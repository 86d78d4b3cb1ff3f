"""A converted model: the source's architecture with Multi-head Latent Attention; needs torch and transformers alone.

``convert`` copies this file and ``configuration_mha2mla.py`` into every converted folder, which
``from_pretrained(folder, trust_remote_code=True)`` loads. Attention is the definition, in the expanded form, over the
caches of transformers. The package mha2mla subclasses these classes, and registers its own: the same model with a paged
cache of latents, kernels and tensor parallelism.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import ModelOutput, can_return_tuple

from .configuration_mha2mla import MHA2MLAConfig

_LONG = 1024  # queries
_HIDDEN = -1e3  # no score added to this is seen: masks hide tokens by -1e4, -1e9, -inf or a dtype's least number
REFUSED_POSITIONS = (  # below 255 characters, all that torch's assert on a CUDA device takes
    "position_ids do not count on from each row's first visible token; a cache without rotary keys "
    "(has_rope_cache is False) expects the places in it one by one, padding counted or not "
    "(a batch padded on the right: set tokenizer.padding_side = 'left')"
)


class MLAAttention(nn.Module):
    """MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1) with G rotary keys per token and a table of frequencies.

    Without ``config.has_rope_cache`` only the latent c is cached, and the one rotary key is computed from it when it is
    read: ``k_pe[t] = m R(t) (W_KR c[t] + b_KR)``, m the factor of ``config.layer_rope_scaling``. Cached rows then
    carry no position, and t is a token's place in its cache row; without a cache, its ``position_ids``.

    With H query heads, h_up heads that the latent expands to, and the widths of the config::

        score[h, t] = softmax_scale * (q_nope[h] . W_UK[up(h)] c[t] + q_pe[h] . k_pe[t, g(h)])
        out[h]      = sum_t softmax_t(score[h, t]) W_UV[up(h)] c[t]

    Args:
        source: the attention module of the source's architecture that this one replaces; with ``config.qk_norm`` its
            ``q_norm`` and ``k_norm`` are taken over, since families differ in how they compute them.

    The parameters are the tensors of the checkpoint:

    * ``q_proj.weight`` [H * (d_n + d_r), hidden], per head [nope | rope], and ``kv_a_proj.weight``
      [d_c + G * d_r, hidden];
    * with ``config.qk_norm`` instead ``q_proj.weight`` [H * d_h, hidden], ``q_norm`` (over each head, d_h, or over all
      heads together, H * d_h), ``q_b_proj`` [H, d_n + d_r, d_h];
      ``k_proj.weight`` [h_kv * d_h, hidden], ``k_norm``, ``k_a_proj.weight`` [d_c + G * d_r, h_kv * d_h], and
      ``v_a_proj.weight`` [d_c, hidden]: the latent encodes normed keys, so that decoding it stays linear;
    * ``k_b_proj`` [h_up, d_n, d_c] W_UK (absent if d_n is 0), ``v_b_proj`` [h_up, d_v, d_c] W_UV, ``o_proj``;
    * without ``config.has_rope_cache`` encoders end at the latent (``kv_a_proj``, ``k_a_proj`` [d_c, …], biases too),
      and ``k_rope_proj.weight`` [d_r, d_c] is W_KR, ``k_rope_proj.bias`` [d_r] b_KR;
    * ``inv_freq`` [G, d_r / 2] float32, a buffer that stays float32 whatever the module is cast to;
    * with ``config.latent_bits`` below 16, ``latent_centers`` [2, d_c], a buffer: latents that the package's codes are
      differences from. The form here caches the latent itself, and reads none of these.
    """

    rope_heads: slice | None = None  # of k_pe, those that are computed here; None: all

    def __init__(self, config: MHA2MLAConfig, layer_idx: int, source: nn.Module) -> None:
        super().__init__()
        geometry = config.layer_geometry(layer_idx)
        self.config, self.layer_idx, self.geometry = config, layer_idx, geometry
        self.sliding_window = config.layer_sliding_window(layer_idx)
        self.attention_dropout = config.attention_dropout or 0.0
        self.is_causal, self.qk_norm = True, config.qk_norm
        self._count_expanded_heads()

        heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
        up_heads, latent_dim = geometry.num_up_projection_heads, geometry.kv_lora_rank
        query_dim = geometry.qk_nope_head_dim + geometry.qk_rope_head_dim
        rope_width = geometry.num_rope_heads * geometry.qk_rope_head_dim if geometry.has_rope_cache else 0
        cached_dim = latent_dim + rope_width
        hidden, head_dim = config.hidden_size, config.head_dim
        if config.qk_norm:
            self.q_proj = nn.Linear(hidden, heads * head_dim, bias=config.attention_q_bias)
            self.q_norm = source.q_norm
            self.q_b_proj = nn.Parameter(torch.empty(heads, query_dim, head_dim))
            self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=config.attention_kv_bias)
            self.k_norm = source.k_norm
            self.k_a_proj = nn.Linear(kv_heads * head_dim, cached_dim, bias=False)
            self.v_a_proj = nn.Linear(hidden, latent_dim, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, heads * query_dim, bias=config.attention_q_bias)
            self.kv_a_proj = nn.Linear(hidden, cached_dim, bias=config.attention_kv_bias)
        if not geometry.has_rope_cache:
            self.k_rope_proj = nn.Linear(latent_dim, geometry.qk_rope_head_dim)
        if geometry.qk_nope_head_dim:
            self.k_b_proj = nn.Parameter(torch.empty(up_heads, geometry.qk_nope_head_dim, latent_dim))
        self.v_b_proj = nn.Parameter(torch.empty(up_heads, geometry.v_head_dim, latent_dim))
        self.o_proj = nn.Linear(heads * geometry.v_head_dim, hidden, bias=config.attention_o_bias)
        frequencies = torch.empty(geometry.num_rope_heads, geometry.qk_rope_head_dim // 2, dtype=torch.float32)
        self.register_buffer("inv_freq", frequencies)
        if geometry.latent_bits < 16:
            self.register_buffer("latent_centers", torch.empty(2, latent_dim))

    def _count_expanded_heads(self) -> None:
        """Heads of the expanded keys: the fewest that both up-projections and rope heads divide."""
        geometry = self.geometry
        self.num_expanded_heads = math.lcm(geometry.num_up_projection_heads, geometry.num_rope_heads)
        self.num_key_value_groups = geometry.num_attention_heads // self.num_expanded_heads

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MLAAttention:
        """Moves and casts as any module, but ``inv_freq`` only moves: a bfloat16 frequency is off by whole turns."""
        inv_freq = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = inv_freq.to(device=self.inv_freq.device)
        return self

    def extra_repr(self) -> str:
        """The per-head maps, which are parameters and no modules, and so missing from what torch prints."""
        return ", ".join(f"{name}={list(weight.shape)}" for name, weight in self.named_parameters(recurse=False))

    @torch.no_grad()
    def init_weights(self, std: float, rope_theta: float) -> None:
        """Random per-head maps and RoPE's default frequencies, for what was not loaded from a checkpoint."""
        for name in ("q_b_proj", "k_b_proj", "v_b_proj"):
            if (weight := getattr(self, name, None)) is not None:
                init.normal_(weight, mean=0.0, std=std)
        pairs = self.inv_freq.shape[1]
        exponent = torch.arange(pairs, dtype=torch.float32, device=self.inv_freq.device) / pairs
        init.copy_(self.inv_freq, (rope_theta**-exponent).expand_as(self.inv_freq))
        if self.geometry.latent_bits < 16:
            init.zeros_(self.latent_centers)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        mla_attentions: dict[int, Tensor | None] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of S new tokens over the cache and themselves.

        Args:
            hidden_states: [B, S, hidden].
            position_embeddings: the source architecture's; ignored, every layer has its own frequencies.
            attention_mask: 4-D mask of the expanded form.
            position_ids: [B or 1, S]; without ``config.has_rope_cache`` and with a cache, places in it
                (:func:`cache_positions`).
            kwargs: to the attention implementation.

        Returns:
            [B, S, hidden], and the attention weights [B, H, S, T] if the attention implementation gives them.

        Raises:
            ValueError: ``position_ids`` is missing.
        """
        if position_ids is None:
            raise ValueError("position_ids is None; expected [B, S] token positions")
        out, weights = self._attend(hidden_states, attention_mask, past_key_values, position_ids, **kwargs)
        if mla_attentions is not None:
            mla_attentions[self.layer_idx] = weights
        return self._project(out.flatten(2), self.o_proj)[0], weights

    def _attend(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The expanded form over any cache, or none: as :meth:`_expanded`."""
        position_ids = position_ids.to(hidden_states.device)
        limits = self._limits(past_key_values)
        scaling = self.config.layer_rope_scaling(self.layer_idx)
        cos, sin = rotary_cos_sin(position_ids, self._own("inv_freq"), scaling, hidden_states.dtype)
        q_nope, q_pe, latent, k_pe = self._encoded(hidden_states)
        latent = self._read_latent(latent, past_key_values)
        q_pe = q_pe.unflatten(2, (self.geometry.num_rope_heads, -1))
        q_pe = apply_rope(q_pe, cos[..., None, :], sin[..., None, :]).flatten(2, 3)
        if k_pe is None:
            if past_key_values is not None:
                # The tokens that update() returns, by transformers' own contract for masks.
                tokens, first = past_key_values.get_mask_sizes(hidden_states.shape[1], self.layer_idx)
                position_ids = torch.arange(first, first + tokens, device=latent.device)[None]
                latent = self._cached_latents(latent, past_key_values)
            k_pe = self._rotary_keys(latent, position_ids)
            return self._expanded(q_nope, q_pe, latent, k_pe, attention_mask, limits, **kwargs)
        k_pe = apply_rope(k_pe, cos, sin)
        if past_key_values is not None:
            # One "head" each, and k_pe flattened: StaticLayer wants keys and values with as many heads.
            latent, k_pe = past_key_values.update(latent[:, None], k_pe.flatten(2)[:, None], self.layer_idx)
            latent, k_pe = latent[:, 0], k_pe[:, 0].unflatten(-1, (self.geometry.num_rope_heads, -1))
        return self._expanded(q_nope, q_pe, latent, k_pe, attention_mask, limits, **kwargs)

    def _read_latent(self, latent: Tensor, cache: Cache | None) -> Tensor:
        """New latents [B, S, d_c] as attention over ``cache`` reads them."""
        return latent

    def _own(self, name: str) -> Tensor:
        """A per-head map, or the table of frequencies, of the heads that are computed here."""
        return getattr(self, name)

    def _project(self, x: Tensor, *parts: nn.Module) -> tuple[Tensor, ...]:
        return tuple([part(x) for part in parts])

    def _limits(self, cache: Cache | None) -> tuple[int | None, int]:
        """Window and sinks."""
        return self.config.layer_attention_window(self.layer_idx)

    def _encoded(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q_nope [B, S, H, d_n] and q_pe [B, S, H, d_r] before RoPE, c [B, S, d_c], and k_pe [B, S, G, d_r] before
        RoPE, or None where it is computed from c."""
        geometry = self.geometry
        widths = (geometry.qk_nope_head_dim, geometry.qk_rope_head_dim)
        if self.qk_norm:
            query, key, value = self._project(hidden_states, self.q_proj, self.k_proj, self.v_a_proj)
            query = torch.einsum("bshd,hed->bshe", self._normed(query, self.q_norm), self._own("q_b_proj"))
            encoded = self.k_a_proj(self._normed(key, self.k_norm).flatten(2))
        else:
            query, encoded = self._project(hidden_states, self.q_proj, self.kv_a_proj)
            query = query.view(*query.shape[:-1], -1, sum(widths))
        queries = query.split_with_sizes(widths, -1)
        if not geometry.has_rope_cache:
            return *queries, encoded + value if self.qk_norm else encoded, None
        latent, k_pe = encoded.tensor_split((geometry.kv_lora_rank,), dim=-1)
        if self.qk_norm:
            latent = latent + value
        k_pe = k_pe.unflatten(-1, (-1, geometry.qk_rope_head_dim))
        return *queries, latent, k_pe if self.rope_heads is None else k_pe[..., self.rope_heads, :]

    def _normed(self, projected: Tensor, norm: nn.Module) -> Tensor:
        """[B, S, heads * d_h] -> [B, S, heads, d_h] after a norm over each head, or over all of them."""
        heads = (-1, self.config.head_dim)
        if norm.weight.shape[0] == self.config.head_dim:
            return norm(projected.unflatten(-1, heads))
        return norm(projected).unflatten(-1, heads)

    def _cached_latents(self, latent: Tensor, cache: Cache) -> Tensor:
        """c of the cached and the new tokens, [B, T, d_c]. Caches want keys and values: halves of the latent, since
        some cannot hold rows of no width."""
        halves = latent[:, None].tensor_split([-(-latent.shape[-1] // 2)], dim=-1)
        return torch.cat(cache.update(*halves, self.layer_idx), dim=-1)[:, 0]

    def _rotary_keys(self, latent: Tensor, positions: Tensor) -> Tensor:
        """k_pe [B, T, 1, d_r] of c [B, T, d_c] at ``positions`` [B or 1, T], without ``config.has_rope_cache``."""
        scaling = self.config.layer_rope_scaling(self.layer_idx)
        cos, sin = rotary_cos_sin(positions, self.inv_freq, scaling, latent.dtype)
        return apply_rope(self.k_rope_proj(latent)[:, :, None], cos, sin)

    def _expanded(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        latent: Tensor,
        k_pe: Tensor,
        attention_mask: Tensor | None,
        limits: tuple[int | None, int],
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Keys and values of every head from c [B, T, d_c] and k_pe [B, T, G, d_r], then ordinary attention.

        ``limits``: window and sinks; a window of the source's own ``attention_mask`` knows.

        Returns:
            [B, S, H, d_v], and the attention weights [B, H, S, T] of an implementation that computes them, or None.
        """
        heads = self.num_expanded_heads
        query = torch.cat((q_nope, q_pe), dim=-1).transpose(1, 2)
        key = _repeat_heads(k_pe.transpose(1, 2), heads)
        if self.geometry.qk_nope_head_dim:
            key = torch.cat((_repeat_heads(_decode_latent(latent, self._own("k_b_proj")), heads), key), dim=-1)
        value = _repeat_heads(_decode_latent(latent, self._own("v_b_proj")), heads)
        value_dim, implementation = value.shape[-1], self.config._attn_implementation
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if limits != (self.sliding_window, 0):
            attention_mask = under_window(attention_mask, *limits, query, key.shape[2], implementation)
        # These want queries, keys and values equally wide. (transformers pads values, or else truncates them.) So does
        # SDPA's fused kernel for CPUs, beside which the plain one holds all scores and takes twice as long.
        wants_alike = implementation == "flex_attention" or "flash" in implementation
        is_long = query.device.type == "cpu" and query.shape[2] >= _LONG and implementation != "eager"
        width = max(query.shape[-1], value_dim)
        if (wants_alike or is_long) and query.shape[-1] != value_dim:
            query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.config.softmax_scale,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return out[..., :value_dim], weights


class MHA2MLAPreTrainedModel(PreTrainedModel):
    """Class attributes and weights that all converted models share."""

    config: MHA2MLAConfig
    config_class = MHA2MLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    attention_class: ClassVar[type[MLAAttention]] = MLAAttention
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    # By transformers' name for "also under from_pretrained(dtype=bfloat16)"; casts after loading: MLAAttention._apply.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["inv_freq"]
    # Names that a checkpoint of codes has where it is loaded with latent_bits=16.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"latent_centers$"]
    # The source's own class says whether its architecture supports them.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers looks for get_interface in the source of the class's module, which may be a subclass's.
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str | None:
        # The base model, whose the experts are, has the default and refuses other names.
        return requested_experts

    def initialize_weights(self) -> None:
        """Random weights wherever none were loaded."""
        super().initialize_weights()
        # Modules below the base model are left to its own _init_weights, which does not know MLA's bare parameters.
        theta = (self.config.source_config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        for layer in self.model.layers:
            layer.self_attn.init_weights(self.config.initializer_range or 0.02, theta)

    def _build_base_model(self) -> nn.Module:
        """The source's own base model (``LlamaModel``, …) with an :class:`MLAAttention` in every layer.

        Raises:
            ValueError: its layers have no ``self_attn`` to replace.
        """
        source = self.config.build_source_config()
        source.dtype = self.config.dtype  # some families make an activation's parameters of it
        source._attn_implementation = self.config._attn_implementation
        source._experts_implementation = self.config._experts_implementation
        source.base_model_tp_plan = self._tensor_parallel_plan(source)
        model = MODEL_MAPPING[type(source)](source)
        layers = getattr(model, "layers", None)
        if layers is None or not all(hasattr(layer, "self_attn") for layer in layers):
            raise ValueError(
                f"source_config['model_type'] is {source.model_type!r}; expected a family whose layers have a self_attn"
            )
        for layer_idx, layer in enumerate(layers):
            layer.self_attn = self.attention_class(self.config, layer_idx, layer.self_attn)
        return model

    def _tensor_parallel_plan(self, source: PreTrainedConfig) -> dict[str, str] | None:
        return None  # the source's splits heads that are not there

    def _is_wanted(self, output: str, value: Any) -> Any:
        """``value`` of an argument such as ``output_attentions``; None: what the config says, or the source's."""
        if value is not None:
            return value
        return getattr(self.config, output, None) or getattr(self.model.config, output, None) or False

    def _new_cache(self) -> Cache:
        return DynamicCache(config=self.model.config)

    def _base_inputs(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | list[int] | None = None,
        output_router_logits: bool | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Arguments of the base model for those of a call: the config's defaults, a new cache, positions in it, and
        ``mla_attentions``, which takes the weights of every layer.

        Raises:
            ValueError: not exactly one of ``input_ids`` and ``inputs_embeds``; ``position_ids`` that a cache of latents
                alone cannot serve; ``output_attentions`` without eager attention.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids and inputs_embeds: {given} given; expected exactly one of them")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = self._new_cache()
        if self._is_wanted("output_attentions", output_attentions):
            if self.config._attn_implementation != "eager":
                raise ValueError(
                    f"output_attentions is True with attn_implementation {self.config._attn_implementation!r}; expected"
                    " 'eager', which alone computes them"
                )
            others["mla_attentions"] = {}
        recorded = {"output_hidden_states": output_hidden_states, "output_router_logits": output_router_logits}
        for name, value in recorded.items():
            if (wanted := self._is_wanted(name, value)) or value is not None:  # False overrules the source's config
                others[name] = wanted
        if past_key_values is not None and not self.model.layers[0].self_attn.geometry.has_rope_cache:
            tokens = input_ids if inputs_embeds is None else inputs_embeds
            placed = position_ids, attention_mask, tokens.shape[1], tokens.device
            position_ids = cache_positions(past_key_values, *placed)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            **others,
        }


class MHA2MLAModel(MHA2MLAPreTrainedModel):
    """The source's base model with :class:`MLAAttention` in every layer, as ``model``."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^lm_head\.", r"^score\."]

    def __init__(self, config: MHA2MLAConfig) -> None:
        super().__init__(config)
        self.model = self._build_base_model()
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids: Tensor | None = None, **options: Any) -> BaseModelOutputWithPast:
        """Runs the source's base model: ``attention_mask``, ``position_ids``, ``past_key_values``, ``inputs_embeds``, …

        Returns:
            ``last_hidden_state`` [B, S, hidden] after the final norm, and what else was asked for.

        Raises:
            ValueError: as :meth:`MHA2MLAForCausalLM.forward`.
        """
        inputs = self._base_inputs(input_ids, **options)
        return _with_attentions(self.model(**inputs), inputs)


class MHA2MLAForSequenceClassification(GenericForSequenceClassification, MHA2MLAPreTrainedModel):
    """A class for the last token of each sequence that is no padding: ``score`` [num_labels, hidden] on the base model,
    whose losses and arguments are those of transformers' own classes."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^lm_head\."]

    def __init__(self, config: MHA2MLAConfig) -> None:
        MHA2MLAPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self._build_base_model()
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
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
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Scores [B, num_labels] as ``logits``; arguments and errors as of transformers' own classes, and
        ``position_ids`` as :meth:`MHA2MLAForCausalLM.forward` takes them."""
        given = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        inputs = self._base_inputs(*given, **kwargs)
        return _with_attentions(super().forward(labels=labels, return_dict=True, **inputs), inputs)


class MHA2MLAForCausalLM(MHA2MLAPreTrainedModel, GenerationMixin):
    """Causal language model of a converted checkpoint.

    ``model`` is an instance of the source's own base class (``LlamaModel``, …) in which every ``layers[i].self_attn``
    is an :class:`MLAAttention`; names in the state dict differ from the source's below ``self_attn`` only.

    Raises:
        ValueError: the source's architecture has no ``layers[i].self_attn`` to replace.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MHA2MLAConfig) -> None:
        super().__init__(config)
        self.model = self._build_base_model()
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
        output_attentions: bool | None = None,
        output_hidden_states: bool | list[int] | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Logits of the next token, as every causal language model of transformers.

        Args:
            input_ids: [B, S].
            attention_mask: [B, cached + S] with 0 on tokens that nothing sees, or what the source's model takes.
            position_ids: [B or 1, S]; default: count on from the cache. Over a cache of a model with
                ``config.has_rope_cache`` False they must count on from each row's first visible token, one by one.
            past_key_values: tokens before these; with ``use_cache`` and None a growing cache is made.
            inputs_embeds: [B, S, hidden] instead of ``input_ids``.
            labels: [B, S], -100 where there is no loss.
            use_cache: default the config's; while training, False.
            output_attentions: also ``attentions``, per layer [B, H, S, T], which the expanded form with eager attention
                computes; default the config's.
            output_hidden_states: also ``hidden_states``, before each layer and after the last norm [B, S, hidden];
                default the config's.
            output_router_logits: of a mixture of experts, also ``router_logits`` and ``aux_loss``, which ``loss`` then
                has in it as the source's has; default the config's.
            logits_to_keep: that many last positions, or their indices; 0 means all.
            kwargs: to the base model and its layers, and to the loss (``num_items_in_batch``).

        Returns:
            ``logits`` [B, S or logits_to_keep, vocabulary], ``past_key_values``, and ``loss`` if there are ``labels``.

        Raises:
            ValueError: not exactly one of ``input_ids`` and ``inputs_embeds``; ``position_ids`` that a cache of latents
                alone cannot serve; ``output_attentions`` without eager attention.
            RuntimeError: such ``position_ids`` where the host may not look (one token at a time on a GPU, compiled
                steps, CUDA graphs). By an assertion on the device, so that on a GPU it shows at the next
                synchronisation.
        """
        inputs = self._base_inputs(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        past_key_values, attentions = inputs["past_key_values"], inputs.get("mla_attentions")
        batch, new_tokens = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        counted = None
        if inputs.get("output_router_logits") and is_padding_mask(attention_mask):
            cached = 0 if past_key_values is None else past_key_values.get_seq_length()
            columns = torch.arange(new_tokens, device=attention_mask.device) + cached
            counted = attention_mask.expand(batch, -1)[:, columns]
        outputs, step = self._run_base_model(**inputs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.lm_head(outputs.last_hidden_state[:, kept]), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        results = {
            "logits": logits,
            "past_key_values": outputs.past_key_values,
            "hidden_states": outputs.hidden_states,
            "attentions": None if attentions is None else tuple(attentions.values()),
        }
        made, routers = CausalLMOutputWithPast, getattr(outputs, "router_logits", None)
        if routers is not None:
            balance, made = load_balancing_loss(self.model.config, routers, counted), MoeCausalLMOutputWithPast
            results |= {"router_logits": routers, "aux_loss": balance}
            if loss is not None:
                loss = loss + self.model.config.router_aux_loss_coef * balance.to(logits.device)
        if step is not None:  # whose tokens are counted when nothing can fail any more
            past_key_values.advance(new_tokens)
        return made(loss=loss, **results)

    def _run_base_model(self, **inputs: Any) -> tuple[BaseModelOutputWithPast, Any]:
        """Outputs of the base model; and what has put tokens into the cache that are to be counted, or None."""
        return self.model(**inputs), None

    def create_masks_for_generate(self, config: PreTrainedConfig, **inputs: Any) -> Any:
        """``generate``'s masks over a static cache: those of the source's architecture."""
        return create_masks_for_generate(config=self.model.config, **inputs)


def _with_attentions(outputs: ModelOutput, inputs: dict[str, Any]) -> ModelOutput:
    """``outputs`` with the attention weights that the layers left in ``inputs["mla_attentions"]``, if there are any."""
    if (attentions := inputs.get("mla_attentions")) is None:
        return outputs
    return type(outputs)(**{**outputs, "attentions": tuple(attentions.values())})


def load_balancing_loss(source: PreTrainedConfig, routers: tuple[Tensor, ...], counted: Tensor | None) -> Tensor:
    """The auxiliary loss [] of the source's family, which keeps tokens spread over experts.

    Args:
        routers: router logits per layer with experts, [B * S, experts].
        counted: [B, S], 0 on tokens that do not count; None: all count.

    Raises:
        ValueError: the family has routers and no such loss.
    """
    family = MODEL_FOR_CAUSAL_LM_MAPPING[type(source)]
    function = getattr(sys.modules[family.__module__], "load_balancing_loss_func", None)
    if function is None:
        raise ValueError(
            f"output_router_logits is True; expected False: {source.model_type} has no load_balancing_loss_func"
        )
    experts = source.num_experts if hasattr(source, "num_experts") else source.num_local_experts
    return function(routers, experts, source.num_experts_per_tok, counted)


def rotary_cos_sin(position_ids: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of ``position * inv_freq``, times ``scaling``.

    Args:
        position_ids: [B or 1, S] integers.
        inv_freq: [G, d_r / 2] float32, radians per token.
        scaling: attention factor of YaRN and longrope, else 1. A frequency of zero stands for dims that the source does
            not rotate (part of a head, or a layer without RoPE), and it leaves those alone.
        dtype: of the result. Angles are float32 in any case: bfloat16 cannot count positions beyond 256.

    Returns:
        Two tensors [B or 1, S, G, d_r / 2].
    """
    angle = position_ids[..., None, None].to(torch.float32) * inv_freq.to(torch.float32)
    cos, sin = angle.cos(), angle.sin()
    if scaling != 1.0:
        factor = torch.where(inv_freq == 0, torch.ones_like(inv_freq), scaling)
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (j, j + d_r / 2) of x [..., d_r], the halves layout of Llama; cos and sin [..., d_r / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _decode_latent(latent: Tensor, decoder: Tensor) -> Tensor:
    """latent [B, T, d_c] through decoder [h_up, width, d_c]: [B, h_up, T, width]."""
    return F.linear(latent, decoder.flatten(0, 1)).unflatten(-1, decoder.shape[:2]).transpose(1, 2)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, n, T, d] -> [B, heads, T, d], every head ``heads / n`` times side by side; a view where nothing repeats."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def cache_positions(
    cache: Cache, position_ids: Tensor | None, attention_mask: Any, new_tokens: int, device: torch.device
) -> Tensor:
    """Rotary positions [1, S] int64 of new tokens over a cache without rotary keys (``config.has_rope_cache`` False):
    their places in it, so call before they are appended.

    A row of such a cache is rotated, when it is read, by its place; so are queries. Scores depend on distances alone,
    so that is right for every numbering of tokens that counts on one by one, padding included or not, and wrong for
    every other one (gaps behind right padding, several tokens at one position): those are refused. The host looks once
    a prefill; the device asserts it of a single token on an accelerator, a captured CUDA graph and a compiled step.

    Args:
        position_ids: [B or 1, S] that the caller gave, or None.
        attention_mask: [B, at least cached + S], or [B, 1, S, T], or None; other masks are not looked into.

    Raises:
        ValueError: the ``position_ids`` of tokens that are seen are neither their places, nor these less the first
            place that is seen; under a 4-D mask, not their places less any one number. Where the host may not look, a
            RuntimeError by the device.
    """
    place = torch.arange(new_tokens, device=device) + cache.get_seq_length()
    if position_ids is not None:
        fit = _are_places(position_ids.to(device), attention_mask, place, cache, new_tokens)
        if not host_may_look(position_ids, new_tokens):
            torch._assert_async(fit, REFUSED_POSITIONS)
        elif not fit:
            raise ValueError(f"{REFUSED_POSITIONS}; they are {position_ids.tolist()!s:.200}")
    return place[None]


def _are_places(position_ids: Tensor, attention_mask: Any, place: Tensor, cache: Cache, new_tokens: int) -> Tensor:
    """[] bool, on the device of ``place`` [S]."""
    ahead = position_ids - place
    if isinstance(attention_mask, dict):  # by layer type, of a static cache
        attention_mask = attention_mask.get("full_attention")
    if attention_mask is None:
        return (ahead == 0).all()
    if is_padding_mask(attention_mask):
        shown = attention_mask.to(place.device).bool()
        # Clamped: a mask that is too short is the base model's to refuse, and no out-of-bounds read on a device.
        hidden = ~shown[:, place.clamp(max=shown.shape[1] - 1)]
        first = first_shown(shown)[:, None]
        if new_tokens == 1:  # asked in every step: no sum over tokens of a row, and the two answers as one product
            return ((ahead * (ahead + first) == 0) | hidden).all()
        return (((ahead == 0) | hidden).all(-1) | ((ahead == -first) | hidden).all(-1)).all()
    if not isinstance(attention_mask, Tensor):
        return torch.ones((), dtype=torch.bool, device=place.device)
    # A token that is seen sees itself.
    _, start = cache.get_mask_sizes(new_tokens, 0)
    own = attention_mask.to(place.device)[:, 0, torch.arange(new_tokens, device=place.device), place - start]
    hidden = ~own if own.dtype == torch.bool else own != 0
    ahead = ahead.expand(hidden.shape[0], -1)
    bound = torch.iinfo(ahead.dtype).max
    return (ahead.masked_fill(hidden, -bound).amax(-1) <= ahead.masked_fill(hidden, bound).amin(-1)).all()


def is_padding_mask(attention_mask: Any) -> bool:
    """True for a mask [B, T], which shows or hides each token."""
    return isinstance(attention_mask, Tensor) and attention_mask.dim() == 2


def first_shown(shown: Tensor) -> Tensor:
    """[...] int64, the first True of ``shown`` [..., T]; 0 where there is none."""
    # Inductor of torch 2.11 cannot view bools that it computes as bytes; elsewhere that spares a copy.
    numbers = shown.to(torch.uint8) if torch.compiler.is_compiling() else shown.view(torch.uint8)
    return numbers.argmax(dim=-1)


def host_may_look(attention_mask: Tensor, query_length: int) -> bool:
    """True where a step of ``query_length`` new tokens may wait for the mask's values."""
    if is_recorded(attention_mask.device):
        return False
    return query_length > 1 or attention_mask.device.type == "cpu"


def is_recorded(device: torch.device) -> bool:
    """True while code is compiled or captured, to be replayed without the host."""
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def under_window(
    attention_mask: Any, window: int, sinks: int, query: Tensor, tokens: int, implementation: str
) -> Tensor:
    """A mask of the expanded form under a user's window: what ``attention_mask`` shows of the last ``window`` tokens up
    to each query's own, and of the first ``sinks`` that it shows the query.

    A query's own token is the last one that its row of the mask shows.

    Args:
        attention_mask: [B or 1, 1, S, T] of booleans, or added to scores; None: as SDPA is causal, from the first token
            on (tokens behind are a static cache's room), a single query from the last.
        query: [B, H, S, d]; shape, dtype and device are looked at.
        tokens: T.

    Returns:
        [B or 1, 1, S, T], of booleans; added to scores where the given one is, or the implementation expects that.

    Raises:
        ValueError: the implementation takes other masks, and knows no sinks.
    """
    if any(name in implementation for name in ("flash", "flex")):
        raise ValueError(
            f"attn_implementation is {implementation!r} with attention_window={window} and num_sink_tokens={sinks};"
            " expected 'sdpa' or 'eager' where the expanded form attends"
        )
    token, additive = torch.arange(tokens, device=query.device), None
    if attention_mask is None:
        length = query.shape[2]
        first = 0 if length > 1 else tokens - 1
        shown = (token <= torch.arange(first, first + length, device=query.device)[:, None])[None, None]
        additive = query.new_zeros(shown.shape) if implementation == "eager" else None
    elif attention_mask.dtype == torch.bool:
        shown = attention_mask
    else:
        shown, additive = attention_mask > _HIDDEN, attention_mask
    own, first = (shown * token).amax(-1, keepdim=True), first_shown(shown)[..., None]
    seen = shown & ((token > own - window) | (token < first + sinks))
    return seen if additive is None else additive.masked_fill(~seen, torch.finfo(additive.dtype).min)
