"""Prefill problems: shapes, poisoned inputs, and the check of their outputs against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mha2mla.testing.numeric_check import Judgement, PlainAttention, plain_attention, verdict

if TYPE_CHECKING:  # TileLang
    from mha2mla.kernels.attention_varlen.tiled import VarlenShape


@dataclass(frozen=True)
class PrefillProblem:
    """One call of ``attention_varlen`` or, with two parts of queries and keys, of ``mla_prefill_varlen``.

    Attributes:
        heads: H.
        widths: d_qk, or (d_n, d_r).
        key_heads: heads of each part's keys.
        v_head_dim: d_v.
        lengths: (queries, keys) of each sequence.
        value_heads: heads of the values; None: of the first part's keys.
        causal: later keys are hidden.
        window, sinks: as in ``attention_varlen``.
        combined: queries, keys and values are views of wider buffers.
        behind: rows behind the last sequence, NaN.
        scale: of the queries; large values make scores of 1e5.
        seed: of all numbers.
    """

    heads: int
    widths: tuple[int, ...]
    key_heads: tuple[int, ...]
    v_head_dim: int
    lengths: tuple[tuple[int, int], ...]
    value_heads: int | None = None
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    combined: bool = False
    behind: int = 5
    scale: float = 1.0
    seed: int = 0

    softmax_scale = 0.09

    @property
    def longest(self) -> int:
        """max_seqlen_q."""
        return max((queries for queries, _ in self.lengths), default=0)

    def shape(self, dtype: str = "bfloat16") -> VarlenShape:
        """Shape to compile for."""
        from mha2mla.kernels.attention_varlen.tiled import VarlenShape

        return VarlenShape(
            self.heads, self.widths, self.key_heads, self.value_heads or self.key_heads[0], self.v_head_dim,
            self.causal, dtype, self.window is not None,
        )  # fmt: skip

    def pairs(self) -> int:
        """(query, key) pairs that are not masked."""
        total = 0
        for queries, keys in self.lengths:
            if self.window is not None:
                total += int(self.visible(queries, keys).sum())
            elif self.causal:  # query i sees keys - queries + i + 1 keys, and not less than none
                last, first = keys, max(0, keys - queries + 1)
                total += (first + last) * (last - first + 1) // 2
            else:
                total += queries * keys
        return total

    def visible(self, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """[queries, keys] bool, of one sequence."""
        behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
        if not self.causal:
            return torch.ones_like(behind, dtype=torch.bool)
        if self.window is None:
            return behind >= 0
        return (behind >= 0) & ((behind < self.window) | (torch.arange(keys, device=device) < self.sinks))

    def flops(self) -> int:
        """Multiplications and additions of the two products: 2 H (d_qk + d_v) for each pair that is not masked."""
        return 2 * self.heads * (sum(self.widths) + self.v_head_dim) * self.pairs()

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
        """``queries`` and ``keys`` (lists of parts), ``v``, ``cu_seqlens_q``, ``cu_seqlens_k``, drawn from the seed."""
        device = torch.device(device)
        make = torch.Generator(device).manual_seed(self.seed)
        starts_q, starts_k = ([0, *accumulate(length[side] for length in self.lengths)] for side in (0, 1))

        def normal(tokens: int, heads: int, width: int, scale: float = 1.0) -> Tensor:
            more = 1 if self.combined else 0  # heads, and eighths of columns
            size = (tokens + self.behind, heads + more, width + 8 * more)
            x = torch.randn(*size, generator=make, device=device, dtype=dtype) * scale
            x[tokens:] = torch.nan
            return x[:, :heads, 8 * more :]

        tokens_q, tokens_k = starts_q[-1], starts_k[-1]
        bounds = {"dtype": torch.int32, "device": device}
        return {
            "queries": [normal(tokens_q, self.heads, width, self.scale) for width in self.widths],
            "keys": [normal(tokens_k, heads, width) for heads, width in zip(self.key_heads, self.widths, strict=True)],
            "v": normal(tokens_k, self.value_heads or self.key_heads[0], self.v_head_dim),
            "cu_seqlens_q": torch.tensor(starts_q, **bounds),
            "cu_seqlens_k": torch.tensor(starts_k, **bounds),
        }


def sequences(problem: PrefillProblem, inputs: dict[str, Any]) -> Iterator[PlainAttention]:
    """The sequences of a call one by one."""
    first_q = first_k = 0
    for queries, keys in problem.lengths:
        rows, columns = slice(first_q, first_q + queries), slice(first_k, first_k + keys)
        visible = problem.visible(queries, keys, inputs["v"].device) if problem.causal else None
        yield PlainAttention(
            tuple(q[rows] for q in inputs["queries"]), tuple(k[columns] for k in inputs["keys"]),
            inputs["v"][columns], visible, problem.softmax_scale,
        )  # fmt: skip
        first_q, first_k = first_q + queries, first_k + keys


def judge(problem: PrefillProblem, inputs: dict[str, Any], out: Tensor, lse: Tensor | None) -> Judgement:
    """Compares out [T_q, H, d_v] and lse [H, T_q] with float64, and plain torch at the inputs' dtype with float64.

    Rows behind the last sequence are not checked.
    """
    tokens = sum(queries for queries, _ in problem.lengths)
    if not tokens:
        return Judgement(True, "", 0.0, 0.0)
    right = plain_attention(sequences(problem, inputs), inputs["v"].dtype)
    return verdict(out[:tokens], None if lse is None else lse[:, :tokens], *right)


def sample(
    problem: PrefillProblem, inputs: dict[str, Any], out: Tensor, lse: Tensor | None, rows: int = 64
) -> tuple[PrefillProblem, dict[str, Any], Tensor, Tensor | None]:
    """A smaller problem out of a large one, and its part of the result: :func:`judge` holds all scores in float64.

    The first, the last and some rows in the middle of up to three sequences, for up to three heads; every block of rows
    with all keys that it may see is a sequence of its own.
    """
    heads = sorted({0, problem.heads // 2, problem.heads - 1})
    starts_q, starts_k = ([0, *accumulate(length[side] for length in problem.lengths)] for side in (0, 1))
    batch = len(problem.lengths)
    blocks = []  # first row of all, rows, first key of all, keys
    for b in sorted({0, batch // 2, batch - 1}):
        queries, keys = problem.lengths[b]
        for first in sorted({0, max(0, queries // 2 - 7), max(0, queries - rows)}):
            count = min(rows, queries - first)
            seen = max(0, keys - queries + first + count) if problem.causal else keys
            blocks.append((starts_q[b] + first, count, starts_k[b], min(keys, seen)))

    def pick(x: Tensor, side: int) -> Tensor:
        """[tokens of all blocks, picked heads, width]."""
        mine = [head * x.shape[1] // problem.heads for head in heads]
        return torch.cat([x[block[2 * side] : block[2 * side] + block[2 * side + 1], mine] for block in blocks])

    bounds = {"dtype": torch.int32, "device": out.device}
    lengths = tuple((count, seen) for _, count, _, seen in blocks)
    smaller = replace(
        problem, heads=len(heads), key_heads=(len(heads),) * len(problem.widths), value_heads=len(heads),
        lengths=lengths, behind=0, combined=False,
    )  # fmt: skip
    small = {
        "queries": [pick(q, 0) for q in inputs["queries"]],
        "keys": [pick(k, 1) for k in inputs["keys"]],
        "v": pick(inputs["v"], 1),
        "cu_seqlens_q": torch.tensor([0, *accumulate(count for count, _ in lengths)], **bounds),
        "cu_seqlens_k": torch.tensor([0, *accumulate(seen for _, seen in lengths)], **bounds),
    }
    return smaller, small, pick(out, 0), None if lse is None else pick(lse.T[..., None], 0)[..., 0].T
