import json
import os
import threading

import pytest
import torch

from mha2mla.conversion.source import CheckpointReader
from mha2mla.conversion.writer import DestinationError, ShardedWriter, check_destination, temporary_folder


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


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
    assert index["weight_map"]["t0"] == "model-00001-of-00003.safetensors"
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


def test_the_final_name_appears_at_the_end(tmp_path):
    final = tmp_path / "out"
    with temporary_folder(final, overwrite=False) as folder:
        (folder / "file").write_text("x")
        assert not final.exists()
    assert listing(tmp_path) == ["out"] and listing(final) == ["file"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), temporary_folder(tmp_path / "out", overwrite=False) as folder:
        (folder / "file").write_text("x")
        raise RuntimeError
    assert listing(tmp_path) == []


def test_overwriting_keeps_the_old_folder_until_the_new_one_is_complete(tmp_path):
    final = tmp_path / "out"
    final.mkdir()
    (final / "old").write_text("old")
    with pytest.raises(RuntimeError), temporary_folder(final, overwrite=True):
        raise RuntimeError
    assert listing(final) == ["old"]
    with temporary_folder(final, overwrite=True) as folder:
        (folder / "new").write_text("new")
        assert listing(final) == ["old"]
    assert listing(tmp_path) == ["out"] and listing(final) == ["new"]


def test_what_a_killed_run_left_is_cleared_and_a_folder_moved_aside_comes_back(tmp_path):
    """FAILURES 27: states that a kill can leave behind."""
    (tmp_path / ".out.mha2mla-tmp").mkdir()
    (tmp_path / ".out.mha2mla-tmp" / "half").write_text("x")
    (tmp_path / ".out.mha2mla-old").mkdir()
    (tmp_path / ".out.mha2mla-old" / "old").write_text("old")
    (tmp_path / ".out.mha2mla-done").mkdir()
    (tmp_path / ".out.mha2mla-lock").touch()
    with pytest.raises(RuntimeError), temporary_folder(tmp_path / "out", overwrite=True) as folder:
        assert listing(folder) == [] and listing(tmp_path / "out") == ["old"]
        raise RuntimeError
    assert listing(tmp_path) == ["out"]


def leave_work(parent):
    (parent / ".out.mha2mla-tmp" / "work").mkdir(parents=True)
    (parent / ".out.mha2mla-tmp" / "work" / "layer").write_text("done")
    (parent / ".out.mha2mla-tmp" / "shard").write_text("half")
    return parent / ".out.mha2mla-tmp"


def test_work_that_a_killed_run_left_is_kept_for_who_wants_it(tmp_path):
    leave_work(tmp_path)
    with temporary_folder(tmp_path / "out", overwrite=False, admit=lambda work: work.name == "work") as folder:
        assert listing(folder) == ["work"] and listing(folder / "work") == ["layer"]
        (folder / "file").write_text("x")
    assert listing(tmp_path) == ["out"] and listing(tmp_path / "out") == ["file"]

    for admit in (None, lambda work: False):
        leave_work(tmp_path)
        with temporary_folder(tmp_path / "out", overwrite=True, admit=admit) as folder:
            assert listing(folder) == []


def test_refused_work_is_left_as_it_was(tmp_path):
    folder = leave_work(tmp_path)

    def refuse(work):
        raise LookupError

    with pytest.raises(LookupError), temporary_folder(tmp_path / "out", overwrite=False, admit=refuse):
        pass
    assert listing(folder) == ["shard", "work"] and listing(tmp_path) == [".out.mha2mla-tmp"]


def test_an_interrupt_leaves_the_work_and_an_error_does_not(tmp_path):
    for error, left in ((KeyboardInterrupt, [".out.mha2mla-tmp"]), (RuntimeError, [])):
        with pytest.raises(error), temporary_folder(tmp_path / "out", overwrite=False) as folder:
            (folder / "work").mkdir()
            raise error
        assert listing(tmp_path) == left
    with pytest.raises(KeyboardInterrupt), temporary_folder(tmp_path / "out", overwrite=False):
        raise KeyboardInterrupt  # before there was any work
    assert listing(tmp_path) == []


def test_a_second_run_for_the_same_destination_is_refused_while_the_first_works(tmp_path):
    with temporary_folder(tmp_path / "out", overwrite=False):
        errors = []

        def second():
            try:
                with temporary_folder(tmp_path / "out", overwrite=False):
                    pass
            except DestinationError as error:
                errors.append(str(error))

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert len(errors) == 1 and "another process is writing" in errors[0]
    assert listing(tmp_path) == ["out"]


def test_a_destination_that_appears_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(DestinationError, match="appeared"), temporary_folder(tmp_path / "out", overwrite=False):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
    assert listing(tmp_path) == ["out"] and listing(tmp_path / "out") == ["theirs"]


def test_destinations_are_refused_before_work(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(source)
    for name, expected in (
        ("source", "overlap"),
        ("source/inside", "overlap"),
        ("link", "overlap"),
        (".", "overlap"),
        ("file", "is a file"),
        ("there", "exists"),
        ("file/below", "cannot be written"),
    ):
        with pytest.raises(DestinationError, match=expected):
            check_destination(tmp_path / name, source, overwrite=False)
    check_destination(tmp_path / "there", source, overwrite=True)
    check_destination(tmp_path / "new" / "deeper", source, overwrite=False)
    with pytest.raises(DestinationError, match="overlap"):
        check_destination(source, source, overwrite=True)


def test_a_read_only_parent_is_refused(tmp_path):
    if os.geteuid() == 0:
        parent = "/proc/mha2mla-cannot-exist"  # root may write anywhere that allows writing at all
    else:
        parent = tmp_path / "locked"
        parent.mkdir(mode=0o500)
    with pytest.raises(DestinationError, match="cannot be written"):
        check_destination(tmp_path.__class__(parent) / "out", tmp_path / "source", overwrite=False)
