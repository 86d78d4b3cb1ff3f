"""Compiles the kernel once per weight's shape and dtype, and launches it on torch's current stream."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from mha2mla.kernels.compilation import compile_for
from mha2mla.kernels.devices import capability, dtype_name, on_device
from mha2mla.kernels.layouts import aligned
from mha2mla.kernels.pointwise.launch import PASS_CONFIGS
from mha2mla.kernels.skinny_linear.kernel import make_skinny_linear


@cache
def compile_skinny_linear(major_minor: int, columns: int, outputs: int, dtype: str, gated: bool, biased: bool):
    """The compiled kernel, for 1 to 8 rows."""
    function = make_skinny_linear(
        columns=columns, outputs=outputs, dtype=dtype, gated=gated, biased=biased, dependent=major_minor >= 90
    )
    return compile_for(function, major_minor, PASS_CONFIGS)


def launch_skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, gated: bool) -> None:
    """Run the kernel over rows [N, K]."""
    with on_device(x.device):
        kernel = compile_skinny_linear(
            capability(x.device), x.shape[1], weight.shape[0], dtype_name(x.dtype), gated, bias is not None
        )
        kernel(aligned(x), weight, weight[0] if bias is None else bias.contiguous(), out)
