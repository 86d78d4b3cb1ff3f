"""Multi-head Latent Attention of one layer: its parameters, and both of its forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.distributed.utils import is_dtensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from mha2mla.kernels import LatentRope, rotary_keys, rotate_keys
from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.fused_projections import affine_map, own_map, project
from mha2mla.modeling.outputs import refuse_gradients
from mha2mla.modeling.rope import apply_rotary, rotary_cos_sin
from mha2mla.modeling.shards import HeadShard
from mha2mla.modeling.step import AttentionStep
from mha2mla.modeling.visibility import under_window

_NO_TRAINING = (
    "tensor_parallel_size is more than 1, where gradients of what all ranks hold would be of one rank's heads alone; "
    "expected one device, or FSDP, for training"
)


class MLAAttention(nn.Module):
    """MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1) with G rotary keys per token and a table of frequencies.

    Without ``config.has_rope_cache`` only the latent c is cached, and the one rotary key is computed from it when it is
    read: ``k_pe[t] = m R(t) (W_KR c[t] + b_KR)``, m the factor of ``config.layer_rope_scaling``. Cached rows then
    carry no position, and t is a token's place in its cache row; without a cache, its ``position_ids``.

    With H query heads, h_up heads that the latent expands to, and the widths of :class:`mha2mla.geometry.MLAGeometry`::

        score[h, t] = softmax_scale * (q_nope[h] . W_UK[up(h)] c[t] + q_pe[h] . k_pe[t, g(h)])
        out[h]      = sum_t softmax_t(score[h, t]) W_UV[up(h)] c[t]

    Args:
        config: of the model.
        layer_idx: which layer.
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
    * ``inv_freq`` [G, d_r / 2] float32, a buffer that stays float32 whatever the module is cast to.
    """

    def __init__(self, config: MHA2MLAConfig, layer_idx: int, source: nn.Module) -> None:
        super().__init__()
        geometry = config.layer_geometry(layer_idx)
        self.config, self.layer_idx, self.geometry = config, layer_idx, geometry
        self.shard: HeadShard | None = None  # what tensor parallelism left of the heads
        self.sliding_window = config.layer_sliding_window(layer_idx)
        self.attention_dropout = config.attention_dropout or 0.0
        self.is_causal = True
        self._count_expanded_heads()

        heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
        up_heads = geometry.num_up_projection_heads
        query_dim = geometry.qk_nope_head_dim + geometry.qk_rope_head_dim
        cached_dim = geometry.cache_numel_per_token
        hidden, head_dim = config.hidden_size, config.head_dim
        if config.qk_norm:
            self.q_proj = nn.Linear(hidden, heads * head_dim, bias=config.attention_q_bias)
            self.q_norm = source.q_norm
            self.q_b_proj = nn.Parameter(torch.empty(heads, query_dim, head_dim))
            self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=config.attention_kv_bias)
            self.k_norm = source.k_norm
            self.k_a_proj = nn.Linear(kv_heads * head_dim, cached_dim, bias=False)
            self.v_a_proj = nn.Linear(hidden, geometry.kv_lora_rank, bias=False)
            self.input_projections = ("q_proj", "k_proj", "v_a_proj")  # whose weights are fused for decode
        else:
            self.q_proj = nn.Linear(hidden, heads * query_dim, bias=config.attention_q_bias)
            self.kv_a_proj = nn.Linear(hidden, cached_dim, bias=config.attention_kv_bias)
            self.input_projections = ("q_proj", "kv_a_proj")
        if not geometry.has_rope_cache:
            self.k_rope_proj = nn.Linear(geometry.kv_lora_rank, geometry.qk_rope_head_dim)
        if geometry.qk_nope_head_dim:
            self.k_b_proj = nn.Parameter(torch.empty(up_heads, geometry.qk_nope_head_dim, geometry.kv_lora_rank))
        self.v_b_proj = nn.Parameter(torch.empty(up_heads, geometry.v_head_dim, geometry.kv_lora_rank))
        self.o_proj = nn.Linear(heads * geometry.v_head_dim, hidden, bias=config.attention_o_bias)
        self.register_buffer(
            "inv_freq", torch.empty(geometry.num_rope_heads, geometry.qk_rope_head_dim // 2, dtype=torch.float32)
        )

    def _count_expanded_heads(self) -> None:
        """Heads of the expanded keys: the fewest that both up-projections and rope heads divide."""
        geometry = self.geometry
        self.num_expanded_heads = math.lcm(geometry.num_up_projection_heads, geometry.num_rope_heads)
        self.num_key_value_groups = geometry.num_attention_heads // self.num_expanded_heads

    def split_heads(self, rank: int, size: int) -> None:
        """Makes it compute the part of the heads that is ``rank``'s among ``size`` (``tensor_parallel.py``).

        Raises:
            ValueError: the heads cannot be split so, or queries are normed over all of them together.
        """
        if self.config.qk_norm and self.q_norm.weight.shape[0] != self.config.head_dim:
            raise ValueError(
                f"tensor_parallel_size is {size} and q_norm is over {self.q_norm.weight.shape[0]} numbers, all heads;"
                f" expected a norm over each head of {self.config.head_dim}, or 1"
            )
        self.shard = HeadShard.of(self.geometry, rank, size)
        self.geometry = self.shard.geometry
        self._count_expanded_heads()

    def _own(self, name: str) -> Tensor:
        """A per-head map, or a table by rope head, of the heads that are computed here."""
        whole = getattr(self, name)
        if self.shard is None:
            return whole
        return whole.to_local() if is_dtensor(whole) else self.shard.part(name, whole)

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

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        mla_step: AttentionStep | None = None,
        mla_attentions: dict[int, Tensor | None] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of S new tokens over the cache and themselves.

        Args:
            hidden_states: [B, S, hidden].
            position_embeddings: the source architecture's; ignored, every layer has its own frequencies.
            attention_mask: 4-D mask of the expanded form; the absorbed form does not look at it.
            past_key_values: a :class:`~mha2mla.modeling.LatentCache`, or any transformers cache for the expanded form.
            position_ids: [B or 1, S]; without ``config.has_rope_cache`` and with a cache, places in it
                (``positions.places``).
            mla_step: what the model's forward pass decided for a LatentCache, whose tokens it counts afterwards, or for
                a ragged batch, whose N tokens come as [1, N, hidden]; without it the layer runs the expanded form,
                differentiable.
            mla_attentions: gets the attention weights by layer.

        Returns:
            [B, S, hidden], and the attention weights [B, H, S, T] if the attention implementation gives them.

        Raises:
            ValueError: ``position_ids`` is missing.
        """
        if position_ids is None:
            raise ValueError("position_ids is None; expected [B, S] token positions")
        if mla_step is not None:
            out, weights = self._over_pages(hidden_states, mla_step, attention_mask, **kwargs)
        else:
            out, weights = self._differentiable(hidden_states, attention_mask, past_key_values, position_ids, **kwargs)
            if self.shard is not None and torch.is_grad_enabled():
                out = refuse_gradients(out, _NO_TRAINING)
        if mla_attentions is not None:
            mla_attentions[self.layer_idx] = weights
        return project(out.flatten(2), (self.o_proj,))[0], weights

    def _differentiable(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The expanded form over any cache, or none: as :meth:`_expanded`."""
        position_ids = position_ids.to(hidden_states.device)
        limits = self.config.layer_attention_window(self.layer_idx)
        if isinstance(past_key_values, LatentCache):
            limits = past_key_values.constants[self.layer_idx].limits
        scaling = self.config.layer_rope_scaling(self.layer_idx)
        turn = rotary_cos_sin(position_ids, self._own("inv_freq"), scaling, hidden_states.dtype)
        q_nope, q_pe, latent, k_pe = self._encoded(hidden_states)
        q_pe = apply_rotary(q_pe.unflatten(2, (self.geometry.num_rope_heads, -1)), *turn).flatten(2, 3)
        if k_pe is None:
            if past_key_values is not None:
                # Which tokens update() returns, by transformers' own contract for masks.
                tokens, first = past_key_values.get_mask_sizes(hidden_states.shape[1], self.layer_idx)
                position_ids = torch.arange(first, first + tokens, device=latent.device)[None]
                # Stock caches want keys and values: halves of the latent, since some cannot hold rows of no width.
                keys = latent.shape[-1] if isinstance(past_key_values, LatentCache) else -(-latent.shape[-1] // 2)
                halves = latent[:, None].tensor_split([keys], dim=-1)
                keys, values = past_key_values.update(*halves, self.layer_idx)
                latent = (torch.cat((keys, values), dim=-1) if values.shape[-1] else keys)[:, 0]
            k_pe = self._rotary_keys(latent, position_ids)
            return self._expanded(q_nope, q_pe, latent, k_pe, attention_mask, limits, **kwargs)
        k_pe = apply_rotary(k_pe, *turn)
        if past_key_values is not None:
            # One "head" each, and k_pe flattened: StaticLayer wants keys and values with as many heads.
            latent, k_pe = past_key_values.update(latent[:, None], k_pe.flatten(2)[:, None], self.layer_idx)
            latent, k_pe = latent[:, 0], k_pe[:, 0].unflatten(-1, (self.geometry.num_rope_heads, -1))
        return self._expanded(q_nope, q_pe, latent, k_pe, attention_mask, limits, **kwargs)

    def _over_pages(
        self, hidden_states: Tensor, step: AttentionStep, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Rotates and writes the new tokens, then attends, by the layer's backend or in the expanded form.

        Returns:
            [B, S, H, d_v], and attention weights as :meth:`_expanded`.
        """
        q_nope, q_pe, latent, k_pe = self._encoded(hidden_states)
        tensors = {
            "q_nope": q_nope.flatten(0, 1),
            "q_pe": q_pe.flatten(0, 1),
            "latent": latent.flatten(0, 1),
            "k_pe": None if k_pe is None else k_pe.flatten(0, 1),
            "k_up": self._own("k_b_proj") if self.geometry.qk_nope_head_dim else None,
            "v_up": self._own("v_b_proj"),
        }
        if not self.geometry.has_rope_cache:
            tensors["rope_weight"], tensors["rope_bias"] = affine_map(self.k_rope_proj, latent)
        device, layer = hidden_states.device.type, step.layers[self.layer_idx]
        no_autocast = nullcontext()
        if torch.is_autocast_enabled(device):
            # What is cached has a dtype, so attention has it too: autocast ends where the projections do.
            no_autocast, dtype = torch.autocast(device, enabled=False), layer.dtype
            tensors = {name: tensor if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()}
        with no_autocast:
            rotated, out = step.run(self.layer_idx, {**tensors, "inv_freq": self._own("inv_freq")})
        if out is not None:
            return out.unflatten(0, hidden_states.shape[:2]), None
        cached, k_pe = layer.tokens_with(hidden_states.shape[1])
        latent = latent if layer.is_empty else cached
        if k_pe is None:
            k_pe = self._rotary_keys(latent, torch.arange(latent.shape[1], device=latent.device)[None])
        q_pe = rotated["q_pe"].view_as(q_pe)
        return self._expanded(q_nope, q_pe, latent, k_pe, attention_mask, layer.constants.limits, **kwargs)

    def _encoded(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q_nope [B, S, H, d_n] and q_pe [B, S, H, d_r] before RoPE, c [B, S, d_c], and k_pe [B, S, G, d_r] before
        RoPE, or None where it is computed from c."""
        geometry, whole = self.geometry, self.geometry if self.shard is None else self.shard.whole
        if self.config.qk_norm:
            query, key, value = project(hidden_states, (self.q_proj, self.k_proj, self.v_a_proj))
            query = torch.einsum("bshd,hed->bshe", self._normed(query, self.q_norm), self._own("q_b_proj"))
            encoded = self.k_a_proj(self._normed(key, self.k_norm).flatten(2))
        else:
            query, encoded = project(hidden_states, (self.q_proj, self.kv_a_proj))
            query = query.unflatten(-1, (geometry.num_attention_heads, -1))
        queries = query.split((geometry.qk_nope_head_dim, geometry.qk_rope_head_dim), dim=-1)
        if not whole.has_rope_cache:
            return *queries, encoded + value if self.config.qk_norm else encoded, None
        latent, k_pe = encoded.split((whole.kv_lora_rank, whole.rope_width), dim=-1)
        if self.config.qk_norm:
            latent = latent + value
        k_pe = k_pe.unflatten(-1, (whole.num_rope_heads, -1))
        return *queries, latent, k_pe if self.shard is None else k_pe[..., self.shard.rope_heads, :]

    def _rotary_keys(self, latent: Tensor, positions: Tensor) -> Tensor:
        """k_pe [B, T, 1, d_r] of c [B, T, d_c] at ``positions`` [B or 1, T], without ``config.has_rope_cache``."""
        scaling = self.config.layer_rope_scaling(self.layer_idx)
        if (own := own_map(self.k_rope_proj)) is None:
            return rotate_keys(self.k_rope_proj(latent), self.inv_freq[0], scaling, positions)[:, :, None]
        return rotary_keys(latent, LatentRope(*own, self.inv_freq[0], scaling), positions)[:, :, None]

    def _normed(self, projected: Tensor, norm: nn.Module) -> Tensor:
        """[B, S, heads * d_h] -> [B, S, heads, d_h] after a norm over each head, or over all of them."""
        heads = (-1, self.config.head_dim)
        if norm.weight.shape[0] == self.config.head_dim:
            return norm(projected.unflatten(-1, heads))
        return norm(projected).unflatten(-1, heads)

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
        geometry, heads = self.geometry, self.num_expanded_heads
        query = torch.cat((q_nope, q_pe), dim=-1).transpose(1, 2)
        key = _repeat_heads(k_pe.transpose(1, 2), heads)
        if geometry.qk_nope_head_dim:
            key = torch.cat((_repeat_heads(_decode_latent(latent, self._own("k_b_proj")), heads), key), dim=-1)
        value = _repeat_heads(_decode_latent(latent, self._own("v_b_proj")), heads)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        value_dim, implementation = value.shape[-1], self.config._attn_implementation
        if limits != (self.sliding_window, 0):
            attention_mask = under_window(attention_mask, *limits, query, key.shape[2], implementation)
        if _takes_one_head_dim(implementation) and query.shape[-1] != value_dim:
            width = max(query.shape[-1], value_dim)
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


def _decode_latent(latent: Tensor, decoder: Tensor) -> Tensor:
    """latent [B, T, d_c] through decoder [h_up, width, d_c]: [B, h_up, T, width]."""
    return F.linear(latent, decoder.flatten(0, 1)).unflatten(-1, decoder.shape[:2]).transpose(1, 2)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, n, T, d] -> [B, heads, T, d], every head ``heads / n`` times side by side; a view where nothing repeats."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _takes_one_head_dim(attn_implementation: str) -> bool:
    """Whether queries, keys and values must be equally wide. (transformers pads values, or else truncates them.)"""
    return attn_implementation == "flex_attention" or "flash" in attn_implementation
