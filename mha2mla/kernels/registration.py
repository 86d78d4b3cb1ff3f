"""How an op is registered with torch: a schema, what it does on every device, and what it makes of fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("mha2mla", "FRAGMENT")


def register(schema: str, call: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """``mha2mla::name`` of a schema "name(…) -> …"."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mha2mla::{name}", fake, lib=LIBRARY)
