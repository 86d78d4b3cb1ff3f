"""Who owns which page of a paged cache: allocation, growth, sharing, release. Host bookkeeping, no cache data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_PAGE = -1  # in a block table, behind a sequence's pages: no kernel looks there


class OutOfPagesError(RuntimeError):
    """There are not enough free pages; nothing was changed."""


@dataclass(frozen=True)
class PageCopy:
    """Page ``target`` must become a copy of page ``source`` before anything is written to ``target``."""

    source: int
    target: int


class PageAllocator:
    """Pages of a cache and the sequences that own them.

    A sequence is a number handed out by :meth:`allocate` or :meth:`fork`. Forked sequences share pages; a shared page
    is never written: the sequence that grows into one gets a page of its own, and the caller is told what to copy
    there. Every method either does all it says or raises and changes nothing.

    Args:
        num_pages: pages that the cache has.
        page_size: tokens per page.

    Raises:
        ValueError: either is less than 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: what was used last is what L2 still holds
        self._owners = [0] * num_pages
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
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
        """The pages of a sequence, in the order of its tokens."""
        self._check(sequence)
        return tuple(self._pages[sequence])

    def owners(self, page: int) -> int:
        """Sequences that own a page."""
        return self._owners[page]

    def allocate(self, length: int = 0) -> int:
        """A new sequence with room for ``length`` tokens.

        Raises:
            ValueError: ``length`` is negative.
            OutOfPagesError: too few free pages.
        """
        if length < 0:
            raise ValueError(f"length is {length}; expected at least 0")
        pages = self._take(self._pages_for(length))
        sequence, self._next = self._next, self._next + 1
        self._pages[sequence], self._lengths[sequence] = pages, length
        return sequence

    def pages_to_grow(self, sequence: int, new_tokens: int) -> int:
        """Free pages that :meth:`grow` with the same arguments takes."""
        self._check(sequence)
        if new_tokens < 0:
            raise ValueError(f"new_tokens is {new_tokens}; expected at least 0")
        grown = self._pages_for(self._lengths[sequence] + new_tokens) - len(self._pages[sequence])
        return grown + bool(new_tokens and self._writes_shared(sequence))

    def grow(self, sequence: int, new_tokens: int) -> tuple[PageCopy, ...]:
        """Room for ``new_tokens`` more tokens.

        Returns:
            What to copy before the new tokens are written: the last page, if it is shared and has room.

        Raises:
            ValueError: no such sequence, or ``new_tokens`` is negative.
            OutOfPagesError: too few free pages.
        """
        taken = self._take(self.pages_to_grow(sequence, new_tokens))
        copies: tuple[PageCopy, ...] = ()
        mine = self._pages[sequence]
        if new_tokens and self._writes_shared(sequence):
            own = taken.pop()
            copies = (PageCopy(mine[-1], own),)
            self._release(mine[-1])
            mine[-1] = own
        mine.extend(taken)
        self._lengths[sequence] += new_tokens
        return copies

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets the tokens from ``length`` on (rejected drafts), with the pages that only they needed.

        Raises:
            ValueError: no such sequence, or it is shorter than ``length``.
        """
        self._check(sequence)
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(f"length is {length}; expected 0 to {self._lengths[sequence]}, the sequence's own")
        mine, kept = self._pages[sequence], self._pages_for(length)
        for page in reversed(mine[kept:]):
            self._release(page)
        del mine[kept:]
        self._lengths[sequence] = length

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, on the same pages."""
        self._check(sequence)
        twin, self._next = self._next, self._next + 1
        self._pages[twin], self._lengths[twin] = list(self._pages[sequence]), self._lengths[sequence]
        for page in self._pages[twin]:
            self._owners[page] += 1
        return twin

    def free(self, sequence: int) -> None:
        """Ends a sequence; pages that nobody else owns are free again."""
        self._check(sequence)
        for page in reversed(self._pages.pop(sequence)):
            self._release(page)
        del self._lengths[sequence]

    def slots(self, sequence: int, start: int, stop: int) -> list[int]:
        """Where tokens ``start`` to ``stop`` of a sequence lie: page · page_size + offset, each.

        Raises:
            ValueError: no such sequence, or no such tokens.
        """
        self._check(sequence)
        if not 0 <= start <= stop <= self._lengths[sequence]:
            raise ValueError(f"start:stop is {start}:{stop}; expected a part of 0:{self._lengths[sequence]}")
        pages, size = self._pages[sequence], self.page_size
        return [pages[token // size] * size + token % size for token in range(start, stop)]

    def block_table(
        self, sequences: Sequence[int], max_pages: int | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """[B, max_pages] int32, the pages of each sequence, NO_PAGE behind them.

        Args:
            sequences: B of them.
            max_pages: columns; default as many as the longest needs, at least one.

        Raises:
            ValueError: no such sequence, or one has more than ``max_pages`` pages.
        """
        rows = [self.pages(sequence) for sequence in sequences]
        longest = max((len(row) for row in rows), default=0)
        if max_pages is None:
            max_pages = max(1, longest)
        if longest > max_pages:
            raise ValueError(f"max_pages is {max_pages}; expected at least {longest}, the longest sequence's")
        table = torch.full((len(rows), max_pages), NO_PAGE, dtype=torch.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table.to(device)

    def cache_seqlens(self, sequences: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """[B] int32, tokens of each sequence."""
        return torch.tensor([self.length(sequence) for sequence in sequences], dtype=torch.int32, device=device)

    def _check(self, sequence: int) -> None:
        if sequence not in self._pages:
            raise ValueError(f"sequence is {sequence}; expected one that was allocated and not freed")

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _writes_shared(self, sequence: int) -> bool:
        """Whether the next token goes to a page that somebody else owns too."""
        return self._lengths[sequence] % self.page_size != 0 and self._owners[self._pages[sequence][-1]] > 1

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} pages of {self.page_size} tokens are needed; {len(self._free)} of {self.num_pages} are free"
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def _release(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)
