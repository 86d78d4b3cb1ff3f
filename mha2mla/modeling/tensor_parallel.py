"""Tensor parallelism by transformers' own plans (``from_pretrained(..., distributed_config=)`` under torchrun).

Query heads are split: ``q_proj`` by rows, ``o_proj`` by columns, the per-head maps by heads. Every rank caches the
whole latent, and of rotary keys those that its heads read. What is around the attention, the source's plan splits.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

STYLE = "mha2mla_heads"


class HeadParallel(TensorParallelLayer):
    """Of an :class:`~mha2mla.modeling.MLAAttention`: its per-head maps are split by heads, where there are enough of
    them, and it is told which heads are its own; linear layers below it have styles of their own."""

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
    """Makes the style known to transformers."""
    ALL_PARALLEL_STYLES.register(STYLE, HeadParallel())
