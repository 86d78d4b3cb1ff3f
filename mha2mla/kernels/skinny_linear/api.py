"""The public op of products of few rows: validation, dispatch, and its torch.library schema."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.devices import capability, check_backend, num_sms, register
from mha2mla.kernels.layouts import ALIGNMENT, argument_error
from mha2mla.kernels.skinny_linear.cut import ROW_BUCKETS, filled
from mha2mla.kernels.split_kv.choice import shared_memory_limit

_MAX_GROUP_ROWS, _MAX_GROUP_COLUMNS = 8, 2048  # of a map a head, by kernels that take every weight at once
_MAX_TOKENS = 16  # through a map a head
_COLUMNS, _OUTPUTS = 32, 16  # what the kernel takes multiples of
_INNER, _OUTER = 256, 8  # rows of a map at most, and what its columns are a multiple of
_GROUP = 64  # heads that share a map, at most, and the columns of a block
_MANY_COLUMNS = 2048  # whose products are worth a kernel of their own
_FILLED = 0.62  # of the room for CTAs, from which on more rows than 64 are
_DTYPES = (torch.bfloat16, torch.float16)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    groups: int = 1,
    gated: bool = False,
    backend: str | None = None,
) -> Tensor:
    """x W^T + b, rounded once, or silu(x W_gate^T) * (x W_up^T) (SwiGLU, arXiv 2002.05202) with each step rounded.

    Args:
        x: [..., groups K].
        weight: [N, K], contiguous; read before the kernel that is launched before has ended, so not one that it writes.
        bias: [N]; with neither ``gated`` nor more groups than one.
        groups: of the weight's rows, as many in each, and each for K columns of x of its own: a map a head.
        gated: the first half of the weight's rows is W_gate, the second W_up; of one group.
        backend: "tilelang", "reference", or None: TileLang where :func:`is_skinny`.

    Returns:
        [..., N], or [..., N / 2].

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_backend(backend)
    if groups < 1 or (gated and groups > 1):
        raise argument_error("groups", groups, "at least 1, and no more with gated")
    if weight.ndim != 2 or x.ndim < 1 or weight.shape[1] * groups != x.shape[-1] or weight.shape[0] % groups:
        wanted = f"[a multiple of {groups}, {x.shape[-1] / groups if x.ndim else 1:g}], by x"
        raise argument_error("weight.shape", tuple(weight.shape), wanted)
    if weight.dtype != x.dtype or weight.device != x.device:
        raise argument_error("weight", f"{weight.dtype} on {weight.device}", f"{x.dtype} on {x.device}, as x")
    if gated and weight.shape[0] % 2:
        raise argument_error("weight.shape[0]", weight.shape[0], "an even number of rows, gate and up")
    if bias is not None and (
        gated or groups > 1 or bias.shape != weight.shape[:1] or (bias.dtype, bias.device) != (x.dtype, x.device)
    ):
        raise argument_error(
            "bias",
            f"{bias.dtype} {tuple(bias.shape)} on {bias.device} with gated={gated}, groups={groups}",
            f"None, or without gated and groups {x.dtype} {tuple(weight.shape[:1])} on {x.device}",
        )
    served = (
        _is_served(x, weight, groups)
        if backend == "tilelang"
        else backend is None and is_skinny(x, weight, groups, gated)
    )
    if backend == "tilelang" and not served:
        raise argument_error(
            "backend",
            f"'tilelang' for {x.dtype} {tuple(x.shape)} by {tuple(weight.shape)} on {x.device}",
            f"1 to {ROW_BUCKETS[-1]} rows of bfloat16 or float16 on an sm_90 (with groups 1 to {_MAX_GROUP_ROWS}, K at"
            f" most {_MAX_GROUP_COLUMNS}, from sm_80 on), K a multiple of {_COLUMNS}, N / groups of {_OUTPUTS}, and a"
            f" contiguous weight that begins at a multiple of {ALIGNMENT} bytes",
        )
    return _skinny_linear_op(x, weight, bias, groups, gated, served)


