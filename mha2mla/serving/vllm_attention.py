"""Latent attention as vLLM's engine sees it: a backend, its metadata, and the layer that owns pages and weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from mha2mla.kernels import MAX_DECODE_QUERY_LENGTH
from mha2mla.modeling.backends import ATTENTION_BACKENDS, rounded_latents
from mha2mla.modeling.batch import token_places
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.families import FAMILIES
from mha2mla.modeling.tensor_parallel import HeadShard
from mha2mla.serving.paged_step import SERVED_BY, EngineStep, EngineSteps, cache_views, row_of, warm_up


@dataclass
class LatentMetadata(AttentionMetadata):
    """A step, and what runs the layers of one builder over it."""

    step: EngineStep
    steps: EngineSteps


class LatentMetadataBuilder(AttentionMetadataBuilder[LatentMetadata]):
    """Plans of a step, once for all layers with rows of one width and dtype."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Graphs of decode steps; not with drafts longer than the decode op takes: launches of the mixed op depend on
        lengths that only the host knows."""
        if 1 + vllm_config.num_speculative_tokens > MAX_DECODE_QUERY_LENGTH:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        context = vllm_config.compilation_config.static_forward_context
        self._layers = [context[name] for name in layer_names]
        self._longest_draft = 1 + vllm_config.num_speculative_tokens
        self._steps = EngineSteps(
            [layer.constants for layer in self._layers],
            self._layers[0].impl.backend,
            vllm_config.model_config.dtype,
            max(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.scheduler_config.max_num_seqs),
            device,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LatentMetadata:
        common = common_attn_metadata
        tokens = common.num_actual_tokens
        bounds = pairwise(common.query_start_loc_cpu[: common.num_reqs + 1].tolist())
        query_lengths = [stop - start for start, stop in bounds]
        totals = common.seq_lens_cpu_upper_bound
        # Refused drafts are in the bound, which is exact for a part of a prompt. The decode op reads lengths on the
        # device; the mixed op, for longer drafts, needs exact ones on the host.
        drafts = range(MAX_DECODE_QUERY_LENGTH + 1, self._longest_draft + 1)
        if totals is None or (drafts and any(each in drafts for each in query_lengths)):
            totals = common.seq_lens.cpu()
        totals = totals[: common.num_reqs].tolist()
        step = self._steps.step(
            self._layers[0].kv_cache,
            query_lengths,
            totals,
            self._positions(common)[:tokens],
            common.slot_mapping[:tokens],
            common.block_table_tensor[: common.num_reqs],
            common.seq_lens[: common.num_reqs],
        )
        return LatentMetadata(step, self._steps)

    def _positions(self, common: CommonAttentionMetadata) -> Tensor:
        if common.positions is not None:
            return common.positions
        cached, table = common.compute_num_computed_tokens(), common.block_table_tensor
        return token_places(common.query_start_loc, cached, table, common.num_actual_tokens, PAGE_SIZE)[0]


class LatentBackend(AttentionBackend):
    """Pages of 64 rows as of :mod:`mha2mla.serving.paged_step`: elements of the model's dtype, or bytes."""

    @staticmethod
    def get_name() -> str:
        return "MHA2MLA"

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        return LatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return [PAGE_SIZE]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


