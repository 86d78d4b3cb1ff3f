"""Parts of vLLM's plug-in that need no vLLM: its entry point, and where vLLM's layers hold a checkpoint's tensors.

Every process of vLLM calls the entry point, ``vllm.general_plugins``, before it reads a model's config.
"""

from __future__ import annotations

import re

from torch import Tensor

ARCHITECTURE = "MHA2MLAForCausalLM"
MODEL = "mha2mla.serving.vllm_model:VLLMForCausalLM"
# Linear layers of vLLM that hold several of a checkpoint's: name there -> names here, in their order.
STACKED = {f"{mlp}.gate_up_proj": (f"{mlp}.gate_proj", f"{mlp}.up_proj") for mlp in ("mlp", "mlp.shared_expert")}
# Names of the three matrices of vLLM's experts, and of its stacks; Mixtral's checkpoints have these names too.
EXPERT_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKS = {"w1": "w13_weight", "w3": "w13_weight", "w2": "w2_weight"}
_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(?:(\d+)\.(\w+)\.weight|(gate_up_proj|down_proj))")
_ATTENTION = re.compile(r"(?:^|\.)self_attn\.(.+)$")


def register() -> None:
    """Makes ``model_type: mha2mla`` known to transformers' ``AutoConfig`` and its architecture to vLLM.

    May be called any number of times. Imports nothing that touches CUDA: the model's class is given by name, and vLLM
    imports it where it is built.
    """
    from vllm import ModelRegistry

    import mha2mla.modeling  # noqa: F401  (registers the config)

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)


def attention_name(name: str) -> str | None:
    """The part of a tensor's name behind ``self_attn.``; None for tensors of other modules."""
    found = _ATTENTION.search(name)
    return found[1] if found else None


def source_free(name: str) -> str:
    """A tensor's name with the block of experts called as all families but Mixtral call it."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def expert_parts(name: str, tensor: Tensor) -> list[tuple[str, str, int, Tensor]]:
    """Experts of a checkpoint's tensor for vLLM's layers: name there, matrix, expert, tensor. The tensor is one matrix
    of one expert or, as in models in memory, a stack over all experts. Empty for other tensors."""
    found = _EXPERTS.fullmatch(source_free(name))
    if found is None:
        return []
    block, index, one, stack = found.groups()
    if one is not None:
        matrices = [(EXPERT_MATRICES.get(one, one), int(index), tensor)]
    elif stack == "down_proj":
        matrices = [("w2", expert, each) for expert, each in enumerate(tensor)]
    else:
        matrices = [
            (matrix, expert, half)
            for expert, each in enumerate(tensor)
            for matrix, half in zip(("w1", "w3"), each.chunk(2), strict=True)
        ]
    return [(f"{block}.routed_experts.{_STACKS[matrix]}", matrix, *which) for matrix, *which in matrices]


def placement(name: str) -> tuple[str, int | None]:
    """Name of a checkpoint's tensor in vLLM's layers, and its index among stacked ones."""
    name = source_free(name)
    for stacked, parts in STACKED.items():
        for place, part in enumerate(parts):
            if f"{part}." in name:
                return name.replace(part, stacked), place
    return name, None


def checkpoint_names(name: str) -> list[str]:
    """Names of the tensors that a checkpoint has for vLLM's tensor ``name``: several where it is a stack of linears."""
    for stacked, parts in STACKED.items():
        if f"{stacked}." in name:
            return [name.replace(stacked, part) for part in parts]
    return [name]