def skinny_maps(x: Tensor, maps: Tensor, *, backend: str | None = None) -> Tensor:
    """x through a map for each H / k heads, rounded once.

    Args:
        x: [..., tokens, H, i], read where it lies; by TileLang of at most 16 tokens.
        maps: [k, i, o], contiguous; k divides H.
        backend: "tilelang", "reference", or None: TileLang where :func:`serves_maps`.

    Returns:
        [..., H, o].

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_backend(backend)
    if maps.ndim != 3 or x.ndim < 3 or maps.shape[1] != x.shape[-1] or not len(maps) or x.shape[-2] % len(maps):
        heads, inner = x.shape[-2:] if x.ndim > 1 else ("H", "i")
        raise argument_error("maps.shape", tuple(maps.shape), f"[a divisor of {heads}, {inner}, o], by x")
    if maps.dtype != x.dtype or maps.device != x.device:
        raise argument_error("maps", f"{maps.dtype} on {maps.device}", f"{x.dtype} on {x.device}, as x")
    served = backend != "reference" and serves_maps(x, maps)
    if backend == "tilelang" and not served:
        raise argument_error(
            "backend",
            f"'tilelang' for {x.dtype} {tuple(x.shape)} by {tuple(maps.shape)} on {x.device}",
            f"1 to {_MAX_TOKENS} tokens of bfloat16 or float16 on a CUDA device from sm_80 on, i at most {_INNER}, o a"
            f" multiple of {_OUTER}, and contiguous maps that begin at a multiple of {ALIGNMENT} bytes",
        )
    return _skinny_maps_op(x, maps, served)


def serves_maps(x: Tensor, maps: Tensor) -> bool:
    """True where the kernel serves x [..., H, i] through maps [k, i, o]: wherever it can. cuBLAS takes 3.5 µs for the
    3.7 MB of a W_UK, of which one is reading."""
    (heads, inner), outer = x.shape[-2:], maps.shape[2]
    return (
        x.is_cuda
        and x.dtype in _DTYPES
        and 0 < x.numel() <= _MAX_TOKENS * heads * inner
        and len(maps) > 0
        and heads % len(maps) == 0
        and inner <= _INNER
        and outer % _OUTER == 0
        and maps.is_contiguous()
        and maps.data_ptr() % ALIGNMENT == 0
        and capability(x.device) >= 80
    )


def grouped_maps(x: Tensor, maps: Tensor, *, transposed: bool = False) -> Tensor:
    """x through a map for each H / k heads, rounded once, where :func:`serves_groups`: without a copy of a map a head,
    and begun while the kernel before ends.

    Args:
        x: [..., tokens, H, i], read where it lies.
        maps: [k, i, o], or with ``transposed`` [k, o, i].

    Returns:
        [..., H, o].
    """
    from mha2mla.kernels.skinny_linear.maps import launch_grouped_maps

    out = x.new_empty(*x.shape[:-1], maps.shape[1 if transposed else 2])
    launch_grouped_maps(x.flatten(0, -3), maps, out.view(-1, *out.shape[-2:]), transposed)
    return out


def serves_groups(x: Tensor, maps: Tensor, transposed: bool = False) -> bool:
    """True where :func:`grouped_maps` serves these; of many tokens and a map a head cuBLAS is as fast."""
    heads, inner = x.shape[-2:]
    outer = maps.shape[1 if transposed else 2]
    return (
        x.is_cuda
        and x.dtype in _DTYPES
        and x.numel() > 0
        and x.stride(-1) == 1
        and not any(stride % 8 for stride in x.stride()[:-1])
        and x.data_ptr() % ALIGNMENT == 0
        and heads // len(maps) <= _GROUP
        and (len(maps) < heads or x.numel() <= _GROUP * heads * inner)
        and inner % 16 == 0
        and outer % _OUTER == 0
        and maps.is_contiguous()
        and maps.data_ptr() % ALIGNMENT == 0
        and 2 * _GROUP * inner * x.itemsize <= shared_memory_limit(capability(x.device))
    )


def is_skinny(x: Tensor, weight: Tensor, groups: int = 1, gated: bool = False) -> bool:
    """True where a kernel serves the product of x [..., groups K] and weight [N, K] unasked: where it is faster.

    Maps a head always: cuBLAS takes 4 µs for the 4 MB of W_UV, and cannot begin before attention ends.
    """
    return _is_served(x, weight, groups) and (
        groups > 1 or is_faster(*weight.shape, x.numel() // weight.shape[1], gated, num_sms(x.device))
    )


def is_faster(outputs: int, columns: int, rows: int, gated: bool, sms: int) -> bool:
    """True where ``rows`` rows times a weight [outputs, columns] take less time than cuBLAS's, as measured on an H200:
    where reading is what takes the time, 8 MiB and more, and of many rows where CTAs fill their waves."""
    return (
        outputs * columns >= 2**22
        and columns >= _MANY_COLUMNS
        and (rows <= ROW_BUCKETS[-2] or filled(outputs, columns, ROW_BUCKETS[-1], gated, sms) >= _FILLED)
    )


def _is_served(x: Tensor, weight: Tensor, groups: int) -> bool:
    outputs, columns = weight.shape
    return (
        x.is_cuda
        and x.dtype in _DTYPES
        and 0 < x.numel() <= (_MAX_GROUP_ROWS if groups > 1 else ROW_BUCKETS[-1]) * columns * groups
        and (groups == 1 or columns <= _MAX_GROUP_COLUMNS)
        and columns % _COLUMNS == 0
        and outputs % (_OUTPUTS * groups) == 0
        and weight.is_contiguous()
        and weight.data_ptr() % ALIGNMENT == 0
        and (capability(x.device) == 90 if groups == 1 else capability(x.device) >= 80)
    )


def _skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, gated: bool, compiled: bool) -> Tensor:
    if compiled:
        out = _empty(x, weight, bias, groups, gated)
        rows, into = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if groups > 1:
            from mha2mla.kernels.skinny_linear.maps import launch_head_maps

            launch_head_maps(rows, weight, into, groups)
        else:
            from mha2mla.kernels.skinny_linear.streamed import launch_streamed_linear

            launch_streamed_linear(rows, weight, bias, into, gated)
        return out

    from mha2mla.kernels.skinny_linear.reference import skinny_linear_reference

    return skinny_linear_reference(x, weight, bias, groups, gated)


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, gated: bool, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (1 + gated))


def _skinny_maps(x: Tensor, maps: Tensor, compiled: bool) -> Tensor:
    if compiled:
        from mha2mla.kernels.skinny_linear.maps import launch_skinny_maps

        out = _empty_mapped(x, maps)
        launch_skinny_maps(x.flatten(0, -3), maps, out.view(-1, *out.shape[-2:]))
        return out

    from mha2mla.kernels.skinny_linear.reference import skinny_maps_reference

    return skinny_maps_reference(x, maps)


def _empty_mapped(x: Tensor, maps: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], maps.shape[2])


_skinny_linear_op = register(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias, int groups, bool gated, bool compiled) -> Tensor",
    _skinny_linear,
    _empty,
)
_skinny_maps_op = register("skinny_maps(Tensor x, Tensor maps, bool compiled) -> Tensor", _skinny_maps, _empty_mapped)
