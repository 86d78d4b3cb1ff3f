"""Decode problems of the source model's attention (MHA, GQA), made and judged as those of MLA (``problems``)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from mha2mla.kernel_testing.problems import PagedProblem, Problem
from mha2mla.kernels.gqa_decode.api import GQA, plan_gqa_decode
from mha2mla.kernels.gqa_decode.selection import GQAShape
from mha2mla.kernels.split_kv.op import PagedOp, compiled_shape
from mha2mla.kernels.split_kv.plan import DecodePlan


@dataclass(frozen=True)
class GQAProblem(PagedProblem):
    """One GQA decode call; ``combined``: keys and values are two views of one buffer [P, page, G*d_v + G*d_qk].

    Attributes: ``heads``, ``num_kv_heads``, ``qk_head_dim``, ``v_head_dim``: H, G, d_qk, d_v.
    """

    heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    lengths: tuple[int, ...]

    @property
    def op(self) -> PagedOp:
        return GQA

    @property
    def name(self) -> str:
        widths = self.qk_head_dim if self.qk_head_dim == self.v_head_dim else f"{self.qk_head_dim}/{self.v_head_dim}"
        return f"H{self.heads}-G{self.num_kv_heads}-d{widths}-p{self.page_size}-q{self.seqlen_q}".replace("/", "v")

    @property
    def storage(self) -> Problem:
        """An MLA problem whose latents are all heads' values, and whose rotary keys are the keys."""
        shared = {field.name: getattr(self, field.name) for field in fields(PagedProblem)}
        width = self.num_kv_heads * self.v_head_dim
        return Problem(self.heads, self.num_kv_heads, width, self.qk_head_dim, self.lengths, **shared)

    @property
    def columns(self) -> dict[str, int]:
        widths = {"d_qk": self.qk_head_dim, "d_v": self.v_head_dim}
        return {"H": self.heads, "G": self.num_kv_heads} | widths | {"page": self.page_size, "S_q": self.seqlen_q}

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5

    def shape(self, dtype: str = "bfloat16", seqlen_q: int | None = None) -> GQAShape:
        """What is compiled for it."""
        return compiled_shape(super().shape(dtype, seqlen_q))

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes of keys and values that a call has to read, once."""
        return self.tokens_seen() * self.num_kv_heads * (self.qk_head_dim + self.v_head_dim) * itemsize

    def flops(self) -> int:
        """As :meth:`Problem.flops`."""
        return 2 * self.tokens_seen() * self.seqlen_q * self.heads * (self.qk_head_dim + self.v_head_dim)

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Arguments of ``gqa_decode`` by name, poisoned wherever nobody may look, as :meth:`Problem.inputs` says."""
        made = self.storage.inputs(dtype, device)
        return {
            "q": made["q_pe"],
            "k_cache": made["rope_cache"],
            "v_cache": made["latent_cache"].unflatten(-1, (self.num_kv_heads, self.v_head_dim)),
            "block_table": made["block_table"],
            "cache_seqlens": made["cache_seqlens"],
            "cache_starts": made["cache_starts"],
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
        }

    def plan(self, inputs: dict[str, Any], backend: str | None = None) -> DecodePlan:
        """The plan for these inputs, with the problem's window and sinks."""
        return plan_gqa_decode(
            inputs["q"],
            inputs["k_cache"],
            inputs["block_table"],
            inputs["cache_seqlens"],
            v_head_dim=self.v_head_dim,
            cache_starts=inputs["cache_starts"],
            causal=self.causal,
            backend=backend,
            **self.visibility,
        )
