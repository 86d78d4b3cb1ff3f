"""The public append ops: validation, dispatch, plain torch, and their torch.library schema; rotary keys of latents."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.mla_decode.quantization import (
    CODES,
    KEY_CODES,
    dequantize_latent,
    holds_codes,
    quantize_keys,
    quantize_latent,
)
from mha2mla.kernels.ops import (
    Argument,
    argument_error,
    capability,
    check_tensors,
    in_plain_eager_mode,
    register_kernel,
    runs_compiled,
)
from mha2mla.kernels.skinny_linear.selection import serves_few_tokens

MAX_SLOTS = 2**31 - 1  # slots are int32, and so is their number in kernels


_INV_FREQ = Argument("inv_freq", "tables pairs", torch.float32)
_POSITIONS, _SLOTS = (Argument(name, "N", torch.int32) for name in ("positions", "slots"))
_MLA = {  # by whether rotary keys are int8
    codes: (
        Argument("q_pe", "N H d_r"),
        Argument("k_pe", "N G d_r"),
        _INV_FREQ,
        Argument("latent", "N d_c"),
        Argument("rope_cache", "P page (G d_r)", KEY_CODES if codes else None),
        _POSITIONS,
        _SLOTS,
        *(Argument(name, "P (page)", torch.float32, optional=True) for name in ("latent_scale", "rope_scale")),
    )
    for codes in (False, True)
}
_LATENT = {codes: Argument("latent_cache", "P page (d_c)", CODES if codes else None) for codes in (False, True)}
_GQA = (
    Argument("query", "N H d_k"),
    Argument("key", "N h_kv d_k"),
    _INV_FREQ,
    Argument("value", "N h_kv d_v"),
    Argument("key_cache", "P page (h_kv d_k)"),
    _POSITIONS,
    _SLOTS,
    Argument("value_cache", "P page (h_kv d_v)"),
)


@dataclass(frozen=True, eq=False)
class LatentRope:
    """Parameters that turn a cached latent ``c[t]`` into its rotary key, ``k_pe[t] = m R(t) (W_KR c[t] + b_KR)``.

    One rope head serves all query heads. R(t) turns the pairs (j, j + d_r / 2) by ``t * inv_freq[j]``; m is
    ``scaling``, and 1 for pairs whose frequency is zero (dims that the source does not rotate).

    Attributes:
        weight: W_KR [d_r, d_c], in the dtype of the cache (of the queries, where latents are e4m3).
        bias: b_KR [d_r], in the dtype of ``weight``.
        inv_freq: [d_r / 2] float32, radians per token.
        scaling: m, the attention factor of YaRN and longrope; else 1.
        page_offsets: [B, max_pages] int32, added to a token's place in its sequence for its rotary position, page by
            page of the block table; None: 0.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """

    weight: Tensor
    bias: Tensor
    inv_freq: Tensor
    scaling: float = 1.0
    page_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.dim() != 2 or self.weight.shape[0] % 2:
            raise argument_error("rope.weight.shape", tuple(self.weight.shape), "[d_r, d_c] with an even d_r")
        width = self.weight.shape[0]
        for name, tensor, size in (("bias", self.bias, width), ("inv_freq", self.inv_freq, width // 2)):
            if tensor.dim() != 1 or tensor.shape[0] != size:
                raise argument_error(f"rope.{name}.shape", tuple(tensor.shape), f"[{size}] for {width} rotary dims")
        if not isinstance(self.scaling, (int, float)) or not 0 < self.scaling < math.inf:
            raise argument_error("rope.scaling", repr(self.scaling), "a positive finite number")


def rotary_keys(latent: Tensor, rope: LatentRope, positions: Tensor) -> Tensor:
    """The rotary keys of latents at their positions: the definition, in plain torch, differentiable.

    Args:
        latent: [..., d_c], any floating dtype.
        rope: its ``page_offsets`` are not looked at.
        positions: [...] integers, broadcast against the latents': rotary positions, offsets included.

    Returns:
        k_pe [..., d_r] in the dtype of ``latent``. Angles, cos and sin are float64 (a float32 angle at position 131,072
        is off by up to 4e-3); products and rotation float64 for float64 latents, float32 for all others.
    """
    dtype = torch.float64 if latent.dtype == torch.float64 else torch.float32
    raw = F.linear(latent.to(dtype), rope.weight.to(dtype), rope.bias.to(dtype))
    return rotate_keys(raw, rope.inv_freq, rope.scaling, positions).to(latent.dtype)


def rotate_keys(raw: Tensor, inv_freq: Tensor, scaling: float, positions: Tensor) -> Tensor:
    """Rotates W_KR c + b_KR, ``raw`` [..., d_r], at its ``positions``: the second half of :func:`rotary_keys`.

    Args:
        inv_freq, scaling: as in :class:`LatentRope`.
        positions: [...] integers, broadcast against those of ``raw``.

    Returns:
        [..., d_r] in the dtype of ``raw``; products float64 for float64, float32 for all others.
    """
    dtype = torch.float64 if raw.dtype == torch.float64 else torch.float32
    frequency = inv_freq.to(torch.float64)
    angle = positions[..., None].to(torch.float64) * frequency
    factor = torch.ones_like(frequency).masked_fill(frequency != 0, scaling)
    cos, sin = (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
    first, second = raw.to(dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(raw.dtype)


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
    rope_scale: Tensor | None = None,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Rotates k_pe and q_pe of new tokens, and writes latent and rotated k_pe into the paged cache.

    Args:
        latent: [N, d_c] of the new tokens of all sequences, concatenated.
        k_pe: [N, G, d_r] before RoPE; G or d_r may be 0, and then only latents are written. None, with ``rope_cache``,
            where nothing rotary is cached (:class:`mha2mla.kernels.LatentRope`).
        q_pe: [N, H, d_r] before RoPE; head h turns by the frequencies of rope head h // (H / G).
        latent_cache: [P, page, d_c], written; float8_e4m3fn to store latents as e4m3 numbers.
        rope_cache: [P, page, G, d_r], written; a token's rope heads side by side. With ``rope_scale`` int8.
        positions: [N] int32 of the tokens.
        slots: [N] int32, page · page_size + offset (:func:`slots_of`); a slot that lies outside the cache, such as -1,
            writes nothing, so rows that pad a CUDA graph touch no live page.
        inv_freq: [G, d_r / 2] or [1, d_r / 2] float32, radians per token. Zero leaves a pair alone.
        latent_scale: [P, page] float32, written: the scale of each e4m3 latent, as :func:`quantize_latent` chooses it
            (largest number / 448; a row with a NaN or an infinity becomes NaN). With an e4m3 latent_cache only.
        rope_scale: [P, page] float32, written: that of each rotated key, once rounded to the dtype of k_pe, by
            :func:`quantize_keys` (largest number / 127); of G = 1. k_pe is to be W_KR c without b_KR
            (:func:`kept_keys`).
        attention_scaling: factor on cos and sin (YaRN, longrope).
        interleaved: pairs are neighbours; else the halves of d_r (Llama).
        backend: "tilelang", "reference", or None: TileLang for CUDA tensors in float32, bfloat16 and float16.

    Returns:
        Rotated q_pe [N, H, d_r], a new tensor: float32 arithmetic, rounded once.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    if (k_pe is None) != (rope_cache is None):
        missing = "k_pe" if k_pe is None else "rope_cache"
        raise ValueError(f"{missing} is None; expected both k_pe and rope_cache, or neither")
    if k_pe is None:
        k_pe, rope_cache = q_pe[:, :0], q_pe.new_empty(*latent_cache.shape[:2], 0, q_pe.shape[-1])
    codes = (latent_scale is not None or latent_cache.dtype == CODES) and holds_codes(latent_cache, latent_scale)
    tensors = (q_pe, k_pe, inv_freq, latent, rope_cache, positions, slots, latent_scale, rope_scale, latent_cache)
    _check((*_MLA[rope_scale is not None], _LATENT[codes]), *tensors)
    _check_one_key(k_pe, rope_scale)
    if codes and rope_scale is not None:
        raise argument_error("rope_scale", "given for latents that are codes", "None, or latents of the queries' dtype")
    compiled = runs_compiled(backend, q_pe.device, q_pe.dtype)
    rows, row_cache = latent, latent_cache
    if codes:  # the rotation's kernel has rows to write beside its keys: none then, [N, 0] into [P, page, 0]
        _quantize(latent, latent_cache, latent_scale, slots, compiled)
        rows, row_cache = latent[:, :0], rope_cache.flatten(2)[:, :, :0]
    return _append_op(
        rows, k_pe, q_pe, row_cache, rope_cache, rope_scale, positions, slots, inv_freq, attention_scaling, interleaved,
        compiled,
    )  # fmt: skip


def _check_one_key(k_pe: Tensor, rope_scale: Tensor | None) -> None:
    if rope_scale is not None and k_pe.shape[1] != 1:
        raise argument_error("k_pe.shape[1]", k_pe.shape[1], "1 with rope_scale")


def append_w_uk(
    latent: Tensor,
    k_pe: Tensor | None,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    inv_freq: Tensor,
    q_nope: Tensor,
    k_up: Tensor | None,
    *,
    rope_scale: Tensor | None = None,
    attention_scaling: float = 1.0,
) -> tuple[Tensor, Tensor] | None:
    """:func:`mla_append` and queries through W_UK by one kernel, of few tokens.

    Args:
        inv_freq: as of :func:`mla_append`; as ``k_up`` not written by the kernel that is launched before, which may
            still run.
        q_nope: [N, H, d_n].
        k_up: W_UK [h_kv, d_n, d_c].
        latent, k_pe, q_pe, latent_cache, rope_cache, positions, slots, rope_scale, attention_scaling: as of
            :func:`mla_append`.

    Returns:
        Rotated q_pe [N, H, d_r] and q_nope through W_UK [N, H, d_c]; None, and nothing is written, where no kernel does
        both: on a GPU before sm_90, for e4m3 latents, with gradients, under a compiler, or where not
        :func:`serves_few_tokens`.

    Raises:
        ValueError: as :func:`mla_append`.
    """
    if (
        k_up is None
        or torch.is_grad_enabled()
        or not in_plain_eager_mode(q_nope)
        or not serves_few_tokens(q_nope, k_up)
        or capability(q_nope.device) < 90
        or latent_cache.dtype != q_nope.dtype
        or not (q_pe.numel() and latent.numel() and latent_cache.numel())
        or k_up.shape[2] != latent.shape[1]
        or (k_pe is None) != (rope_cache is None)
    ):
        return None
    if k_pe is None:
        k_pe, rope_cache = q_pe[:, :0], q_pe.new_empty(*latent_cache.shape[:2], 0, q_pe.shape[-1])
    tensors = (q_pe, k_pe, inv_freq, latent, rope_cache, positions, slots, None, rope_scale, latent_cache)
    _check((*_MLA[rope_scale is not None], _LATENT[False]), *tensors)
    _check_one_key(k_pe, rope_scale)
    if q_nope.shape[:2] != q_pe.shape[:2]:
        raise argument_error("q_nope.shape", tuple(q_nope.shape), f"[{q_pe.shape[0]}, {q_pe.shape[1]}, d_n], by q_pe")

    from mha2mla.kernels.rope_append.kernel import launch_append_w_uk

    out = torch.empty_like(q_pe, memory_format=torch.contiguous_format)
    mapped = q_nope.new_empty(*q_nope.shape[:2], k_up.shape[2])
    caches = (latent_cache, rope_cache, rope_scale)
    call = (latent, k_pe, q_pe, *caches, positions, slots, inv_freq, attention_scaling, False, out)
    launch_append_w_uk(call, q_nope, k_up, mapped)
    return out, mapped


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
    """:func:`mla_append` of an MHA/GQA model: rotates query and key, writes rotated key and value into the paged cache.

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
    _check(_GQA, query, key, inv_freq, value, key_cache, positions, slots, value_cache)
    return _append_op(
        value.flatten(1), key, query, value_cache.flatten(2), key_cache, None, positions, slots, inv_freq,
        attention_scaling, interleaved, runs_compiled(backend, query.device, query.dtype),
    )  # fmt: skip


