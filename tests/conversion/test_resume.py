"""Finished layers on disk: whole or absent, and only for the conversion that made them."""

import pytest
import torch
from safetensors.torch import save_file

from mha2mla.conversion.resume import FinishedLayers, ResumeError, code_hash, source_identity, tensor_hash
from mha2mla.conversion.source import CheckpointReader

FINGERPRINT = {"recipe": {"layout": "shared", "seed": 0}, "device": "cpu", "code": "a" * 64}


def some_layer(seed=0):
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return {"weight": base.T, "half": base[:2].bfloat16(), "view": base[2:], "inv_freq": base.new_ones(1, 2)}


def test_layers_come_back_bit_equal_with_their_records(tmp_path):
    layers = FinishedLayers(tmp_path / "work", FINGERPRINT)
    assert len(layers) == 0 and 3 not in layers
    layers.add(3, some_layer(), {"seconds": 1.5, "note": ""})
    again = FinishedLayers(tmp_path / "work", FINGERPRINT)
    assert list(again) == list(layers) == [3]
    assert again.record(3) == layers.record(3) == {"seconds": 1.5, "note": ""}
    for name, tensor in some_layer().items():
        assert again[3][name].dtype == tensor.dtype and torch.equal(again[3][name], tensor)


def test_what_is_not_whole_is_not_there(tmp_path):
    layers = FinishedLayers(tmp_path / "work", FINGERPRINT)
    for layer in range(3):
        layers.add(layer, some_layer(layer), {})
    path = tmp_path / "work" / "layer-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    (tmp_path / "work" / ".layer-00003.safetensors.part").write_bytes(b"half")
    save_file({"a": torch.ones(2)}, tmp_path / "work" / "layer-00004.safetensors")  # without a record: not ours
    assert list(FinishedLayers(tmp_path / "work", FINGERPRINT)) == [0, 2]
    left = sorted(path.name for path in (tmp_path / "work").iterdir())
    assert left == ["fingerprint.json", "layer-00000.safetensors", "layer-00002.safetensors"]


def test_layers_of_another_conversion_are_refused_by_what_differs(tmp_path):
    FinishedLayers(tmp_path / "work", FINGERPRINT).add(0, some_layer(), {})
    other = {**FINGERPRINT, "recipe": {"layout": "per-group", "seed": 0}, "code": "b" * 64}
    with pytest.raises(ResumeError, match=r"differs in code, recipe.layout \(shared there, per-group now\)$"):
        FinishedLayers(tmp_path / "work", other)
    assert list(FinishedLayers(tmp_path / "work", FINGERPRINT)) == [0]
    (tmp_path / "work" / "fingerprint.json").write_text("{")
    with pytest.raises(ResumeError, match="device"):
        FinishedLayers(tmp_path / "work", FINGERPRINT)


def test_another_fingerprint_over_no_layers_is_taken(tmp_path):
    FinishedLayers(tmp_path / "work", FINGERPRINT)
    layers = FinishedLayers(tmp_path / "work", {"device": "cuda"})
    layers.add(0, some_layer(), {})
    assert list(FinishedLayers(tmp_path / "work", {"device": "cuda"})) == [0]


def test_a_layer_that_is_not_finite_is_named(tmp_path):
    layers = FinishedLayers(tmp_path / "work", FINGERPRINT)
    with pytest.raises(ValueError, match="tensor k of layer 7 became NaN"):
        layers.add(7, {"k": torch.tensor([float("inf")])}, {})
    assert len(layers) == 0


def test_a_source_is_known_by_config_sizes_and_times(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    before = source_identity(CheckpointReader(tmp_path))
    assert source_identity(CheckpointReader(tmp_path)) == before
    (tmp_path / "config.json").write_text("{ }")
    changed = source_identity(CheckpointReader(tmp_path))
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert len({str(identity) for identity in (before, changed, source_identity(CheckpointReader(tmp_path)))}) == 3


def test_hashes_tell_values_shapes_and_dtypes_apart():
    tokens = torch.arange(6)
    hashes = {tensor_hash(each) for each in (tokens, tokens.view(2, 3), tokens.int(), tokens + 1, None)}
    assert len(hashes) == 5 and tensor_hash(tokens.clone()) == tensor_hash(tokens)
    assert len(code_hash()) == 64 and code_hash() == code_hash()
