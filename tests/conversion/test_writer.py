import hashlib
import json
import os

import pytest
import torch

from mha2mla.conversion.destination import ShardedWriter
from mha2mla.conversion.source.files import CheckpointReader
from tests.folders import listing


def test_a_small_checkpoint_is_one_file_without_an_index(tmp_path):
    writer = ShardedWriter(tmp_path)
    writer.add("a", torch.arange(4.0))
    writer.finish()
    assert listing(tmp_path) == ["model.safetensors"]
    assert torch.equal(CheckpointReader(tmp_path).tensor("a"), torch.arange(4.0))


def test_shards_fill_up_and_an_index_leads_to_them(tmp_path):
    writer = ShardedWriter(tmp_path, max_shard_bytes=100)
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each: two to a shard
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert index["weight_map"] == {f"t{i}": f"model-0000{i // 2 + 1}-of-00003.safetensors" for i in range(5)}
    assert len(listing(tmp_path)) == 4
    reader = CheckpointReader(tmp_path)
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())


def test_slices_of_one_tensor_are_written_apart(tmp_path):
    whole = torch.arange(8.0)
    writer = ShardedWriter(tmp_path)
    writer.add("a", whole[:4])
    writer.add("b", whole[4:])
    writer.finish()
    assert torch.equal(CheckpointReader(tmp_path).tensor("b"), whole[4:])
    assert os.path.getsize(tmp_path / "model.safetensors") < 300


def test_a_tensor_that_became_nan_or_comes_twice_is_named(tmp_path):
    writer = ShardedWriter(tmp_path)
    writer.add("a", torch.ones(1))
    with pytest.raises(ValueError, match="tensor a is written twice"):
        writer.add("a", torch.ones(1))
    with pytest.raises(ValueError, match="tensor b became NaN"):
        writer.add("b", torch.tensor([float("nan")]))


@pytest.mark.parametrize("max_shard_bytes", [60, 1 << 30])
def test_digests_are_those_of_the_files(max_shard_bytes, tmp_path, monkeypatch):
    """Of one file and of several, without reading back what was written."""
    read = []
    monkeypatch.setattr("hashlib.file_digest", lambda *_: read.append(1))
    writer = ShardedWriter(tmp_path, max_shard_bytes=max_shard_bytes)
    for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float16)):
        writer.add(f"t{index}", torch.randn(3, 5).to(dtype).T)
    writer.add("empty", torch.zeros(0, 3))
    writer.finish()
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob("*.safetensors")}
    assert writer.sha256 == files and not read