def compute_rotary_keys(latent: Tensor, rope: LatentRope, positions: Tensor, *, backend: str | None = None) -> Tensor:
    """:func:`rotary_keys` of many tokens, without gradients, by one kernel in place of twenty; of float32 and of odd
    widths by a product and a rotation.

    Args:
        latent: [T, d_c].
        rope: as of :func:`rotary_keys`.
        positions: [T] int32.
        backend: as of :func:`mla_append`, whose float32 angles the kernel has.

    Returns:
        k_pe [T, d_r]; of plain torch with angles in float64.
    """
    if not runs_compiled(backend, latent.device, latent.dtype):
        return rotary_keys(latent, rope, positions)
    width, columns = rope.weight.shape
    if latent.dtype == rope.weight.dtype != torch.float32 and serves_widths(columns, width):
        return _keys_op(latent, rope.weight, rope.bias, positions, rope.inv_freq, rope.scaling, True)
    if latent.dtype.itemsize == 2 and latent.dtype == rope.weight.dtype and latent.is_cuda:
        raw = torch.mm(latent, rope.weight.T, out_dtype=torch.float32).add_(rope.bias)  # products are exact in float32
    else:
        raw = F.linear(latent.float(), rope.weight.float(), rope.bias.float())
    return _rotate(raw, rope, positions).to(latent.dtype)


