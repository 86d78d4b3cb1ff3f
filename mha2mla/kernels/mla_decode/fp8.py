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
from tilelang.layout import make_full_bank_swizzled_layout

from mha2mla.kernels.mla_decode.operand import column_of_code
from mha2mla.kernels.split_kv.fragment import (
    LN2,
    LOG2E,
    MASKED,
    SPAN_FIELDS,
    first_token,
    holds_unseen,
    last_page,
    needs_mask,
    read_fragment,
    sees,
    tile_origin,
    unseen,
)
from mha2mla.kernels.split_kv.schedule import COUNT, FIELDS, NEXT, SEQUENCE, SLOT, STOP, TILES
from mha2mla.kernels.split_kv.tiling import RowTiling

WARPGROUP = 128  # threads
CONSUMERS = 2 * WARPGROUP
THREADS = 3 * WARPGROUP
BLOCK = 64  # cached tokens per tile: the M of one wgmma
PANEL = 128  # bytes of a row of swizzled shared memory: codes side by side
WIDE = 64  # the same in 16-bit numbers
BUFFERS = 2  # register operands in flight, 8 registers for two products each
AHEAD = 2  # steps by which codes are fetched before they are converted
BARRIER = 8  # named barriers below 8 belong to the compiler
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
SLACK = 6.0  # the maximum may fall behind by this many powers of two before the output is scaled down: 2**6 in float16
LARGEST_EXPONENT = 14  # of a scaled query; float16 ends below 2**16
SMALLEST_QUERY = -40  # exponent below which a query row is not scaled up any further

# Conversions that TileLang's casts have no packed form for (of codes 0, 1 or 2, 3 of a word), and products, before each
# of which TileLang would put a proxy fence: the kernel has those that are needed.
INLINE = """
#include <tl_templates/cuda/instruction/wgmma.h>
static __device__ __forceinline__ unsigned e4m3_low_as_f16x2(unsigned codes) {
  unsigned pair;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(pair) : "r"(codes));
  return pair;
}
static __device__ __forceinline__ unsigned e4m3_high_as_f16x2(unsigned codes) {
  unsigned pair;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(pair) : "r"(codes));
  return pair;
}
static __device__ __forceinline__ int f16x2_of(float low, float high) {
  int pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <int rows>
static __device__ __forceinline__ void multiply_codes(const unsigned* a, tl::GmmaDescriptor b, int offset, float* c,
                                                      bool add) {
  constexpr auto half = tl::DataType::kFloat16, single = tl::DataType::kFloat32;
  tl::wgmma_rs<half, half, single, 64, rows, 16, false, false, 1, 1>(
      a, uint64_t(b + offset), reinterpret_cast<uint32_t*>(c), add);
}
"""


