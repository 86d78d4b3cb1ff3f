"""Finished pieces on disk: whole, as they were put and of this very conversion, or not there."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mha2mla.conversion.resume import FinishedLayers, ResumeError, WorkFolder, code_hash, has_pieces, tensor_hash
from tests.folders import flip_bit

REQUEST = {"recipe": {"layout": "shared", "seed": 0}, "device": "cpu", "code": "a" * 64}


def some_layer(seed=0):
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return {"weight": base.T, "half": base[:2].bfloat16(), "view": base[2:], "inv_freq": base.new_ones(1, 2)}


def opened(folder, request=REQUEST, **keys):
    return WorkFolder(folder / "work", request, **keys)


def names(folder):
    return sorted(path.name for path in (folder / "work").iterdir())


def test_layers_come_back_bit_equal_with_their_records(tmp_path):
    layers = FinishedLayers(opened(tmp_path))
    assert len(layers) == 0 and 3 not in layers and not has_pieces(tmp_path / "work")
    layers.add(3, some_layer(), {"seconds": 1.5, "note": ""})
    again = FinishedLayers(opened(tmp_path))
    assert list(again) == list(layers) == [3] and has_pieces(tmp_path / "work")
    assert again.record(3) == layers.record(3) == {"seconds": 1.5, "note": ""}
    for name, tensor in some_layer().items():
        assert again[3][name].dtype == tensor.dtype and torch.equal(again[3][name], tensor)


def test_pieces_are_tensors_and_what_belongs_to_them(tmp_path):
    work = opened(tmp_path)
    assert work.get("text") is None
    work.put("text", {"windows": torch.arange(6).view(2, 3)}, {"a": [1.5, None]})
    work.put("recipe", {}, {"rank": 8})
    for each in (work, opened(tmp_path)):
        tensors, about = each.get("text")
        assert torch.equal(tensors["windows"], torch.arange(6).view(2, 3)) and about == {"a": [1.5, None]}
        assert each.get("recipe") == ({}, {"rank": 8}) and each.names() == ["recipe", "text"]
    work.discard()
    assert work.names() == [] and not has_pieces(tmp_path / "work") and opened(tmp_path).names() == []


def swap(path):
    other = path.with_name("layer-00002.safetensors")
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def copy_another_layer(path):
    shutil.copyfile(path.with_name("layer-00000.safetensors"), path)


def strip_the_hash(path):
    save_file(load_file(path), path, metadata={"about": "{}"})


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("damage", "left"),
    [(flip_bit, [0, 2]), (swap, [0]), (copy_another_layer, [0, 2]), (strip_the_hash, [0, 2]), (cut, [0, 2])],
)
def test_a_file_that_is_not_what_was_put_there_does_not_count(damage, left, tmp_path):
    """One flipped bit of a weight reads as well as any other number."""
    work = opened(tmp_path)
    layers = FinishedLayers(work)
    for layer in range(3):
        layers.add(layer, some_layer(layer), {})
    damage(tmp_path / "work" / "layer-00001.safetensors")
    with pytest.raises(ResumeError, match="layer-00001.safetensors was damaged"):
        layers[1]
    again = opened(tmp_path)
    assert list(FinishedLayers(again)) == left
    assert again.damaged == [f"layer-{layer:05d}.safetensors" for layer in range(3) if layer not in left]
    assert names(tmp_path) == [*(f"layer-{layer:05d}.safetensors" for layer in left), "request.json"]


def test_a_layer_of_another_conversion_does_not_count_under_this_ones_name(tmp_path):
    FinishedLayers(opened(tmp_path)).add(0, some_layer(), {})
    (tmp_path / "two").mkdir()
    other = FinishedLayers(opened(tmp_path / "two", {**REQUEST, "device": "cuda"}))
    other.add(0, some_layer(), {})
    shutil.copyfile(
        tmp_path / "two" / "work" / "layer-00000.safetensors", tmp_path / "work" / "layer-00000.safetensors"
    )
    assert list(FinishedLayers(opened(tmp_path))) == []


def test_layers_that_depend_on_other_findings_do_not_count(tmp_path):
    FinishedLayers(opened(tmp_path), {"calibration": "a"}).add(0, some_layer(), {})
    assert list(FinishedLayers(opened(tmp_path), {"calibration": "b"})) == []
    assert list(FinishedLayers(opened(tmp_path), {"calibration": "a"})) == [0]


def test_what_does_not_belong_there_is_removed_and_links_are_not_followed(tmp_path):
    work = opened(tmp_path)
    FinishedLayers(work).add(0, some_layer(), {})
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "precious").write_text("x")
    (tmp_path / "work" / ".layer-00003.safetensors.part").write_bytes(b"half")
    (tmp_path / "work" / "folder").mkdir()
    (tmp_path / "work" / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "work" / "layer-00001.safetensors").symlink_to(tmp_path / "work" / "layer-00000.safetensors")
    assert list(FinishedLayers(opened(tmp_path))) == [0]
    assert names(tmp_path) == ["layer-00000.safetensors", "request.json"]
    assert (tmp_path / "theirs" / "precious").exists()


def test_layers_of_another_conversion_are_refused_by_what_differs(tmp_path):
    FinishedLayers(opened(tmp_path)).add(0, some_layer(), {})
    other = {**REQUEST, "recipe": {"layout": "latent", "seed": 0}, "code": "b" * 64}
    with pytest.raises(ResumeError, match=r"differs in code, recipe.layout \(shared there, latent now\)$"):
        opened(tmp_path, other)
    assert list(FinishedLayers(opened(tmp_path))) == [0]
    (tmp_path / "work" / "request.json").write_text("{")
    with pytest.raises(ResumeError, match="device"):
        opened(tmp_path)
    assert opened(tmp_path, resume=False).names() == [] and names(tmp_path) == []


def test_other_pieces_of_another_conversion_make_room(tmp_path):
    opened(tmp_path).put("text", {"windows": torch.ones(2)})
    work = opened(tmp_path, {"device": "cuda"})
    assert work.get("text") is None
    FinishedLayers(work).add(0, some_layer(), {})
    assert list(FinishedLayers(opened(tmp_path, {"device": "cuda"}))) == [0]


def test_a_layer_that_is_not_finite_is_named(tmp_path):
    layers = FinishedLayers(opened(tmp_path))
    with pytest.raises(ValueError, match="tensor k of layer 7 became NaN"):
        layers.add(7, {"k": torch.tensor([float("inf")])}, {})
    assert len(layers) == 0


def test_hashes_tell_values_shapes_and_dtypes_apart():
    tokens = torch.arange(6)
    hashes = {tensor_hash(each) for each in (tokens, tokens.view(2, 3), tokens.int(), tokens + 1)}
    assert len(hashes) == 4 and tensor_hash(tokens.clone()) == tensor_hash(tokens)
    assert len(code_hash()) == 64 and code_hash() == code_hash() != code_hash("healing")
