"""Tiles of query rows, limits of devices, the choice of a kernel, and the format of the decode schedule.

Arithmetic only: no torch, no TileLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

SEQLENS_Q = (1, 2, 4, 8)  # numbers of new tokens that kernels are compiled for; others are padded up


@dataclass(frozen=True)
class RowTiling:
    """A CTA serves ``heads_per_tile`` heads of ``tokens_per_tile`` new tokens; row ``s * head_rows + i`` is (s, i).

    A tile never mixes parts of rope groups: it holds ``groups_per_tile`` whole groups, or a part of one group, so its
    ``k_pe`` columns are one contiguous window. Rows that belong to no head (the head count is rarely a power of two)
    are computed and dropped.

    Attributes:
        tokens_per_tile: new tokens that a tile has rows for (static; the call may bring fewer).
        token_tiles: tiles that cover all new tokens.
        heads_per_group: query heads that share a rope head, H // G.
        groups_per_tile: whole rope groups in a tile; 1 if a tile holds part of a group.
        tiles_per_group: tiles that share one group; 1 if a tile holds whole groups.
        heads_per_tile: heads in a tile.
        head_rows: rows of a token. heads_per_tile padded to a multiple of 8 when there are several tokens (each token's
            rows are one copy into swizzled shared memory), else heads_per_tile; packed: padded to a power of two.
        rows: rows of the tile, padded to 16 (packed: 8), 32 or 64 (48 falls into three 16-wide pieces, tilelang#2593).
        head_tiles: tiles that cover all heads of one token.
    """

    tokens_per_tile: int
    token_tiles: int
    heads_per_group: int
    groups_per_tile: int
    tiles_per_group: int
    heads_per_tile: int
    head_rows: int
    rows: int
    head_tiles: int

    def token(self, row):
        """The tile's new token of a row; ``row`` may be an expression."""
        return row // self.head_rows if self.tokens_per_tile > 1 else 0

    def head(self, row):
        """The tile's head of a row; ``row`` may be an expression."""
        return row % self.head_rows if self.tokens_per_tile > 1 else row

    @property
    def num_tiles(self) -> int:
        """Tiles of one sequence; tile ``y`` has head tile ``y % head_tiles`` and token tile ``y // head_tiles``."""
        return self.token_tiles * self.head_tiles


def tile_rows(
    heads: int, num_rope_heads: int, seqlen_q: int, max_rows: int, max_groups: int, packed: bool = False
) -> RowTiling:
    """Tiles of at most ``max_rows`` padded rows and ``max_groups`` rope groups, as even as they go.

    Args:
        heads: H.
        num_rope_heads: G, a divisor of H.
        seqlen_q: one of :data:`SEQLENS_Q`.
        max_rows: 16, 32 or 64; packed also 8.
        max_groups: what the shared memory for ``k_pe`` allows, >= 1.
        packed: a token's rows are padded to a power of two only, and tiles have 8 rows or more, for kernels that gather
            their queries.
    """
    group = heads // num_rope_heads
    align = 8 if seqlen_q > 1 and not packed else 1
    tokens_per_tile = min(seqlen_q, max_rows // align)
    fit = max_rows // tokens_per_tile // align * align
    if group > fit:
        tiles_per_group = -(-group // fit)
        heads_per_tile, groups_per_tile = -(-group // tiles_per_group), 1
        head_tiles = num_rope_heads * tiles_per_group
    else:
        tiles_per_group = 1
        groups_per_tile = min(fit // group, max_groups, num_rope_heads)
        head_tiles = -(-num_rope_heads // groups_per_tile)
        groups_per_tile = -(-num_rope_heads // head_tiles)
        heads_per_tile = groups_per_tile * group
    head_rows = 1 << (heads_per_tile - 1).bit_length() if packed else -(-heads_per_tile // align) * align
    rows = 8 if packed else 16
    while rows < head_rows * tokens_per_tile:
        rows *= 2
    token_tiles = -(-seqlen_q // tokens_per_tile)
    return RowTiling(
        tokens_per_tile, token_tiles, group, groups_per_tile, tiles_per_group, heads_per_tile, head_rows, rows,
        head_tiles,
    )  # fmt: skip


DTYPES = ("bfloat16", "float16")
HOPPER = 90  # compute capability
MAX_HEADS = 128
MERGED_ROWS = 8  # B S_q at most, where the merge goes through a map a head: what a matrix instruction has
MAX_SPLITS = 512  # partials of one sequence that the combine holds weights for; CTAs are never more

# Shared memory a block may use, bytes, by compute capability (CUDA C++ programming guide, "Technical Specifications").
SHARED_MEMORY = dict.fromkeys((80, 87), 166912)
SHARED_MEMORY |= dict.fromkeys((86, 89, 120, 121), 101376) | dict.fromkeys((90, 100, 103), 232448)


def compiled_seqlen(tokens: int) -> int:
    """New tokens, at most 8, of the kernel that serves so many: the next of :data:`SEQLENS_Q`."""
    return next(size for size in SEQLENS_Q if size >= tokens)


def shared_memory_limit(capability: int) -> int:
    """Bytes of shared memory a block may use on a compute capability (90 for Hopper); 99 KiB if unknown.

    Raises:
        ValueError: no TileLang kernel runs there.
    """
    if capability < 80:
        raise ValueError(f"the GPU has compute capability {capability / 10}; TileLang kernels need 8.0")
    return SHARED_MEMORY.get(capability, 101376)


def refusals(shape: Any) -> Iterator[tuple[bool, str, str]]:
    """(whether it fits, the size, and its limit) of what every op's kernels ask of a shape: its ``heads``,
    ``page_size``, ``seqlen_q`` and ``dtype``."""
    heads, page, tokens = shape.heads, shape.page_size, shape.seqlen_q
    yield shape.dtype in DTYPES, f"dtype is {shape.dtype}", f"TileLang kernels take {' and '.join(DTYPES)}"
    yield 0 < heads <= MAX_HEADS, f"num_attention_heads is {heads}", f"TileLang kernels take 1 to {MAX_HEADS}"
    yield page >= 16 and page & (page - 1) == 0, f"page_size is {page}", "TileLang kernels take powers of two from 16"
    limit = f"decode kernels take 1 to {SEQLENS_Q[-1]} new tokens (longer queries are prefill)"
    yield 1 <= tokens <= SEQLENS_Q[-1], f"seqlen_q is {tokens}", limit


def first_refusal(checks: Iterable[tuple[bool, str, str]]) -> str | None:
    """The first of :func:`refusals` and of an op's own that does not fit, in words, or None."""
    return next((f"{was}; {limit}" for fits, was, limit in checks if not fits), None)


def rank_choices(shape: Any, capability: int, candidates: Iterable[tuple[Any, Any, int]]) -> list[Any]:
    """The choices that fit, each once, by rank; the limit goes into their reasons.

    Args:
        shape: that they are for.
        capability: compute capability.
        candidates: (rank, choice or None where it does not fit, bytes of shared memory) of every configuration.

    Raises:
        ValueError: with the numbers, if no configuration fits into the device's shared memory, or into registers.
    """
    limit, candidates = shared_memory_limit(capability), list(candidates)
    fitting = dict.fromkeys(
        choice for _, choice, _ in sorted(candidates, key=lambda entry: entry[0]) if choice is not None
    )
    if not fitting:
        least = min(used for *_, used in candidates)
        too_much = f"at least {least} bytes of shared memory a block; sm_{capability} has {limit}"
        raise ValueError(f"{shape} needs {too_much if least > limit else 'more registers than a thread has'}")
    return [replace(choice, reason=f"{choice.reason} of {limit} on sm_{capability}") for choice in fitting]


CONFIGURATION = (
    *("kernel", "variant", "rows", "head_tiles", "token_tiles", "num_stages", "rope_stages", "warpgroups"),
    *("ctas_per_sm", "block_tokens"),
)


@dataclass(frozen=True)
class KernelChoice:
    """A kernel file and its static arguments, with the reason it was chosen. A kernel reads those that it has.

    Attributes:
        kernel: name of its file in the op's folder.
        tiling: which query rows one CTA serves.
        block_tokens: cached tokens a CTA works on at a time.
        num_stages: tiles of the cache (of the latent; of keys, and of values) in flight, for each reader of them; of
            ``swap_ab_cluster`` pieces of tiles.
        rope_stages: chunks of rotary keys in flight, where they have a ring of their own.
        threads: of a CTA.
        warpgroups: that compute.
        ctas_per_sm: CTAs that are resident on a multiprocessor.
        reason: in words, with the numbers.
        variant: of the kernel where it has several.
        cluster_size: CTAs that share the columns of a tile of query rows.
        registers: of a thread that computes, makes keys, streams, dequantises integer codes, where a kernel sets them.
        code_stages: pieces of 128 e4m3 codes, or of 16 rows of integer codes, in flight.
    """

    kernel: str
    tiling: RowTiling
    block_tokens: int = 64
    num_stages: int = 1
    rope_stages: int = 0
    threads: int = 128
    warpgroups: int = 1
    ctas_per_sm: int = 1
    reason: str = field(default="", compare=False)  # the same kernel is compiled once, whatever it was chosen for
    variant: str = ""
    cluster_size: int = 1
    registers: tuple[int, ...] = ()
    code_stages: int = 0

    def configuration(self) -> dict[str, str | int]:
        """The columns :data:`CONFIGURATION` of a benchmark's row."""
        return {name: getattr(self.tiling if hasattr(self.tiling, name) else self, name) for name in CONFIGURATION}

    def num_ctas(self, num_sms: int) -> int:
        """CTAs or clusters per tile of query rows that are resident at once on a GPU of ``num_sms`` multiprocessors."""
        apiece = self.tiling.num_tiles * self.cluster_size
        return max(1, min(MAX_SPLITS, num_sms * self.ctas_per_sm // apiece))


Candidates = Iterator[tuple[Any, KernelChoice | None, int]]  # rank, choice where it fits, bytes of shared memory


def candidate(
    rank: tuple, limit: int, kernel: str, tiling: RowTiling, used: int, words: str, fits: bool = True, **fields: Any
) -> tuple[tuple, KernelChoice | None, int]:
    """One of :data:`Candidates`, whose reason has the numbers.

    It fits where ``fits`` is True, ``registers`` are not None, and a multiprocessor has ``used`` bytes and the driver's
    1 KiB for each of its CTAs: it has 1 KiB more than one CTA may use, ``limit``."""
    is_within = fields.get("ctas_per_sm", 1) * (used + 1024) <= limit + 1024
    if not (fits and is_within) or fields.get("registers", ()) is None:
        return rank, None, used
    reason = f"{kernel}: {tiling.num_tiles} tile(s) of {tiling.rows} rows, {words}, {used} bytes of shared memory a CTA"
    return rank, KernelChoice(kernel, tiling, reason=reason, **fields), used


TILE_TOKENS = 64  # of a tile
FRAGMENT_TILES = 1  # cost of starting and ending a sequence, in tiles
MAX_BATCH = 4096  # sequences that the planner's shared memory holds
FIELDS = 16  # columns of a schedule


class Column:
    """Columns of ``schedule`` [num_ctas + B, FIELDS] int32, which host, device and oracle share; a row is a fragment.

    A cache is read in tiles of ``TILE_TOKENS`` tokens. A fixed number of CTAs each take a contiguous piece of the
    concatenation of all attended tiles of all sequences. The part of one sequence in one CTA is a *fragment*. A
    sequence that lies in one fragment is written to the output at once; of a sequence in several fragments each writes
    a *partial* (output and log-sum-exp) that the combine kernel merges. ``plan_kernel.py`` computes the schedule on the
    device; ``reference.plan_fragments`` is its oracle.

    Row i < num_ctas is the first fragment of CTA i; rows that nothing points at are unspecified.
    """

    SEQUENCE = 0
    FIRST = 1  # first tile, counted among the attended tiles of the sequence
    TILES = 2  # number of tiles, > 0
    SLOT = 3  # place of its partial, partial[slot // 2, slot % 2]; -1: the fragment is the whole sequence
    NEXT = 4  # first fragments only: row of fragment f > 0 of this CTA is NEXT + f
    COUNT = 5  # first fragments only: fragments of this CTA; 0: the CTA is idle, the rest of the row unspecified
    START = 6  # first token that is not padding
    STOP = 7  # tokens cached
    LOW = 8  # first token of the sliding window of the first query; START without a window
    SINK_STOP = 9  # tokens START ... SINK_STOP - 1 are sinks that lie before LOW
    TILE0 = 10  # tile (token // TILE_TOKENS) of attended tile 0
    SINK_TILES = 11  # attended tiles 0 ... SINK_TILES - 1 follow TILE0, the others WINDOW_TILE
    WINDOW_TILE = 12