def serves_widths(columns: int, width: int) -> bool:
    """True where the kernel of :func:`compute_rotary_keys` takes latents of ``columns`` and keys of ``width`` numbers:
    tensor cores and 16-byte copies do, and the shared memory of every GPU."""
    return columns % 8 == 0 and width % 16 == 0 and width <= 128


def _rotate(raw: Tensor, rope: LatentRope, positions: Tensor) -> Tensor:
    """:func:`rotate_keys` of raw [T, d_r], float32 and contiguous, by the kernel."""
    return _rotation_op(raw, positions.contiguous(), rope.inv_freq.contiguous(), rope.scaling, True)


def kept_keys(
    codes: Tensor,
    scale: Tensor,
    rope: LatentRope,
    positions: Tensor,
    dtype: torch.dtype,
    *,
    backend: str | None = "reference",
) -> Tensor:
    """Rotary keys that are cached as integers, ``k_pe[t] = scale[t] codes[t] + m R(t) b_KR``, rounded once.

    Args:
        codes: [..., d_r], as :func:`mla_append` writes them of rotated W_KR c. scale: [...] float32.
        rope: bias b_KR, frequencies and m; others are not looked at.
        positions: [...] integers, broadcast against those of codes: rotary positions, offsets included.
        dtype: of the keys; arithmetic in float64 for that, else in float32.
        backend: as of :func:`compute_rotary_keys`, of positions [T] int32.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = rope.bias.to(wide).expand(*positions.shape, -1)
    if runs_compiled(backend, codes.device, dtype):
        bias = _rotate(bias.contiguous(), rope, positions)
    else:
        bias = rotate_keys(bias, rope.inv_freq, rope.scaling, positions)
    return (dequantize_latent(codes, scale, wide) + bias).to(dtype)


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


def _check(
    arguments: tuple[Argument, ...], query: Tensor, keys: Tensor, inv_freq: Tensor, *others: Tensor | None
) -> None:
    """Raises ValueError naming the argument; the last of ``others`` is the cache of rows."""
    sizes = check_tensors(arguments, (query, keys, inv_freq, *others))
    query_name, key_name = arguments[0].name, arguments[1].name
    tables = sizes["tables"]
    for name, x in ((query_name, query), (key_name, keys)):  # pairs, and frequencies for each head
        heads, width = x.shape[1:]
        if width % 2:
            raise argument_error(f"{name}.shape", tuple(x.shape), "[N, heads, d_r] with an even d_r")
        if sizes["pairs"] != width // 2 or (heads % tables if tables else x.numel()):
            raise argument_error("inv_freq.shape", tuple(inv_freq.shape), f"[a divisor of {heads}, {width // 2}]")
    groups = keys.shape[1]
    if query.shape[1] % max(groups, 1):
        raise argument_error(
            f"{query_name}.shape[1]", query.shape[1], f"a multiple of {groups}, the heads of {key_name}"
        )
    if sizes["P"] * sizes["page"] > MAX_SLOTS:
        was = tuple(others[-1].shape)
        raise argument_error(f"{arguments[-1].name}.shape", was, f"at most {MAX_SLOTS} tokens")


def rotate_reference(
    x: Tensor, positions: Tensor, inv_freq: Tensor, *, attention_scaling: float = 1.0, interleaved: bool = False
) -> Tensor:
    """RoPE (arXiv 2104.09864) of x [N, heads, d_r] at positions [N] by inv_freq [G, d_r / 2], G dividing heads.

    Angles are float32 products of position and frequency, as transformers' (float64 for float64 inputs); the result is
    rounded once, to the dtype of x. ``attention_scaling`` (YaRN, longrope) leaves pairs of frequency zero alone.
    """
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    arithmetic = torch.float64 if x.dtype == torch.float64 else torch.float32
    angle = positions.to(arithmetic)[:, None, None] * inv_freq.to(arithmetic)  # [N, G, d_r / 2]
    angle = angle.repeat_interleave(x.shape[1] // inv_freq.shape[0], dim=1)
    factor = torch.ones_like(inv_freq, dtype=arithmetic).masked_fill(inv_freq != 0, attention_scaling)
    factor = factor.repeat_interleave(x.shape[1] // inv_freq.shape[0], dim=0)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    wide = x.to(arithmetic)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


def write_rows(pairs: tuple[tuple[Tensor, Tensor], ...], slots: Tensor) -> None:
    """Writes new rows [N, ...] of each pair (cache [P, page, ...], rows) to slots [N]; a slot outside 0 … P · page − 1
    writes nothing. Reads no tensor on the host."""
    page = pairs[0][0].shape[1]
    capacity = pairs[0][0].shape[0] * page
    if capacity == 0 or not len(slots):
        return
    slots = slots.long()
    valid = (slots >= 0) & (slots < capacity)
    # Tokens without a slot rewrite what the first token with one writes; if there is none, what is there already.
    chosen = valid.long().argmax()
    source = torch.where(valid, torch.arange(len(slots), device=slots.device), chosen)
    slot = torch.where(valid, slots, slots.index_select(0, chosen[None]).clamp(0, capacity - 1))
    for cache, new in pairs:
        where = slot // page, slot % page
        keep = valid.any().expand(len(slots)).view(-1, *[1] * (new.ndim - 1))
        cache[where] = torch.where(keep, new[source], cache[where])


def _rope_append(
    rows: Tensor, keys: Tensor, query: Tensor, row_cache: Tensor, rope_cache: Tensor, rope_scale: Tensor | None,
    positions: Tensor, slots: Tensor, inv_freq: Tensor, attention_scaling: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    rotation = {"attention_scaling": attention_scaling, "interleaved": interleaved}
    keys = rotate_reference(keys, positions, inv_freq, **rotation)
    if rope_scale is None:
        write_rows(((row_cache, rows), (rope_cache, keys)), slots)
    else:
        write_rows(((row_cache, rows),), slots)
        if keys.numel():
            codes, scale = quantize_keys(keys)
            write_rows(((rope_cache, codes), (rope_scale, scale[:, 0])), slots)
    return rotate_reference(query, positions, inv_freq, **rotation)


def _quantize_append(rows: Tensor, row_cache: Tensor, row_scale: Tensor, slots: Tensor) -> None:
    if rows.numel():
        codes, scale = quantize_latent(rows)
        # index and where take no e4m3, but its bytes
        write_rows(((row_cache.view(torch.uint8), codes.view(torch.uint8)), (row_scale, scale)), slots)


_quantize = register_kernel(
    "quantize_append(Tensor rows, Tensor(a!) row_cache, Tensor(b!) row_scale, Tensor slots, bool compiled) -> ()",
    _quantize_append,
    lambda *_: None,
    "mha2mla.kernels.rope_append.kernel:launch_quantize_rows",
)
_append_op = register_kernel(
    "rope_append(Tensor rows, Tensor keys, Tensor query, Tensor(a!) row_cache, Tensor(b!) rope_cache,"
    " Tensor(c!)? rope_scale, Tensor positions, Tensor slots, Tensor inv_freq, float attention_scaling,"
    " bool interleaved, bool compiled) -> Tensor",
    _rope_append,
    lambda rows, keys, query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
    "mha2mla.kernels.rope_append.kernel:launch_rope_append",
)
_rotation_op = register_kernel(
    "rotate_keys(Tensor raw, Tensor positions, Tensor inv_freq, float attention_scaling, bool compiled) -> Tensor",
    lambda raw, positions, inv_freq, scaling: rotate_keys(raw, inv_freq, scaling, positions),
    lambda raw, *_: torch.empty_like(raw),
    "mha2mla.kernels.rope_append.kernel:launch_rotation",
)
_keys_op = register_kernel(
    "rotary_keys(Tensor latent, Tensor weight, Tensor bias, Tensor positions, Tensor inv_freq,"
    " float attention_scaling, bool compiled) -> Tensor",
    lambda latent, weight, bias, positions, inv_freq, scaling: rotary_keys(
        latent, LatentRope(weight, bias, inv_freq, scaling), positions
    ),
    lambda latent, weight, *_: latent.new_empty(latent.shape[0], weight.shape[0]),
    "mha2mla.kernels.rope_append.rotary_keys:launch_rotary_keys",
)
