"""Varlen attention for Hopper: warpgroups compute 64 query rows each, two warps stream keys and values by TMA.

The design is FlashAttention-3's (arXiv 2407.08608): the scores of the next tile and the output of this one are in
flight while a warpgroup is at its softmax, weights stay in registers, and two warpgroups take turns at the tensor
cores. Tiles are walked from the last visible key to the first, so that only the first few need a mask. Long rows of a
causal triangle are started first.
"""

import tilelang.language as T

from mha2mla.kernels.attention_varlen.tiling import WARPGROUP, VarlenShape, VarlenTiling, chunks
from mha2mla.kernels.split_kv.fragment import LN2, LOG2E

BARRIER = 8  # named barriers below 8 belong to the compiler
TURN = 10  # and the next: whose turn it is at the score products
REGISTERS = {1: 240, 2: 240, 3: 160}  # a thread, by computing warpgroups
PRODUCER_REGISTERS = 24


def make_warp_specialised(shape: VarlenShape, tiling: VarlenTiling):
    """A TileLang function ``attention_varlen_ws`` for one static shape; arguments as :func:`make_tiled` describes."""
    heads, causal, dtype = shape.heads, shape.causal, shape.dtype
    block, stages, rows = tiling.block_keys, tiling.stages, tiling.block_rows
    consumers = tiling.warpgroups * WARPGROUP
    turns = tiling.turns and tiling.warpgroups == 2
    accum = T.float32
    widths = (*shape.widths, shape.widths[0])[:2]  # a call without a second part passes the first again
    key_heads = (*shape.key_heads, shape.key_heads[0])[:2]
    pieces = [(part, offset, columns) for part in shape.parts for offset, columns in chunks(shape.widths[part])]
    outputs = chunks(shape.v_head_dim)
    extra_masked = -(-(rows - 1) // block) if causal else 0  # tiles after the first that only some rows see
    by_row = T.GemmWarpPolicy.FullRow

    tokens_q, tokens_k, bounds = T.dynamic("tokens_q"), T.dynamic("tokens_k"), T.dynamic("bounds")
    q_t, q_h, r_t, r_h = T.dynamic("q_t"), T.dynamic("q_h"), T.dynamic("r_t"), T.dynamic("r_h")
    k_t, k_h, p_t, p_h = T.dynamic("k_t"), T.dynamic("k_h"), T.dynamic("p_t"), T.dynamic("p_h")
    v_t, v_h = T.dynamic("v_t"), T.dynamic("v_h")

    @T.macro
    def scores(q_tiles, k_rings, slot, s):
        for c in list(range(len(pieces))):
            T.wgmma_gemm(
                q_tiles[c], k_rings[c][slot, :, :], s, transpose_B=True, clear_accum=c == 0, policy=by_row
            )  # fmt: skip

    @T.macro
    def values(p, v_rings, slot, o):
        for c in list(range(len(outputs))):
            T.wgmma_gemm(p, v_rings[c][slot, :, :], o[c], policy=by_row)

    @T.macro
    def softmax(masked, s, m, z, use, al, den, total, scale, t0, limit):
        """Online softmax over one tile (arXiv 1805.02867). ``z`` is the scaled maximum, rounded once: weights,
        denominator and rescaling subtract the same number, so that its rounding cancels."""
        if masked:
            for i, j in T.Parallel(rows, block):
                s[i, j] = T.if_then_else(t0 + j < (limit + i if causal else limit), s[i, j], -T.infinity(accum))
        T.reduce_max(s, m, dim=1, clear=False)
        for i in T.Parallel(rows):
            al[i] = z[i]
            z[i] = m[i] * scale
            use[i] = T.if_then_else(m[i] == -T.infinity(accum), 0.0, z[i])
            al[i] = T.exp2(al[i] - use[i])
        for i, j in T.Parallel(rows, block):
            s[i, j] = T.exp2(s[i, j] * scale - use[i])
        T.reduce_sum(s, total, dim=1)
        for i in T.Parallel(rows):
            den[i] = den[i] * al[i] + total[i]

    @T.macro
    def step(
        masked, thread, k, tiles, scale, q_tiles, k_rings, v_rings, k_full, k_free, v_full, v_free, s, p, o, m, z, use,
        al, den, total, limit,
    ):  # fmt: skip
        """Scores of tile ``k`` beside the output of the tile before it."""
        w = thread // WARPGROUP
        T.barrier_wait(k_full[k % stages], (k // stages) & 1)
        if turns:
            T.sync_threads(barrier_id=TURN + w, arrive_count=consumers)
        scores(q_tiles, k_rings, k % stages, s)
        T.barrier_wait(v_full[(k - 1) % stages], ((k - 1) // stages) & 1)
        values(p, v_rings, (k - 1) % stages, o)
        if turns:
            if w == 0 or k < tiles - 1:
                T.named_barrier_arrive(TURN + 1 - w, consumers)
        T.wait_wgmma(len(outputs))
        if thread % 32 == 0:
            T.barrier_arrive(k_free[k % stages])
        softmax(masked, s, m, z, use, al, den, total, scale, (tiles - 1 - k) * block, limit)
        # Passed long ago. Without a branch here ptxas moves the exponentials behind the wait for the output.
        T.barrier_wait(v_full[(k - 1) % stages], ((k - 1) // stages) & 1)
        T.wait_wgmma(0)
        if thread % 32 == 0:
            T.barrier_arrive(v_free[(k - 1) % stages])
        for c in list(range(len(outputs))):
            for i, d in T.Parallel(rows, outputs[c][1]):
                o[c][i, d] *= al[i]
        T.copy(s, p)

    @T.macro
    def consume(
        thread, row0, span, later, q_tiles, k_rings, v_rings, q_full, k_full, k_free, v_full, v_free, out, lse,
        softmax_scale,
    ):  # fmt: skip
        T.set_max_nreg(REGISTERS[tiling.warpgroups], 1)
        w = thread // WARPGROUP
        s = T.alloc_fragment([rows, block], accum)
        p = T.alloc_fragment([rows, block], dtype)
        o = [T.alloc_fragment([rows, columns], accum) for _, columns in outputs]
        m = T.alloc_fragment([rows], accum)
        z = T.alloc_fragment([rows], accum)
        use = T.alloc_fragment([rows], accum)
        al = T.alloc_fragment([rows], accum)
        den = T.alloc_fragment([rows], accum)
        total = T.alloc_fragment([rows], accum)
        scale = softmax_scale * LOG2E
        tiles, full = span[4], span[5]
        T.fill(den, 0)
        T.fill(m, -T.infinity(accum))
        T.fill(z, -T.infinity(accum))
        for c in list(range(len(outputs))):
            T.fill(o[c], 0)
        # First key that row 0 does not see. Rows behind the sequence's last may see too much; they are dropped.
        limit = span[3] - span[1] + row0 + 1 if causal else span[3]
        if tiles > 0:
            T.barrier_wait(q_full, 0)
            T.barrier_wait(k_full[0], 0)
            scores(q_tiles, k_rings, 0, s)
            if turns:
                if w == 1 and tiles > 1:
                    T.named_barrier_arrive(TURN, consumers)
            T.wait_wgmma(0)
            if thread % 32 == 0:
                T.barrier_arrive(k_free[0])
            softmax(True, s, m, z, use, al, den, total, scale, (tiles - 1) * block, limit)
            T.copy(s, p)
            if tiles * block > span[3]:  # values behind the sequence: a weight of 0 does not clean a NaN
                T.barrier_wait(v_full[0], 0)
                for c in list(range(len(outputs))):
                    for i, d in T.Parallel(block, outputs[c][1]):
                        if (tiles - 1) * block + i >= span[3]:
                            v_rings[c][0, i, d] = T.cast(0, dtype)
                T.fence_proxy_async()
                T.sync_threads(barrier_id=BARRIER, arrive_count=consumers)
            masked = T.max(0, tiles - full - 1) if causal else 0
            for u in list(range(extra_masked)):  # no loop: its 32 column numbers would be kept in registers
                if u < masked:
                    step(
                        True, thread, u + 1, tiles, scale, q_tiles, k_rings, v_rings, k_full, k_free, v_full, v_free,
                        s, p, o, m, z, use, al, den, total, limit,
                    )  # fmt: skip
            for k in T.serial(tiles - 1 - masked):
                step(
                    False, thread, masked + 1 + k, tiles, scale, q_tiles, k_rings, v_rings, k_full, k_free, v_full,
                    v_free, s, p, o, m, z, use, al, den, total, limit,
                )  # fmt: skip
            T.barrier_wait(v_full[(tiles - 1) % stages], ((tiles - 1) // stages) & 1)
            values(p, v_rings, (tiles - 1) % stages, o)
            T.wait_wgmma(0)
        for i in T.Parallel(rows):
            z[i] = T.if_then_else(den[i] == 0, -T.infinity(accum), (T.log2(den[i]) + z[i]) * LN2)
            den[i] = 1.0 / T.max(den[i], 1e-30)
        for i in T.Parallel(rows):
            if i < later[1]:
                lse[later[2], later[0] + i] = z[i]
        for c in list(range(len(outputs))):
            left, columns = outputs[c]
            for i, d in T.Parallel(rows, columns):
                o[c][i, d] *= den[i]
            if columns <= pieces[0][2]:  # through the queries' memory, which nobody reads any more
                T.copy(o[c], q_tiles[0][:, 0:columns])
                T.sync_threads(barrier_id=BARRIER, arrive_count=consumers)
                for i, d in T.Parallel(rows, columns):
                    if i < later[1]:
                        if left + d < shape.v_head_dim:
                            out[later[0] + i, later[2], left + d] = q_tiles[0][i, d]
                if c + 1 < len(outputs):
                    T.sync_threads(barrier_id=BARRIER, arrive_count=consumers)
            else:
                for i, d in T.Parallel(rows, columns):
                    if i < later[1]:
                        if left + d < shape.v_head_dim:
                            out[later[0] + i, later[2], left + d] = o[c][i, d]

    @T.prim_func
    def attention_varlen_ws(
        q: T.StridedTensor([tokens_q, heads, widths[0]], [q_t, q_h, 1], dtype),
        q_pe: T.StridedTensor([tokens_q, heads, widths[1]], [r_t, r_h, 1], dtype),
        k: T.StridedTensor([tokens_k, key_heads[0], widths[0]], [k_t, k_h, 1], dtype),
        k_pe: T.StridedTensor([tokens_k, key_heads[1], widths[1]], [p_t, p_h, 1], dtype),
        v: T.StridedTensor([tokens_k, shape.value_heads, shape.v_head_dim], [v_t, v_h, 1], dtype),
        cu_seqlens_q: T.Tensor([bounds], T.int32),
        cu_seqlens_k: T.Tensor([bounds], T.int32),
        out: T.Tensor([tokens_q, heads, shape.v_head_dim], dtype),
        lse: T.Tensor([heads, tokens_q], accum),
        softmax_scale: T.float32,
        row_tiles: T.int32,
        section: T.int32,
    ):
        with T.Kernel(row_tiles * heads * (bounds - 1), threads=consumers + WARPGROUP) as x:
            q_tiles = [T.alloc_shared([rows, columns], dtype) for _, _, columns in pieces]
            k_rings = [T.alloc_shared([stages, block, columns], dtype) for _, _, columns in pieces]
            v_rings = [T.alloc_shared([stages, block, columns], dtype) for _, columns in outputs]
            later = T.alloc_shared([4], T.int32)
            q_full = T.alloc_barrier(1)
            k_full = T.alloc_barrier([1] * stages)
            k_free = T.alloc_barrier([consumers // 32] * stages)
            v_full = T.alloc_barrier([1] * stages)
            v_free = T.alloc_barrier([consumers // 32] * stages)
            thread = T.get_thread_binding()
            sources = [(q, k), (q_pe, k_pe)]

            # Sections of heads whose keys stay in the L2 cache; within one, the last query rows of every head first.
            place = T.alloc_local([4], T.int32)  # section's first head, its heads, tile of rows, head and sequence
            place[0] = T.truncdiv(x, section * row_tiles) * section
            place[1] = T.min(section, heads * (bounds - 1) - place[0])
            place[2] = row_tiles - 1 - T.truncdiv(x - place[0] * row_tiles, place[1])
            place[3] = place[0] + T.truncmod(x - place[0] * row_tiles, place[1])
            h = place[3] % heads
            # first query, queries, first key, keys, tiles that some row sees, tiles that every row sees
            span = T.alloc_local([6], T.int32)
            span[0] = cu_seqlens_q[place[3] // heads]
            span[1] = cu_seqlens_q[place[3] // heads + 1] - span[0]
            span[2] = cu_seqlens_k[place[3] // heads]
            span[3] = cu_seqlens_k[place[3] // heads + 1] - span[2]
            row0 = place[2] * rows
            if causal:
                span[4] = T.max(0, span[3] - span[1] + T.min(span[1], row0 + rows))
                span[4] = (T.min(span[4], span[3]) + block - 1) // block
                span[5] = T.max(0, T.min(span[3], span[3] - span[1] + row0 + 1)) // block
            else:
                span[4] = (span[3] + block - 1) // block
                span[5] = span[3] // block
            if row0 >= span[1]:
                span[4] = 0

            # For the end, in shared memory: registers are scarce. First row, how many are left, head.
            later[0] = span[0] + row0
            later[1] = span[1] - row0
            later[2] = h
            T.sync_threads()

            if thread < consumers:
                consume(
                    thread, row0, span, later, q_tiles, k_rings, v_rings, q_full, k_full, k_free, v_full,
                    v_free, out, lse, softmax_scale,
                )  # fmt: skip
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if thread < consumers + 32:
                    if span[4] > 0:
                        for c in list(range(len(pieces))):
                            part, left, columns = pieces[c]
                            T.tma_copy(
                                sources[part][0][span[0] + row0 : span[0] + row0 + rows, h, left : left + columns],
                                q_tiles[c],
                                barrier=q_full,
                            )
                        if thread == consumers:
                            T.barrier_arrive(q_full)
                    for n in T.serial(span[4]):
                        t0 = span[2] + (span[4] - 1 - n) * block
                        T.barrier_wait(k_free[n % stages], ((n // stages) & 1) ^ 1)
                        for c in list(range(len(pieces))):
                            part, left, columns = pieces[c]
                            T.tma_copy(
                                sources[part][1][
                                    t0 : t0 + block, h // (heads // key_heads[part]), left : left + columns
                                ],
                                k_rings[c][n % stages, :, :],
                                barrier=k_full[n % stages],
                            )
                        if thread == consumers:
                            T.barrier_arrive(k_full[n % stages])
                elif thread < consumers + 64:
                    for n in T.serial(span[4]):
                        t0 = span[2] + (span[4] - 1 - n) * block
                        T.barrier_wait(v_free[n % stages], ((n // stages) & 1) ^ 1)
                        for c in list(range(len(outputs))):
                            T.tma_copy(
                                v[
                                    t0 : t0 + block,
                                    h // (heads // shape.value_heads),
                                    outputs[c][0] : outputs[c][0] + outputs[c][1],
                                ],
                                v_rings[c][n % stages, :, :],
                                barrier=v_full[n % stages],
                            )
                        if thread == consumers + 32:
                            T.barrier_arrive(v_full[n % stages])

    return attention_varlen_ws
