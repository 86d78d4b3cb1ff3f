"""The rotary table of a source, by transformers' own functions; schemes without one fixed table are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mha2mla.conversion.families.spec import RotaryTable, UnsupportedSourceError


def rotary_table(
    config: PreTrainedConfig,
    head_dim: int,
    *,
    longrope_table: str = "short",
    layer_type: str | None = None,
    partial: bool = False,
) -> RotaryTable:
    """The table that the source rotates by.

    Args:
        longrope_table: "short" or "long", which of longrope's two tables serves every length.
        layer_type: where ``rope_parameters`` holds parameters per layer type, which to take.
        partial: whether the family's code looks at ``partial_rotary_factor``.

    Raises:
        UnsupportedSourceError: dynamic NTK (the table depends on the length), a partly rotated head, tables by layer
            type where one is expected, or an unknown rope type.
    """
    parameters = _parameters(config, layer_type)
    rope_type = parameters.get("rope_type", "default")
    share = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    share = 1.0 if share is None else share
    if share != 1.0 and not partial:
        raise UnsupportedSourceError(
            f"partial_rotary_factor is {share}; expected 1.0 of a {config.model_type}, which rotates whole heads"
        )
    rotary_dim = int(head_dim * share)
    if rope_type == "dynamic":
        raise UnsupportedSourceError(
            "rope_type is 'dynamic': dynamic NTK has another table for every length, so no fixed rotary part exists"
        )
    if rope_type == "default":
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
        return RotaryTable(1.0 / parameters["rope_theta"] ** exponent, 1.0)
    if rope_type not in ("linear", "llama3", "yarn", "longrope"):
        raise UnsupportedSourceError(f"rope_type is {rope_type!r}; expected default, linear, llama3, yarn or longrope")
    note, length, lengths = "", None, (1, None)
    if rope_type == "longrope":
        for key in ("short_factor", "long_factor"):
            if len(parameters[key]) != rotary_dim // 2:
                raise UnsupportedSourceError(
                    f"{key} has {len(parameters[key])} factors; expected {rotary_dim // 2}, one per rotated pair"
                )
        original = parameters["original_max_position_embeddings"]
        length = original + 1 if longrope_table == "long" else None
        lengths = (1, original) if length is None else (length, None)
        reach = f"beyond {original} tokens" if longrope_table == "long" else f"for lengths up to {original}"
        note = f"longrope: the {longrope_table} table, which the source uses {reach}, serves every length"
    by_type = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length, **by_type)
    if inv_freq.numel() != rotary_dim // 2:
        raise UnsupportedSourceError(
            f"the rotary table has {inv_freq.numel()} frequencies for {rotary_dim} rotated dims; expected one per pair"
        )
    return RotaryTable(inv_freq.float(), float(factor), note, lengths)


def _parameters(config: PreTrainedConfig, layer_type: str | None) -> Mapping[str, Any]:
    parameters = config.rope_parameters or {}
    if layer_type is not None:
        return parameters[layer_type]
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedSourceError("rope_parameters differ by layer type; expected one rotary table for all layers")
    return parameters
