"""What kernel bodies are written with: memory by name, and one body for GPUs and for TileLang's C target."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang import tvm
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

# What a kernel begins with that asks, into the L2, for what the next one reads (sm_90 and newer): blocks behind its own
# ask for AHEAD_NUMBERS each and end. Nobody waits for what comes.
AHEAD_NUMBERS = 32 * 1024
ASK_AHEAD = """
static __device__ __forceinline__ void ask_ahead(const void* place, int bytes) {
  if (threadIdx.x < 32)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 : : "l"(static_cast<const char*>(place) + threadIdx.x * bytes), "r"(bytes) : "memory");
  asm volatile("exit;");
  __builtin_unreachable();
}
"""


def ask_ahead(ahead, dtype: str, block):
    """The call for the ``block``-th AHEAD_NUMBERS of ``ahead``, after which the block is no more."""
    bytes_a_thread = AHEAD_NUMBERS // 32 * tvm.DataType(dtype).bits // 8
    return T.call_extern(
        "handle", "ask_ahead", T.access_ptr(ahead[block * AHEAD_NUMBERS], "r", AHEAD_NUMBERS), bytes_a_thread
    )


class Buffers(SimpleNamespace):
    """Buffers of a kernel, and lists of such, which the generated code calls as they are called here."""

    def __init__(self, **buffers: Any):
        super().__init__(**buffers)
        for name, held in buffers.items():
            for buffer in held if isinstance(held, list) else [held]:
                IRBuilder.name(name, buffer)
