"""The attention backends that there are: ops of :mod:`mha2mla.kernels` by the names that configs give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import (
    DecodePlan,
    LatentRope,
    MixedPlan,
    append_codes,
    append_w_uk,
    decodes_codes,
    explain_attention_varlen,
    explain_gqa_decode,
    explain_mla_decode,
    gqa_append,
    gqa_attention,
    mla_absorbed,
    mla_append,
    mla_attention,
    plan_gqa_attention,
    plan_mla_attention,
    plan_mla_decode,
    read_codes,
)
from mha2mla.modeling.cache_layout import PAGE_SIZE, fp8_layout, gqa_layout, latent_layout, quantizer_of
from mha2mla.modeling.registry import (
    AttentionBackend,
    AttentionConstants,
    AttentionRegistry,
    Batch,
    GQAGeometry,
    Plan,
    Tensors,
)


def _mla_plan(
    backend: str | None, cache: Tensors, batch: Batch, constants: AttentionConstants, dtype: torch.dtype
) -> MixedPlan:
    geometry = constants.geometry
    cache, table = _stand_in(cache, batch.block_table, geometry, dtype)
    rope = cache.get("rope_cache")
    return plan_mla_attention(
        cache["latent_cache"], rope, table, batch.cache_seqlens, batch.lengths,
        num_attention_heads=geometry.num_attention_heads, num_key_value_heads=geometry.num_up_projection_heads,
        qk_nope_head_dim=geometry.qk_nope_head_dim, v_head_dim=geometry.v_head_dim,
        qk_rope_head_dim=geometry.qk_rope_head_dim if rope is None else None, dtype=dtype,
        cache_starts=batch.cache_starts, window=constants.window, sinks=constants.sinks,
        has_padding=batch.has_padding, backend=backend,
    )  # fmt: skip


def _mla_plan_decode(
    backend: str | None,
    cache: Tensors,
    block_table: Tensor,
    query_length: int,
    constants: AttentionConstants,
    dtype: torch.dtype,
) -> DecodePlan:
    geometry = constants.geometry
    is_read = _decodes_codes(backend, cache, geometry, query_length, dtype)
    if not is_read:
        cache, _ = _stand_in(cache, block_table, geometry, dtype)
    latent = cache["latent_cache"]
    shape = (block_table.shape[0], query_length, geometry.num_attention_heads, geometry.kv_lora_rank)
    return plan_mla_decode(
        # Stands in for queries, of which shape, dtype and device are looked at.
        latent.new_empty((), dtype=dtype).expand(shape),
        cache.get("rope_cache", latent),
        block_table,
        None,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        window=constants.window,
        sinks=constants.sinks,
        latent_dtype=latent.dtype,
        row_bytes=latent.shape[-1] if is_read else None,
        backend=backend,
    )


def _decodes_codes(
    backend: str | None, cache: Tensors, geometry: MLAGeometry, query_length: int, dtype: torch.dtype
) -> bool:
    """True where a decode step reads codes, and not a copy of its pages in 16 bits."""
    latent = cache["latent_cache"]
    return backend != "reference" and decodes_codes(geometry, latent.shape[1], dtype, latent.device, query_length)


def _stand_in(cache: Tensors, block_table: Tensor, geometry: MLAGeometry, dtype: torch.dtype) -> tuple[Tensors, Tensor]:
    """Caches of the shape and dtype that :func:`_dequantised` will have, without memory, and their block table; of
    latents that are no codes the cache itself."""
    if not geometry.has_codes:
        return cache, block_table
    pages, page_size = block_table.numel(), cache["latent_cache"].shape[1]
    latent = cache["latent_cache"].new_empty((), dtype=dtype).expand(pages, page_size, geometry.kv_lora_rank)
    rope = cache.get("rope_cache")
    kept = {} if rope is None else {"rope_cache": rope.new_empty(()).expand(pages, *rope.shape[1:])}
    return {"latent_cache": latent, **kept}, _numbered(block_table)


def _dequantised(
    backend: str | None, cache: Tensors, block_table: Tensor, tensors: Tensors, geometry: MLAGeometry
) -> tuple[Tensors, Tensor]:
    """Pages of a block table, copied with their latents, which are codes, dequantised; and the table of the copies."""
    codes = (quantizer_of(geometry), tensors.get("latent_centers"), tensors["q_pe"].dtype)
    latent = read_codes(cache["latent_cache"], block_table, geometry.kv_lora_rank, *codes, backend=backend)
    rope = cache.get("rope_cache")
    kept = {} if rope is None else {"rope_cache": rope[block_table.flatten().clamp(min=0).long()]}
    return {"latent_cache": latent, **kept}, _numbered(block_table)


def _numbered(block_table: Tensor) -> Tensor:
    """[B, max_pages], places counted row by row; -1 where there is no page."""
    places = torch.arange(block_table.numel(), dtype=torch.int32, device=block_table.device).view_as(block_table)
    return torch.where(block_table < 0, -1, places)


def rounded_latents(latent: Tensor, geometry: MLAGeometry, centers: Tensor | None) -> Tensor:
    """``latent`` [N, d_c] as its codes give it back, bit for bit what a cache of them does: written to pages of its own
    and read. Without gradients."""
    quantizer, (rows, width), device = quantizer_of(geometry), latent.shape, latent.device
    pages, row = -(-rows // PAGE_SIZE), quantizer.bytes_per_row(width)
    cache = torch.empty(pages, PAGE_SIZE, row, dtype=torch.uint8, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    append_codes(latent, cache, slots, quantizer, centers)
    read = read_codes(cache, slots[None, :pages], width, quantizer, centers, latent.dtype)
    return read.flatten(0, 1)[:rows]


def append_latents(
    backend: str | None, tensors: Tensors, cache: Tensors, batch: Batch, constants: AttentionConstants
) -> dict[str, Tensor]:
    """``append`` of the MLA backends, by the backend of their ops."""
    latent, latent_cache = tensors["latent"], cache["latent_cache"]
    if latent_cache.dtype is torch.uint8:
        codes = (quantizer_of(constants.geometry), tensors.get("latent_centers"))
        append_codes(latent, latent_cache, batch.slots, *codes, backend=backend)
        latent, latent_cache = latent[:, :0], latent.new_empty(*latent_cache.shape[:2], 0)
    given = (
        latent, tensors.get("k_pe"), tensors["q_pe"], latent_cache, cache.get("rope_cache"),
        batch.positions, batch.slots, tensors["inv_freq"],
    )  # fmt: skip
    options = {"attention_scaling": constants.attention_scaling, "rope_scale": cache.get("rope_scale")}
    query = tensors.get("q_nope"), tensors.get("k_up")
    both = None if backend == "reference" else append_w_uk(*given, *query, **options)
    if both is not None:
        return dict(zip(("q_pe", "q_latent"), both, strict=True))
    return {"q_pe": mla_append(*given, latent_scale=cache.get("latent_scale"), **options, backend=backend)}


def _mla_attend(
    backend: str | None, tensors: Tensors, cache: Tensors, batch: Batch, plan: Plan, constants: AttentionConstants
) -> Tensor:
    q_nope, q_pe, out = tensors["q_nope"], tensors["q_pe"], tensors.get("out")
    rope = None  # where rotary keys are cached in the model's dtype
    if tensors.get("rope_weight") is not None:
        parameters = tensors["rope_weight"], tensors["rope_bias"], tensors["inv_freq"][0]
        rope = LatentRope(*parameters, constants.attention_scaling)
    centers, table, geometry = None, batch.block_table, constants.geometry
    if cache["latent_cache"].dtype is torch.uint8:
        if isinstance(plan, DecodePlan) and _decodes_codes(backend, cache, geometry, plan.shape[1], q_pe.dtype):
            centers = tensors["latent_centers"].to(q_pe.dtype)  # that of the model's parameters already
        else:
            cache, table = _dequantised(backend, cache, table, tensors, geometry)
    layer = (cache["latent_cache"], cache.get("rope_cache"), tensors["k_up"], tensors["v_up"])
    scales = {name: cache.get(name) for name in ("latent_scale", "rope_scale")}
    scales |= {"softmax_scale": constants.softmax_scale}
    if not isinstance(plan, DecodePlan):
        return mla_attention(q_nope, q_pe, *layer, plan, **scales, rope=rope, out=out, backend=backend)
    rows, q_latent = plan.shape[:2], tensors.get("q_latent")
    made = mla_absorbed(
        q_nope.unflatten(0, rows), q_pe.unflatten(0, rows), *layer, table, batch.cache_seqlens,
        q_latent=None if q_latent is None else q_latent.unflatten(0, rows), cache_starts=batch.cache_starts,
        plan=plan, centers=centers, **scales, rope=rope, out=None if out is None else out.unflatten(0, rows),
        backend=backend,
    )  # fmt: skip
    return made.flatten(0, 1)


def _long(geometry: MLAGeometry | GQAGeometry, page_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    is_mla = isinstance(geometry, MLAGeometry)
    widths = (geometry.qk_nope_head_dim, geometry.qk_rope_head_dim) if is_mla else (geometry.qk_head_dim,)
    why = explain_attention_varlen(widths, geometry.v_head_dim, dtype, device)
    return None if why is None else f"long queries run attention_varlen, and {why}"


def _rows(latent: int, geometry: MLAGeometry, page_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Refuses 16-bit rows that are no multiples of 16 bytes, as the reference does: it is the same op."""
    rope = 16 if geometry.has_key_codes else 8
    if dtype.itemsize != 2 or not (geometry.kv_lora_rank % latent or geometry.qk_rope_head_dim % rope):
        return None
    return (
        f"kv_lora_rank is {geometry.kv_lora_rank} and qk_rope_head_dim {geometry.qk_rope_head_dim}; in 16 bits the op"
        f" takes multiples of {latent} and {rope}"
    )


