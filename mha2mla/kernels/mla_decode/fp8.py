"""MLA decode over an e4m3 latent cache for Hopper: codes go from shared memory through registers into wgmma.

wgmma takes 8-bit operands K-major only, and the latent is wanted both ways: C Q^T for the scores and C^T P^T for the
output. So both products take C as the register operand, in float16, which holds every e4m3 number: ``ldmatrix`` fetches
codes (transposed in pairs for the second product), two steps before the products that take them. (8-bit wgmma could
take the scores' codes from shared memory as they are, but it adds up 14 bits on Hopper: 1e-4 to 1e-3 of a score, which
the log-sum-exp does not forgive.)

The scale of a token leaves the products alone. With M the running maximum of ``score + log2(scale)``, the weight
``w = exp2(score + log2(scale) - M)`` of a token is at most 1 and already contains its scale, so w fits float16;
the denominator sums ``w / scale``. Queries are float16 too, after an exact scaling of each row by a power of two.

Two warpgroups take alternate tiles, each from a ring of its own and with a softmax and an output of its own, which they
add up at the end of a fragment. (Schedule, fragments and partials are those of ``mla_decode``.)
"""

import tilelang.language as T
from tilelang import tvm
from tilelang.layout import make_full_bank_swizzled_layout

from mha2mla.kernels.machine import BARRIER, WARPGROUP
from mha2mla.kernels.mla_decode.fp8_products import (
    BLOCK,
    CODES,
    CONSUMERS,
    INLINE,
    PANEL,
    WIDE,
    Static,
    Thread,
    allocate,
    describe,
    multiply_output,
    multiply_scores,
    store_weights,
)  # fmt: skip
from mha2mla.kernels.mla_decode.selection import DecodeShape, column_of_code
from mha2mla.kernels.mla_decode.static import MLATypes
from mha2mla.kernels.split_kv import device
from mha2mla.kernels.split_kv.choice import KernelChoice

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
SLACK = 6.0  # the maximum may fall behind by this many powers of two before the output is scaled down: 2**6 in float16
LARGEST_EXPONENT = 14  # of a scaled query; float16 ends below 2**16
SMALLEST_QUERY = -40  # exponent below which a query row is not scaled up any further


