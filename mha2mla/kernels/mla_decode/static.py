"""What is static of an MLA decode kernel, whichever it is, and the types of its tensors."""

from dataclasses import dataclass

import tilelang.language as T
from tilelang import tvm

from mha2mla.kernels.machine import GPU, Machine
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.split_kv.call import Types
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.kernels.split_kv.tiling import RowTiling


@dataclass(frozen=True)
class MLAStatic:
    """Parameters of a kernel body, ``shape`` and ``choice``, and what follows from them."""

    shape: DecodeShape
    choice: KernelChoice

    @property
    def tiling(self) -> RowTiling:
        return self.choice.tiling

    @property
    def dtype(self) -> str:
        """Of queries, rotary keys and output."""
        return self.shape.dtype

    @property
    def page_size(self) -> int:
        return self.shape.page_size

    @property
    def d_c(self) -> int:
        return self.shape.kv_lora_rank

    @property
    def d_r(self) -> int:
        return self.shape.qk_rope_head_dim

    def rope_dim(self, column):
        """Which number of its query stands in rope column ``column`` of the tile."""
        return column % self.d_r

    def meets(self, row, column):
        """Whether rope column ``column`` of the tile belongs to the rope head of its ``row``."""
        owner = self.tiling.head(row) // self.tiling.heads_per_group % self.tiling.groups_per_tile
        return column // self.d_r == owner


class MLATypes(Types):
    """:class:`Types` and q_latent [B,S_q,H,d_c], q_pe [B,S_q,H,d_r], latent_cache [P,page,d_c] and rope_cache
    [P,page,G*d_r], all with run-time strides; they come first, in this order."""

    def __init__(self, shape: DecodeShape, machine: Machine = GPU, latent_dtype: str | None = None):
        super().__init__(shape.heads, shape.kv_lora_rank, shape.page_size, shape.dtype, machine)
        self.q_latent = self.rows("ql", shape.kv_lora_rank)
        self.q_pe = self.rows("qp", shape.qk_rope_head_dim)
        self.latent_cache = self.cache("lc", shape.kv_lora_rank, dtype=latent_dtype)
        self.rope_cache = self.cache("rc", shape.num_rope_heads * shape.qk_rope_head_dim)


@T.macro
def load_rope_queries(k, machine, work, tile, q_pe, qp_tile, first_row, rows, left, columns):
    """``rows`` of the tile and ``columns`` of its rope columns, zeros where a column is another rope head's."""
    for i, d in machine.parallel(rows, columns):
        qp_tile[first_row + i, left + d] = T.if_then_else(
            tvm.tirx.And(tile.holds(first_row + i), k.meets(first_row + i, left + d)),
            q_pe[(*tile.query(work.span, first_row + i), k.rope_dim(left + d))],
            T.cast(0, k.dtype),
        )
