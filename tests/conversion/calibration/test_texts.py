import random
import sys
from types import SimpleNamespace

import pytest
import torch

from mha2mla.conversion.calibration import texts
from mha2mla.conversion.calibration.texts import (
    OwnText,
    in_turns,
    load_text,
    prompts,
    start_tokens,
    text_shares,
    token_windows,
)
from tests.conversion import tiny

ALL = 10**6  # windows: more than any text has


@pytest.mark.parametrize(("name", "letters"), [("pydoc", 200_000), ("stdlib", 1_000_000)])
def test_calibration_texts_lack_the_prose_text(name, letters):
    """Evaluation text must not be a part of the calibration text."""
    text, prose = load_text(f"builtin:{name}"), load_text("builtin:prose")
    assert len(text) > letters and text == load_text(f"builtin:{name}") and 14_000 < len(prose) < 20_000
    assert not any(line in text for line in prose.splitlines() if len(line) > 40)


def test_enough_characters_are_the_beginning_of_the_text(monkeypatch):
    read = []
    monkeypatch.setattr(
        texts, "_stdlib_texts", lambda: (read.append(part) or part for part in ["a" * 40, "b" * 40, "c"])
    )
    texts._stdlib_prose.cache_clear()
    assert load_text("builtin:stdlib", 60) == "a" * 40 + "\n\n" + "b" * 40 and len(read) == 2
    texts._stdlib_prose.cache_clear()


