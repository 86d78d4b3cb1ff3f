"""A converted checkpoint without the package that converted it: this file beside the weights, torch and transformers.

``mha2mla export --format remote-code`` puts it into a checkpoint as ``modeling_mha2mla.py``, where
``from_pretrained(folder, trust_remote_code=True)`` finds it. Attention is the definition, in the expanded form: keys
and values of all heads are made of the cached latents in every step. With the package installed and imported its own
classes are taken instead, with kernels and caches of their own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import can_return_tuple

SCHEMA_VERSION = 2
_PER_LAYER = ("num_rope_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "rope_attention_scaling")
# What the source's architecture is built with if the top level of the config says other than source_config.
_MIRRORED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "attention_dropout", "use_cache", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
    "sliding_window", "layer_types",
)  # fmt: skip


class MHA2MLAConfig(PreTrainedConfig):
    """The keys of a converted checkpoint's config.json, as they stand there; ``source_config`` is the source's own."""

    model_type = "mha2mla"
    has_no_defaults_at_init = True

    def __init__(self, source_config: dict[str, Any] | None = None, schema_version: int = 2, **keys: Any) -> None:
        if schema_version > SCHEMA_VERSION:
            raise ValueError(f"schema_version is {schema_version}; expected at most {SCHEMA_VERSION}")
        if (window := keys.get("attention_window")) is not None:
            raise ValueError(f"attention_window is {window}; expected None: only the package mha2mla has such windows")
        self.source_config, self.schema_version = source_config, schema_version
        super().__init__(**keys)

    def build_source_config(self) -> PreTrainedConfig:
        """A config of the source's own class, for the modules around the attention."""
        values = {name: value for name, value in self.source_config.items() if name != "model_type"}
        source = CONFIG_MAPPING[self.source_config["model_type"]](**values)
        for name in _MIRRORED:
            if hasattr(source, name) and hasattr(self, name):
                setattr(source, name, getattr(self, name))
        return source

    def of_layer(self, layer_idx: int) -> dict[str, Any]:
        """The keys of which there may be one per layer."""
        found = {name: getattr(self, name) for name in _PER_LAYER}
        return {name: value[layer_idx] if isinstance(value, list) else value for name, value in found.items()}

    def window(self, layer_idx: int) -> int | None:
        """Tokens that a query of the layer sees, itself included."""
        types = getattr(self, "layer_types", None)
        if types is not None and types[layer_idx] != "sliding_attention":
            return None
        return getattr(self, "sliding_window", None)


