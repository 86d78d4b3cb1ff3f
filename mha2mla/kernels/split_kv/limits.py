"""What split-KV decode kernels take, whatever the op, and what a GPU gives them. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from mha2mla.kernels.split_kv.tiling import SEQLENS_Q

DTYPES = ("bfloat16", "float16")
MAX_HEADS = 128
MERGED_ROWS = 8  # B S_q at most, where the merge goes through a map a head: what a matrix instruction has
MAX_SPLITS = 512  # partials of one sequence that the combine holds weights for; CTAs are never more

# Shared memory a block may use, bytes, by compute capability (CUDA C++ programming guide, "Technical Specifications").
SHARED_MEMORY = {
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
    121: 101376,
}


def shared_memory_limit(capability: int) -> int:
    """Bytes of shared memory a block may use on a compute capability (90 for Hopper); 99 KiB if unknown.

    Raises:
        ValueError: no TileLang kernel runs there.
    """
    if capability < 80:
        raise ValueError(f"the GPU has compute capability {capability / 10}; TileLang kernels need 8.0")
    return SHARED_MEMORY.get(capability, 101376)


def refusals(shape: Any) -> Iterator[tuple[bool, str]]:
    """(whether it fits, what is wrong if not) of what every op's kernels ask of a shape: its ``heads``, ``page_size``,
    ``seqlen_q`` and ``dtype``."""
    yield shape.dtype in DTYPES, f"dtype is {shape.dtype}; TileLang kernels take {' and '.join(DTYPES)}"
    yield (
        shape.heads <= MAX_HEADS,
        f"num_attention_heads is {shape.heads}; TileLang kernels take at most {MAX_HEADS}",
    )
    yield (
        shape.page_size >= 16 and shape.page_size & (shape.page_size - 1) == 0,
        f"page_size is {shape.page_size}; TileLang kernels take powers of two from 16",
    )
    yield (
        1 <= shape.seqlen_q <= SEQLENS_Q[-1],
        f"seqlen_q is {shape.seqlen_q}; decode kernels take 1 to {SEQLENS_Q[-1]} new tokens (longer queries are"
        " prefill)",
    )


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
