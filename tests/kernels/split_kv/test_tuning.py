"""The tuning table: its file, which row serves which shape, and what dispatch makes of it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mha2mla.kernels.mla_decode import selection
from mha2mla.kernels.mla_decode.selection import TUNING, DecodeShape, list_kernels, select_kernel
from mha2mla.kernels.split_kv import tuning

GPU = "NVIDIA H200"
SHAPE = DecodeShape(32, 8, 512, 16, 64, 1, "bfloat16")
PACKAGE_ROWS = list(TUNING.read(TUNING.package).values())


def row_for(shape: DecodeShape, number: int = 0, **changes) -> dict:
    """A row that names configuration ``number`` of a shape on Hopper."""
    measured = {"us": 86.12, "rule_us": 92.0, "batch": 64, "seqlen": 4096}
    origin = {"tilelang": "0.1.15", "date": "2026-11-21", "commit": None}
    choice = list_kernels(shape, 90)[number]
    return {"gpu": GPU} | asdict(shape) | choice.configuration() | measured | origin | changes


@pytest.fixture
def tables(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Paths of a user's and a package's table that tests may write; select_kernel looks there."""
    user, package = tmp_path / "cache" / "tuning.json", tmp_path / "package" / "tuning.json"
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(selection, "TUNING", replace(TUNING, package=package))
    caches = (tuning.user_table, tuning._read_once, select_kernel)
    for cached in caches:
        cached.cache_clear()
    yield user, package
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "tuning.json"
    rows = [row_for(SHAPE), row_for(replace(SHAPE, heads=16)), row_for(SHAPE, gpu="NVIDIA H100", rule_us=None)]
    assert TUNING.read(path) == {}
    assert TUNING.write(path, rows[:2]) == path
    TUNING.write(path, rows[2:])
    assert sorted(TUNING.read(path)) == sorted(map(TUNING.key_of, rows))
    assert all(TUNING.read(path)[TUNING.key_of(row)] == row for row in rows)
    before = path.read_text()
    TUNING.write(path, [dict(reversed(rows[0].items()))])
    assert path.read_text() == before, "order of rows and keys is fixed"
    TUNING.write(path, [rows[0] | {"us": 80.0}])
    changed = [(a, b) for a, b in zip(before.splitlines(), path.read_text().splitlines(), strict=True) if a != b]
    assert len(changed) == 1, "one line a row"
    assert TUNING.read(path)[TUNING.key_of(rows[0])]["us"] == 80.0
    assert [entry.name for entry in path.parent.iterdir()] == ["tuning.json"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_crash_leaves_the_old_table(tmp_path, monkeypatch, where):
    path = TUNING.write(tmp_path / "tuning.json", [row_for(SHAPE)])
    before = path.read_text()

    def crash(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, where, crash)
    with pytest.raises(OSError, match="no space"):
        TUNING.write(path, [row_for(SHAPE, us=1.0)])
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tuning.json"]


def test_a_process_killed_while_writing_leaves_the_old_table(tmp_path):
    path = TUNING.write(tmp_path / "tuning.json", [row_for(SHAPE)])
    before = path.read_text()
    code = (
        "import json, os, sys\n"
        "from mha2mla.kernels.mla_decode.selection import TUNING\n"
        "os.replace = lambda *_: os._exit(9)\n"
        "TUNING.write(sys.argv[1], [json.loads(sys.argv[2])])\n"
    )
    row = json.dumps(row_for(SHAPE, us=1.0))
    assert subprocess.run([sys.executable, "-c", code, str(path), row], check=False).returncode == 9
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no tuning table"),
        ("[]", "is no tuning table; expected"),
        ('{"version": 3, "rows": []}', "version 3; expected 2"),
        ('{"rows": []}', "version None; expected 2"),
        ('{"version": 1, "rows": [3]}', "row 0 has other keys than expected: int"),
        ('{"version": 2, "rows": [{"gpu": "x"}]}', "row 0 has other keys than expected: .*'us'"),
        (json.dumps({"version": 2, "rows": [row_for(SHAPE)] * 2}), "row 1 is for the same GPU, shape and batches"),
        (json.dumps({"version": 2, "rows": [row_for(SHAPE, rows="32")]}), "row 0: rows is '32'; expected int"),
        (json.dumps({"version": 2, "rows": [row_for(SHAPE, us=True)]}), "row 0: us is True; expected float"),
    ],
)
def test_a_bad_table_is_refused_by_name_and_left_alone(tmp_path, content, message):
    path = tmp_path / "tuning.json"
    path.write_text(content)
    for use in (lambda: TUNING.read(path), lambda: TUNING.write(path, [row_for(SHAPE)])):
        with pytest.raises(ValueError, match=message) as error:
            use()
        assert str(path) in str(error.value)
    assert path.read_text() == content


def test_rows_that_are_none_are_not_written(tmp_path):
    path = tmp_path / "tuning.json"
    for bad in ({"gpu": GPU}, row_for(SHAPE, extra=1), row_for(SHAPE, us=None)):
        with pytest.raises(ValueError, match="the rows to write, row 0"):
            TUNING.write(path, [bad])
    with pytest.raises(ValueError, match="JSON compliant"):
        TUNING.write(path, [row_for(SHAPE, us=float("nan"))])
    assert not path.exists()


