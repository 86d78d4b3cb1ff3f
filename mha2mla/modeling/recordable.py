"""Conditions for recording a model's decode steps (``captured.py``), and for keeping a recording."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from transformers import PreTrainedModel

# Rotary embeddings of these types look at positions on the host, in every step.
HOST_ROPE = ("dynamic", "longrope")


def fingerprint(model: PreTrainedModel) -> tuple:
    """Changes when a recorded step would be stale: weights were moved or written, or torch was told to multiply
    otherwise."""
    held = [held for module in model.modules() for held in (module._parameters, module._buffers) if held]
    weights = [each for tensors in held for each in tensors.values() if each is not None]
    settings = (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
    return (*settings, *[(each.data_ptr(), 0 if each.is_inference() else each._version) for each in weights])


def explain_capture(model: PreTrainedModel, device_type: str) -> str | None:
    """Why steps of ``model`` are not recorded on a device of that type, or None: host code runs in them that a replay
    would leave out, or what they compute can change unseen."""
    parameters, below = list(model.parameters()), [module for module in model.modules() if module is not model]
    quantizer = getattr(model, "hf_quantizer", None)
    reasons = {
        "the model is in training mode": model.training,
        f"weights are not on one {device_type} device": {each.device for each in parameters} != {parameters[0].device}
        or parameters[0].device.type != device_type,
        # Quantised, sharded, …
        "weights are no plain tensors": any(type(each) is not nn.Parameter for each in parameters),
        "its quantisation cannot be compiled": quantizer is not None and not quantizer.is_compileable,
        "the model is compiled": model._compiled_call_impl is not None,
        "autocast is on": torch.is_autocast_enabled(device_type),
        "adapters are not merged, and may be swapped": any(
            hasattr(type(module), "adapter_layer_names") for module in below
        ),
        "modules have hooks": _has_hooks(below),
        "RoPE looks at positions on the host": not _rope_types(model.model.config).isdisjoint(HOST_ROPE),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _rope_types(source: object) -> set[str]:
    """RoPE types of a source's config, whose parameters may be given per type of layer."""
    parameters = getattr(source, "rope_parameters", None) or {}
    entries = [parameters, *[entry for entry in parameters.values() if isinstance(entry, dict)]]
    return {entry["rope_type"] for entry in entries if "rope_type" in entry}


def _has_hooks(modules: Sequence[nn.Module]) -> bool:
    """True where other code runs between modules: accelerate's that moves weights, for instance."""
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return True
    for module in modules:
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # transformers leaves hooks behind that record hidden states for a call that asks for them, and do nothing else.
        if any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks):
            return True
        if "_hf_hook" in vars(module):
            return True
    return False
