"""Linear layers of one input as one product: their weights lie in one storage, and stay their own parameters.

:func:`fuse_weights` moves the weights when a cache is made: every parameter becomes a view of its rows of one storage,
so writing to a parameter writes to the fused weight. A product is fused while the rows still lie so: a parameter with
another storage (``to``, ``load_state_dict(assign=True)``, LoRA) is noticed by its address, and no state can be stale.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mha2mla.kernels import is_skinny, silu_mul, skinny_linear

_WEIGHT, _BIAS, _OUT_FEATURES = attrgetter("weight"), attrgetter("bias"), attrgetter("out_features")


def project(x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Outputs of ``parts`` for x [..., in]: of one product where their weights are fused, else one after another.

    The product is fused without gradients, compilation and autocast, for plain ``nn.Linear`` (no hook, no adapter, no
    quantised or sharded weight), all with a bias or none.

    Returns:
        [..., out] of each part, which may be views of one tensor.
    """
    fused = fused_weight(x, parts)
    if fused is None:
        if x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
            for parameter in itertools.chain.from_iterable(part.parameters() for part in parts):
                parameter.is_captured = True  # replays read it where it is
        return tuple([part(x) for part in parts])
    out = skinny_linear(x, *fused) if x.is_cuda else F.linear(x, *fused)
    return (out,) if len(parts) == 1 else out.split(tuple(map(_OUT_FEATURES, parts)), dim=-1)


def project_gated(x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
    """silu(gate(x)) * up(x), of few rows by one kernel where the weights are fused."""
    if x.is_cuda and (fused := fused_weight(x, (gate, up))) is not None:
        weight, bias = fused
        if bias is None and gate.out_features == up.out_features and is_skinny(x, weight, gated=True):
            return skinny_linear(x, weight, gated=True)
    return silu_mul(*project(x, (gate, up)))


def fuse_weights(parts: Sequence[nn.Module]) -> None:
    """Moves the weights of plain ``nn.Linear`` parts, and their biases, into one storage each.

    Parameters that do not own their storage, are shared with other processes or were captured in a CUDA graph stay
    where they are, as all do where a part is not plain.
    """
    if not all(is_plain(part, nn.Linear) for part in parts):
        return
    kinds = [[part.weight for part in parts], [part.bias for part in parts if part.bias is not None]]
    if len(kinds[1]) not in (0, len(parts)):
        return
    for parameters in filter(None, kinds):
        if _adjacent(parameters) is None and _may_move(parameters):
            _move(parameters)


def fused_weight(x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """Weight [sum of out, in] and bias of one product of x over the parts' own memory; None where :func:`project` makes
    several."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return None
    with_bias = getattr(parts[0], "bias", None) is not None
    for part in parts:
        if type(part) is not nn.Linear or part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return None
        if (part.bias is not None) != with_bias:
            return None
    if len(parts) == 1:
        return (parts[0].weight, parts[0].bias) if type(parts[0].weight) is nn.Parameter else None
    weight = _adjacent(tuple(map(_WEIGHT, parts)))
    bias = _adjacent(tuple(map(_BIAS, parts))) if with_bias else None
    return None if weight is None or (with_bias and bias is None) else (weight, bias)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """True where a call of ``module`` is nothing but ``kind.forward``."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) is kind and not hooked


def own_map(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of an ``nn.Linear`` with a bias, offloaded or not; None: a call of it computes something else."""
    if type(module) is not nn.Linear:
        return None
    if not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__):
        return module.weight, module.bias
    if hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device  # offloading has imported it

        with align_module_device(module):
            return module.weight, module.bias
    return None


def affine_map(module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [out, in] and bias [out] that a call of ``module`` applies: its own, or an adapter's around it.

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


def _adjacent(parameters: Sequence[Tensor]) -> Tensor | None:
    """All rows as one tensor over the parameters' memory; None where they are not one behind the other."""
    first = parameters[0]
    storage, address, rows = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for each in parameters:
        # A quantised or sharded tensor is of a class of its own.
        if type(each) is not nn.Parameter or each.dtype != first.dtype or not each.is_contiguous():
            return None
        if each.data_ptr() != address or each.untyped_storage().data_ptr() != storage:
            return None
        address, rows = address + each.nbytes, rows + each.shape[0]
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _may_move(parameters: Sequence[Tensor]) -> bool:
    """True where each is all that there is in its storage, and no CUDA graph was captured of its address."""
    first = parameters[0]
    return first.device.type != "meta" and all(
        type(each) is nn.Parameter
        and (each.dtype, each.device, each.shape[1:]) == (first.dtype, first.device, first.shape[1:])
        and not getattr(each, "is_captured", False)
        and each.is_contiguous()
        and each.untyped_storage().nbytes() == each.nbytes
        and not (each.device.type == "cpu" and each.is_shared())
        and not each.is_inference()
        for each in parameters
    )


def _move(parameters: Sequence[Tensor]) -> None:
    # Not inference tensors: training the model afterwards needs more.
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([each.detach() for each in parameters])
        for each, rows in zip(parameters, whole.split([each.shape[0] for each in parameters]), strict=True):
            if whole.is_cuda:  # the old storage may not be handed out again before it has been read
                each.data.record_stream(torch.cuda.current_stream(whole.device))
            each.data = rows
    if whole.is_cuda:  # A product of few rows reads its weight before the kernel before has ended: let it not be cat's.
        whole.new_zeros(1)
