"""Schedule, run, choose, read: one step after another, the host one step ahead of what it has read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mha2mla.loop.runner import Runner
from mha2mla.loop.sampler import History, choose
from mha2mla.loop.scheduler import Chunk, Request, Sampling, Scheduler
from mha2mla.modeling import BatchModel, paged_model
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.captured import CudaGraphs, Recorder
from mha2mla.modeling.pages import OutOfPagesError

_SHARE_OF_FREE = 0.8  # share of the GPU's free memory: prompts need some beside the cache
_CPU_BYTES = 2**30
_ANY = Sampling()  # sampling of rows whose token is not read


@dataclass
class Progress:
    """Counters of a loop.

    Attributes:
        steps: of the model.
        prompt_tokens: that were run, those that a preemption made run again included.
        new_tokens: that were chosen and wanted.
        preemptions: of requests.
        seconds: from the first step to the last token read.
    """

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens, of all requests together."""
        return self.new_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class _Launched:
    """A step on its way: its chunks, the tokens that it will have chosen, on the host, and when it has."""

    chunks: list[Chunk | None]
    tokens: Tensor
    done: torch.cuda.Event | None


class Loop:
    """Many requests through one model::

        loop = Loop(model)
        requests = [loop.add(prompt, Sampling(max_new_tokens=32)) for prompt in prompts]
        loop.run()
        requests[0].answer

    Args:
        model: converted, or a source with ``attn_implementation="mha2mla"``; in eval mode.
        num_pages: of the cache; default on CUDA most of the free memory, else 1 GiB.
        max_pages: that the default is at most, where it is known what will be asked.
        page_size: tokens per page.
        max_sequences: that run at a time.
        max_tokens: of a step: what bounds how long a prompt holds up the others.
        max_length: tokens of a request, prompt and answer; default what the model takes.
        share_prefixes: whether full pages of equal beginnings are shared.
        recorder: of decode steps; default CUDA graphs.
        rotary_key_cache: of a converted model, instead of what its config says.

    Attributes:
        cache, scheduler, runner: which do the work.
        compiled: kernels that TileLang's cache lacked, and which were compiled in parallel.
        progress: what was done.
    """

    def __init__(
        self,
        model: BatchModel | PreTrainedModel,
        *,
        num_pages: int | None = None,
        max_pages: int | None = None,
        page_size: int = PAGE_SIZE,
        max_sequences: int = 64,
        max_tokens: int = 2048,
        max_length: int | None = None,
        share_prefixes: bool = True,
        recorder: Recorder | None = None,
        rotary_key_cache: str | None = None,
    ) -> None:
        model = model if isinstance(model, BatchModel) else paged_model(model)
        self.max_length = model.config.max_position_embeddings if max_length is None else max_length
        for name, value in (("max_length", self.max_length), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        longest = -(-self.max_length // page_size)
        if num_pages is None:
            most = max_sequences * longest if max_pages is None else min(max_sequences * longest, max_pages)
            one = model.paged_cache(1, page_size, rotary_key_cache=rotary_key_cache)
            room = _CPU_BYTES
            if one.device.type == "cuda":
                room = int(torch.cuda.mem_get_info(one.device)[0] * _SHARE_OF_FREE)
            num_pages = max(1, min(most, room // one.nbytes))
        self.cache = model.paged_cache(num_pages, page_size, rotary_key_cache=rotary_key_cache)
        self.scheduler = Scheduler(self.cache.allocator, max_sequences, max_tokens, share_prefixes)
        self.runner = Runner(model, self.cache, min(longest, num_pages), max_sequences, recorder or CudaGraphs())
        self.compiled = self.runner.compile(max_tokens)
        self.progress = Progress()
        self._history: History | None = None
        self._launched: deque[_Launched] = deque()  # the oldest first; two only while a step runs
        self._given: list[Request] = []  # got a token that no step has told of
        self._failure: BaseException | None = None

    @property
    def cache_bytes_per_token(self) -> float:
        """Bytes of all layers."""
        allocator = self.cache.allocator
        return self.cache.nbytes / (allocator.num_pages * allocator.page_size)

    def add(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Request:
        """Queues a prompt of token ids.

        Raises:
            ValueError: it is empty, has ids that are not the model's, or is longer with its answer than ``max_length``
                or than all pages together.
            RuntimeError: an earlier error left the requests half changed.
        """
        request = self._request(prompt, sampling)
        self.scheduler.add(request)
        return request

    def fork(self, request: Request, sampling: Sampling | None = None) -> Request:
        """A request that goes on from all tokens of another one, on its pages if it runs.

        Raises:
            ValueError: as :meth:`add`.
        """
        self._check()
        self._read(0)
        twin = self._request(request.tokens, sampling or request.sampling)
        self.scheduler.fork(request, twin)
        return twin

    def adopt(self, prompt: Sequence[int], sequence: int, sampling: Sampling | None = None) -> Request:
        """Runs a prompt of which a sequence of ``cache`` holds the first tokens; see :meth:`Scheduler.adopt`."""
        request = self._request(prompt, sampling)
        self.scheduler.adopt(request, sequence)
        return request

    def run(self) -> Progress:
        for _ in self.steps():
            pass
        return self.progress

    def steps(self) -> Iterator[list[Request]]:
        """Steps until every request is finished; each gives the requests that got a token."""
        while self.scheduler.has_work:
            yield self.step()
        if given := self.drain():
            yield given

    def step(self) -> list[Request]:
        """Launches a step, then reads the tokens of the one before. Returns the requests that got one.

        A step that raises is undone, so that the next one begins as it did.

        Raises:
            OutOfPagesError: no request can run until sequences of ``cache`` that are not the loop's are closed.
            RuntimeError: an earlier error left the requests half changed.
        """
        self._check()
        began = time.perf_counter()
        self._read(1)  # two are on their way where reading was interrupted
        preemptions = self.scheduler.preemptions
        chunks = self._change(self.scheduler.schedule)
        if chunks:
            try:
                launched = self._launch(chunks)
            except BaseException:
                self._change(self._undo, chunks)
                raise
            self._launched.append(launched)
        elif self.scheduler.has_work and not self._launched and self.scheduler.preemptions == preemptions:
            allocator = self.cache.allocator
            raise OutOfPagesError(
                f"{len(self.scheduler.waiting)} requests wait for pages and none runs:"
                f" {allocator.num_pages - allocator.num_free} of {allocator.num_pages} pages are held by sequences that"
                " are not the loop's; expected them closed"
            )
        self._read(1 if chunks else 0)
        self.progress.seconds += time.perf_counter() - began
        return self._take_given()

    def drain(self) -> list[Request]:
        """Reads what is on its way, and launches nothing. Returns the requests that got a token.

        Raises:
            RuntimeError: an earlier error left the requests half changed.
        """
        self._check()
        began = time.perf_counter()
        self._read(0)
        self.progress.seconds += time.perf_counter() - began
        return self._take_given()

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"loop failed: {self._failure!r} left its requests half changed; expected a new Loop for them"
            ) from self._failure

    def _change(self, change: Callable[..., Any], *arguments: Any) -> Any:
        """Changes requests; after half of a change no further step would be right."""
        try:
            return change(*arguments)
        except BaseException as error:
            self._failure = error
            raise

    def _undo(self, chunks: list[Chunk]) -> None:
        """Undoes a step that raised. The host reads the tokens chosen before, since the device may have lost them."""
        self.scheduler.undo(chunks)
        self._history = None
        self._read(0)

    def _take_given(self) -> list[Request]:
        given, self._given = self._given, []
        return list(dict.fromkeys(given))

    @torch.inference_mode()
    def _launch(self, chunks: list[Chunk]) -> _Launched:
        logits, ordered, slots = self.runner.run(chunks)
        rows = [chunk.request.sampling if chunk is not None and chunk.samples else _ANY for chunk in ordered]
        positions = [0 if chunk is None else chunk.start + chunk.count for chunk in ordered]
        if self._history is None and any(row.repetition_penalty != 1 for row in rows):
            self._history = History(self.runner.max_sequences + 1, logits.shape[1], logits.device)
        occurred = None if self._history is None else self._history.of(ordered, slots)
        tokens = choose(logits, rows, positions, occurred)
        self.runner.last[slots] = tokens
        if self._history is not None:
            self._history.add(slots, tokens)
        done = None
        if tokens.is_cuda:
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            tokens, done = host.copy_(tokens, non_blocking=True), torch.cuda.Event()
            done.record()
        self.progress.steps += 1
        of_prompts = [min(chunk.start + chunk.count, len(chunk.request.prompt)) - chunk.start for chunk in chunks]
        self.progress.prompt_tokens += sum(max(0, count) for count in of_prompts)
        return _Launched(ordered, tokens, done)

    def _read(self, ahead: int) -> None:
        """Tokens of all steps on their way but the last ``ahead``."""
        while len(self._launched) > ahead:
            launched = self._launched[0]
            if launched.done is not None:
                launched.done.synchronize()
            tokens = launched.tokens.tolist()
            self._change(self._complete, launched.chunks, tokens)

    def _complete(self, chunks: list[Chunk | None], tokens: list[int]) -> None:
        pairs = [pair for pair in zip(chunks, tokens, strict=True) if pair[0] is not None]
        given = self.scheduler.complete([chunk for chunk, _ in pairs], [token for _, token in pairs])
        self._launched.popleft()
        self._given += given
        self.progress.new_tokens += len(given)
        self.progress.preemptions = self.scheduler.preemptions

    def _request(self, prompt: Sequence[int], sampling: Sampling | None) -> Request:
        self._check()
        request = Request(prompt, sampling or Sampling())
        vocabulary = self.runner.model.config.get_text_config().vocab_size
        if max(request.prompt) >= vocabulary:
            raise ValueError(f"prompt has token id {max(request.prompt)}; expected less than vocab_size={vocabulary}")
        most = len(request.prompt) + request.sampling.max_new_tokens
        if most > self.max_length:
            raise ValueError(
                f"prompt and answer have up to {most} tokens; expected at most max_length={self.max_length}"
            )
        return request