def make_mla_decode_fp8(
    *,
    heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    num_rope_heads: int,
    page_size: int,
    dtype: str,
    tiling: RowTiling,
    num_stages: int = 2,
):
    """A TileLang function ``mla_decode_fp8`` for one static shape.

    Args:
        heads, kv_lora_rank, qk_rope_head_dim, num_rope_heads: H, d_c, d_r, G.
        page_size: tokens per page, a power of two >= 16.
        dtype: "bfloat16" or "float16", of queries, rotary keys and output.
        tiling: which query rows one CTA serves, at most 32.
        num_stages: tiles in flight for each of the two warpgroups.

    The function's arguments: q_latent [B,S_q,H,d_c], q_pe [B,S_q,H,d_r], latent_cache [P,page,d_c] (e4m3), latent_scale
    [P,page] (float32), rope_cache [P,page,G*d_r], block_table [B,max_pages], schedule (``schedule.py``), the outputs
    partial_out [num_ctas,2,S_q,H,d_c] and partial_lse [num_ctas,2,S_q,H] (float32), out [B,S_q,H,d_c] and lse [B,H,S_q]
    of sequences that one CTA reads, softmax_scale, causal, window and sinks. Data may be strided.
    """
    d_c, d_r = kv_lora_rank, qk_rope_head_dim
    rows, groups, group = tiling.rows, tiling.groups_per_tile, tiling.heads_per_group
    accum, codes = T.float32, T.float8_e4m3fn
    pieces = max(1, BLOCK // page_size)
    piece_rows = min(BLOCK, page_size)
    scale_rows = max(32, piece_rows)  # the tensor-memory unit writes to multiples of 128 bytes
    tiles = -(-d_c // 64)  # 64 columns each: rows of one product with the weights, depth of four with the queries
    half = -(-tiles // 2)
    panels = -(-d_c // PANEL)
    wide_panels = 2 * panels  # of the queries: whole panels of codes, so that no column needs a guard
    rope_panels = -(-(groups * d_r) // WIDE)
    held = rows // 2  # accumulators of a thread for 64 rows
    mine = rows // 4  # heads that a thread has accumulators for
    octets = rows // 8
    by_column = f"m64n{rows}k16"
    rope_kind = "bf16" if dtype == "bfloat16" else "fp16"
    swizzle_128, row_group = 1, 1024 >> 4  # of a wgmma descriptor: layout, and 8 rows of 128 bytes
    token, head = tiling.token, tiling.head

    batch, seqlen_q = T.dynamic("batch"), T.dynamic("seqlen_q")
    num_pages, max_pages = T.dynamic("num_pages"), T.dynamic("max_pages")
    num_ctas, fragments = T.dynamic("num_ctas"), T.dynamic("fragments")
    ql_b, ql_s, ql_h = T.dynamic("ql_b"), T.dynamic("ql_s"), T.dynamic("ql_h")
    qp_b, qp_s, qp_h = T.dynamic("qp_b"), T.dynamic("qp_s"), T.dynamic("qp_h")
    o_b, o_s, o_h = T.dynamic("o_b"), T.dynamic("o_s"), T.dynamic("o_h")
    lc_p, lc_t, rc_p, rc_t = T.dynamic("lc_p"), T.dynamic("lc_t"), T.dynamic("rc_p"), T.dynamic("rc_t")
    ls_p = T.dynamic("ls_p")

    def f16x2(kind, word):
        return T.call_extern("uint32", kind, word)

    @T.macro
    def multiply(a, first, desc, offset, c, at, add):
        """One product of depth 16: four registers of codes by what ``desc`` describes, into 64 rows."""
        T.call_extern(
            "handle",
            f"multiply_codes<{rows}>",
            T.access_ptr(a[first], "r", 4),
            desc.data,
            offset,
            T.access_ptr(c[at], "rw", held),
            T.int32(add),
        )

    def row_of(c, t):
        """Of a thread's c-th head: its row of the tile."""
        return c // 2 * 8 + 2 * t + c % 2

    @T.macro
    def stream(
        w, latent_cache, latent_scale, rope_cache, block_table, column, c_ring, s_ring, k_ring, full, free, thread,
        leader, schedule, cta, work, span, pages,
    ):  # fmt: skip
        """One warp: the tiles of warpgroup ``w``, codes, scales and rotary keys."""
        for f in T.serial(work[0]):
            read_fragment(span, schedule, cta, work, f)
            for k in T.serial((span[TILES] + 1 - w) // 2):
                t0 = first_token(span, 2 * k + w)
                slot = (work[2] + k) % num_stages
                for v in list(range(pieces)):
                    pages[v] = block_table[span[SEQUENCE], T.min(t0 // page_size + v, last_page(span, page_size))]
                T.barrier_wait(free[w * num_stages + slot], (((work[2] + k) // num_stages) & 1) ^ 1)
                for v in list(range(pieces)):
                    first = v * piece_rows
                    for c in list(range(panels)):
                        T.tma_copy(
                            latent_cache[
                                pages[v],
                                t0 % page_size : t0 % page_size + piece_rows,
                                c * PANEL : c * PANEL + PANEL,
                            ],
                            c_ring[w, slot, c, first : first + piece_rows, :],
                            barrier=full[w * num_stages + slot],
                        )
                    for c in list(range(rope_panels)):
                        T.tma_copy(
                            rope_cache[
                                pages[v],
                                t0 % page_size : t0 % page_size + piece_rows,
                                column + c * WIDE : column + c * WIDE + WIDE,
                            ],
                            k_ring[w, slot, c, first : first + piece_rows, :],
                            barrier=full[w * num_stages + slot],
                        )
                    T.tma_copy(
                        latent_scale[pages[v], t0 % page_size : t0 % page_size + piece_rows],
                        s_ring[w, slot, v, 0:piece_rows],
                        barrier=full[w * num_stages + slot],
                    )
                if thread == leader:
                    T.barrier_arrive(full[w * num_stages + slot])
            work[2] += (span[TILES] + 1 - w) // 2

    @T.macro
    def load_queries(q_latent, q_pe, span, token0, head0, valid, seqlen_q, q_tile, q_scale, qp_tile, thread, x, top):
        """All consumers: the queries of a fragment. A warp takes a row of latent queries at a time."""
        lane = thread % 32
        for i in T.serial(rows // 8):
            r = i * 8 + thread // 32
            here = (token0 + token(r) < seqlen_q) & (head(r) < valid)
            top[0] = 0.0
            for v in T.unroll(4 * panels):
                d = v // 4 * PANEL + 4 * lane + v % 4
                x[v] = T.if_then_else(
                    here & (d < d_c),
                    T.cast(
                        q_latent[
                            span[SEQUENCE],
                            T.min(token0 + token(r), seqlen_q - 1),
                            T.min(head0 + head(r), heads - 1),
                            T.min(d, d_c - 1),
                        ],
                        accum,
                    ),
                    0.0,
                )
                top[0] = T.max(top[0], T.abs(x[v]))
            for v in list(range(5)):
                top[0] = T.max(top[0], T.shfl_xor(top[0], 1 << v))
            # the power of two below the largest, as bits of a float32; both factors are powers of two, hence exact
            exponent = T.max(
                T.min(T.shift_right(T.reinterpret(top[0], "int32"), 23) - 127, 127), T.int32(SMALLEST_QUERY)
            )
            top[1] = T.reinterpret(T.shift_left(127 + LARGEST_EXPONENT - exponent, 23), accum)
            if lane == 0:
                q_scale[r] = T.reinterpret(T.shift_left(127 - LARGEST_EXPONENT + exponent, 23), accum)
            for v in T.unroll(4 * panels):
                d = v // 4 * PANEL + 4 * lane + v % 4
                q_tile[d // WIDE, r, column_of_code(d) % WIDE] = T.cast(x[v] * top[1], "float16")
        for i in T.serial(rows * rope_panels * WIDE // CONSUMERS):
            e = i * CONSUMERS + thread
            r = e // (rope_panels * WIDE)
            c = e % (rope_panels * WIDE)
            qp_tile[c // WIDE, r, c % WIDE] = T.if_then_else(
                (token0 + token(r) < seqlen_q)
                & (head(r) < valid)
                & (c // d_r == head(r) // group % groups)
                & (c < groups * d_r),
                q_pe[
                    span[SEQUENCE],
                    T.min(token0 + token(r), seqlen_q - 1),
                    T.min(head0 + head(r), heads - 1),
                    c % d_r,
                ],
                T.cast(0, dtype),
            )

    @T.macro
    def fetch(transposed, w, slot, i, warp, lane, c_ring, word):
        """Codes of a warp's i-th step: 16 tokens x 32 columns for the scores, 32 tokens x 16 columns for the output."""
        if transposed:
            T.ptx_ldmatrix(
                True, 4,
                T.access_ptr(c_ring[w, slot, i // 4, i % 2 * 32 + lane, i // 2 % 2 * 64 + warp * 16], "r", 16),
                T.access_ptr(word[i % (AHEAD + 1) * 4], "w", 4),
            )  # fmt: skip
        else:
            T.ptx_ldmatrix(
                False, 4,
                T.access_ptr(c_ring[w, slot, i // 4, warp * 16 + lane % 16, i % 4 * 32 + lane // 16 * 16], "r", 16),
                T.access_ptr(word[i % (AHEAD + 1) * 4], "w", 4),
            )  # fmt: skip

    @T.macro
    def consume(
        w, cta, token0, head0, valid, q_latent, q_pe, schedule, span, work, q_tile, q_scale, qp_tile, c_ring, s_ring,
        k_ring, p_tile, stage, totals, exchange, full, free, thread, out, lse, partial_out, partial_lse, seqlen_q,
        softmax_scale, causal, window, sinks,
    ):  # fmt: skip
        """All fragments of this CTA, tiles ``w``, ``w + 2``, ... of each."""
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        o = T.alloc_local([tiles * held], accum)
        s = T.alloc_local([held], accum)
        turned = T.alloc_local([held], accum)  # scores by rotary keys
        den = T.alloc_local([mine], accum)
        m = T.alloc_local([mine], accum)
        top = T.alloc_local([mine], accum)
        word = T.alloc_local([(AHEAD + 1) * 4], "uint32")  # codes of one step, and of the next ones
        a = T.alloc_local([BUFFERS * 8], "uint32")
        scale_of = T.alloc_local([2], accum)
        log_of = T.alloc_local([2], accum)
        flag = T.alloc_local([1], T.int32)
        x = T.alloc_local([4 * panels], accum)  # a row of queries; at other times anything
        lane = thread % 32
        warp = thread // 32 % 4
        desc_q, desc_p = T.alloc_wgmma_desc(), T.alloc_wgmma_desc()
        desc_k, desc_qp = T.alloc_wgmma_desc(), T.alloc_wgmma_desc()
        T.initialize_wgmma_descriptor(desc_q, q_tile.access_ptr("r"), swizzle_128, 1, row_group)
        T.initialize_wgmma_descriptor(desc_p, p_tile.access_ptr("r"), swizzle_128, 1, row_group)
        T.initialize_wgmma_descriptor(desc_k, k_ring.access_ptr("r"), swizzle_128, 1, row_group)
        T.initialize_wgmma_descriptor(desc_qp, qp_tile.access_ptr("r"), swizzle_128, 1, row_group)
        g = lane // 4
        t = lane % 4
        scale = softmax_scale * LOG2E
        tail = (seqlen_q - 1) * causal
        work[2] = 0
        for f in T.serial(work[0]):
            read_fragment(span, schedule, cta, work, f)
            load_queries(
                q_latent, q_pe, span, token0, head0, valid, seqlen_q, q_tile, q_scale, qp_tile, thread, x, top
            )  # fmt: skip
            T.fence_proxy_async()
            T.sync_threads(barrier_id=BARRIER + 2, arrive_count=CONSUMERS)
            for i in T.unroll(tiles * held):
                o[i] = 0.0
            for c in T.unroll(mine):
                den[c] = 0.0
                m[c] = MASKED
            for k in T.serial((span[TILES] + 1 - w) // 2):
                t0 = first_token(span, 2 * k + w)
                n = work[2] + k
                slot = n % num_stages
                T.barrier_wait(full[w * num_stages + slot], (n // num_stages) & 1)
                if holds_unseen(span, t0, BLOCK):  # a weight of 0 does not clean a NaN
                    for i in T.serial(panels * BLOCK * PANEL // 4 // WARPGROUP):
                        for v in T.vectorized(4):
                            e = i * WARPGROUP + thread % WARPGROUP
                            if unseen(span, t0 + e // (PANEL // 4) % BLOCK):
                                c_ring[
                                    w,
                                    slot,
                                    e // (PANEL // 4 * BLOCK),
                                    e // (PANEL // 4) % BLOCK,
                                    e % (PANEL // 4) * 4 + v,
                                ] = T.cast(0, codes)
                    T.fence_proxy_async()
                    T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP)
                T.warpgroup_fence_operand(turned, num_regs=held)
                T.warpgroup_arrive()
                for c in list(range(rope_panels * 4)):
                    T.ptx_wgmma_ss(
                        accum, by_column, True, True, rope_kind, rope_kind, "fp32",
                        desc_k.data,
                        (((w * num_stages + slot) * rope_panels + c // 4) * BLOCK * PANEL + c % 4 * 32) >> 4,
                        desc_qp.data, (c // 4 * rows * PANEL + c % 4 * 32) >> 4,
                        turned.data, 0, T.int32(c > 0), 1, 1,
                    )  # fmt: skip
                T.warpgroup_commit_batch()
                T.warpgroup_fence_operand(s, num_regs=held)
                for i in list(range(AHEAD)):
                    fetch(False, w, slot, i, warp, lane, c_ring, word)
                for i in T.unroll(tiles * 2):  # 32 columns: two products
                    if i >= BUFFERS:
                        T.warpgroup_wait(BUFFERS - 1)
                    if i + AHEAD < tiles * 2:
                        fetch(False, w, slot, i + AHEAD, warp, lane, c_ring, word)
                    b = i % BUFFERS * 8
                    h = i % (AHEAD + 1) * 4
                    for v in list(range(4)):
                        a[b + v // 2 * 4 + v % 2] = f16x2("e4m3_low_as_f16x2", word[h + v])
                        a[b + v // 2 * 4 + v % 2 + 2] = f16x2("e4m3_high_as_f16x2", word[h + v])
                    T.warpgroup_fence_operand(a, offset=b, num_regs=8)
                    T.warpgroup_arrive()
                    for v in list(range(2)):
                        multiply(
                            a, b + 4 * v, desc_q, (i // 2 * rows * PANEL + (i % 2 * 2 + v) * 32) >> 4, s, 0, i + v > 0
                        )
                    T.warpgroup_commit_batch()
                T.warpgroup_wait(0)
                T.warpgroup_fence_operand(turned, num_regs=held)
                T.warpgroup_fence_operand(s, num_regs=held)

                for i in list(range(2)):
                    at = warp * 16 + g + 8 * i
                    scale_of[i] = s_ring[w, slot, at // piece_rows, at % piece_rows]
                    # 0 is what stands where a table has no page, with codes of 0
                    scale_of[i] = T.if_then_else(scale_of[i] == 0, 1.0, scale_of[i])
                    if holds_unseen(span, t0, BLOCK):
                        scale_of[i] = T.if_then_else(unseen(span, t0 + warp * 16 + g + 8 * i), 1.0, scale_of[i])
                    log_of[i] = T.log2(scale_of[i])
                for e in T.unroll(held):
                    s[e] = (
                        s[e] * (q_scale[row_of(e // 4 * 2 + e % 2, t)] * scale_of[e // 2 % 2]) + turned[e]
                    ) * scale + log_of[e // 2 % 2]
                if needs_mask(span, t0, BLOCK, tail):
                    for e in T.unroll(held):
                        s[e] = T.if_then_else(
                            sees(
                                span,
                                t0 + warp * 16 + g + e // 2 % 2 * 8,
                                span[STOP] - tail + T.min(token0 + token(row_of(e // 4 * 2 + e % 2, t)), tail),
                                window,
                                sinks,
                            ),
                            s[e],
                            MASKED,
                        )
                for c in T.unroll(mine):
                    top[c] = T.max(s[c // 2 * 4 + c % 2], s[c // 2 * 4 + c % 2 + 2])
                for v in list(range(3)):
                    for c in T.unroll(mine):
                        top[c] = T.max(top[c], T.shfl_xor(top[c], 4 << v))
                if g == 0:
                    for c in T.unroll(mine):
                        stage[w, warp, row_of(c, t)] = top[c]
                T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP)
                flag[0] = 0
                for c in T.unroll(mine):
                    for v in list(range(4)):
                        top[c] = T.max(top[c], stage[w, v, row_of(c, t)])
                    if top[c] > m[c] + SLACK:
                        flag[0] = 1
                if T.any_sync(flag[0]) != 0:
                    for c in T.unroll(mine):  # top becomes the factor for what is there
                        x[0] = m[c]
                        m[c] = T.if_then_else(top[c] > m[c] + SLACK, top[c], m[c])
                        top[c] = T.exp2(x[0] - m[c])
                        den[c] *= top[c]
                    for i in T.unroll(tiles * held):
                        o[i] *= top[i % held // 4 * 2 + i % 2]
                for e in T.unroll(held):
                    s[e] = T.exp2(
                        s[e] - T.if_then_else(m[e // 4 * 2 + e % 2] == MASKED, 0.0, m[e // 4 * 2 + e % 2])
                    )  # masked scores weigh nothing
                for i in list(range(2)):
                    scale_of[i] = 1.0 / scale_of[i]
                for c in T.unroll(mine):  # w / scale is the softmax's own weight
                    den[c] += s[c // 2 * 4 + c % 2] * scale_of[0] + s[c // 2 * 4 + c % 2 + 2] * scale_of[1]
                for j in list(range(octets // 2)):
                    T.call_extern(
                        "handle",
                        "tl::ptx_stmatrix_m8n8_x4_trans",
                        T.access_ptr(
                            p_tile[w, j * 16 + lane // 16 * 8 + lane % 8, warp * 16 + lane // 8 % 2 * 8], "w", 8
                        ),
                        T.call_extern("int32", "f16x2_of", s[8 * j], s[8 * j + 1]),
                        T.call_extern("int32", "f16x2_of", s[8 * j + 2], s[8 * j + 3]),
                        T.call_extern("int32", "f16x2_of", s[8 * j + 4], s[8 * j + 5]),
                        T.call_extern("int32", "f16x2_of", s[8 * j + 6], s[8 * j + 7]),
                    )
                T.fence_proxy_async()
                T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP)

                T.warpgroup_fence_operand(o, num_regs=tiles * held)
                for i in list(range(AHEAD)):
                    fetch(True, w, slot, i, warp, lane, c_ring, word)
                for i in T.unroll(tiles * 2):  # 64 columns by 32 tokens: two products
                    if i >= BUFFERS:
                        T.warpgroup_wait(BUFFERS - 1)
                    if i + AHEAD < tiles * 2:
                        fetch(True, w, slot, i + AHEAD, warp, lane, c_ring, word)
                    b = i % BUFFERS * 8
                    h = i % (AHEAD + 1) * 4
                    for v in list(range(4)):  # from two tokens, two columns each, to two columns, two tokens each
                        word[h + v] = T.call_extern("uint32", "__byte_perm", word[h + v], T.uint32(0), T.uint32(0x3120))
                        a[b + 2 * v] = f16x2("e4m3_low_as_f16x2", word[h + v])
                        a[b + 2 * v + 1] = f16x2("e4m3_high_as_f16x2", word[h + v])
                    T.warpgroup_fence_operand(a, offset=b, num_regs=8)
                    T.warpgroup_arrive()
                    for v in list(range(2)):
                        multiply(
                            a, b + 4 * v, desc_p, (w * rows * PANEL + (i % 2 * 2 + v) * 32) >> 4, o, i // 2 * held, True
                        )  # fmt: skip
                    T.warpgroup_commit_batch()
                T.warpgroup_wait(0)
                T.warpgroup_fence_operand(o, num_regs=tiles * held)
                T.barrier_arrive(free[w * num_stages + slot])
            work[2] += (span[TILES] + 1 - w) // 2

            for v in list(range(3)):
                for c in T.unroll(mine):
                    den[c] += T.shfl_xor(den[c], 4 << v)
            T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP)
            if g == 0:
                for c in T.unroll(mine):
                    stage[w, warp, row_of(c, t)] = den[c]
                    totals[w, row_of(c, t)] = m[c]  # the same in all warps
            T.sync_threads(barrier_id=BARRIER + 2, arrive_count=CONSUMERS)
            for c in T.unroll(mine):
                top[c] = T.max(m[c], totals[1 - w, row_of(c, t)])
                s[c] = T.if_then_else(top[c] == MASKED, 0.0, top[c])
                den[c] = 0.0
                for v in list(range(4)):
                    den[c] += stage[w, v, row_of(c, t)] * T.exp2(m[c] - s[c]) + stage[1 - w, v, row_of(c, t)] * T.exp2(
                        totals[1 - w, row_of(c, t)] - s[c]
                    )
                m[c] = T.exp2(m[c] - s[c]) * T.if_then_else(den[c] == 0, 0.0, 1.0 / den[c])
            for i in T.unroll(tiles * held):
                o[i] *= m[i % held // 4 * 2 + i % 2]
            if w == 0 and thread < 4:
                for c in T.unroll(mine):
                    r = row_of(c, t)
                    s[c] = T.if_then_else(den[c] == 0, -T.infinity(accum), (T.log2(den[c]) + top[c]) * LN2)
                    if (token0 + token(r) < seqlen_q) & (head(r) < valid):
                        if span[SLOT] < 0:
                            lse[span[SEQUENCE], head0 + head(r), token0 + token(r)] = s[c]
                        else:
                            partial_lse[span[SLOT] // 2, span[SLOT] % 2, token0 + token(r), head0 + head(r)] = s[c]
            for u in list(range(half)):  # each warpgroup finishes one half of the columns
                kept, given = u + w * half, u + (1 - w) * half
                if given < tiles:
                    for e in T.unroll(held):
                        exchange[w, e, thread % WARPGROUP] = o[given * held + e]
                T.sync_threads(barrier_id=BARRIER + 2, arrive_count=CONSUMERS)
                if kept < tiles:
                    for e in T.unroll(held):
                        o[kept * held + e] += exchange[1 - w, e, thread % WARPGROUP]
                    for e in T.unroll(held):
                        r = row_of(e // 4 * 2 + e % 2, t)
                        d = kept * 64 + warp * 16 + (2 * g + e // 2 % 2)
                        if (token0 + token(r) < seqlen_q) & (head(r) < valid) & (d < d_c):
                            if span[SLOT] < 0:
                                out[span[SEQUENCE], token0 + token(r), head0 + head(r), d] = o[kept * held + e]
                            else:
                                partial_out[span[SLOT] // 2, span[SLOT] % 2, token0 + token(r), head0 + head(r), d] = o[
                                    kept * held + e
                                ]
                T.sync_threads(barrier_id=BARRIER + 2, arrive_count=CONSUMERS)

    @T.prim_func
    def mla_decode_fp8(
        q_latent: T.StridedTensor([batch, seqlen_q, heads, d_c], [ql_b, ql_s, ql_h, 1], dtype),
        q_pe: T.StridedTensor([batch, seqlen_q, heads, d_r], [qp_b, qp_s, qp_h, 1], dtype),
        latent_cache: T.StridedTensor([num_pages, page_size, d_c], [lc_p, lc_t, 1], codes),
        latent_scale: T.StridedTensor([num_pages, page_size], [ls_p, 1], accum),
        rope_cache: T.StridedTensor([num_pages, page_size, num_rope_heads * d_r], [rc_p, rc_t, 1], dtype),
        block_table: T.Tensor([batch, max_pages], T.int32),
        schedule: T.Tensor([fragments, FIELDS], T.int32),
        partial_out: T.Tensor([num_ctas, 2, seqlen_q, heads, d_c], accum),
        partial_lse: T.Tensor([num_ctas, 2, seqlen_q, heads], accum),
        out: T.StridedTensor([batch, seqlen_q, heads, d_c], [o_b, o_s, o_h, 1], dtype),
        lse: T.Tensor([batch, heads, seqlen_q], accum),
        softmax_scale: T.float32,
        causal: T.int32,
        window: T.int32,
        sinks: T.int32,
    ):
        with T.Kernel(tiling.num_tiles, num_ctas, threads=THREADS) as (tile, cta):
            T.import_source(INLINE)
            q_tile = T.alloc_shared([wide_panels, rows, WIDE], "float16")
            q_scale = T.alloc_shared([rows], accum)
            qp_tile = T.alloc_shared([rope_panels, rows, WIDE], dtype)
            c_ring = T.alloc_shared([2, num_stages, panels, BLOCK, PANEL], codes)
            s_ring = T.alloc_shared([2, num_stages, pieces, scale_rows], accum)
            k_ring = T.alloc_shared([2, num_stages, rope_panels, BLOCK, WIDE], dtype)
            p_tile = T.alloc_shared([2, rows, WIDE], "float16")
            stage = T.alloc_shared([2, 4, rows], accum)
            totals = T.alloc_shared([2, rows], accum)
            exchange = T.alloc_shared([2, held, WARPGROUP], accum)
            full = T.alloc_barrier([1] * (2 * num_stages))
            free = T.alloc_barrier([WARPGROUP] * (2 * num_stages))
            T.annotate_layout({x: make_full_bank_swizzled_layout(x) for x in (q_tile, qp_tile, c_ring, k_ring, p_tile)})
            thread = T.get_thread_binding()

            token0, head0, column, valid = tile_origin(tiling, tile, heads, d_r)

            span = T.alloc_local([SPAN_FIELDS], T.int32)
            work = T.alloc_local([3], T.int32)  # fragments, row of the second one less 1, own tiles before this one
            pages = T.alloc_local([pieces], T.int32)
            work[0] = schedule[cta, COUNT]
            work[1] = schedule[cta, NEXT]
            work[2] = 0
            T.pdl_trigger()

            if thread < WARPGROUP:
                consume(
                    0, cta, token0, head0, valid, q_latent, q_pe, schedule, span, work, q_tile, q_scale, qp_tile,
                    c_ring, s_ring, k_ring, p_tile, stage, totals, exchange, full, free, thread, out, lse,
                    partial_out, partial_lse, seqlen_q, softmax_scale, causal, window, sinks,
                )  # fmt: skip
            elif thread < CONSUMERS:
                consume(
                    1, cta, token0, head0, valid, q_latent, q_pe, schedule, span, work, q_tile, q_scale, qp_tile,
                    c_ring, s_ring, k_ring, p_tile, stage, totals, exchange, full, free, thread, out, lse,
                    partial_out, partial_lse, seqlen_q, softmax_scale, causal, window, sinks,
                )  # fmt: skip
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if thread < CONSUMERS + 32:
                    stream(
                        0, latent_cache, latent_scale, rope_cache, block_table, column, c_ring, s_ring, k_ring, full,
                        free, thread, CONSUMERS, schedule, cta, work, span, pages,
                    )  # fmt: skip
                elif thread < CONSUMERS + 64:
                    stream(
                        1, latent_cache, latent_scale, rope_cache, block_table, column, c_ring, s_ring, k_ring, full,
                        free, thread, CONSUMERS + 32, schedule, cta, work, span, pages,
                    )  # fmt: skip

    return mla_decode_fp8
