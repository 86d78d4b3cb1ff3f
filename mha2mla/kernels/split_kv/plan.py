"""The work split of a decode step: made on the device from the lengths, once for all layers that share a shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.ops import in_plain_eager_mode, load, register
from mha2mla.kernels.split_kv.choice import FIELDS, MAX_BATCH, MAX_SPLITS, compiled_seqlen

MOST_LAUNCHES = 64  # that a plan remembers: a model's layers are a few kinds of calls
LONGEST = 2**30  # window or sinks as kernels take them: longer than a sequence, and no sum with a token overflows
MAX_BLOCKS = 65535  # of CTAs in the dimension of a grid that counts them


@dataclass
class Memory:
    """Eager calls with a plan: their checks and their launches.

    Attributes:
        indices: block_table, cache_seqlens and cache_starts of the last one: all layers of a step share these objects.
        layout: of theirs, what kernels do not check.
        launches: by what else the checks of one call hold for another (``PagedOp.__call__``).
    """

    indices: tuple[Tensor | None, ...] = (None, None, None)
    layout: tuple[Any, ...] | None = None
    launches: dict[Any, Any] = field(default_factory=dict)

    def find(self, like: Any, indices: tuple[Tensor | None, ...]) -> Any | None:
        """The launch of a call like this one, where the checks of its indices hold for these."""
        launch = self.launches.get(like)
        if launch is None:
            return None
        (table, seqlens, starts), (old_table, old_seqlens, old_starts) = indices, self.indices
        if table is not old_table or seqlens is not old_seqlens or starts is not old_starts:
            if self.layout != _layout(*indices):
                return None
            self.indices = indices
        if not launch.is_kept:
            self.launches[like] = launch = launch.kept()
        return launch

    def keep(self, indices: tuple[Tensor | None, ...], like: Any, launch: Any) -> None:
        """Keeps what a call launched for the next one like it; those with indices laid out otherwise are forgotten."""
        layout = _layout(*indices)
        if layout != self.layout or len(self.launches) == MOST_LAUNCHES:
            self.launches.clear()
        self.indices, self.layout, self.launches[like] = indices, layout, launch

    def __deepcopy__(self, _: Any) -> Memory:
        return Memory()  # a copied plan has buffers of its own


def _layout(block_table: Tensor, *lengths: Tensor | None) -> tuple[Any, ...]:
    of_lengths = [None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in lengths]
    return (block_table.size(1), *of_lengths)


@dataclass(frozen=True)
class DecodePlan:
    """Tokens that each block of the decode kernel reads, and the workspace for its partial results.

    Made by :func:`plan_mla_decode` or :func:`mha2mla.kernels.plan_gqa_decode`. The lengths are read on the device when
    the plan is made or refreshed, and a call with the plan attends over those; refresh it once per step, inside the
    CUDA graph if there is one. All calls that share B, S_q, H, d, page table and lengths (the layers of a model) may
    share a plan, one after another.

    Attributes:
        shape: (B, S_q, H, d) of the output that it was made for; d is d_c, or d_v of a GQA model.
        capacity: tokens that a sequence's page table holds.
        causal, window, sinks: as in :func:`plan_mla_decode`.
        schedule: [num_ctas + B, 16] int32; ``schedule.Column`` describes it. Without rows where the reference backend
            serves.
        splits: [B, 2] int32, fragments of each sequence and where their partials begin; where the reference backend
            serves, the first visible token and the length of each, by which it refuses a plan of other lengths.
        partial_out: [num_ctas, 2, S_q, H, d] float32 workspace.
        partial_lse: [num_ctas, 2, S_q, H] float32 workspace.
        num_splits: that the caller asked for, per sequence; 0: as many as balance best.
        lse: [B, H, S_q] float32, where a call writes what its caller does not ask for; None: such calls allocate.
        memory: of its eager calls.
    """

    shape: tuple[int, int, int, int]
    capacity: int
    causal: bool
    window: int | None
    sinks: int
    schedule: Tensor
    splits: Tensor
    partial_out: Tensor
    partial_lse: Tensor
    num_splits: int = 0
    lse: Tensor | None = None
    # A function of its own: Dynamo does not trace a class as a factory.
    memory: Memory = field(default_factory=lambda: Memory(), init=False, repr=False, compare=False)

    @property
    def num_ctas(self) -> int:
        """Blocks of the decode kernel per tile of query rows; 0 where the reference backend serves."""
        return self.partial_lse.shape[0]

    @property
    def buffers(self) -> tuple[int, int, Tensor, Tensor, Tensor, Tensor]:
        """The plan's arguments in a decode op's schema; a window of -1 is none."""
        window = -1 if self.window is None else self.window
        return window, self.sinks, self.schedule, self.splits, self.partial_out, self.partial_lse

    def combine_batches(self) -> list[int]:
        """Batch sizes, one for each kernel that merges partials of plans like it; none for the reference backend."""
        heads, seqlen_q = self.shape[2], compiled_seqlen(self.shape[1])
        combine = "mha2mla.kernels.split_kv.combine:combine_batches"
        return load(combine)(heads, seqlen_q, self.num_ctas) if self.num_ctas else []

    def check(self, out: Tensor, block_table: Tensor, page_size: int, causal: bool) -> None:
        """Raise ValueError if the plan was made for another shape or device (those of ``out``), page table width or
        ``causal``."""
        if out.shape != self.shape:
            raise ValueError(f"plan was made for [B, S_q, H, d] = {self.shape}; expected {tuple(out.shape)}")
        if out.device != self.splits.device:
            raise ValueError(f"plan was made on {self.splits.device}; expected {out.device}")
        capacity = block_table.shape[1] * page_size
        if capacity != self.capacity:
            raise ValueError(f"plan was made for max_pages * page = {self.capacity}; expected {capacity}")
        if bool(causal) != self.causal:
            raise ValueError(f"plan was made for causal={self.causal}; expected {causal}")

    def refresh(self, cache_seqlens: Tensor, cache_starts: Tensor | None = None) -> None:
        """Plan again, in place, for other lengths. One small kernel; no allocation, nothing is read on the host.

        Args:
            cache_seqlens, cache_starts: [B] int32, as in :func:`mha2mla.kernels.mla_decode`.
        """
        for name, tensor in (("cache_seqlens", cache_seqlens), ("cache_starts", cache_starts)):
            if tensor is not None and (
                tensor.shape != (self.shape[0],)
                or tensor.dtype != torch.int32
                or tensor.device != self.splits.device
                or not tensor.is_contiguous()
            ):
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; expected contiguous int32 "
                    f"[{self.shape[0]}] on {self.splits.device}"
                )
        plan = _plan if in_plain_eager_mode(cache_seqlens) else torch.ops.mha2mla.split_kv_plan
        call = (*self.buffers[:4], self.num_splits)
        plan(cache_seqlens, cache_starts, self.capacity, self.shape[1], self.causal, *call)


def spans_of(cache_seqlens: Tensor, cache_starts: Tensor | None, capacity: int) -> Tensor:
    """[B, 2] int32, first visible token and length of each sequence, clamped as the kernels clamp them."""
    stop = cache_seqlens.clamp(0, capacity)
    start = torch.zeros_like(stop) if cache_starts is None else cache_starts.clamp_min(0).minimum(stop)
    return torch.stack((start, stop), -1)


def check_spans(
    schedule: Tensor | None, splits: Tensor | None, cache_seqlens: Tensor, cache_starts: Tensor | None, capacity: int
) -> None:
    """Checks for the reference that a plan has the call's lengths, since a kernel attends over the plan's.

    A device other than the CPU asserts it without making the host wait.

    Raises:
        ValueError: they differ.
    """
    if schedule is None or splits is None or schedule.shape[0]:
        return
    wanted = spans_of(cache_seqlens, cache_starts, capacity)
    if splits.device.type != "cpu":
        torch._assert_async((splits == wanted).all(), "plan was last refreshed for other lengths")
    elif not torch.equal(splits, wanted):
        row = int((splits != wanted).any(-1).nonzero()[0])
        raise ValueError(
            f"plan was last refreshed for tokens {splits[row].tolist()} (first visible, length) of sequence {row};"
            f" expected {wanted[row].tolist()}, those of cache_starts and cache_seqlens: refresh it once per step"
        )


def check_window(window: int | None, sinks: int) -> tuple[int | None, int]:
    """Both, as kernels take them: at most :data:`LONGEST`. Raises ValueError for a window that sees nothing, a negative
    number of sinks, or sinks without a window."""
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected None or at least 1 token")
    if sinks < 0 or (sinks and window is None):
        raise ValueError(f"sinks is {sinks} with window={window}; expected 0, or a positive number with a window")
    return window if window is None else min(window, LONGEST), min(sinks, LONGEST)


def check_splits(num_splits: int | None, batch: int) -> None:
    """Raise ValueError for a number of splits that the combine cannot merge, or a grid cannot hold."""
    most = min(MAX_SPLITS, MAX_BLOCKS // max(1, batch))
    if num_splits is not None and not 1 <= num_splits <= most:
        raise ValueError(f"num_splits is {num_splits} for {batch} sequences; expected None or 1 to {most}")


def allocate_plan(
    shape: tuple[int, int, int, int],
    num_ctas: int,
    capacity: int,
    causal: bool,
    window: int | None,
    sinks: int,
    device: torch.device,
    num_splits: int = 0,
) -> DecodePlan:
    """The buffers of a plan for an output of a shape, not yet filled; arguments as the attributes of DecodePlan."""
    batch, seqlen_q, heads, _ = shape
    if num_ctas and batch > MAX_BATCH:
        raise ValueError(f"shape[0] (batch) is {batch}; a plan takes at most {MAX_BATCH} sequences")
    return DecodePlan(
        shape=shape,
        capacity=capacity,
        causal=bool(causal),
        window=window,
        sinks=sinks,
        schedule=torch.empty(num_ctas + batch if num_ctas else 0, FIELDS, dtype=torch.int32, device=device),
        splits=torch.full((batch, 2), -1, dtype=torch.int32, device=device),  # not refreshed yet
        partial_out=torch.empty(num_ctas, 2, *shape[1:], dtype=torch.float32, device=device),
        partial_lse=torch.empty(num_ctas, 2, seqlen_q, heads, dtype=torch.float32, device=device),
        num_splits=num_splits,
        lse=torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=device),
    )


def _plan(cache_seqlens: Tensor, cache_starts: Tensor | None, capacity: int, *call: Any) -> None:
    schedule, splits = call[4:6]
    if schedule.shape[0]:
        from mha2mla.kernels.split_kv.plan_kernel import launch_plan

        launch_plan(cache_seqlens, cache_starts, capacity, *call)
    else:
        splits.copy_(spans_of(cache_seqlens, cache_starts, capacity))


register(
    "split_kv_plan(Tensor cache_seqlens, Tensor? cache_starts, int capacity, int seqlen_q, bool causal, int window,"
    " int sinks, Tensor(a!) schedule, Tensor(b!) splits, int num_splits) -> ()",
    _plan,
    lambda *_: None,
)
