"""From a kernel choice to a TileLang function: what knows every kernel file of GQA decode."""

from __future__ import annotations

from mha2mla.kernels.gqa_decode.portable import make_gqa_decode_portable
from mha2mla.kernels.gqa_decode.selection import GQAChoice, GQAShape
from mha2mla.kernels.gqa_decode.streamed import make_gqa_decode_streamed


def make_split(shape: GQAShape, choice: GQAChoice, *, dtype: str | None = None, on_cpu: bool = False):
    """The TileLang function of ``choice`` (not compiled); ``dtype`` overrides the shape's, for the CPU target."""
    common = {
        "heads": shape.heads,
        "num_kv_heads": shape.num_kv_heads,
        "qk_head_dim": shape.qk_head_dim,
        "v_head_dim": shape.v_head_dim,
        "page_size": shape.page_size,
        "dtype": dtype or shape.dtype,
        "tiling": choice.tiling,
    }
    if choice.kernel == "streamed":
        return make_gqa_decode_streamed(**common, num_stages=choice.num_stages, ctas_per_sm=choice.ctas_per_sm)
    return make_gqa_decode_portable(**common, block_tokens=choice.block_tokens, on_cpu=on_cpu)
