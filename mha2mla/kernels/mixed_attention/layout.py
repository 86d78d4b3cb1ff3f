"""Calls of a ragged batch, decided on the host from its lengths. No tensors.

Short queries run the *absorbed* form (the decode op), in groups of equal query length. Long ones run the *expanded*
form: their cached latents are expanded to keys and values of every head, in *waves* that fit into a bounded workspace;
a sequence whose context alone is larger is cut into chunks, whose partial results are merged. Under a window both forms
read the attention sinks and the tokens of some query's window, and nothing between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.split_kv.choice import SEQLENS_Q

MAX_DECODE_QUERY_LENGTH = SEQLENS_Q[-1]
MAX_GROUP = 2048  # sequences or pieces in one call of the decode op; a plan takes 4096
FEWEST_EXPANDED = 16384  # cached tokens expanded to keys and values at a time, and more where they fit into
MAX_EXPANDED_BYTES = 1 << 28  # with what is computed on the way
_MOST_EXPANDED = 1 << 18  # tokens
ABSORBS_ALL = -1  # in place of the longest query that is absorbed: all are
# FLOP in the 27 µs that the host takes for a launch, at the 166 TFLOP/s of absorbed prompts (docs/notes/prefill.md).
LAUNCH_FLOP = 4_500_000_000


def expanded_at_a_time(bytes_per_token: int) -> int:
    """Cached tokens whose keys and values, of so many bytes each, are made at a time: a wave costs the host as much
    whatever its tokens are."""
    return min(_MOST_EXPANDED, max(FEWEST_EXPANDED, MAX_EXPANDED_BYTES // bytes_per_token))


def expanded_tokens(geometry: MLAGeometry, itemsize: int) -> int:
    """:func:`expanded_at_a_time` for queries of ``itemsize`` bytes: a token's latent, keys and values of every head,
    and in float32 its rotary key before and behind its rotation, where that is dequantised, or computed without a
    kernel of its own, which is counted for all that is computed."""
    heads, rope = geometry.num_up_projection_heads, geometry.num_rope_heads * geometry.qk_rope_head_dim
    wide = geometry.kv_lora_rank + heads * (geometry.qk_nope_head_dim + geometry.v_head_dim) + rope
    in_float32 = not geometry.has_rope_cache or geometry.has_key_codes
    return expanded_at_a_time(itemsize * wide + (8 * rope if in_float32 else 0))


@dataclass(frozen=True)
class Group:
    """One call of the decode op.

    Attributes:
        seqlen_q: query tokens of each row.
        rows: sequence of each row.
        first_query: first query of each row, counted in its sequence; rows of one sequence may overlap, and then
            compute the same thing.
        first_token: of the batch, where the rows' queries lie side by side; else -1.
    """

    seqlen_q: int
    rows: tuple[int, ...]
    first_query: tuple[int, ...]
    first_token: int

    @property
    def has_pieces(self) -> bool:
        """True where rows are pieces of queries: a longer one has several, of which only the first begins at 0."""
        return any(self.first_query)


@dataclass(frozen=True)
class Chunk:
    """``lengths[i]`` cached tokens of the i-th sequence of a wave, from ``first[i]`` on.

    ``causal``: the chunk ends with the sequence, so that its last token is the last query's own (bottom-right aligned);
    else all queries see all of it. ``gaps[i]`` tokens behind the attention sinks, in no query's window, are left out.
    """

    first: tuple[int, ...]
    lengths: tuple[int, ...]
    causal: bool
    gaps: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Wave:
    """Consecutive sequences ``first … stop - 1`` that are expanded together; tokens of the batch likewise."""

    first: int
    stop: int
    first_token: int
    query_lengths: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        return sum(self.query_lengths)


@dataclass(frozen=True)
class BatchLayout:
    """The calls of a ragged batch, and the ``tokens`` of its sequences, behind which lies padding."""

    groups: tuple[Group, ...]
    waves: tuple[Wave, ...]
    tokens: int


@dataclass(frozen=True)
class FormCost:
    """FLOP and launches of a form of attention in one layer, projections of the new tokens left out.

    Attributes:
        pair: of a query and a token that it sees. token: of each token. query: of each query.
        call: of each token in every call of the decode op, of at most 8 queries.
        launches: kernels and copies of a group or a chunk, however many tokens it has.
    """

    pair: int
    token: int = 0
    query: int = 0
    call: int = 0
    launches: int = 0

    def flops(self, query_length: int, cached_length: int) -> int:
        """FLOP of ``query_length`` causal queries behind ``cached_length`` tokens."""
        tokens = cached_length + query_length
        pairs = query_length * cached_length + query_length * (query_length + 1) // 2
        calls = -(-query_length // MAX_DECODE_QUERY_LENGTH)
        return self.pair * pairs + self.query * query_length + (self.token + self.call * calls) * tokens


def form_costs(geometry: MLAGeometry) -> dict[str, FormCost]:
    """Costs of a layer's "absorbed" and "expanded" form.

    Scores and values take ``2 (d_qk + d_v)`` a pair and head. The absorbed form maps each query by W_UK and its output
    by W_UV; the expanded form maps each token by both. A rotary key that is computed from the latent costs
    ``2 d_c d_r``: once in the expanded form, in every call of the decode op in the absorbed one.

    Launches of the absorbed form: W_UK if there is one, decode, merge, W_UV. Of the expanded one: gathered latents,
    W_UK, W_UV, attention, and rotary keys: one kernel gathers or computes them, nine dequantise int8 ones.
    """
    heads, latent, rope = geometry.num_attention_heads, geometry.kv_lora_rank, geometry.qk_rope_head_dim
    wide, has_nope = geometry.qk_nope_head_dim + geometry.v_head_dim, geometry.qk_nope_head_dim > 0
    key = 2 * latent * rope if geometry.rope_from_latent else 0
    return {
        "absorbed": FormCost(
            2 * heads * (2 * latent + rope), query=2 * heads * latent * wide, call=key, launches=3 + has_nope
        ),
        "expanded": FormCost(
            2 * heads * (wide + rope),
            token=2 * geometry.num_up_projection_heads * latent * wide + key,
            launches=3 + has_nope + (9 if geometry.has_key_codes else 1),
        ),
    }


def absorbs_up_to(geometry: MLAGeometry) -> int:
    """Query length up to which the absorbed form needs fewer FLOP than the expanded one over a long context."""
    absorbed, expanded = form_costs(geometry).values()
    more = absorbed.pair + absorbed.call // MAX_DECODE_QUERY_LENGTH - expanded.pair
    return 2**30 if more <= 0 else max(MAX_DECODE_QUERY_LENGTH, expanded.token // more)


def is_absorbed(query_length: int, cached_length: int, short: int, window: int = -1, sinks: int = 0) -> bool:
    """True where a sequence's queries run the absorbed form, False for the expanded one.

    Args:
        query_length, cached_length: new tokens, and tokens cached before them that some query may see.
        short: longest query that runs the absorbed form where at least as many tokens are cached before it
            (:func:`absorbs_up_to`), or ``ABSORBS_ALL``; queries of at most 8 tokens always do.
        window, sinks: tokens that a query sees up to itself, -1: all; and at the beginning. A query then costs a
            window in both forms, and expanding costs all tokens that some query sees.
    """
    if short == ABSORBS_ALL:
        return True
    if window < 0 or query_length <= MAX_DECODE_QUERY_LENGTH:
        return query_length <= max(MAX_DECODE_QUERY_LENGTH, min(short, cached_length))
    tokens = cached_length + query_length
    return query_length * min(window + sinks, tokens) <= short * tokens


def _seen_tokens(query_length: int, cached_length: int, start: int, window: int, sinks: int) -> tuple[int, int, int]:
    """Cached tokens that some query of a sequence sees: the first, how many, and how many are left out behind the
    attention sinks."""
    stop = cached_length + query_length
    first = min(start, stop)
    gap = 0 if window < 0 else max(0, cached_length + 1 - window - (first + sinks))
    return first, stop - first - gap, gap


@lru_cache(maxsize=64)  # every layer of a step asks
def lay_out(
    query_lengths: tuple[int, ...],
    cached_lengths: tuple[int, ...],
    starts: tuple[int, ...],
    short: int,
    max_expanded_tokens: int,
    window: int = -1,
    sinks: int = 0,
) -> BatchLayout:
    """The calls for sequences that bring ``query_lengths`` new tokens to ``cached_lengths`` cached ones.

    Args:
        query_lengths, cached_lengths: per sequence. Of sequences with at most 8 new tokens the second is not read.
        starts: per sequence, the first visible cached token.
        short, window, sinks: as in :func:`is_absorbed`.
        max_expanded_tokens: cached tokens expanded at a time; one sequence's query counts as fitting.
    """
    size, limit = MAX_DECODE_QUERY_LENGTH, max_expanded_tokens
    sequences = list(zip(query_lengths, cached_lengths, starts, strict=True))
    spans = [_seen_tokens(*sequence, window, sinks) for sequence in sequences]
    *offset, tokens = accumulate(query_lengths, initial=0)
    decoded: list[range] = []  # runs of sequences
    expanded: list[range] = []
    pieces: list[tuple[int, int]] = []  # sequence and first query
    for row, (length, cached, _) in enumerate(sequences):
        seen = spans[row][1]
        in_chunks = seen > max(limit, length)  # chunks take no window
        if length == 0:
            continue
        if length <= size:
            runs = decoded
            joins = bool(runs) and query_lengths[runs[-1].start] == length and len(runs[-1]) < MAX_GROUP
        elif (window >= 0 and in_chunks) or is_absorbed(
            length, cached if window < 0 else seen - length, short, window, sinks
        ):
            # The last piece overlaps the one before.
            pieces += [(row, min(first, length - size)) for first in range(0, length, size)]
            continue
        else:
            runs = expanded
            joins = bool(runs) and sum(spans[each][1] for each in runs[-1]) + seen <= limit
        if joins and runs[-1].stop == row:
            runs[-1] = range(runs[-1].start, row + 1)
        else:
            runs.append(range(row, row + 1))
    groups = [Group(query_lengths[run[0]], tuple(run), (0,) * len(run), offset[run[0]]) for run in decoded]
    for begin in range(0, len(pieces), MAX_GROUP):
        rows, first_query = zip(*pieces[begin : begin + MAX_GROUP], strict=True)
        first = offset[rows[0]] + first_query[0]
        tokens_of = (offset[row] + query for row, query in zip(rows, first_query, strict=True))
        is_dense = all(token == first + size * index for index, token in enumerate(tokens_of))
        groups.append(Group(size, rows, first_query, first if is_dense else -1))
    waves = [
        Wave(run.start, run.stop, offset[run.start], queries, _chunks(spans[run.start : run.stop], queries, limit))
        for run in expanded
        for queries in [query_lengths[run.start : run.stop]]
    ]
    return BatchLayout(tuple(groups), tuple(waves), tokens)


def saves_launches(
    costs: dict[str, FormCost], layout: BatchLayout, absorbed: BatchLayout, launch_flop: int = LAUNCH_FLOP
) -> bool:
    """True where a batch takes less time with all its sequences absorbed: the launches of its waves, which all of them
    share, count for more than the FLOP that the absorbed form has more.

    Args:
        costs: of :func:`form_costs`.
        layout, absorbed: of the batch, by the FLOP of each sequence and with ``ABSORBS_ALL``.
        launch_flop: FLOP in the time of a launch.
    """
    flop = 0
    for wave in layout.waves:
        for index, queries in enumerate(wave.query_lengths):
            seen = sum(chunk.lengths[index] for chunk in wave.chunks)
            mine = [costs[form].flops(queries, seen - queries) for form in ("absorbed", "expanded")]
            flop += mine[0] - mine[1]
    expanded = costs["expanded"].launches * sum(len(wave.chunks) for wave in layout.waves)
    return flop < launch_flop * (expanded + _group_launches(costs, layout) - _group_launches(costs, absorbed))


def _group_launches(costs: dict[str, FormCost], layout: BatchLayout) -> int:
    """Launches of all groups. Overlapping pieces add three gathers (two of queries, one of results) and, in a batch of
    several calls, two copies of their results."""
    is_one_call = len(layout.groups) == 1 and not layout.waves
    overlap = sum(group.first_token < 0 for group in layout.groups)
    return len(layout.groups) * costs["absorbed"].launches + (3 if is_one_call else 5) * overlap


def _chunks(spans: list[tuple[int, int, int]], queries: tuple[int, ...], limit: int) -> tuple[Chunk, ...]:
    """Chunks of a wave: one, or several of a sequence whose context alone is larger than ``limit``."""
    begins, lengths, gaps = zip(*spans, strict=True)
    longest = max(limit, queries[0])
    if len(spans) > 1 or lengths[0] <= longest:
        return (Chunk(begins, lengths, True, gaps if any(gaps) else ()),)
    last = begins[0] + lengths[0] - longest
    context = [Chunk((first,), (min(limit, last - first),), False) for first in range(begins[0], last, limit)]
    return (*context, Chunk((last,), (longest,), True))
