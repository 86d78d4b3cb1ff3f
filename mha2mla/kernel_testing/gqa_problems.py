"""Decode problems of the source model's attention (MHA, GQA): shapes, poisoned inputs, and the rule of ``problems``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernel_testing.judgement import Judgement, verdict
from mha2mla.kernel_testing.problems import CHUNK_TOKENS, Problem, pages_and_visible, take
from mha2mla.kernels.gqa_decode.dispatch import gqa_shape
from mha2mla.kernels.gqa_decode.plan import plan_gqa_decode
from mha2mla.kernels.gqa_decode.reference import gqa_decode_reference
from mha2mla.kernels.gqa_decode.selection import GQAShape
from mha2mla.kernels.split_kv.plan import DecodePlan

_DATA = ("q", "k_cache", "v_cache")


@dataclass(frozen=True)
class GQAProblem:
    """One GQA decode call.

    Attributes:
        heads, num_kv_heads, qk_head_dim, v_head_dim: H, G, d_qk, d_v.
        lengths, page_size, seqlen_q, starts, causal, window, sinks, slack, scale, seed: as in :class:`Problem`.
        combined: keys and values are two views of one buffer [P, page, G*d_v + G*d_qk].
    """

    heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    lengths: tuple[int, ...]
    page_size: int = 64
    seqlen_q: int = 1
    starts: tuple[int, ...] | None = None
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    combined: bool = False
    slack: int = 1
    scale: float = 1.0
    seed: int = 0

    @property
    def name(self) -> str:
        widths = self.qk_head_dim if self.qk_head_dim == self.v_head_dim else f"{self.qk_head_dim}/{self.v_head_dim}"
        return f"H{self.heads}-G{self.num_kv_heads}-d{widths}-p{self.page_size}-q{self.seqlen_q}".replace("/", "v")

    @property
    def storage(self) -> Problem:
        """An MLA problem whose latents are all heads' values, and whose rotary keys are the keys."""
        return Problem(
            self.heads,
            self.num_kv_heads,
            self.num_kv_heads * self.v_head_dim,
            self.qk_head_dim,
            self.lengths,
            page_size=self.page_size,
            seqlen_q=self.seqlen_q,
            starts=self.starts,
            causal=self.causal,
            window=self.window,
            sinks=self.sinks,
            combined=self.combined,
            slack=self.slack,
            scale=self.scale,
            seed=self.seed,
        )

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5

    @property
    def visibility(self) -> dict[str, Any]:
        """The keyword arguments that a plan takes and a call does not: ``window`` and ``sinks``."""
        return {"window": self.window, "sinks": self.sinks}

    def shape(self, dtype: torch.dtype = torch.bfloat16, seqlen_q: int | None = None) -> GQAShape:
        """What is compiled for it."""
        return gqa_shape(
            self.heads, self.num_kv_heads, self.qk_head_dim, self.v_head_dim, self.page_size, dtype,
            seqlen_q or self.seqlen_q,
        )  # fmt: skip

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes of keys and values that a call has to read, once."""
        return self.storage.tokens_seen() * self.num_kv_heads * (self.qk_head_dim + self.v_head_dim) * itemsize

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


def exact_gqa(inputs: dict[str, Any], window: int | None = None, sinks: int = 0) -> tuple[Tensor, Tensor]:
    """The reference in float64 on the same (rounded) inputs, a few sequences at a time where they are long.

    Returns:
        out [B, S_q, H, d_v] and lse [B, H, S_q], float64.
    """
    batch, capacity = inputs["block_table"].shape[0], inputs["block_table"].shape[1] * inputs["k_cache"].shape[1]
    step = max(1, CHUNK_TOKENS // max(1, capacity * inputs["k_cache"].shape[2]))
    if batch <= step:
        wide = {name: value.double() if name in _DATA else value for name, value in inputs.items()}
        return gqa_decode_reference(**wide, window=window, sinks=sinks)
    parts = [exact_gqa(take(inputs, slice(b, b + step), _DATA), window, sinks) for b in range(0, batch, step)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def torch_gqa_at(inputs: dict[str, Any], dtype: torch.dtype, window: int | None = None, sinks: int = 0) -> Tensor:
    """The same formula in plain torch, every intermediate held in ``dtype``: what "twice torch's error" refers to.

    Returns:
        out [B, S_q, H, d_v] in ``dtype``.
    """
    q, k_cache, v_cache = (inputs[name].to(dtype) for name in _DATA)
    num_pages, page, groups, _ = k_cache.shape
    seqlen_q, heads = q.shape[1:3]
    outs = []
    for b, length in enumerate(inputs["cache_seqlens"].tolist()):
        pages, visible = pages_and_visible(inputs, b, length, num_pages, page, seqlen_q, window, sinks)
        used = visible.any(0)[:, None, None]
        k, v = (
            torch.where(used, cache[pages].flatten(0, 1)[:length], 0).repeat_interleave(heads // groups, 1)
            for cache in (k_cache, v_cache)
        )
        score = torch.einsum("shd,thd->hst", q[b], k) * inputs["softmax_scale"]
        weight = torch.softmax(score.masked_fill(~visible, -torch.inf), -1).nan_to_num(0)  # rows that see nothing
        outs.append(torch.einsum("hst,thd->shd", weight, v))
    return torch.stack(outs) if outs else q.new_zeros(0, seqlen_q, heads, v_cache.shape[3])


def judge_gqa(
    inputs: dict[str, Any], out: Tensor, lse: Tensor | None, window: int | None = None, sinks: int = 0
) -> Judgement:
    """What ``problems.judge`` is for MLA: float64 against the output, and against plain torch's."""
    return verdict(out, lse, *exact_gqa(inputs, window, sinks), torch_gqa_at(inputs, inputs["q"].dtype, window, sinks))
