"""The folder that a conversion makes: when it may be made, how it comes to its name, and what is left otherwise."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mha2mla.conversion.destination import DestinationError, check_destination, temporary_folder
from tests.folders import listing
from tests.ops import noted


def converted(folder):
    """What counts as a converted checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mha2mla"}')
    return folder


def everything(work):
    return True


def assert_refused(match, final, *, overwrite=False):
    """Before any work."""
    with pytest.raises(DestinationError, match=match), temporary_folder(final, overwrite=overwrite):
        raise AssertionError


def test_the_final_name_appears_at_the_end(tmp_path):
    final = tmp_path / "out"
    with temporary_folder(final, overwrite=False) as folder:
        (folder / "file").write_text("x")
        assert not final.exists()
    assert listing(tmp_path) == ["out"] and listing(final) == ["file"]


def test_an_error_leaves_nothing_and_no_folder_on_the_way(tmp_path):
    with pytest.raises(RuntimeError), temporary_folder(tmp_path / "new" / "deeper" / "out", overwrite=False) as folder:
        (folder / "file").write_text("x")
        raise RuntimeError
    assert listing(tmp_path) == []


def test_overwriting_keeps_the_old_folder_until_the_new_one_is_complete(tmp_path):
    final = converted(tmp_path / "out")
    with pytest.raises(RuntimeError), temporary_folder(final, overwrite=True):
        raise RuntimeError
    assert listing(final) == ["config.json"]
    with temporary_folder(final, overwrite=True) as folder:
        (folder / "new").write_text("new")
        assert listing(final) == ["config.json"]
    assert listing(tmp_path) == ["out"] and listing(final) == ["new"]


def killed_at_rename(number, final):
    """A run that ends like a killed one when it is about to rename for the ``number``-th time; its exit status."""
    pid = os.fork()
    if pid == 0:
        rename, count = Path.rename, 0

        def counted(self, target):
            nonlocal count
            count += 1
            if count == number:
                os._exit(9)
            return rename(self, target)

        Path.rename = counted
        with temporary_folder(final, overwrite=True) as folder:
            (folder / "new").write_text("new")
            (folder / "work").mkdir()
            (folder / "work" / "layer").write_text("done")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_kill_between_any_two_renames_loses_neither_the_old_folder_nor_the_work(tmp_path):
    """An old folder that is deleted instead of moved aside is gone when its replacement never comes."""
    outcomes = []
    for number in range(1, 10):
        final = converted(tmp_path / f"{number}")
        outcomes.append(killed_at_rename(number, final))
        if outcomes[-1] == 0:
            assert listing(final) == ["new"]
            break
        with pytest.raises(KeyError), temporary_folder(final, overwrite=True, worth_keeping=everything) as folder:
            assert listing(final) == ["config.json"] and listing(folder) == ["work"]
            assert listing(folder / "work") == ["layer"]
            raise KeyError
        assert listing(final) == ["config.json"]
    assert outcomes == [9, 9, 9, 0]


def test_files_are_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    """A power cut after the rename must not find empty files under the final name."""
    events: list = []
    noted(monkeypatch, os, "fsync", lambda handle: events.append(os.readlink(f"/proc/self/fd/{handle}")))
    noted(monkeypatch, Path, "rename", lambda _, to: events.append(("rename", Path(to).name)))
    with temporary_folder(tmp_path / "out", overwrite=False) as folder:
        (folder / "deeper").mkdir()
        for name in ("file", "deeper/file"):
            (folder / name).write_text("x")
    there = events.index(("rename", "out"))
    made = [folder, folder / "file", folder / "deeper", folder / "deeper" / "file"]
    assert {str(path) for path in made} <= set(events[:there])
    assert str(tmp_path) in events[there:]


def test_what_a_killed_run_left_is_cleared_and_a_folder_moved_aside_comes_back(tmp_path):
    """States that a kill can leave behind."""
    (tmp_path / ".out.mha2mla-tmp").mkdir()
    (tmp_path / ".out.mha2mla-tmp" / "half").write_text("x")
    converted(tmp_path / ".out.mha2mla-old")
    (tmp_path / ".out.mha2mla-done").mkdir()
    (tmp_path / ".out.mha2mla-lock").touch()
    with pytest.raises(RuntimeError), temporary_folder(tmp_path / "out", overwrite=True) as folder:
        assert "half" not in listing(folder) and listing(tmp_path / "out") == ["config.json"]
        raise RuntimeError
    assert listing(tmp_path) == ["out"]


def test_links_that_somebody_planted_are_not_followed(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious").write_text("x")
    for name in ("tmp", "old", "done"):
        (tmp_path / f".out.mha2mla-{name}").symlink_to(theirs)
    with temporary_folder(tmp_path / "out", overwrite=False) as folder:
        assert folder.parent == tmp_path and not folder.is_symlink()
        (folder / "file").write_text("x")
    assert listing(theirs) == ["precious"] and listing(tmp_path) == ["out", "theirs"]
    (tmp_path / ".two.mha2mla-lock").symlink_to(theirs / "precious")
    assert_refused("cannot be written", tmp_path / "two")
    assert (theirs / "precious").read_text() == "x"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError, SystemExit])
def test_whatever_ends_a_run_its_work_is_kept_where_it_is_of_use_and_nothing_else(error, tmp_path):
    for keeps, left in ((True, [".out.mha2mla-tmp"]), (False, [])):
        with (
            pytest.raises(error),
            temporary_folder(tmp_path / "out", overwrite=False, worth_keeping=lambda work: keeps) as folder,  # noqa: B023
        ):
            (folder / "work").mkdir(exist_ok=True)
            (folder / "shard").write_text("half")
            raise error
        assert listing(tmp_path) == left
        if keeps:
            assert listing(tmp_path / left[0]) == ["work"]
    with pytest.raises(error), temporary_folder(tmp_path / "out", overwrite=False, worth_keeping=everything):
        raise error  # before there was any work
    assert listing(tmp_path) == []


