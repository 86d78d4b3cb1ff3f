"""The append and W_UK's product in one launch: neither needs the other, and decode needs both."""

import tilelang.language as T

from mha2mla.kernels.machine import Buffers
from mha2mla.kernels.rope_append.kernel import append_parts
from mha2mla.kernels.skinny_linear.maps import THREADS, map_blocks, map_parts


def make_append_and_map(
    *,
    heads: int,
    num_rope_heads: int,
    row_width: int,
    qk_rope_head_dim: int,
    num_tables: int,
    page_size: int,
    maps: int,
    inner: int,
    dtype: str,
    vector: int = 1,
):
    """A TileLang function ``append_and_map`` for sm_90: a block for each token as of ``rope_append``, then those of
    ``skinny_maps``; tokens and pages are run-time values.

    What the kernel before does not write is read before that has ended: the maps, and angles by the positions that are
    there, which are made again where they are others once it has.

    Args:
        heads, num_rope_heads, row_width, qk_rope_head_dim, num_tables, page_size, dtype, vector: as of
            ``make_rope_append``, with ``row_width`` columns of a map; halves are pairs.
        maps, inner: as of ``make_skinny_maps``.

    The function's arguments: those of ``rope_append``; then x, up and mapped, as of ``skinny_maps``.
    """
    accum = T.float32
    half = qk_rope_head_dim // 2
    tokens, pages = T.dynamic("tokens"), T.dynamic("pages")
    groups = max(1, num_rope_heads)
    append = append_parts(
        heads=heads, num_rope_heads=num_rope_heads, row_width=row_width, qk_rope_head_dim=qk_rope_head_dim,
        num_tables=num_tables, page_size=page_size, dtype=dtype, interleaved=False, vector=vector, block_tokens=1,
        threads=THREADS,
    )  # fmt: skip
    product = map_parts(heads=heads, maps=maps, inner=inner, outer=row_width, dtype=dtype)

    def stride(i, *tensors):  # a loop over tensors or strides in the kernel would give them all one name
        return [stride for tensor in tensors for stride in list(tensor.strides)[:-1]][i]

    @T.prim_func
    def append_and_map(
        rows: T.StridedTensor([tokens, row_width], [T.dynamic("rows_0"), 1], dtype),
        keys: T.StridedTensor([tokens, groups, qk_rope_head_dim], [T.dynamic("keys_0"), T.dynamic("keys_1"), 1], dtype),
        query: T.StridedTensor(
            [tokens, heads, qk_rope_head_dim], [T.dynamic("query_0"), T.dynamic("query_1"), 1], dtype
        ),
        positions: T.Tensor([tokens], T.int32),
        slots: T.Tensor([tokens], T.int32),
        inv_freq: T.Tensor([num_tables, half], accum),
        row_cache: T.StridedTensor([pages, page_size, row_width], [T.dynamic("row_0"), T.dynamic("row_1"), 1], dtype),
        rope_cache: T.StridedTensor(
            [pages, page_size, groups * qk_rope_head_dim], [T.dynamic("key_0"), T.dynamic("key_1"), 1], dtype
        ),
        out: T.Tensor([tokens, heads, qk_rope_head_dim], dtype),
        scaling: T.float32,
        x: T.StridedTensor([tokens, heads, inner], [T.dynamic("x_0"), T.dynamic("x_1"), 1], dtype),
        up: T.Tensor([maps, inner, row_width], dtype),
        mapped: T.Tensor([tokens, heads, row_width], dtype),
    ):
        with T.Kernel(map_blocks(tokens, heads, row_width) + tokens, threads=THREADS) as block:
            if vector > 1:  # else stores are not known to be aligned, and stay scalar
                for i in list(range(9)):
                    T.assume(stride(i, rows, keys, query, row_cache, rope_cache) % vector == 0)
            m = Buffers(**append.alloc(), **product.alloc(), then=T.alloc_local([2], T.int32))
            if block < tokens:
                m.then[0] = positions[block]
                append.find_angles(positions, inv_freq, scaling, m, block, tokens)
                T.pdl_sync()
                T.pdl_trigger()
                m.then[1] = positions[block]
                append.find_slots(slots, m, block, tokens, pages)
                if m.then[0] != m.then[1]:
                    append.find_angles(positions, inv_freq, scaling, m, block, tokens)
                T.sync_threads()
                append.write(rows, keys, query, row_cache, rope_cache, out, m, block, tokens)
            else:
                product.ask(up, m, block - tokens)
                T.pdl_sync()
                T.pdl_trigger()
                product.apply(x, mapped, m, block - tokens, tokens)

    return append_and_map
