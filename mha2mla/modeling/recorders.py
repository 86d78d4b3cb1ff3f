"""Recorders of decode steps for ``captured.py``: CUDA graphs, and what a model must be for its steps to be recorded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from mha2mla.modeling.cache import LatentCache

# Rotary embeddings of these types look at positions on the host, in every step.
HOST_ROPE = ("dynamic", "longrope")


class Recorder(Protocol):
    """Protocol of a recorder: :class:`CudaGraphs`, or a replay of the same operations in tests without a GPU."""

    device_type: str

    def explain(self, cache: LatentCache) -> str | None:
        """Why steps over this cache cannot be recorded, or None."""

    def record(
        self, step: Callable[[], Tensor], undo: Callable[[], None], device: torch.device
    ) -> tuple[Tensor, Callable[[], None]]:
        """Result of ``step``, and a function that repeats its device work in place, with the host's values
        of now. ``step`` may be run for that, each time with an ``undo`` behind it."""


@functools.cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """One for all recordings of a thread: cuBLAS keeps a workspace for every stream that it ever saw."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Records CUDA graphs, all in one memory pool: they must not be replayed at the same time."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._pool: Any = None

    def explain(self, cache: LatentCache) -> str | None:
        """References read tensors on the host."""
        slow = [layer.backend.name for layer in cache.layers if not layer.backend.compiled]
        return f"{slow[0]!r} is no kernel" if slow else None

    def record(
        self, step: Callable[[], Tensor], undo: Callable[[], None], device: torch.device
    ) -> tuple[Tensor, Callable[[], None]]:
        """Records a CUDA graph; waits for the device, once."""
        stream, graph = _stream(device, threading.get_ident()), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()
            undo()
            generator = torch.cuda.default_generators[device.index or 0]
            state = generator.clone_state()
            try:
                # thread_local: what other threads do meanwhile is no error of this one.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    result = step()
            except BaseException:
                # A capture that fails leaves the generator to wait for its end, and nobody could sample any more.
                generator.graphsafe_set_state(state)
                raise
        torch.cuda.current_stream(device).wait_stream(stream)
        self._pool = graph.pool()
        return result, graph.replay


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
