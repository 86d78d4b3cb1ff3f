"""One step of another engine over its own pages: what its layers share, made once, on the device. No vLLM here.

The engine stores one row a token and layer, ``[c | k_pe of G heads]``, or c alone. The ops are those of the attention
backends (:mod:`mha2mla.modeling.backends`); all of a batch's sequences bring as many tokens, at most 8: a plan of the
decode op, which stays where it is, so that a CUDA graph can be replayed; else a plan of the mixed op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import MAX_DECODE_QUERY_LENGTH, MAX_EXPANDED_TOKENS, DecodePlan
from mha2mla.modeling.batch import UniformBatch, uniform_length
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants, Plan
from mha2mla.modeling.step import DecodePlans, mixed_plans

LayerKey = tuple[MLAGeometry, tuple[int | None, int]]
MOST_REHEARSED = 64  # sequences: larger batches take the same kernels


def cache_views(rows: Tensor, geometry: MLAGeometry) -> dict[str, Tensor]:
    """``latent_cache`` [P, page, d_c] and ``rope_cache`` [P, page, G, d_r], if any, of pages [P, page, row].

    Raises:
        ValueError: rows are not as wide as the geometry's.
    """
    if rows.shape[-1] != (width := geometry.cache_numel_per_token):
        raise ValueError(f"rows.shape is {tuple(rows.shape)}; expected rows of {width} for {geometry}")
    latent = rows[..., : geometry.kv_lora_rank]
    if not geometry.has_rope_cache:
        return {"latent_cache": latent}
    rope = rows[..., geometry.kv_lora_rank :].unflatten(-1, (geometry.num_rope_heads, geometry.qk_rope_head_dim))
    return {"latent_cache": latent, "rope_cache": rope}


def host_lengths(query_lengths: Sequence[int], total_lengths: Sequence[int]) -> Tensor:
    """[3, B] int32 on the CPU, as plans take it: new tokens, tokens cached before them, first visible token.

    Args:
        query_lengths: new tokens per sequence.
        total_lengths: tokens with the new ones. Of short queries an upper bound is enough.
    """
    rows = [query_lengths, [max(0, t - q) for q, t in zip(query_lengths, total_lengths, strict=True)]]
    return torch.tensor([*rows, [0] * len(query_lengths)], dtype=torch.int32).view(3, -1)


@dataclass(frozen=True)
class PagedStep:
    """What layers are told of a step.

    Attributes:
        batch: where the new tokens go.
        plans: by geometry, window and sinks.
    """

    batch: UniformBatch
    plans: Mapping[LayerKey, Plan]

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to sequences; those behind them pad the batch."""
        return self.batch.positions.shape[0]

    def run(
        self, tensors: Mapping[str, Tensor | None], rows: Tensor, backend: AttentionBackend, layer: AttentionConstants
    ) -> Tensor:
        """Appends a layer's new tokens and attends: [N, H, d_v].

        Args:
            tensors: by the backend's names, of the first :attr:`num_tokens` tokens.
            rows: the layer's pages [P, page, row].
        """
        cache = cache_views(rows, layer.geometry)
        return backend.run(tensors, cache, self.batch, self.plans[key_of(layer)], layer)


def key_of(layer: AttentionConstants) -> LayerKey:
    """What layers must share to share a plan."""
    return layer.geometry, layer.limits


class _Layer(NamedTuple):
    """A layer over the engine's pages, as :class:`~mha2mla.modeling.step.ServedLayer` has it."""

    backend: AttentionBackend
    constants: AttentionConstants
    tensors: dict[str, Tensor]
    dtype: torch.dtype


