"""Tensor parallelism by transformers' own plans (``from_pretrained(..., distributed_config=)`` under torchrun).

Query heads are split: ``q_proj`` by rows, ``o_proj`` by columns, the per-head maps by heads. Every rank caches the
whole latent, and of rotary keys those that its heads read. What is around the attention, the source's plan splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from mha2mla.geometry import MLAGeometry

STYLE = "mha2mla_heads"
# Rows of an encoder: the latent, which every rank holds, then the rotary keys, which are split.
_ENCODERS = ("kv_a_proj.weight", "kv_a_proj.bias", "k_a_proj.weight")
_BY_UP_HEAD = ("k_b_proj", "v_b_proj")


@dataclass(frozen=True)
class HeadShard:
    """The heads of a layer that one rank computes.

    Attributes:
        geometry: of the rank's part of it: the same latent, fewer heads.
        heads, rope_heads, up_heads: which of H, of G, and of the heads of W_UK and W_UV.
    """

    whole: MLAGeometry
    geometry: MLAGeometry
    heads: slice
    rope_heads: slice
    up_heads: slice

    @classmethod
    def of(cls, whole: MLAGeometry, rank: int, size: int) -> HeadShard:
        """The part of ``rank`` among ``size``: query heads are split, the latent is replicated; rotary keys and maps go
        with their query heads, to several ranks where fewer of them exist.

        Raises:
            ValueError: ``size`` does not divide the query heads, or would cut a group of them that shares a rotary key
                or a map where it is not cut into equal parts.
        """
        heads = whole.num_attention_heads
        if size < 1 or heads % size:
            raise ValueError(
                f"tensor_parallel_size is {size}; expected a divisor of the {heads} query heads of this checkpoint"
            )
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; expected 0 to {size - 1}")
        mine = heads // size
        rope = _groups("num_rope_heads", whole.num_rope_heads, heads, rank, size)
        up = _groups("num_up_projection_heads", whole.num_up_projection_heads, heads, rank, size)
        count = up.stop - up.start
        geometry = replace(
            whole,
            num_attention_heads=mine,
            num_rope_heads=rope.stop - rope.start,
            num_key_value_heads=count,
            num_up_projection_heads=count,
        )
        return cls(whole, geometry, slice(rank * mine, (rank + 1) * mine), rope, up)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """A rank's part of a checkpoint's tensor; ``q_proj`` and ``o_proj``, whose rows and columns are heads, are
        left to what splits linear layers.

        Args:
            name: below ``self_attn``.
        """
        geometry = self.whole
        if name in _ENCODERS and geometry.has_rope_cache:
            latent, rope = tensor.split((geometry.kv_lora_rank, geometry.rope_width))
            mine = rope.unflatten(0, (geometry.num_rope_heads, -1))[self.rope_heads].flatten(0, 1)
            return torch.cat((latent, mine))
        if name in _BY_UP_HEAD:
            return tensor[self.up_heads]
        if name == "q_b_proj":
            return tensor[self.heads]
        if name == "inv_freq":
            return tensor[self.rope_heads]
        return tensor


def ranks_of(config: Any) -> int:
    """Ranks that a model's heads are split over, by its config."""
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1


def _groups(name: str, count: int, heads: int, rank: int, size: int) -> slice:
    """The groups, among ``count``, of a rank's query heads."""
    mine, each = heads // size, heads // count
    if mine % each == 0:
        return slice(rank * mine // each, (rank + 1) * mine // each)
    if each % mine == 0:
        return slice(rank * mine // each, rank * mine // each + 1)
    raise ValueError(
        f"tensor_parallel_size is {size}, so that a rank has {mine} query heads; expected a multiple or a divisor of"
        f" the {each} that share one of {name}={count}"
    )


class HeadParallel(TensorParallelLayer):
    """Style of an :class:`~mha2mla.modeling.MLAAttention`: its per-head maps are split by heads, where there are
    enough of them, and it is told its own heads; linear layers below it have styles of their own."""

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Called for the bare parameters of the module, before weights are loaded."""
        whole = module._parameters[param]
        if len(whole) % mesh.size() == 0:  # else every rank holds all, and takes its own when it needs them
            split = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(split, requires_grad=whole.requires_grad)

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Raises ValueError where the heads cannot be split."""
        module.split_heads(mesh.get_local_rank(), mesh.size())
        return module


def tensor_parallel_plan(source: PreTrainedConfig) -> dict[str, str]:
    """The plan of a base model whose attention is MLA: the source's, but for its ``self_attn``."""
    plan = {name: style for name, style in (source.base_model_tp_plan or {}).items() if ".self_attn" not in name}
    attention = "layers.*.self_attn"
    return {**plan, attention: STYLE, f"{attention}.q_proj": "colwise", f"{attention}.o_proj": "rowwise"}


def register() -> None:
    ALL_PARALLEL_STYLES.register(STYLE, HeadParallel())
