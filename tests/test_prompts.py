"""The file of answers: what it goes on with, what it replaces, and what it refuses."""

import hashlib
import json
import os

import pytest

from mha2mla.prompts import Answers, checkpoint_digest, read_prompts

MADE_BY = {"model": "m", "sampling": {"seed": 0}, "weights": "1"}
ANSWER = {"prompt": "a", "answer": "b", "finished": "stop", **MADE_BY}


def line(row: dict) -> str:
    return json.dumps(row) + "\n"


def test_a_missing_file_of_prompts_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"file is '.*nosuch.jsonl', which is not there; expected JSON Lines"):
        read_prompts(tmp_path / "nosuch.jsonl")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "milk, eggs",
        "milk\neggs\n",
        '{"a": 1}\n',
        '{"prompt": "a", "answer": "b", "model": "somebody\'s data set"}\n',
        line(ANSWER) + "milk",
        line(ANSWER) + '{"mine": 1}',
        line(ANSWER) + "\n" + line(ANSWER),
        line(ANSWER)[:30],
        line({"mha2mla_" + key: value for key, value in ANSWER.items()}),
        "[" * 10_000,
    ],
)
def test_a_file_that_is_no_answers_is_refused(text, overwrite, tmp_path):
    """``generate --output notes.txt`` cut one line without an end down to nothing, and --overwrite any file."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"output is .*notes\.txt.* no answer"):
        Answers(path, MADE_BY, overwrite)
    assert path.read_text() == text


def test_answers_change_with_the_first_that_is_written(tmp_path):
    """A model that cannot be loaded then costs no answers of the run before."""
    path = tmp_path / "new" / "answers.jsonl"
    Answers(path, MADE_BY)
    assert not path.parent.exists()
    path.parent.mkdir()
    text = line(ANSWER) + line(ANSWER)[:30]
    path.write_text(text)
    for overwrite, left in ((False, 1), (True, 2)):
        answers = Answers(path, MADE_BY, overwrite)
        assert len(answers.remaining([{"prompt": "a"}, {"prompt": "c"}])) == left and path.read_text() == text
    answers = Answers(path, MADE_BY)
    answers.write({"prompt": "c"}, answer="d", finished="stop")
    answers.close()
    assert path.read_text() == line(ANSWER) + line(ANSWER | {"prompt": "c", "answer": "d"})
    answers = Answers(path, MADE_BY | {"weights": "2"}, overwrite=True)
    answers.write({"prompt": "c"}, answer="d", finished="stop")
    answers.close()
    assert path.read_text() == line(ANSWER | {"prompt": "c", "answer": "d", "weights": "2"})


def test_answers_of_other_weights_are_not_gone_on_with(tmp_path):
    path = tmp_path / "answers.jsonl"
    old = {key: value for key, value in ANSWER.items() if key != "weights"}  # as this tool once wrote them
    for row, there in ((ANSWER | {"weights": "2"}, "'2'"), (old, "None")):
        path.write_text(line(row))
        with pytest.raises(ValueError, match=f"has answers of {{'weights': {there}}}; expected another file, or over"):
            Answers(path, MADE_BY)
        Answers(path, MADE_BY, overwrite=True)


@pytest.mark.parametrize("key", ["answer", "model", "finished", "new_tokens", "weights"])
def test_a_prompt_with_a_key_of_answers_is_refused(key, tmp_path):
    tasks = [{"prompt": "a"}, {"prompt": "b", key: "mine"}]
    with pytest.raises(ValueError, match=f"prompt 2 has the key '{key}', .*--key-prefix"):
        Answers(tmp_path / "out", MADE_BY).remaining(tasks)
    answers = Answers(tmp_path / "out", MADE_BY, key_prefix="our_")
    answers.write(*answers.remaining(tasks)[1][1:], answer="c", finished="stop")
    answers.close()
    row = json.loads((tmp_path / "out").read_text())
    assert row[key] == "mine" and row["our_answer"] == "c" and row["our_weights"] == "1"
    assert Answers(tmp_path / "out", MADE_BY, key_prefix="our_").remaining(tasks) == [(0, tasks[0])]


def test_checkpoint_digest_covers_every_input(tmp_path):
    """Weights of the same size under the same path among them."""
    files = {"config.json": "{}", "model.safetensors": "0" * 100, "tokenizer.json": "{}", "generation_config.json": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    digest = checkpoint_digest(str(tmp_path))
    times = os.stat(tmp_path / "model.safetensors")
    for name, text in files.items():
        (tmp_path / name).write_text(text[:50] + "1" + text[51:])
        os.utime(tmp_path / name, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert checkpoint_digest(str(tmp_path)) != digest, name
        (tmp_path / name).write_text(text)
    (tmp_path / "README.md").write_text("x")
    assert checkpoint_digest(str(tmp_path)) == digest


def test_checkpoint_digest_reads_recorded_ones(tmp_path):
    """Hashing 16 GB takes a while; a shard that was put there later is hashed all the same."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    hashed = checkpoint_digest(str(tmp_path))
    digests = {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
    (tmp_path / "conversion.json").write_text(json.dumps({"weights_sha256": digests}))
    later = os.stat(tmp_path / "conversion.json").st_mtime_ns
    (tmp_path / "model.safetensors").write_text("another")  # told by its time alone
    for time, is_recorded in ((later, True), (later + 1, False)):
        os.utime(tmp_path / "model.safetensors", ns=(time, time))
        assert (checkpoint_digest(str(tmp_path)) == hashed) is is_recorded
