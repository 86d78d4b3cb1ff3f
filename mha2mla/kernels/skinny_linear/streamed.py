"""x W^T of up to 128 rows on Hopper: weights and x travel by TMA, weights on the M side of wgmma, each read once.

A warp asks for as many of the weights as there is room for, then waits for x, so that memory works while the kernel
before ends. Blocks fill one wave: tiles of a weight's rows, and CTAs of a cluster that share its columns where there
are fewer tiles than room; these add up in each other's shared memory.
"""

from dataclasses import asdict

import tilelang.language as T
from torch import Tensor

from mha2mla.kernels.machine import BARRIER, BY_ROW, EXACT_PASS_CONFIGS, WARPGROUP, Buffers, compile_for, compiled_once
from mha2mla.kernels.ops import aligned, dtype_name, num_sms, on_device
from mha2mla.kernels.skinny_linear.selection import BLOCK, ROW_BUCKETS, linear_tiling

THREADS = WARPGROUP + 32
# A CTA's first step and how many. In memory: a loop of a number that is known to be 0 or 1 is taken for one of 1.
FIRST, COUNT = range(2)

# Four numbers into the shared memory of a CTA of the cluster (PTX ISA, mapa, st.shared::cluster).
INLINE = """
#include <tl_templates/cuda/common.h>
static __device__ __forceinline__ void put_quad(const float* from, const float* place, int rank) {
  unsigned to;
  float4 held = *reinterpret_cast<const float4*>(from);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(smem_ptr_to_uint(place)), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "f"(held.x), "f"(held.y), "f"(held.z), "f"(held.w) : "memory");
}
"""


