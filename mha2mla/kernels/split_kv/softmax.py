"""Online softmax (arXiv 1805.02867) of transposed scores Sᵀ[tokens, rows]: the body of four decode kernels.

A row's maximum and denominator run down a column, over all warps of the threads that share the scores: partial results
of 16 tokens each meet in ``stage``. The denominator stays per position until the end of the fragment.
"""

import tilelang.language as T

from mha2mla.kernels.machine import Buffers
from mha2mla.kernels.split_kv.call import LN2, MASKED, first_unseen, needs_mask, sees, unseen
from mha2mla.kernels.split_kv.schedule import STOP


class Softmax(Buffers):
    """Registers for scores of ``rows`` query rows, from ``first_row`` of the tile on, with ``tokens`` cached tokens.

    Attributes: ``s`` [tokens,rows] scores, then weights; ``p`` [tokens,rows] denominators; ``r`` [warps,rows];
    ``top``, ``new_top`` [rows] the running maximum and the next one; ``shrink`` [rows] the factor for what was summed
    before; ``den`` [rows]; ``limit`` [rows] the first token that a row's query does not see, unless registers are
    scarce; ``stage`` [...,warps,rows] shared memory, of which these threads use ``part``; ``sync`` their barrier;
    ``scale`` of scores to powers of two; ``tail``: so many last tokens are hidden from some queries.
    """

    def __init__(
        self, machine, call, tile, tokens, rows, stage, part, sync, scale, tail, first_row=0, keeps_limit=True
    ):
        row = [rows]
        super().__init__(
            s=machine.alloc_fragment([tokens, rows], T.float32),
            p=machine.alloc_fragment([tokens, rows], T.float32),
            r=machine.alloc_fragment([tokens // 16, rows], T.float32),
            top=machine.alloc_fragment(row, T.float32),
            new_top=machine.alloc_fragment(row, T.float32),
            shrink=machine.alloc_fragment(row, T.float32),
            den=machine.alloc_fragment(row, T.float32),
            limit=machine.alloc_fragment(row, T.int32) if keeps_limit else [],
        )
        self.call, self.tile, self.machine, self.parallel, self.sync = call, tile, machine, machine.parallel, sync
        self.shape, self.warps, self.first_row = (tokens, rows), tokens // 16, first_row
        self.stage, self.part, self.staged = stage, part, stage[(*part, slice(None), slice(None))]
        self.scale, self.tail, self.keeps_limit = scale, tail, keeps_limit


@T.macro
def begin(x, span):
    """The start of a fragment."""
    T.fill(x.p, 0)
    T.fill(x.top, MASKED)
    if x.keeps_limit:
        for j in x.parallel(x.shape[1]):
            x.limit[j] = find_limit(x, span, j)


def find_limit(x, span, j):
    return span[STOP] - x.tail + T.min(x.tile.token(x.first_row + j), x.tail)


@T.macro
def hide(x, span, t0):
    """Scores of tokens that a row does not see."""
    if needs_mask(span, t0, x.shape[0], x.tail):
        for i, j in x.parallel(*x.shape):
            x.s[i, j] = T.if_then_else(
                sees(
                    span, t0 + i, x.limit[j] if x.keeps_limit else find_limit(x, span, j), x.call.window, x.call.sinks
                ),
                x.s[i, j],
                MASKED,
            )


@T.macro
def raise_top(x, top, new_top):
    """``new_top`` from ``top`` and the maxima in ``stage``; in the layout of these two."""
    for j in x.parallel(x.shape[1]):
        new_top[j] = top[j]
        for v in x.machine.rounds(x.warps):
            new_top[j] = T.max(new_top[j], x.stage[(*x.part, v, j)])


@T.macro
def find_tops(x, guarded=True):
    """Running maxima with the scores at hand; ``guarded``: others may still be reading ``stage``."""
    view = T.view(x.s, [x.warps, 16, x.shape[1]])
    T.reduce_max(view, x.r, dim=1)
    if guarded:
        x.sync()
    T.copy(x.r, x.staged)
    x.sync()
    raise_top(x, x.top, x.new_top)


@T.macro
def find_factors(x):
    """What was summed before is scaled by ``shrink``."""
    for j in x.parallel(x.shape[1]):
        x.shrink[j] = T.exp2((x.top[j] - x.new_top[j]) * x.scale)
        x.top[j] = x.new_top[j]
        x.new_top[j] = T.if_then_else(x.new_top[j] == MASKED, 0.0, x.new_top[j])  # so that masked scores weigh nothing


@T.macro
def find_weights(x):
    for i, j in x.parallel(*x.shape):
        x.s[i, j] = T.exp2((x.s[i, j] - x.new_top[j]) * x.scale)


@T.macro
def add_weights(x):
    for i, j in x.parallel(*x.shape):
        x.p[i, j] = x.p[i, j] * x.shrink[j] + x.s[i, j]


@T.macro
def finish(x, top):
    """``top`` becomes the log-sum-exp, -inf of nothing; ``den`` the factor for the output, in the layout of ``top``."""
    view = T.view(x.p, [x.warps, 16, x.shape[1]])
    T.reduce_sum(view, x.r, dim=1)
    x.sync()
    T.copy(x.r, x.staged)
    x.sync()
    for j in x.parallel(x.shape[1]):
        x.den[j] = 0
        for v in x.machine.rounds(x.warps):
            x.den[j] += x.stage[(*x.part, v, j)]
    for j in x.parallel(x.shape[1]):
        top[j] = T.if_then_else(x.den[j] == 0, -T.infinity(T.float32), (T.log2(x.den[j]) + top[j] * x.scale) * LN2)
        x.den[j] = 1.0 / T.max(x.den[j], 1e-30)


@T.macro
def clean(machine, span, t0, tokens, panels, tile, *slot):
    """Zeroes in ``tile[*slot]`` what no row sees: a weight of 0 does not clean a NaN. ``panels``: where 64 columns each
    begin, a Python range; other widths cost registers for divisions by 3, 5 or 7. One token after another, since
    TileLang asks an SMT solver about every condition inside a parallel loop: 25 of a kernel's 30 seconds."""
    for i in T.serial(first_unseen(span, t0), tokens):
        if unseen(span, t0 + i):
            for c, d in machine.parallel(len(panels), 64):
                tile[(*slot, i, panels.start + c * panels.step + d)] = T.cast(0, tile.dtype)


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
