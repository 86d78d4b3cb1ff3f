"""Varlen attention for Hopper: warpgroups compute 64 query rows each, two warps stream keys and values by TMA.

The design is FlashAttention-3's (arXiv 2407.08608): the scores of the next tile and the output of this one are in
flight while a warpgroup is at its softmax, weights stay in registers, and two warpgroups take turns at the tensor
cores. Tiles are walked from the last visible key to the first, so that only the first few need a mask. Long rows of a
causal triangle are started first.
"""

from types import SimpleNamespace
from typing import NamedTuple

import tilelang.language as T
import torch
from torch import Tensor

from mha2mla.kernels.attention_varlen import tiled
from mha2mla.kernels.machine import (
    BARRIER,
    BY_ROW,
    GPU,
    SMALL_PASS_CONFIGS,
    WARPGROUP,
    Buffers,
    compile_for,
    compiled_once,
    make_function,
)
from mha2mla.kernels.ops import capability, dtype_name, on_device
from mha2mla.kernels.split_kv.choice import HOPPER, SHARED_MEMORY
from mha2mla.kernels.split_kv.device import LOG2E
from mha2mla.kernels.split_kv.plan import LONGEST

ROWS = 64  # of one warpgroup: the M of wgmma
STAGES = 2  # tiles of keys, and of values, in flight
TURN = 10  # named barrier of warpgroup 0's turn at the score products; the next is warpgroup 1's
REGISTERS = {2: 240, 3: 160}  # a thread, by computing warpgroups
PRODUCER_REGISTERS = 24
# (warpgroups, causal) -> most registers of accumulators at which ptxas was seen not to spill. A mask takes some as
# well; with three warpgroups, which have 160 registers, so do the addresses of more than 128 columns of queries.
ACCUMULATORS = {(2, False): 196, (2, True): 172, (3, False): 128, (3, True): 128}


class VarlenTiling(NamedTuple):
    """Computing warpgroups, of 64 query rows each, and keys of a tile."""

    warpgroups: int
    block_keys: int

    @property
    def block_rows(self) -> int:
        return self.warpgroups * ROWS


