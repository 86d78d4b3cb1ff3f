"""One way to declare an attention op over a paged cache: schemas, fakes, checks, plan, dispatch and launch follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.ops import (
    Argument,
    accumulator,
    argument_error,
    capability,
    check_aligned,
    check_backend,
    check_scale,
    check_tensors,
    dtype_name,
    in_plain_eager_mode,
    load,
    num_sms,
    register,
    sizes_of,
)
from mha2mla.kernels.split_kv.choice import compiled_seqlen
from mha2mla.kernels.split_kv.plan import DecodePlan, allocate_plan, check_spans, check_splits, check_window

# Tensors that every op takes behind its own.
INDICES = (
    Argument("block_table", "(B max_pages)", torch.int32),
    Argument("cache_seqlens", "(B)", torch.int32),
    Argument("cache_starts", "(B)", torch.int32, optional=True),
)
# Schema of every op behind its own tensors, and of the form that writes into given tensors behind that.
_CALL = "Tensor block_table, Tensor cache_seqlens, Tensor? cache_starts, float softmax_scale, bool causal, str? backend"
_PLAN = (
    "int window, int sinks, Tensor? schedule, Tensor? splits, Tensor(a!)? partial_out, Tensor(b!)? partial_lse,"
    " Tensor(c!) out, Tensor(d!) lse"
)
_REFUSALS = (AttributeError, RuntimeError, TypeError, ValueError)
_NO_PLAN = (-1, 0, None, None, None, None)


@dataclass(frozen=True, eq=False)
class PagedOp:
    """An attention op over a paged cache, declared: ``mha2mla::name`` and ``mha2mla::name_out`` are registered by it.

    Sizes that each op has, by these names: B sequences, S_q new tokens, H query heads, P pages of ``page`` tokens.

    Attributes:
        name: of the op.
        arguments: its tensors, the query first; ``block_table``, ``cache_seqlens`` and ``cache_starts`` follow.
        out: of the output; beside it there is ``lse`` [B, H, S_q].
        shape: makes what one compilation is for of the sizes ``static`` and the query's dtype by name. A dataclass with
            the fields ``heads``, ``seqlen_q`` and ``dtype``.
        static: names of sizes, as ``shape`` takes them.
        refusal: why no kernel serves a shape on any GPU, or None.
        select: the kernel, and its static arguments, for a shape and a compute capability; raises ValueError where
            there is none. The choice has ``num_ctas(number of multiprocessors)``.
        package: of the kernels; ``make_<kernel>`` in its module ``<kernel>`` makes the TileLang function of a choice.
        modules: of kernels whose module has another name.
        reference: "module:function", the oracle, which takes arguments by name. Both are imported when they are needed.
        numbers: names of float arguments that follow the tensors. Kernels take them last; behind them, of each optional
            tensor, whether there is one (0 or 1).
        guards_indices: kernels guard their own indices, so that TileLang need not.
        opaque_smem_writes: inline CUDA fills shared memory, which TileLang's check of initialised buffers cannot see.
    """

    name: str
    arguments: tuple[Argument, ...]
    out: Argument
    shape: Callable[..., Any]
    static: tuple[str, ...]
    refusal: Callable[[Any], str | None]
    select: Callable[[Any, int], Any]
    package: str
    reference: str
    modules: dict[str, str] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    guards_indices: bool = False
    opaque_smem_writes: bool = False
    # Names of the arguments; where a size stands first; those whose last dimensions are one to kernels, with the first;
    # the optional ones.
    names: tuple[str, ...] = field(init=False)
    places: dict[str, tuple[int, int]] = field(init=False)
    joined: tuple[tuple[int, int], ...] = field(init=False)
    optional: tuple[int, ...] = field(init=False)
    shaped: tuple[int, ...] = field(init=False)  # those of which kernels do not see every size

    def __post_init__(self) -> None:
        places: dict[str, tuple[int, int]] = {}
        required = [(i, a) for i, a in enumerate(self.arguments) if not a.optional]
        for index, argument in required:
            for dim, name in enumerate(argument.names):
                places.setdefault(name, (index, dim))
        joined = tuple((i, a.strided) for i, a in required if a.strided < len(a.names) - 1)
        object.__setattr__(self, "names", tuple(argument.name for argument in self.arguments))
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "joined", joined)
        object.__setattr__(self, "optional", tuple(i for i, a in enumerate(self.arguments) if a.optional))
        object.__setattr__(self, "shaped", (*(index for index, _ in joined), *self.optional))
        tensors = ", ".join(
            [f"Tensor{'?' * argument.optional} {argument.name}" for argument in self.arguments]
            + [f"float {name}" for name in self.numbers]
        )
        register(f"{self.name}({tensors}, {_CALL}) -> (Tensor, Tensor)", self._decode, self._empty)
        register(f"{self.name}_out({tensors}, {_CALL}, {_PLAN}) -> ()", self._decode_out, lambda *_: None)

    def __call__(
        self,
        data: tuple[Tensor | None, ...],
        block_table: Tensor,
        cache_seqlens: Tensor,
        cache_starts: Tensor | None,
        softmax_scale: float,
        causal: bool,
        backend: str | None,
        plan: DecodePlan | None,
        out: Tensor | None,
        return_lse: bool,
        numbers: tuple[float, ...] = (),
        through: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Checks and runs the op; ``data`` and ``numbers`` as declared, the others as in
        :func:`mha2mla.kernels.mla_decode`. ``through``, in plain eager mode with a plan for kernels: as ``Launch``."""
        like, indices = None, (block_table, cache_seqlens, cache_starts)
        eager = in_plain_eager_mode(data[0])  # else the dispatcher, which costs as much as the kernel's launch
        if eager and plan is not None and plan.schedule.shape[0]:
            try:
                # The checks of one call with a plan hold for another with the same properties; the kernels' host code
                # checks the rest of each call in C: devices, dtypes, and the sizes that their signatures name.
                shapes = [None if data[index] is None else data[index].shape for index in self.shaped]
                strides = [None if x is None else x.is_contiguous() or x.stride() for x in (*data, out)]
                like = (self, softmax_scale, bool(causal), backend, numbers, *shapes, *strides)
                if (launch := plan.memory.find(like, indices)) is not None:
                    made, lse = launch(
                        data, block_table, out, _empty_lse(data[0], plan.shape) if return_lse else None, through
                    )
                    return (made, lse) if return_lse else made
            except _REFUSALS:
                pass  # by kernels or torch: the checks say why
        check_scale(softmax_scale)
        written = ((), ()) if out is None else ((self.out,), (out,))
        sizes = check_tensors((*self.arguments, *INDICES, *written[0]), (*data, *indices, *written[1]), is_paged=True)
        call = (*data, *numbers, *indices, softmax_scale, causal, backend)
        if plan is None and out is None:
            made, lse = getattr(torch.ops.mha2mla, self.name)(*call)
            return (made, lse) if return_lse else made
        out = data[0].new_empty(self._out_shape(sizes)) if out is None else out
        if plan is not None:
            plan.check(out, block_table, sizes["page"], causal)
        buffers = _NO_PLAN if plan is None else plan.buffers
        lse = plan.lse if eager and plan is not None and not return_lse else None
        lse = _empty_lse(out, out.shape) if lse is None else lse
        if not eager:
            getattr(torch.ops.mha2mla, f"{self.name}_out")(*call, *buffers, out, lse)
        elif (launch := self._run(sizes, *call, *buffers, out, lse, through=through)) is not None and like is not None:
            # Calls like it may not write to this caller's lse.
            plan.memory.keep(indices, like, replace(launch, lse=torch.empty_like(lse)) if return_lse else launch)
        return (out, lse) if return_lse else out

    def plan(
        self,
        sizes: dict[str, int],
        query: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor | None,
        cache_starts: Tensor | None,
        causal: bool,
        window: int | None,
        sinks: int,
        backend: str | None,
        num_splits: int | None = None,
    ) -> DecodePlan:
        """A plan for calls of these ``sizes``, by name; of the query, dtype and device are looked at. Not filled where
        ``cache_seqlens`` is None."""
        pages = sizes_of("block_table", block_table, "B max_pages")
        if pages["B"] != sizes["B"]:
            raise argument_error("block_table.shape", tuple(block_table.shape), f"[{sizes['B']}, max_pages]")
        window, sinks = check_window(window, sinks)
        check_splits(num_splits, sizes["B"])
        num_ctas = self.num_ctas(backend, *[sizes[name] for name in self.static], query.dtype, query.device)
        if num_ctas and num_splits is not None:
            num_ctas = max(1, sizes["B"] * num_splits)
        plan = allocate_plan(
            self._out_shape(sizes), num_ctas, pages["max_pages"] * sizes["page"], causal,
            window, sinks, query.device, num_splits or 0,
        )  # fmt: skip
        if cache_seqlens is not None:
            plan.refresh(cache_seqlens, cache_starts)
        return plan

    def num_ctas(self, backend: str | None, *call: Any) -> int:
        """Blocks of the kernel per tile of query rows: what is resident at once; 0 where the reference serves. ``call``
        as in :func:`dispatch`. Dynamo takes the answer and does not trace how it was found."""
        served = dispatch(self, backend, *call)
        return 0 if served is None else served[1].num_ctas(num_sms(call[-1]))

    num_ctas._dynamo_marked_constant = True  # torch.compiler.assume_constant_result imports Dynamo, for 1 s

    def choose(self, shape: Any, device: torch.device) -> Any:
        """The choice of ``select`` for a device. Raises ValueError as it does."""
        return self.select(shape, capability(device))

    def make_split(self, shape: Any, choice: Any, *machine: Any) -> Any:
        """The TileLang function of a choice, not compiled; ``machine`` for kernels that also run on the C target."""
        module = self.modules.get(choice.kernel, choice.kernel)
        return resolve_name(f"{self.package}.{module}:make_{choice.kernel}")(shape, choice, *machine)

    def explain(self, shape: Any, device: torch.device | str) -> str | None:
        """Why TileLang would refuse a shape on a device, or None. A CUDA device that this machine lacks is taken to be
        a Hopper."""
        device = torch.device(device)
        why = self.refusal(shape)
        if why is None and device.type != "cuda":
            why = f"device is {device}; TileLang kernels run on CUDA devices"
        if why is None:
            try:
                self.choose(compiled_shape(shape), device)
            except ValueError as error:
                return str(error)
        return why

    def _out_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple([sizes[name] for name in self.out.names])

    def _sizes_of(self, data: tuple[Any, ...]) -> dict[str, int]:
        """The sizes of ``arguments``, which have been checked; what follows them is not looked at."""
        return {name: data[index].shape[dim] for name, (index, dim) in self.places.items()}

    def _empty(self, *call: Any) -> tuple[Tensor, Tensor]:
        out = call[0].new_empty(self._out_shape(self._sizes_of(call)))
        return out, _empty_lse(out, out.shape)

    def _decode(self, *call: Any) -> tuple[Tensor, Tensor]:
        made = self._empty(*call)
        self._decode_out(*call, *_NO_PLAN, *made)
        return made

    def _decode_out(self, *call: Any) -> None:
        self._run(self._sizes_of(call), *call)

    def _run(
        self, sizes: dict[str, int], *call: Any, through: tuple[Tensor, Tensor] | None = None
    ) -> Callable[..., None] | None:
        """Runs a checked call; what was launched, for calls like it."""
        count = len(self.arguments)
        data, numbers, call = call[:count], call[count : count + len(self.numbers)], call[count + len(self.numbers) :]
        block_table, cache_seqlens, cache_starts, softmax_scale, causal, backend, window, sinks, *buffers, out, lse = (
            call
        )
        schedule, splits = buffers[:2]
        query = data[0]
        served = dispatch(self, backend, *map(sizes.__getitem__, self.static), query.dtype, query.device)
        if served is None:
            check_spans(schedule, splits, cache_seqlens, cache_starts, block_table.shape[1] * sizes["page"])
            made = load(self.reference)(
                **dict(zip((*self.names, *self.numbers), (*data, *numbers), strict=True)), block_table=block_table,
                cache_seqlens=cache_seqlens, softmax_scale=softmax_scale, causal=causal, cache_starts=cache_starts,
                window=None if window < 0 else window, sinks=sinks,
            )  # fmt: skip
            out.copy_(made[0])
            lse.copy_(made[1])
            return None
        check_aligned(out=out, **dict(zip(self.names, data, strict=True)))
        if schedule is None:
            plan = self.plan(sizes, query, block_table, cache_seqlens, cache_starts, causal, None, 0, backend)
            window, sinks, *buffers = plan.buffers
        elif schedule.shape[0] == 0:
            raise ValueError(
                "plan was made for the reference backend; expected one for TileLang, which serves this call"
            )
        settings = (softmax_scale, causal, window, sinks, *numbers)
        launch = load("mha2mla.kernels.split_kv.launch:launch")
        return launch(self, *served, data, block_table, settings, buffers, out, lse, through)


