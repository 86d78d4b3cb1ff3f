"""Static parameters and tensor types of MLA decode kernels; rotation of keys made of the latent.

R(t) of a token is R(first of its 16 tokens) R(place among them): one cos and sin per frequency and 16 tokens, by a
range reduction in float64, multiplied with a table of 16 places. Pages hold a multiple of 16 tokens, so each 16 lie in
one page and share its offset.
"""

from dataclasses import dataclass

import tilelang.language as T
from tilelang import tvm

from mha2mla.kernels.machine import GPU, Buffers, Machine
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.split_kv.choice import TILE_TOKENS, KernelChoice
from mha2mla.kernels.split_kv.device import Types


@dataclass(frozen=True)
class MLAStatic:
    """Parameters of a kernel body, ``shape`` and ``choice``, and what follows from them."""

    shape: DecodeShape
    choice: KernelChoice

    tiling = property(lambda k: k.choice.tiling)
    dtype = property(lambda k: k.shape.dtype)  # of queries, rotary keys and output
    page_size = property(lambda k: k.shape.page_size)
    d_c = property(lambda k: k.shape.kv_lora_rank)
    d_r = property(lambda k: k.shape.qk_rope_head_dim)
    page_rows = property(lambda k: min(TILE_TOKENS, k.page_size))  # of a tile, that lie in one page

    def rope_dim(self, column):
        """Index in its query of rope column ``column`` of the tile."""
        return column % self.d_r

    def meets(self, row, column):
        """True where rope column ``column`` of the tile belongs to the rope head of its ``row``."""
        owner = self.tiling.head(row) // self.tiling.heads_per_group % self.tiling.groups_per_tile
        return column // self.d_r == owner


class MLATypes(Types):
    """:class:`Types` behind q_latent [B,S_q,H,d_c], q_pe [B,S_q,H,d_r] and latent_cache
    [P,page,d_c], where that is of ``codes`` followed by latent_scale [P,page] (float32); then rope_cache
    [P,page,G*d_r], where that is of ``key_codes`` (int8) followed by rope_scale [P,page] (float32). All have run-time
    strides.

    Without a rope_cache there follows rope_weight [d_r,d_c] (run-time stride); there and behind rope_scale rope_bias
    [d_r], inv_freq [d_r/2] (float32) and page_offsets [B,max_pages] (int32); and behind sinks ``scaling`` and
    ``has_offsets``, 0 where page_offsets is not to be read.
    """

    def __init__(
        self,
        shape: DecodeShape,
        machine: Machine = GPU,
        *,
        has_rope_cache: bool = True,
        codes: str | None = None,
        key_codes: bool = False,
    ):
        d_c, d_r = shape.kv_lora_rank, shape.qk_rope_head_dim
        super().__init__("mla_decode", shape.heads, d_c, shape.page_size, shape.dtype, machine)
        self.has_rope_cache = has_rope_cache
        self.data = {
            "q_latent": self.rows("ql", d_c),
            "q_pe": self.rows("qp", d_r),
            "latent_cache": self.cache("lc", d_c, dtype=codes),
            **({"latent_scale": self.cache("ls", dtype=T.float32)} if codes else {}),
        }
        if has_rope_cache:
            self.data["rope_cache"] = self.cache("rc", shape.num_rope_heads * d_r, dtype=T.int8 if key_codes else None)
        else:
            self.data["rope_weight"] = machine.strided("rw", [d_r, d_c], shape.dtype)
        if key_codes:
            self.data["rope_scale"] = self.cache("rs", dtype=T.float32)
        if key_codes or not has_rope_cache:
            self.data |= {
                "rope_bias": T.Tensor([d_r], shape.dtype),
                "inv_freq": T.Tensor([d_r // 2], T.float32),
                "page_offsets": T.Tensor([self.batch, T.dynamic("offset_pages")], T.int32),
            }
            self.numbers = {"scaling": T.float32(), "has_offsets": T.int32()}


@T.macro
def load_rope_queries(k, machine, work, tile, q_pe, qp_tile, first_row, rows, left, columns, first_column=0):
    """``rows`` of the tile and ``columns`` of its rope columns, zeros where a column is another rope head's;
    ``first_column``: of those that ``qp_tile`` holds."""
    for i, d in machine.parallel(rows, columns):
        qp_tile[first_row + i, left + d] = T.if_then_else(
            tvm.tirx.And(tile.holds(first_row + i), k.meets(first_row + i, first_column + left + d)),
            q_pe[(*tile.query(work, first_row + i), k.rope_dim(first_column + left + d))],
            T.cast(0, k.dtype),
        )


GROUP = 16  # tokens whose first one's angle is reduced
HALF_PI = (1.570796, 3.267949e-07)  # to add up: in seven digits each, which is what TileLang's C target prints


def position_of(call, work, t):
    """The rotary position of token ``t`` of the sequence at hand."""
    page = T.min(t // work.page_size, work.last_page())
    return t + T.if_then_else(call.has_offsets != 0, call.page_offsets[work.sequence, page], 0)


class Turn(Buffers):
    """A thread's numbers on the way to ``cos`` and ``sin`` [1] of an angle."""

    def __init__(self):
        super().__init__(
            angle=T.alloc_local([1], "float64"),
            quarter=T.alloc_local([1], T.int32),
            rest=T.alloc_local([1], T.float32),
            square=T.alloc_local([1], T.float32),
            cos=T.alloc_local([1], T.float32),
            sin=T.alloc_local([1], T.float32),
        )


@T.macro
def find_turn(x, position, frequency):
    """cos and sin of ``position * frequency``, to 2e-7 at any position: the remainder by quarter turns in float64, the
    Taylor series at most 45 degrees from there. (The intrinsics of fast math are off by 4e-7, and know no large
    angles.)"""
    x.angle[0] = T.cast(position, "float64") * T.cast(frequency, "float64")
    x.quarter[0] = T.cast(T.floor(x.angle[0] * T.float64(1 / sum(HALF_PI)) + T.float64(0.5)), T.int32)
    for part in list(HALF_PI):
        x.angle[0] -= T.cast(x.quarter[0], "float64") * T.float64(part)
    x.rest[0] = T.cast(x.angle[0], T.float32)
    x.square[0] = x.rest[0] * x.rest[0]
    x.cos[0] = 1.0 + x.square[0] * (-1 / 2 + x.square[0] * (1 / 24 + x.square[0] * (-1 / 720 + x.square[0] / 40320)))
    x.sin[0] = x.rest[0] + x.rest[0] * x.square[0] * (
        -1 / 6 + x.square[0] * (1 / 120 + x.square[0] * (-1 / 5040 + x.square[0] / 362880))
    )
    x.rest[0] = x.cos[0]
    if x.quarter[0] % 2 != 0:
        x.cos[0] = x.sin[0]
        x.sin[0] = x.rest[0]
    if (x.quarter[0] + 1) // 2 % 2 != 0:
        x.cos[0] = -x.cos[0]
    if x.quarter[0] // 2 % 2 != 0:
        x.sin[0] = -x.sin[0]


@T.macro
def find_scaled_turn(x, position, frequency, scaling):
    """:func:`find_turn` times m, which leaves pairs alone that do not turn."""
    find_turn(x, position, frequency)
    if frequency != 0.0:
        x.cos[0] *= scaling
        x.sin[0] *= scaling
