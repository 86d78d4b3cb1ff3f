import json
import os

import pytest
import torch
from safetensors.torch import save_file

from mha2mla.checkpoints import CheckpointError
from mha2mla.conversion.source.files import CheckpointReader


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
    assert reader.header("a").shape == (2, 3)
    before = reader.tensor("a")
    reader.release()
    assert torch.equal(reader.tensor("a"), before) and torch.equal(before, torch.arange(6.0).view(2, 3))
    single = tmp_path / "single"
    single.mkdir()
    save_file({"a": torch.ones(2)}, single / "model.safetensors")
    assert CheckpointReader(single).names() == {"a"}


def test_what_is_read_is_a_copy_not_the_mapped_file(tmp_path):
    """Writing to a tensor that maps the source."""
    reader = CheckpointReader(sharded(tmp_path))
    bytes_before = (tmp_path / "one.safetensors").read_bytes()
    reader.tensor("a").zero_()
    assert (tmp_path / "one.safetensors").read_bytes() == bytes_before
    assert float(reader.tensor("a").sum()) == 15.0


def test_of_a_single_file_and_an_index_the_one_that_transformers_reads_is_read(tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.conversion import tiny

    tiny.model(seed=1).save_pretrained(tmp_path, max_shard_size=60_000)
    tiny.model(seed=2).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors.index.json").exists()
    reader = CheckpointReader(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(reader.tensor(name), AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()[name])
    assert reader.files() == ["model.safetensors"]


def test_shards_of_one_basename_in_two_folders_are_two_files(tmp_path):
    for index, part in enumerate(("a", "b")):
        (tmp_path / part).mkdir()
        save_file({part: torch.full((2,), float(index))}, tmp_path / part / "model.safetensors")
    write_index(tmp_path, {"a": "a/model.safetensors", "b": "b/model.safetensors"})
    reader = CheckpointReader(tmp_path)
    assert reader.files() == ["a/model.safetensors", "b/model.safetensors"]
    assert float(reader.tensor("b").sum()) == 2 and float(reader.tensor("a").sum()) == 0


def index_leading_out(folder):
    outside = folder.parent / "outside.safetensors"
    save_file({"d": torch.ones(1)}, outside)
    write_index(folder, {"a": "one.safetensors", "d": "../outside.safetensors"})


def shard_that_is_a_link_out(folder):
    save_file({"c": torch.ones(5)}, folder.parent / "outside.safetensors")
    (folder / "two.safetensors").unlink()
    (folder / "two.safetensors").symlink_to(folder.parent / "outside.safetensors")


def shard_that_is_a_pipe(folder):
    (folder / "two.safetensors").unlink()
    os.mkfifo(folder / "two.safetensors")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"


def remove_all(folder):
    for path in folder.iterdir():
        path.unlink()


def only_pickles(folder):
    remove_all(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def rewrite(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "two.safetensors").unlink(), "two.safetensors is missing"),
        (rewrite("one.safetensors", lambda content: content[:-4]), "one.safetensors is truncated or damaged"),
        (rewrite("one.safetensors", lambda content: POINTER), "one.safetensors is a pointer of Git LFS"),
        (rewrite("one.safetensors", lambda content: b""), "one.safetensors is truncated or damaged"),
        (
            lambda folder: write_index(folder, {"a": "one.safetensors", "d": "two.safetensors"}),
            "says that d is in two.safetensors, which does not hold it",
        ),
        (rewrite("model.safetensors.index.json", lambda content: b"{"), "is not JSON"),
        (rewrite("model.safetensors.index.json", lambda content: b"{}"), "is not a safetensors index"),
        (lambda folder: write_index(folder, {"a": ["one.safetensors"]}), "is not a safetensors index: a is in"),
        (index_leading_out, "outside.safetensors' leads out of"),
        (shard_that_is_a_link_out, "two.safetensors is a link to .* leads out of"),
        (shard_that_is_a_pipe, "two.safetensors is no regular file"),
        (only_pickles, "pytorch_model.bin is not read"),
        (remove_all, "has neither"),
    ],
)
def test_damage_is_named_before_any_tensor_is_read(tmp_path, damage, named):
    (tmp_path / "source").mkdir()
    damage(sharded(tmp_path / "source"))
    with pytest.raises(CheckpointError, match=named):
        CheckpointReader(tmp_path / "source")


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


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint8, torch.int64, torch.complex64, torch.float8_e4m3fn]
)
def test_weights_that_are_no_plain_numbers_are_named(tmp_path, dtype):
    save_file({"codes": torch.zeros(2, 2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor codes in model.safetensors has dtype \w+; expected one of F64"):
        CheckpointReader(tmp_path).tensor("codes")
