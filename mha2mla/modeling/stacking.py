"""Products that read the same input, made as one: their weights are put side by side in memory, and stay what they are.

A module keeps its own parameters, under their names: each becomes a view of its rows of one storage. Whatever writes to
a parameter thus writes to the stack, whatever gives it another storage (``to``, ``load_state_dict(assign=True)``, LoRA)
is seen by its address, and nothing is remembered that could be stale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mha2mla.kernels import is_skinny, silu_mul, skinny_linear


def project(x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """What each of ``parts`` makes of x [..., in]: by one product where that is the same, else one after another.

    It is where nobody differentiates, traces or autocasts, and all parts are plain ``nn.Linear`` (no hook, no adapter,
    no quantised or sharded weight) of one dtype and device, all with a bias or none. The first such call moves weights
    that own their storages, so make it before a CUDA graph is captured: during and after one they stay where they are.

    Returns:
        [..., out] of each part, which may be views of one tensor.
    """
    one = stacked(x, parts)
    if one is None:
        return tuple([part(x) for part in parts])
    weight, bias = one
    out = skinny_linear(x, weight, bias)
    return out.split([part.out_features for part in parts], dim=-1)


def project_gated(x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
    """silu(gate(x)) * up(x): as :func:`project`, and of few rows by one kernel."""
    one = stacked(x, (gate, up))
    like = one is not None and one[1] is None and gate.out_features == up.out_features
    if like and is_skinny(x, one[0], gated=True):
        return skinny_linear(x, one[0], gated=True)
    return silu_mul(*project(x, (gate, up)))


def stacked(x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the one product that :func:`project` would make of x, which are moved if need be; or None."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return None
    if not all(is_plain(part, nn.Linear) for part in parts):
        return None
    biases = [part.bias for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)) or (weight := side_by_side([part.weight for part in parts])) is None:
        return None
    if not biases:
        return weight, None
    bias = side_by_side(biases)
    return None if bias is None else (weight, bias)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of ``module`` is nothing but ``kind.forward``."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) is kind and not hooked


def own_map(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of an ``nn.Linear`` with a bias, offloaded or not; None: a call of it computes something else."""
    if is_plain(module, nn.Linear):
        return module.weight, module.bias
    if type(module) is nn.Linear and hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device  # who offloads has imported it

        with align_module_device(module):
            return module.weight, module.bias
    return None


def affine_map(module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [out, in] and bias [out] of what a call of ``module`` computes: its own, or an adapter's around it.

    Args:
        module: an affine map with a bias, of the signature of ``nn.Linear``.
        like: [..., in], of the dtype and device that ``module`` is called with.
    """
    if (own := own_map(module)) is not None:
        return own
    # Large, so that adding a bias of hundreds costs the weights few digits; float16 ends at 65504.
    width, scale = like.shape[-1], 2.0 ** (8 if like.dtype == torch.float16 else 16)
    probe = torch.cat((scale * torch.eye(width, dtype=like.dtype, device=like.device), like.new_zeros(1, width)))
    out = module(probe)
    bias = out[-1]
    return ((out[:-1] - bias) / scale).T.contiguous(), bias


def side_by_side(parameters: Sequence[Tensor]) -> Tensor | None:
    """The rows of all parameters as one tensor over their own memory, moved there if need be; None: they stay apart."""
    first = parameters[0]
    if any(type(each) is not nn.Parameter or each.dtype != first.dtype for each in parameters):
        return None  # a quantised or sharded tensor is of a class of its own
    found = _adjacent(parameters)
    if found is None and first.is_cuda and torch.cuda.is_current_stream_capturing():
        for each in parameters:  # replays will read them where they are
            each.stays_where_it_is = True
    elif found is None and _may_move(parameters):
        _move(parameters)
        found = _adjacent(parameters)
    return found


def _adjacent(parameters: Sequence[Tensor]) -> Tensor | None:
    first = parameters[0]
    storage, address, rows = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for each in parameters:
        if each.data_ptr() != address or each.untyped_storage().data_ptr() != storage or not each.is_contiguous():
            return None
        address, rows = address + each.nbytes, rows + each.shape[0]
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _may_move(parameters: Sequence[Tensor]) -> bool:
    """Whether each is all that there is in its storage, and no CUDA graph was captured of its address."""
    device, width = parameters[0].device, parameters[0].shape[1:]
    return device.type != "meta" and all(
        each.device == device
        and not getattr(each, "stays_where_it_is", False)
        and each.shape[1:] == width
        and each.is_contiguous()
        and each.untyped_storage().nbytes() == each.nbytes
        and not (device.type == "cpu" and each.is_shared())
        and not each.is_inference()
        for each in parameters
    )


def _move(parameters: Sequence[Tensor]) -> None:
    # Not inference tensors: who trains the model afterwards needs more.
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([each.detach() for each in parameters])
        for each, rows in zip(parameters, whole.split([each.shape[0] for each in parameters]), strict=True):
            if whole.is_cuda:  # the old storage may not be handed out again before it has been read
                each.data.record_stream(torch.cuda.current_stream(whole.device))
            each.data = rows
    if whole.is_cuda:  # A product of few rows reads its weight before the kernel before has ended: let it not be cat's.
        whole.new_zeros(1)
