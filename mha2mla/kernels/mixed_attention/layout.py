"""Groups and forms of a ragged batch's sequences: decided on the host, from lengths. No tensors.

Short queries run the *absorbed* form (the decode op), in groups of equal query length. Long ones run the *expanded*
form: their cached latents are expanded to keys and values of every head, in *waves* that fit into a bounded workspace;
a sequence whose context alone is larger is cut into chunks, whose partial results are merged. Under a window both forms
read the attention sinks and what some query's window has, and nothing between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.split_kv.choice import SEQLENS_Q

MAX_DECODE_QUERY_LENGTH = SEQLENS_Q[-1]
MAX_GROUP = 2048  # sequences or pieces in one call of the decode op; a plan takes 4096


@dataclass(frozen=True)
class Group:
    """One call of the decode op.

    Attributes:
        seqlen_q: query tokens of each row.
        rows: sequence of each row.
        first_query: where in its sequence's query each row begins; rows of one sequence may overlap, and then compute
            the same thing.
        first_token: of the batch, where the rows lie one behind the other and are whole queries; -1: they do not.
    """

    seqlen_q: int
    rows: tuple[int, ...]
    first_query: tuple[int, ...]
    first_token: int


@dataclass(frozen=True)
class Chunk:
    """``lengths[i]`` cached tokens of the i-th sequence of a wave, from ``first[i]`` on.

    ``causal``: the chunk ends with the sequence, so that its last token is the last query's own (bottom-right aligned);
    else all queries see all of it. ``gaps[i]`` tokens behind the attention sinks are left out, which no window has.
    """

    first: tuple[int, ...]
    lengths: tuple[int, ...]
    causal: bool
    gaps: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)


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
    """The calls that a ragged batch takes; ``tokens`` of it belong to sequences, what is behind them is padding."""

    groups: tuple[Group, ...]
    waves: tuple[Wave, ...]
    tokens: int


def absorbs_up_to(geometry: MLAGeometry) -> int:
    """Query length up to which the absorbed form needs fewer FLOP than the expanded one over the same cached tokens.

    Per cached token, absorbed attention costs ``2 H (2 d_c + d_r)`` for each query, expanded attention
    ``2 H (d_n + d_r + d_v)`` for each query and ``2 h_up d_c (d_n + d_v)`` once, for expanding the token. A rotary
    key that is computed from the latent costs ``2 d_c d_r`` once in the expanded form, and in the absorbed one once in
    every call of the decode op, of 8 queries.
    """
    heads, latent, rope = geometry.num_attention_heads, geometry.kv_lora_rank, geometry.qk_rope_head_dim
    absorbed = heads * (2 * latent + rope)
    expanded = heads * (geometry.qk_nope_head_dim + rope + geometry.v_head_dim)
    expansion = geometry.num_up_projection_heads * latent * (geometry.qk_nope_head_dim + geometry.v_head_dim)
    if not geometry.has_rope_cache:
        absorbed += latent * rope // MAX_DECODE_QUERY_LENGTH
        expansion += latent * rope
    if absorbed <= expanded:
        return 2**30
    return max(MAX_DECODE_QUERY_LENGTH, expansion // (absorbed - expanded))


def is_absorbed(query_length: int, cached_length: int, short: int, window: int = -1, sinks: int = 0) -> bool:
    """The form of a sequence's queries: absorbed, or expanded.

    Args:
        query_length, cached_length: new tokens, and tokens cached before them that some query may see.
        short: longest query that runs the absorbed form where at least as many tokens are cached before it
            (:func:`absorbs_up_to`); queries of at most 8 tokens always do.
        window, sinks: tokens that a query sees up to itself, -1: all; and at the beginning. A query then costs a
            window in both forms, and expanding costs all tokens that some query sees.
    """
    if window < 0 or query_length <= MAX_DECODE_QUERY_LENGTH:
        return query_length <= max(MAX_DECODE_QUERY_LENGTH, min(short, cached_length))
    tokens = cached_length + query_length
    return query_length * min(window + sinks, tokens) <= short * tokens


def seen_tokens(query_length: int, cached_length: int, start: int, window: int, sinks: int) -> tuple[int, int, int]:
    """The cached tokens that some query of a sequence sees: the first one, how many, and how many are left out behind
    the attention sinks."""
    stop = cached_length + query_length
    first = min(start, stop)
    gap = 0 if window < 0 else max(0, cached_length + 1 - window - (first + sinks))
    return first, stop - first - gap, gap


@lru_cache(maxsize=64)  # asked by every layer of a step
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
        query_lengths, cached_lengths: per sequence. Of sequences with at most 8 new tokens the second is not looked at.
        starts: per sequence, the first visible cached token.
        short, window, sinks: as in :func:`is_absorbed`.
        max_expanded_tokens: cached tokens expanded at a time; one sequence's query counts as fitting.
    """
    spans = [
        seen_tokens(*sequence, window, sinks) for sequence in zip(query_lengths, cached_lengths, starts, strict=True)
    ]
    *offset, tokens = accumulate(query_lengths, initial=0)
    forms = [
        _form(*sequence, short, max_expanded_tokens, window, sinks)
        for sequence in zip(query_lengths, cached_lengths, spans, strict=True)
    ]

    def is_alike(first: int, stop: int) -> bool:
        return query_lengths[stop] == query_lengths[first] and stop - first < MAX_GROUP

    def fits(first: int, stop: int) -> bool:
        return sum(seen for _, seen, _ in spans[first : stop + 1]) <= max_expanded_tokens

    groups = [
        Group(query_lengths[run[0]], tuple(run), (0,) * len(run), offset[run[0]])
        for run in _runs(forms, "decode", is_alike)
    ]
    size = MAX_DECODE_QUERY_LENGTH
    pieces = [
        (sequence, min(first, query_lengths[sequence] - size))  # the last piece overlaps the one before
        for sequence, kind in enumerate(forms)
        if kind == "pieces"
        for first in range(0, query_lengths[sequence], size)
    ]
    for begin in range(0, len(pieces), MAX_GROUP):
        rows, first_query = zip(*pieces[begin : begin + MAX_GROUP], strict=True)
        groups.append(Group(size, rows, first_query, -1))
    waves = [
        _wave(run.start, run.stop, offset, query_lengths, spans, max_expanded_tokens)
        for run in _runs(forms, "expanded", fits)
    ]
    return BatchLayout(tuple(groups), tuple(waves), tokens)