def test_a_file_is_read_as_utf8(tmp_path):
    (tmp_path / "text").write_text("Grüße", encoding="utf-8")
    assert load_text(tmp_path / "text") == "Grüße"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        *(("builtin:novel", "unknown"), ("hf:", "malformed"), ("hf:a:b:c:d:e", "malformed"), ("absent", "is no file")),
        *(("empty", "is empty"), ("blank", "is empty"), ("latin", "is not UTF-8")),
    ],
)
def test_a_bad_text_is_named(name, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, content in (("empty", b""), ("blank", b" \n "), ("latin", "Grüße".encode("latin-1"))):
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.* {named}"):
        load_text(name)


def test_dataset_without_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs the datasets package: pip install -e '\.\[eval\]' in the clone"):
        load_text("hf:owner/name")


class Rows(list):
    """Rows that are streamed, as an ``IterableDataset``: counted where they are read."""

    read = 0

    def __iter__(self):
        for row in super().__iter__():
            self.read += 1
            yield row

    def shuffle(self, *, seed, buffer_size):
        assert buffer_size > len(self)
        return Rows(random.Random(seed).sample(self, len(self)))


def datasets_of(rows, asked):
    def load_dataset(path, config, *, split, streaming):
        asked.append((path, config, split, streaming))
        return rows

    return SimpleNamespace(load_dataset=load_dataset)


def test_a_dataset_is_streamed_and_its_column_joined(monkeypatch):
    asked = []
    few = Rows({"body": text, "label": 1} for text in ("one", None, "two"))
    monkeypatch.setitem(sys.modules, "datasets", datasets_of(few, asked))
    assert load_text("hf:owner/name:en:test:body") == "one\n\ntwo"
    assert asked == [("owner/name", "en", "test", True)]
    texts = [f"row {number} has its words" for number in range(40)]
    many = Rows({"body": text} for text in texts)
    monkeypatch.setitem(sys.modules, "datasets", datasets_of(many, asked))
    assert load_text("hf:owner/name:::body", 50).split("\n\n") == texts[:3]
    assert many.read == 3 and asked[-1] == ("owner/name", None, "train", True)
    drawn = load_text("hf:owner/name:::body", 200, seed=1).split("\n\n")
    assert 200 <= sum(map(len, drawn)) < 240 and max(map(texts.index, drawn)) > 20 and len(set(drawn)) == len(drawn)
    assert drawn == load_text("hf:owner/name:::body", 200, seed=1).split("\n\n")
    assert sorted(load_text("hf:owner/name:::body", 10_000, seed=1).split("\n\n")) == sorted(texts)


def test_a_dataset_without_texts_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", datasets_of(Rows([{"body": "one", "label": 1}]), []))
    with pytest.raises(ValueError, match="no column 'text'; expected one of body, label"):
        load_text("hf:owner/name")
    with pytest.raises(ValueError, match="text 'hf:owner/name:::label' has column 'label' of int; expected texts"):
        load_text("hf:owner/name:::label")


def test_windows_tile_the_text_behind_a_start_token():
    tokenizer = tiny.tokenizer()
    text = "".join(chr(ord("a") + i % 26) for i in range(100))
    windows = token_windows(tokenizer, text, 11, ALL)
    assert windows.shape == (10, 11) and windows.dtype == torch.int64
    assert start_tokens(tokenizer) == [0] and (windows[:, 0] == 0).all()
    assert tokenizer.decode(windows[:, 1:].flatten()) == text
    assert torch.equal(token_windows(tokenizer, text, 11, 2), windows[:2])


@pytest.mark.parametrize("start", [[], [0], [0, 1]])
@pytest.mark.parametrize("end", [[], [2]])
def test_start_tokens_are_all_before_a_text(start, end):
    def tokenizer(text, add_special_tokens=True, verbose=True):
        plain = [ord(letter) for letter in text]
        return {"input_ids": [*start, *plain, *end] if add_special_tokens else plain}

    assert start_tokens(tokenizer) == start


def test_token_windows_seed_reproduces_in_order():
    tokenizer = tiny.tokenizer()
    text = load_text("builtin:prose")
    everything = token_windows(tokenizer, text, 64, ALL).tolist()
    drawn = token_windows(tokenizer, text, 64, 9, seed=3)
    assert torch.equal(drawn, token_windows(tokenizer, text, 64, 9, seed=3))
    places = [everything.index(window) for window in drawn.tolist()]
    assert places == sorted(places) and len(set(places)) == 9 and places != list(range(9))


def test_windows_of_a_large_text_are_drawn_from_pieces(monkeypatch):
    """As much is tokenized as is drawn, and a text that is wanted whole has its own tokens."""
    for name, value in (("_LARGE", 1000), ("_PIECE", 128), ("_AT_ONCE", 4)):
        monkeypatch.setattr(f"mha2mla.conversion.calibration.texts.{name}", value)
    text, read = "".join(chr(ord("a") + place * place % 26) for place in range(6400)), []

    class Letters:
        bos_token_id = None

        def __call__(self, text, **_):
            read.extend([text] if isinstance(text, str) else text)
            each = [[ord(letter) for letter in part] for part in ([text] if isinstance(text, str) else text)]
            return {"input_ids": each[0] if isinstance(text, str) else each}

    drawn = token_windows(Letters(), text, 16, 40, seed=3)
    pieces = [part for part in read if len(part) > 1]  # others look for start tokens
    assert drawn.shape == (40, 16) and [len(part) for part in pieces] == 8 * [128]
    assert torch.equal(drawn, token_windows(Letters(), text, 16, 40, seed=3))
    assert all("".join(map(chr, window)) in text for window in drawn.tolist())
    assert not torch.equal(drawn, token_windows(Letters(), text, 16, 40, seed=4))
    whole = token_windows(Letters(), text, 16, 400, seed=3)
    assert "".join(map(chr, whole.flatten().tolist())) == text


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"length": 1, "count": 1}, "length is 1"),
        ({"length": 8, "count": 0}, "count is 0"),
        ({"length": 64, "count": 1}, "at least one window"),
    ],
)
def test_token_windows_names_bad_argument(keys, named):
    with pytest.raises(ValueError, match=named):
        token_windows(tiny.tokenizer(), "ten bytes!", **keys)


def test_one_text_takes_all_turns():
    tokenizer = tiny.tokenizer()
    expected = token_windows(tokenizer, load_text("builtin:prose"), 64, 9, seed=3)
    assert torch.equal(in_turns(text_shares(tokenizer, "builtin:prose", 64, 9, seed=3)), expected)


