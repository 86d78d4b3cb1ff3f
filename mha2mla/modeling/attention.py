"""Multi-head Latent Attention of one layer over the package's caches, on one rank's heads where they are split."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.distributed.utils import is_dtensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import LatentRope, compute_rotary_keys, rotary_keys, rotate_keys, skinny_linear
from mha2mla.modeling import modeling_mha2mla
from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.cache_layout import quantizer_of
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.decoder import affine_map, fused_weight, own_map, project
from mha2mla.modeling.step import AttentionStep
from mha2mla.modeling.tensor_parallel import HeadShard

_NO_HISTORY = (
    "past_key_values was a LatentCache that held tokens, and it keeps no gradients: those of this call would leave out "
    "what is cached; expected a DynamicCache or None"
)
_NO_TRAINING = (
    "tensor_parallel_size is more than 1, where gradients of what all ranks hold would be of one rank's heads alone; "
    "expected one device, or FSDP, for training"
)


class _RefusedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, why: str) -> Tensor:
        ctx.why = why
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        raise ValueError(ctx.why)


def refuse_gradients(value: Tensor, why: str = _NO_HISTORY) -> Tensor:
    """``value``, which seems to require a gradient; a backward pass that comes here raises ValueError, with ``why``."""
    with torch.enable_grad():
        return _RefusedGradient.apply(value, torch.empty(0, requires_grad=True), why)


class MLAAttention(modeling_mha2mla.MLAAttention):
    """:class:`~mha2mla.modeling.modeling_mha2mla.MLAAttention`, in both of its forms.

    ``forward`` takes also ``mla_step``: what the model's forward pass decided for a LatentCache, whose tokens it counts
    afterwards, or for a ragged batch, whose N tokens come as [1, N, hidden]. Without it the layer runs the expanded
    form, differentiable. The absorbed form does not look at ``attention_mask``.
    """

    _project = staticmethod(project)

    def __init__(self, config: MHA2MLAConfig, layer_idx: int, source: nn.Module) -> None:
        super().__init__(config, layer_idx, source)
        self.shard: HeadShard | None = None  # this rank's heads, under tensor parallelism
        # Their weights are fused for decode.
        self.input_projections = ("q_proj", "k_proj", "v_a_proj") if config.qk_norm else ("q_proj", "kv_a_proj")

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
        self.geometry, self.rope_heads = self.shard.geometry, self.shard.rope_heads
        self._count_expanded_heads()

    def _own(self, name: str) -> Tensor:
        whole = getattr(self, name)
        if self.shard is None:
            return whole
        return whole.to_local() if is_dtensor(whole) else self.shard.part(name, whole)

    def _limits(self, cache: Cache | None) -> tuple[int | None, int]:
        if isinstance(cache, LatentCache):
            return cache.layers[self.layer_idx].constants.limits
        return super()._limits(cache)

    def _cached_latents(self, latent: Tensor, cache: Cache) -> Tensor:
        if not isinstance(cache, LatentCache):
            return super()._cached_latents(latent, cache)
        keys, geometry = latent[..., :0], cache.layers[self.layer_idx].constants.geometry
        if geometry.has_rope_cache:
            first = cache.get_seq_length(self.layer_idx)
            positions = torch.arange(latent.shape[1], device=latent.device) + first
            read = self._rounded(latent, geometry)
            if geometry.has_key_codes:
                rope = self._latent_rope(read)
                keys = rotary_keys(read, replace(rope, bias=torch.zeros_like(rope.bias)), positions[None])
            else:
                keys = self._rotary_keys(read, positions[None])[:, :, 0]
        if not geometry.has_codes:
            return cache.update(latent[:, None], keys[:, None], self.layer_idx)[0][:, 0]
        was_empty, codes = cache.layers[self.layer_idx].is_empty, {"latent_centers": self._centers}
        cached = cache.update(latent[:, None], keys[:, None], self.layer_idx, **codes)[0][:, 0]
        return cached + (latent - latent.detach()) if was_empty and torch.is_grad_enabled() else cached

    @property
    def _centers(self) -> Tensor:
        """[2, d_c] of a checkpoint of codes."""
        if (centers := getattr(self, "latent_centers", None)) is None:
            raise ValueError(
                f"latents are codes in layer {self.layer_idx} of a model that was loaded with latent_bits=16, without"
                " the centers of codes; expected it loaded with latent_bits below 16"
            )
        return centers

    def _read_latent(self, latent: Tensor, cache: Cache | None) -> Tensor:
        """Latents as codes of ``config.latent_bits`` give them back; a LatentCache quantises by itself."""
        if isinstance(cache, LatentCache):
            return latent
        bits, geometry = self.config.latent_bits, self.geometry
        if (bits[self.layer_idx] if isinstance(bits, list) else bits) != geometry.latent_bits:
            geometry = self.config.layer_geometry(self.layer_idx)  # the config was changed behind this module
        return self._rounded(latent, geometry)

    def _rounded(self, latent: Tensor, geometry: MLAGeometry) -> Tensor:
        """``latent`` [..., d_c] as its codes give it back, its gradient unchanged (straight-through); itself where
        latents are no codes."""
        if not geometry.has_codes:
            return latent
        rounded = quantizer_of(geometry).round(latent.detach(), self._centers)
        return rounded + (latent - latent.detach()) if torch.is_grad_enabled() else rounded

    def _latent_rope(self, like: Tensor) -> LatentRope:
        """Map and frequencies of computed rotary keys, in the dtype of the latents ``like``."""
        own = own_map(self.k_rope_proj) or affine_map(self.k_rope_proj, like)
        return LatentRope(*own, self.inv_freq[0], self.config.layer_rope_scaling(self.layer_idx))

    def _rotary_keys(self, latent: Tensor, positions: Tensor) -> Tensor:
        scaling = self.config.layer_rope_scaling(self.layer_idx)
        if (own := own_map(self.k_rope_proj)) is None:
            return rotate_keys(self.k_rope_proj(latent), self.inv_freq[0], scaling, positions)[:, :, None]
        rope = LatentRope(*own, self.inv_freq[0], scaling)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return rotary_keys(latent, rope, positions)[:, :, None]
        positions = positions.expand(latent.shape[:2]).flatten().int()
        return compute_rotary_keys(latent.flatten(0, 1), rope, positions).view(*latent.shape[:2], 1, -1)

    def _attend(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor,
        mla_step: AttentionStep | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """With a step: rotates and writes the new tokens, then attends, by the layer's backend or in the expanded form;
        [B, S, H, d_v], and attention weights as :meth:`_expanded`."""
        if mla_step is None:
            out, weights = super()._attend(hidden_states, attention_mask, past_key_values, position_ids, **kwargs)
            if self.shard is not None and torch.is_grad_enabled():
                out = refuse_gradients(out, _NO_TRAINING)
            return out, weights
        layer = mla_step.layers[self.layer_idx]
        q_nope, q_pe, latent, k_pe = self._encoded(hidden_states)
        geometry = layer.constants.geometry
        has_codes = geometry.has_codes
        own = getattr if self.shard is None else MLAAttention._own
        tensors = {
            "q_nope": q_nope.flatten(0, 1),
            "q_pe": q_pe.flatten(0, 1),
            "latent": latent.flatten(0, 1),
            "k_pe": None if k_pe is None else k_pe.flatten(0, 1),
            "k_up": own(self, "k_b_proj") if self.geometry.qk_nope_head_dim else None,
            "v_up": own(self, "v_b_proj"),
        }
        if geometry.has_key_codes or not geometry.has_rope_cache:
            rope = own_map(self.k_rope_proj) or affine_map(self.k_rope_proj, latent)
            tensors["rope_weight"], tensors["rope_bias"] = rope
        if geometry.has_key_codes:  # without the bias, which is added where keys are read
            is_fused = latent.is_cuda and fused_weight(latent, (self.k_rope_proj,)) is not None
            product = skinny_linear if is_fused else F.linear
            tensors["k_pe"] = product(tensors["latent"], tensors["rope_weight"])[:, None]
        elif geometry.has_rope_cache and k_pe is None:
            # One product: torch adds the bias of [B, S, d_c] whose rows lie apart by another kernel. Made of what codes
            # give back, so that kept keys are those that would be computed when they are read.
            read = self._rounded(tensors["latent"], geometry)
            tensors["k_pe"] = self._project(read, self.k_rope_proj)[0][:, None]
        device, no_autocast = hidden_states.device.type, nullcontext()
        if torch.is_autocast_enabled(device):
            # Attention has the dtype of the cache, so autocast ends with the projections.
            no_autocast, dtype = torch.autocast(device, enabled=False), layer.dtype
            tensors = {name: tensor if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()}
        with no_autocast:
            buffers = {"inv_freq": own(self, "inv_freq"), "latent_centers": self._centers if has_codes else None}
            rotated, out = mla_step.run(self.layer_idx, {**tensors, **buffers})
        if out is not None:
            return out.unflatten(0, hidden_states.shape[:2]), None
        rope = self._latent_rope(latent) if geometry.has_key_codes else None
        cached, k_pe = layer.tokens_with(hidden_states.shape[1], buffers["latent_centers"], rope)
        latent = latent if layer.is_empty and not has_codes else cached
        if k_pe is None:
            k_pe = self._rotary_keys(latent, torch.arange(latent.shape[1], device=latent.device)[None])
        q_pe = rotated["q_pe"].view_as(q_pe)
        return self._expanded(q_nope, q_pe, latent, k_pe, attention_mask, layer.constants.limits, **kwargs)
