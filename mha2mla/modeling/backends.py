"""Attention backends by name: which ops serve a layer over a ragged batch, what they are given, what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import (
    MixedPlan,
    explain_attention_varlen,
    explain_gqa_decode,
    explain_mla_decode,
    explain_mla_decode_fp8,
    gqa_append,
    gqa_attention,
    mla_append,
    mla_attention,
    plan_gqa_attention,
    plan_mla_attention,
)
from mha2mla.modeling.batch import SequenceBatch
from mha2mla.modeling.cache_layout import CacheLayout, CacheTensor, gqa_layout, latent_layout

Tensors = Mapping[str, "Tensor | None"]


@dataclass(frozen=True)
class GQAGeometry:
    """Static shape of a layer that caches keys and values: H, h_kv, d_k and d_v."""

    num_attention_heads: int
    num_key_value_heads: int
    qk_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class AttentionConstants:
    """What a layer's attention is told beside tensors.

    Attributes:
        geometry: of the layer; its type says which backends can serve it.
        softmax_scale: the source model's.
        attention_scaling: factor on cos and sin (YaRN, longrope).
        window: tokens that a query sees, itself included; None: all.
        interleaved: rotary pairs are neighbours; else halves.
    """

    geometry: MLAGeometry | GQAGeometry
    softmax_scale: float
    attention_scaling: float = 1.0
    window: int | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionBackend:
    """Ops that serve attention over a ragged batch, and everything that a caller must know to call them.

    Attributes:
        name: in the registry and in configs.
        geometry: type of the geometries that it serves.
        queries, keys, values: names of the arguments per new token: [N, heads, width], a latent [N, width].
        weights: names of the layer's own weights that the ops take.
        buffers: per name, shape and dtype of tensors that live as long as the layer, from its geometry.
        cache_layout: from geometry, page size and the model's dtype, what its cache is made of.
        plan: the metadata op: ``plan(cache, batch, constants)``, once per step for all layers that share constants.
        append: ``append(tensors, cache, batch, constants)`` rotates the queries, which it returns by name, and writes
            keys and values of the new tokens to their slots.
        attend: ``attend(tensors, cache, plan, constants)`` gives [N, H, d_v].
        explain: ``explain(geometry, page_size, dtype, device)``: what it refuses and why, or None.
        cache_dtype: of the cache; None: the model's.
        paged: the cache comes in pages with a page table.
        automatic: may be chosen where nobody asked for it by name: gives the numbers that the model's dtype promises.
    """

    name: str
    geometry: type
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    values: tuple[str, ...]
    weights: tuple[str, ...]
    buffers: Callable[[Any], Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
    cache_layout: Callable[[Any, int, torch.dtype], CacheLayout]
    plan: Callable[[Tensors, SequenceBatch, AttentionConstants], MixedPlan]
    append: Callable[[Tensors, Tensors, SequenceBatch, AttentionConstants], dict[str, Tensor]]
    attend: Callable[[Tensors, Tensors, MixedPlan, AttentionConstants], Tensor]
    explain: Callable[[Any, int, torch.dtype, torch.device], str | None]
    cache_dtype: torch.dtype | None = None
    paged: bool = True
    automatic: bool = True

    def refusal(self, geometry: Any, page_size: int, dtype: torch.dtype, device: torch.device | str) -> str | None:
        """Why it does not serve a layer, or None."""
        if not isinstance(geometry, self.geometry):
            return f"it serves {self.geometry.__name__}, not {type(geometry).__name__}"
        return self.explain(geometry, page_size, dtype, torch.device(device))

    def run(
        self,
        tensors: Tensors,
        cache: Tensors,
        batch: SequenceBatch,
        plan: MixedPlan,
        constants: AttentionConstants,
    ) -> Tensor:
        """Appends the new tokens and attends: [N, H, d_v]. ``tensors``: queries, keys, values, weights, buffers."""
        rotated = self.append(tensors, cache, batch, constants)
        return self.attend({**tensors, **rotated}, cache, plan, constants)


class AttentionRegistry:
    """Backends by name.

    Args:
        backends: what is in it from the beginning, in the order in which :meth:`choose` tries them.
    """

    def __init__(self, backends: Iterable[AttentionBackend] = ()) -> None:
        self._backends: dict[str, AttentionBackend] = {}
        for backend in backends:
            self.register(backend)

    @property
    def backends(self) -> Mapping[str, AttentionBackend]:
        """All of them, read-only."""
        return MappingProxyType(self._backends)

    def register(self, backend: AttentionBackend) -> AttentionBackend:
        """Adds a backend, behind those that are there.

        Raises:
            ValueError: its name is taken.
        """
        if backend.name in self._backends:
            raise ValueError(f"backend.name is {backend.name!r}; expected none of {sorted(self._backends)}")
        self._backends[backend.name] = backend
        return backend

    def get(self, name: str) -> AttentionBackend:
        """The backend of that name.

        Raises:
            ValueError: there is none.
        """
        if name not in self._backends:
            raise ValueError(f"attention backend is {name!r}; expected one of {sorted(self._backends)}")
        return self._backends[name]

    def choose(
        self, name: str | None, geometry: Any, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> AttentionBackend:
        """The backend called ``name``, or, for None, the first that may be chosen and refuses nothing.

        Raises:
            ValueError: it, or every one of them, refuses; with the reasons.
        """
        backend, why = self.find(name, geometry, page_size, dtype, device)
        if backend is None:
            refusing = (
                f"no attention backend serves {geometry}" if name is None else f"attention backend {name!r} refuses"
            )
            raise ValueError(f"{refusing}: {why}")
        return backend

    def find(
        self, name: str | None, geometry: Any, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[AttentionBackend | None, str]:
        """The backend that :meth:`choose` takes, and what those before it refuse; None and the reasons where it raises.

        Raises:
            ValueError: there is no backend of that name.
        """
        if name is not None:
            backend = self.get(name)
            why = backend.refusal(geometry, page_size, dtype, device)
            return (backend, "") if why is None else (None, why)
        reasons = []
        for backend in self._backends.values():
            if backend.automatic and isinstance(geometry, backend.geometry):
                why = backend.refusal(geometry, page_size, dtype, device)
                if why is None:
                    return backend, "; ".join(reasons)
                reasons.append(f"{backend.name}: {why}")
        return None, "; ".join(reasons) or "none is registered"


class AttentionLayer(nn.Module):
    """One layer's attention by a backend, with its buffers: for tracing, exporting and comparing backends.

    Args:
        backend: what serves it.
        constants: of the layer.
        device: of the buffers, which are zero: load or set them.

    ``forward(tensors, cache, batch, plan)`` takes queries, keys, values and weights by the backend's names, the cache's
    tensors by the layout's, and what is prepared once per step; it gives [N, H, d_v].
    """

    def __init__(
        self, backend: AttentionBackend, constants: AttentionConstants, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.backend, self.constants = backend, constants
        for name, (shape, dtype) in backend.buffers(constants.geometry).items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))

    def forward(
        self, tensors: dict[str, Tensor], cache: dict[str, Tensor], batch: SequenceBatch, plan: MixedPlan
    ) -> Tensor:
        return self.backend.run({**tensors, **dict(self.named_buffers())}, cache, batch, plan, self.constants)


def _mla_buffers(geometry: MLAGeometry) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {"inv_freq": ((geometry.num_rope_heads, geometry.qk_rope_head_dim // 2), torch.float32)}


def _mla_plan(backend: str | None, cache: Tensors, batch: SequenceBatch, constants: AttentionConstants) -> MixedPlan:
    geometry = constants.geometry
    return plan_mla_attention(
        cache["latent_cache"],
        cache["rope_cache"],
        batch.block_table,
        batch.cache_seqlens,
        batch.lengths,
        num_attention_heads=geometry.num_attention_heads,
        num_key_value_heads=geometry.num_up_projection_heads,
        qk_nope_head_dim=geometry.qk_nope_head_dim,
        v_head_dim=geometry.v_head_dim,
        cache_starts=batch.cache_starts,
        window=constants.window,
        backend=backend,
    )


def _mla_append(
    backend: str | None, tensors: Tensors, cache: Tensors, batch: SequenceBatch, constants: AttentionConstants
) -> dict[str, Tensor]:
    scale = {"latent_scale": cache["latent_scale"]} if "latent_scale" in cache else {}
    rotated = mla_append(
        tensors["latent"],
        tensors["k_pe"],
        tensors["q_pe"],
        cache["latent_cache"],
        cache["rope_cache"],
        batch.positions,
        batch.slots,
        tensors["inv_freq"],
        attention_scaling=constants.attention_scaling,
        interleaved=constants.interleaved,
        backend=backend,
        **scale,
    )
    return {"q_pe": rotated}


def _mla_attend(
    backend: str | None, tensors: Tensors, cache: Tensors, plan: MixedPlan, constants: AttentionConstants
) -> Tensor:
    return mla_attention(
        tensors["q_nope"],
        tensors["q_pe"],
        cache["latent_cache"],
        cache["rope_cache"],
        tensors.get("k_up"),
        tensors["v_up"],
        plan,
        softmax_scale=constants.softmax_scale,
        latent_scale=cache.get("latent_scale"),
        backend=backend,
    )


def _explain_mla(
    explain: Callable[..., str | None], geometry: MLAGeometry, page_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    widths = (geometry.qk_nope_head_dim, geometry.qk_rope_head_dim)
    return explain(geometry, page_size, dtype, device) or _explain_long(widths, geometry.v_head_dim, dtype, device)


def _explain_long(widths: tuple[int, ...], v_head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    why = explain_attention_varlen(widths, v_head_dim, dtype, device)
    return None if why is None else f"long queries run attention_varlen, and {why}"


def _fp8_layout(geometry: MLAGeometry, page_size: int, dtype: torch.dtype) -> CacheLayout:
    """``latent_cache`` as e4m3 numbers with ``latent_scale`` per token, and ``rope_cache`` in the model's dtype."""
    tensors = (
        CacheTensor("latent_cache", (geometry.kv_lora_rank,), torch.float8_e4m3fn),
        CacheTensor("latent_scale", (), torch.float32),
        CacheTensor("rope_cache", (geometry.num_rope_heads, geometry.qk_rope_head_dim), dtype),
    )
    return CacheLayout("mla_fp8", tensors, page_size)


