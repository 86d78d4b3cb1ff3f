"""Faults of a text are named; faults of other things are not laid to it."""

import pytest
import torch

from mha2mla.conversion.calibration.windows import calibration_windows
from mha2mla.conversion.destination import DestinationError
from mha2mla.conversion.resume import WorkFolder
from mha2mla.conversion.source.opening import open_source


class FullDisk(WorkFolder):
    def put(self, name, tensors, about=None):
        raise DestinationError("no space is left")


def test_a_full_disk_is_no_fault_of_the_text(source, tmp_path):
    keys = {"lengths": (32,), "tokens": 64, "seed": 0, "device": torch.device("cpu")}
    with pytest.raises(DestinationError, match="^no space is left"):
        calibration_windows(open_source(source), "generated", work=FullDisk(tmp_path / "work", {}), **keys)
