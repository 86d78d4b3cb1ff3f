"""From a kernel choice to a TileLang function: what knows every kernel file of GQA decode."""

from __future__ import annotations

from dataclasses import replace

from mha2mla.kernels.gqa_decode.portable import make_gqa_decode_portable
from mha2mla.kernels.gqa_decode.selection import GQAShape
from mha2mla.kernels.gqa_decode.streamed import make_gqa_decode_streamed
from mha2mla.kernels.machine import Machine
from mha2mla.kernels.split_kv.choice import KernelChoice


def make_split(shape: GQAShape, choice: KernelChoice, *, dtype: str | None = None, on_cpu: bool = False):
    """The TileLang function of ``choice`` (not compiled); ``dtype`` overrides the shape's, for the CPU target."""
    if choice.kernel == "streamed":
        return make_gqa_decode_streamed(shape, choice)
    return make_gqa_decode_portable(replace(shape, dtype=dtype or shape.dtype), choice, Machine(on_cpu))