class StepPlanner:
    """Makes the steps of layers whose pages have the same shape, dtype and device.

    Args:
        layers: what differs between them; each once.
        backend: that serves them.
        dtype: of queries.
        max_tokens: new tokens of the largest step.
        device: of all tensors.
    """

    def __init__(
        self,
        layers: Sequence[AttentionConstants],
        backend: AttentionBackend,
        dtype: torch.dtype,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.layers = {key_of(layer): layer for layer in layers}
        self.backend, self.dtype = backend, dtype
        # Graphs read these where they are.
        self._positions = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._slots = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        self._decode_plans: dict[tuple[int, int, int], DecodePlans] = {}
        self._workspaces: dict[str, Tensor] = {}

    def step(
        self,
        rows: Tensor,
        query_lengths: Sequence[int],
        total_lengths: Sequence[int],
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
    ) -> PagedStep:
        """A step's plans; those of decode steps stay where they are from call to call.

        Args:
            rows: pages [P, page, row] of any of the layers.
            query_lengths, total_lengths: per sequence, as in :func:`host_lengths`.
            positions, slots: [N] integers on the device; slots outside the cache, such as -1, are not written.
            block_table: [B, max_pages] int32.
            cache_seqlens: [B] int32 on the device, exact; 0 for rows that pad the batch.
        """
        tokens = positions.shape[0]
        mine = self._positions[:tokens], self._slots[:tokens]
        mine[0].copy_(positions)
        mine[1].copy_(slots)
        length = uniform_length(query_lengths, tokens)
        lengths = None if length is not None else host_lengths(query_lengths, total_lengths)
        batch = UniformBatch(*mine, block_table, cache_seqlens, None, lengths)
        views = [
            _Layer(self.backend, layer, cache_views(rows, layer.geometry), self.dtype) for layer in self.layers.values()
        ]
        everyone, batches = (True,) * len(views), (batch,) * len(views)
        if length is None:
            return PagedStep(batch, dict(zip(self.layers, mixed_plans(views, everyone, batches), strict=True)))
        shape = (block_table.shape[0], length, block_table.shape[1])
        if shape not in self._decode_plans:
            made = DecodePlans.allocate(views, everyone, [block_table] * len(views), length)
            self._decode_plans[shape] = replace(made, of_layer=tuple(map(self._over_workspace, made.of_layer)))
        plans = self._decode_plans[shape]
        plans.refresh(batches)
        return PagedStep(batch, dict(zip(self.layers, plans.of_layer, strict=True)))

    def _over_workspace(self, plan: DecodePlan) -> DecodePlan:
        """The plan over a workspace that all plans share, since layers and batches run one after another: each graph of
        another batch size would hold tens of MB else. One that is too small is left to the plans that have it."""
        mine = {}
        for name in ("partial_out", "partial_lse"):
            wanted = getattr(plan, name)
            flat = self._workspaces.get(name)
            if flat is None or flat.numel() < wanted.numel():
                flat = self._workspaces[name] = wanted.flatten()
            mine[name] = flat[: wanted.numel()].view(wanted.shape)
        return replace(plan, **mine)


def rehearsals(max_tokens: int, max_length: int) -> list[tuple[list[int], list[int]]]:
    """New tokens, and tokens with the new ones, per sequence: steps that between them launch every kernel that steps
    of at most ``max_tokens`` new tokens and sequences of at most ``max_length`` need, and take the most workspace.

    Short queries may come in any step, as what a chunk or a cached prefix left of a prompt.
    """
    lengths = [2**n for n in range(MAX_DECODE_QUERY_LENGTH.bit_length())]  # that kernels are compiled for
    batches = [2**n for n in range(MOST_REHEARSED.bit_length())]
    decode = [[length] * batch for length in lengths for batch in batches if length * batch <= max_tokens]
    rest, mixed = max_tokens - 1, [1]
    while rest > 0:
        mixed.append(min(rest, max_length))
        rest -= mixed[-1]
    # One sequence is longer than what is expanded at a time.
    totals = [1, *(min(max_length, new + MAX_EXPANDED_TOKENS) for new in mixed[1:2]), *mixed[2:]]
    return [*((each, each) for each in decode), (mixed, totals)]


def rehearse(
    tensors: Mapping[str, Tensor | None], backend: AttentionBackend, layer: AttentionConstants, max_length: int
) -> None:
    """Runs a layer's :func:`rehearsals` over a page of zeros; no cache is written.

    A kernel is compiled by its first launch, which takes 15 seconds and more if TileLang's cache does not have it: no
    request should wait for that. Who measures memory meanwhile sees the workspace.

    Args:
        tensors: as :meth:`PagedStep.run` takes them, of the largest step.
        backend, layer: whose kernels.
        max_length: tokens of the longest sequence.
    """
    query = tensors["q_pe"]
    device, most = query.device, query.shape[0]
    planner = StepPlanner([layer], backend, query.dtype, most, device)
    rows = query.new_zeros(1, PAGE_SIZE, layer.geometry.cache_numel_per_token)
    for query_lengths, total_lengths in rehearsals(most, max_length):
        tokens, columns = sum(query_lengths), -(-max(total_lengths) // PAGE_SIZE)
        positions = torch.zeros(tokens, dtype=torch.int32, device=device)
        table = positions.new_zeros(len(query_lengths), columns)
        seqlens = torch.tensor(total_lengths, dtype=torch.int32, device=device)
        step = planner.step(rows, query_lengths, total_lengths, positions, positions - 1, table, seqlens)
        mine = {n: t[:tokens] if n in backend.per_token and t is not None else t for n, t in tensors.items()}
        step.run(mine, rows, backend, layer)
