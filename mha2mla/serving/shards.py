"""Where vLLM's layers hold the tensors of a converted checkpoint, by name. No vLLM here."""

from __future__ import annotations

import re

# Linear layers of vLLM that hold several of a checkpoint's: name there -> names here, in their order.
STACKED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_ATTENTION = re.compile(r"(?:^|\.)self_attn\.(.+)$")


def attention_name(name: str) -> str | None:
    """What is behind ``self_attn.`` in a tensor's name; None for tensors of other modules."""
    found = _ATTENTION.search(name)
    return found[1] if found else None


def placement(name: str) -> tuple[str, int | None]:
    """Where vLLM's layers hold a checkpoint's tensor: its name there, and its place among those that are stacked."""
    for stacked, parts in STACKED.items():
        for place, part in enumerate(parts):
            if f"{part}." in name:
                return name.replace(part, stacked), place
    return name, None


def checkpoint_names(name: str) -> tuple[str, ...]:
    """The checkpoint's tensors that a tensor of vLLM's layers holds, in their order: the inverse of
    :func:`placement`."""
    for stacked, parts in STACKED.items():
        if f"{stacked}." in name:
            return tuple(name.replace(stacked, part) for part in parts)
    return (name,)
