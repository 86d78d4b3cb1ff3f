"""What kernel bodies are written with: memory by name, and one body for GPUs and for TileLang's C target."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tvm.script.ir_builder import IRBuilder


@dataclass(frozen=True)
class Machine:
    """What a body allocates and loops with. ``on_cpu``: TileLang's C target, where all memory is one thread's own."""

    on_cpu: bool = False

    @property
    def alloc_shared(self):
        return T.alloc_local if self.on_cpu else T.alloc_shared

    @property
    def alloc_fragment(self):
        return T.alloc_local if self.on_cpu else T.alloc_fragment

    @property
    def parallel(self):
        return T.grid if self.on_cpu else T.Parallel

    def rounds(self, count: int):
        """Of a short loop, written out. On the C target each in a scope of its own: in one scope its ``max`` reads an
        element once, whatever is written to it in between."""
        return T.unroll(count) if self.on_cpu else list(range(count))

    def strided(self, name: str, shape: list, dtype: str):
        """Type of a tensor with dense rows and run-time strides, which the CPU target's wrapper does not pass."""
        if self.on_cpu:
            return T.Tensor(shape, dtype)
        return T.StridedTensor(shape, [*(T.dynamic(f"{name}_{i}") for i in range(len(shape) - 1)), 1], dtype)


GPU = Machine()
WARPGROUP = 128  # threads
BARRIER = 8  # named barriers below 8 belong to the compiler
BY_ROW = T.GemmWarpPolicy.FullRow
SWIZZLE_128, ROW_GROUP = 1, 1024 >> 4  # of a wgmma descriptor: layout, and 8 rows of 128 bytes


class Buffers(SimpleNamespace):
    """Buffers of a kernel, and lists of such, which the generated code calls as they are called here."""

    def __init__(self, **buffers: Any):
        super().__init__(**buffers)
        for name, held in buffers.items():
            for buffer in held if isinstance(held, list) else [held]:
                IRBuilder.name(name, buffer)
