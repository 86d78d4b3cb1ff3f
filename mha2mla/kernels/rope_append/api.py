"""The public append and rotation ops: validation, dispatch, and their torch.library schema."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.devices import runs_compiled
from mha2mla.kernels.layouts import check_float, check_like
from mha2mla.kernels.mla_decode.quantization import quantize_latent
from mha2mla.kernels.registration import register

MAX_SLOTS = 2**31 - 1  # slots are int32, and so is their number in kernels


def mla_append(
    latent: Tensor,
    k_pe: Tensor | None,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    inv_freq: Tensor,
    *,
    latent_scale: Tensor | None = None,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Rotates k_pe and q_pe of new tokens, and writes latent and rotated k_pe into the paged cache.

    Args:
        latent: [N, d_c] of the new tokens of all sequences, one behind the other.
        k_pe: [N, G, d_r] before RoPE; G or d_r may be 0, and then only latents are written. None, with ``rope_cache``,
            where nothing rotary is cached (:class:`mha2mla.kernels.LatentRope`).
        q_pe: [N, H, d_r] before RoPE; head h turns by the frequencies of rope head h // (H / G).
        latent_cache: [P, page, d_c], written; float8_e4m3fn to store latents as e4m3 numbers.
        rope_cache: [P, page, G, d_r], written; a token's rope heads side by side.
        positions: [N] int32 of the tokens.
        slots: [N] int32, page · page_size + offset (:func:`slots_of`); a slot that lies outside the cache, such as -1,
            writes nothing, so rows that pad a CUDA graph touch no live page.
        inv_freq: [G, d_r / 2] or [1, d_r / 2] float32, radians per token. Zero leaves a pair alone.
        latent_scale: [P, page] float32, written: the scale of each e4m3 latent, as :func:`quantize_latent` chooses it
            (largest number / 448; a row with a NaN or an infinity becomes NaN). With an e4m3 latent_cache only.
        attention_scaling: factor on cos and sin (YaRN, longrope).
        interleaved: pairs are neighbours; else the halves of d_r (Llama).
        backend: "tilelang", "reference", or None: TileLang for CUDA tensors in float32, bfloat16 and float16.

    Returns:
        Rotated q_pe [N, H, d_r], a new tensor: float32 arithmetic, rounded once.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    names = ("latent", "k_pe", "q_pe", "latent_cache", "rope_cache")
    if (k_pe is None) != (rope_cache is None):
        missing = "k_pe" if k_pe is None else "rope_cache"
        raise ValueError(f"{missing} is None; expected both k_pe and rope_cache, or neither")
    if k_pe is None:  # no rope head
        k_pe = q_pe[:, :0]
        rope_cache = q_pe.new_empty(*latent_cache.shape[:2], 0, q_pe.shape[-1])
    data, codes = (latent, k_pe, q_pe, latent_cache, rope_cache), latent_cache.dtype == torch.float8_e4m3fn
    if codes != (latent_scale is not None):
        raise ValueError(
            f"latent_scale is {'None' if latent_scale is None else 'given'} for a latent_cache of {latent_cache.dtype};"
            " expected one exactly where latent_cache is torch.float8_e4m3fn"
        )
    if not codes:
        return _append(data, positions, slots, inv_freq, attention_scaling, interleaved, backend, names)
    if latent_scale.shape != latent_cache.shape[:2]:
        raise ValueError(f"latent_scale.shape is {tuple(latent_scale.shape)}; expected {list(latent_cache.shape[:2])}")
    check_like("latent_scale", latent_scale, q_pe, "q_pe", torch.float32)
    if latent_scale.stride(1) != 1 and latent_scale.shape[1] > 1:
        raise ValueError(f"latent_scale.stride(1) is {latent_scale.stride(1)}; expected 1")
    _check(data, positions, slots, inv_freq, names, torch.float8_e4m3fn)
    compiled = runs_compiled(backend, q_pe.device, q_pe.dtype)
    torch.ops.mha2mla.quantize_append(latent, latent_cache, latent_scale, slots, compiled)
    # The rotation's kernel has rows to write beside its keys: none here, [N, 0] into [P, page, 0].
    return torch.ops.mha2mla.rope_append(
        latent[:, :0], k_pe, q_pe, rope_cache.flatten(2)[:, :, :0], rope_cache, positions, slots, inv_freq,
        attention_scaling, interleaved, compiled,
    )  # fmt: skip


def gqa_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    inv_freq: Tensor,
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """The same for an MHA/GQA model: rotates query and key, writes rotated key and value into the paged cache.

    Args:
        query: [N, H, d_k] before RoPE.
        key: [N, h_kv, d_k] before RoPE.
        value: [N, h_kv, d_v].
        key_cache: [P, page, h_kv, d_k], written; heads of a token side by side, as in ``value_cache``.
        value_cache: [P, page, h_kv, d_v], written.
        inv_freq: [1, d_k / 2] or [h_kv, d_k / 2] float32; zeros for what the model does not rotate.
        positions, slots, attention_scaling, interleaved, backend: as in :func:`mla_append`.

    Returns:
        Rotated query [N, H, d_k].

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    names = ("value", "key", "query", "value_cache", "key_cache")
    layouts = (("value", value, "[N, h_kv, d_v]"), ("value_cache", value_cache, "[P, page, h_kv, d_v]"))
    for name, tensor, layout in layouts:
        if tensor.ndim != layout.count(",") + 1:
            raise ValueError(f"{name}.shape is {tuple(tensor.shape)}; expected {layout}")
    heads, width = value_cache.shape[2:]
    if heads > 1 and value_cache.stride(2) != width:
        raise ValueError(f"value_cache.stride(2) is {value_cache.stride(2)}; expected {width}: heads side by side")
    data = (value.flatten(1), key, query, value_cache.flatten(2), key_cache)
    return _append(data, positions, slots, inv_freq, attention_scaling, interleaved, backend, names)