def test_texts_take_turns_and_generated_text_fills_up(tmp_path):
    tokenizer = tiny.tokenizer()
    (tmp_path / "short").write_text("a" * 50)
    (tmp_path / "long").write_text("b" * 1000)
    name = f"generated+{tmp_path / 'short'}+generated-diverse+{tmp_path / 'long'}"
    *read, own, diverse = text_shares(tokenizer, name, 11, 40, seed=0)
    assert (own, diverse) == (OwnText("generated", 11, 9), OwnText("generated-diverse", 11, 8))
    windows = in_turns([*read, *(torch.full((each.count, 11), mark) for each, mark in ((own, 7), (diverse, 8)))])
    kinds = windows[:, 5].tolist()
    short, long = kinds[0], kinds[1]
    assert windows.shape == (40, 11)
    assert kinds.count(short) == 5 and kinds.count(long) == 18 and kinds.count(7) == 9 and kinds.count(8) == 8
    for quarter in (kinds[:10], kinds[10:20], kinds[20:30], kinds[30:]):
        assert quarter.count(short) in (1, 2) and quarter.count(7) in (2, 3) and quarter.count(8) == 2


def test_a_text_named_twice_has_two_shares(tmp_path):
    tokenizer = tiny.tokenizer()
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 4000)
    a, b = tmp_path / "a", tmp_path / "b"
    often, once, own = text_shares(tokenizer, f"{a}+generated+{b}+{a}+{a}", 11, 50, seed=0)
    assert (len(often), len(once), own) == (30, 10, OwnText("generated", 11, 10))
    assert (often[:, 5] == often[0, 5]).all() and (once[:, 5] != often[0, 5]).all()
    once, own = text_shares(tokenizer, f"{a}+generated+generated", 11, 51, seed=0)
    assert (len(once), own) == (17, OwnText("generated", 11, 34))


def test_prompts_have_a_place_for_the_topic():
    instructions, openings, topics, documents = prompts()
    assert all(line.count("{}") == 1 for line in instructions + openings) and len(topics) == len(set(topics)) >= 50
    # Neither may the evaluation text steer what is generated.
    prose = load_text("builtin:prose")
    assert not any(line.replace("{}", "") in prose for line in instructions + openings if len(line) > 20)
    assert len(documents) == len(set(documents)) > 200 and "import os\nimport sys\n\ndef main():" in documents


def test_package_texts_are_long_and_distinct():
    opticks, licences = load_text("builtin:opticks"), load_text("builtin:licences")
    assert "TREATISE" in opticks and len(opticks) > 500_000
    assert "You may convey verbatim copies of the Program" in licences and "Covered Software" in licences
    # Three windows of 8192 tokens, which have less than five letters each.
    assert len(licences) > 3 * 8192 * 5 and licences == load_text("builtin:licences")
    # Packages quote the same licences over and over; a text that repeats itself measures copying.
    assert licences.count("Grant of Copyright License") == 1
    # None of it may be a part of what the default recipe calibrates on.
    manual = load_text("builtin:pydoc")
    lines = [line for line in (opticks + licences).splitlines() if sum(map(str.isalpha, line)) > 30]
    assert not [line for line in lines if line in manual]


def test_package_text_missing_or_changed_is_refused(monkeypatch, tmp_path):
    from importlib.machinery import ModuleSpec

    from mha2mla.conversion.calibration import texts

    spec = ModuleSpec("tvm_ffi", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(texts.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ValueError, match="needs .*Opticks.txt of the package apache-tvm-ffi"):
        load_text("builtin:opticks")
    file = tmp_path / "3rdparty" / "libbacktrace" / "Isaac.Newton-Opticks.txt"
    file.parent.mkdir(parents=True)
    file.write_text("Of Colours")
    with pytest.raises(ValueError, match="has SHA-256 .*; expected d4a9ac22"):
        load_text("builtin:opticks")


def test_token_windows_of_long_tokens():
    """The beginning of a text is tokenized for its first windows; one of longer tokens than texts have, whole."""
    tokenizer = tiny.tokenizer()
    text = load_text("builtin:prose")
    assert torch.equal(token_windows(tokenizer, text, 32, 5), token_windows(tokenizer, text, 32, ALL)[:5])

    class Coarse:
        bos_token_id = None

        def __call__(self, text, **_):
            return {"input_ids": [ord(letter) for letter in text[::64]]}

    assert torch.equal(token_windows(Coarse(), text, 8, 4), token_windows(Coarse(), text, 8, ALL)[:4])
