"""Damaged checkpoints and reports against every verb: refused in one sentence that names the damage.

A case is a verb and one damage to a tiny random source, to what it converts to (one file, or shards with an index), or
to a JSON report.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save

from tests.commands import run
from tests.conversion import tiny
from tests.few import few
from tests.folders import WEIGHTS, edit_weights, read_json

LONGEST = 600  # characters of a message
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
SOURCE, CONVERTED, SHARDED = "source", "converted", "sharded"
QUALITY, LATENCY, CONVERSION = "quality", "latency", "conversion"  # reports
REPORT = "report.json"
DEEP = json.loads("[" * 400 + "]" * 400)
GONE = "GONE"
EMPTY_TENSOR = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
VALUES = (
    GONE, None, True, -1, 0, 2.5, 10**12, 10**30, -(10**18), 1e308, math.nan, math.inf, "", "12", "x" * 100_000,
    [], [1], [None] * 3, {}, {"a": 1}, DEEP, "../../etc/passwd",
)  # fmt: skip
TEXTS: Mapping[str, bytes] = {
    "empty": b"",
    "a brace": b"{",
    "a list": b"[]",
    "null": b"null",
    "a text": b'"x"',
    "an empty object": b"{}",
    "nested deeply": b"[" * 100_000,
    "objects nested deeply": b'{"a":' * 50_000,
    "no UTF-8": b'{"model_type": "\xff\xfe"}',
    "zeros": b"\0" * 4096,
    "a long text": b'{"model_type": "' + b"x" * 2_000_000 + b'"}',
    "a long key": b'{"' + b"y" * 2_000_000 + b'": 1}',
    "a long number": b'{"num_hidden_layers": ' + b"9" * 5_000 + b"}",
}


class Case(NamedTuple):
    """A verb over files of which those in ``folder`` are damaged.

    Attributes:
        what: the damage, for people.
        names: of which a refusal should say one: file, key or tensor.
        damage: does it to a copy of the folder.
    """

    verb: str
    folder: str
    what: str
    names: tuple[str, ...]
    damage: Callable[[Path], Any]


class Verb(NamedTuple):
    """Arguments of a verb over a folder of folders, and what of its result does not change from run to run."""

    arguments: Callable[[Path, str], list[str]]
    result: Callable[[Path, str], Any]
    folders: tuple[str, ...] = (CONVERTED,)


def _digests(folder: Path) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))]


def _generate(at: Path, folder: str) -> list[str]:
    sizes = ["--max-new-tokens", "3", "--max-sequences", "1", "--max-tokens", "32", "--max-length", "32"]
    return ["generate", str(at / folder), "--prompt", "a b", "--device", "cpu", *sizes]


def _quality(at: Path, folder: str) -> list[str]:
    text = ["--text", str(at / "text.txt"), "--lengths", "32", "--max-tokens", "64"]
    models = [str(at / SOURCE), str(at / (CONVERTED if folder == SOURCE else folder))]
    return ["eval", "quality", *models, *text, "--device", "cpu", "--json", str(at / "out.json")]


def _latency(at: Path, folder: str) -> list[str]:
    sizes = ["--level", "step", "--batch-sizes", "1", "--seqlens", "8", "--min-run-time", "0.0001"]
    models = [str(at / SOURCE), str(at / (CONVERTED if folder == SOURCE else folder))]
    return ["eval", "latency", *models, *sizes, "--device", "cpu", "--json", str(at / "out.json")]


def _convert(at: Path, folder: str) -> list[str]:
    keys = ["--preset", "minimal", "--cache-ratio", "0.5", "--calibration.tokens", "64"]
    return ["convert", str(at / folder), str(at / "out"), *keys, "--calibration.text", "builtin:prose"]


VERBS: Mapping[str, Verb] = {
    "convert": Verb(_convert, lambda at, _: (at / "out" / CONFIG).is_file(), (SOURCE,)),
    "inspect": Verb(
        lambda at, folder: ["inspect", str(at / folder), "--json", str(at / "out.json")],
        lambda at, _: [read_json(at / "out.json")[key] for key in ("rows", "cache")],
        (CONVERTED, SHARDED),
    ),
    "generate": Verb(_generate, lambda at, printed: printed.rpartition("\n\n")[0], (CONVERTED, SHARDED, SOURCE)),
    "eval quality": Verb(
        _quality,
        lambda at, _: [row["perplexity_ratio"] for row in read_json(at / "out.json")["rows"]],
        (CONVERTED, SOURCE),
    ),
    "eval latency": Verb(_latency, lambda at, _: [row["status"] for row in read_json(at / "out.json")["rows"]]),
    "export remote-code": Verb(
        lambda at, folder: ["export", str(at / folder), str(at / "out")],
        lambda at, _: _digests(at / "out"),
        (CONVERTED, SHARDED),
    ),
    "export deepseek-v3": Verb(
        lambda at, folder: ["export", str(at / folder), str(at / "out"), "--format", "deepseek-v3"],
        lambda at, _: _digests(at / "out"),
    ),
    "report": Verb(
        lambda at, folder: ["report", str(at / folder / REPORT), "-o", str(at / "out.html")],
        lambda at, _: (at / "out.html").read_bytes()[:15],
        (QUALITY, LATENCY, CONVERSION),
    ),
}


def _paths(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in JSON; of long lists the first two entries."""
    entries = values.items() if isinstance(values, dict) else enumerate(values[:2]) if isinstance(values, list) else ()
    for key, value in entries:
        yield (*at, key)
        yield from _paths(value, (*at, key))


