"""What split-KV decode kernels take, whatever the op, and what a GPU gives them. Arithmetic only."""

from __future__ import annotations

DTYPES = ("bfloat16", "float16")
MAX_HEADS = 128
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
    """Bytes of shared memory a block may use on a compute capability (90 for Hopper); 99 KiB if unknown."""
    return SHARED_MEMORY.get(capability, 101376)
