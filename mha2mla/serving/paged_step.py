"""Steps of another engine over its own pages, by this package's backends. No vLLM here.

The engine stores one row a token and layer, ``[c | k_pe of G heads]``, or c alone, in the model's dtype; with codes of
latents or keys, one row of bytes, and a page has all its latents, then its keys, then their scales
(:meth:`CacheLayout.views`). The ops are those of the attention backends (:mod:`mha2mla.modeling.backends`). A batch
whose sequences all bring as many tokens, at most 8, has a plan of the decode op, which stays where it is, so that a
CUDA graph can be replayed; others have a plan of the mixed op. That reads latents in 16 bits: where the cache holds
codes, sequences that decode are a call of their own, and the others as many at a time as their copies may take room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import (
    FEWEST_EXPANDED,
    MAX_DECODE_QUERY_LENGTH,
    MAX_EXPANDED_BYTES,
    compile_ahead,
    decodes_codes,
    expanded_tokens,
)
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.batch import UniformBatch, uniform_length
from mha2mla.modeling.cache_layout import PAGE_SIZE, latent_layout
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants
from mha2mla.modeling.step import AttentionStep, CacheLayer, StepPlanner, with_one_workspace
from mha2mla.modeling.tensor_parallel import HeadShard

LayerKey = tuple[MLAGeometry, tuple[int | None, int]]
SERVED_BY = "mla_paged"  # attention backend
MAX_WARMUP_BATCH = 64  # sequences: larger batches take the same kernels
MAX_COPIED_TOKENS = 65536  # 128 MiB of 1,024 elements in 16 bits, dequantised for a call of the mixed op


class Row(NamedTuple):
    """Cache row of one token and layer in an engine: ``width`` elements of ``dtype``."""

    width: int
    dtype: torch.dtype


def row_of(geometry: MLAGeometry, dtype: torch.dtype) -> Row:
    """The row of a model of ``dtype``: bytes where latents or keys are codes."""
    if geometry.has_codes or geometry.has_key_codes:
        return Row(latent_layout(geometry, PAGE_SIZE, dtype).bytes_per_token, torch.uint8)
    return Row(geometry.cache_numel_per_token, dtype)


def codes_without_kernel(config: MHA2MLAConfig, dtype: torch.dtype, ranks: int, drafted: int) -> int | None:
    """The first layer whose codes no kernel decodes for queries of ``dtype`` and one of ``ranks`` among which heads are
    split; None: an engine's cache may hold the codes of all layers.

    Args:
        drafted: tokens of a speculation.
    """
    if not ATTENTION_BACKENDS.get(SERVED_BY).compiled:
        return None
    longest = min(1 + drafted, MAX_DECODE_QUERY_LENGTH)
    for layer in range(config.num_hidden_layers):
        geometry = HeadShard.of(config.cached_geometry(layer), 0, ranks).geometry
        call = (geometry, PAGE_SIZE, dtype, torch.device("cuda"))
        if geometry.has_codes and not all(decodes_codes(*call, length) for length in {1, longest}):
            return layer
    return None


def cache_views(rows: Tensor, geometry: MLAGeometry, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of :func:`mha2mla.modeling.cache_layout.latent_layout` by name in an engine's pages [P, page, row].

    Raises:
        ValueError: rows are no :func:`row_of` the geometry and the model's ``dtype``.
    """
    row = row_of(geometry, dtype)
    if (rows.shape[-1], rows.dtype) != row:
        raise ValueError(
            f"rows is {rows.dtype} {tuple(rows.shape)}; expected rows of {row.width} {row.dtype} for {geometry}"
        )
    if row.dtype is torch.uint8:
        return latent_layout(geometry, rows.shape[1], dtype).views(rows)
    latent = rows[..., : geometry.kv_lora_rank]
    if not geometry.has_rope_cache:
        return {"latent_cache": latent}
    rope = rows[..., geometry.kv_lora_rank :].unflatten(-1, (geometry.num_rope_heads, geometry.qk_rope_head_dim))
    return {"latent_cache": latent, "rope_cache": rope}


def host_lengths(query_lengths: Sequence[int], total_lengths: Sequence[int]) -> Tensor:
    """[3, B] int32 on the CPU, as plans take it: new tokens, tokens cached before them, first visible token.

    Args:
        query_lengths: new tokens per sequence.
        total_lengths: tokens with the new ones; an upper bound is enough for short queries.
    """
    rows = [query_lengths, [max(0, t - q) for q, t in zip(query_lengths, total_lengths, strict=True)]]
    return torch.tensor([*rows, [0] * len(query_lengths)], dtype=torch.int32).view(3, -1)


def key_of(layer: AttentionConstants) -> LayerKey:
    """Equal for layers that share a plan."""
    return layer.geometry, layer.limits


@dataclass(frozen=True)
class EngineStep:
    """A step of an engine.

    Attributes:
        batch: where all its new tokens go.
        calls: of consecutive sequences: which of the tokens are theirs, and what attends to them.
    """

    batch: UniformBatch
    calls: tuple[tuple[slice, AttentionStep], ...]


