"""What is static of a GQA decode kernel, whichever it is, and the types of its tensors."""

from dataclasses import dataclass

from mha2mla.kernels.gqa_decode.selection import GQAShape, padded_columns
from mha2mla.kernels.machine import GPU, Machine
from mha2mla.kernels.split_kv.call import Types
from mha2mla.kernels.split_kv.choice import KernelChoice


@dataclass(frozen=True)
class GQAStatic:
    """Parameters of a kernel body, ``shape`` and ``choice``, and what follows from them."""

    shape: GQAShape
    choice: KernelChoice
    machine: Machine = GPU

    @property
    def rows(self) -> int:
        return self.choice.tiling.rows

    @property
    def qk_cols(self) -> int:
        return padded_columns(self.shape.qk_head_dim)

    @property
    def v_cols(self) -> int:
        return padded_columns(self.shape.v_head_dim)


class GQATypes(Types):
    """:class:`Types` and q [B,S_q,H,d_qk], k_cache [P,page,G,d_qk] and v_cache [P,page,G,d_v], all with run-time
    strides; they come first, in this order."""

    def __init__(self, k: GQAStatic):
        s = k.shape
        super().__init__(s.heads, s.v_head_dim, s.page_size, s.dtype, k.machine)
        self.q = self.rows("q", s.qk_head_dim)
        self.k_cache = self.cache("k", s.num_kv_heads, s.qk_head_dim)
        self.v_cache = self.cache("v", s.num_kv_heads, s.v_head_dim)
