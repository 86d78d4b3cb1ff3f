"""Attention backends and their registry: ops that serve a layer, with their tensors and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import DecodePlan, MixedPlan
from mha2mla.modeling.batch import SequenceBatch, UniformBatch
from mha2mla.modeling.cache_layout import CacheLayout

Tensors = Mapping[str, "Tensor | None"]
Batch = SequenceBatch | UniformBatch
Plan = MixedPlan | DecodePlan


@dataclass(frozen=True)
class GQAGeometry:
    """Static shape of a layer that caches keys and values: H, h_kv, d_k and d_v."""

    num_attention_heads: int
    num_key_value_heads: int
    qk_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class AttentionConstants:
    """Constants of a layer's attention.

    Attributes:
        geometry: of the layer; its type says which backends can serve it.
        softmax_scale: the source model's.
        attention_scaling: factor on cos and sin (YaRN, longrope).
        window: tokens that a query sees, itself included; None: all.
        sinks: tokens at the beginning of its sequence that a query sees beside its window.
    """

    geometry: MLAGeometry | GQAGeometry
    softmax_scale: float
    attention_scaling: float = 1.0
    window: int | None = None
    sinks: int = 0

    @property
    def limits(self) -> tuple[int | None, int]:
        """Window and sinks."""
        return self.window, self.sinks


@dataclass(frozen=True)
class AttentionBackend:
    """Ops that serve attention over a paged cache, and everything that a caller must know to call them.

    Attributes:
        name: in the registry and in configs.
        geometry: type of the geometries that it serves.
        per_token: names of the tensors per new token: queries and keys [N, heads, width], a latent [N, width].
        weights: names of the layer's own tensors that the ops take; those that its geometry has no use for are None or
            left out, here and in ``per_token``.
        cache_layout: from geometry, page size and the model's dtype, what its cache is made of; ``latent_cache`` for a
            LatentCache, ``rope_cache`` unless keys are made from latents, ``latent_scale`` where
            latents are e4m3, ``rope_scale`` where keys are int8.
        append: ``append(tensors, cache, batch, constants)`` rotates the queries, which it returns by name, and writes
            keys and values of the new tokens to their slots.
        attend: ``attend(tensors, cache, batch, plan, constants)`` gives [N, H, d_v], in ``tensors["out"]`` of that
            shape, where that is there, or in a tensor of its own; None: the model's ``attn_implementation`` attends, in
            the expanded form, over what is cached.
        plan: the metadata op: ``plan(cache, batch, constants, dtype)`` before ``attend``, once per step for all layers
            that share constants and the dtype of queries.
        plan_decode: ``plan_decode(cache, block_table, query_length, constants, dtype)``, not filled, of batches whose
            sequences all bring that many tokens, 8 at most: kept from step to step, refreshed in each. None: ``plan``
            serves these too, and a LatentCache cannot be served.
        explain: ``explain(geometry, page_size, dtype, device)``: why it does not serve queries of at most 8 tokens, or
            None.
        explain_long: the same of longer queries.
        compiled: it runs kernels; else plain torch, slowly on a GPU.
        automatic: may be chosen without being named: gives the numbers that the model's dtype promises.
    """

    name: str
    geometry: type
    per_token: tuple[str, ...]
    weights: tuple[str, ...]
    cache_layout: Callable[[Any, int, torch.dtype], CacheLayout]
    append: Callable[[Tensors, Tensors, Batch, AttentionConstants], dict[str, Tensor]]
    attend: Callable[[Tensors, Tensors, Batch, Plan, AttentionConstants], Tensor] | None
    plan: Callable[[Tensors, Batch, AttentionConstants, torch.dtype], MixedPlan] | None
    plan_decode: Callable[[Tensors, Tensor, int, AttentionConstants, torch.dtype], DecodePlan] | None
    explain: Callable[[Any, int, torch.dtype, torch.device], str | None]
    explain_long: Callable[[Any, int, torch.dtype, torch.device], str | None]
    compiled: bool = True
    automatic: bool = True

    def refusal(
        self,
        geometry: Any,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        long_queries: bool = True,
    ) -> str | None:
        """Why it does not serve a layer, or None; without ``long_queries``, queries of at most 8 tokens are enough."""
        if not isinstance(geometry, self.geometry):
            return f"it serves {self.geometry.__name__}, not {type(geometry).__name__}"
        asked = (geometry, page_size, dtype, torch.device(device))
        return self.explain(*asked) or (self.explain_long(*asked) if long_queries else None)


def refused(name: str | None, geometry: Any) -> str:
    """The beginning of an error of which the rest is what :meth:`AttentionRegistry.find` says."""
    return f"no attention backend serves {geometry}" if name is None else f"attention backend {name!r} refuses"


class AttentionRegistry:
    """Backends by name.

    Args:
        backends: what is in it from the beginning, in the order in which :meth:`find` tries them.
    """

    def __init__(self, backends: Iterable[AttentionBackend] = ()) -> None:
        self._backends: dict[str, AttentionBackend] = {}
        for backend in backends:
            self.register(backend)

    @property
    def backends(self) -> Mapping[str, AttentionBackend]:
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

    def find(
        self,
        name: str | None,
        geometry: Any,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        long_queries: bool = True,
    ) -> tuple[AttentionBackend | None, str]:
        """The backend called ``name``, or, for None, the first that may be chosen and refuses nothing; and what those
        before it refuse. None, and the reasons, where all do.

        Raises:
            ValueError: there is no backend of that name.
        """
        chosen = [each for each in self._backends.values() if each.automatic and isinstance(geometry, each.geometry)]
        candidates = chosen if name is None else [self.get(name)]
        reasons = []
        for backend in candidates:
            why = backend.refusal(geometry, page_size, dtype, device, long_queries=long_queries)
            if why is None:
                return backend, "; ".join(reasons)
            reasons.append(why if name is not None else f"{backend.name}: {why}")
        return None, "; ".join(reasons) or "none is registered"
