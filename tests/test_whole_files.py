"""Files that are whole and on the disk before they have their names."""

import os

import pytest

from mha2mla.whole_files import write_whole


def test_a_file_has_its_name_only_when_it_is_whole_and_on_the_disk(tmp_path, monkeypatch):
    """A power cut after the rename must not find an empty file; one during the write must not find half of it."""
    events, fsync, replace = [], os.fsync, os.replace

    def recorded(handle):
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(("replace", str(a))), replace(a, b))[1])
    write_whole(tmp_path / "file", lambda temporary: temporary.write_text("x"))
    (first, temporary), (second, replaced), (third, folder) = events
    assert (first, second, third) == ("sync", "replace", "sync") and temporary == replaced and folder == str(tmp_path)

    def fails(temporary):
        temporary.write_text("half")
        raise ValueError("full")

    with pytest.raises(ValueError):
        write_whole(tmp_path / "file", fails)
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "x"