def test_work_survives_a_rename_that_fails(tmp_path, monkeypatch):
    rename = Path.rename

    def failing(self, target):
        if Path(target).name == "out" and self.name.endswith("tmp"):
            raise OSError("no")
        return rename(self, target)

    final = converted(tmp_path / "out")
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match="no"),
        temporary_folder(final, overwrite=True, worth_keeping=everything) as folder,
    ):
        (folder / "work").mkdir()
        patch.setattr(Path, "rename", failing)
    assert listing(final) == ["config.json"] and listing(tmp_path) == [".out.mha2mla-tmp", "out"]
    assert listing(tmp_path / ".out.mha2mla-tmp") == ["work"]


def test_a_second_run_for_the_same_destination_is_refused_while_the_first_works(tmp_path):
    with temporary_folder(tmp_path / "out", overwrite=False), ThreadPoolExecutor() as pool:
        pool.submit(assert_refused, "another process is writing", tmp_path / "out").result()
    assert listing(tmp_path) == ["out"]


def test_a_destination_that_appears_meanwhile_is_not_replaced(tmp_path):
    for overwrite, expected in ((False, "exists"), (True, "neither empty")):
        with pytest.raises(DestinationError, match=expected), temporary_folder(tmp_path / "out", overwrite=overwrite):
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out" / "theirs").touch()
        assert listing(tmp_path) == ["out"] and listing(tmp_path / "out") == ["theirs"]
        assert_refused(expected, tmp_path / "out", overwrite=overwrite)  # it is looked at under the lock
        (tmp_path / "out" / "theirs").unlink()
        (tmp_path / "out").rmdir()


def test_destinations_are_refused_before_work_and_nothing_is_made(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for name, expected in (
        ("source", "overlap"),
        ("source/inside", "overlap"),
        ("link", "overlap"),
        (".", "overlap"),
        ("file", "is a file"),
        ("nowhere", "is a file"),
        ("there", "exists"),
    ):
        with pytest.raises(DestinationError, match=expected):
            check_destination(tmp_path / name, source, overwrite=False)
    with pytest.raises(DestinationError, match="overlap"):
        check_destination(source, source, overwrite=True)
    before = listing(tmp_path)
    check_destination(tmp_path / "there", source, overwrite=True)
    check_destination(tmp_path / "new" / "deeper", source, overwrite=False)
    assert listing(tmp_path) == before
    assert_refused("cannot be written", tmp_path / "file" / "below")


def test_only_what_is_empty_or_converted_may_be_replaced(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    out.mkdir()
    check_destination(out, source, overwrite=True)
    for text in (None, "{}", "[", "[]", json.dumps({"model_type": "llama"}), "[" * 10_000):
        (out / "note").touch()
        if text is not None:
            (out / "config.json").write_text(text)
        with pytest.raises(DestinationError, match="neither empty nor a converted checkpoint"):
            check_destination(out, source, overwrite=True)
    (out / "config.json").write_text('{"model_type": "mha2mla"}')
    (out / "note").unlink()
    check_destination(out, source, overwrite=True)


def test_a_folder_with_files_of_the_user_is_not_replaced(tmp_path):
    out = converted(tmp_path / "out")
    ours = ("README.md", "conversion.json", "model-00001-of-00002.safetensors", "tokenizer.json", "LICENSE")
    for name in ours:
        (out / name).touch()
    (out / "additional_chat_templates").mkdir()
    (out / "additional_chat_templates" / "tools.jinja").touch()
    check_destination(out, tmp_path / "source", overwrite=True)
    for name in (".git/HEAD", "photos/1/a.png", "tokenizer_old/tokenizer.json", "model.bin", "z", "zz", "zzz"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    (out / "empty").mkdir()
    (out / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    before = sorted(out.rglob("*"))
    expected = "holds .git, empty, model.bin, model.safetensors, photos and 4 more, which no conversion writes"
    with pytest.raises(DestinationError, match=expected):
        check_destination(out, tmp_path / "source", overwrite=True)
    assert_refused(expected, out, overwrite=True)
    assert sorted(out.rglob("*")) == before


def test_a_mount_point_is_refused_before_work(tmp_path, monkeypatch):
    """It cannot be renamed."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == (tmp_path / "out").resolve())
    with pytest.raises(DestinationError, match="is a mount point"):
        check_destination(tmp_path / "out", tmp_path / "source", overwrite=True)


def test_the_current_folder_and_what_holds_it_are_no_destinations(tmp_path, monkeypatch):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for name in ("", ".", "./", "..", "../..", "/", str(here), str(tmp_path), "../b"):
        with pytest.raises(DestinationError, match="is the current folder, or holds it"):
            check_destination(name, tmp_path / "source", overwrite=True)
    check_destination("c", tmp_path / "source", overwrite=False)


def test_a_read_only_parent_is_refused(tmp_path):
    if os.geteuid() == 0:
        parent = Path("/proc/mha2mla-cannot-exist")  # root may write anywhere that allows writing at all
    else:
        parent = tmp_path / "locked"
        parent.mkdir(mode=0o500)
    assert_refused("cannot be written", parent / "out")
    with pytest.raises(DestinationError, match="cannot be written"):
        check_destination(parent / "out", tmp_path, overwrite=False)
