import json

import pytest
import torch
from safetensors.torch import save_file

from mha2mla.conversion.source import CheckpointError, CheckpointReader


def sharded(folder):
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, folder / "one.safetensors")
    save_file({"c": torch.zeros(5)}, folder / "two.safetensors")
    write_index(folder, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return folder


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_shards_and_single_files_alike(tmp_path):
    reader = CheckpointReader(sharded(tmp_path))
    assert reader.names() == {"a", "b", "c"}
    assert reader.shape("a") == (2, 3) and reader.dtype("b") == "BF16"
    before = reader.tensor("a")
    reader.release()
    assert torch.equal(reader.tensor("a"), before) and torch.equal(before, torch.arange(6.0).view(2, 3))
    single = tmp_path / "single"
    single.mkdir()
    save_file({"a": torch.ones(2)}, single / "model.safetensors")
    assert CheckpointReader(single).names() == {"a"}


def test_what_is_read_is_a_copy_not_the_mapped_file(tmp_path):
    """FAILURES 27: writing to a tensor that maps the source."""
    reader = CheckpointReader(sharded(tmp_path))
    bytes_before = (tmp_path / "one.safetensors").read_bytes()
    reader.tensor("a").zero_()
    assert (tmp_path / "one.safetensors").read_bytes() == bytes_before
    assert float(reader.tensor("a").sum()) == 15.0


def missing_shard(folder):
    (folder / "two.safetensors").unlink()


def truncated_shard(folder):
    path = folder / "one.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def empty_shard(folder):
    (folder / "one.safetensors").write_bytes(b"")


def index_naming_an_absent_tensor(folder):
    write_index(folder, {"a": "one.safetensors", "d": "two.safetensors"})


def index_that_is_not_json(folder):
    (folder / "model.safetensors.index.json").write_text("{")


def index_without_a_map(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def only_pickles(folder):
    for path in folder.iterdir():
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def nothing(folder):
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (missing_shard, "two.safetensors is missing"),
        (truncated_shard, "one.safetensors is truncated or damaged"),
        (empty_shard, "one.safetensors is truncated or damaged"),
        (index_naming_an_absent_tensor, "says that d is in two.safetensors, which does not hold it"),
        (index_that_is_not_json, "is not a safetensors index"),
        (index_without_a_map, "is not a safetensors index"),
        (only_pickles, "pytorch_model.bin is not read"),
        (nothing, "has neither"),
    ],
)
def test_damage_is_named_before_any_tensor_is_read(tmp_path, damage, named):
    damage(sharded(tmp_path))
    with pytest.raises(CheckpointError, match=named):
        CheckpointReader(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        CheckpointReader(tmp_path / "absent")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_absent_or_not_finite_is_named(tmp_path, value):
    save_file({"bad": torch.tensor([1.0, value])}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="tensor bad in model.safetensors has 1 NaN or infinite"):
        reader.tensor("bad")
    with pytest.raises(CheckpointError, match="tensor good is absent"):
        reader.tensor("good")