@T.macro
def stream(k, w, work, column, memory, call, thread, leader):
    """One warp: the tiles of warpgroup ``w``, codes, scales and rotary keys."""
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial((work.tiles + 1 - w) // 2):
            t0 = work.first_token(2 * i + w)
            n = work.done + i
            slot = n % k.stages
            full = w * k.stages + slot
            device.find_pages(work, t0)
            T.barrier_wait(memory.free[full], ((n // k.stages) & 1) ^ 1)
            for v in work.pieces:
                first, in_page = v * k.page_rows, t0 % k.page_size
                for c in list(range(k.panels)):
                    T.tma_copy(
                        call.latent_cache[
                            work.pages[v], in_page : in_page + k.page_rows, c * PANEL : c * PANEL + PANEL
                        ],
                        memory.c_ring[w, slot, c, first : first + k.page_rows, :],
                        barrier=memory.full[full],
                    )
                for c in list(range(k.rope_panels)):
                    T.tma_copy(
                        call.rope_cache[
                            work.pages[v], in_page : in_page + k.page_rows, column + c * WIDE : column + c * WIDE + WIDE
                        ],
                        memory.k_ring[w, slot, c, first : first + k.page_rows, :],
                        barrier=memory.full[full],
                    )
                T.tma_copy(
                    call.latent_scale[work.pages[v], in_page : in_page + k.page_rows],
                    memory.s_ring[w, slot, v, 0 : k.page_rows],
                    barrier=memory.full[full],
                )
            if thread == leader:
                T.barrier_arrive(memory.full[full])
        work.state[2] += (work.tiles + 1 - w) // 2


@T.macro
def load_queries(k, c, work, tile, call):
    """All consumers: the queries of a fragment. A warp takes a row of latent queries at a time."""
    x, row_max, memory = c.x, c.row_max, c.memory
    for i in T.serial(k.rows // 8):
        r = i * 8 + c.thread // 32
        row_max[0] = 0.0
        for v in T.unroll(4 * k.panels):
            d = v // 4 * PANEL + 4 * c.lane + v % 4
            x[v] = T.if_then_else(
                tvm.tirx.And(tile.holds(r), d < k.d_c),
                T.cast(call.q_latent[(*tile.query(work, r), T.min(d, k.d_c - 1))], T.float32),
                0.0,
            )
            row_max[0] = T.max(row_max[0], T.abs(x[v]))
        for v in list(range(5)):
            row_max[0] = T.max(row_max[0], T.shfl_xor(row_max[0], 1 << v))
        # the power of two below the largest, as bits of a float32; both factors are powers of two, hence exact
        exponent = T.max(
            T.min(T.shift_right(T.reinterpret(row_max[0], "int32"), 23) - 127, 127), T.int32(SMALLEST_QUERY)
        )
        row_max[1] = T.reinterpret(T.shift_left(127 + LARGEST_EXPONENT - exponent, 23), T.float32)
        if c.lane == 0:
            memory.q_scale[r] = T.reinterpret(T.shift_left(127 - LARGEST_EXPONENT + exponent, 23), T.float32)
        for v in T.unroll(4 * k.panels):
            d = v // 4 * PANEL + 4 * c.lane + v % 4
            memory.q_tile[d // WIDE, r, column_of_code(d) % WIDE] = T.cast(x[v] * row_max[1], "float16")
    for i in T.serial(k.rows * k.rope_panels * WIDE // CONSUMERS):
        e = i * CONSUMERS + c.thread
        r = e // (k.rope_panels * WIDE)
        d = e % (k.rope_panels * WIDE)
        memory.qp_tile[d // WIDE, r, d % WIDE] = T.if_then_else(
            tvm.tirx.And(tvm.tirx.And(tile.holds(r), k.meets(r, d)), d < k.tiling.groups_per_tile * k.d_r),
            call.q_pe[(*tile.query(work, r), d % k.d_r)],
            T.cast(0, k.dtype),
        )


@T.macro
def clean_codes(k, c, work, t0, slot):
    """Zero what no row sees: 0 times NaN is NaN."""
    if work.has_masked(t0, BLOCK):
        for i in T.serial(k.panels * BLOCK * PANEL // 4 // WARPGROUP):
            for v in T.vectorized(4):
                e = i * WARPGROUP + c.thread % WARPGROUP
                if work.is_masked(t0 + e // (PANEL // 4) % BLOCK):
                    c.memory.c_ring[
                        c.w, slot, e // (PANEL // 4 * BLOCK), e // (PANEL // 4) % BLOCK, e % (PANEL // 4) * 4 + v
                    ] = T.cast(0, CODES)
        T.fence_proxy_async()
        c.sync()


@T.macro
def scale_scores(k, c, work, tile, call, t0, slot, scale, tail):
    """``s`` becomes score + log2(scale of its token), in powers of two; what a row does not see is masked."""
    first = t0 + c.warp * 16 + c.g
    for i in list(range(2)):
        at = c.warp * 16 + c.g + 8 * i
        c.scale_of[i] = c.memory.s_ring[c.w, slot, at // k.page_rows, at % k.page_rows]
        # 0 is what stands where a table has no page, with codes of 0
        c.scale_of[i] = T.if_then_else(c.scale_of[i] == 0, 1.0, c.scale_of[i])
        if work.has_masked(t0, BLOCK):
            c.scale_of[i] = T.if_then_else(work.is_masked(first + 8 * i), 1.0, c.scale_of[i])
        c.log_of[i] = T.log2(c.scale_of[i])
    for e in T.unroll(k.held):
        c.s[e] = (c.s[e] * (c.memory.q_scale[c.row_of(e)] * c.scale_of[e // 2 % 2]) + c.turned[e]) * scale + c.log_of[
            e // 2 % 2
        ]
    if work.needs_mask(t0, BLOCK, tail):
        for e in T.unroll(k.held):
            limit = work.stop - tail + T.min(tile.token(c.row_of(e)), tail)
            c.s[e] = T.if_then_else(
                work.is_visible(first + e // 2 % 2 * 8, limit, call.window, call.sinks), c.s[e], device.MASKED
            )


@T.macro
def find_weights(k, c):
    """Online softmax (arXiv 1805.02867): ``s`` becomes weights with their scales; ``row_sum`` is without scales."""
    for h in T.unroll(k.mine):
        c.row_max[h] = T.max(c.s[h // 2 * 4 + h % 2], c.s[h // 2 * 4 + h % 2 + 2])
    for v in list(range(3)):
        for h in T.unroll(k.mine):
            c.row_max[h] = T.max(c.row_max[h], T.shfl_xor(c.row_max[h], 4 << v))
    if c.g == 0:
        for h in T.unroll(k.mine):
            c.memory.stage[c.w, c.warp, c.row(h)] = c.row_max[h]
    c.sync()
    c.flag[0] = 0
    for h in T.unroll(k.mine):
        for v in list(range(4)):
            c.row_max[h] = T.max(c.row_max[h], c.memory.stage[c.w, v, c.row(h)])
        if c.row_max[h] > c.m[h] + SLACK:
            c.flag[0] = 1
    if T.any_sync(c.flag[0]) != 0:
        for h in T.unroll(k.mine):  # row_max becomes the factor for what is there
            c.x[0] = c.m[h]
            c.m[h] = T.if_then_else(c.row_max[h] > c.m[h] + SLACK, c.row_max[h], c.m[h])
            c.row_max[h] = T.exp2(c.x[0] - c.m[h])
            c.row_sum[h] *= c.row_max[h]
        for i in T.unroll(k.tiles * k.held):
            c.o[i] *= c.row_max[i % k.held // 4 * 2 + i % 2]
    for e in T.unroll(k.held):
        c.s[e] = T.exp2(
            c.s[e] - T.if_then_else(c.m[e // 4 * 2 + e % 2] == device.MASKED, 0.0, c.m[e // 4 * 2 + e % 2])
        )  # masked scores weigh nothing
    for i in list(range(2)):
        c.scale_of[i] = 1.0 / c.scale_of[i]
    for h in T.unroll(k.mine):  # w / scale is the softmax's own weight
        c.row_sum[h] += c.s[h // 2 * 4 + h % 2] * c.scale_of[0] + c.s[h // 2 * 4 + h % 2 + 2] * c.scale_of[1]


@T.macro
def merge(k, c):
    """Both warpgroups' denominators and maxima: ``row_sum`` and ``row_max`` of both, ``o`` scaled to be added up."""
    w, memory = c.w, c.memory
    for v in list(range(3)):
        for h in T.unroll(k.mine):
            c.row_sum[h] += T.shfl_xor(c.row_sum[h], 4 << v)
    c.sync()
    if c.g == 0:
        for h in T.unroll(k.mine):
            memory.stage[w, c.warp, c.row(h)] = c.row_sum[h]
            memory.totals[w, c.row(h)] = c.m[h]  # the same in all warps
    T.sync_threads(barrier_id=BARRIER + 2, arrive_count=CONSUMERS)
    for h in T.unroll(k.mine):
        c.row_max[h] = T.max(c.m[h], memory.totals[1 - w, c.row(h)])
        c.s[h] = T.if_then_else(c.row_max[h] == device.MASKED, 0.0, c.row_max[h])
        c.row_sum[h] = 0.0
        for v in list(range(4)):
            c.row_sum[h] += memory.stage[w, v, c.row(h)] * T.exp2(c.m[h] - c.s[h]) + memory.stage[
                1 - w, v, c.row(h)
            ] * T.exp2(memory.totals[1 - w, c.row(h)] - c.s[h])
        c.m[h] = T.exp2(c.m[h] - c.s[h]) * T.if_then_else(c.row_sum[h] == 0, 0.0, 1.0 / c.row_sum[h])
    for i in T.unroll(k.tiles * k.held):
        c.o[i] *= c.m[i % k.held // 4 * 2 + i % 2]


@T.macro
def write_number(target, tile, row, column, o, i):
    target.out[target.row(tile, row, column)] = o[i]


@T.macro
def finish(k, c, work, tile, call):
    """The end of a fragment: each warpgroup adds up and stores one half of the columns."""
    w, memory, half = c.w, c.memory, -(-k.tiles // 2)
    if w == 0 and c.thread < 4:
        for h in T.unroll(k.mine):
            r = c.row(h)
            c.s[h] = T.if_then_else(
                c.row_sum[h] == 0, -T.infinity(T.float32), (T.log2(c.row_sum[h]) + c.row_max[h]) * device.LN2
            )
            if tile.holds(r):
                device.store(call, work, device.write_lse, tile, r, c.s, h)
    for u in list(range(half)):
        kept, given = u + w * half, u + (1 - w) * half
        if given < k.tiles:
            for e in T.unroll(k.held):
                memory.exchange[w, e, c.thread % WARPGROUP] = c.o[given * k.held + e]
        T.sync_threads(barrier_id=BARRIER + 2, arrive_count=CONSUMERS)
        if kept < k.tiles:
            for e in T.unroll(k.held):
                c.o[kept * k.held + e] += memory.exchange[1 - w, e, c.thread % WARPGROUP]
            for e in T.unroll(k.held):
                r = c.row_of(e)
                d = kept * 64 + c.warp * 16 + (2 * c.g + e // 2 % 2)
                if tvm.tirx.And(tile.holds(r), d < k.d_c):
                    device.store(call, work, write_number, tile, r, d, c.o, kept * k.held + e)
        T.sync_threads(barrier_id=BARRIER + 2, arrive_count=CONSUMERS)


@T.macro
def consume(k, w, work, tile, memory, call, thread):
    """One warpgroup: all fragments of this CTA, tiles ``w``, ``w + 2``, ... of each."""
    T.set_max_nreg(CONSUMER_REGISTERS, 1)
    c = Thread(k, w, thread, memory)
    describe(c)
    scale = call.softmax_scale * device.LOG2E
    tail = (tile.seqlen_q - 1) * call.causal
    device.restart(work)
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        load_queries(k, c, work, tile, call)
        T.fence_proxy_async()
        T.sync_threads(barrier_id=BARRIER + 2, arrive_count=CONSUMERS)
        for i in T.unroll(k.tiles * k.held):
            c.o[i] = 0.0
        for h in T.unroll(k.mine):
            c.row_sum[h] = 0.0
            c.m[h] = device.MASKED
        for i in T.serial((work.tiles + 1 - w) // 2):
            t0 = work.first_token(2 * i + w)
            n = work.done + i
            slot = n % k.stages
            T.barrier_wait(memory.full[w * k.stages + slot], (n // k.stages) & 1)
            clean_codes(k, c, work, t0, slot)
            multiply_scores(k, c, slot)
            scale_scores(k, c, work, tile, call, t0, slot, scale, tail)
            find_weights(k, c)
            store_weights(k, c)
            multiply_output(k, c, slot)
            T.barrier_arrive(memory.free[w * k.stages + slot])
        work.state[2] += (work.tiles + 1 - w) // 2
        merge(k, c)
        finish(k, c, work, tile, call)


def make_fp8(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_fp8`` for sm_90; :class:`MLATypes` has its arguments, of codes."""
    k, types = Static(shape, choice), MLATypes(shape, codes=CODES)

    @T.macro
    def body(call):
        with T.Kernel(k.tiling.num_tiles, types.num_ctas, threads=choice.threads) as (y, cta):
            T.import_source(INLINE)
            memory = allocate(k)
            swizzled = (memory.q_tile, memory.qp_tile, memory.c_ring, memory.k_ring, memory.p_tile)
            T.annotate_layout({x: make_full_bank_swizzled_layout(x) for x in swizzled})
            thread = T.get_thread_binding()
            tile = device.locate(types, k.tiling, y, k.d_r)
            work = device.take_work(call, cta, k.page_size, BLOCK)
            T.pdl_trigger()
            loaders = [(stream, k, w, work, tile.column, memory, call) for w in range(2)]
            device.run_roles(
                thread,
                [
                    *device.consumers(2, consume, k, work, tile, memory, call, thread),
                    (None, device.run_loaders, PRODUCER_REGISTERS, thread, CONSUMERS, loaders),
                ],
            )

    return types.make("fp8", body)
