"""A map for each group of heads, of any number of tokens: rows of a group's heads lie side by side, and are read so."""

import tilelang.language as T

from mha2mla.kernels.machine import Buffers

FEW, ROWS = 16, 64  # of a block: heads of a group, for as many tokens as fit
THREADS = 128
VECTOR = 8  # numbers that strides of x are a multiple of


def make_grouped_maps(
    *, heads: int, maps: int, inner: int, outer: int, dtype: str, transposed: bool, dependent: bool, rows: int = ROWS
):
    """A TileLang function ``grouped_maps``; tokens are a run-time value.

    Args:
        heads, maps: H, and how many maps there are, each for H / maps <= 64 heads.
        inner, outer: of the maps; multiples of 16 and 8.
        dtype: of all tensors.
        transposed: maps are [maps, outer, inner], else [maps, inner, outer].
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer).
        rows: of a block, FEW or ROWS; at least H / maps.

    The function's arguments: x [tokens, heads, inner] (run-time strides, multiples of 8), up (the maps) and out
    [tokens, heads, outer] (contiguous).
    """
    tokens = T.dynamic("tokens")
    group = heads // maps
    columns = 64 if inner <= 128 else 32  # of a block: long rows are shared among more
    some, blocks = rows // group, -(-outer // columns)  # tokens of a block
    panel = min(inner & -inner, 64)  # columns copied at a time: else 16 bytes cost divisions where inner is 7 * 64
    shape = [maps, outer, inner] if transposed else [maps, inner, outer]

    @T.prim_func
    def grouped_maps(
        x: T.StridedTensor([tokens, heads, inner], [T.dynamic("x_0"), T.dynamic("x_1"), 1], dtype),
        up: T.Tensor(shape, dtype),
        out: T.Tensor([tokens, heads, outer], dtype),
    ):
        with T.Kernel(maps * blocks, T.ceildiv(tokens, some), threads=THREADS) as (at, y):
            T.assume(tokens >= 1)
            for stride in list(x.strides)[:-1]:  # else loads are not known to be aligned, and stay scalar
                T.assume(stride % VECTOR == 0)
            m = Buffers(
                given=T.alloc_shared([rows, inner], dtype),
                held=T.alloc_shared([columns, inner] if transposed else [inner, columns], dtype),
                sums=T.alloc_fragment([rows, columns], T.float32),
            )
            k, c0, t0 = at // blocks, at % blocks * columns, y * some
            if transposed:
                for p in T.unroll(inner // panel):
                    T.copy(
                        up[k, c0 : c0 + columns, p * panel : (p + 1) * panel], m.held[:, p * panel : (p + 1) * panel]
                    )
            else:
                T.copy(up[k, 0:inner, c0 : c0 + columns], m.held)
            if dependent:
                T.pdl_sync()
                T.pdl_trigger()
            for p in T.unroll(inner // panel):
                for i, c in T.Parallel(rows, panel):  # behind the last token that one again: rows that nobody stores
                    m.given[i, p * panel + c] = x[
                        T.min(t0 + i // group, tokens - 1), k * group + i % group, p * panel + c
                    ]
            T.gemm(m.given, m.held, m.sums, transpose_B=transposed, clear_accum=True)
            for i, c in T.Parallel(rows, columns):
                if (i < some * group) & (t0 + i // group < tokens) & (c0 + c < outer):
                    out[t0 + i // group, k * group + i % group, c0 + c] = T.cast(m.sums[i, c], dtype)

    return grouped_maps
