"""Online softmax (arXiv 1805.02867) of transposed scores Sᵀ[tokens, rows]: the body of four decode kernels.

A row's maximum and denominator run down a column, over all warps of the threads that share the scores: partial results
of 16 tokens each meet in ``stage``. The denominator stays per position until the end of the fragment.
"""

import tilelang.language as T

from mha2mla.kernels.machine import Buffers
from mha2mla.kernels.split_kv.device import LN2, LOG2E, MASKED


class Softmax(Buffers):
    """Registers for scores of ``rows`` query rows, from ``first_row`` of the tile on, with ``tokens`` cached tokens.

    Attributes: ``s`` [tokens,rows] scores, then weights; ``p`` [tokens,rows] denominators; ``r`` [warps,rows];
    ``row_max``, ``new_max`` [rows] running maximum and the next one; ``rescale`` [rows] factor for earlier sums;
    ``row_sum`` [rows]; ``limit`` [rows] the first token that a row's query does not see, unless registers are
    scarce; ``stage`` [...,warps,rows] shared memory, of which these threads use ``part``; ``sync`` their barrier;
    ``scale`` of scores to powers of two; ``tail``: so many last tokens are hidden from some queries.
    """

    def __init__(self, machine, call, tile, tokens, rows, stage, part, sync, scale, tail, first_row, keeps_limit):
        def alloc(*shape, dtype=T.float32):
            return machine.alloc_fragment(list(shape), dtype)

        super().__init__(
            s=alloc(tokens, rows),
            p=alloc(tokens, rows),
            r=alloc(tokens // 16, rows),
            row_max=alloc(rows),
            new_max=alloc(rows),
            rescale=alloc(rows),
            row_sum=alloc(rows),
            limit=alloc(rows, dtype=T.int32) if keeps_limit else [],
        )
        self.call, self.tile, self.machine, self.parallel, self.sync = call, tile, machine, machine.parallel, sync
        self.shape, self.warps, self.first_row = (tokens, rows), tokens // 16, first_row
        self.stage, self.part, self.staged = stage, part, stage[(*part, slice(None), slice(None))]
        self.scale, self.tail, self.keeps_limit = scale, tail, keeps_limit

    def limit_of(self, work, j):
        """First token that the query of row ``j`` does not see."""
        return work.stop - self.tail + T.min(self.tile.token(self.first_row + j), self.tail)


@T.macro
def make_softmax(machine, call, tile, tokens, rows, stage, part, sync, first_row=0, keeps_limit=True):
    scale = call.softmax_scale * LOG2E
    tail = (tile.seqlen_q - 1) * call.causal
    return Softmax(machine, call, tile, tokens, rows, stage, part, sync, scale, tail, first_row, keeps_limit)


@T.macro
def begin(x, work):
    """The start of a fragment."""
    T.fill(x.p, 0)
    T.fill(x.row_max, MASKED)
    if x.keeps_limit:
        for j in x.parallel(x.shape[1]):
            x.limit[j] = x.limit_of(work, j)


@T.macro
def apply_mask(x, work, t0):
    if work.needs_mask(t0, x.shape[0], x.tail):
        for i, j in x.parallel(*x.shape):
            x.s[i, j] = T.if_then_else(
                work.is_visible(
                    t0 + i, x.limit[j] if x.keeps_limit else x.limit_of(work, j), x.call.window, x.call.sinks
                ),
                x.s[i, j],
                MASKED,
            )


@T.macro
def update_row_max(x, row_max, new_max):
    """``new_max`` from ``row_max`` and the maxima in ``stage``; in the layout of these two."""
    for j in x.parallel(x.shape[1]):
        new_max[j] = row_max[j]
        for v in x.machine.rounds(x.warps):
            new_max[j] = T.max(new_max[j], x.stage[(*x.part, v, j)])


@T.macro
def reduce_row_max(x, guarded=True):
    """Running maxima with the scores at hand; ``guarded``: others may still be reading ``stage``."""
    view = T.view(x.s, [x.warps, 16, x.shape[1]])
    T.reduce_max(view, x.r, dim=1)
    if guarded:
        x.sync()
    T.copy(x.r, x.staged)
    x.sync()
    update_row_max(x, x.row_max, x.new_max)


@T.macro
def find_rescale(x):
    """``rescale``: the factor for earlier sums."""
    for j in x.parallel(x.shape[1]):
        x.rescale[j] = T.exp2((x.row_max[j] - x.new_max[j]) * x.scale)
        x.row_max[j] = x.new_max[j]
        x.new_max[j] = T.if_then_else(x.new_max[j] == MASKED, 0.0, x.new_max[j])  # so that masked scores weigh nothing


@T.macro
def find_weights(x):
    for i, j in x.parallel(*x.shape):
        x.s[i, j] = T.exp2((x.s[i, j] - x.new_max[j]) * x.scale)


@T.macro
def add_weights(x):
    for i, j in x.parallel(*x.shape):
        x.p[i, j] = x.p[i, j] * x.rescale[j] + x.s[i, j]


@T.macro
def finish(x, row_max):
    """``row_max`` becomes the log-sum-exp (-inf of nothing) and ``row_sum``, in its layout, the output's factor."""
    view = T.view(x.p, [x.warps, 16, x.shape[1]])
    T.reduce_sum(view, x.r, dim=1)
    x.sync()
    T.copy(x.r, x.staged)
    x.sync()
    for j in x.parallel(x.shape[1]):
        x.row_sum[j] = 0
        for v in x.machine.rounds(x.warps):
            x.row_sum[j] += x.stage[(*x.part, v, j)]
    for j in x.parallel(x.shape[1]):
        row_max[j] = T.if_then_else(
            x.row_sum[j] == 0, -T.infinity(T.float32), (T.log2(x.row_sum[j]) + row_max[j] * x.scale) * LN2
        )
        x.row_sum[j] = 1.0 / T.max(x.row_sum[j], 1e-30)


@T.macro
def write_columns(target, x, o, inverse, lse, left=0):
    """Oᵀ[columns, rows], columns from ``left`` on, to be called by ``store``; the first ones with the log-sum-exps."""
    if left == 0:
        for j in x.parallel(x.shape[1]):
            if x.tile.holds(x.first_row + j):
                target.lse[target.place(x.tile, x.first_row + j)] = lse[j]
    for d, j in x.parallel(int(o.shape[0]), x.shape[1]):
        if x.tile.holds(x.first_row + j):
            if left + d < target.out.shape[-1]:
                target.out[target.row(x.tile, x.first_row + j, left + d)] = o[d, j] * inverse[j]
