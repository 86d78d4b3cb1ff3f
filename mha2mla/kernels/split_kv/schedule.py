"""The decode schedule: its format, and the planner in plain Python. No TileLang, no GPU.

The device planner (``plan_kernel.py``) computes the same numbers; this file is its oracle and its documentation.

A cache is read in tiles of ``TILE_TOKENS`` tokens. A fixed number of CTAs each take a contiguous piece of the
concatenation of all attended tiles of all sequences. The part of one sequence in one CTA is a *fragment*. A sequence
that lies in one fragment is written to the output at once; of a sequence in several fragments each writes a *partial*
(output and log-sum-exp) that the combine kernel merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

TILE_TOKENS = 64
FRAGMENT_TILES = 1  # what starting and ending a sequence costs, in tiles
MAX_BATCH = 4096  # sequences the planner's shared memory holds

# A row of ``schedule`` [num_ctas + B, FIELDS] int32 is one fragment. Row i < num_ctas is the first fragment of CTA i;
# its following ones are rows NEXT + 1, NEXT + 2, ... Rows that nothing points at are unspecified.
FIELDS = 16
SEQUENCE = 0  # which sequence
FIRST = 1  # first tile, counted among the attended tiles of the sequence
TILES = 2  # number of tiles, > 0
SLOT = 3  # where its partial goes: partial[slot // 2, slot % 2]; -1: the fragment is the whole sequence
NEXT = 4  # first fragments only: row of fragment f > 0 of this CTA is NEXT + f
COUNT = 5  # first fragments only: fragments of this CTA; 0: the CTA is idle and the rest of the row unspecified
START = 6  # first token that is not padding
STOP = 7  # tokens cached
LOW = 8  # first token of the sliding window of the first query; START without a window
SINK_STOP = 9  # tokens START ... SINK_STOP - 1 are sinks that lie before LOW
TILE0 = 10  # tile (token // TILE_TOKENS) of attended tile 0
SINK_TILES = 11  # attended tiles 0 ... SINK_TILES - 1 follow TILE0, the others WINDOW_TILE
WINDOW_TILE = 12


@dataclass(frozen=True)
class Span:
    """Tokens and tiles of one sequence that some query sees; fields as the columns of a schedule."""

    start: int
    stop: int
    low: int
    sink_stop: int
    tile0: int
    sink_tiles: int
    window_tile: int
    tiles: int

    def tile(self, attended: int) -> int:
        """Tile of the cache that is the ``attended``-th of those read."""
        if attended < self.sink_tiles:
            return self.tile0 + attended
        return self.window_tile + attended - self.sink_tiles


def attended_span(
    seqlen: int, start: int, capacity: int, seqlen_q: int, causal: bool, window: int | None, sinks: int
) -> Span:
    """The attended part of one sequence.

    Query s of S_q sits at position ``p = seqlen - 1 - (S_q - 1 - s)`` (causal) or ``seqlen - 1`` and sees tokens
    ``start <= t <= p`` with ``t > p - window`` or ``t < start + sinks`` (streaming attention, arXiv 2309.17453).
    """
    stop = max(0, min(seqlen, capacity))
    start = max(0, min(start, stop))
    low = start if window is None else max(start, stop - (seqlen_q - 1) * causal - window)
    sink_stop = min(start + sinks, low)
    tile0 = (start if sink_stop > start else low) // TILE_TOKENS
    sink_end = max(tile0, -(-sink_stop // TILE_TOKENS)) if sink_stop > start else tile0
    window_tile = max(low // TILE_TOKENS, sink_end)
    sink_tiles = sink_end - tile0
    tiles = sink_tiles + -(-stop // TILE_TOKENS) - window_tile if stop > start else 0
    return Span(start, stop, low, sink_stop, tile0, sink_tiles, window_tile, tiles)


@dataclass(frozen=True)
class Fragment:
    """Tiles ``first`` ... ``first + tiles - 1`` of those that sequence ``sequence`` reads; ``slot`` as in SLOT."""

    sequence: int
    first: int
    tiles: int
    slot: int


def plan_fragments(tiles: list[int], num_ctas: int, num_splits: int = 0) -> list[list[Fragment]]:
    """The fragments of each CTA for sequences that read so many tiles each.

    ``num_splits``: that many even pieces of each sequence, or as many as it has tiles, each in a CTA of its own, of
    which there are enough; 0: what balances best.

    Two ways to cut. *Aligned*: every CTA gets one piece of one sequence, sequences being cut evenly; taken when its
    longest piece costs at most one tile more than a perfect balance. *Stream*: the concatenation of all sequences, each
    lengthened by the fixed cost FRAGMENT_TILES, is cut evenly; a cut inside the fixed cost falls on the sequence's
    beginning. (FlashMLA's and FlashInfer's schedulers are of the second kind.)
    """
    total, nonempty = sum(tiles), sum(n > 0 for n in tiles)
    cost = total + FRAGMENT_TILES * nonempty
    if total == 0:
        return [[] for _ in range(num_ctas)]
    piece = None if num_splits else aligned_piece(tiles, num_ctas)
    if num_splits or piece is not None:
        counts = [min(n, num_splits) if num_splits else -(-n // piece) for n in tiles]
        cuts = [(b, tiles[b] * j // count) for b, count in enumerate(counts) for j in range(count)]
        cuts += [(len(tiles), 0)] * (num_ctas + 1 - len(cuts))
    else:
        begin, cuts, b = 0, [], 0
        for i in range(num_ctas):
            position = cost * i // num_ctas
            while tiles[b] == 0 or position >= begin + tiles[b] + FRAGMENT_TILES:
                begin += tiles[b] + FRAGMENT_TILES * (tiles[b] > 0)
                b += 1
            cuts.append((b, max(0, position - begin - FRAGMENT_TILES)))
        cuts.append((len(tiles), 0))
    work: list[list[Fragment]] = []
    for i, ((b, first), end) in enumerate(pairwise(cuts)):
        mine: list[Fragment] = []
        while (b, first) < end and b < len(tiles):
            stop = end[1] if b == end[0] else tiles[b]
            if stop > first:
                whole = first == 0 and stop == tiles[b]
                mine.append(Fragment(b, first, stop - first, -1 if whole else 2 * i + (len(mine) > 0)))
            b, first = b + 1, 0
        work.append(mine)
    return work


def aligned_piece(tiles: list[int], num_ctas: int) -> int | None:
    """Largest piece, in tiles, of the aligned way of cutting; None if it needs too many CTAs or balances badly."""
    total = sum(tiles)
    least = -(-total // num_ctas)
    most = -(-(total + FRAGMENT_TILES * sum(n > 0 for n in tiles)) // num_ctas) + 1
    for piece in range(max(1, least), most + 1):
        if sum(-(-n // piece) for n in tiles) <= num_ctas:
            return piece
    return None


def splits_of(work: list[list[Fragment]], batch: int) -> list[tuple[int, int]]:
    """(number of fragments, slot of the first one) per sequence; the k-th one's slot is ``2 * (slot // 2 + k)``."""
    splits = [(0, -1)] * batch
    for fragment in (fragment for mine in work for fragment in mine):
        count, slot = splits[fragment.sequence]
        splits[fragment.sequence] = (count + 1, fragment.slot if count == 0 else slot)
    return splits