def _put(file: str, at: tuple[Any, ...], value: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        values = whole = read_json(folder / file)
        for key in at[:-1]:
            values = values[key]
        if value == GONE:
            del values[at[-1]]
        else:
            values[at[-1]] = value
        (folder / file).write_text(json.dumps(whole), encoding="utf-8")

    return damage


def _content(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content) and None


def _in_place(file: str, kind: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / file
        aside = folder.parent / f"aside-{file}"
        path.rename(aside)
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        elif kind == "a link out":
            path.symlink_to(aside)
        elif kind == "a link to itself":
            path.symlink_to(path)
        elif kind == "a device":
            path.symlink_to("/dev/zero")

    return damage


PLACES = ("missing", "a pipe", "a folder", "a link out", "a link to itself", "a device")


def _with(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


CHANGES: Mapping[str, Callable[[torch.Tensor], torch.Tensor] | EllipsisType] = {
    "missing": ...,
    "NaN": lambda tensor: _with(tensor, math.nan),
    "infinite": lambda tensor: _with(tensor, math.inf),
    "int8": lambda tensor: tensor.to(torch.int8),
    "bool": lambda tensor: tensor.bool(),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "cut": lambda tensor: tensor[1:],
    "transposed": lambda tensor: tensor.mT if tensor.dim() > 1 else tensor[:, None],
    "flat": lambda tensor: tensor.reshape(-1, 1),
    "empty": lambda tensor: tensor[:0],
    "a scalar": lambda tensor: tensor.flatten()[0],
}


def _raw(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes())) and None


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """A file whose header lies."""

    def changed(raw: bytes) -> bytes:
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        text = json.dumps(change(header) or header).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + size :]

    return changed


def _first(header: dict[str, Any], **keys: Any) -> None:
    """Sets what the header says of its first tensor; None removes a key."""
    name = next(name for name in header if name != "__metadata__")
    header[name] = {key: value for key, value in (header[name] | keys).items() if value is not None}


def _overlap(header: dict[str, Any]) -> None:
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]


