"""What a forward pass over a paged cache decides once for all of its layers: where tokens go, who attends, by plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mha2mla.kernels import DecodePlan, MixedPlan
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants, Batch, Plan


class ServedLayer(Protocol):
    """A layer's pages and what serves them: of a LatentCache or a PagedCache."""

    backend: AttentionBackend
    constants: AttentionConstants
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype  # of queries; what is cached may have fewer bits


@dataclass(frozen=True)
class AttentionStep:
    """What a forward pass hands to its layers.

    Attributes:
        layers: of the cache.
        batches: per layer, where its new tokens go; one object for all layers of a device.
        plans: per layer, of its call of the backend, layers that can share a plan do; None: the model's
            ``attn_implementation`` attends, in the expanded form.
    """

    layers: Sequence[ServedLayer]
    batches: tuple[Batch, ...]
    plans: tuple[Plan | None, ...]

    def run(self, layer_idx: int, tensors: Mapping[str, Tensor | None]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Rotates and writes a layer's new tokens, then attends if that is the backend's to do.

        Args:
            tensors: by the backend's names.

        Returns:
            The rotated queries by name, and [N, H, d_v] or None.
        """
        layer, batch, plan = self.layers[layer_idx], self.batches[layer_idx], self.plans[layer_idx]
        rotated = layer.backend.append(tensors, layer.tensors, batch, layer.constants)
        if plan is None:
            return rotated, None
        given = {**tensors, **rotated}
        return rotated, layer.backend.attend(given, layer.tensors, batch, plan, layer.constants)


def mixed_plans(
    layers: Sequence[ServedLayer], attends: Sequence[bool], batches: Sequence[Batch]
) -> tuple[MixedPlan | None, ...]:
    """Per layer a plan for queries of any length, None where its backend does not attend; one for all layers of the
    same backend, geometry, window, sinks and device."""
    keys = [
        (layer.backend.name, layer.constants.geometry, layer.constants.limits, batch.cache_seqlens.device)
        for layer, batch in zip(layers, batches, strict=True)
    ]
    plans: dict[tuple, MixedPlan] = {}
    for key, layer, wanted, batch in zip(keys, layers, attends, batches, strict=True):
        if wanted and key not in plans:
            plans[key] = layer.backend.plan(layer.tensors, batch, layer.constants, layer.dtype)
    shared = dict(zip(plans, with_one_workspace(plans.values(), ("workspace",)), strict=True))
    return tuple([shared[key] if wanted else None for key, wanted in zip(keys, attends, strict=True)])


def with_one_workspace(plans: Iterable[Plan], names: Sequence[str]) -> list[Plan]:
    """The plans over the largest workspaces, attributes ``names``, among those of a device: layers run one after
    another. A model whose layers all differ in rank would otherwise hold as many, tens of MB each."""
    plans = list(plans)
    for name in names:
        largest: dict[torch.device, Tensor] = {}
        for plan in plans:
            mine = getattr(plan, name)
            if mine.numel() > largest.get(mine.device, mine.new_empty(0)).numel():
                largest[mine.device] = mine
        plans = [_over(plan, name, largest) for plan in plans]
    return plans


def _over(plan: Plan, name: str, largest: Mapping[torch.device, Tensor]) -> Plan:
    mine = getattr(plan, name)
    if mine.numel() == 0:
        return plan
    return replace(plan, **{name: largest[mine.device].flatten()[: mine.numel()].view(mine.shape)})


@dataclass(frozen=True)
class DecodePlans:
    """Plans of the decode op for the layers of a model and one number of new tokens. Layers that can share one do.

    Attributes:
        of_layer: per layer; None where the backend does not attend.
        schedules: layer indices; refreshing the plans of these layers refreshes all.
    """

    of_layer: tuple[DecodePlan | None, ...]
    schedules: tuple[int, ...]

    @classmethod
    def allocate(
        cls, layers: Sequence[ServedLayer], attends: Sequence[bool], block_tables: Sequence[Tensor], query_length: int
    ) -> DecodePlans:
        """Plans that are not filled yet: one per geometry, a schedule per window, and one workspace per device."""
        plan_of: dict[tuple, DecodePlan] = {}
        scheduled: dict[tuple, tuple[int, DecodePlan]] = {}
        keys: list[tuple | None] = []
        for index, (layer, wanted, table) in enumerate(zip(layers, attends, block_tables, strict=True)):
            limits = layer.constants.limits
            key = (layer.backend.name, layer.constants.geometry, limits, table.device) if wanted else None
            keys.append(key)
            if key is None or key in plan_of:
                continue
            plan = layer.backend.plan_decode(layer.tensors, table, query_length, layer.constants, layer.dtype)
            # A schedule says which tokens go to which CTA: layers of other widths share it if they launch as many CTAs.
            same_schedule = (plan.num_ctas, limits, table.device)
            _, shared = scheduled.setdefault(same_schedule, (index, plan))
            if shared is not plan:
                plan = replace(plan, schedule=shared.schedule, splits=shared.splits)
            plan_of[key] = plan
        if len(plan_of) > 1 and not torch.compiler.is_compiling():
            shared = with_one_workspace(plan_of.values(), ("partial_out", "partial_lse"))
            plan_of = dict(zip(plan_of, shared, strict=True))
        of_layer = tuple([None if key is None else plan_of[key] for key in keys])
        return cls(of_layer, tuple([index for index, _ in scheduled.values()]))

    def refresh(self, batches: Sequence[Batch]) -> None:
        """Plans, on the device, for the lengths that the cache has once it holds the new tokens."""
        for index in self.schedules:
            self.of_layer[index].refresh(batches[index].cache_seqlens, batches[index].cache_starts)