def _gqa_plan(
    backend: str | None, cache: Tensors, batch: Batch, constants: AttentionConstants, dtype: torch.dtype
) -> MixedPlan:
    return plan_gqa_attention(
        cache["key_cache"], cache["value_cache"], batch.block_table, batch.cache_seqlens, batch.lengths,
        num_attention_heads=constants.geometry.num_attention_heads, cache_starts=batch.cache_starts,
        window=constants.window, sinks=constants.sinks, has_padding=batch.has_padding, backend=backend,
    )  # fmt: skip


def _gqa_append(
    backend: str | None, tensors: Tensors, cache: Tensors, batch: Batch, constants: AttentionConstants
) -> dict[str, Tensor]:
    rotated = gqa_append(
        tensors["query"], tensors["key"], tensors["value"], cache["key_cache"], cache["value_cache"],
        batch.positions, batch.slots, tensors["inv_freq"],
        attention_scaling=constants.attention_scaling, backend=backend,
    )  # fmt: skip
    return {"query": rotated}


def _gqa_attend(
    backend: str | None, tensors: Tensors, cache: Tensors, batch: Batch, plan: MixedPlan, constants: AttentionConstants
) -> Tensor:
    given = (tensors["query"], cache["key_cache"], cache["value_cache"], plan)
    return gqa_attention(*given, softmax_scale=constants.softmax_scale, backend=backend)


