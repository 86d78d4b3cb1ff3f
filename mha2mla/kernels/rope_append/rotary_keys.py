"""Rotary keys of many latents: the product with W_KR, its bias and the rotation by one kernel, rounded once."""

from typing import Any

import tilelang.language as T
from torch import Tensor

from mha2mla.kernels.machine import BY_ROW, GPU, WARPGROUP, Machine, compiler, make_function
from mha2mla.kernels.ops import aligned, capability, dtype_name, on_device
from mha2mla.kernels.split_kv.choice import shared_memory_limit

ROWS, DEPTH = 64, 64  # tokens of a block; columns of a latent in a step
MOST_STAGES = 3  # steps that are in flight
# Copies guard their indices, as latents of any width and number need; cos and sin are exact (machine.py).
KEY_PASS_CONFIGS = {"tl.disable_warp_specialized": True}


def stages_of(rope: int, capability: int) -> int:
    """Steps in flight that a GPU's shared memory has room for beside cos and sin of d_r ``rope``, up to 128: two on
    compute capability 8.9."""
    room = shared_memory_limit(capability) - 4 * ROWS * rope
    return min(MOST_STAGES, room // (2 * DEPTH * (ROWS + rope)))


def make_rotary_keys(
    *, columns: int, rope: int, dtype: str, rows: int = ROWS, stages: int = MOST_STAGES, machine: Machine = GPU
):
    """A TileLang function ``rotary_keys``; tokens are a run-time value.

    Args:
        columns: d_c, a multiple of 8.
        rope: d_r, a multiple of 16.
        dtype: "bfloat16" or "float16" ("float32" on the CPU).
        rows: tokens of a block.
        stages: steps that are in flight.

    The function's arguments: latent [T, d_c], weight [d_r, d_c], bias [d_r], positions [T] int32, inv_freq [d_r / 2]
    float32 and out [T, d_r], all contiguous; scaling float32.
    """
    tokens, half, accum = T.dynamic("tokens"), rope // 2, T.float32
    steps, threads = -(-columns // DEPTH), 1 if machine.on_cpu else WARPGROUP
    arguments: dict[str, Any] = {
        "latent": T.Tensor([tokens, columns], dtype),
        "weight": T.Tensor([rope, columns], dtype),
        "bias": T.Tensor([rope], dtype),
        "positions": T.Tensor([tokens], T.int32),
        "inv_freq": T.Tensor([half], accum),
        "out": T.Tensor([tokens, rope], dtype),
        "scaling": accum(),
    }

    @T.macro
    def load(source, first, column, tile, limit):
        if machine.on_cpu:
            for i, c in T.grid(int(tile.shape[0]), DEPTH):
                tile[i, c] = T.if_then_else(
                    (first + i < limit) & (column + c < columns),
                    source[T.min(first + i, limit - 1), T.min(column + c, columns - 1)],
                    0,
                )
        else:
            T.copy(source[first : first + int(tile.shape[0]), column : column + DEPTH], tile)

    @T.macro
    def find_angles(call, t0, cos, sin):  # in a loop: unrolled, exact functions are most of the code
        for r in T.serial(T.ceildiv(rows * half, threads)):
            e = r * threads + machine.thread
            if e < rows * half:
                i, j = e // half, e % half
                angle = T.cast(call.positions[T.min(t0 + i, tokens - 1)], accum) * call.inv_freq[j]
                factor = T.if_then_else(call.inv_freq[j] == 0, 1.0, call.scaling)
                cos[i, j] = T.cos(angle) * factor
                sin[i, j] = T.sin(angle) * factor

    @T.macro
    def body(call):
        with T.Kernel(T.ceildiv(tokens, rows), threads=threads) as x:
            c_tile = machine.alloc_shared([rows, DEPTH], dtype)
            # Halves of W_KR, so that both numbers of a pair are the same thread's.
            tiles = [machine.alloc_shared([half, DEPTH], dtype) for _ in range(2)]
            sums = [machine.alloc_fragment([rows, half], accum) for _ in range(2)]
            cos, sin = machine.alloc_shared([rows, half], accum), machine.alloc_shared([rows, half], accum)
            find_angles(call, x * rows, cos, sin)
            for part in list(range(2)):
                T.fill(sums[part], 0)
            for k in T.serial(steps) if machine.on_cpu else T.Pipelined(steps, num_stages=min(stages, steps)):
                load(call.latent, x * rows, k * DEPTH, c_tile, tokens)
                for part in list(range(2)):
                    load(call.weight, part * half, k * DEPTH, tiles[part], rope)
                    T.gemm(c_tile, tiles[part], sums[part], transpose_B=True, policy=BY_ROW)
            for i, j in machine.parallel(rows, half):
                if x * rows + i < tokens:
                    first = sums[0][i, j] + T.cast(call.bias[j], accum)
                    second = sums[1][i, j] + T.cast(call.bias[half + j], accum)
                    call.out[x * rows + i, j] = T.cast(first * cos[i, j] - second * sin[i, j], dtype)
                    call.out[x * rows + i, half + j] = T.cast(second * cos[i, j] + first * sin[i, j], dtype)

    return make_function("rotary_keys", arguments, body)


compile_rotary_keys = compiler(make_rotary_keys, KEY_PASS_CONFIGS)


def launch_rotary_keys(
    latent: Tensor, weight: Tensor, bias: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, out: Tensor
) -> None:
    """Run the kernel: latent [T, d_c] at ``positions`` [T] by W_KR ``weight`` [d_r, d_c]."""
    if latent.shape[0] == 0:
        return
    with on_device(latent.device):
        here, (rope, columns) = capability(latent.device), weight.shape
        static = {"columns": columns, "rope": rope, "dtype": dtype_name(latent.dtype)}
        kernel = compile_rotary_keys(here, **static, stages=stages_of(rope, here))
        lists = (bias.contiguous(), positions.contiguous(), inv_freq.contiguous())
        kernel(aligned(latent), aligned(weight), *lists, out, scaling)