def _gqa_buffers(geometry: GQAGeometry) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {"inv_freq": ((1, geometry.qk_head_dim // 2), torch.float32)}


def _gqa_layout(geometry: GQAGeometry, page_size: int, dtype: torch.dtype) -> CacheLayout:
    return gqa_layout(geometry.num_key_value_heads, geometry.qk_head_dim, geometry.v_head_dim, page_size, dtype)


def _gqa_plan(backend: str | None, cache: Tensors, batch: SequenceBatch, constants: AttentionConstants) -> MixedPlan:
    return plan_gqa_attention(
        cache["key_cache"],
        cache["value_cache"],
        batch.block_table,
        batch.cache_seqlens,
        batch.lengths,
        num_attention_heads=constants.geometry.num_attention_heads,
        cache_starts=batch.cache_starts,
        window=constants.window,
        backend=backend,
    )


def _gqa_append(
    backend: str | None, tensors: Tensors, cache: Tensors, batch: SequenceBatch, constants: AttentionConstants
) -> dict[str, Tensor]:
    rotated = gqa_append(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        cache["key_cache"],
        cache["value_cache"],
        batch.positions,
        batch.slots,
        tensors["inv_freq"],
        attention_scaling=constants.attention_scaling,
        interleaved=constants.interleaved,
        backend=backend,
    )
    return {"query": rotated}


def _gqa_attend(
    backend: str | None, tensors: Tensors, cache: Tensors, plan: MixedPlan, constants: AttentionConstants
) -> Tensor:
    return gqa_attention(
        tensors["query"],
        cache["key_cache"],
        cache["value_cache"],
        plan,
        softmax_scale=constants.softmax_scale,
        backend=backend,
    )


def _explain_gqa(geometry: GQAGeometry, page_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
    widths = geometry.qk_head_dim, geometry.v_head_dim
    why = explain_gqa_decode(heads, kv_heads, *widths, page_size, dtype, device)
    return why or _explain_long(widths[:1], widths[1], dtype, device)


def _serves_all(*_: object) -> None:
    """Nothing is refused."""


def _mla(name: str, backend: str | None, explain: Callable, layout: Callable, **options: Any) -> AttentionBackend:
    return AttentionBackend(
        name=name,
        geometry=MLAGeometry,
        queries=("q_nope", "q_pe"),
        keys=("k_pe",),
        values=("latent",),
        weights=("k_up", "v_up"),
        buffers=_mla_buffers,
        cache_layout=layout,
        plan=partial(_mla_plan, backend),
        append=partial(_mla_append, backend),
        attend=partial(_mla_attend, backend),
        explain=explain,
        **options,
    )


def _gqa(name: str, backend: str | None, explain: Callable) -> AttentionBackend:
    return AttentionBackend(
        name=name,
        geometry=GQAGeometry,
        queries=("query",),
        keys=("key",),
        values=("value",),
        weights=(),
        buffers=_gqa_buffers,
        cache_layout=_gqa_layout,
        plan=partial(_gqa_plan, backend),
        append=partial(_gqa_append, backend),
        attend=partial(_gqa_attend, backend),
        explain=explain,
    )


BUILT_IN: Mapping[str, AttentionBackend] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            _mla("mla_paged", None, partial(_explain_mla, explain_mla_decode), latent_layout),
            _gqa("gqa_paged", None, _explain_gqa),
            _mla(
                "mla_fp8",
                None,
                partial(_explain_mla, explain_mla_decode_fp8),
                _fp8_layout,
                cache_dtype=torch.float8_e4m3fn,
                automatic=False,
            ),
            _mla(
                "mla_fp8_reference",
                "reference",
                _serves_all,
                _fp8_layout,
                cache_dtype=torch.float8_e4m3fn,
                automatic=False,
            ),
            # Last: what serves where nothing else does.
            _mla("mla_reference", "reference", _serves_all, latent_layout),
            _gqa("gqa_reference", "reference", _serves_all),
        )
    }
)

# The registry that models look names up in; a program adds its own backends to it.
ATTENTION_BACKENDS = AttentionRegistry(BUILT_IN.values())
