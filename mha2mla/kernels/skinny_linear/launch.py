"""Compiles the kernel once per weight's shape and dtype, and launches it on torch's current stream."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from mha2mla.kernels.compilation import compile_for
from mha2mla.kernels.devices import capability, dtype_name, num_sms, on_device
from mha2mla.kernels.layouts import aligned
from mha2mla.kernels.pointwise.launch import PASS_CONFIGS
from mha2mla.kernels.rope_append.launch import with_dense_rows
from mha2mla.kernels.skinny_linear.api import resident_blocks
from mha2mla.kernels.skinny_linear.grouped import make_grouped_maps
from mha2mla.kernels.skinny_linear.kernel import make_skinny_linear
from mha2mla.kernels.skinny_linear.maps import make_skinny_maps


@cache
def compile_skinny_linear(major_minor: int, **static):
    """The compiled kernel; arguments as ``make_skinny_linear``'s."""
    return compile_for(make_skinny_linear(**static, dependent=major_minor >= 90), major_minor, PASS_CONFIGS)


@cache
def compile_skinny_maps(major_minor: int, **static):
    """The compiled kernel, for any number of tokens; arguments as ``make_skinny_maps``'s."""
    return compile_for(make_skinny_maps(**static, dependent=major_minor >= 90), major_minor, PASS_CONFIGS)


@cache
def compile_grouped_maps(major_minor: int, **static):
    """The compiled kernel, for any number of tokens; arguments as ``make_grouped_maps``'s."""
    return compile_for(make_grouped_maps(**static, dependent=major_minor >= 90), major_minor)


def launch_grouped_maps(x: Tensor, maps: Tensor, out: Tensor, transposed: bool) -> None:
    """Run the kernel over tokens [N, H, inner]."""
    _, heads, inner = x.shape
    with on_device(x.device):
        kernel = compile_grouped_maps(
            capability(x.device), heads=heads, maps=len(maps), inner=inner, outer=out.shape[2],
            dtype=dtype_name(x.dtype), transposed=transposed,
        )  # fmt: skip
        kernel(x, maps, out)


def launch_skinny_maps(x: Tensor, maps: Tensor, out: Tensor) -> None:
    """Run the kernel over tokens [N, H, inner]."""
    _, heads, inner = x.shape
    with on_device(x.device):
        kernel = compile_skinny_maps(
            capability(x.device), heads=heads, maps=len(maps), inner=inner, outer=out.shape[2],
            dtype=dtype_name(x.dtype),
        )  # fmt: skip
        kernel(with_dense_rows(x), maps, out)


def launch_skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, groups: int, gated: bool
) -> None:
    """Run the kernel over rows [N, groups K]."""
    three = resident_blocks(weight.shape[0], num_sms(x.device)) == 3
    with on_device(x.device):
        kernel = compile_skinny_linear(
            capability(x.device),
            columns=weight.shape[1],
            outputs=weight.shape[0],
            dtype=dtype_name(x.dtype),
            groups=groups,
            gated=gated,
            biased=bias is not None,
            **({"stages": 4, "resident": 3} if three else {}),
        )
        kernel(aligned(x), weight, weight[0] if bias is None else bias.contiguous(), out)
