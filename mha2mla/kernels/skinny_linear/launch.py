"""Compiles the kernel once per weight's shape and dtype, and launches it on torch's current stream."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

from torch import Tensor

from mha2mla.kernels.compilation import EXACT_PASS_CONFIGS, compile_for
from mha2mla.kernels.devices import capability, dtype_name, num_sms, on_device
from mha2mla.kernels.layouts import aligned
from mha2mla.kernels.rope_append.launch import with_dense_rows
from mha2mla.kernels.skinny_linear.api import ROW_BUCKETS
from mha2mla.kernels.skinny_linear.cut import cut
from mha2mla.kernels.skinny_linear.grouped import FEW, ROWS, make_grouped_maps
from mha2mla.kernels.skinny_linear.head_maps import make_head_maps
from mha2mla.kernels.skinny_linear.maps import make_skinny_maps
from mha2mla.kernels.skinny_linear.streamed import make_streamed_linear


@cache
def compile_head_maps(major_minor: int, **static):
    """The compiled kernel; arguments as ``make_head_maps``'s."""
    return compile_for(make_head_maps(**static, dependent=major_minor >= 90), major_minor, EXACT_PASS_CONFIGS)


@cache
def compile_streamed_linear(sms: int, *, outputs: int, columns: int, rows: int, gated: bool, **static):
    """The compiled kernel for at most ``rows`` rows; arguments as ``make_streamed_linear``'s."""
    how = asdict(cut(outputs, columns, rows, gated, sms))
    function = make_streamed_linear(outputs=outputs, columns=columns, rows=rows, gated=gated, **static, **how)
    return compile_for(function, 90, EXACT_PASS_CONFIGS)


@cache
def compile_skinny_maps(major_minor: int, **static):
    """The compiled kernel, for any number of tokens; arguments as ``make_skinny_maps``'s."""
    return compile_for(make_skinny_maps(**static, dependent=major_minor >= 90), major_minor, EXACT_PASS_CONFIGS)


@cache
def compile_grouped_maps(major_minor: int, **static):
    """The compiled kernel, for any number of tokens; arguments as ``make_grouped_maps``'s."""
    return compile_for(make_grouped_maps(**static, dependent=major_minor >= 90), major_minor)


def launch_grouped_maps(x: Tensor, maps: Tensor, out: Tensor, transposed: bool) -> None:
    """Run the kernel over tokens [N, H, inner]."""
    tokens, heads, inner = x.shape
    with on_device(x.device):
        kernel = compile_grouped_maps(
            capability(x.device), heads=heads, maps=len(maps), inner=inner, outer=out.shape[2],
            dtype=dtype_name(x.dtype), transposed=transposed,
            rows=FEW if tokens * heads <= FEW * len(maps) else ROWS,
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
    outputs, columns = weight.shape
    static = {"outputs": outputs, "columns": columns, "dtype": dtype_name(x.dtype)}
    with on_device(x.device):
        if groups > 1:
            compile_head_maps(capability(x.device), **static, groups=groups)(aligned(x), weight, out)
            return
        rows = next(rows for rows in ROW_BUCKETS if len(x) <= rows)
        kernel = compile_streamed_linear(num_sms(x.device), **static, rows=rows, gated=gated, biased=bias is not None)
        kernel(aligned(x), weight, weight[0] if bias is None else bias.contiguous(), out)
