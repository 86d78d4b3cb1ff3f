"""What a conversion gained: time of the attention op, of whole steps, prompts and ``generate``, source against MLA.

Every row is measured after, and only after, the same inputs passed a check against float64, or says that it was not
checked. Time comes from a library: ``triton.testing`` on CUDA (cold L2 for each run; CUDA-graph time beside it),
``torch.utils.benchmark`` on a CPU; that of ``generate`` is the wall clock's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, Literal, get_args

import torch

from mha2mla.checkpoints import check_converted
from mha2mla.environment import compute_device, usual_dtype
from mha2mla.eval.generate_latency import generate_latency
from mha2mla.eval.loading import load_model
from mha2mla.eval.measurement import COLUMNS, is_ours, unless_out_of_memory
from mha2mla.eval.op_latency import BASELINES, attention_latency
from mha2mla.eval.report import html_table
from mha2mla.eval.step_latency import forward_latency
from mha2mla.modeling.backends import OF_OPS
from mha2mla.modeling.config import cache_bytes
from mha2mla.terminal import progress_bar
from mha2mla.testing.timing import copy_rate

Level = Literal["op", "step", "prefill", "e2e"]
SPEEDS = ("us_p50", "us_graph")  # what speed-ups and shares are of, the last that a row has


class LatencyRows(list[dict[str, Any]]):
    """Rows of measurements: a line each where they are printed, a table in a notebook."""

    def columns(self) -> dict[str, str]:
        """Key → heading of what any of them has."""
        return {key: head for key, head in COLUMNS.items() if any(row.get(key) is not None for row in self)}

    def __repr__(self) -> str:
        return "\n".join(_line(row) for row in self)

    def _repr_html_(self) -> str:
        return html_table(self, self.columns())


def _line(row: dict[str, Any]) -> str:
    us, speed_up = time_of(row), row.get("speed_up")
    found = row["status"] if us is None else f"{us:,.1f} µs" + (f", {speed_up:.3g} x the source" if speed_up else "")
    status = "" if us is None or row["status"] == "ok" else f" ({row['status']})"
    return f"{row['op']}, {row['implementation']}, {row['batch']} x {row['seqlen']:,}: {found}{status}"


def model_latency(
    source: Any,
    converted: Any,
    *,
    levels: Sequence[Level] = ("op", "step"),
    batch_sizes: Sequence[int] | None = None,
    seqlens: Sequence[int] = (512, 2048),
    new_tokens: int = 64,
    check: bool = True,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    page_size: int = 64,
    layer: int = 0,
    backend: Literal["tilelang", "reference"] | None = None,
    min_run_time: float = 0.5,
    progress: bool = False,
    save: Callable[[list[dict[str, Any]]], None] | None = None,
) -> LatencyRows:
    """Latency of a converted checkpoint beside its source, by level; one model is in memory at a time.

    Args:
        source, converted: folder, hub id, a loaded causal language model, or a function that makes one.
        levels: ``"op"``, attention of one layer over filled caches; ``"step"``, a whole decode step; ``"prefill"``, a
            prompt; ``"e2e"``, ``generate``.
        new_tokens: of ``generate``.
        check: without it nothing is compared with float64, and every row says so.
        dtype: what to compute in; default bfloat16 on CUDA, float32 on a CPU. Loaded models keep theirs.
        layer: whose geometry the attention op has.
        backend: of the decode op, in all measurements; ``None`` lets it choose.
        batch_sizes: sequences per call; default 1, 8 and on CUDA 64 and 256 too, of which those are taken that fit
            beside the converted model's weights at the longest of ``seqlens``.
        seqlens, page_size, min_run_time: as in :func:`attention_latency` and :func:`forward_latency`.
        progress: show a bar, on standard error.
        save: called with all rows so far after each.

    Returns:
        Rows. ``speed_up`` is the source's time over the row's (of the op, the fastest of the source's that is here);
        ``limit_us`` the time to read once what the new token sees of the cache, and the weights for a step, at the rate
        of a large copy on this device, measured beside them, and ``of_limit`` that over the row's time: in a CUDA graph
        where it has one. What does not fit into memory is a row whose status says so.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: an argument out of range, or ``converted`` is no converted model, or one too large for the device.
    """
    if not levels or not set(levels) <= set(get_args(Level)):
        raise ValueError(f"levels is {list(levels)}; expected one or several of {', '.join(get_args(Level))}")
    for name, values, least in (("batch_sizes", batch_sizes, 1), ("seqlens", seqlens, 2)):
        if values is not None and (not values or any(value < least for value in values)):
            raise ValueError(f"{name} is {list(values)}; expected one or more numbers >= {least}")
    if new_tokens < 2:
        raise ValueError(f"new_tokens is {new_tokens}; expected 2 or more")
    device = compute_device(device)
    dtype = dtype or usual_dtype(device)

    def made_converted() -> torch.nn.Module:
        model = load_model(converted, "converted", device=device, dtype=dtype)
        model.config.attention_backend = OF_OPS[backend]
        return model

    model = _fitting(made_converted, device, layer)
    config, device, dtype = model.config, model.device, model.dtype
    batch_sizes = batch_sizes or fitting_batches(model, max(seqlens))
    del model
    models = {"source": partial(load_model, source, "source", device=device, dtype=dtype), "converted": made_converted}
    grid = {"batch_sizes": batch_sizes, "seqlens": seqlens, "check": check}
    parts: list[Iterator[dict[str, Any]]] = []
    if "op" in levels:
        op = partial(
            attention_latency, config.layer_geometry(layer), check=check, dtype=dtype, device=device,
            page_size=page_size, softmax_scale=config.softmax_scale, backend=backend, min_run_time=min_run_time,
        )  # fmt: skip
        shapes = product(batch_sizes, seqlens)
        parts.append(row for batch, seqlen in shapes for row in op(batch_sizes=(batch,), seqlens=(seqlen,)))
    if forward := [level for level in levels if level in ("step", "prefill")]:
        parts.append(forward_latency(models, levels=forward, **grid, min_run_time=min_run_time))
    if "e2e" in levels:
        parts.append(generate_latency(models, **grid, new_tokens=new_tokens))
    rate = copy_rate(device, min_run_time)
    rows = LatencyRows()
    a_shape = sum(len(BASELINES) + 1 if level == "op" else len(models) for level in levels)
    total = a_shape * len(batch_sizes) * len(seqlens)
    for row in progress_bar(chain(*parts), show=progress, total=total, desc="latency", unit="row"):
        rows.append(row)
        compare(rows, rate)
        if save is not None:
            save(rows)
    return rows


def _fitting(made: Callable[[], torch.nn.Module], device: torch.device, layer: int) -> torch.nn.Module:
    """The converted model, which has such a layer; raises ValueError as :func:`model_latency`."""
    found = unless_out_of_memory(lambda: {"model": made()})
    if "status" in found:
        raise ValueError(f"converted does not fit into the memory of {device}: {found['status']}")
    config = found["model"].config
    check_converted(config.model_type, "converted")
    if not 0 <= layer < config.num_hidden_layers:
        raise ValueError(f"layer is {layer}; expected 0 to {config.num_hidden_layers - 1}")
    return found["model"]


def fitting_batches(model: torch.nn.Module, seqlen: int) -> list[int]:
    """Of 1, 8, 64 and 256 sequences of ``seqlen`` tokens those that fit beside the weights of a model, with a tenth of
    the memory left over; on a CPU 1 and 8."""
    if model.device.type != "cuda":
        return [1, 8]
    total = torch.cuda.get_device_properties(model.device).total_memory
    room = 0.9 * total - sum(each.nbytes for each in model.parameters())
    each = cache_bytes(model.config, seqlen, model.dtype.itemsize)
    return [batch for batch in (1, 8, 64, 256) if batch == 1 or batch * each <= room]


def compare(rows: Sequence[dict[str, Any]], rate: float) -> None:
    """Gives the rows that have a time their ``speed_up``, ``limit_us`` and ``of_limit``.

    Args:
        rate: bytes a second that the device reads.
    """
    fastest: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if (us := time_of(row)) is not None and not is_ours(row):
            key = (row["op"], row["batch"], row["seqlen"])
            fastest[key] = min(us, fastest.get(key, us))
    for row in rows:
        if (us := time_of(row)) is None:
            continue
        if is_ours(row) and (theirs := fastest.get((row["op"], row["batch"], row["seqlen"]))) is not None:
            row["speed_up"] = theirs / us
        if row["op"] != "prefill":
            read = row.get("read_bytes", row["cache_bytes"]) + (0 if row["op"] == "attention" else row["weight_bytes"])
            row["limit_us"] = read / rate * 1e6
            row["of_limit"] = row["limit_us"] / us


def time_of(row: dict[str, Any]) -> float | None:
    """µs of a row, None if it has none: in a CUDA graph where that was measured."""
    times = [row[name] for name in SPEEDS if row.get(name) is not None]
    return times[-1] if times else None