def calls_of(
    query_lengths: Sequence[int], total_lengths: Sequence[int], *, has_codes: bool, page_size: int = PAGE_SIZE
) -> list[tuple[int, int, int | None]]:
    """First and last sequence (excluded) of each call of a step whose sequences bring different numbers of tokens, and
    the number where they bring the same; None: the mixed op serves them.

    Where latents are codes, a call of the mixed op reads at most :data:`MAX_COPIED_TOKENS` rows of pages, or those of
    one sequence.
    """
    count = len(query_lengths)
    if not has_codes:
        return [(0, count, None)]
    first, alike = query_lengths[0] if count else 0, 0
    if 0 < first <= MAX_DECODE_QUERY_LENGTH:
        alike = next((at for at, length in enumerate(query_lengths) if length != first), 0)
    calls = [(0, alike, first)] if alike else []
    begin, longest = alike, 0
    for row in range(alike, count):
        longest = max(longest, _columns(total_lengths[row], page_size))
        if row > begin and (row + 1 - begin) * longest * page_size > MAX_COPIED_TOKENS:
            calls.append((begin, row, None))
            begin, longest = row, _columns(total_lengths[row], page_size)
    return [*calls, (begin, count, None)]


def _columns(tokens: int, page_size: int) -> int:
    return max(1, -(-tokens // page_size))


class EngineSteps:
    """Steps over an engine's pages, of layers with the same row, on one device.

    Args:
        layers: what differs between them; each once.
        dtype: of queries.
        max_tokens: new tokens of the largest step.
    """

    def __init__(
        self,
        layers: Sequence[AttentionConstants],
        backend: AttentionBackend,
        dtype: torch.dtype,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._layers = list({key_of(layer): layer for layer in layers}.values())
        self._index = {key_of(layer): index for index, layer in enumerate(self._layers)}
        self._backend, self._dtype, self._planner = backend, dtype, StepPlanner()
        self._has_codes = any(layer.geometry.has_codes for layer in layers)
        # Graphs read these where they are.
        self._positions = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._slots = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)

    def step(
        self,
        rows: Tensor,
        query_lengths: Sequence[int],
        total_lengths: Sequence[int],
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
    ) -> EngineStep:
        """A step with its plans; those of decode steps stay where they are from call to call.

        Args:
            rows: pages [P, page, row] of any of the layers.
            query_lengths, total_lengths: per sequence, as in :func:`host_lengths`.
            positions, slots: [N] integers on the device; slots outside the cache, such as -1, are not written.
            block_table: [B, max_pages] int32.
            cache_seqlens: [B] int32 on the device, exact; 0 for rows that pad the batch.
        """
        tokens, page_size = positions.shape[0], rows.shape[1]
        mine = self._positions[:tokens], self._slots[:tokens]
        mine[0].copy_(positions)
        mine[1].copy_(slots)
        whole = UniformBatch(*mine, block_table, cache_seqlens, None)
        layers = [
            CacheLayer(self._backend, layer, cache_views(rows, layer.geometry, self._dtype), self._dtype)
            for layer in self._layers
        ]
        length = uniform_length(query_lengths, tokens)
        if length is not None:
            calls = [(0, len(query_lengths), length)]
        else:
            calls = calls_of(query_lengths, total_lengths, has_codes=self._has_codes, page_size=page_size)
        offsets, workspaces, made = [0, *accumulate(query_lengths)], {}, []
        for first, stop, length in calls:
            # Tokens behind the last sequence pad the step.
            where = slice(offsets[first], tokens if stop == len(query_lengths) else offsets[stop])
            table, lengths, totals = block_table[first:stop], None, total_lengths[first:stop]
            if length is None:
                lengths = host_lengths(query_lengths[first:stop], totals)
                if self._has_codes:  # what is copied
                    table = table[:, : _columns(max(totals, default=0), page_size)].contiguous()
            batch = UniformBatch(*(x[where] for x in mine), table, cache_seqlens[first:stop], None, lengths)
            call = self._planner.step(layers, (batch,) * len(layers), length)
            if length is None:
                call = replace(call, plans=tuple(with_one_workspace(call.plans, ("workspace",), workspaces)))
            made.append((where, call))
        return EngineStep(whole, tuple(made))

    def run(
        self,
        step: EngineStep,
        layer: AttentionConstants,
        tensors: Mapping[str, Tensor | None],
        cache: Mapping[str, Tensor],
        out: Tensor,
    ) -> None:
        """Appends a layer's new tokens, all of them, since sequences may share pages; then attends.

        Args:
            tensors: by the backend's names, of the step's tokens.
            cache: :func:`cache_views` of the layer's pages.
            out: [N, H, d_v], written.
        """
        index = self._index[key_of(layer)]
        rotated = self._backend.append(tensors, cache, step.batch, layer)
        tensors, per_token = {**tensors, **rotated, "out": out}, {*self._backend.per_token, *rotated, "out"}
        for where, call in step.calls:
            mine = tensors
            if len(step.calls) > 1:
                mine = {n: t[where] if n in per_token and t is not None else t for n, t in tensors.items()}
            made = self._backend.attend(mine, cache, call.batches[index], call.plans[index], layer)
            if made.data_ptr() != mine["out"].data_ptr():
                mine["out"].copy_(made)


def warm_up_batches(
    max_tokens: int, max_length: int, *, has_codes: bool = False, expanded: int = FEWEST_EXPANDED
) -> list[tuple[list[int], list[int]]]:
    """New tokens, and tokens with the new ones, per sequence: steps that between them launch every kernel that steps
    of at most ``max_tokens`` new tokens and sequences of at most ``max_length`` need, and take the most workspace.

    Short queries may come in any step, as what a chunk or a cached prefix left of a prompt; where latents are codes,
    those that are not as many as the first sequence's attend to the largest copy.

    Args:
        expanded: cached tokens that are expanded at a time.
    """
    lengths = [2**n for n in range(MAX_DECODE_QUERY_LENGTH.bit_length())]  # that kernels are compiled for
    batches = [2**n for n in range(MAX_WARMUP_BATCH.bit_length())]
    decode = [[length] * batch for length in lengths for batch in batches if length * batch <= max_tokens]
    copied = []
    for length in lengths if has_codes else ():
        room = MAX_COPIED_TOKENS // (PAGE_SIZE * _columns(max_length, PAGE_SIZE))
        count = min(max(1, room), (max_tokens - 2) // length)
        if count > 0:
            copied.append(([1 + length % 2, *[length] * count], [max(length, max_length)] * (1 + count)))
    rest, mixed = max_tokens - 1, [1]
    while rest > 0:
        mixed.append(min(rest, max_length))
        rest -= mixed[-1]
    # One sequence is longer than what is expanded at a time.
    longest = [max_length if has_codes else min(max_length, new + expanded) for new in mixed[1:2]]
    return [*((each, each) for each in decode), *copied, (mixed, [1, *longest, *mixed[2:]])]


def warm_up(
    tensors: Mapping[str, Tensor | None], backend: AttentionBackend, layer: AttentionConstants, max_length: int
) -> None:
    """Compiles a layer's kernels, then runs its :func:`warm_up_batches` over a page of zeros; no cache is written.

    No request should wait for a kernel to be compiled or loaded. Who measures memory meanwhile sees the workspace, that
    of waves of many sequences too, which none of these batches has.

    Args:
        tensors: as :meth:`EngineSteps.run` takes them, of the largest step.
    """
    compile_layer(tensors, backend, layer, max_length)
    tensors["q_pe"].new_empty(MAX_EXPANDED_BYTES, dtype=torch.uint8)  # given back at once
    _run_batches(tensors, backend, layer, max_length)


def compile_layer(
    tensors: Mapping[str, Tensor | None], backend: AttentionBackend, layer: AttentionConstants, max_length: int
) -> int:
    """Compiles the kernels of :func:`warm_up` ahead, where TileLang's cache lacks them; returns how many it lacked."""
    query = tensors["q_pe"]
    call = ("engine", backend.name, layer, query.dtype, query.shape[0], max_length)
    return compile_ahead(query.device, call, partial(_run_batches, tensors, backend, layer, max_length))


def _run_batches(
    tensors: Mapping[str, Tensor | None], backend: AttentionBackend, layer: AttentionConstants, max_length: int
) -> None:
    query = tensors["q_pe"]
    device, most = query.device, query.shape[0]
    steps = EngineSteps([layer], backend, query.dtype, most, device)
    row, has_codes = row_of(layer.geometry, query.dtype), layer.geometry.has_codes
    expanded = expanded_tokens(layer.geometry, query.dtype.itemsize)
    rows = query.new_zeros(1, PAGE_SIZE, row.width, dtype=row.dtype)
    cache = cache_views(rows, layer.geometry, query.dtype)
    batches = warm_up_batches(most, max_length, has_codes=has_codes, expanded=expanded)
    for query_lengths, total_lengths in batches:
        tokens, columns = sum(query_lengths), -(-max(total_lengths) // PAGE_SIZE)
        positions = torch.zeros(tokens, dtype=torch.int32, device=device)
        table = positions.new_zeros(len(query_lengths), columns)
        seqlens = torch.tensor(total_lengths, dtype=torch.int32, device=device)
        step = steps.step(rows, query_lengths, total_lengths, positions, positions - 1, table, seqlens)
        if len(query_lengths) == 1 and (decode := step.calls[0][1].decode) is not None:
            # Kernels that merge partials follow from the number of sequences.
            more = [query_lengths * batch for batch in decode.of_layer[0].combine_batches()]
            batches += [(each, each) for each in more if sum(each) <= most and (each, each) not in batches]
        mine = {n: t[:tokens] if n in backend.per_token and t is not None else t for n, t in tensors.items()}
        steps.run(step, layer, mine, cache, query.new_empty(tokens, query.shape[1], layer.geometry.v_head_dim))