def write_schedule(spans: list[Span], work: list[list[Fragment]], schedule: Tensor, splits: Tensor) -> None:
    """Fills ``schedule`` [num_ctas + B, FIELDS] and ``splits`` [B, 2] (int32) in place, as the device planner does."""
    schedule.fill_(-(2**31))
    rank = [0]
    for span in spans:
        rank.append(rank[-1] + (span.tiles > 0))
    for cta, mine in enumerate(work):
        schedule[cta, COUNT] = len(mine)
        for f, fragment in enumerate(mine):
            span = spans[fragment.sequence]
            row = schedule[cta if f == 0 else len(work) + rank[mine[0].sequence] + f]
            row[SEQUENCE], row[FIRST], row[TILES], row[SLOT] = (
                fragment.sequence, fragment.first, fragment.tiles, fragment.slot,
            )  # fmt: skip
            row[START], row[STOP], row[LOW], row[SINK_STOP] = span.start, span.stop, span.low, span.sink_stop
            row[TILE0], row[SINK_TILES], row[WINDOW_TILE] = span.tile0, span.sink_tiles, span.window_tile
            if f == 0:
                row[NEXT] = len(work) + rank[fragment.sequence]
    for b, (count, slot) in enumerate(splits_of(work, len(spans))):
        splits[b, 0], splits[b, 1] = count, slot