def rope_rotate(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """RoPE (arXiv 2104.09864) alone: x [N, heads, d_r] at positions [N] int32 by inv_freq [G, d_r / 2], G | heads.

    Other arguments and errors as in :func:`mla_append`.

    Returns:
        [N, heads, d_r], a new tensor.
    """
    _check_rotation("x", x, x, inv_freq)
    _check_index("positions", positions, x)
    compiled = runs_compiled(backend, x.device, x.dtype)
    rows, keys = x.new_empty(len(x), 0), x[:, :0]
    caches = x.new_empty(0, 1, 0), x.new_empty(0, 1, 0, x.shape[2])
    return torch.ops.mha2mla.rope_append(
        rows, keys, x, *caches, positions, positions, inv_freq, attention_scaling, interleaved, compiled
    )


def slots_of(block_table: Tensor, sequences: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Slots [N] int32 of tokens at ``positions`` [N] of ``sequences`` [N] (rows of ``block_table`` [B, max_pages]).

    -1 where the sequence is negative, the position lies outside the table, the table has no page there, or the slot
    would be more than an int32 holds. Everything stays on the device.
    """
    page, max_pages = torch.div(positions, page_size, rounding_mode="floor"), block_table.shape[1]
    known = (sequences >= 0) & (positions >= 0) & (page < max_pages)
    if block_table.numel() == 0:
        return torch.full_like(positions, -1, dtype=torch.int32)
    entry = block_table[sequences.clamp_min(0).long(), page.clamp(0, max_pages - 1).long()]
    slot = entry.long() * page_size + positions % page_size
    return torch.where(known & (entry >= 0) & (slot < MAX_SLOTS), slot, -1).int()


def _append(
    data: tuple[Tensor, ...], positions: Tensor, slots: Tensor, inv_freq: Tensor, attention_scaling: float,
    interleaved: bool, backend: str | None, names: tuple[str, ...],
) -> Tensor:  # fmt: skip
    query = data[2]
    _check(data, positions, slots, inv_freq, names, query.dtype)
    compiled = runs_compiled(backend, query.device, query.dtype)
    return torch.ops.mha2mla.rope_append(*data, positions, slots, inv_freq, attention_scaling, interleaved, compiled)


def _check(
    data: tuple[Tensor, ...], positions: Tensor, slots: Tensor, inv_freq: Tensor, names: tuple[str, ...],
    row_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raises ValueError naming the argument. ``data`` and their ``names``: rows, keys, query, row_cache, rope_cache, as
    the op takes them; ``row_dtype`` is what row_cache must have."""
    rows, keys, query, row_cache, rope_cache = data
    row_name, key_name, query_name, row_cache_name, rope_cache_name = names
    _check_rotation(query_name, query, query, inv_freq)
    _check_rotation(key_name, keys, query, inv_freq)
    tokens, groups, rope = keys.shape
    if query.shape[0] != tokens or query.shape[2] != rope or query.shape[1] % max(groups, 1):
        raise ValueError(
            f"{query_name}.shape is {tuple(query.shape)}; expected [{tokens}, a multiple of {groups}, {rope}]"
        )
    if rows.ndim != 2 or rows.shape[0] != tokens:
        raise ValueError(f"{row_name}.shape is {tuple(rows.shape)}; expected {tokens} rows, as {key_name}")
    pages, page = (*row_cache.shape, 0, 0)[:2]
    if pages * page > MAX_SLOTS:
        raise ValueError(f"{row_cache_name}.shape is {tuple(row_cache.shape)}; expected at most {MAX_SLOTS} tokens")
    for name, cache, shape in (
        (row_cache_name, row_cache, (pages, page, rows.shape[1])),
        (rope_cache_name, rope_cache, (pages, page, groups, rope)),
    ):
        if cache.shape != shape:
            raise ValueError(f"{name}.shape is {tuple(cache.shape)}; expected {shape}")
        dense = cache.stride(-1) == 1 and (cache.ndim < 4 or groups < 2 or cache.stride(2) == rope)
        if cache.numel() and not dense:
            raise ValueError(f"{name}.stride() is {cache.stride()}; expected the numbers of a token side by side")
    for name, tensor, dtype in (
        (row_name, rows, query.dtype),
        (row_cache_name, row_cache, row_dtype),
        (rope_cache_name, rope_cache, query.dtype),
    ):
        check_like(name, tensor, query, query_name, dtype)
    _check_index("positions", positions, query)
    _check_index("slots", slots, query)


def _check_rotation(name: str, x: Tensor, like: Tensor, inv_freq: Tensor) -> None:
    if x.ndim != 3 or x.shape[2] % 2:
        raise ValueError(f"{name}.shape is {tuple(x.shape)}; expected [N, heads, d_r] with an even d_r")
    check_float(f"{name}.dtype", x.dtype)
    check_like(name, x, like, "the query")
    tables = inv_freq.shape[0] if inv_freq.ndim else 0
    fits = x.shape[1] % tables == 0 if tables else not x.numel()
    if inv_freq.ndim != 2 or inv_freq.shape[1] != x.shape[2] // 2 or not fits:
        raise ValueError(
            f"inv_freq.shape is {tuple(inv_freq.shape)}; expected [a divisor of {x.shape[1]}, {x.shape[2] // 2}]"
        )
    check_like("inv_freq", inv_freq, x, name, torch.float32)


def _check_index(name: str, index: Tensor, like: Tensor) -> None:
    if index.shape != like.shape[:1] or index.dtype != torch.int32 or index.device != like.device:
        raise ValueError(
            f"{name} is {index.dtype} {tuple(index.shape)} on {index.device}; expected torch.int32"
            f" {tuple(like.shape[:1])} on {like.device}"
        )


def _rope_append(
    rows: Tensor, keys: Tensor, query: Tensor, row_cache: Tensor, rope_cache: Tensor, positions: Tensor, slots: Tensor,
    inv_freq: Tensor, attention_scaling: float, interleaved: bool, compiled: bool,
) -> Tensor:  # fmt: skip
    if compiled:
        from mha2mla.kernels.rope_append.launch import launch_rope_append

        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        launch_rope_append(
            rows, keys, query, row_cache, rope_cache, positions, slots, inv_freq, out, attention_scaling, interleaved
        )
        return out

    from mha2mla.kernels.rope_append.reference import append_reference, rotate_reference

    def rotate(x: Tensor) -> Tensor:
        return rotate_reference(x, positions, inv_freq, attention_scaling=attention_scaling, interleaved=interleaved)

    append_reference(rows, rotate(keys), row_cache, rope_cache, slots)
    return rotate(query)


def _quantize_append(rows: Tensor, row_cache: Tensor, row_scale: Tensor, slots: Tensor, compiled: bool) -> None:
    if compiled:
        from mha2mla.kernels.rope_append.launch import launch_quantize_rows

        launch_quantize_rows(rows, row_cache, row_scale, slots)
    elif rows.numel():
        from mha2mla.kernels.rope_append.reference import write_rows

        codes, scale = quantize_latent(rows)
        # index and where know no e4m3: its bytes do
        write_rows(((row_cache.view(torch.uint8), codes.view(torch.uint8)), (row_scale, scale)), slots)


register(
    "quantize_append(Tensor rows, Tensor(a!) row_cache, Tensor(b!) row_scale, Tensor slots, bool compiled) -> ()",
    _quantize_append,
    lambda *_: None,
)
register(
    "rope_append(Tensor rows, Tensor keys, Tensor query, Tensor(a!) row_cache, Tensor(b!) rope_cache, Tensor positions,"
    " Tensor slots, Tensor inv_freq, float attention_scaling, bool interleaved, bool compiled) -> Tensor",
    _rope_append,
    lambda rows, keys, query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
)