def chunks(width: int) -> list[tuple[int, int]]:
    """(offset, columns) of the pieces that ``width`` columns are cut into, padded: widths that wgmma and TMA swizzle.

    Whole multiples of 64, then 32 and 16 for the rest; TMA fills the padding of the last piece with zeros.
    """
    rest = -(-width // 16) * 16 % 64
    whole = -(-width // 16) * 16 - rest
    pieces = [(0, whole)] if whole else []
    for columns in (32, 16):
        if rest & columns:
            pieces.append((whole, columns))
            whole += columns
    return pieces


def padded(width: int) -> int:
    return sum(columns for _, columns in chunks(width))


def shared_bytes(shape: tiled.VarlenShape, tiling: VarlenTiling) -> int:
    """Upper bound of a block's shared memory."""
    qk = sum(padded(width) for width in shape.widths)
    keys = STAGES * tiling.block_keys
    return 2 * (tiling.block_rows * qk + keys * (qk + padded(shape.v_head_dim))) + 2048


def accumulators(shape: tiled.VarlenShape, tiling: VarlenTiling) -> int:
    """Registers of a thread that hold tiles: scores and output in float32, weights in 16 bits."""
    return tiling.block_keys // 2 + tiling.block_keys // 4 + padded(shape.v_head_dim) // 2


def hopper_tiling(shape: tiled.VarlenShape) -> VarlenTiling:
    """Tiles for sm_90: the most query rows, then the most keys, that registers and shared memory hold.

    Three warpgroups where the tile keeps 128 keys: at narrow heads the exponentials bound the speed, and more threads
    have more of them in flight (64/64 on an H200: 463 TFLOP/s against 418 with two). Without a mask the longest tile,
    since what a tile costs once, rescaling and the waits, is then paid least often (128/128: 668 with 176 keys, 600
    with 128). Causal, 128 keys are the most: the tile in which a row ends is worked on in whole.
    """
    candidates = [VarlenTiling(3, 128)] if sum(map(padded, shape.widths)) <= 128 else []
    candidates += [VarlenTiling(2, keys) for keys in range(128 if shape.causal else 176, 16, -16)]
    return next(
        tiling for tiling in candidates
        if accumulators(shape, tiling) <= ACCUMULATORS[tiling.warpgroups, shape.causal]
        and shared_bytes(shape, tiling) <= SHARED_MEMORY[HOPPER]
    )  # fmt: skip


def allocate(k: SimpleNamespace) -> Buffers:
    """Shared memory and barriers of a CTA. ``epilogue``: first row, how many are left, and head, for the end: registers
    are scarce."""
    dtype = k.shape.dtype
    return Buffers(
        q_tiles=[T.alloc_shared([k.rows, columns], dtype) for _, _, columns in k.pieces],
        k_rings=[T.alloc_shared([STAGES, k.block, columns], dtype) for _, _, columns in k.pieces],
        v_rings=[T.alloc_shared([STAGES, k.block, columns], dtype) for _, columns in k.outputs],
        epilogue=T.alloc_shared([4], T.int32),
        q_full=T.alloc_barrier(1),
        k_full=T.alloc_barrier([1] * STAGES),
        k_free=T.alloc_barrier([k.consumers // 32] * STAGES),
        v_full=T.alloc_barrier([1] * STAGES),
        v_free=T.alloc_barrier([k.consumers // 32] * STAGES),
    )


@T.macro
def multiply_scores(k, memory, slot, s):
    for c in list(range(len(k.pieces))):
        T.wgmma_gemm(
            memory.q_tiles[c], memory.k_rings[c][slot, :, :], s, transpose_B=True, clear_accum=c == 0, policy=BY_ROW
        )


@T.macro
def multiply_values(k, memory, slot, p, o):
    for c in list(range(len(k.outputs))):
        T.wgmma_gemm(p, memory.v_rings[c][slot, :, :], o[c], policy=BY_ROW)


@T.macro
def apply_softmax(k, masked, y, scale, t0, limits):
    """Scores become weights. ``limits``: the first key that row 0 does not see, window and sinks."""
    if masked:
        for i, j in T.Parallel(k.rows, k.block):
            y.s[i, j] = T.if_then_else(
                tiled.is_visible(k.shape, t0 + j, limits[0] + i if k.shape.causal else limits[0], limits[1], limits[2]),
                y.s[i, j],
                -T.infinity(T.float32),
            )
    tiled.update_softmax(GPU, y, scale)


@T.macro
def step(k, masked, thread, n, tiles, here, scale, memory, y, o, limits):
    """Scores of tile ``n``, from the last, beside the output of the tile before it."""
    w = thread // WARPGROUP
    T.barrier_wait(memory.k_full[n % STAGES], (n // STAGES) & 1)
    if k.ping_pong:
        T.sync_threads(barrier_id=TURN + w, arrive_count=k.consumers)
    multiply_scores(k, memory, n % STAGES, y.s)
    T.barrier_wait(memory.v_full[(n - 1) % STAGES], ((n - 1) // STAGES) & 1)
    multiply_values(k, memory, (n - 1) % STAGES, y.p, o)
    if k.ping_pong:
        if w == 0 or n < tiles - 1:
            T.named_barrier_arrive(TURN + 1 - w, k.consumers)
    T.wait_wgmma(len(k.outputs))
    if thread % 32 == 0:
        T.barrier_arrive(memory.k_free[n % STAGES])
    apply_softmax(k, masked, y, scale, here.tile(tiles - 1 - n) * k.block, limits)
    # Passed long ago. Without a branch here ptxas moves the exponentials behind the wait for the output.
    T.barrier_wait(memory.v_full[(n - 1) % STAGES], ((n - 1) // STAGES) & 1)
    T.wait_wgmma(0)
    if thread % 32 == 0:
        T.barrier_arrive(memory.v_free[(n - 1) % STAGES])
    for c in list(range(len(k.outputs))):
        for i, d in T.Parallel(k.rows, k.outputs[c][1]):
            o[c][i, d] *= y.rescale[i]
    T.copy(y.s, y.p)


@T.macro
def first_step(k, thread, tiles, here, scale, memory, y, limits):
    """Scores and weights of the first tile; its values behind the sequence are cleaned: a weight of 0 does not clean a
    NaN."""
    w = thread // WARPGROUP
    T.barrier_wait(memory.q_full, 0)
    T.barrier_wait(memory.k_full[0], 0)
    multiply_scores(k, memory, 0, y.s)
    if k.ping_pong:
        if w == 1 and tiles > 1:
            T.named_barrier_arrive(TURN, k.consumers)
    T.wait_wgmma(0)
    if thread % 32 == 0:
        T.barrier_arrive(memory.k_free[0])
    apply_softmax(k, True, y, scale, here.tile(tiles - 1) * k.block, limits)
    T.copy(y.s, y.p)
    if (tiles + here.span[tiled.GAP] if k.shape.windowed else tiles) * k.block > here.span[tiled.KEYS]:
        T.barrier_wait(memory.v_full[0], 0)
        for c in list(range(len(k.outputs))):
            for i, d in T.Parallel(k.block, k.outputs[c][1]):
                if here.tile(tiles - 1) * k.block + i >= here.span[tiled.KEYS]:
                    memory.v_rings[c][0, i, d] = T.cast(0, k.shape.dtype)
        T.fence_proxy_async()
        T.sync_threads(barrier_id=BARRIER, arrive_count=k.consumers)


@T.macro
def store(k, memory, y, o, call):
    """The output goes through the queries' memory, which is free by now, where it fits."""
    epilogue = memory.epilogue
    for i in T.Parallel(k.rows):
        if i < epilogue[1]:
            call.lse[epilogue[2], epilogue[0] + i] = y.scaled_max[i]
    for c in list(range(len(k.outputs))):
        left, columns = k.outputs[c]
        for i, d in T.Parallel(k.rows, columns):
            o[c][i, d] *= y.row_sum[i]
        if columns <= k.pieces[0][2]:
            T.copy(o[c], memory.q_tiles[0][:, 0:columns])
            T.sync_threads(barrier_id=BARRIER, arrive_count=k.consumers)
            for i, d in T.Parallel(k.rows, columns):
                if i < epilogue[1]:
                    if left + d < k.shape.v_head_dim:
                        call.out[epilogue[0] + i, epilogue[2], left + d] = memory.q_tiles[0][i, d]
            if c + 1 < len(k.outputs):
                T.sync_threads(barrier_id=BARRIER, arrive_count=k.consumers)
        else:
            for i, d in T.Parallel(k.rows, columns):
                if i < epilogue[1]:
                    if left + d < k.shape.v_head_dim:
                        call.out[epilogue[0] + i, epilogue[2], left + d] = o[c][i, d]


@T.macro
def consume(k, thread, here, memory, call):
    """One warpgroup: all tiles that some of its rows see."""
    T.set_max_nreg(REGISTERS[k.warpgroups], 1)
    y = tiled.alloc_softmax(GPU, k.rows, k.block, k.shape.dtype)
    o = [T.alloc_fragment([k.rows, columns], T.float32) for _, columns in k.outputs]
    span, scale = here.span, call.softmax_scale * LOG2E
    tiles, full = span[tiled.TILES], span[tiled.FULL]
    tiled.init_softmax(y)
    for c in list(range(len(k.outputs))):
        T.fill(o[c], 0)
    # First key that row 0 does not see. Rows behind the sequence's last may see too much; they are dropped.
    limit = span[tiled.KEYS] - span[tiled.QUERIES] + here.row0 + 1 if k.shape.causal else span[tiled.KEYS]
    limits = (limit, call.window, call.sinks)
    if tiles > 0:
        first_step(k, thread, tiles, here, scale, memory, y, limits)
        if k.shape.windowed:
            for n in T.serial(1, tiles):
                first = here.tile(tiles - 1 - n) * k.block
                if (first >= full * k.block) | ((first < span[tiled.IN_WINDOW]) & (first + k.block > call.sinks)):
                    step(k, True, thread, n, tiles, here, scale, memory, y, o, limits)
                else:
                    step(k, False, thread, n, tiles, here, scale, memory, y, o, limits)
        else:
            masked = T.max(0, tiles - full - 1) if k.shape.causal else 0
            for u in list(range(k.masked_tiles)):  # no loop: its 32 column numbers would be kept in registers
                if u < masked:
                    step(k, True, thread, u + 1, tiles, here, scale, memory, y, o, limits)
            for n in T.serial(tiles - 1 - masked):
                step(k, False, thread, masked + 1 + n, tiles, here, scale, memory, y, o, limits)
        T.barrier_wait(memory.v_full[(tiles - 1) % STAGES], ((tiles - 1) // STAGES) & 1)
        multiply_values(k, memory, (tiles - 1) % STAGES, y.p, o)
        T.wait_wgmma(0)
    tiled.finish_softmax(GPU, y)
    store(k, memory, y, o, call)


@T.macro
def stream_keys(k, here, sources, memory, thread, leader):
    """One warp: the queries, then the keys of every tile."""
    span = here.span
    first = span[tiled.FIRST_QUERY] + here.row0
    if span[tiled.TILES] > 0:
        for c in list(range(len(k.pieces))):
            part, left, columns = k.pieces[c]
            T.tma_copy(
                sources[part][0][first : first + k.rows, here.head, left : left + columns],
                memory.q_tiles[c],
                barrier=memory.q_full,
            )
        if thread == leader:
            T.barrier_arrive(memory.q_full)
    for n in T.serial(span[tiled.TILES]):
        t0 = span[tiled.FIRST_KEY] + here.tile(span[tiled.TILES] - 1 - n) * k.block
        T.barrier_wait(memory.k_free[n % STAGES], ((n // STAGES) & 1) ^ 1)
        for c in list(range(len(k.pieces))):
            part, left, columns = k.pieces[c]
            T.tma_copy(
                sources[part][1][t0 : t0 + k.block, here.key_head(part), left : left + columns],
                memory.k_rings[c][n % STAGES, :, :],
                barrier=memory.k_full[n % STAGES],
            )
        if thread == leader:
            T.barrier_arrive(memory.k_full[n % STAGES])


@T.macro
def stream_values(k, here, v, memory, thread, leader):
    """One warp: the values of every tile."""
    span = here.span
    for n in T.serial(span[tiled.TILES]):
        t0 = span[tiled.FIRST_KEY] + here.tile(span[tiled.TILES] - 1 - n) * k.block
        T.barrier_wait(memory.v_free[n % STAGES], ((n // STAGES) & 1) ^ 1)
        for c in list(range(len(k.outputs))):
            left, columns = k.outputs[c]
            T.tma_copy(
                v[t0 : t0 + k.block, here.value_head(), left : left + columns],
                memory.v_rings[c][n % STAGES, :, :],
                barrier=memory.v_full[n % STAGES],
            )
        if thread == leader:
            T.barrier_arrive(memory.v_full[n % STAGES])


def make_warp_specialised(shape: tiled.VarlenShape, tiling: VarlenTiling):
    """A TileLang function ``attention_varlen_ws`` for one static shape; :func:`varlen_arguments` has its arguments."""
    c = SimpleNamespace(
        shape=shape,
        warpgroups=tiling.warpgroups,
        rows=tiling.block_rows,
        block=tiling.block_keys,
        consumers=tiling.warpgroups * WARPGROUP,  # threads that compute
        ping_pong=tiling.warpgroups == 2,
        # part, first column and columns of each piece of queries and keys; then those of values and output
        pieces=[(part, offset, columns) for part in shape.parts for offset, columns in chunks(shape.widths[part])],
        outputs=chunks(shape.v_head_dim),
        # tiles after the first that only some rows see
        masked_tiles=-(-(tiling.block_rows - 1) // tiling.block_keys) if shape.causal else 0,
    )

    arguments = tiled.varlen_arguments(shape)
    batch = arguments["cu_seqlens_q"].shape[0] - 1

    @T.macro
    def body(call):
        with T.Kernel(call.row_tiles * shape.heads * batch, threads=c.consumers + WARPGROUP) as x:
            memory = allocate(c)
            thread = T.get_thread_binding()
            here = tiled.find_rows(shape, c.rows, c.block, x, call)
            memory.epilogue[0] = here.span[tiled.FIRST_QUERY] + here.row0
            memory.epilogue[1] = here.span[tiled.QUERIES] - here.row0
            memory.epilogue[2] = here.head
            T.sync_threads()

            if thread < c.consumers:
                consume(c, thread, here, memory, call)
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if thread < c.consumers + 32:
                    stream_keys(c, here, [(call.q, call.k), (call.q_pe, call.k_pe)], memory, thread, c.consumers)
                elif thread < c.consumers + 64:
                    stream_values(c, here, call.v, memory, thread, c.consumers + 32)

    return make_function("attention_varlen_ws", arguments, body)


# Bytes of keys and values that are worked on at a time. An H200 caches 50 MB, but a line that both halves of its
# multiprocessors read lies in both halves of the cache, and a section's first blocks run beside the last one's last.
L2_SHARE = 16 * 2**20


@compiled_once
def compile_attention_varlen(major_minor: int, shape: tiled.VarlenShape):
    """The compiled kernel and the query rows of its tiles. One compilation serves all batches, lengths and strides."""
    if major_minor == 90:
        tiling = hopper_tiling(shape)
        return compile_for(make_warp_specialised(shape, tiling), major_minor, SMALL_PASS_CONFIGS), tiling.block_rows
    rows, keys = tiled.portable_tiling(shape)
    function = tiled.make_tiled(shape, block_rows=rows, block_keys=keys)
    return compile_for(function, major_minor, SMALL_PASS_CONFIGS), rows


def launch_attention_varlen(
    q: Tensor, q_pe: Tensor | None, k: Tensor, k_pe: Tensor | None, v: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool, window: int, sinks: int, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """Run the kernel; arguments as in :func:`mha2mla.kernels.attention_varlen`, a second part of q and k or None, and a
    window of -1 is none."""
    batch = cu_seqlens_q.shape[0] - 1
    if out.numel() == 0 or batch == 0 or max_seqlen_q == 0:
        return
    if k.shape[0] == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    shapes = (k.shape[1:],) if k_pe is None else (k.shape[1:], k_pe.shape[1:])
    key_heads, widths = zip(*shapes, strict=True)
    shape = tiled.VarlenShape(
        q.shape[1], widths, key_heads, v.shape[1], v.shape[2], causal, dtype_name(v.dtype), window >= 0
    )
    with on_device(out.device):
        kernel, rows = compile_attention_varlen(capability(out.device), shape)
        kernel(
            q, q if q_pe is None else q_pe, k, k if k_pe is None else k_pe, v, cu_seqlens_q.contiguous(),
            cu_seqlens_k.contiguous(), out, lse, softmax_scale, -(-max_seqlen_q // rows),
            heads_at_a_time(shape, k, batch), min(window, LONGEST), min(sinks, LONGEST),
        )  # fmt: skip


def heads_at_a_time(shape: tiled.VarlenShape, k: Tensor, batch: int) -> int:
    """Query heads whose keys and values take about ``L2_SHARE`` together, whole groups of them, at most all."""
    tokens = -(-k.shape[0] // batch)  # of a sequence, on average: lengths are on the device
    group = shape.heads // shape.value_heads
    parts = zip(shape.widths, shape.key_heads, strict=True)  # one that groups share counts in part for each
    width = sum(width * heads / shape.value_heads for width, heads in parts) + shape.v_head_dim
    at_once = max(1, round(L2_SHARE / max(1.0, tokens * width * k.element_size()))) * group
    return min(at_once, shape.heads * batch)  # the kernel multiplies it by tiles of rows, in 32 bits