def _empty_lse(like: Tensor, shape: Sequence[int]) -> Tensor:
    """For an output of a shape, of the dtype and on the device of ``like``."""
    batch, seqlen_q, heads, _ = shape
    return like.new_empty(batch, heads, seqlen_q, dtype=accumulator(like.dtype))


def compiled_shape(shape: Any) -> Any:
    """The shape whose kernels serve ``shape``: S_q is rounded up to a number that kernels are compiled for."""
    return replace(shape, seqlen_q=compiled_seqlen(shape.seqlen_q))


@lru_cache(maxsize=4096)
def dispatch(op: PagedOp, backend: str | None, *call: Any) -> tuple[Any, Any] | None:
    """The one selection of a call's kernel, cached: shape to compile and choice of ``op.select``; None where the
    reference serves.

    Args:
        op: that is called.
        backend: "reference", "tilelang", or None: TileLang where it serves the call.
        call: the sizes ``op.static``, the query's dtype and device.

    Raises:
        ValueError: ``backend`` is unknown, or "tilelang" and no kernel serves the call, for which the reason is given.
    """
    check_backend(backend)
    if backend == "reference":
        return None
    *sizes, dtype, device = call
    shape = op.shape(*sizes, dtype_name(dtype))
    why = op.explain(shape, device)
    if why is None:
        return compiled_shape(shape), op.choose(compiled_shape(shape), device)
    if backend == "tilelang":
        raise ValueError(f"backend is 'tilelang', which refuses this call: {why}")
    return None
