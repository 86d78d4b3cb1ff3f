"""Where what was downloaded or made once is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where downloads are kept: ``MHA2MLA_CACHE``, else ``XDG_CACHE_HOME/mha2mla``, else ``~/.cache/mha2mla``."""
    if own := os.environ.get("MHA2MLA_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "mha2mla"
