"""Who owns which page of a paged cache: allocation, growth, sharing, release. Host bookkeeping, no cache data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mha2mla.kernels import MAX_SLOTS

NO_PAGE = -1  # in a block table, behind a sequence's pages, or of one that it gave back: no kernel looks there


class OutOfPagesError(RuntimeError):
    """There are not enough free pages; nothing was changed."""


class StaleBatchError(ValueError):
    """A batch is used after its sequences ended or changed: its pages may belong to another sequence."""


@dataclass(frozen=True)
class PageCopy:
    """Page ``target`` must become a copy of page ``source`` before anything is written to ``target``."""

    source: int
    target: int


@dataclass(frozen=True)
class Growth:
    """Pages and copies that let some sequences grow together; :meth:`PageAllocator.commit` carries it out.

    Attributes:
        pages: of each of these sequences afterwards.
        copies: what to copy before new tokens are written; every target is a page that is still free.
        taken: pages that are no longer free afterwards, in the order in which they are taken.
        generation: of all of these sequences afterwards, a number that is another one whenever a sequence grows,
            shrinks or is forked, and that it never has again.
    """

    new_tokens: Mapping[int, int]
    pages: tuple[tuple[int, ...], ...]
    copies: tuple[PageCopy, ...]
    taken: tuple[int, ...]
    generation: int


class PageAllocator:
    """Pages of a cache and the sequences that own them.

    A sequence is a number handed out by :meth:`allocate` or :meth:`fork`. Forked sequences share pages; a shared page
    is never written: the sequence that grows into one gets a page of its own, and the caller is told what to copy
    there. Every method either does all it says or raises and changes nothing.

    Raises:
        ValueError: either is less than 1, or there are more tokens than int32 slots address.
    """

    # Generations of two allocators never meet, so that a batch of one is not taken for a batch of the other.
    _first_generations: ClassVar = itertools.count(0, 2**40)

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if num_pages * page_size > MAX_SLOTS:
            raise ValueError(
                f"num_pages is {num_pages} of {page_size} tokens; expected at most {MAX_SLOTS // page_size}: slots are"
                " int32"
            )
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: what was used last is what L2 still holds
        self._owners = [0] * num_pages
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._generations: dict[int, int] = {}
        self._oldest = self._newest = next(self._first_generations)
        self._next = 0

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """All sequences that were not freed, oldest first."""
        return tuple(self._pages)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        self._check(sequence)
        return self._lengths[sequence]

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in the order of its tokens; NO_PAGE where it gave one back."""
        self._check(sequence)
        return tuple(self._pages[sequence])

    def owners(self, page: int) -> int:
        """Sequences that own a page."""
        return self._owners[page]

    def check_generations(self, sequences: Sequence[int], generations: Sequence[int]) -> None:
        """Raise StaleBatchError unless every sequence has still that generation; a negative one is no sequence's."""
        for sequence, generation in zip(sequences, generations, strict=True):
            if generation < 0 or self._generations.get(sequence) == generation:
                continue
            if not self._oldest <= generation <= self._newest:
                what = "is of another cache"
            elif sequence not in self._generations:
                what = "was closed since the batch was made"
            else:
                what = "was extended, cropped or forked since the batch was made"
            raise StaleBatchError(f"batch has sequence {sequence}, which {what}; expected the latest batch of extend")

    def allocate(self) -> int:
        """A new, empty sequence."""
        sequence, self._next = self._next, self._next + 1
        self._pages[sequence], self._lengths[sequence] = [], 0
        self._changed(sequence)
        return sequence

    def plan_growth(self, new_tokens: Mapping[int, int]) -> Growth:
        """Pages and copies for these sequences to grow together; changes nothing.

        Where several owners of a shared page write to it in one step, the last one keeps it.

        Raises:
            ValueError: no such sequence, or a negative number of tokens.
            OutOfPagesError: too few free pages.
        """
        owners: dict[int, int] = {}
        grown = [self._growth_of(sequence, new, owners) for sequence, new in new_tokens.items()]
        needed = sum(added for _, added, _ in grown)
        if needed > len(self._free):
            raise OutOfPagesError(
                f"new_tokens asks for {sum(new_tokens.values())} tokens, {needed} pages of {self.page_size};"
                f" {len(self._free)} of {self.num_pages} are free"
            )
        taken = tuple(self._free[len(self._free) - needed :][::-1])
        pages, page_copies, used = [], [], 0
        for sequence, (kept, added, copies) in zip(new_tokens, grown, strict=True):
            mine = self._pages[sequence]
            pages.append((*mine[:kept], *taken[used : used + added]))
            if copies:
                page_copies.append(PageCopy(mine[-1], taken[used]))
            used += added
        return Growth(dict(new_tokens), tuple(pages), tuple(page_copies), taken, self._newest + 1)

    def commit(self, growth: Growth) -> None:
        """Carries out a :meth:`plan_growth`.

        Raises:
            ValueError: the allocator has changed since; nothing is changed.
        """
        if growth.generation != self._newest + 1:
            raise ValueError("growth was planned before another change; expected one planned for the present state")
        del self._free[len(self._free) - len(growth.taken) :]
        for page in growth.taken:
            self._owners[page] = 1
        for copy in growth.copies:
            self._owners[copy.source] -= 1  # never the last: that one keeps the page
        for (sequence, new), pages in zip(growth.new_tokens.items(), growth.pages, strict=True):
            self._pages[sequence] = list(pages)
            self._lengths[sequence] += new
        self._changed(*growth.new_tokens)

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets the tokens from ``length`` on (rejected drafts), with the pages that only they needed.

        Raises:
            ValueError: no such sequence, or it is shorter than ``length``.
        """
        self._check(sequence)
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(f"length is {length}; expected 0 to {self._lengths[sequence]}, the sequence's own")
        if length == self._lengths[sequence]:
            return
        mine, kept = self._pages[sequence], self._pages_for(length)
        for page in reversed(mine[kept:]):
            self._release(page)
        del mine[kept:]
        self._lengths[sequence] = length
        self._changed(sequence)

    def give_back(self, sequence: int, first: int, stop: int) -> int:
        """Does without tokens ``first`` … ``stop - 1``, which are read no more, with the pages that only they
        needed. The sequence stays as long as it is. Batches made before are stale.

        Returns:
            The number of pages given back; those that others own too are not free by that.

        Raises:
            ValueError: no such sequence, or the tokens are not its own.
        """
        self._check(sequence)
        length = self._lengths[sequence]
        if not 0 <= first <= stop <= length:
            raise ValueError(f"first and stop are {first} and {stop}; expected 0 to {length}, ascending")
        mine = self._pages[sequence]
        given = [i for i in range(self._pages_for(first), stop // self.page_size) if mine[i] != NO_PAGE]
        for index in reversed(given):
            self._release(mine[index])
            mine[index] = NO_PAGE
        if given:
            self._changed(sequence)
        return len(given)

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, on the same pages.

        A batch that brings new tokens of the sequence has to be run before: the pages are not written any more.
        """
        self._check(sequence)
        twin, self._next = self._next, self._next + 1
        self._pages[twin], self._lengths[twin] = list(self._pages[sequence]), self._lengths[sequence]
        for page in self._pages[twin]:
            if page != NO_PAGE:
                self._owners[page] += 1
        self._changed(sequence, twin)
        return twin

    def free(self, sequence: int) -> None:
        """Ends a sequence; pages without another owner are free again."""
        self._check(sequence)
        for page in reversed(self._pages.pop(sequence)):
            self._release(page)
        del self._lengths[sequence], self._generations[sequence]
        self._changed()

    def _check(self, sequence: int) -> None:
        if sequence not in self._pages:
            raise ValueError(f"sequence is {sequence}; expected one that was allocated and not freed")

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _growth_of(self, sequence: int, new_tokens: int, owners: dict[int, int]) -> tuple[int, int, bool]:
        """Pages kept, pages added behind them, and whether the first of these is a copy of a shared page.

        ``owners``: of shared pages, once the sequences that were asked about before have grown; updated.
        """
        self._check(sequence)
        if new_tokens < 0:
            raise ValueError(f"new_tokens[{sequence}] is {new_tokens}; expected at least 0")
        mine, length, copies = self._pages[sequence], self._lengths[sequence], False
        if new_tokens and length % self.page_size:
            left = owners.get(mine[-1], self._owners[mine[-1]])
            copies = left > 1
            owners[mine[-1]] = left - copies
        kept = len(mine) - copies
        return kept, self._pages_for(length + new_tokens) - kept, copies

    def _changed(self, *sequences: int) -> None:
        self._newest += 1
        self._generations.update(dict.fromkeys(sequences, self._newest))

    def _release(self, page: int) -> None:
        if page == NO_PAGE:
            return
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)
