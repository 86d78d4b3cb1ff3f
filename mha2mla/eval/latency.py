"""What a conversion gained: time of the attention op and of a whole decode step, source against MLA.

Every row is measured after, and only after, the same inputs passed a check against float64. Time comes from a library:
``triton.testing`` on CUDA (cold L2 for each run; CUDA-graph time beside it), ``torch.utils.benchmark`` on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from mha2mla.environment import compute_device
from mha2mla.eval.loading import load_model
from mha2mla.eval.op_latency import attention_latency
from mha2mla.eval.step_latency import decode_step_latency


def model_latency(
    source: Any,
    converted: Any,
    *,
    op: Literal["attention", "step", "both"] = "both",
    batch_sizes: Sequence[int] = (1, 8),
    seqlens: Sequence[int] = (512, 2048),
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    page_size: int = 64,
    layer: int = 0,
    backend: Literal["tilelang", "reference"] | None = None,
    min_run_time: float = 0.5,
) -> list[dict[str, Any]]:
    """Latency of a converted checkpoint beside its source: attention op of one layer, whole decode step, or both.

    Args:
        source, converted: folder, hub id, or a loaded causal language model.
        op: ``"attention"``, ``"step"`` or ``"both"``.
        dtype: what to compute in; default bfloat16 on CUDA, float32 on a CPU. Loaded models keep theirs.
        layer: whose geometry the attention op has.
        backend: of the decode op, in both measurements; ``None`` lets it choose.
        batch_sizes, seqlens, page_size, min_run_time: as in :func:`attention_latency` and :func:`decode_step_latency`.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: an argument out of range, or ``converted`` is no converted model.
    """
    if op not in ("attention", "step", "both"):
        raise ValueError(f"op is {op!r}; expected 'attention', 'step' or 'both'")
    for name, values in (("batch_sizes", batch_sizes), ("seqlens", seqlens)):
        least = 1 if name == "batch_sizes" else 2
        if not values or any(value < least for value in values):
            raise ValueError(f"{name} is {list(values)}; expected one or more numbers >= {least}")
    device = compute_device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    converted = load_model(converted, "converted", device=device, dtype=dtype)
    config = converted.config
    if config.model_type != "mha2mla":
        raise ValueError(f"converted has model_type {config.model_type!r}; expected 'mha2mla', a converted checkpoint")
    if not 0 <= layer < config.num_hidden_layers:
        raise ValueError(f"layer is {layer}; expected 0 to {config.num_hidden_layers - 1}")
    rows = []
    if op in ("attention", "both"):
        rows += attention_latency(
            config.layer_geometry(layer),
            batch_sizes=batch_sizes,
            seqlens=seqlens,
            dtype=converted.dtype,
            device=converted.device,
            page_size=page_size,
            softmax_scale=config.softmax_scale,
            backend=backend,
            min_run_time=min_run_time,
        )
    if op in ("step", "both"):
        source = load_model(source, "source", device=device, dtype=dtype)
        names = {None: None, "tilelang": "mla_paged", "reference": "mla_reference"}
        converted.config.attention_backend = names[backend]
        rows += decode_step_latency(
            {"source": source, "converted": converted},
            batch_sizes=batch_sizes,
            seqlens=seqlens,
            min_run_time=min_run_time,
        )
    return rows
