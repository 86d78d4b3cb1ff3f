"""RoPE of new tokens fused with writing into a paged cache, alone or with W_UK; and rows written in 8 bits."""

from dataclasses import astuple, dataclass
from math import gcd
from types import SimpleNamespace
from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, GPU, Buffers, Machine, compiler, make_function
from mha2mla.kernels.mla_decode.quantization import KEY_SCALE_OF_LARGEST, SCALE_OF_LARGEST, SMALLEST_SCALE
from mha2mla.kernels.ops import capability, dtype_name, on_device, vector_of, with_dense_rows
from mha2mla.kernels.skinny_linear.up_projections import THREADS as W_UK_THREADS
from mha2mla.kernels.skinny_linear.up_projections import w_uk_blocks, w_uk_parts

BLOCK_THREADS = 128  # of rope_append
LARGEST_FLOAT = 3.4028234663852886e38


@dataclass(frozen=True)
class AppendShape:
    """Static part of a call.

    Attributes:
        heads: query heads H to rotate; 0 leaves the queries out.
        num_rope_heads, row_width: G and the width of a row; what is 0 is not written.
        qk_rope_head_dim: d_r.
        num_tables: rows of inv_freq; divides H and G.
        page_size: tokens per page.
        dtype: of rows, keys, queries and caches.
        interleaved: pairs are neighbours (x_0, x_1), …; else halves (x_0, x_{d_r / 2}), ….
        vector: elements that a thread moves at a time, at most; every row and pointer is aligned to so many.
        has_key_codes: keys are quantised to int8; G is 1 then.
    """

    heads: int
    num_rope_heads: int
    row_width: int
    qk_rope_head_dim: int
    num_tables: int
    page_size: int
    dtype: str
    interleaved: bool = False
    vector: int = 1
    has_key_codes: bool = False


@T.macro
def look_at(most, x):
    """``most``: the largest magnitude so far, and 1 if there is an infinity or a NaN, which a maximum may miss."""
    most[0] = T.max(most[0], T.max(x, -x))
    most[1] = T.if_then_else(T.max(x, -x) <= LARGEST_FLOAT, most[1], 1.0)  # not for NaN


@T.macro
def find_scale(most, scale, factor, on_cpu):
    """Scale of a row, ``factor`` times the largest element of a warp's threads, as in ``quantize_latent``."""
    if not on_cpu:
        for v in list(range(5)):
            most[0] = T.max(most[0], T.shfl_xor(most[0], 1 << v))
            most[1] = T.max(most[1], T.shfl_xor(most[1], 1 << v))
    scale[0] = T.max(most[0] * T.float32(factor), T.float32(SMALLEST_SCALE))
    scale[0] = T.if_then_else(most[0] == 0, 1.0, scale[0])
    if most[1] > 0:
        scale[0] = T.sqrt(-most[1])  # NaN; TileLang takes x == x, x * 0 and inf - inf for what they are of numbers