def _form(
    length: int, cached: int, span: tuple[int, int, int], short: int, max_expanded_tokens: int, window: int, sinks: int
) -> str:
    """Form of a sequence's queries: "none", "decode", "pieces" or "expanded"."""
    if length <= MAX_DECODE_QUERY_LENGTH:
        return "decode" if length else "none"
    seen = span[1]
    in_chunks = seen > max(max_expanded_tokens, length)  # and they know no window
    absorbed = is_absorbed(length, cached if window < 0 else seen - length, short, window, sinks)
    return "pieces" if absorbed or (in_chunks and window >= 0) else "expanded"


def _runs(forms: Sequence[str], form: str, joins: Callable[[int, int], bool]) -> Iterator[range]:
    """Consecutive sequences of a form, as many as ``joins(the run's first, the next one)`` lets together."""
    first = None
    for sequence, mine in [*enumerate(forms), (len(forms), "")]:
        if first is not None and (mine != form or not joins(first, sequence)):
            yield range(first, sequence)
            first = None
        if mine == form and first is None:
            first = sequence


def _wave(
    first: int,
    stop: int,
    offset: list[int],
    query_lengths: tuple[int, ...],
    spans: Sequence[tuple[int, int, int]],
    max_expanded_tokens: int,
) -> Wave:
    queries = query_lengths[first:stop]
    begins, lengths, gaps = zip(*spans[first:stop], strict=True)
    chunks: list[Chunk] = []
    if stop - first == 1 and lengths[0] > max(max_expanded_tokens, queries[0]):
        end = begins[0] + lengths[0]
        last = end - max(max_expanded_tokens, queries[0])
        for begin in range(begins[0], last, max_expanded_tokens):
            chunks.append(Chunk((begin,), (min(max_expanded_tokens, last - begin),), False))
        chunks.append(Chunk((last,), (end - last,), True))
    else:
        chunks.append(Chunk(begins, lengths, True, gaps if any(gaps) else ()))
    return Wave(first, stop, offset[first], queries, tuple(chunks))
