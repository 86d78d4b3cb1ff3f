"""One step over a paged cache: where new tokens go, which layers attend, and by which plans. Decided once a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha2mla.kernels import MAX_DECODE_QUERY_LENGTH, DecodePlan, MixedPlan
from mha2mla.modeling.batch import SequenceBatch
from mha2mla.modeling.cache_layout import CacheLayout
from mha2mla.modeling.pages import PageAllocator, StaleBatchError
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants, Batch, Plan


@dataclass(eq=False)
class CacheLayer:
    """Pages of one layer, and the backend that serves them.

    Attributes:
        tensors: by the layout's names, each [num_pages, page_size, ...].
        dtype: of queries; cached elements may have fewer bits.
        layout: of the tensors; None for views of another engine's pages.
    """

    backend: AttentionBackend
    constants: AttentionConstants
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    layout: CacheLayout | None = None


@dataclass(frozen=True)
class DecodePlans:
    """Plans of the decode op for the layers of a model and one number of new tokens. Layers that can share one do.

    Attributes:
        of_layer: per layer; None where the backend does not attend.
        schedules: layer indices; refreshing the plans of these layers refreshes all.
    """

    of_layer: tuple[DecodePlan | None, ...]
    schedules: tuple[int, ...]

    def refresh(self, batches: Sequence[Batch]) -> None:
        """Plans, on the device, for the lengths that the cache has once it holds the new tokens."""
        for index in self.schedules:
            self.of_layer[index].refresh(batches[index].cache_seqlens, batches[index].cache_starts)


@dataclass(frozen=True)
class AttentionStep:
    """A forward pass as its layers see it: of ``generate``, of a ragged batch, or of another engine.

    Attributes:
        batches: per layer, where its new tokens go; one object for all layers of a device.
        plans: per layer, of its call of the backend; None: the model's ``attn_implementation`` attends, in the expanded
            form.
        decode: the plans, where one call of the decode op serves all sequences.
        allocator: of a :class:`~mha2mla.modeling.PagedCache`, which knows the version of every sequence; else None.
        planned_for: [2, B] int64 on the CPU, the batch's ``sequence_versions`` when the plans were made.
    """

    layers: Sequence[CacheLayer]
    batches: tuple[Batch, ...]
    plans: tuple[Plan | None, ...]
    decode: DecodePlans | None = None
    allocator: PageAllocator | None = None
    planned_for: Tensor | None = None

    @property
    def batch(self) -> Batch:
        """The sequences, where all layers are on one device."""
        return self.batches[0]

    def run(
        self, layer_idx: int, tensors: Mapping[str, Tensor | None], cache: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Rotates and writes a layer's new tokens, then attends if that is the backend's to do.

        Args:
            tensors: by the backend's names.
            cache: pages to use instead of the layer's own.

        Returns:
            The rotated queries by name, and [N, H, d_v] or None.

        Raises:
            StaleBatchError: as :meth:`check`, in the first layer.
        """
        if layer_idx == 0 and self.allocator is not None and not torch.compiler.is_compiling():
            self.check()
        layer, batch, plan = self.layers[layer_idx], self.batches[layer_idx], self.plans[layer_idx]
        cache = layer.tensors if cache is None else cache
        rotated = layer.backend.append(tensors, cache, batch, layer.constants)
        if plan is None:
            return rotated, None
        return rotated, layer.backend.attend({**tensors, **rotated}, cache, batch, plan, layer.constants)

    def check(self) -> None:
        """Raises StaleBatchError if a sequence of the batch ended or changed, or the plans are for another batch.

        Compares host numbers only. Replays of a CUDA graph run no host code: there :meth:`load` refuses.
        """
        self.allocator.check_generations(*self.batch.sequence_versions.tolist())
        if not torch.equal(self.planned_for, self.batch.sequence_versions):
            raise StaleBatchError("batch was replaced after the plans were made; expected a call of refresh() between")

    def load(self, batch: SequenceBatch) -> None:
        """Copies another batch into the step's own (:meth:`SequenceBatch.copy_`); then :meth:`refresh`, or replay the
        CUDA graph that does.

        Raises:
            StaleBatchError: a sequence of ``batch`` ended or changed since it was made; nothing is changed.
            ValueError: its shapes or numbers of new tokens are others.
        """
        self.allocator.check_generations(*batch.sequence_versions.tolist())
        self.batch.copy_(batch)

    def refresh(self) -> None:
        """Plans again, in place, for the batch that was loaded; for CUDA graphs.

        Raises:
            StaleBatchError: a sequence of the batch ended or changed since it was made.
            ValueError: the batch has queries of more than 8 tokens.
        """
        self.allocator.check_generations(*self.batch.sequence_versions.tolist())
        if self.decode is not None:
            self.decode.refresh(self.batches)
        else:
            for plan in {id(plan): plan for plan in self.plans}.values():
                plan.refresh()
        self.planned_for.copy_(self.batch.sequence_versions)


