"""Activations that wait on disk: nobody else's, gone with the process, there when the caller's limit says so."""

from dataclasses import replace

import pytest
import torch

from mha2mla.conversion.calibration.activations import ActivationStore
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.latent.ranks import choose_layer_ranks
from tests.conversion import tiny
from tests.conversion.tiny import Recipe, walk_over


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("source"), head_dim=32, num_hidden_layers=3)


BLOCKS = TokenBlocks.of(torch.zeros(3, 4, dtype=torch.int64))
ALL = slice(0, 3)


def spilt(folder, dtype=torch.float32):
    return ActivationStore(BLOCKS, 8, dtype=dtype, folder=folder, spill_bytes=0)


def test_what_is_spilled_has_no_name_that_a_killed_run_could_leave(tmp_path):
    stores = [spilt(tmp_path, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for store in stores:
        store.write(slice(1, 2), torch.ones(1, 4, 8, dtype=store.dtype))
        assert float(store.read(slice(1, 2), torch.device("cpu")).sum()) == 32
    assert list(tmp_path.iterdir()) == []
    assert tiny.spilt_files(tmp_path) == 2
    for store in stores:
        store.close()
    assert tiny.spilt_files(tmp_path) == 0


def test_a_search_obeys_the_limit_of_memory(source, tmp_path):
    recipe = Recipe(latent_ranks="measured")
    walk = replace(walk_over(source, recipe), folder=tmp_path / "absent")
    walk = replace(walk, geometries=(recipe.geometry(walk.spec),) * walk.spec.num_layers)
    kept = choose_layer_ranks(walk)
    assert choose_layer_ranks(replace(walk, folder=tmp_path, spill_bytes=0)) == kept
    with pytest.raises(FileNotFoundError, match="absent"):
        choose_layer_ranks(replace(walk, spill_bytes=0))
