"""A step on the device: chunks to logits, by a CUDA graph where all of them are one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels import FEWEST_EXPANDED, MAX_DECODE_QUERY_LENGTH, compile_ahead
from mha2mla.kernels.split_kv.choice import compiled_seqlen
from mha2mla.loop.scheduler import Chunk
from mha2mla.modeling import AttentionStep, BatchModel, PagedCache, SequenceBatch
from mha2mla.modeling.batch import to_device
from mha2mla.modeling.captured import Recorder

_PROMPTS = (16, 64, 128, 256, 512)  # tokens of a step, up to which kernels differ


@dataclass(frozen=True)
class Graph:
    """A recorded step of so many rows, one token each, and what it reads and writes."""

    step: AttentionStep
    tokens: Tensor
    logits: Tensor
    replay: Callable[[], None]


class Runner:
    """Runs chunks through a model over its cache.

    A graph is made for each bucket of rows when it is first needed: 1, 2, 4, 8, then multiples of 8.

    Args:
        max_sequences: rows of the largest bucket, and slots.

    Attributes:
        last: [max_sequences + 1] int64, the token that was last chosen in each slot; the last entry is no request's.
        uncaptured: why steps are not recorded, or None.
        graphs: the recorded steps, by rows.
    """

    def __init__(
        self, model: BatchModel, cache: PagedCache, max_pages: int, max_sequences: int, recorder: Recorder
    ) -> None:
        self.model, self.cache, self.max_pages, self.max_sequences = model, cache, max_pages, max_sequences
        self.last = torch.zeros(max_sequences + 1, dtype=torch.int64, device=cache.device)
        self._recorder, self.graphs, self._short = recorder, {}, {1}
        self.uncaptured = recorder.explain(cache)
        if cache.device.type != recorder.device_type:
            self.uncaptured = f"the cache is on {cache.device}"

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> tuple[Tensor, list[Chunk | None], Tensor]:
        """Caches the chunks' tokens.

        Returns:
            Logits [B, V] of the last token of each row, which the next step overwrites; the chunk of each row, None for
            padding; and the slot of each row [B].
        """
        new = {chunk.sequence: chunk.count for chunk in chunks}
        if all(chunk.count == 1 for chunk in chunks) and self.uncaptured is None:
            rows = self._bucket(len(chunks))
            graph = self.graphs.get(rows) or self._record(rows)
            batch = self.cache.extend(new, max_pages=self.max_pages, num_sequences=rows)
            graph.step.load(batch)
            ordered, tokens, slots = self._inputs(chunks, batch)
            graph.tokens.copy_(tokens)
            graph.replay()
            return graph.logits, ordered, slots
        batch = self.cache.extend(new)
        ordered, tokens, slots = self._inputs(chunks, batch)

        def forward() -> Tensor:
            return self.model.forward_batch(tokens, self.cache.step(batch))

        # Prompts and rests of prompts of 2 to 8 tokens have kernels of their own, which few loops launch.
        short = {compiled_seqlen(count) for count in new.values() if count <= MAX_DECODE_QUERY_LENGTH}
        if not short <= self._short:
            self._short |= short
            self._compile_ahead(forward, *sorted(short))
        return forward(), ordered, slots

    def _bucket(self, count: int) -> int:
        rows = next((size for size in (1, 2, 4, 8) if size >= count), -(-count // 8) * 8)
        return min(rows, self.max_sequences)

    def _inputs(self, chunks: Sequence[Chunk], batch: SequenceBatch) -> tuple[list[Chunk | None], Tensor, Tensor]:
        """The chunk of each row, the batch's tokens [N], of which the device knows some alone, and slots [B]."""
        ordered = [chunks[index] if index >= 0 else None for index in batch.order.tolist()]
        tokens, of_token = [], []
        for chunk in ordered:
            mine = [0] if chunk is None else chunk.token_ids()
            tokens += mine
            of_token += [self.max_sequences if chunk is None else chunk.slot] * len(mine)
        slots = [self.max_sequences if chunk is None else chunk.slot for chunk in ordered]
        packed = to_device(torch.tensor([*tokens, *of_token, *slots]), self.cache.device)
        tokens, of_token, slots = packed.split((len(tokens), len(tokens), len(slots)))
        return ordered, torch.where(tokens < 0, self.last[of_token], tokens), slots

    def _record(self, rows: int) -> Graph:
        """Over padding alone, so that nothing is cached by it."""
        cache = self.cache
        page_size = cache.allocator.page_size
        batch = SequenceBatch.build(
            [], [], [], page_size, max_pages=self.max_pages, num_sequences=rows, device=cache.device
        )
        step, tokens = cache.step(batch), torch.zeros(rows, dtype=torch.int64, device=cache.device)

        def run() -> Tensor:
            step.refresh()
            return self.model.forward_batch(tokens, step)

        self.graphs[rows] = graph = Graph(step, tokens, *self._recorder.record(run, lambda: None, cache.device))
        return graph

    def compile(self, max_tokens: int) -> int:
        """Compiles the kernels of steps of at most ``max_tokens`` tokens ahead, where TileLang's cache lacks them;
        returns how many it lacked. Those of prompts of 2 to 8 tokens are compiled when the first one comes."""
        room = min(FEWEST_EXPANDED, self.cache.allocator.num_pages * self.cache.allocator.page_size)
        longest = min(max_tokens, room)
        return self._compile_ahead(lambda: self._run_shapes(longest, room), self.max_sequences, longest, room)

    def _compile_ahead(self, run: Callable[[], Any], *numbers: int) -> int:
        config, page_size = self.model.config.to_json_string(use_diff=False), self.cache.allocator.page_size
        geometries = [(layer.backend.name, layer.constants) for layer in self.cache.layers]
        call = ("loop", config, geometries, self.cache.layers[0].dtype, page_size, *numbers)
        return compile_ahead(self.cache.device, call, run)

    @torch.inference_mode()
    def _run_shapes(self, longest: int, room: int) -> None:
        """A decode step of each bucket of rows, over padding, and prompts of at most ``longest`` tokens, ``room`` with
        cached ones, over pages that are not theirs."""
        allocator = self.cache.allocator
        place = {"page_size": allocator.page_size, "device": self.cache.device}
        rows = dict.fromkeys(self._bucket(1 << n) for n in range(self.max_sequences.bit_length() + 1))
        batches = [SequenceBatch.build([], [], [], num_sequences=count, **place) for count in rows]
        # Large models run the expanded form over a long cache; small ones only where pieces of 8 tokens overlap.
        odd = longest - (longest % MAX_DECODE_QUERY_LENGTH == 0)
        prompts = [*((tokens, 0) for tokens in _PROMPTS if tokens <= longest), (odd, 0), (longest, room - longest)]
        for tokens, cached in prompts:
            pages = range(-(-(tokens + cached) // allocator.page_size))
            batches.append(SequenceBatch.build([tokens], [cached], [pages], **place))
        for batch in batches:
            ids = torch.zeros(batch.num_tokens, dtype=torch.int64, device=self.cache.device)
            self.model.forward_batch(ids, self.cache.step(batch))
