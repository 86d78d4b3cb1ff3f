"""Calibration text that a source wrote, kept in the cache folder for other conversions of it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from safetensors import SafetensorError, safe_open

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.result.writer import DestinationError, save_tensors
from mha2mla.conversion.resume import tensor_hash
from mha2mla.environment import cache_folder
from mha2mla.files import atomic_write


class KeptText:
    """Token windows in ``texts/KEY.safetensors`` of the cache folder; KEY is a hash of all that decides them.

    Args:
        request: JSON values: hashes of the source's files, names of texts, lengths, tokens, seed, device, versions and
            code. A cache ratio is not among them.

    Attributes:
        path: of the file.
    """

    def __init__(self, request: Any) -> None:
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        self.path = cache_folder() / "texts" / f"{key}.safetensors"

    def read(self) -> TokenBlocks | None:
        """The windows as they were written; None where there are none, or the file is damaged."""
        try:
            with safe_open(self.path, framework="pt") as file:
                windows, about = file.get_tensor("windows").clone(), file.metadata() or {}
            blocks = TokenBlocks(windows, tuple(json.loads(about["lengths"])))
            return blocks if about["sha256"] == tensor_hash(windows) else None
        except (SafetensorError, OSError, KeyError, ValueError):
            return None

    def write(self, windows: TokenBlocks) -> str | None:
        """Keeps them, whole or not at all; why they could not be kept, or None."""
        about = {"lengths": json.dumps(windows.lengths), "sha256": tensor_hash(windows.tokens)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, lambda temporary: save_tensors({"windows": windows.tokens}, temporary, about))
        except (DestinationError, OSError) as error:
            return str(error)
