"""The activations of calibration text that wait between two layers, in memory or in a file without a name."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

from mha2mla.conversion.calibration.blocks import TokenBlocks

SPILL_BYTES = 1 << 30


def device_for_activations(device: torch.device, size: int) -> torch.device:
    """Where ``size`` bytes of activations wait: on an accelerator, in at most half of what is not in use there, or on
    the CPU. To be asked once for all stores that exist together: each that is made leaves less."""
    if device.type != "cuda":
        return torch.device("cpu")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fits = size <= (torch.cuda.mem_get_info(device)[0] + unused) // 2
    return device if fits else torch.device("cpu")


class ActivationStore:
    """Hidden states of all tokens at one layer boundary: in memory, or in a mapped file when larger than a limit.

    What is read comes as windows of the length of its blocks.

    Args:
        blocks: tokens, and how they are cut into windows.
        hidden_size: numbers per token.
        dtype: of the activations (bfloat16 is stored as its bits).
        folder: whose disk the file goes to when one is needed; it has no name there.
        spill_bytes: larger stores go to disk, unless their memory is an accelerator's.
        device: where the memory is; files are read through the CPU.

    Raises:
        OSError: the disk has no room for the file.
    """

    def __init__(
        self,
        blocks: TokenBlocks,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        folder: Path,
        spill_bytes: int = SPILL_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        self.blocks = blocks
        shape = (*blocks.tokens.shape, hidden_size)
        size = blocks.tokens.numel() * hidden_size * dtype.itemsize
        if size <= spill_bytes or torch.device(device).type != "cpu":
            self._data = torch.empty(shape, dtype=dtype, device=device)
        else:
            self._data = _on_disk(folder, size).view(dtype).view(shape)

    def __len__(self) -> int:
        return self._data.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._data.dtype

    def read(self, blocks: slice, device: torch.device) -> torch.Tensor:
        """Neighbouring blocks of one length as a tensor of its own, [windows, length, hidden]."""
        data = self._data[blocks].to(device, copy=True)
        return data.view(-1, self.blocks.lengths[blocks.start], data.shape[-1])

    def tokens(self, block: int, tokens: slice, device: torch.device) -> torch.Tensor:
        """Neighbouring tokens of one block, [tokens, hidden]."""
        return self._data[block, tokens].to(device)

    def gather(self, blocks: torch.Tensor, device: torch.device, length: int) -> torch.Tensor:
        """Blocks of one ``length`` by their numbers, int64 [n]: [windows, length, hidden]."""
        found = self._data.index_select(0, blocks.to(self._data.device)).to(device)
        return found.view(-1, length, found.shape[-1])

    def write(self, blocks: slice, values: torch.Tensor) -> None:
        self._data[blocks] = values.to(self._data.device).reshape(self._data[blocks].shape)

    def close(self) -> None:
        """Frees the memory or the room on disk."""
        self._data = torch.empty(0, 0, 0)


def _on_disk(folder: Path, size: int) -> torch.Tensor:
    """uint8 [size] mapped from a file without a name, so that no other run finds it and no killed one leaves it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A full disk shows here, and not as a signal when a page is touched.
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        error.filename = str(folder / "activations")
        raise
