"""MLA decode for Hopper, heads on the N side of wgmma: warpgroups compute, three warps stream cache and queries.

The latent and the rotary keys travel through two independent TMA rings, so many rope heads (a converted MHA model
caches one rotary key per head) cost bytes but no pipeline stages of the latent; both rings run on into the next
sequence of the CTA's schedule while the last one is being written. Scores and output as in ``swap_ab``; the rope scores
by the products of ``selection.rope_blocks``. Two computing warpgroups share every tile and split the query rows;
they exchange nothing but turns at the tensor cores (not even these where ``selection.takes_turns`` says no).
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from mha2mla.kernels.machine import BARRIER, BY_ROW, GPU, WARPGROUP, Buffers
from mha2mla.kernels.mla_decode.selection import CLUSTER, DecodeShape, padded_latent_columns, rope_blocks, takes_turns
from mha2mla.kernels.mla_decode.static import MLAStatic, MLATypes, load_rope_queries
from mha2mla.kernels.split_kv import device, softmax
from mha2mla.kernels.split_kv.choice import KernelChoice

BLOCK = 64  # cached tokens per tile: the M of one wgmma
TURN = 12  # and the next: whose turn it is at the score products
PRODUCER_REGISTERS = 56
SCALE, LOG_SCALE, INVERSE_SCALE = range(3)  # of a token whose latent is codes: rows of ``scales``


class Static(MLAStatic):
    """Static parameters of a kernel body with roles."""

    rope = property(lambda k: rope_blocks(k.tiling, k.d_r))  # products of the rope scores
    by_block = property(lambda k: k.rope.block_rows < k.tiling.rows)  # a rope block is for part of the rows
    rows = property(lambda k: k.tiling.rows // k.choice.warpgroups)  # of one warpgroup
    latent_cols = property(lambda k: padded_latent_columns(k.d_c, WARPGROUP))
    slot_cols = property(lambda k: k.latent_cols)  # of a slot of the latent's ring
    rope_cols = property(lambda k: k.rope.chunks_per_block * k.rope.chunk_columns)  # of a rope block
    consumers = property(lambda k: k.choice.warpgroups * WARPGROUP)  # threads that compute
    turns = property(lambda k: k.choice.warpgroups > 1 and takes_turns(k.tiling, k.rope, k.choice.rope_stages))
    # A "full" barrier belongs to a chunk's place in the tile, not to a ring slot: who waits for it then sees all its
    # phases, and a wait for one parity cannot be answered by an earlier phase of the same parity.
    chunks = property(lambda k: k.rope.num_blocks * k.rope.chunks_per_block)  # of a tile
    rope_phases = property(lambda k: k.chunks * -(-k.choice.rope_stages // k.chunks))
    latent_readers = property(lambda k: k.consumers)  # threads that read a tile of the latent
    latent_writers, rope_writers = 1, 1  # threads that say that a tile of the latent, a chunk of rotary keys, is there
    makes_keys = False  # of the latent (``latent_ws``)
    scaled = False  # the tile holds codes, and ``scales`` what they are to be multiplied by (``latent_fp8``)
    clustered = False  # two CTAs of a cluster share a tile's columns (``swap_ab_cluster``)
    source = ""  # inline CUDA
    swizzled = property(lambda k: ("c_ring", "k_ring") if k.makes_keys else ())  # buffers that inline CUDA addresses
    streaming_registers = PRODUCER_REGISTERS

    @property
    def registers(self) -> int:
        """Registers of a thread that computes."""
        threads = self.consumers + WARPGROUP
        pool = 65536 // (self.choice.ctas_per_sm * threads) // 8 * 8 * threads  # of a CTA at launch
        return min(240, (pool - PRODUCER_REGISTERS * WARPGROUP) // self.consumers // 8 * 8)

    def blocks_of(self, w: int) -> list[int]:
        """The rope blocks of a warpgroup."""
        every = range(self.rope.num_blocks)
        return [q for q in every if not self.by_block or q * self.rope.block_rows // self.rows == w]

    def lefts(self, half) -> list:
        """First columns of the parts of a tile that are streamed, of CTA ``half`` of a cluster."""
        return [0]

    def rope_lefts(self, column, half) -> list:
        """First columns of a tile's chunks."""
        of_block = [u * self.rope.chunk_columns for u in range(self.rope.chunks_per_block)]
        return [column + q * self.rope.block_columns + left for q in range(self.rope.num_blocks) for left in of_block]

    def allocate_tiles(self) -> dict:
        """Shared memory of a CTA."""
        stages, rope_stages, warpgroups = self.choice.num_stages, self.choice.rope_stages, self.choice.warpgroups
        return {
            "q_tile": T.alloc_shared([self.tiling.rows, self.latent_cols], self.dtype),
            "qp_tile": T.alloc_shared([self.rope.num_blocks * self.rope.block_rows, self.rope_cols], self.dtype),
            "c_ring": T.alloc_shared([stages, BLOCK, self.slot_cols], self.dtype),
            "k_ring": T.alloc_shared([rope_stages, BLOCK, self.rope.chunk_columns], self.dtype),
            "p_tile": T.alloc_shared([warpgroups, BLOCK, self.rows], self.dtype),
            "stage": T.alloc_shared([warpgroups, BLOCK // 16, self.rows], T.float32),
        }

    def allocate_barriers(self) -> dict:
        stages, rope_stages = self.choice.num_stages, self.choice.rope_stages
        return {
            "q_full": T.alloc_barrier(1),
            "q_free": T.alloc_barrier(self.consumers),
            "c_full": T.alloc_barrier([self.latent_writers] * stages),
            "c_free": T.alloc_barrier([self.latent_readers] * stages),
            "k_full": T.alloc_barrier([self.rope_writers] * self.rope_phases),
            "k_free": T.alloc_barrier([WARPGROUP if self.by_block else self.consumers] * rope_stages),
        }

    def allocate(self) -> dict:
        return self.allocate_tiles() | self.allocate_barriers()


@T.macro
def load_own_rope_queries(k, w, work, tile, q_pe, qp_tile, first_column=0):
    """Loads the rotary queries of warpgroup ``w`` with zeros in the columns of other rope heads; ``first_column`` is
    the CTA's."""
    group, first_row, part, mine = k.tiling.heads_per_group, w * k.rows, k.rope.block_rows, k.blocks_of(w)
    piece = k.rope_cols if k.rope_cols <= 128 else 64
    for c in T.serial(k.rope_cols // piece):  # loads of a whole wide row at once would spill registers
        if not k.by_block:
            load_rope_queries(k, GPU, work, tile, q_pe, qp_tile, first_row, k.rows, c * piece, piece, first_column)
        elif len(mine) > 0:  # row i is head i; its block holds the columns of its own heads only
            for i, d in T.Parallel(len(mine) * part, piece):
                qp_tile[mine[0] * part + i, c * piece + d] = T.if_then_else(
                    (first_row + i < tile.valid) & ((c * piece + d) // k.d_r == i % part // group),
                    q_pe[
                        work.sequence, 0, T.min(tile.head0 + first_row + i, k.shape.heads - 1), (c * piece + d) % k.d_r
                    ],
                    T.cast(0, k.dtype),
                )


@T.macro
def multiply_rope(k, w, n, memory, s, parts):
    """Rope scores of tile ``n``: products into ``s``, or of each block into one of ``parts``."""
    chunks, columns = k.rope.chunks_per_block, k.rope.chunk_columns
    part, stages = k.rope.block_rows, k.choice.rope_stages
    first, own = min(k.blocks_of(w), default=0) * chunks, len(k.blocks_of(w)) * chunks  # chunk numbers in the tile
    for v in list(range(own)):
        u = n * k.chunks + first + v
        left = v % chunks * columns
        T.barrier_wait(memory.k_full[u % k.rope_phases], (u // k.rope_phases) & 1)
        if k.by_block:
            T.wgmma_gemm(
                memory.k_ring[u % stages, :, :],
                memory.qp_tile[
                    (first + v) // chunks * part : ((first + v) // chunks + 1) * part, left : left + columns
                ],
                parts[v // chunks],
                transpose_B=True,
                clear_accum=v % chunks == 0,
                policy=BY_ROW,
            )
        else:
            T.wgmma_gemm(
                memory.k_ring[u % stages, :, :],
                memory.qp_tile[w * k.rows : (w + 1) * k.rows, v * columns : (v + 1) * columns],
                s,
                transpose_B=True,
                policy=BY_ROW,
            )
        if v >= stages - 1 and v < own - 1:
            # the ring is shorter than a tile's chunks: free the oldest slot as soon as it is read
            T.wait_wgmma(stages - 1)
            T.barrier_arrive(memory.k_free[(u - (stages - 1)) % stages])
    T.wait_wgmma(0)
    for v in list(range(max(0, own - stages), own)):
        T.barrier_arrive(memory.k_free[(n * k.chunks + first + v) % stages])


@T.macro
def zero_masked_latent(k, work, t0, memory, pieces):
    """``pieces``: (slot, first columns) of this warpgroup; another one may still be reading the tile for its scores."""
    if work.has_masked(t0, BLOCK):
        if k.choice.warpgroups > 1:
            T.sync_threads(barrier_id=BARRIER + 2, arrive_count=k.consumers)
        for u in list(range(len(pieces))):
            device.zero_masked(GPU, work, t0, BLOCK, pieces[u][1], memory.c_ring, pieces[u][0])
        T.fence_proxy_async()
        if k.choice.warpgroups > 1:
            T.sync_threads(barrier_id=BARRIER + 2, arrive_count=k.consumers)


@T.macro
def weigh(k, w, work, t0, memory, x, pieces):
    """Masked scores of a tile become weights, and ``rescale`` the factor for earlier ones."""
    softmax.apply_mask(x, work, t0)
    zero_masked_latent(k, work, t0, memory, pieces)
    softmax.reduce_row_max(x)
    softmax.find_rescale(x)
    softmax.find_weights(x)
    T.copy(x.s, memory.p_tile[w, :, :])


@T.macro
def attend(k, w, f, i, work, memory, x, o, parts):
    """The i-th tile of the f-th fragment, for the rows of warpgroup ``w``: scores, softmax, output."""
    t0 = work.first_token(i)
    n = work.done + i
    slot = n % k.choice.num_stages
    T.barrier_wait(memory.c_full[slot], (n // k.choice.num_stages) & 1)
    if k.turns:  # one multiplies while the other is at its softmax
        T.sync_threads(barrier_id=TURN + w, arrive_count=k.consumers)
    T.wgmma_gemm(
        memory.c_ring[slot, :, :],
        memory.q_tile[w * k.rows : (w + 1) * k.rows, :],
        x.s,
        transpose_B=True,
        clear_accum=True,
        policy=BY_ROW,
    )
    if k.scaled:
        T.wait_wgmma(0)
        for h, j in T.Parallel(BLOCK, k.rows):
            x.s[h, j] *= memory.scales[slot, SCALE, h]
    multiply_rope(k, w, n, memory, x.s, parts)
    if k.turns:
        if w == 0 or f < work.fragments - 1 or i < work.tiles - 1:
            T.named_barrier_arrive(TURN + 1 - w, k.consumers)
    for q in list(range(len(parts))):
        for h, j in T.Parallel(BLOCK, k.rope.block_rows):
            x.s[h, q * k.rope.block_rows + j] += parts[q][h, j]
    if k.scaled:  # weights shall contain their scales
        for h, j in T.Parallel(BLOCK, k.rows):
            x.s[h, j] += memory.scales[slot, LOG_SCALE, h]
    weigh(k, w, work, t0, memory, x, [(slot, range(w * 64, k.latent_cols, 64 * k.choice.warpgroups))])
    if k.scaled:  # the softmax's own weights are without
        for h, j in T.Parallel(BLOCK, k.rows):
            x.s[h, j] *= memory.scales[slot, INVERSE_SCALE, h]
    softmax.add_weights(x)
    for d, j in T.Parallel(k.latent_cols, k.rows):
        o[d, j] *= x.rescale[j]
    T.gemm(memory.c_ring[slot, :, :], memory.p_tile[w, :, :], o, transpose_A=True, policy=BY_ROW)
    T.barrier_arrive(memory.c_free[slot])


@T.macro
def make_own_softmax(k, w, tile, memory, call):
    return softmax.make_softmax(
        GPU, call, tile, BLOCK, k.rows, memory.stage, (w,),
        lambda: T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP), w * k.rows,
    )  # fmt: skip


@T.macro
def consume(k, w, work, tile, half, memory, call, thread):
    """One warpgroup: all fragments of this CTA, for rows ``w * rows ...`` of its tile."""
    T.set_max_nreg(k.registers, 1)
    x = make_own_softmax(k, w, tile, memory, call)
    o = T.alloc_fragment([k.latent_cols, k.rows], T.float32)
    parts = [T.alloc_fragment([BLOCK, k.rope.block_rows], T.float32) for _ in (k.blocks_of(w) if k.by_block else ())]
    device.restart(work)
    if k.turns and w == 1:
        if work.fragments > 0:
            T.named_barrier_arrive(TURN, k.consumers)
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        load_own_rope_queries(k, w, work, tile, call.q_pe, memory.qp_tile)
        T.fence_proxy_async()
        x.sync()
        T.fill(o, 0)
        softmax.begin(x, work)
        T.barrier_wait(memory.q_full, f & 1)
        for i in T.serial(work.tiles):
            attend(k, w, f, i, work, memory, x, o, parts)
        T.barrier_arrive(memory.q_free)
        device.end_fragment(work)
        softmax.finish(x, x.row_max)
        device.store(call, work, softmax.write_columns, x, o, x.row_sum, x.row_max)


def make_streaming(
    k: Static, types: MLATypes, consume, make_keys=None, stream_codes=None, widen=None, prepare=None, stream_keys=None
):
    """The TileLang function of a choice whose roles are macros.

    Args:
        consume: a warpgroup that computes.
        make_keys: one that makes rotary keys; None: they are cached.
        stream_codes: a warp that loads codes of latents; None: latents are no codes.
        widen: a warpgroup that makes numbers of them.
        prepare: all threads, before that.
        stream_keys: a warp that loads what ``make_keys`` reads beside latents.
    """
    first = k.choice.threads - WARPGROUP  # thread of those that load
    ctas = CLUSTER if k.clustered else 1
    cluster = {"cluster_dims": CLUSTER} if k.clustered else {}

    @T.macro
    def body(call):
        with T.Kernel(k.tiling.num_tiles * ctas, types.num_ctas, threads=k.choice.threads, **cluster) as (y, cta):
            if len(k.source) > 0:
                T.import_source(k.source)
            if k.choice.ctas_per_sm > 1:
                T.annotate_min_blocks_per_sm(k.choice.ctas_per_sm)
            m = Buffers(**k.allocate())
            if len(k.swizzled) > 0:
                T.annotate_layout({getattr(m, x): make_full_bank_swizzled_layout(getattr(m, x)) for x in k.swizzled})
            thread = T.get_thread_binding()
            half = y % CLUSTER if k.clustered else 0
            tile = device.locate(types, k.tiling, y // ctas, k.d_r)
            if k.clustered:
                T.pdl_sync()  # TileLang launches clusters as programmatic dependents
            work = device.take_work(call, cta, k.page_size, BLOCK)
            T.pdl_trigger()
            if prepare is not None:
                prepare(k, m, thread)
            roles, loaders = device.consumers(k.choice.warpgroups, consume, k, work, tile, half, m, call, thread), []
            if stream_codes is None:
                loaders.append((device.stream, work, call.latent_cache, k.lefts(half), [m.c_ring], m.c_full, m.c_free))
            else:
                loaders.append((stream_codes, k, work, call, m))
            if make_keys is None:
                lefts = k.rope_lefts(tile.column, half)
                loaders.append((device.stream, work, call.rope_cache, lefts, [m.k_ring], m.k_full, m.k_free))
            else:
                roles.append((k.consumers + k.key_warpgroups * WARPGROUP, make_keys, k, half, work, m, call, thread))
            if stream_keys is not None:
                loaders.append((stream_keys, k, work, call, m))
            if widen is not None:
                roles.append((first, widen, k, half, work, m, call, thread - k.latent_readers))
            queries = (device.stream_queries, work, tile, call.q_latent, m.q_tile, m.q_full, m.q_free)
            if k.clustered and stream_codes is not None:
                columns = k.lefts(half)[0]  # a variable of these programs alone, which are as they were measured
                loaders.append((*queries, columns))
            else:
                loaders.append((*queries, k.lefts(half)[0]))
            loading = (None, device.run_loaders, k.streaming_registers, thread, first, loaders)
            device.run_roles(thread, [*roles, loading])
            if k.clustered:
                T.cluster_sync()  # what this CTA sent may still be on its way

    return types.make(k.choice.kernel, body)


def make_swap_ab_ws(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_swap_ab_ws`` for sm_90; :class:`MLATypes` has its arguments."""
    return make_streaming(Static(shape, choice), MLATypes(shape), consume)
