"""Writes rows of new tokens into a paged cache as e4m3 numbers with a scale each: one warp a token, one pass."""

from functools import cache

import tilelang.language as T
from torch import Tensor

from mha2mla.kernels.devices import capability, dtype_name, on_device
from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, Machine, compile_for
from mha2mla.kernels.mla_decode.quantization import SCALE_OF_LARGEST, SMALLEST_SCALE

LARGEST_FLOAT = 3.4028234663852886e38


def make_quantize_rows(
    *,
    row_width: int,
    page_size: int,
    dtype: str,
    code_dtype: str = "float8_e4m3fn",
    block_tokens: int = 8,
    on_cpu: bool = False,
):
    """A TileLang function ``quantize_rows``; tokens and pages are run-time values.

    Args:
        row_width: numbers of a row.
        page_size: tokens per page.
        dtype: of the rows.
        code_dtype: of the cache; "float32" shows the quotients before they are rounded.
        block_tokens: tokens, and warps, of a block.
        on_cpu: compile for TileLang's C target.

    The function's arguments: rows [N,width] (contiguous), slots [N] int32, row_cache [P,page,width] and row_scale
    [P,page] float32 (run-time strides). A slot outside the cache writes nothing. ``quantize_latent`` has the format.
    """
    accum = T.float32
    machine = Machine(on_cpu)
    lanes = 1 if on_cpu else 32
    rounds = -(-row_width // lanes)
    tokens, pages = T.dynamic("tokens"), T.dynamic("pages")

    @T.macro
    def quantize(token, lane, rows, slots, row_cache, row_scale, x, most, scale):
        """One row. ``most``: its largest magnitude, and 1 if it has an infinity or a NaN, which a maximum may miss."""
        most[0] = 0.0
        most[1] = 0.0
        for v in T.unroll(rounds):
            x[v] = T.if_then_else(
                v * lanes + lane < row_width, T.cast(rows[token, T.min(v * lanes + lane, row_width - 1)], accum), 0.0
            )
            most[0] = T.max(most[0], T.max(x[v], -x[v]))
            most[1] = T.if_then_else(T.max(x[v], -x[v]) <= LARGEST_FLOAT, most[1], 1.0)  # not for NaN
        if not on_cpu:
            for v in list(range(5)):
                most[0] = T.max(most[0], T.shfl_xor(most[0], 1 << v))
                most[1] = T.max(most[1], T.shfl_xor(most[1], 1 << v))
        scale[0] = T.max(most[0] * T.float32(SCALE_OF_LARGEST), T.float32(SMALLEST_SCALE))
        scale[0] = T.if_then_else(most[0] == 0, 1.0, scale[0])
        if most[1] > 0:
            scale[0] = T.sqrt(-most[1])  # NaN; TileLang takes x == x, x * 0 and inf - inf for what they are of numbers
        if (slots[token] >= 0) & (slots[token] < pages * page_size):
            for v in T.unroll(rounds):
                if v * lanes + lane < row_width:
                    row_cache[slots[token] // page_size, slots[token] % page_size, v * lanes + lane] = T.cast(
                        x[v] / scale[0], code_dtype
                    )
            if lane == 0:
                row_scale[slots[token] // page_size, slots[token] % page_size] = scale[0]

    @T.prim_func
    def quantize_rows(
        rows: T.Tensor([tokens, row_width], dtype),
        slots: T.Tensor([tokens], T.int32),
        row_cache: machine.strided("row", [pages, page_size, row_width], code_dtype),
        row_scale: machine.strided("scale", [pages, page_size], accum),
    ):
        with T.Kernel(T.ceildiv(tokens, block_tokens), threads=1 if on_cpu else block_tokens * lanes) as b:
            x = T.alloc_local([rounds], accum)
            most = T.alloc_local([2], accum)
            scale = T.alloc_local([1], accum)
            if on_cpu:
                for i in T.serial(block_tokens):
                    if b * block_tokens + i < tokens:
                        quantize(b * block_tokens + i, 0, rows, slots, row_cache, row_scale, x, most, scale)
            else:
                thread = T.get_thread_binding()
                token = b * block_tokens + thread // lanes
                if token < tokens:
                    quantize(token, thread % lanes, rows, slots, row_cache, row_scale, x, most, scale)

    return quantize_rows


@cache
def compile_quantize_rows(major_minor: int, **static):
    """The compiled kernel; arguments as ``make_quantize_rows``'s."""
    return compile_for(make_quantize_rows(**static), major_minor, EXACT_PASS_CONFIGS)


def launch_quantize_rows(rows: Tensor, row_cache: Tensor, row_scale: Tensor, slots: Tensor) -> None:
    """Run the kernel: rows [N, width] to slots [N] of row_cache [P, page, width] (e4m3) and row_scale [P, page]."""
    if rows.numel() == 0 or row_cache.numel() == 0:
        return
    with on_device(rows.device):
        kernel = compile_quantize_rows(
            capability(rows.device), row_width=rows.shape[1], page_size=row_cache.shape[1], dtype=dtype_name(rows.dtype)
        )
        kernel(rows.contiguous(), slots.contiguous(), row_cache, row_scale)