def append_parts(s: AppendShape, block_tokens: int, threads: int, on_cpu: bool = False) -> SimpleNamespace:
    """Body of a block; arguments as of :func:`make_rope_append`.

    Returns:
        ``alloc()``: buffers by name; ``find_angles(call, m, t0, tokens)`` and ``find_slots(slots, m, t0, tokens,
        pages)`` of the block's tokens, from ``t0`` on, and once they are there ``write(call, m, t0, tokens)``.
    """
    heads, num_rope_heads, row_width, qk_rope_head_dim, num_tables, page_size, dtype, interleaved, vector, has_codes = (
        astuple(s)
    )
    accum = T.float32
    machine = Machine(on_cpu)
    half = qk_rope_head_dim // 2
    groups, queries = max(1, num_rope_heads), max(1, heads)
    threads = 1 if on_cpu else threads
    # Angles, and vectors of rows and pairs, of a block; threads take them in turn. (T.Parallel finds no layout for some
    # of these shapes, such as 9 heads of 8 pairs.)
    row_vector, pairs = gcd(max(1, row_width), vector), gcd(half, max(1, vector // 2) if interleaved else vector)
    row_vectors, half_vectors = max(1, row_width) // row_vector, half // pairs
    angles, numbers = block_tokens * num_tables * half, block_tokens * row_vectors if row_width else 0
    key_vectors, query_vectors = block_tokens * num_rope_heads * half_vectors, block_tokens * heads * half_vectors

    lanes = 1 if on_cpu else 32
    key_rounds = -(-half_vectors // lanes) if has_codes else 0

    def rounds(count):
        return -(-count // threads)

    def first(pair):  # in a vector of pairs in registers
        return 2 * pair if interleaved else pair

    def second(pair):
        return 2 * pair + 1 if interleaved else pairs + pair

    def product(a, b):
        # Rounded by itself: the compiler fuses one of two products into their sum, another one for each width of row,
        # and a cached key must not depend on its token's other writes.
        return a * b if on_cpu else T.ieee_mul(a, b)

    def parts(p):
        """Place in a head, place in registers and count of the numbers of pairs from ``p`` on."""
        return [(2 * p, 0, 2 * pairs)] if interleaved else [(p, 0, pairs), (half + p, pairs, pairs)]

    @T.macro
    def turn(x, i, table, p):
        for v in T.unroll(pairs):
            x.pair[0] = T.cast(x.held[first(v)], accum)
            x.pair[1] = T.cast(x.held[second(v)], accum)
            x.held[first(v)] = product(x.pair[0], x.cos[i, table, p + v]) - product(x.pair[1], x.sin[i, table, p + v])
            x.held[second(v)] = product(x.pair[1], x.cos[i, table, p + v]) + product(x.pair[0], x.sin[i, table, p + v])

    @T.macro
    def hold(x, i, table, p, source, head):
        """Pairs from ``p`` on of ``source[head]``, rotated."""
        for there, here, count in parts(p):
            for v in T.vectorized(count):
                x.held[here + v] = source[(*head, there + v)]
        turn(x, i, table, p)

    @T.macro
    def rotate(x, i, table, p, source, head, target, to, left):
        """Pairs from ``p`` on of ``source[head]`` to ``target[to]``, where the head's columns begin at ``left``."""
        hold(x, i, table, p, source, head)
        for there, here, count in parts(p):
            for v in T.vectorized(count):
                target[(*to, left + there + v)] = x.held[here + v]

    @T.macro
    def write_codes(call, m, t0, i, lane):
        """A warp: the key of the block's i-th token, rotated and rounded to its dtype, as codes and their scale."""
        m.most[0] = 0.0
        m.most[1] = 0.0
        for r in T.unroll(key_rounds):
            if r * lanes + lane < half_vectors:
                hold(m, i, 0, (r * lanes + lane) * pairs, call.keys, (t0 + i, 0))
                for v in T.unroll(2 * pairs):
                    m.wide[r * 2 * pairs + v] = T.cast(m.held[v], accum)
                    look_at(m.most, m.wide[r * 2 * pairs + v])
        find_scale(m.most, m.scale, KEY_SCALE_OF_LARGEST, on_cpu)
        page, row = m.slot[i] // page_size, m.slot[i] % page_size
        for r in T.unroll(key_rounds):
            if r * lanes + lane < half_vectors:
                for there, here, count in parts((r * lanes + lane) * pairs):
                    for v in T.unroll(count):
                        call.rope_cache[page, row, there + v] = T.cast(  # to nearest even, 127 at most by the scale
                            T.nearbyint(m.wide[r * 2 * pairs + here + v] / m.scale[0]), T.int8
                        )
        if lane == 0:
            call.rope_scale[page, row] = m.scale[0]

    def alloc():
        of_codes = {
            "wide": T.alloc_local([key_rounds * 2 * pairs], accum),
            "most": T.alloc_local([2], accum),
            "scale": T.alloc_local([1], accum),
        } if has_codes else {}  # fmt: skip
        return of_codes | {
            "cos": machine.alloc_shared([block_tokens, num_tables, half], accum),
            "sin": machine.alloc_shared([block_tokens, num_tables, half], accum),
            "slot": machine.alloc_shared([block_tokens], T.int32),
            "pair": T.alloc_local([2], accum),
            "held": T.alloc_local([2 * pairs], dtype),
        }

    @T.macro
    def find_angles(call, m, t0, tokens):
        for r in T.serial(rounds(angles)):
            e = r * threads + machine.thread
            if e < angles:
                i, g, p = e // (num_tables * half), e // half % num_tables, e % half
                m.pair[0] = T.cast(call.positions[T.min(t0 + i, tokens - 1)], accum) * call.inv_freq[g, p]
                m.cos[i, g, p] = T.cos(m.pair[0]) * T.if_then_else(call.inv_freq[g, p] == 0, 1.0, call.scaling)
                m.sin[i, g, p] = T.sin(m.pair[0]) * call.scaling

    @T.macro
    def find_slots(slots, m, t0, tokens, pages):
        for r in T.serial(rounds(block_tokens)):
            i = r * threads + machine.thread
            if i < block_tokens:
                # -1: nothing to write, also where a slot lies outside the cache
                m.slot[i] = T.if_then_else(
                    (t0 + i < tokens) & (slots[T.min(t0 + i, tokens - 1)] < pages * page_size),
                    slots[T.min(t0 + i, tokens - 1)],
                    -1,
                )

    @T.macro
    def write(call, m, t0, tokens):
        for r in T.serial(rounds(numbers)):
            e = r * threads + machine.thread
            if (e < numbers) & (m.slot[T.min(e // row_vectors, block_tokens - 1)] >= 0):
                i, c = e // row_vectors, e % row_vectors * row_vector
                for v in T.vectorized(row_vector):
                    call.row_cache[m.slot[i] // page_size, m.slot[i] % page_size, c + v] = call.rows[t0 + i, c + v]
        if has_codes:
            for r in T.serial(rounds(block_tokens * lanes)):
                i = (r * threads + machine.thread) // lanes
                if (i < block_tokens) & (m.slot[T.min(i, block_tokens - 1)] >= 0):
                    write_codes(call, m, t0, i, machine.thread % lanes)
        for r in T.serial(0 if has_codes else rounds(key_vectors)):
            e = r * threads + machine.thread
            if (e < key_vectors) & (m.slot[T.min(e // (groups * half_vectors), block_tokens - 1)] >= 0):
                i, g, p = e // (groups * half_vectors), e // half_vectors % groups, e % half_vectors * pairs
                rotate(
                    m, i, g * num_tables // groups, p, call.keys, (t0 + i, g), call.rope_cache,
                    (m.slot[i] // page_size, m.slot[i] % page_size), g * qk_rope_head_dim,
                )  # fmt: skip
        for r in T.serial(rounds(query_vectors)):
            e = r * threads + machine.thread
            if (e < query_vectors) & (t0 + e // (queries * half_vectors) < tokens):
                i, h, p = e // (queries * half_vectors), e // half_vectors % queries, e % half_vectors * pairs
                rotate(m, i, h * num_tables // queries, p, call.query, (t0 + i, h), call.out, (t0 + i, h), 0)

    return SimpleNamespace(alloc=alloc, find_angles=find_angles, find_slots=find_slots, write=write)


def append_arguments(s: AppendShape, machine: Machine = GPU) -> dict[str, Any]:
    """Types of the arguments by name: rows [N,width], keys [N,G,d_r] and queries [N,H,d_r] (run-time strides: parts of
    one projection are read where they lie), positions [N] int32, slots [N] int32, inv_freq [num_tables,d_r/2] float32;
    row_cache [P,page,width] and rope_cache [P,page,G*d_r] (run-time strides), then of quantised keys rope_scale
    [P,page] float32, out [N,H,d_r]; scaling float32. An absent tensor is passed as any with a size of at least one
    everywhere."""
    tokens, pages, rope, dtype = T.dynamic("tokens"), T.dynamic("pages"), s.qk_rope_head_dim, s.dtype
    groups, width, queries = max(1, s.num_rope_heads), max(1, s.row_width), max(1, s.heads)
    return {
        "rows": machine.strided("rows", [tokens, width], dtype),
        "keys": machine.strided("keys", [tokens, groups, rope], dtype),
        "query": machine.strided("query", [tokens, queries, rope], dtype),
        "positions": T.Tensor([tokens], T.int32),
        "slots": T.Tensor([tokens], T.int32),
        "inv_freq": T.Tensor([s.num_tables, rope // 2], T.float32),
        "row_cache": machine.strided("row", [pages, s.page_size, width], dtype),
        "rope_cache": machine.strided("key", [pages, s.page_size, groups * rope], T.int8 if s.has_key_codes else dtype),
        **({"rope_scale": machine.strided("scale", [pages, s.page_size], T.float32)} if s.has_key_codes else {}),
        "out": T.Tensor([tokens, queries, rope], dtype),
        "scaling": T.float32(),
    }


@T.macro
def assume_aligned(call, vector):
    """Run-time strides are multiples of ``vector``: else stores are not known to be aligned, and stay scalar."""
    if vector > 1:
        # A loop over tensors or strides would give them all one name.
        for i in list(range(9)):
            T.assume(stride(i, call.rows, call.keys, call.query, call.row_cache, call.rope_cache) % vector == 0)


def stride(i, *tensors):
    """The i-th run-time stride of tensors."""
    return [stride for tensor in tensors for stride in list(tensor.strides)[:-1]][i]


def make_rope_append(shape: AppendShape, *, block_tokens: int = 4, dependent: bool = False, on_cpu: bool = False):
    """A TileLang function ``rope_append``; tokens and pages are run-time values.

    Args:
        shape: of the call; :func:`append_arguments` has the function's arguments.
        block_tokens: of a block.
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer).
        on_cpu: compile for TileLang's C target.
    """
    threads = 1 if on_cpu else BLOCK_THREADS
    parts, arguments = append_parts(shape, block_tokens, threads, on_cpu), append_arguments(shape, Machine(on_cpu))
    tokens, pages = arguments["rows"].shape[0], arguments["row_cache"].shape[0]

    @T.macro
    def body(call):
        with T.Kernel(T.ceildiv(tokens, block_tokens), threads=threads) as x:
            if not on_cpu:
                assume_aligned(call, shape.vector)
            m = Buffers(**parts.alloc())
            t0 = x * block_tokens
            if dependent:
                T.pdl_sync()
                T.pdl_trigger()
            parts.find_angles(call, m, t0, tokens)
            parts.find_slots(call.slots, m, t0, tokens, pages)
            T.sync_threads()
            parts.write(call, m, t0, tokens)

    return make_function("rope_append", arguments, body)


def make_append_w_uk(shape: AppendShape, *, kv_heads: int, inner: int):
    """A TileLang function ``append_w_uk`` for sm_90: a block for each token as of ``rope_append``, then those of
    ``w_uk``; tokens and pages are run-time values.

    Before the previous kernel ends, W_UK is read and angles are made of the positions in memory; angles are made again
    where these have changed once it has ended.

    Args:
        shape: of the call, whose rows are as wide as a weight.
        kv_heads, inner: number of weights, and their rows, as ``groups`` and ``inner`` of ``make_w_uk``.

    The function's arguments: those of ``rope_append``; then x, up and mapped, as of ``w_uk``.
    """
    heads, width, dtype = shape.heads, shape.row_width, shape.dtype
    append, arguments = append_parts(shape, 1, W_UK_THREADS), append_arguments(shape)
    product = w_uk_parts(heads=heads, groups=kv_heads, inner=inner, outer=width, dtype=dtype)
    tokens, pages = arguments["rows"].shape[0], arguments["row_cache"].shape[0]
    arguments |= {
        "x": GPU.strided("x", [tokens, heads, inner], dtype),
        "up": T.Tensor([kv_heads, inner, width], dtype),
        "mapped": T.Tensor([tokens, heads, width], dtype),
    }

    @T.macro
    def body(call):
        with T.Kernel(w_uk_blocks(tokens, heads, width) + tokens, threads=W_UK_THREADS) as block:
            assume_aligned(call, shape.vector)
            m = Buffers(**append.alloc(), **product.alloc(), then=T.alloc_local([2], T.int32))
            if block < tokens:
                m.then[0] = call.positions[block]
                append.find_angles(call, m, block, tokens)
                T.pdl_sync()
                T.pdl_trigger()
                m.then[1] = call.positions[block]
                append.find_slots(call.slots, m, block, tokens, pages)
                if m.then[0] != m.then[1]:
                    append.find_angles(call, m, block, tokens)
                T.sync_threads()
                append.write(call, m, block, tokens)
            else:
                product.ask(call.up, m, block - tokens)
                T.pdl_sync()
                T.pdl_trigger()
                product.apply(call.x, call.mapped, m, block - tokens, tokens)

    return make_function("append_w_uk", arguments, body)


def make_quantize_rows(
    *, row_width: int, page_size: int, dtype: str, code_dtype: str = "float8_e4m3fn", on_cpu: bool = False
):
    """A TileLang function ``quantize_rows``; tokens and pages are run-time values.

    Args:
        row_width: elements of a row.
        page_size: tokens per page.
        dtype: of the rows.
        code_dtype: of the cache; "float32" shows the quotients before they are rounded.
        on_cpu: compile for TileLang's C target.

    The function's arguments: rows [N,width] (contiguous), slots [N] int32, row_cache [P,page,width] and row_scale
    [P,page] float32 (run-time strides). A slot outside the cache writes nothing. ``quantize_latent`` has the format.
    """
    accum = T.float32
    machine = Machine(on_cpu)
    lanes = 1 if on_cpu else 32
    rounds = -(-row_width // lanes)
    block_tokens = 8  # and warps of a block
    tokens, pages = T.dynamic("tokens"), T.dynamic("pages")

    @T.macro
    def quantize(token, lane, rows, slots, row_cache, row_scale, x, most, scale):
        """One row."""
        most[0] = 0.0
        most[1] = 0.0
        for v in T.unroll(rounds):
            x[v] = T.if_then_else(
                v * lanes + lane < row_width, T.cast(rows[token, T.min(v * lanes + lane, row_width - 1)], accum), 0.0
            )
            look_at(most, x[v])
        find_scale(most, scale, SCALE_OF_LARGEST, on_cpu)
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


compile_rope_append = compiler(make_rope_append, EXACT_PASS_CONFIGS)
compile_append_w_uk = compiler(make_append_w_uk, EXACT_PASS_CONFIGS)
compile_quantize_rows = compiler(make_quantize_rows, EXACT_PASS_CONFIGS)


def _operands(
    rows: Tensor, keys: Tensor, query: Tensor, row_cache: Tensor, rope_cache: Tensor, rope_scale: Tensor | None,
    positions: Tensor, slots: Tensor, inv_freq: Tensor, attention_scaling: float, interleaved: bool, out: Tensor,
) -> tuple[AppendShape, tuple[Any, ...]]:  # fmt: skip
    """Shape and operands of a kernel, others in the place of what is empty (queries, keys, rows, a cache)."""
    tokens, heads, rope = query.shape
    heads = heads if rope else 0
    groups = keys.shape[1] if keys.numel() and rope_cache.numel() else 0
    width = rows.shape[1] if rows.numel() and row_cache.numel() else 0
    if not rope:  # nothing to turn, but the kernel has a table all the same
        rope, inv_freq = 8, inv_freq.new_zeros(1, 4)
    pages, page_size = row_cache.shape[:2] if width else rope_cache.shape[:2] if groups else (1, 1)
    query = with_dense_rows(query)
    nothing = query[:, :1] if heads and width else query.new_empty(tokens, 1, rope)
    query, out = (query, out) if heads else (nothing, nothing)
    keys = with_dense_rows(keys) if groups else nothing
    rows = with_dense_rows(rows) if width else nothing[:, 0, :1]
    if groups:
        rope_cache = rope_cache.flatten(2)
    else:  # only its shape is looked at, which must agree with the other cache's
        rope_cache = nothing.as_strided((pages, page_size, rope), (0, 0, 1) if width else (rope, rope, 1))
    scale = () if rope_scale is None or not groups else (rope_scale,)
    if not width:
        row_cache = nothing.as_strided((pages, page_size, 1), (0, 0, 1)) if scale else rope_cache[:, :, :1]
    vector, dtype = vector_of(rows, keys, query, row_cache, rope_cache, out), dtype_name(query.dtype)
    shape = AppendShape(
        heads, groups, width, rope, inv_freq.shape[0], page_size, dtype, interleaved, vector, bool(scale)
    )
    lists = (positions.contiguous(), slots.contiguous(), inv_freq.contiguous())
    return shape, (rows, keys, query, *lists, row_cache, rope_cache, *scale, out, attention_scaling)


def launch_rope_append(*call: Any) -> None:
    """Run the kernel; arguments as the op ``rope_append`` takes them, then the output. Rows alone are written where
    the others are empty, or keys alone, or nothing and only queries are rotated."""
    query = call[2]
    if query.shape[0] == 0:
        return
    with on_device(query.device):
        shape, operands = _operands(*call)
        if shape.heads or shape.num_rope_heads or shape.row_width:
            _launch(shape, operands, query.device)


def _launch(shape: AppendShape, operands: tuple[Any, ...], device: torch.device) -> None:
    # With a table a head a token's angles occupy a block, and four tokens' make it wait.
    alone, here = shape.num_tables * shape.qk_rope_head_dim >= 2 * BLOCK_THREADS, capability(device)
    compile_rope_append(here, shape=shape, block_tokens=1 if alone else 4, dependent=here >= 90)(*operands)


def launch_rotation(x: Tensor, positions: Tensor, inv_freq: Tensor, attention_scaling: float, out: Tensor) -> None:
    """Run the kernel of rotations alone: x [T, d_r] at ``positions`` [T] by inv_freq [d_r / 2]; both contiguous."""
    tokens, rope = x.shape
    if tokens == 0:
        return
    query, cache = x.view(tokens, 1, rope), x.as_strided((1, 1, rope), (rope, rope, 1))  # of the latter only the shape
    shape = AppendShape(1, 0, 0, rope, 1, 1, dtype_name(x.dtype), False, vector_of(x, out))
    lists = (positions, positions, inv_freq.view(1, -1))
    operands = (x[:, :1], query, query, *lists, cache[:, :, :1], cache, out.view(tokens, 1, rope), attention_scaling)
    with on_device(x.device):
        _launch(shape, operands, x.device)


def launch_append_w_uk(call: tuple[Any, ...], x: Tensor, k_up: Tensor, mapped: Tensor) -> None:
    """Run the kernel; ``call`` as of :func:`launch_rope_append`, the others as of ``make_append_w_uk``."""
    with on_device(x.device):
        shape, operands = _operands(*call)
        kernel = compile_append_w_uk(capability(x.device), shape=shape, kv_heads=k_up.shape[0], inner=x.shape[2])
        kernel(*operands, with_dense_rows(x), k_up, mapped)


def launch_quantize_rows(rows: Tensor, row_cache: Tensor, row_scale: Tensor, slots: Tensor) -> None:
    """Run the kernel: rows [N, width] to slots [N] of row_cache [P, page, width] (e4m3) and row_scale [P, page]."""
    if rows.numel() == 0 or row_cache.numel() == 0:
        return
    with on_device(rows.device):
        kernel = compile_quantize_rows(
            capability(rows.device), row_width=rows.shape[1], page_size=row_cache.shape[1], dtype=dtype_name(rows.dtype)
        )
        kernel(rows.contiguous(), slots.contiguous(), row_cache, row_scale)
