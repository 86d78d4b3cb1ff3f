"""Requests, and who runs in the next step: continuous batching, chunked prompts, shared prefixes, preemption.

Integers only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from operator import index
from typing import Literal

from mha2mla.modeling.pages import NO_PAGE, OutOfPagesError, PageAllocator


@dataclass(frozen=True)
class Sampling:
    """Sampling of a request's tokens, and its end.

    Args:
        max_new_tokens: most tokens of the answer.
        temperature: softmax temperature, 1e-6 at least; 0: the likeliest token (greedy).
        top_k: sample from this many likeliest tokens; 0: from all.
        top_p: sample from the likeliest that together have this probability (nucleus, arXiv 1904.09751).
        min_p: leave out tokens with less than this share of the likeliest one's probability (arXiv 2407.01082).
        repetition_penalty: logits of tokens that occurred are divided by it, negative ones multiplied (arXiv
            1909.05858).
        seed: seed of this request; requests beside it change nothing.
        stop_tokens: ids that end the answer; the one that came is its last token.

    Raises:
        ValueError: a value out of its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "stop_tokens" and not isinstance(value, Real):
                raise ValueError(f"{name} is {value!r:.80}; expected a number")
        for name, good, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature == 0 or 1e-6 <= self.temperature < float("inf"), "0, or 1e-6 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "more than 0"),
            ("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
            ("stop_tokens", _are_integers(self.stop_tokens), "token ids, a tuple of integers"),
            *(
                (name, _are_integers([getattr(self, name)]), "an integer")
                for name in ("max_new_tokens", "top_k", "seed")
            ),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")


def _are_integers(values: object) -> bool:
    return isinstance(values, Collection) and all(isinstance(value, Integral) for value in values)


@dataclass(eq=False)
class Request:
    """A prompt and its answer; the scheduler's to change.

    Attributes:
        prompt: token ids, one at least; a tuple of integers, whatever was given.
        tokens: prompt and answer, as far as the host has read them.
        in_flight: tokens behind these that the device has been told to choose, not yet read.
        sequence: of the page allocator, while the request runs.
        slot: where the device keeps its last token, while it runs.
        finished: "length" or "stop" once it is, "cancelled" by :meth:`Scheduler.cancel`.
        shared_tokens: of the prompt, found in the cache when it was first admitted.
        preemptions: how often its pages were taken away.

    Raises:
        ValueError: ``prompt`` is empty, or has something else than integers of 0 or more.
    """

    prompt: Sequence[int]
    sampling: Sampling = Sampling()
    tokens: list[int] = field(init=False)
    in_flight: int = field(default=0, init=False)
    sequence: int | None = field(default=None, init=False)
    slot: int | None = field(default=None, init=False)
    finished: Literal["length", "stop", "cancelled"] | None = field(default=None, init=False)
    shared_tokens: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        try:
            self.prompt = tuple(map(index, self.prompt))
        except TypeError as error:
            raise ValueError(f"prompt is {self.prompt!r:.80}; expected token ids, a sequence of integers") from error
        if not self.prompt:
            raise ValueError("prompt is empty; expected one token at least")
        if min(self.prompt) < 0:
            raise ValueError(f"prompt has token id {min(self.prompt)}; expected 0 or more")
        self.tokens = list(self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def is_asked_for(self) -> bool:
        """True if tokens are still to be chosen, beside those in flight."""
        return self.finished is None and self.length - len(self.prompt) < self.sampling.max_new_tokens

    def receive(self, token: int) -> None:
        """The oldest token in flight was read; dropped where the request ended before."""
        self.in_flight -= 1
        if self.finished is not None:
            return
        self.tokens.append(token)
        if token in self.sampling.stop_tokens:
            self.finished = "stop"
        elif len(self.answer) >= self.sampling.max_new_tokens:
            self.finished = "length"


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``start + count`` of a request, which a step caches.

    Attributes:
        samples: they are the last ones, so that the next token comes from them.
    """

    request: Request
    sequence: int
    slot: int
    start: int
    count: int
    samples: bool

    def token_ids(self) -> list[int]:
        """[count]; -1 for a token not yet read: the one that the device chose last."""
        known = self.request.tokens[self.start : self.start + self.count]
        return known + [-1] * (self.count - len(known))


class Scheduler:
    """Requests over the pages of one cache.

    A step has first the requests that decode, one token each, then prompts in the order of their arrival, as much of
    them as the budget leaves. Other requests wait. Where pages run out the request that came last gives its
    own back, and computes them anew later. A sequence that ended stays, for those who begin as it did, until
    its pages are needed.

    The host may be a step ahead of what it has read: :meth:`schedule` again before :meth:`complete`, once. A request
    whose end is not yet read runs one more step, whose result is dropped.

    Args:
        allocator: of the cache; the caller grows sequences as the chunks say, before the next :meth:`schedule`.
        max_sequences: that run at a time.
        max_tokens: of a step.
        share_prefixes: whether full pages of equal beginnings are shared.

    Attributes:
        waiting, running: requests, the oldest first.

    Raises:
        ValueError: ``max_tokens`` is less than ``max_sequences``: each could not even decode.
    """

    def __init__(
        self, allocator: PageAllocator, max_sequences: int = 64, max_tokens: int = 2048, share_prefixes: bool = True
    ) -> None:
        if max_sequences < 1:
            raise ValueError(f"max_sequences is {max_sequences}; expected at least 1")
        if max_tokens < max_sequences:
            raise ValueError(f"max_tokens is {max_tokens}; expected at least {max_sequences}, as max_sequences")
        self.allocator, self.max_sequences, self.max_tokens = allocator, max_sequences, max_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._prefixes = Prefixes(allocator.page_size) if share_prefixes else None
        self._ended: dict[int, None] = {}  # sequences that are kept, the one used longest ago first
        self._slots = list(range(max_sequences - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: it would not fit the cache even alone.
        """
        most = len(request.prompt) + request.sampling.max_new_tokens - 1  # the last token is never cached
        room = self.allocator.num_pages * self.allocator.page_size
        if most > room:
            raise ValueError(f"prompt and answer have up to {most} tokens; expected at most {room}, those of all pages")
        self.waiting.append(request)

    def adopt(self, request: Request, sequence: int) -> None:
        """Runs a request whose first tokens are cached in a sequence of the allocator already.

        Raises:
            ValueError: as :meth:`add`; so many requests run already, or the sequence holds the whole prompt, or is that
                of a request which runs or ended: :meth:`fork` goes on from it.
        """
        cached = self.allocator.length(sequence)
        if sequence in self._ended or any(sequence == each.sequence for each in self.running):
            raise ValueError(f"sequence is {sequence}, another request's; expected one of the caller's, or fork()")
        if not self._slots:
            raise ValueError(
                f"{len(self.running)} requests run; expected fewer than max_sequences={self.max_sequences}"
            )
        if cached >= request.length:
            raise ValueError(
                f"sequence {sequence} has {cached} tokens; expected fewer than the request's {request.length}"
            )
        self.add(request)
        self.waiting.pop()
        self._start(request, sequence)

    def fork(self, request: Request, twin: Request) -> None:
        """Queues ``twin``, whose prompt is all that ``request`` has, on its pages if it can run at once.

        Raises:
            ValueError: ``request`` has tokens in flight; or as :meth:`add`.
        """
        if request.in_flight:
            raise ValueError(f"request has {request.in_flight} tokens in flight; expected none")
        self.add(twin)
        if request in self.running and self._slots:
            self.waiting.pop()
            self._start(twin, self.allocator.fork(request.sequence))

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty where nothing is to be done. Nothing has grown yet."""
        for request in self.running:
            self._remember(request)
        wanted, budget = {}, self.max_tokens
        for request in sorted(self.running, key=lambda request: self._missing(request) > 1):
            if count := min(self._missing(request), budget):
                wanted[request] = count
                budget -= count
        preempted = self.preemptions
        while not self._fit(wanted):
            if not self._forget_ended():
                last = self.running[-1]
                self._free(self._stop(last))
                self.waiting.appendleft(last)
                last.preemptions += 1
                self.preemptions += 1
                wanted.pop(last, None)
        if self.preemptions == preempted:  # else what was sent away may have a token in flight, until the next step
            self._admit(wanted, budget)
        chunks = []
        for request, count in wanted.items():
            start = self.allocator.length(request.sequence)
            samples = start + count == request.length
            chunks.append(Chunk(request, request.sequence, request.slot, start, count, samples))
            request.in_flight += samples
        return chunks

    def undo(self, chunks: list[Chunk]) -> None:
        """Takes back the last :meth:`schedule`, whose step did not run; before :meth:`complete` of the one before."""
        for chunk in chunks:
            self.allocator.truncate(chunk.sequence, chunk.start)
            chunk.request.in_flight -= chunk.samples

    def complete(self, chunks: list[Chunk], tokens: list[int]) -> list[Request]:
        """Takes the token chosen for each chunk of a step. Returns the requests that got a token they wanted."""
        given = []
        for chunk, token in zip(chunks, tokens, strict=True):
            request = chunk.request
            if chunk.samples:
                if request.finished is None:
                    given.append(request)
                request.receive(token)
        for request in given:
            if request.finished is not None:
                self._leave(request)
        return given

    def cancel(self, request: Request) -> None:
        """Ends a request of this scheduler with the tokens that it has; one that is finished stays as it is.

        Raises:
            ValueError: it is not this scheduler's.
        """
        if request.finished is None:
            if request not in self.running and request not in self.waiting:
                raise ValueError("request is another loop's; expected one that waits or runs in this one")
            request.finished = "cancelled"
            self._leave(request)

    def _leave(self, request: Request) -> None:
        if request in self.running:
            self._end(request)
        else:
            self.waiting.remove(request)

    def _missing(self, request: Request) -> int:
        """Tokens that are to be cached before the next one can be chosen."""
        return request.length - self.allocator.length(request.sequence) if request.is_asked_for else 0

    def _fit(self, wanted: dict[Request, int], more: dict[int, int] | None = None, spare: int = 0) -> bool:
        growth = {request.sequence: count for request, count in wanted.items()} | (more or {})
        try:
            taken = self.allocator.plan_growth(growth).taken
        except OutOfPagesError:
            return False
        return len(taken) + spare <= self.allocator.num_free

    def _admit(self, wanted: dict[Request, int], budget: int) -> None:
        """Starts requests that wait, as long as a whole one fits, and a page more for each that runs: one that is sent
        away in the next step was not worth it."""
        while self.waiting and budget and self._slots:
            request, sequence = self.waiting[0], None
            owner, shared = self._shareable(request) if self._prefixes else (None, 0)
            if owner is None:
                sequence = self.allocator.allocate()
            else:
                sequence = self.allocator.fork(owner)
                self.allocator.truncate(sequence, shared)
                if owner in self._ended:
                    self._ended[owner] = self._ended.pop(owner)
            spare = len(self.running)
            while not (fits := self._fit(wanted, {sequence: request.length - shared}, spare)):
                if not self._forget_ended():
                    break
            if not fits:
                self.allocator.free(sequence)
                return
            self.waiting.popleft()
            if not request.preemptions:
                request.shared_tokens = shared
            self._start(request, sequence)
            wanted[request] = min(request.length - shared, budget)
            budget -= wanted[request]

    def _shareable(self, request: Request) -> tuple[int | None, int]:
        """A sequence that begins as a request does, and tokens of its first full pages, or None, 0: up to a page that
        the sequence gave back, as one that is adopted may have."""
        owner, shared = self._prefixes.longest(request.tokens)
        if owner is None:
            return None, 0
        pages = self.allocator.pages(owner)[: shared // self.allocator.page_size]
        kept = pages.index(NO_PAGE) if NO_PAGE in pages else len(pages)
        return (owner, kept * self.allocator.page_size) if kept else (None, 0)

    def _start(self, request: Request, sequence: int) -> None:
        request.sequence, request.slot = sequence, self._slots.pop()
        self.running.append(request)

    def _stop(self, request: Request) -> int:
        """Its sequence, which no request runs any more."""
        self.running.remove(request)
        self._slots.append(request.slot)
        sequence, request.sequence, request.slot = request.sequence, None, None
        return sequence

    def _end(self, request: Request) -> None:
        self._remember(request)
        sequence = self._stop(request)
        if self._prefixes is None:
            self._free(sequence)
        else:
            self._ended[sequence] = None

    def _remember(self, request: Request) -> None:
        if self._prefixes is not None:
            cached = min(self.allocator.length(request.sequence), len(request.tokens))
            self._prefixes.put(request.sequence, request.tokens, cached)

    def _forget_ended(self) -> bool:
        """Frees the sequence that ended and was used longest ago; says whether there was one."""
        if not self._ended:
            return False
        sequence = next(iter(self._ended))
        del self._ended[sequence]
        self._free(sequence)
        return True

    def _free(self, sequence: int) -> None:
        if self._prefixes is not None:
            self._prefixes.remove(sequence)
        self.allocator.free(sequence)


_ROOT = 0


class Prefixes:
    """Sequences by their first full pages: a trie whose nodes are found by parent and tokens of the page.

    A full page is never written again, so sequences may share it.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nodes: dict[tuple[int, tuple[int, ...]], tuple[int, dict[int, None]]] = {}
        self._paths: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self._next = _ROOT + 1

    def put(self, sequence: int, tokens: Sequence[int], count: int) -> None:
        """The first ``count`` of ``tokens`` are cached in ``sequence``, those of calls before among them."""
        path = self._paths.setdefault(sequence, [])
        for page in range(len(path), count // self.page_size):
            parent = self._nodes[path[-1]][0] if path else _ROOT
            key = (parent, tuple(tokens[page * self.page_size : (page + 1) * self.page_size]))
            if key not in self._nodes:
                self._nodes[key] = (self._next, {})
                self._next += 1
            self._nodes[key][1][sequence] = None
            path.append(key)

    def remove(self, sequence: int) -> None:
        for key in reversed(self._paths.pop(sequence, [])):
            owners = self._nodes[key][1]
            del owners[sequence]
            if not owners:  # and so its children have none: who has a page has those before it
                del self._nodes[key]

    def longest(self, tokens: Sequence[int]) -> tuple[int | None, int]:
        """A sequence that begins as ``tokens`` do, and for how many of them, all but the last at most; or None, 0."""
        parent, best, found = _ROOT, None, 0
        for begin in range(0, len(tokens) - self.page_size, self.page_size):
            node = self._nodes.get((parent, tuple(tokens[begin : begin + self.page_size])))
            if node is None:
                break
            parent, owners = node
            best, found = next(iter(owners)), begin + self.page_size
        return best, found
