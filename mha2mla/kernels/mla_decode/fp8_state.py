"""What a CTA of ``fp8`` and each of its computing threads hold: static parameters, shared memory, registers."""

from dataclasses import dataclass

import tilelang.language as T

from mha2mla.kernels.machine import BARRIER, ROW_GROUP, SWIZZLE_128, WARPGROUP, Buffers
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.mla_decode.static import MLAStatic
from mha2mla.kernels.split_kv.choice import KernelChoice

CONSUMERS = 2 * WARPGROUP
CODES = T.float8_e4m3fn
BLOCK = 64  # cached tokens per tile: the M of one wgmma
PANEL = 128  # bytes of a row of swizzled shared memory: codes side by side
WIDE = 64  # the same in 16-bit numbers
BUFFERS = 2  # register operands in flight, 8 registers for two products each
AHEAD = 2  # steps by which codes are fetched before they are converted


@dataclass(frozen=True)
class Static(MLAStatic):
    stages: int  # tiles in flight for each of the two warpgroups
    rows: int
    page_rows: int  # rows of a tile that lie in one page
    pieces: int  # pages that a tile lies in
    tiles: int  # 64 columns each: rows of one product with the weights, depth of four with the queries
    panels: int
    rope_panels: int
    held: int  # accumulators of a thread for 64 rows
    mine: int  # heads that a thread has accumulators for


def static_of(shape: DecodeShape, choice: KernelChoice) -> Static:
    rows = choice.tiling.rows
    return Static(
        shape,
        choice,
        stages=choice.num_stages,
        rows=rows,
        page_rows=min(BLOCK, shape.page_size),
        pieces=max(1, BLOCK // shape.page_size),
        tiles=-(-shape.kv_lora_rank // 64),
        panels=-(-shape.kv_lora_rank // PANEL),
        rope_panels=-(-(choice.tiling.groups_per_tile * shape.qk_rope_head_dim) // WIDE),
        held=rows // 2,
        mine=rows // 4,
    )


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

    Attributes: ``o`` output, ``s`` scores, then weights, ``turned`` scores by rotary keys; of its heads ``den``, ``m``
    (running maximum) and ``top``; ``word`` codes of one step and of the next ones, ``a`` register operands; of its two
    tokens ``scale_of`` and ``log_of``; ``x`` a row of queries, at other times anything.
    """

    def __init__(self, k: Static, w: int, thread, memory: Buffers):
        heads, held = [k.mine], [k.held]
        super().__init__(
            o=T.alloc_local([k.tiles * k.held], T.float32),
            s=T.alloc_local(held, T.float32),
            turned=T.alloc_local(held, T.float32),
            den=T.alloc_local(heads, T.float32),
            m=T.alloc_local(heads, T.float32),
            top=T.alloc_local(heads, T.float32),
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