def test_a_row_names_one_configuration():
    for heads, groups, width in itertools.product((9, 32, 128), (1, 3, 8, 32), (80, 512)):
        if heads % groups:
            continue
        for seqlen_q, capability in itertools.product((1, 2, 8), (80, 90)):
            choices = list_kernels(DecodeShape(heads, groups, width, 16, 64, seqlen_q, "float16"), capability)
            assert len({tuple(choice.configuration().values()) for choice in choices}) == len(choices)
            assert all(TUNING.match(choice.configuration(), choices) is choice for choice in choices)


def test_the_closest_row_serves():
    def served(table: list[dict], batch: int = 64, **changes) -> dict | None:
        return TUNING.find(replace(SHAPE, **changes), GPU, batch, {TUNING.key_of(row): row for row in table})

    row = row_for(SHAPE)
    assert served([row]) is row
    assert served([row], page_size=128) is row and served([row], dtype="float16", page_size=256) is row
    assert served([row], page_size=16) is None and served([row], page_size=32) is None
    assert served([row_for(replace(SHAPE, page_size=16))]) is None
    for field in ("heads", "num_rope_heads", "kv_lora_rank", "qk_rope_head_dim", "seqlen_q"):
        assert served([row], **{field: 2 * getattr(SHAPE, field)}) is None
    half, wide = row_for(replace(SHAPE, dtype="float16")), row_for(replace(SHAPE, page_size=128))
    for table in itertools.permutations([row, half, wide]):
        assert served(list(table)) is row
        assert served(list(table), dtype="float16") is half
        assert served(list(table), page_size=256) is wide
        assert served(list(table), page_size=128, dtype="float16") is wide, "page size before dtype"
    assert TUNING.find(SHAPE, "NVIDIA H100", 64, {TUNING.key_of(row): row}) is None
    few = row_for(SHAPE, batch=4)
    assert {batch for batch in range(1, 300) if served([row], batch) is row} == set(range(9, 300))
    assert {batch for batch in range(1, 300) if served([few], batch) is few} == set(range(1, 17))
    assert served([row, few], 16) in (row, few) and served([row, few], 17) is row and served([row, few], 8) is few
    assert served([half, few], 2) is few and served([half, few], 64) is half, "batch before dtype"


def test_dynamo_sees_ranges_of_batches():
    """A plan inside a compiled function must not be traced anew for every batch size."""
    torch = pytest.importorskip("torch")
    traced = []

    def remember(graph, inputs):
        traced.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * tuning.batch_bucket(x.shape[0]), backend=remember, dynamic=True)
    for batch in (9, 10, 11, 14, 16):
        assert compiled(torch.ones(batch))[0] == 16
    assert len(traced) == 1
    assert compiled(torch.ones(33))[0] == compiled(torch.ones(999))[0] == 64
    assert len(traced) == 2


def test_rows_of_version_1_are_read_as_rows_of_their_batch(tmp_path):
    row = row_for(SHAPE, 1, batch=8)
    old = {name: value for name, value in row.items() if name != "variant"}
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"version": 1, "rows": [old]}))
    assert TUNING.read(path) == {TUNING.key_of(row): row | {"variant": ""}}
    choices = list_kernels(SHAPE, 90)
    chosen = TUNING.match(TUNING.read(path)[TUNING.key_of(row)], choices)
    assert chosen is choices[1] and chosen.variant == row["variant"] != ""
    TUNING.write(path, [row_for(SHAPE)])
    content = json.loads(path.read_text())
    assert content["version"] == 2 and [entry["batch"] for entry in content["rows"]] == [8, 64]
    path.write_text(json.dumps({"version": 2, "rows": [old]}))
    tuning._read_once.cache_clear()
    with pytest.raises(ValueError, match="other keys than expected: ..variant"):
        TUNING.read(path)


def test_a_row_is_preferred_to_the_rule(tables):
    user, package = tables
    rule = list_kernels(SHAPE, 90)[0]
    assert select_kernel(SHAPE, 90, GPU) == rule and select_kernel(SHAPE, 90, GPU).reason == f"{rule.reason}; rule"
    assert select_kernel(SHAPE, 90) == rule

    TUNING.write(package, [row_for(SHAPE, 3)])
    assert select_kernel(SHAPE, 90, GPU).reason.endswith("; rule"), "a running process keeps its choice"
    select_kernel.cache_clear()
    chosen = select_kernel(SHAPE, 90, GPU)
    assert chosen.configuration() == list_kernels(SHAPE, 90)[3].configuration() != rule.configuration()
    assert chosen.reason.endswith("; package's table row of 2026-11-21, batch 64, 86.1 µs; the rule's choice: 92.0 µs")
    assert select_kernel(SHAPE, 90, GPU, 1000) == chosen
    assert select_kernel(SHAPE, 90, GPU, 8) == rule, "measured at another load"
    assert select_kernel(SHAPE, 90, "NVIDIA H100").reason.endswith("; rule")
    assert select_kernel(SHAPE, 90) == rule, "no GPU, no table"
    assert select_kernel(replace(SHAPE, page_size=128), 90, GPU).reason.endswith("92.0 µs (measured at page_size 64)")

    TUNING.write(user, [row_for(SHAPE, 2, rule_us=None)])
    select_kernel.cache_clear()
    chosen = select_kernel(SHAPE, 90, GPU)
    assert chosen.configuration() == list_kernels(SHAPE, 90)[2].configuration()
    assert chosen.reason.endswith("; user's table row of 2026-11-21, batch 64, 86.1 µs; the rule's choice: did not run")