def _explain_gqa(geometry: GQAGeometry, page_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    heads = (geometry.num_attention_heads, geometry.num_key_value_heads)
    return explain_gqa_decode(*heads, geometry.qk_head_dim, geometry.v_head_dim, page_size, dtype, device)


def _explain_fp8(
    explain: Callable, geometry: MLAGeometry, page_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    if geometry.has_codes:
        return f"it stores latents as e4m3 numbers, and the checkpoint's are codes of {geometry.latent_bits} bits"
    if geometry.has_key_codes:
        return "it stores latents as e4m3 numbers, and rotary keys of rotary_key_cache 'int8' lie beside 16-bit latents"
    return explain(geometry, page_size, dtype, device)


def _serves_all(*_: object) -> None:
    """Nothing is refused."""


def _one_call(*_: object) -> str:
    return "it serves a LatentCache, whose sequences all bring as many tokens"


def _mla(name: str, backend: str | None, explain: Callable, explain_long: Callable, **options: Any) -> AttentionBackend:
    ops = {
        "cache_layout": latent_layout,
        "plan": partial(_mla_plan, backend),
        "plan_decode": partial(_mla_plan_decode, backend),
        "append": partial(append_latents, backend),
        "attend": partial(_mla_attend, backend),
    }
    return AttentionBackend(
        name=name,
        geometry=MLAGeometry,
        per_token=("q_nope", "q_pe", "latent", "k_pe"),
        weights=("k_up", "v_up", "inv_freq", "rope_weight", "rope_bias", "latent_centers"),
        explain=explain,
        explain_long=explain_long,
        **{**ops, **options},
    )


def _gqa(name: str, backend: str | None, explain: Callable, explain_long: Callable, **options: Any) -> AttentionBackend:
    return AttentionBackend(
        name=name,
        geometry=GQAGeometry,
        per_token=("query", "key", "value"),
        weights=("inv_freq",),
        cache_layout=gqa_layout,
        plan=partial(_gqa_plan, backend),
        plan_decode=None,
        append=partial(_gqa_append, backend),
        attend=partial(_gqa_attend, backend),
        explain=explain,
        explain_long=explain_long,
        **options,
    )


_EIGHT_BITS = {"cache_layout": fp8_layout, "automatic": False}
_explain_mla_fp8 = partial(_explain_fp8, partial(explain_mla_decode, latent_dtype=torch.float8_e4m3fn))
# The registry that models look names up in; a program adds its own backends to it.
ATTENTION_BACKENDS = AttentionRegistry(
    (
        _mla("mla_paged", None, explain_mla_decode, _long),
        _gqa("gqa_paged", None, _explain_gqa, _long),
        _mla("mla_fp8", None, _explain_mla_fp8, _long, **_EIGHT_BITS),
        _mla(
            "mla_fp8_reference", "reference", partial(_explain_fp8, partial(_rows, 16)), _serves_all, compiled=False,
            **_EIGHT_BITS,
        ),
        # No op of its own attends: the model's attn_implementation does.
        _mla("mla_expanded", None, _serves_all, _one_call, compiled=False, automatic=False, attend=None, plan=None),
        # Last: what serves where nothing else does.
        _mla("mla_reference", "reference", partial(_rows, 8), _serves_all, compiled=False),
        _gqa("gqa_reference", "reference", _serves_all, _serves_all, compiled=False),
    )
)  # fmt: skip

# Attention backend of a converted layer, by the backend of all ops.
OF_OPS: Mapping[str | None, str | None] = {None: None, "tilelang": "mla_paged", "reference": "mla_reference"}
