"""Compiles the combine kernel once per width and dtype, and launches it on torch's current stream."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mha2mla.kernels.attention_combine.kernel import make_attention_combine
from mha2mla.kernels.compilation import SMALL_PASS_CONFIGS, compile_for
from mha2mla.kernels.devices import capability, dtype_name
from mha2mla.kernels.layouts import aligned


@cache
def compile_attention_combine(major_minor: int, v_head_dim: int, partial_dtype: str, dtype: str, packed: bool = False):
    """The compiled kernel. One compilation serves every number of splits, batch, S_q and H."""
    function = make_attention_combine(v_head_dim=v_head_dim, partial_dtype=partial_dtype, dtype=dtype, packed=packed)
    return compile_for(function, major_minor, SMALL_PASS_CONFIGS)


def launch_attention_combine(
    partial_out: Tensor, partial_lse: Tensor, num_splits: Tensor | None, out: Tensor, lse: Tensor, packed: bool = False
) -> None:
    """Run the kernel; shapes as in :func:`mha2mla.kernels.attention_combine`, or its packed form."""
    if out.numel() == 0:
        return
    splits, batch = partial_out.shape[0], out.shape[0]
    if splits == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    if num_splits is None:
        num_splits = torch.full((batch,), splits, dtype=torch.int32, device=out.device)
    static = (capability(out.device), out.shape[-1], dtype_name(partial_out.dtype), dtype_name(out.dtype), packed)
    with torch.cuda.device(out.device):
        compile_attention_combine(*static)(
            aligned(partial_out), partial_lse.contiguous(), num_splits.contiguous(), out, lse
        )
