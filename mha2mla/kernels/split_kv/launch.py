"""Compiles the kernels of a paged op once per static shape and launches them on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack
from tvm_ffi import from_dlpack

from mha2mla.kernels.machine import OPAQUE_SMEM_WRITES, PASS_CONFIGS, SMALL_PASS_CONFIGS, compile_for, compiled_once
from mha2mla.kernels.ops import ALIGNMENT, argument_error, check_aligned, dtype_name, on_device
from mha2mla.kernels.ops import capability as capability_of
from mha2mla.kernels.split_kv.combine import combine_rows, combine_splits, compile_combine
from mha2mla.kernels.split_kv.combine_w_uv import compile_combine_w_uv
from mha2mla.kernels.split_kv.plan import LONGEST


@compiled_once
def compile_choice(op: Any, shape: Any, choice: Any, capability: int):
    """The compiled decode kernel of a choice. One compilation serves every batch, length, page count and plan."""
    function = op.make_split(shape, choice)
    configs = SMALL_PASS_CONFIGS if op.guards_indices else PASS_CONFIGS
    return compile_for(function, capability, configs | OPAQUE_SMEM_WRITES if op.opaque_smem_writes else configs)


@compiled_once
def compile_kernels(
    op: Any, shape: Any, choice: Any, capability: int, batch: int, width: int, num_ctas: int
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The compiled decode kernel of a choice, and the combine kernel for rows of ``width`` numbers by a plan for
    ``batch`` sequences and ``num_ctas`` blocks."""
    splits = combine_splits(num_ctas, batch)
    rows = combine_rows(shape.heads, shape.seqlen_q, splits, num_ctas // batch)
    combine = compile_combine(shape.heads, width, shape.dtype, splits, capability, rows)
    return compile_choice(op, shape, choice, capability), combine


class Rows(dict):
    """Tensors whose last dimensions are one, of tensors as long as these live: id → (tensor, its address, as one).

    Making a view takes more than asking for it, and the caches of a model's layers are the same at every step.
    """

    def of(self, tensor: Tensor, first: int) -> Tensor:
        """``tensor``, dense from dimension ``first`` on, which is the last of the view."""
        key, address = id(tensor), tensor.data_ptr()
        kept = self.get(key)
        if kept is not None and kept[0]() is tensor and kept[1] == address:
            return kept[2]
        rows = tensor.detach().flatten(first)  # a view that knows its tensor would keep it
        self[key] = (ref(tensor, lambda _: self.pop(key, None)), address, rows)
        return rows


@dataclass(frozen=True)
class Launch:
    """The compiled kernels of a call, and what they take behind its tensors: all that a call like it needs.

    Attributes:
        op: what it was a call of.
        split, combine: of :func:`compile_kernels`.
        shape: of the output.
        absent: which arguments were left out; kernels get the block table there.
        numbers: softmax_scale, causal, window, sinks, the op's own, and of each optional argument whether there is one.
        buffers: schedule, splits, partial_out and partial_lse of the plan.
        lse: what is written for callers that do not ask for it.
        like_query: an output may be made as the query is.
        is_kept: the plan's tensors and ``lse`` are TVM's, which need not be converted by each call.
        rows: of arguments whose last dimensions are one to kernels.
    """

    op: Any
    split: Callable[..., None]
    combine: Callable[..., None]
    shape: torch.Size
    absent: tuple[int, ...]
    numbers: tuple[float, ...]
    buffers: tuple[Any, ...]
    lse: Any
    like_query: bool
    is_kept: bool = False
    rows: Rows = field(default_factory=Rows)

    def kept(self) -> Launch:
        """For more calls like the one that it was made for."""
        # By a capsule, not by the tensor's ``__dlpack__``: that lets the default stream wait for the current one.
        *buffers, lse = [from_dlpack(to_dlpack(tensor)) for tensor in (*self.buffers, self.lse)]
        return replace(self, buffers=tuple(buffers), lse=lse, is_kept=True)

    def __call__(
        self,
        data: Sequence[Tensor | None],
        block_table: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        through: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Any]:
        """Runs decode and combine kernel; nothing synchronises, and only addresses and the output's shape are checked.

        Args:
            data, block_table: as the op takes them, checked but for what kernels check.
            out, lse: None: ``out`` is allocated, and ``lse`` its own.
            through: maps, and where what they make of the output goes; of the output itself, and lse, then only what
                one CTA read is written.
        """
        if out is None:
            out = torch.empty_like(data[0]) if self.like_query else data[0].new_empty(self.shape)
        if out.shape != self.shape:  # kernels know that of a plan's B only when they have begun
            raise argument_error("out.shape", tuple(out.shape), tuple(self.shape))
        if lse is None:
            lse = self.lse
        addresses = out.data_ptr()
        for tensor in data:
            if tensor is not None:
                addresses |= tensor.data_ptr()
        if addresses % ALIGNMENT:
            check_aligned(out=out, **dict(zip(self.op.names, data, strict=True)))
        data = list(data)
        for index, first in self.op.joined:
            data[index] = self.rows.of(data[index], first) if self.is_kept else data[index].flatten(first)
        for index in self.absent:
            data[index] = block_table
        schedule, splits, *partials = self.buffers
        with on_device(out.device):
            self.split(*data, block_table, schedule, *partials, out, lse, *self.numbers)
            if through is None:
                self.combine(splits, *partials, out, lse)
            else:
                up, values = through
                maps, outputs, width = up.shape
                combine = compile_combine_w_uv(
                    90, heads=out.shape[2], maps=maps, width=width, outputs=outputs, dtype=dtype_name(out.dtype)
                )
                combine(splits, *partials, out, up, values)
        return out, lse


def launch(
    op: Any,
    shape: Any,
    choice: Any,
    data: Sequence[Tensor | None],
    block_table: Tensor,
    settings: tuple[float, ...],
    buffers: tuple[Tensor, ...],
    out: Tensor,
    lse: Tensor,
    through: tuple[Tensor, Tensor] | None = None,
) -> Launch | None:
    """Runs decode and combine kernel; returns what ran, or None where there was nothing to run them on.

    Args:
        settings: softmax_scale, causal, window (-1: none), sinks, and the op's own numbers.
        buffers: as :class:`Launch` has them.
        through: as :class:`Launch` takes it; there are pages then.
    """
    batch, seqlen_q, _, width = out.shape
    if batch == 0 or seqlen_q == 0:
        return None
    if block_table.shape[1] == 0 or data[op.places["P"][0]].shape[0] == 0:  # no page to point a tensor map at
        out.zero_()
        lse.fill_(-torch.inf)
        return None
    softmax_scale, causal, window, *others = settings
    given = [int(data[index] is not None) for index in op.optional]
    with on_device(out.device):
        made = Launch(
            op,
            *compile_kernels(op, shape, choice, capability_of(out.device), batch, width, buffers[-1].shape[0]),
            out.shape,
            tuple(index for index in op.optional if data[index] is None),
            (softmax_scale, int(causal), LONGEST if window < 0 else window, *others, *given),
            tuple(buffers),
            lse,
            like_query=data[0].shape == out.shape and data[0].is_contiguous(),
        )
    made(data, block_table, out, lse, through)
    return made