class LatentImpl(AttentionImplBase[LatentMetadata]):
    """Runs an attention backend of this package over vLLM's pages."""

    def __init__(self, layer: MLAParallelAttention, warm_up_length: int | None) -> None:
        self._warm_up_length = warm_up_length  # of the longest sequence; None where there is nothing to warm up
        geometry = layer.constants.geometry
        self.num_heads, self.head_size = geometry.num_attention_heads, layer.row.width
        self.num_kv_heads, self.scale = 1, layer.constants.softmax_scale
        self.backend = ATTENTION_BACKENDS.get(SERVED_BY)

    def forward(
        self,
        layer: MLAParallelAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: LatentMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes ``output`` [N, H, d_v].

        Args:
            query: [N, H, d_n + d_r], before RoPE.
            key: [N, d_c], latents.
            value: [N, G, d_r] rotary keys before RoPE; anything where the cache has none, and where latents are codes.
            kv_cache: [P, page, row].
            attn_metadata: None while vLLM measures memory, with the largest step's tokens: the first of layers that are
                alike warms up then, once, and the output is zero.
        """
        if attn_metadata is None:
            if self._warm_up_length is not None:
                tensors = self._tensors(layer, query, key, value)
                warm_up(tensors, self.backend, layer.constants, self._warm_up_length)
                self._warm_up_length = None
            return output.zero_()
        if layer.views is None or layer.kv_cache is not kv_cache:  # the same from step to step
            layer.views = cache_views(kv_cache, layer.constants.geometry, query.dtype)
        tokens, out = attn_metadata.step.batch.positions.shape[0], output
        if tokens < query.shape[0]:
            query, key, value, out = query[:tokens], key[:tokens], value[:tokens], output[:tokens]
        tensors = self._tensors(layer, query, key, value)
        attn_metadata.steps.run(attn_metadata.step, layer.constants, tensors, layer.views, out)
        return output

    @staticmethod
    def _tensors(layer: MLAParallelAttention, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor | None]:
        geometry = layer.constants.geometry
        q_nope, q_pe = query.split((geometry.qk_nope_head_dim, geometry.qk_rope_head_dim), dim=-1)
        tensors = {
            "q_nope": q_nope,
            "q_pe": q_pe,
            "latent": key,
            "k_pe": value if geometry.has_rope_cache else None,
            "k_up": layer.k_b_proj if geometry.qk_nope_head_dim else None,
            "v_up": layer.v_b_proj,
            "inv_freq": layer.inv_freq,
        }
        if geometry.has_key_codes or not geometry.has_rope_cache:
            # As plain tensors: Python looks at every access to one of vLLM's parameters.
            of_keys = layer.k_rope_proj.weight, layer.k_rope_proj.bias
            tensors["rope_weight"], tensors["rope_bias"] = (x.as_subclass(Tensor) for x in of_keys)
        if geometry.has_codes:
            tensors["latent_centers"] = layer.latent_centers
            if geometry.has_rope_cache:  # made of what codes give back; here, where no compiler fuses its rounding
                latent = rounded_latents(key, geometry, layer.latent_centers)
                tensors["k_pe"] = layer.project_keys(latent)
        return tensors


class MLAParallelAttention(nn.Module, AttentionLayerBase):
    """MLA of one layer: query heads split over ranks, the latent in each of them.

    The parameters are those of :class:`mha2mla.modeling.MLAAttention`, of which a rank holds
    :meth:`HeadShard.part`.

    Raises:
        ValueError: heads that the ranks cannot share, a cache dtype that is not served, or a geometry that no kernel
            serves, with the reason.
    """

    def __init__(
        self, config: MHA2MLAConfig, layer_idx: int, norm: type[nn.Module], vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.shard = shard = HeadShard.of(config.layer_geometry(layer_idx), rank, size)
        cached_geometry = HeadShard.of(config.cached_geometry(layer_idx), rank, size).geometry
        self.constants = replace(config.attention_constants()[layer_idx], geometry=cached_geometry)
        self.layer_name, self.num_heads = prefix, shard.geometry.num_attention_heads
        self.row = row_of(cached_geometry, vllm_config.model_config.dtype)
        self.kv_cache = torch.tensor([])
        context = vllm_config.compilation_config.static_forward_context
        alike = any(getattr(other, "constants", None) == self.constants for other in context.values())
        self.impl = LatentImpl(self, None if alike else vllm_config.model_config.max_model_len)
        _check_served(self.impl, cached_geometry, vllm_config)

        geometry, whole, heads = shard.geometry, shard.whole, shard.whole.num_attention_heads
        query_dim = geometry.qk_nope_head_dim + geometry.qk_rope_head_dim
        cached, hidden, head_dim = geometry.cache_numel_per_token, config.hidden_size, config.head_dim
        self.qk_norm, self.head_dim = config.qk_norm, head_dim
        if config.qk_norm:
            kv_width = whole.num_key_value_heads * head_dim
            model_type = config.source_config["model_type"]
            over_all = not FAMILIES[model_type].norm_per_head
            if over_all and size > 1:
                raise ValueError(
                    f"tensor_parallel_size is {size}; expected 1: {model_type} normalises the queries of all heads"
                    " together"
                )
            q_width, k_width = (heads * head_dim, kv_width) if over_all else (head_dim, head_dim)
            self.q_proj = _columns(hidden, heads * head_dim, config.attention_q_bias, f"{prefix}.q_proj")
            self.q_norm = norm(q_width, eps=config.rms_norm_eps)
            self.q_b_proj = _parameter(self.num_heads, query_dim, head_dim)
            self.k_proj = _replicated(hidden, kv_width, config.attention_kv_bias, f"{prefix}.k_proj")
            self.k_norm = norm(k_width, eps=config.rms_norm_eps)
            self.k_a_proj = _replicated(kv_width, cached, False, f"{prefix}.k_a_proj")
            self.v_a_proj = _replicated(hidden, geometry.kv_lora_rank, False, f"{prefix}.v_a_proj")
        else:
            self.q_proj = _columns(hidden, heads * query_dim, config.attention_q_bias, f"{prefix}.q_proj")
            self.kv_a_proj = _replicated(hidden, cached, config.attention_kv_bias, f"{prefix}.kv_a_proj")
        if not geometry.has_rope_cache:
            self.k_rope_proj = _replicated(
                geometry.kv_lora_rank, geometry.qk_rope_head_dim, True, f"{prefix}.k_rope_proj"
            )
        up = geometry.num_up_projection_heads
        if geometry.qk_nope_head_dim:
            self.k_b_proj = _parameter(up, geometry.qk_nope_head_dim, geometry.kv_lora_rank)
        self.v_b_proj = _parameter(up, geometry.v_head_dim, geometry.kv_lora_rank)
        self.o_proj = RowParallelLinear(
            heads * geometry.v_head_dim, hidden, bias=config.attention_o_bias, prefix=f"{prefix}.o_proj"
        )
        frequencies = torch.zeros(geometry.num_rope_heads, geometry.qk_rope_head_dim // 2, dtype=torch.float32)
        self.register_buffer("inv_freq", frequencies)
        if cached_geometry.has_codes:
            self.register_buffer("latent_centers", torch.zeros(2, geometry.kv_lora_rank))

        if prefix in context:
            raise ValueError(f"prefix is {prefix!r}; expected a name that no other layer has")
        context[prefix] = self

    @property
    def kv_cache(self) -> Tensor:
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, pages: Tensor) -> None:
        """Views of other pages are forgotten: they would keep memory that vLLM means to free."""
        self._kv_cache, self.views = pages, None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]; where tokens are, the step's metadata says."""
        geometry = self.shard.geometry
        if self.qk_norm:
            query, key = self.q_proj(hidden_states)[0], self.k_proj(hidden_states)[0]
            query = _normed(query, self.q_norm, self.head_dim).unflatten(-1, (-1, self.head_dim))
            query = torch.einsum("nhd,hed->nhe", query, self.q_b_proj)
            encoded = self.k_a_proj(_normed(key, self.k_norm, self.head_dim))[0]
        else:
            query, encoded = self.q_proj(hidden_states)[0], self.kv_a_proj(hidden_states)[0]
            query = query.unflatten(-1, (self.num_heads, -1))
        latent, k_pe = encoded.split((geometry.kv_lora_rank, geometry.rope_width), dim=-1)
        if self.qk_norm:
            latent = latent + self.v_a_proj(hidden_states)[0]
        value = latent
        if geometry.has_rope_cache:
            value = k_pe.unflatten(-1, (geometry.num_rope_heads, -1))
        elif self.constants.geometry.has_rope_cache and not self.constants.geometry.has_codes:
            value = self.project_keys(latent)
        output = query.new_empty(query.shape[0], self.num_heads, geometry.v_head_dim)
        torch.ops.vllm.unified_attention_with_output(query, latent, value, output, _encode_layer_name(self.layer_name))
        return self.o_proj(output.flatten(1))[0]

    def project_keys(self, latent: Tensor) -> Tensor:
        """Rotary keys [N, 1, d_r] before RoPE of latents [N, d_c]; those kept in 8 bits without their bias, which is
        added where they are read."""
        if self.constants.geometry.has_key_codes:
            return F.linear(latent, self.k_rope_proj.weight)[:, None]
        return self.k_rope_proj(latent)[0][:, None]

    def get_attn_backend(self) -> type[AttentionBackend]:
        return LatentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """Rows of the layer's own width and dtype. vLLM puts layers with different rows into one group with one block
        table, and gives each its own bytes: nothing is padded."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.row.width,
            head_size_v=0,
            dtype=self.row.dtype,
        )


def _columns(size: int, out: int, bias: bool, prefix: str) -> ColumnParallelLinear:
    return ColumnParallelLinear(size, out, bias=bias, prefix=prefix)


def _replicated(size: int, out: int, bias: bool, prefix: str) -> ReplicatedLinear:
    return ReplicatedLinear(size, out, bias=bias, prefix=prefix)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def _normed(projected: Tensor, norm: nn.Module, head_dim: int) -> Tensor:
    """[N, heads * d_h] after a norm over each head, or over all of them."""
    if norm.weight.shape[0] == projected.shape[-1]:
        return norm(projected)
    return norm(projected.unflatten(-1, (-1, head_dim)).contiguous()).flatten(1)


def _check_served(impl: LatentImpl, geometry: Any, vllm_config: VllmConfig) -> None:
    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    own = str(dtype).removeprefix("torch.")
    if cache_dtype not in ("auto", own):
        raise ValueError(f"kv_cache_dtype is {cache_dtype!r}; expected 'auto' or {own!r}: codes are the checkpoint's")
    why = impl.backend.refusal(geometry, PAGE_SIZE, dtype, torch.device("cuda"))
    if why is not None:
        raise ValueError(f"no kernel serves {geometry}: {why}")