class StepPlanner:
    """Makes the plans of steps, and keeps those of decode steps, so that a CUDA graph finds them where they were.

    Layers share a plan where backend, geometry, window and sinks are the same, and all plans share a workspace, since
    layers and steps run one after another: each graph of another batch size would else hold tens of MB.

    Attributes:
        plans: of decode steps, by shape of the block table, new tokens per sequence, and which layers attend.
    """

    def __init__(self) -> None:
        self.plans: dict[tuple, DecodePlans] = {}
        self._workspaces: dict[tuple, Tensor] = {}

    def step(
        self,
        layers: Sequence[CacheLayer],
        batches: tuple[Batch, ...],
        query_length: int | None,
        attends: tuple[bool, ...] | None = None,
    ) -> AttentionStep:
        """A step; call before any layer appends its tokens.

        Inside ``torch.compile`` plans are temporaries of the compiled step, which places (and captures) them itself.

        Args:
            batches: per layer; their ``lengths`` are read where no decode plan serves.
            query_length: new tokens of every sequence; None: they differ.
            attends: per layer, whether its backend attends; None: all do.
        """
        attends = (True,) * len(layers) if attends is None else attends
        if True not in attends:
            return AttentionStep(layers, batches, (None,) * len(layers))
        if query_length is None or query_length > MAX_DECODE_QUERY_LENGTH:
            return AttentionStep(layers, batches, mixed_plans(layers, attends, batches))
        if torch.compiler.is_compiling():
            decode = self._allocate(layers, attends, batches, query_length)
        else:
            key = (batches[0].block_table.shape, query_length, attends)
            decode = self.plans.get(key)
            if decode is None:
                # Not inference tensors, which could not be refreshed outside inference_mode.
                with torch.inference_mode(False):
                    decode = self.plans[key] = self._allocate(layers, attends, batches, query_length)
        decode.refresh(batches)
        return AttentionStep(layers, batches, decode.of_layer, decode)

    def _allocate(
        self, layers: Sequence[CacheLayer], attends: Sequence[bool], batches: Sequence[Batch], query_length: int
    ) -> DecodePlans:
        """Plans that are not filled yet: one per geometry, a schedule per window, and one workspace per device."""
        plan_of: dict[tuple, DecodePlan] = {}
        scheduled: dict[tuple, tuple[int, DecodePlan]] = {}
        keys = plan_keys(layers, attends, batches)
        for index, (key, layer, batch) in enumerate(zip(keys, layers, batches, strict=True)):
            if key is None or key in plan_of:
                continue
            table, limits = batch.block_table, layer.constants.limits
            plan = layer.backend.plan_decode(layer.tensors, table, query_length, layer.constants, layer.dtype)
            # A schedule says which tokens go to which CTA: layers of other widths share it if they launch as many CTAs.
            same_schedule = (plan.num_ctas, limits, table.device)
            _, shared = scheduled.setdefault(same_schedule, (index, plan))
            if shared is not plan:
                plan = replace(plan, schedule=shared.schedule, splits=shared.splits)
            plan_of[key] = plan
        if not torch.compiler.is_compiling():
            shared = with_one_workspace(plan_of.values(), ("partial_out", "partial_lse"), self._workspaces)
            plan_of = dict(zip(plan_of, shared, strict=True))
        of_layer = tuple([None if key is None else plan_of[key] for key in keys])
        return DecodePlans(of_layer, tuple([index for index, _ in scheduled.values()]))


def plan_keys(layers: Sequence[CacheLayer], attends: Sequence[bool], batches: Sequence[Batch]) -> list[tuple | None]:
    """Per layer a key, equal for layers that share a plan; None where its backend does not attend."""
    return [
        (layer.backend.name, layer.constants.geometry, layer.constants.limits, batch.block_table.device)
        if wanted
        else None
        for layer, wanted, batch in zip(layers, attends, batches, strict=True)
    ]


def mixed_plans(
    layers: Sequence[CacheLayer], attends: Sequence[bool], batches: Sequence[Batch]
) -> tuple[MixedPlan | None, ...]:
    """Per layer a plan for queries of any length, None where its backend does not attend."""
    keys = plan_keys(layers, attends, batches)
    plans: dict[tuple, MixedPlan] = {}
    for key, layer, batch in zip(keys, layers, batches, strict=True):
        if key is not None and key not in plans:
            plans[key] = layer.backend.plan(layer.tensors, batch, layer.constants, layer.dtype)
    shared = dict(zip(plans, with_one_workspace(plans.values(), ("workspace",), {}), strict=True))
    return tuple([None if key is None else shared[key] for key in keys])


def with_one_workspace(
    plans: Iterable[Plan], names: Sequence[str], workspaces: dict[tuple[str, torch.device], Tensor]
) -> list[Plan]:
    """The plans over the largest workspaces, attributes ``names``, of a device; larger ones join ``workspaces``."""
    plans = list(plans)
    for name in names:
        for plan in plans:
            mine = getattr(plan, name)
            if (name, mine.device) not in workspaces or mine.numel() > workspaces[name, mine.device].numel():
                workspaces[name, mine.device] = mine.flatten()
        for index, plan in enumerate(plans):
            if (mine := getattr(plan, name)).numel():
                whole = workspaces[name, mine.device]
                plans[index] = replace(plan, **{name: whole[: mine.numel()].view(mine.shape)})
    return plans
