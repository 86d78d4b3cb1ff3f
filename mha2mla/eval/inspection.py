"""What a converted checkpoint is, read from its config alone."""

from __future__ import annotations

import os
from typing import Any

import torch

from mha2mla.eval.loading import check_folder


def inspect_config(
    checkpoint: str | os.PathLike[str], dtype: str | torch.dtype = torch.bfloat16
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Geometry, recipe and cache bytes of a converted checkpoint. No weights are read.

    Args:
        checkpoint: folder or hub id.
        dtype: element type that the cache bytes are counted for.

    Returns:
        A summary, and one row per run of layers with the same geometry.

    Raises:
        ValueError: the checkpoint is not a converted one.
        FileNotFoundError: no such folder.
    """
    from transformers import AutoConfig

    import mha2mla  # noqa: F401  registers model_type "mha2mla"

    config = AutoConfig.from_pretrained(check_folder(checkpoint, "checkpoint"))
    if config.model_type != "mha2mla":
        raise ValueError(
            f"checkpoint has model_type {config.model_type!r}; expected 'mha2mla', a checkpoint that was converted"
        )
    itemsize = (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
    before, after = config.source_cache_bytes_per_token(itemsize), config.cache_bytes_per_token(itemsize)
    summary = {
        "source": config.source_config.get("_name_or_path") or None,
        "source model_type": config.source_config.get("model_type"),
        "layers": config.num_hidden_layers,
        "cache bytes per token": after,
        "cache bytes per token of the source": before,
        "reduction": f"{1 - after / before:.1%}",
        "schema version": config.schema_version,
    }
    summary |= {f"recipe.{key}": value for key, value in (config.recipe or {}).items()}
    rows: list[dict[str, Any]] = []
    for index in range(config.num_hidden_layers):
        geometry = config.layer_geometry(index)
        if rows and rows[-1]["_geometry"] == geometry:
            rows[-1]["layers"] = f"{rows[-1]['layers'].partition('–')[0]}–{index}"
            continue
        rows.append(
            {
                "layers": str(index),
                **geometry.to_dict(),
                "bytes_per_token_and_layer": geometry.cache_bytes_per_token(itemsize),
                "_geometry": geometry,
            }
        )
    return summary, [{key: value for key, value in row.items() if key != "_geometry"} for row in rows]
