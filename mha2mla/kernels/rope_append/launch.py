"""Compiles the append kernel once per static shape, and launches it on torch's current stream."""

from __future__ import annotations

import math
from functools import cache

from torch import Tensor

from mha2mla.kernels.compilation import EXACT_PASS_CONFIGS, compile_for
from mha2mla.kernels.devices import capability, dtype_name, on_device
from mha2mla.kernels.rope_append.kernel import make_rope_append
from mha2mla.kernels.rope_append.quantize_kernel import make_quantize_rows
from mha2mla.kernels.rope_append.with_maps import make_append_and_map

THREADS = 128  # of a block


@cache
def compile_rope_append(major_minor: int, **static):
    """The compiled kernel; arguments as ``make_rope_append``'s. One compilation serves every N and P."""
    return compile_for(make_rope_append(**static), major_minor, EXACT_PASS_CONFIGS)


@cache
def compile_append_and_map(major_minor: int, **static):
    """The compiled kernel; arguments as ``make_append_and_map``'s."""
    return compile_for(make_append_and_map(**static), major_minor, EXACT_PASS_CONFIGS)


@cache
def compile_quantize_rows(major_minor: int, **static):
    """The compiled kernel; arguments as ``make_quantize_rows``'s."""
    return compile_for(make_quantize_rows(**static), major_minor, EXACT_PASS_CONFIGS)


def launch_quantize_rows(rows: Tensor, row_cache: Tensor, row_scale: Tensor, slots: Tensor) -> None:
    """Run the kernel: rows [N, width] to slots [N] of row_cache [P, page, width] (e4m3) and row_scale [P, page]."""
    if rows.numel() == 0 or row_cache.numel() == 0:
        return
    with on_device(rows.device):
        kernel = compile_quantize_rows(
            capability(rows.device), row_width=rows.shape[1], page_size=row_cache.shape[1], dtype=dtype_name(rows.dtype)
        )
        kernel(rows.contiguous(), slots.contiguous(), row_cache, row_scale)


def with_dense_rows(x: Tensor) -> Tensor:
    """``x`` itself where its last dimension is dense: parts of one projection are read where they lie."""
    return x if x.stride(-1) == 1 else x.contiguous()


def vector_of(*tensors: Tensor) -> int:
    """Numbers that may be moved at a time, at most 16 bytes: pointers and strides are multiples of so many."""
    size = tensors[0].element_size()
    places = [tensor.data_ptr() for tensor in tensors]
    strides = [stride * size for tensor in tensors for stride in tensor.stride()[:-1]]
    return max(1, math.gcd(16, *places, *strides) // size)


def launch_rope_append(
    rows: Tensor,
    keys: Tensor,
    query: Tensor,
    row_cache: Tensor,
    rope_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    inv_freq: Tensor,
    out: Tensor,
    attention_scaling: float,
    interleaved: bool,
) -> None:
    """Run the kernel; shapes as in :func:`mha2mla.kernels.mla_append`. What is empty (queries, keys, rows, a cache) is
    left out: rows alone are written, or keys alone, or nothing and only queries are rotated."""
    tokens, heads, rope = query.shape
    heads = heads if rope else 0
    groups = keys.shape[1] if keys.numel() and rope_cache.numel() else 0
    width = rows.shape[1] if rows.numel() and row_cache.numel() else 0
    if tokens == 0 or not (heads or groups or width):
        return
    if not rope:  # nothing to turn, but the kernel has a table all the same
        rope, inv_freq = 8, inv_freq.new_zeros(1, 4)
    pages, page_size = row_cache.shape[:2] if width else rope_cache.shape[:2] if groups else (1, 1)
    with on_device(query.device):
        nothing = query.new_empty(tokens, 1, rope)  # stands in for what is left out
        out = out if heads else nothing
        query = with_dense_rows(query) if heads else nothing
        keys = with_dense_rows(keys) if groups else nothing
        rows = with_dense_rows(rows) if width else nothing[:, 0, :1]
        if groups:
            rope_cache = rope_cache.flatten(2)
        else:  # only its shape is looked at, which must agree with the other cache's
            rope_cache = nothing.as_strided((pages, page_size, rope), (0, 0, 1) if width else (rope, rope, 1))
        row_cache = row_cache if width else rope_cache[:, :, :1]
        # With a table a head a token's angles occupy a block, and four tokens' make it wait.
        alone = inv_freq.numel() >= THREADS
        kernel = compile_rope_append(
            capability(query.device),
            block_tokens=1 if alone else 4,
            dependent=capability(query.device) >= 90,
            heads=heads,
            num_rope_heads=groups,
            row_width=width,
            qk_rope_head_dim=rope,
            num_tables=inv_freq.shape[0],
            page_size=page_size,
            dtype=dtype_name(query.dtype),
            interleaved=interleaved,
            vector=vector_of(rows, keys, query, row_cache, rope_cache, out),
        )
        kernel(
            rows, keys, query, positions.contiguous(), slots.contiguous(), inv_freq.contiguous(), row_cache, rope_cache,
            out, attention_scaling,
        )  # fmt: skip


def launch_append_and_map(
    rows: Tensor,
    keys: Tensor,
    query: Tensor,
    row_cache: Tensor,
    rope_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    inv_freq: Tensor,
    out: Tensor,
    attention_scaling: float,
    x: Tensor,
    maps: Tensor,
    mapped: Tensor,
) -> None:
    """Run the kernel; shapes as in :func:`mha2mla.kernels.rope_append.api.append_and_map`. Without keys, or a cache of
    them, rows and queries are all."""
    _, heads, rope = query.shape
    groups = keys.shape[1] if keys.numel() and rope_cache.numel() else 0
    pages, page_size = row_cache.shape[:2]
    with on_device(query.device):
        query, rows = with_dense_rows(query), with_dense_rows(rows)
        keys = with_dense_rows(keys) if groups else query[:, :1]
        rope_cache = rope_cache.flatten(2) if groups else query.as_strided((pages, page_size, rope), (0, 0, 1))
        kernel = compile_append_and_map(
            capability(query.device),
            heads=heads,
            num_rope_heads=groups,
            row_width=rows.shape[1],
            qk_rope_head_dim=rope,
            num_tables=inv_freq.shape[0],
            page_size=page_size,
            maps=len(maps),
            inner=x.shape[2],
            dtype=dtype_name(query.dtype),
            vector=vector_of(rows, keys, query, row_cache, rope_cache, out),
        )
        kernel(
            rows, keys, query, positions.contiguous(), slots.contiguous(), inv_freq.contiguous(), row_cache, rope_cache,
            out, attention_scaling, with_dense_rows(x), maps, mapped,
        )  # fmt: skip