FILES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    **{f"cut at {share}": lambda raw, share=share: raw[: int(share * len(raw))] for share in (0.001, 0.3, 0.9, 0.9999)},
    "four bytes": lambda raw: raw[:4],
    "longer": lambda raw: raw + b"\0" * 9,
    "zeros": lambda raw: b"\0" * len(raw),
    "a pickle": lambda raw: pickle.dumps({"weights": [1, 2, 3]}),
    "a huge header": lambda raw: (1 << 62).to_bytes(8, "little") + raw[8:],
    "a header that is too short": lambda raw: (10).to_bytes(8, "little") + raw[8:],
    "a deep header": lambda raw: (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "a list as header": _header(lambda header: [1]),
    "an empty header": _header(lambda header: {"__metadata__": {"format": "pt"}}),
    "no dtype": _header(lambda header: _first(header, dtype=None)),
    "an unknown dtype": _header(lambda header: _first(header, dtype="F7")),
    "another dtype": _header(lambda header: _first(header, dtype="F64")),
    "a negative shape": _header(lambda header: _first(header, shape=[-1, 4])),
    "a giant shape": _header(lambda header: _first(header, shape=[1 << 40, 1 << 40])),
    "offsets beyond the file": _header(lambda header: _first(header, data_offsets=[0, 1 << 50])),
    "offsets backwards": _header(lambda header: _first(header, data_offsets=[64, 0])),
    "overlapping tensors": _header(_overlap),
    "a long name": _header(lambda header: header.update({"x" * 3_000_000: EMPTY_TENSOR})),
    "an unknown tensor": lambda raw: save({"model.other": torch.ones(3)}),
}  # fmt: skip
INDICES: Mapping[str, Callable[[dict[str, str]], Any]] = {
    "a missing shard": lambda shards: "no.safetensors",
    "a shard outside": lambda shards: f"../{CONVERTED}/{WEIGHTS}",
    "an absolute shard": lambda shards: "/etc/passwd",
    "a shard that is a number": lambda shards: 5,
    "a shard with a NUL": lambda shards: "a\0b",
    "a long shard": lambda shards: "s" * 2_000_000,
    "another tensor's shard": lambda shards: list(shards.values())[-1],
}