def test_a_row_that_fits_no_kernel_is_ignored(tables):
    user, package = tables
    TUNING.write(user, [row_for(SHAPE, 3, num_stages=99)])
    chosen = select_kernel(SHAPE, 90, GPU)
    stale = "the user's table row of 2026-11-21 names a swap_ab_ws that is no longer offered"
    assert chosen.reason.endswith(f"; rule; {stale}")
    assert chosen.configuration() == list_kernels(SHAPE, 90)[0].configuration()

    TUNING.write(package, [row_for(SHAPE, 3)])
    select_kernel.cache_clear()
    chosen = select_kernel(SHAPE, 90, GPU)
    assert chosen.configuration() == list_kernels(SHAPE, 90)[3].configuration()
    assert chosen.reason.endswith(f"the rule's choice: 92.0 µs; {stale}")


def test_a_table_that_cannot_be_read_stops_nobody(tables):
    user, package = tables
    user.parent.mkdir()
    user.write_text('{"version": 3, "rows": []}')
    TUNING.write(package, [row_for(SHAPE, 3)])
    with pytest.warns(RuntimeWarning, match="version 3; expected 2"):
        chosen = select_kernel(SHAPE, 90, GPU)
    assert chosen.configuration() == list_kernels(SHAPE, 90)[3].configuration()
    assert f"the user's table is not used: {user} is a tuning table of version 3" in chosen.reason


def test_a_user_without_a_home_has_no_table(tables, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tuning, "cache_folder", no_home)
    assert tuning.user_table() is None
    assert select_kernel(SHAPE, 90, GPU).reason.endswith("; rule")
    tuning.user_table.cache_clear()


def test_selection_needs_neither_torch_nor_tilelang():
    """The files themselves; the packages around them import torch."""
    code = (
        "import sys, types\n"
        "for name, folder in (('mha2mla', 'mha2mla'), ('mha2mla.kernels', 'mha2mla/kernels'),\n"
        "                     ('mha2mla.kernels.mla_decode', 'mha2mla/kernels/mla_decode'),\n"
        "                     ('mha2mla.kernels.split_kv', 'mha2mla/kernels/split_kv')):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__path__ = [folder]\n"
        "from mha2mla.kernels.mla_decode.selection import DecodeShape, select_kernel\n"
        "select_kernel(DecodeShape(32, 8, 512, 16, 64, 1, 'bfloat16'), 90, 'a GPU')\n"
        "assert not {'torch', 'tilelang'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_package_brings_its_table():
    assert TUNING.package.is_file()
    content = json.loads(TUNING.package.read_text())
    assert content["version"] == 2
    assert [list(row) for row in content["rows"]] == [list(TUNING.fields)] * len(content["rows"])


def shape_of(row: dict) -> DecodeShape:
    return DecodeShape(**{name: row[name] for name in asdict(SHAPE)})


@pytest.mark.parametrize("row", PACKAGE_ROWS, ids=lambda row: "-".join(map(str, TUNING.key_of(row))))
def test_a_row_of_the_package_is_offered_and_was_worth_it(row):
    assert row["gpu"] == GPU, "which has compute capability 9.0"
    assert TUNING.match(row, list_kernels(shape_of(row), 90)) is not None, "tune this shape again, or drop the row"
    assert row["rule_us"] is None or row["us"] <= row["rule_us"]


def gate_cases() -> list:
    """Every row of the package's table, for the compile gate: first one of each family, frequent families first."""
    families: dict[tuple, list[dict]] = {}
    for row in PACKAGE_ROWS:
        families.setdefault((row["kernel"], row["warpgroups"], row["rows"], row["ctas_per_sm"]), []).append(row)
    ranks = sorted(families.values(), key=len, reverse=True)
    ordered = [row for rank in itertools.zip_longest(*ranks) for row in rank if row is not None]
    return ordered


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", gate_cases(), ids=lambda row: "-".join(map(str, TUNING.key_of(row))))
def test_a_row_of_the_package_compiles(row):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernel_testing.compile_gate import find_tool
    from tests.kernels.mla_decode.test_compile_gate import gate

    if find_tool("nvcc") is None:
        pytest.skip("nvcc is neither on PATH nor installed by pip")
    shape = shape_of(row)
    gate(shape, TUNING.match(row, list_kernels(shape, 90)), 90)