def make_streamed_linear(
    *, columns: int, outputs: int, rows: int, dtype: str, gated: bool = False, biased: bool = False, blocks: int = 1,
    split: int = 1, depth: int = 64, stages: int = 8, resident: int = 2,
):  # fmt: skip
    """A TileLang function ``streamed_linear`` for sm_90, of at most ``rows`` rows of x, a run-time value.

    Args:
        columns: K, a multiple of 8.
        outputs: N, a multiple of 8 and with ``gated`` of 16.
        rows: of x, a multiple of 8 up to 128.
        dtype: of all tensors.
        gated: the weight's halves are gate and up, and the result is silu(gate) * up, half as wide, each step rounded.
        biased: ``bias`` is added before the one rounding; not with ``gated``.
        blocks: of 64 rows of the weight that a CTA multiplies; two with ``gated``, one of either half.
        split: CTAs of a cluster that share the columns; one with ``gated``.
        depth: columns of a step, a multiple of 64.
        stages: steps that a CTA has room for.
        resident: CTAs that a multiprocessor has room for.

    The function's arguments: x [tokens, K], weight [N, K], bias [any number, or N], out [tokens, N or N / 2], all
    contiguous.
    """
    accum = T.float32
    width = outputs // 2 if gated else outputs
    own = BLOCK if gated else BLOCK * blocks  # columns of the result in a cluster
    share = own // split  # of which a CTA writes
    steps = -(-columns // depth)
    # Waits for the step before, or for this one: room that is free sooner is worth more where x takes half of it.
    ahead = 1 if rows <= 64 else 0
    tokens = T.dynamic("tokens")

    @T.macro
    def fetch_weight(weight, m, slot, n0, step):
        for b in list(range(blocks)):
            first = n0 + (b * width if gated else b * BLOCK)
            T.tma_copy(
                weight[first : first + BLOCK, step * depth : (step + 1) * depth],
                m.w_ring[slot * blocks + b, :, :],
                barrier=m.full[slot],
                eviction_policy="evict_first",
            )

    @T.macro
    def fetch_x(x, m, slot, step, thread):
        T.tma_copy(x[0:rows, step * depth : (step + 1) * depth], m.x_ring[slot, :, :], barrier=m.full[slot])
        if thread == WARPGROUP:
            T.barrier_arrive(m.full[slot])

    @T.macro
    def produce(x, weight, m, n0, thread):
        for i in T.serial(T.min(stages, m.span[COUNT])):
            fetch_weight(weight, m, i, n0, m.span[FIRST] + i)
        T.pdl_sync()
        for i in T.serial(T.min(stages, m.span[COUNT])):
            fetch_x(x, m, i, m.span[FIRST] + i, thread)
        for i in T.serial(T.max(0, m.span[COUNT] - stages)):
            T.barrier_wait(m.free[i % stages], (i // stages) & 1)
            fetch_weight(weight, m, i % stages, n0, m.span[FIRST] + stages + i)
            fetch_x(x, m, i % stages, m.span[FIRST] + stages + i, thread)

    @T.macro
    def multiply(m, sums):
        for b in list(range(blocks)):
            T.fill(sums[b], 0)
        for i in T.serial(m.span[COUNT]):
            T.barrier_wait(m.full[i % stages], (i // stages) & 1)
            for b in list(range(blocks)):
                T.wgmma_gemm(
                    m.w_ring[i % stages * blocks + b, :, :],
                    m.x_ring[i % stages, :, :],
                    sums[b],
                    transpose_B=True,
                    policy=BY_ROW,
                )
            T.wait_wgmma(ahead)
            if i >= ahead:
                T.barrier_arrive(m.free[(i - ahead) % stages])
        T.wait_wgmma(0)

    @T.macro
    def read_bias(bias, m, n0):
        """First of the 8 outputs that a thread writes, the same in each row."""
        for v in T.unroll(8):
            m.shift[v] = 0.0
        if biased:
            for v in T.unroll(8):
                m.shift[v] = T.cast(bias[T.min(n0 + T.get_thread_binding() % (share // 8) * 8 + v, outputs - 1)], accum)

    @T.macro
    def stage(m, sums):
        """The products into ``m.part``, row by row of x."""
        for b in list(range(1 if gated else blocks)):
            for i, j in T.Parallel(BLOCK, rows):
                if gated:  # every step is rounded as by the op that it stands for
                    gate = T.cast(T.cast(sums[0][i, j], dtype), accum)
                    m.part[j, i] = T.cast(T.cast(gate / (1.0 + T.exp(-gate)), dtype), accum) * T.cast(
                        T.cast(sums[1][i, j], dtype), accum
                    )
                else:
                    m.part[j, b * BLOCK + i] = sums[b][i, j]

    @T.macro
    def send(m, rank):
        """To each CTA of the cluster what it writes."""
        for j in T.serial(T.ceildiv(rows * own // 4, WARPGROUP)):
            e = j * WARPGROUP + T.get_thread_binding()
            r, c = e // (own // 4), e % (own // 4) * 4
            if r < rows:
                T.call_extern(
                    "handle",
                    "put_quad",
                    T.address_of(m.part[r, c]),
                    T.address_of(m.came[rank, r, c % share]),
                    c // share,
                )

    @T.macro
    def write(m, out, n0):
        """This CTA's share of the outputs, 8 elements a thread, rounded once."""
        for j in T.serial(T.ceildiv(rows * share // 8, WARPGROUP)):
            e = j * WARPGROUP + T.get_thread_binding()
            r, c = e // (share // 8), e % (share // 8) * 8
            if (r < T.min(rows, tokens)) & (n0 + c < width):
                for v in T.unroll(8):
                    m.total[v] = m.shift[v]
                for s in T.unroll(split):
                    for v in T.unroll(8):
                        m.total[v] += m.came[s, r, c + v] if split > 1 else m.part[r, c + v]
                for v in T.vectorized(8):
                    out[r, n0 + c + v] = T.cast(m.total[v], dtype)

    @T.prim_func
    def streamed_linear(
        x: T.Tensor([tokens, columns], dtype),
        weight: T.Tensor([outputs, columns], dtype),
        bias: T.Tensor([outputs if biased else T.dynamic("biases")], dtype),
        out: T.Tensor([tokens, width], dtype),
    ):
        with T.Kernel(-(-width // own) * split, threads=THREADS, cluster_dims=split) as at:
            T.import_source(INLINE)
            T.annotate_min_blocks_per_sm(resident)
            m = Buffers(
                w_ring=T.alloc_shared([stages * blocks, BLOCK, depth], dtype),
                x_ring=T.alloc_shared([stages, rows, depth], dtype),
                part=T.alloc_shared([rows, own + 4], accum),  # a fragment's columns share no bank
                came=T.alloc_shared([split, rows, share], accum),  # from each CTA of the cluster
                span=T.alloc_local([2], T.int32),
                shift=T.alloc_local([8], accum),
                total=T.alloc_local([8], accum),
                full=T.alloc_barrier([1] * stages),
                free=T.alloc_barrier([WARPGROUP] * stages),
            )
            sums = [T.alloc_fragment([BLOCK, rows], accum) for _ in range(blocks)]
            thread = T.get_thread_binding()
            n0, rank = at // split * own, at % split
            m.span[FIRST] = rank * steps // split
            m.span[COUNT] = (rank + 1) * steps // split - rank * steps // split
            if split > 1:
                m.came[0, 0, T.min(thread, share - 1)] = 0.0  # from here on nothing else lies where others write
                T.cluster_arrive()
            T.pdl_trigger()
            if thread >= WARPGROUP:
                produce(x, weight, m, n0, thread)
            else:
                read_bias(bias, m, n0 + rank * share)
                multiply(m, sums)
            if thread < WARPGROUP:
                stage(m, sums)
                T.sync_threads(barrier_id=BARRIER, arrive_count=WARPGROUP)
            if split > 1:
                T.cluster_wait()
                if thread < WARPGROUP:
                    send(m, rank)
                T.cluster_sync()
            if thread < WARPGROUP:
                write(m, out, n0 + rank * share)

    return streamed_linear


@compiled_once
def compile_streamed_linear(sms: int, *, outputs: int, columns: int, rows: int, gated: bool, **static):
    """The compiled kernel for at most ``rows`` rows; arguments as ``make_streamed_linear``'s."""
    tiling = asdict(linear_tiling(outputs, columns, rows, gated, sms))
    function = make_streamed_linear(outputs=outputs, columns=columns, rows=rows, gated=gated, **static, **tiling)
    return compile_for(function, 90, EXACT_PASS_CONFIGS)


def launch_skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, out: Tensor) -> None:
    """Run the kernel over rows [..., K]."""
    x, out = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    outputs, columns = weight.shape
    rows = next(rows for rows in ROW_BUCKETS if len(x) <= rows)
    with on_device(x.device):
        kernel = compile_streamed_linear(
            num_sms(x.device), outputs=outputs, columns=columns, dtype=dtype_name(x.dtype), rows=rows, gated=gated,
            biased=bias is not None,
        )  # fmt: skip
        kernel(aligned(x), weight, weight[0] if bias is None else bias.contiguous(), out)