def all_cases(at: Path) -> list[Case]:
    """Every case over the undamaged files in ``at``."""
    of_json = {
        CONVERTED: (CONFIG, "tokenizer.json", "tokenizer_config.json", "generation_config.json", "conversion.json"),
        SHARDED: (CONFIG, INDEX),
        SOURCE: (CONFIG, "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        QUALITY: (REPORT,),
        LATENCY: (REPORT,),
        CONVERSION: (REPORT,),
    }
    damages: dict[str, list[tuple[str, tuple[str, ...], Callable[[Path], None]]]] = {name: [] for name in of_json}
    for folder, files in of_json.items():
        found = damages[folder]
        for file in files:
            names = (file, "tokenizer") if "tokenizer" in file else (file,)
            names += ("tensor model.", "model_type") if file == CONFIG else ()  # whose shapes it says; without it
            found += [(f"{file}: {what}", names, _content(file, text)) for what, text in TEXTS.items()]
            found += [(f"{file}: {what}", names, _in_place(file, what)) for what in PLACES]
            if "tokenizer" in file or file == INDEX:  # texts and places alone
                continue
            for path in _paths(read_json(at / folder / file)):
                keys = tuple(str(key) for key in path if isinstance(key, str))
                shown = ".".join(map(str, path))
                found += [
                    (f"{file}: {shown} = {str(value)[:40]}", (*names, *keys), _put(file, path, value))
                    for value in VALUES
                ]
    for folder in (SOURCE, CONVERTED):
        found = damages[folder]
        found += [(f"weights: {what}", (WEIGHTS,), _raw(WEIGHTS, change)) for what, change in FILES.items()]
        found += [(f"weights: {what}", (WEIGHTS,), _in_place(WEIGHTS, what)) for what in PLACES]
        for name, tensor in load_file(at / folder / WEIGHTS).items():
            changes = dict(CHANGES)
            if name.endswith("inv_freq"):
                changes |= {"negated": torch.neg}
            if tensor.dim() != 2:
                del changes["flat"]
            if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
                del changes["transposed"]  # no header shows it: its digest does (inspect --verify)
            found += [
                (f"tensor {name}: {what}", (name, WEIGHTS), partial(edit_weights, changes={name: change}))
                for what, change in changes.items()
            ]
    shard = read_json(at / SHARDED / INDEX)["weight_map"]["model.norm.weight"]
    found = damages[SHARDED]
    found += [(f"{shard}: {what}", (shard,), _raw(shard, change)) for what, change in FILES.items()]
    found += [(f"{shard}: {what}", (shard,), _in_place(shard, what)) for what in PLACES]
    first, *_ = shards = read_json(at / SHARDED / INDEX)["weight_map"]
    for what, change in INDICES.items():
        damage = _put(INDEX, ("weight_map", first), change(shards))
        found.append((f"index: {what}", (INDEX, "safetensors", first), damage))
    broken = {**shards, "model.more": shard}
    for what, value in {"missing": GONE, "empty": {}, "a list": [1, 2], "broken": broken}.items():
        names = (INDEX, "safetensors", "model.more")
        found.append((f"index: weight_map {what}", names, _put(INDEX, ("weight_map",), value)))
    return [
        Case(verb, folder, *each) for verb, how in VERBS.items() for folder in how.folders for each in damages[folder]
    ]


@contextmanager
def beside(at: Path, copied: str | None = None) -> Iterator[Path]:
    """A folder of links to what ``at`` holds, but for the folder that is ``copied``."""
    here = at.parent / "here"
    here.mkdir()
    for entry in at.iterdir():
        shutil.copytree(entry, here / entry.name) if entry.name == copied else (here / entry.name).symlink_to(entry)
    try:
        yield here
    finally:
        shutil.rmtree(here)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undamaged files: a source, the same model converted in one file and in shards, and reports."""
    at = tmp_path_factory.mktemp("hostile") / "files"
    tiny.checkpoint(at / SOURCE)
    keys = {"layout": "shared", "cache_ratio": 0.5, "latent.centered": False, "rope.selection": "uniform"}
    tiny.convert(at / SOURCE, at / CONVERTED, {**tiny.SHORT, **keys})
    tiny.convert(at / SOURCE, at / SHARDED, {**tiny.SHORT, "cache_ratio": 0.5}, max_shard_bytes=20_000)
    (at / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    for report in (QUALITY, LATENCY, CONVERSION):
        (at / report).mkdir()
    shutil.copyfile(at / CONVERTED / "conversion.json", at / CONVERSION / REPORT)
    return at


@pytest.fixture
def expected(files: Path, capsys: pytest.CaptureFixture) -> dict[tuple[str, str], Any]:
    """Verb and folder → the result over undamaged files. Makes the reports that ``report`` reads, which is last."""
    found = {}
    for verb, how in VERBS.items():
        for folder in how.folders:
            with beside(files) as here:
                assert run(*how.arguments(here, folder)) == 0, verb
                found[verb, folder] = how.result(here, capsys.readouterr().out)
                if verb.startswith("eval") and folder == CONVERTED:
                    shutil.copyfile(here / "out.json", files / verb.removeprefix("eval ") / REPORT)
    return found


def outcome_of(case: Case, files: Path, expected: Mapping[tuple[str, str], Any], capsys: Any) -> str:
    """ "right": the result of undamaged files; "other": another one, of a value that a model may have; "refused"."""
    with beside(files, copied=case.folder) as here:
        case.damage(here / case.folder)
        verb = VERBS[case.verb]
        code = run(*verb.arguments(here, case.folder))
        printed = capsys.readouterr()
        if code == 0:
            try:
                same = verb.result(here, printed.out) == expected[case.verb, case.folder]
            except (OSError, ValueError, LookupError):
                same = False
            return "right" if same else "other"
        message = next(line for line in reversed(printed.err.splitlines()) if line.startswith("mha2mla: "))
        assert code == 2 and len(message) <= LONGEST, case
        assert any(name in message for name in (*case.names, str(here / case.folder))), (case, message)
        return "refused"


@few("seed", range(20), count=1)
def test_damaged_files_are_refused_in_a_sentence(seed, files, expected, capsys):
    by_verb: dict[str, dict[str, list[Case]]] = {}
    for case in all_cases(files):
        about = f"{case.folder} {case.what.partition(':')[0].partition(' model')[0]}"
        by_verb.setdefault(case.verb, {}).setdefault(about, []).append(case)
    draw, slow, chosen = random.Random(seed), ("convert", "eval latency"), []
    for verb, cases in by_verb.items():  # files in turn, of which some have few cases
        abouts = draw.choices(sorted(cases), k=1 if verb in slow else 5)
        chosen += [draw.choice(cases[about]) for about in abouts]
    outcomes = Counter(outcome_of(case, files, expected, capsys) for case in chosen)
    assert outcomes["refused"] > 10 and outcomes["other"] < 6
