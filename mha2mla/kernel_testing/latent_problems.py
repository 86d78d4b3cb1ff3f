"""Decode problems over a cache of the latent alone, whose rotary keys are computed when they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernel_testing.problems import Problem
from mha2mla.kernels.latent_rope import LatentRope
from mha2mla.kernels.mla_decode.api import LATENT, LATENT_FP8
from mha2mla.kernels.mla_decode.quantization import quantize_latent
from mha2mla.kernels.split_kv.op import PagedOp


@dataclass(frozen=True)
class LatentProblem(Problem):
    """One decode call; what :class:`Problem` says, for ``num_rope_heads`` 1 and ``combined``: latents are a view.

    Attributes:
        scaling: of :class:`LatentRope`.
        first_position: rotary position of a sequence's first token; pages get offsets where it is not 0.
        shuffled: each page gets an offset of its own, up to 2**17.
        codes: latents are e4m3 numbers with a scale a token (and no view then).
    """

    scaling: float = 1.0
    first_position: int = 0
    shuffled: bool = False
    codes: bool = False

    @property
    def op(self) -> PagedOp:
        return LATENT_FP8 if self.codes else LATENT

    @property
    def columns(self) -> dict[str, int]:
        return super().columns | ({"bits": 8} if self.codes else {})

    def cache_bytes(self, itemsize: int = 2) -> int:
        return self.tokens_seen() * (self.kv_lora_rank + 4) if self.codes else super().cache_bytes(itemsize)

    @property
    def geometry(self) -> MLAGeometry:
        return replace(super().geometry, rope_from_latent=True)

    def flops(self) -> int:
        """Those of :class:`Problem`, and of one rotary key a token, however many queries read it."""
        read = super().geometry.decode_flops_per_token() * self.seqlen_q
        return self.tokens_seen() * (read + 2 * self.kv_lora_rank * self.qk_rope_head_dim)

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
        """As :meth:`Problem.inputs`, with ``rope`` and without ``rope_cache``. The slowest pair does not turn."""
        made = super().inputs(dtype, device)
        make = torch.Generator(device).manual_seed(self.seed + 1)
        width, pairs = self.qk_rope_head_dim, self.qk_rope_head_dim // 2
        normal = {"generator": make, "device": device, "dtype": dtype}
        inv_freq = 1e4 ** -(torch.arange(pairs, device=device, dtype=torch.float64) / pairs)
        if pairs > 1:
            inv_freq[-1] = 0
        offsets = None
        if self.shuffled:
            offsets = torch.randint(0, 2**17, made["block_table"].shape, generator=make, device=device)
        elif self.first_position:
            offsets = torch.full(made["block_table"].shape, self.first_position, device=device)
        rope = LatentRope(
            torch.randn(width, self.kv_lora_rank, **normal) * self.kv_lora_rank**-0.5,
            torch.randn(width, **normal),
            inv_freq.float(),
            self.scaling,
            None if offsets is None else offsets.int(),
        )
        if self.codes:
            made["latent_cache"], made["latent_scale"] = quantize_latent(made["latent_cache"])
        return made | {"rope_cache": None, "rope": rope}
