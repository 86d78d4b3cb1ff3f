"""Files of a source: nothing outside it is read, nothing blocks, and what changes meanwhile is noticed."""

import os
import socket
import time

import pytest

from mha2mla.checkpoints import CheckpointError, check_folder, read_json, regular_file
from mha2mla.conversion.source.files import SourceChangedError, check_unchanged, companions, identify


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "source"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (tmp_path / "secret").write_text("{}")
    return made


def test_paths_and_links_stay_inside(folder, tmp_path):
    (folder / "deeper").mkdir()
    (folder / "deeper" / "there").write_text("{}")
    (folder / "inside").symlink_to("deeper/there")
    (folder / "outside").symlink_to(tmp_path / "secret")
    (folder / "relative").symlink_to("../secret")
    (folder / "through").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("absent")
    for name in ("config.json", "inside", "deeper/there"):
        assert regular_file(folder, name) == folder / name
    for name, expected in (
        ("outside", "leads out of"),
        ("relative", "leads out of"),
        ("through/secret", "leads out of"),
        ("../secret", "leads out of"),
        (str(tmp_path / "secret"), "leads out of"),
        ("loop", "cannot be read"),
        ("nowhere", "is missing"),
        ("absent", "is missing"),
        ("a\0b", "cannot be read"),
        ("a" * 5000, "cannot be read"),
        ("deeper", "no regular file"),
    ):
        with pytest.raises(CheckpointError, match=expected):
            regular_file(folder, name)


def test_a_snapshot_of_the_hubs_cache_is_links_to_blobs(tmp_path):
    cache = tmp_path / "models--owner--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / "0123").write_text("{}")
    snapshot = cache / "snapshots" / "abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("{}")
    (snapshot / "other").symlink_to("../../refs/main")
    assert read_json(snapshot, "config.json") == {}
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert read_json(link, "config.json") == {}
    with pytest.raises(CheckpointError, match="leads out of"):
        regular_file(snapshot, "other")


def test_nothing_that_could_block_is_opened(folder, monkeypatch):
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match="tokenizer.json is no regular file"):
        check_folder(folder)
    with pytest.raises(CheckpointError, match="tokenizer.json is no regular file"):
        companions(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "merges.txt").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="merges.txt is no regular file"):
        check_folder(folder)
    (folder / "merges.txt").unlink()
    monkeypatch.chdir(folder)  # a socket's path has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("vocab.json")
        with pytest.raises(CheckpointError, match="no regular file"):
            check_folder(folder)


def test_companions_are_files_of_the_folder_and_no_code(folder, tmp_path):
    (folder / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "tokenizer_own.py", "LICENSE", "additional_chat_templates/rag.jinja", "weights.pt"):
        (folder / name).write_text("x")
    assert companions(folder) == ["LICENSE", "additional_chat_templates/rag.jinja", "tokenizer.json"]
    (folder / "additional_chat_templates" / "own.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="own.jinja is a link to .* leads out of"):
        companions(folder)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "is not JSON"), ("[]", "not a JSON object"), ("[" * 100_000, "is not JSON"), (b"\xff", "JSON")],
)
def test_what_is_no_json_object_is_named(folder, text, expected):
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=expected):
        read_json(folder, "config.json")


def old(path):
    """As if it had not been touched for long: only then do times prove anything."""
    os.utime(path, ns=(1, 1))


def test_a_file_that_changes_is_named_whatever_its_times_and_size_say(folder):
    weight = folder / "model.safetensors"
    weight.write_bytes(b"one")
    old(weight)
    before = identify(folder, ["config.json", "model.safetensors"])
    check_unchanged(folder, before)
    weight.write_bytes(b"two")
    old(weight)
    with pytest.raises(SourceChangedError, match="model.safetensors changed during the conversion"):
        check_unchanged(folder, before)
    weight.write_bytes(b"one")
    os.chmod(weight, 0o600)
    check_unchanged(folder, before)  # touched, and as it was
    weight.unlink()
    with pytest.raises(SourceChangedError, match="model.safetensors changed .* is missing"):
        check_unchanged(folder, before)


def test_files_whose_times_prove_that_they_stayed_are_not_read_again(folder, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: (folder / "config.json").stat().st_ctime_ns + 10**11)
    before = identify(folder, ["config.json"])
    monkeypatch.setattr("mha2mla.conversion.source.files._content_hash", None)
    check_unchanged(folder, before)


def test_files_of_a_moment_ago_are_read_again_whatever_their_times_say(folder, monkeypatch):
    """Two writes within one tick of the clock have one time."""
    monkeypatch.setattr(
        "mha2mla.conversion.source.files._state", lambda path: (1, 2, 3, time.time_ns(), time.time_ns())
    )
    before = identify(folder, ["config.json"])
    monkeypatch.setattr("mha2mla.conversion.source.files._state", lambda path: before["config.json"].state)
    (folder / "config.json").write_text("[]")
    with pytest.raises(SourceChangedError):
        check_unchanged(folder, before)


def test_files_of_one_basename_are_told_apart(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_text(name)
        old(folder / name / "model.safetensors")
    found = identify(folder, ["a/model.safetensors", "b/model.safetensors"])
    assert len({identity.sha256 for identity in found.values()}) == 2
