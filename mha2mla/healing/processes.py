"""Several processes of one healing, as ``accelerate launch`` and ``torchrun`` start them: one GPU each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Processes:
    """Runs work in the main process alone and shares its results.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_main, self._several = True, int(os.environ.get("WORLD_SIZE", "1")) > 1
        if self._several:
            from accelerate import PartialState

            self.is_main = PartialState(cpu=device.type == "cpu").is_main_process

    def share(self, make: Callable[[], T]) -> T:
        """``make()`` of the main process, in all of them; so is its error."""
        if not self._several:
            return make()
        made: list[tuple[T | None, Exception | None]] = [(None, None)]
        if self.is_main:
            try:
                made = [(make(), None)]
            except Exception as error:
                made = [(None, error)]
        torch.distributed.broadcast_object_list(made, src=0)
        value, error = made[0]
        if error is not None:
            raise error
        return value


def own_device(device: torch.device) -> torch.device:
    """The device of this process, of several the GPU with its local rank."""
    if device.type == "cuda" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return device