class MLAAttention(nn.Module):
    """Multi-head Latent Attention with G rotary keys per token, or one that is computed from the latent.

    Parameters are the tensors of the checkpoint below ``self_attn``.
    """

    def __init__(self, config: MHA2MLAConfig, layer_idx: int, source: nn.Module) -> None:
        super().__init__()
        own = config.of_layer(layer_idx)
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.heads, self.head_dim, self.v_head_dim = config.num_attention_heads, config.head_dim, config.v_head_dim
        self.rope_heads, self.latent_dim = own["num_rope_heads"], own["kv_lora_rank"]
        self.rope_dim, self.nope_dim = own["qk_rope_head_dim"], own["qk_nope_head_dim"]
        self.rope_scaling, self.sliding_window = own["rope_attention_scaling"], config.window(layer_idx)
        self.from_latent = getattr(config, "rope_from_latent", False)
        self.num_key_value_groups, self.attention_dropout = 1, config.attention_dropout or 0.0
        hidden, kv_heads = config.hidden_size, config.num_key_value_heads
        cached = self.latent_dim + (0 if self.from_latent else self.rope_heads * self.rope_dim)
        query = self.nope_dim + self.rope_dim
        up = getattr(config, "num_up_projection_heads", None) or kv_heads
        if config.qk_norm:
            self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=config.attention_q_bias)
            self.q_norm, self.k_norm = source.q_norm, source.k_norm
            self.q_b_proj = nn.Parameter(torch.empty(self.heads, query, self.head_dim))
            self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.attention_kv_bias)
            self.k_a_proj = nn.Linear(kv_heads * self.head_dim, cached, bias=False)
            self.v_a_proj = nn.Linear(hidden, self.latent_dim, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, self.heads * query, bias=config.attention_q_bias)
            self.kv_a_proj = nn.Linear(hidden, cached, bias=config.attention_kv_bias)
        if self.from_latent:
            self.k_rope_proj = nn.Linear(self.latent_dim, self.rope_dim)
        if self.nope_dim:
            self.k_b_proj = nn.Parameter(torch.empty(up, self.nope_dim, self.latent_dim))
        self.v_b_proj = nn.Parameter(torch.empty(up, self.v_head_dim, self.latent_dim))
        self.o_proj = nn.Linear(self.heads * self.v_head_dim, hidden, bias=config.attention_o_bias)
        frequencies = torch.empty(self.rope_heads, self.rope_dim // 2, dtype=torch.float32)
        self.register_buffer("inv_freq", frequencies)

    def _apply(self, fn: Any, recurse: bool = True) -> MLAAttention:
        """Moves and casts as any module, but ``inv_freq`` stays float32: rounded, it would be off by whole turns."""
        inv_freq = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = inv_freq.to(self.inv_freq.device)
        return self

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        mla_attentions: list[Tensor | None] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, S, hidden] -> [B, S, hidden], and weights [B, H, S, T], which ``mla_attentions`` gets too.

        The source's ``position_embeddings`` are ignored.
        """
        q_nope, q_pe, latent, k_pe = self._encoded(hidden_states)
        if self.from_latent and past_key_values is not None:
            # Rows of a cache have no position: keys and queries are turned by their places in it.
            seen = past_key_values.get_seq_length(self.layer_idx)
            position_ids = torch.arange(hidden_states.shape[1], device=latent.device)[None] + seen
        q_pe = self._turned(q_pe.unflatten(2, (self.rope_heads, -1)), position_ids).flatten(2, 3)
        if self.from_latent:
            latent, places = self._cached_latents(latent, past_key_values, position_ids)
            k_pe = self._turned(self.k_rope_proj(latent)[:, :, None], places)
        else:
            k_pe = self._turned(k_pe, position_ids)
            if past_key_values is not None:
                latent, k_pe = past_key_values.update(latent[:, None], k_pe.flatten(2)[:, None], self.layer_idx)
                latent, k_pe = latent[:, 0], k_pe[:, 0].unflatten(-1, (self.rope_heads, -1))
        query = torch.cat((q_nope, q_pe), -1).transpose(1, 2)
        key = self._of_all_heads(k_pe.transpose(1, 2))
        if self.nope_dim:
            key = torch.cat((self._of_all_heads(_decoded(latent, self.k_b_proj)), key), -1)
        value = self._of_all_heads(_decoded(latent, self.v_b_proj))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(
            self, query, key, value, attention_mask, dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.config.softmax_scale, sliding_window=self.sliding_window, **kwargs,
        )  # fmt: skip
        if mla_attentions is not None:
            mla_attentions.append(weights)
        return self.o_proj(out.flatten(2)), weights

    def _encoded(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q_nope [B, S, H, d_n], q_pe [B, S, H, d_r], c [B, S, d_c] and k_pe [B, S, G, d_r] or None, before RoPE."""
        if self.config.qk_norm:
            query = self._normed(self.q_proj(hidden_states), self.q_norm)
            query = torch.einsum("bshd,hed->bshe", query, self.q_b_proj)
            encoded = self.k_a_proj(self._normed(self.k_proj(hidden_states), self.k_norm).flatten(2))
        else:
            query = self.q_proj(hidden_states).unflatten(-1, (self.heads, -1))
            encoded = self.kv_a_proj(hidden_states)
        latent, k_pe = encoded[..., : self.latent_dim], encoded[..., self.latent_dim :]
        if self.config.qk_norm:
            latent = latent + self.v_a_proj(hidden_states)
        k_pe = None if self.from_latent else k_pe.unflatten(-1, (self.rope_heads, -1))
        return query[..., : self.nope_dim], query[..., self.nope_dim :], latent, k_pe

    def _normed(self, projected: Tensor, norm: nn.Module) -> Tensor:
        """[B, S, heads * d_h] -> [B, S, heads, d_h] after a norm over each head, or over all of them."""
        if norm.weight.shape[0] == self.head_dim:
            return norm(projected.unflatten(-1, (-1, self.head_dim)))
        return norm(projected).unflatten(-1, (-1, self.head_dim))

    def _cached_latents(self, latent: Tensor, cache: Any, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """All latents that there are, and their places; a cache holds them as halves, called keys and values."""
        if cache is None:
            return latent, position_ids
        tokens, first = cache.get_mask_sizes(latent.shape[1], self.layer_idx)
        halves = latent[:, None].tensor_split([-(-latent.shape[-1] // 2)], dim=-1)
        latent = torch.cat(cache.update(*halves, self.layer_idx), dim=-1)[:, 0]
        return latent, torch.arange(first, first + tokens, device=latent.device)[None]

    def _turned(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """x [B, S, G, …, d_r], pairs (j, j + d_r / 2) turned by position * inv_freq; a frequency of zero leaves alone,
        the factor of YaRN and longrope included."""
        frequency = self.inv_freq.to(x.device)
        angle = position_ids.to(x.device)[..., None, None].float() * frequency
        factor = torch.ones_like(frequency).masked_fill(frequency != 0, self.rope_scaling)
        cos, sin = ((turn * factor).to(x.dtype) for turn in (angle.cos(), angle.sin()))
        missing = x.dim() - cos.dim()
        cos, sin = (turn.reshape(*turn.shape[:3], *[1] * missing, turn.shape[-1]) for turn in (cos, sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _of_all_heads(self, x: Tensor) -> Tensor:
        """[B, n, T, d] -> [B, H, T, d]."""
        return x if x.shape[1] == self.heads else x.repeat_interleave(self.heads // x.shape[1], dim=1)


def _decoded(latent: Tensor, decoder: Tensor) -> Tensor:
    """latent [B, T, d_c] through decoder [h_up, width, d_c]: [B, h_up, T, width]."""
    return F.linear(latent, decoder.flatten(0, 1)).unflatten(-1, decoder.shape[:2]).transpose(1, 2)


class MHA2MLAForCausalLM(PreTrainedModel, GenerationMixin):
    """The source's own base model with :class:`MLAAttention` in every layer."""

    config_class = MHA2MLAConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["inv_freq"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: MHA2MLAConfig) -> None:
        super().__init__(config)
        source = config.build_source_config()
        source._attn_implementation = config._attn_implementation
        source.base_model_tp_plan = None  # the source's splits heads that are not there
        self.model = MODEL_MAPPING[type(source)](source)
        for layer_idx, layer in enumerate(self.model.layers):
            layer.self_attn = MLAAttention(config, layer_idx, layer.self_attn)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Logits of the next token, as every causal language model of transformers.

        Raises:
            ValueError: ``output_attentions`` without eager attention; ``position_ids`` that a
                cache of latents alone cannot serve.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if self._asked("output_attentions", output_attentions):
            if self.config._attn_implementation != "eager":
                raise ValueError(
                    f"output_attentions is True with attn_implementation {self.config._attn_implementation!r};"
                    " expected 'eager'"
                )
            kwargs["mla_attentions"] = []
        if self._asked("output_router_logits", output_router_logits):
            kwargs["output_router_logits"] = True
        if use_cache is None:
            use_cache = self.model.config.use_cache and not self.training
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        place = torch.arange(tokens.shape[1], device=tokens.device) + cached
        is_cached = use_cache or past_key_values is not None
        if is_cached and position_ids is not None and getattr(self.config, "rope_from_latent", False):
            _check_places(position_ids.to(place.device), place, attention_mask)
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.lm_head(outputs.last_hidden_state[:, kept]), None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.vocab_size, **kwargs)
        found = {
            "logits": logits,
            "past_key_values": outputs.past_key_values,
            "hidden_states": outputs.hidden_states,
            "attentions": tuple(kwargs["mla_attentions"]) if "mla_attentions" in kwargs else None,
        }
        routers = getattr(outputs, "router_logits", None)
        if routers is None:
            return CausalLMOutputWithPast(loss=loss, **found)
        shown = attention_mask[:, place] if attention_mask is not None and attention_mask.dim() == 2 else None
        balance = self._load_balancing_loss(routers, shown)
        if loss is not None:
            loss = loss + self.model.config.router_aux_loss_coef * balance.to(logits.device)
        return MoeCausalLMOutputWithPast(loss=loss, router_logits=routers, aux_loss=balance, **found)

    def _asked(self, name: str, value: bool | None) -> bool:
        """``value``; None: what the config says, or the source's."""
        found = (value, getattr(self.config, name, None), getattr(self.model.config, name, None))
        return bool(next((each for each in found if each is not None), False))

    def _load_balancing_loss(self, routers: tuple[Tensor, ...], shown: Tensor | None) -> Tensor:
        """The auxiliary loss [] of the source's family; ``shown`` [B, S] is 0 on tokens that do not count."""
        source = self.model.config
        family = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(source)].__module__]
        experts = source.num_experts if hasattr(source, "num_experts") else source.num_local_experts
        return family.load_balancing_loss_func(routers, experts, source.num_experts_per_tok, shown)

    def create_masks_for_generate(self, attention_mask: Tensor | None, **kwargs: Any) -> Tensor | None:
        """The mask stays [B, T] over static caches too: the base model makes its own from it."""
        return attention_mask


def _check_places(position_ids: Tensor, place: Tensor, attention_mask: Tensor | None) -> None:
    """Refuses ``position_ids`` [B or 1, S] of visible tokens that are neither their places [S] in the cache, nor these
    less each row's first visible place: rows of a cache of latents alone are turned by their places."""
    if attention_mask is None:
        shown = torch.ones(1, 1, dtype=torch.bool, device=place.device)
    elif attention_mask.dim() == 2:
        shown = attention_mask.to(place.device).bool()
    else:
        raise ValueError(
            f"attention_mask.shape is {tuple(attention_mask.shape)} with position_ids over a cache of latents alone;"
            " expected [B, T]"
        )
    ahead, first = position_ids - place, shown.int().argmax(-1, keepdim=True)
    hidden = ~shown[:, place.clamp(max=shown.shape[1] - 1)]
    fit = (((ahead == 0) | hidden).all(-1) | ((ahead == -first) | hidden).all(-1)).all()
    refusal = (
        "position_ids do not count on from each row's first visible token; a cache that keeps no rotary keys"
        " (rope_from_latent) expects that (a batch padded on the right: set tokenizer.padding_side = 'left')"
    )
    if place.device.type != "cpu" and place.shape[0] == 1:
        torch._assert_async(fit, refusal)  # a decode step waits for no value
    elif not fit:
        raise ValueError(refusal)
