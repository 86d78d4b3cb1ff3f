"""Prefix caching: sequences' beginnings in the cache, full pages only, so that shared ones are never written."""

from __future__ import annotations

from collections.abc import Sequence

ROOT = 0


class Prefixes:
    """A trie over pages of tokens. A node is found by its parent and the tokens of its page, which are compared whole:
    no two texts are taken for one another."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nodes: dict[tuple[int, tuple[int, ...]], tuple[int, dict[int, None]]] = {}
        self._paths: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self._next = ROOT + 1

    def put(self, sequence: int, tokens: Sequence[int], count: int) -> None:
        """The first ``count`` of ``tokens`` are cached in ``sequence``, those of calls before among them."""
        path = self._paths.setdefault(sequence, [])
        for page in range(len(path), count // self.page_size):
            parent = self._nodes[path[-1]][0] if path else ROOT
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
        parent, best, found = ROOT, None, 0
        for begin in range(0, len(tokens) - self.page_size, self.page_size):
            node = self._nodes.get((parent, tuple(tokens[begin : begin + self.page_size])))
            if node is None:
                break
            parent, owners = node
            best, found = next(iter(owners)), begin + self.page_size
        return best, found
