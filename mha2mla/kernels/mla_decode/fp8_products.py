"""State and products of ``fp8``: memory of a CTA, registers of a thread, e4m3 codes multiplied from registers.

``c`` is a :class:`Thread`, ``k`` the kernel's :class:`Static`.
"""

import tilelang.language as T

from mha2mla.kernels.machine import BARRIER, ROW_GROUP, SWIZZLE_128, WARPGROUP, Buffers
from mha2mla.kernels.mla_decode.static import MLAStatic

CONSUMERS = 2 * WARPGROUP
CODES = T.float8_e4m3fn
BLOCK = 64  # cached tokens per tile: the M of one wgmma
PANEL = 128  # bytes of a row of swizzled shared memory: codes side by side
WIDE = 64  # the same in 16-bit numbers
BUFFERS = 2  # register operands in flight, 8 registers for two products each
AHEAD = 2  # steps by which codes are fetched before they are converted


class Static(MLAStatic):
    stages = property(lambda k: k.choice.num_stages)  # tiles in flight for each of the two warpgroups
    rows = property(lambda k: k.tiling.rows)
    pieces = property(lambda k: max(1, BLOCK // k.page_size))  # pages that a tile lies in
    # 64 columns each: rows of one product with the weights, depth of four with the queries
    tiles = property(lambda k: -(-k.d_c // 64))
    panels = property(lambda k: -(-k.d_c // PANEL))
    rope_panels = property(lambda k: -(-(k.tiling.groups_per_tile * k.d_r) // WIDE))
    held = property(lambda k: k.rows // 2)  # accumulators of a thread for 64 rows
    mine = property(lambda k: k.rows // 4)  # heads that a thread has accumulators for


def allocate(k: Static) -> Buffers:
    """Shared memory and barriers of a CTA. Queries have whole panels of codes, so that no column needs a guard; the
    tensor-memory unit writes scales to multiples of 128 bytes."""
    return Buffers(
        q_tile=T.alloc_shared([2 * k.panels, k.rows, WIDE], "float16"),
        q_scale=T.alloc_shared([k.rows], T.float32),
        qp_tile=T.alloc_shared([k.rope_panels, k.rows, WIDE], k.dtype),
        c_ring=T.alloc_shared([2, k.stages, k.panels, BLOCK, PANEL], CODES),
        s_ring=T.alloc_shared([2, k.stages, k.pieces, max(32, k.page_rows)], T.float32),
        k_ring=T.alloc_shared([2, k.stages, k.rope_panels, BLOCK, WIDE], k.dtype),
        p_tile=T.alloc_shared([2, k.rows, WIDE], "float16"),
        stage=T.alloc_shared([2, 4, k.rows], T.float32),
        totals=T.alloc_shared([2, k.rows], T.float32),
        exchange=T.alloc_shared([2, k.held, WARPGROUP], T.float32),
        full=T.alloc_barrier([1] * (2 * k.stages)),
        free=T.alloc_barrier([WARPGROUP] * (2 * k.stages)),
    )


class Thread(Buffers):
    """A computing thread: its place in the CTA, its registers, and operands of its warpgroup ``w``.

    Attributes: ``o`` output, ``s`` scores, then weights, ``turned`` scores by rotary keys; of its heads
    ``row_sum``, ``m`` (running maximum) and ``row_max``; ``word`` codes of one step and of the next ones, ``a``
    register operands; of its two tokens ``scale_of`` and ``log_of``; ``x`` a row of queries, at other times anything.
    """

    def __init__(self, k: Static, w: int, thread, memory: Buffers):
        heads, held = [k.mine], [k.held]
        super().__init__(
            o=T.alloc_local([k.tiles * k.held], T.float32),
            s=T.alloc_local(held, T.float32),
            turned=T.alloc_local(held, T.float32),
            row_sum=T.alloc_local(heads, T.float32),
            m=T.alloc_local(heads, T.float32),
            row_max=T.alloc_local(heads, T.float32),
            word=T.alloc_local([(AHEAD + 1) * 4], "uint32"),
            a=T.alloc_local([BUFFERS * 8], "uint32"),
            scale_of=T.alloc_local([2], T.float32),
            log_of=T.alloc_local([2], T.float32),
            flag=T.alloc_local([1], T.int32),
            x=T.alloc_local([4 * k.panels], T.float32),
            desc_q=T.alloc_wgmma_desc(),
            desc_p=T.alloc_wgmma_desc(),
            desc_k=T.alloc_wgmma_desc(),
            desc_qp=T.alloc_wgmma_desc(),
        )
        self.w, self.thread, self.memory = w, thread, memory
        self.lane, self.warp = thread % 32, thread // 32 % 4
        self.g, self.t = self.lane // 4, self.lane % 4

    def row(self, c):
        """Row of the tile of this thread's c-th head."""
        return c // 2 * 8 + 2 * self.t + c % 2

    def row_of(self, e):
        """Row of the tile of this thread's e-th accumulator."""
        return self.row(e // 4 * 2 + e % 2)

    def sync(self):
        """The barrier of the warpgroup."""
        return T.sync_threads(barrier_id=BARRIER + self.w, arrive_count=WARPGROUP)


@T.macro
def describe(c):
    for desc, tile in (
        (c.desc_q, c.memory.q_tile), (c.desc_p, c.memory.p_tile), (c.desc_k, c.memory.k_ring),
        (c.desc_qp, c.memory.qp_tile),
    ):  # fmt: skip
        T.initialize_wgmma_descriptor(desc, tile.access_ptr("r"), SWIZZLE_128, 1, ROW_GROUP)


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


@T.macro
def fetch(transposed, c, slot, i):
    """Codes of a warp's i-th step: 16 tokens x 32 columns for the scores, 32 tokens x 16 columns for the output."""
    if transposed:
        at = (i % 2 * 32 + c.lane, i // 2 % 2 * 64 + c.warp * 16)
    else:
        at = (c.warp * 16 + c.lane % 16, i % 4 * 32 + c.lane // 16 * 16)
    T.ptx_ldmatrix(
        transposed,
        4,
        T.access_ptr(c.memory.c_ring[(c.w, slot, i // 4, *at)], "r", 16),
        T.access_ptr(c.word[i % (AHEAD + 1) * 4], "w", 4),
    )


@T.macro
def multiply(k, a, first, desc, offset, to, at, add):
    """One product of depth 16: four registers of codes by what ``desc`` describes, into 64 rows."""
    T.call_extern(
        "handle",
        f"multiply_codes<{k.rows}>",
        T.access_ptr(a[first], "r", 4),
        desc.data,
        offset,
        T.access_ptr(to[at], "rw", k.held),
        T.int32(add),
    )


def f16x2(kind, word):
    return T.call_extern("uint32", kind, word)


@T.macro
def multiply_rope(k, c, slot):
    """Scores by rotary keys: under way, not awaited."""
    by_column, kind = f"m64n{k.rows}k16", "bf16" if k.dtype == "bfloat16" else "fp16"
    T.warpgroup_fence_operand(c.turned, num_regs=k.held)
    T.warpgroup_arrive()
    for u in list(range(k.rope_panels * 4)):
        T.ptx_wgmma_ss(
            T.float32, by_column, True, True, kind, kind, "fp32",
            c.desc_k.data,
            (((c.w * k.stages + slot) * k.rope_panels + u // 4) * BLOCK * PANEL + u % 4 * 32) >> 4,
            c.desc_qp.data, (u // 4 * k.rows * PANEL + u % 4 * 32) >> 4,
            c.turned.data, 0, T.int32(u > 0), 1, 1,
        )  # fmt: skip
    T.warpgroup_commit_batch()


@T.macro
def multiply_steps(k, c, slot, transposed):
    """All products of a tile's codes, two a step: of 32 columns for the scores, of 64 columns by 32 tokens for the
    output, whose codes are ``transposed``."""
    for i in list(range(AHEAD)):
        fetch(transposed, c, slot, i)
    for i in T.unroll(k.tiles * 2):
        if i >= BUFFERS:
            T.warpgroup_wait(BUFFERS - 1)
        if i + AHEAD < k.tiles * 2:
            fetch(transposed, c, slot, i + AHEAD)
        b = i % BUFFERS * 8
        h = i % (AHEAD + 1) * 4
        for v in list(range(4)):
            if transposed:  # from two tokens, two columns each, to two columns, two tokens each
                c.word[h + v] = T.call_extern("uint32", "__byte_perm", c.word[h + v], T.uint32(0), T.uint32(0x3120))
                c.a[b + 2 * v] = f16x2("e4m3_low_as_f16x2", c.word[h + v])
                c.a[b + 2 * v + 1] = f16x2("e4m3_high_as_f16x2", c.word[h + v])
            else:
                c.a[b + v // 2 * 4 + v % 2] = f16x2("e4m3_low_as_f16x2", c.word[h + v])
                c.a[b + v // 2 * 4 + v % 2 + 2] = f16x2("e4m3_high_as_f16x2", c.word[h + v])
        T.warpgroup_fence_operand(c.a, offset=b, num_regs=8)
        T.warpgroup_arrive()
        for v in list(range(2)):
            if transposed:
                multiply(
                    k, c.a, b + 4 * v, c.desc_p, (c.w * k.rows * PANEL + (i % 2 * 2 + v) * 32) >> 4,
                    c.o, i // 2 * k.held, True,
                )  # fmt: skip
            else:
                multiply(
                    k, c.a, b + 4 * v, c.desc_q, (i // 2 * k.rows * PANEL + (i % 2 * 2 + v) * 32) >> 4,
                    c.s, 0, i + v > 0,
                )  # fmt: skip
        T.warpgroup_commit_batch()
    T.warpgroup_wait(0)


@T.macro
def multiply_scores(k, c, slot):
    """Both kinds of scores, in ``s`` and ``turned``."""
    multiply_rope(k, c, slot)
    T.warpgroup_fence_operand(c.s, num_regs=k.held)
    multiply_steps(k, c, slot, False)
    T.warpgroup_fence_operand(c.turned, num_regs=k.held)
    T.warpgroup_fence_operand(c.s, num_regs=k.held)


@T.macro
def store_weights(k, c):
    """To shared memory, where the second operand of a product is."""
    for j in list(range(k.rows // 16)):
        T.call_extern(
            "handle",
            "tl::ptx_stmatrix_m8n8_x4_trans",
            T.access_ptr(
                c.memory.p_tile[c.w, j * 16 + c.lane // 16 * 8 + c.lane % 8, c.warp * 16 + c.lane // 8 % 2 * 8], "w", 8
            ),
            *[T.call_extern("int32", "f16x2_of", c.s[8 * j + 2 * v], c.s[8 * j + 2 * v + 1]) for v in range(4)],
        )
    T.fence_proxy_async()
    c.sync()


@T.macro
def multiply_output(k, c, slot):
    T.warpgroup_fence_operand(c.o, num_regs=k.tiles * k.held)
    multiply_steps(k, c, slot, True)
    T.warpgroup_fence_operand(c.o, num_regs=k.tiles * k.held)
