"""Steps of another engine over its own pages, by this package's backends. No vLLM here.

The engine stores one row a token and layer, ``[c | k_pe of G heads]``, or c alone; with keys in 8 bits a page has all
its latents, then its keys, then their scales. The ops are those of the attention backends
(:mod:`mha2mla.modeling.backends`); all of a batch's sequences bring as many tokens, at most 8: a plan of the
decode op, which stays where it is, so that a CUDA graph can be replayed; else a plan of the mixed op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import MAX_DECODE_QUERY_LENGTH, MAX_EXPANDED_TOKENS, compile_ahead
from mha2mla.modeling.batch import UniformBatch, uniform_length
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants
from mha2mla.modeling.step import AttentionStep, CacheLayer, StepPlanner

LayerKey = tuple[MLAGeometry, tuple[int | None, int]]
SERVED_BY = "mla_paged"  # attention backend
MAX_WARMUP_BATCH = 64  # sequences: larger batches take the same kernels


def row_width(geometry: MLAGeometry, itemsize: int) -> int:
    """Elements of ``itemsize`` bytes that a token takes."""
    return -(-geometry.cache_bytes_per_token(itemsize) // itemsize)


def cache_views(rows: Tensor, geometry: MLAGeometry) -> dict[str, Tensor]:
    """``latent_cache`` [P, page, d_c] and ``rope_cache`` [P, page, G, d_r], if any, of pages [P, page, row]; with e4m3
    keys ``rope_scale`` [P, page].

    Raises:
        ValueError: rows are not as wide as the geometry's.
    """
    if rows.shape[-1] != (width := row_width(geometry, rows.itemsize)):
        raise ValueError(f"rows.shape is {tuple(rows.shape)}; expected rows of {width} for {geometry}")
    if geometry.has_key_codes:
        page, latents = rows.shape[1], (geometry.kv_lora_rank, rows.dtype)
        kinds = (latents, (geometry.qk_rope_head_dim, torch.float8_e4m3fn), (1, torch.float32))
        sizes = [page * numbers * dtype.itemsize for numbers, dtype in kinds]
        parts = rows.flatten(1).view(torch.uint8)[:, : sum(sizes)].split(sizes, dim=1)
        latent, keys, scale = (
            part.view(dtype).unflatten(1, (page, numbers)) for part, (numbers, dtype) in zip(parts, kinds, strict=True)
        )
        return {"latent_cache": latent, "rope_cache": keys[:, :, None], "rope_scale": scale[:, :, 0]}
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


class EngineSteps:
    """Steps over an engine's pages, of layers whose rows have the same width, dtype and device.

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
    ) -> AttentionStep:
        """A step with its plans; those of decode steps stay where they are from call to call.

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
        layers = [
            CacheLayer(self._backend, layer, cache_views(rows, layer.geometry), self._dtype) for layer in self._layers
        ]
        return self._planner.step(layers, (batch,) * len(layers), length)

    def run(
        self, step: AttentionStep, layer: AttentionConstants, tensors: Mapping[str, Tensor | None], rows: Tensor
    ) -> Tensor:
        """Appends a layer's new tokens and attends: [N, H, d_v].

        Args:
            tensors: by the backend's names, of the step's tokens.
            rows: the layer's pages [P, page, row].
        """
        return step.run(self._index[key_of(layer)], tensors, cache_views(rows, layer.geometry))[1]


def warm_up_batches(max_tokens: int, max_length: int) -> list[tuple[list[int], list[int]]]:
    """New tokens, and tokens with the new ones, per sequence: steps that between them launch every kernel that steps
    of at most ``max_tokens`` new tokens and sequences of at most ``max_length`` need, and take the most workspace.

    Short queries may come in any step, as what a chunk or a cached prefix left of a prompt.
    """
    lengths = [2**n for n in range(MAX_DECODE_QUERY_LENGTH.bit_length())]  # that kernels are compiled for
    batches = [2**n for n in range(MAX_WARMUP_BATCH.bit_length())]
    decode = [[length] * batch for length in lengths for batch in batches if length * batch <= max_tokens]
    rest, mixed = max_tokens - 1, [1]
    while rest > 0:
        mixed.append(min(rest, max_length))
        rest -= mixed[-1]
    # One sequence is longer than what is expanded at a time.
    totals = [1, *(min(max_length, new + MAX_EXPANDED_TOKENS) for new in mixed[1:2]), *mixed[2:]]
    return [*((each, each) for each in decode), (mixed, totals)]


def warm_up(
    tensors: Mapping[str, Tensor | None], backend: AttentionBackend, layer: AttentionConstants, max_length: int
) -> None:
    """Compiles a layer's kernels, then runs its :func:`warm_up_batches` over a page of zeros; no cache is written.

    No request should wait for a kernel to be compiled or loaded. Who measures memory meanwhile sees the workspace.

    Args:
        tensors: as :meth:`EngineSteps.run` takes them, of the largest step.
    """
    compile_layer(tensors, backend, layer, max_length)
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
    rows = query.new_zeros(1, PAGE_SIZE, row_width(layer.geometry, query.itemsize))
    for query_lengths, total_lengths in warm_up_batches(most, max_length):
        tokens, columns = sum(query_lengths), -(-max(total_lengths) // PAGE_SIZE)
        positions = torch.zeros(tokens, dtype=torch.int32, device=device)
        table = positions.new_zeros(len(query_lengths), columns)
        seqlens = torch.tensor(total_lengths, dtype=torch.int32, device=device)
        step = steps.step(rows, query_lengths, total_lengths, positions, positions - 1, table, seqlens)
        mine = {n: t[:tokens] if n in backend.per_token and t is not None else t for n, t in tensors.items()}
        steps.run(step, layer, mine, rows)
