"""Verbs: their output, their records, and exit code 1 where something is wrong."""

import json
import re

import pytest
import torch

from tests.commands import run


def test_convert_inspect_and_evaluate(tiny_source, tmp_path, capsys):
    destination = tmp_path / "mla"
    small = ("--calibration.tokens", 256, "--calibration.lengths", 64, "--device", "cpu")
    record = tmp_path / "new" / "convert.json"
    assert run("convert", tiny_source, destination, "--cache-ratio", 0.5, *small, "--json", record) == 0
    shown = capsys.readouterr()
    assert "preset: quick, chosen by auto" in shown.err
    # The summary alone, without tables.
    names = [line.partition(":")[0] for line in shown.out.splitlines()]
    said = ["perplexity", "cache", "decode", "weights", "written to", "prompts", "load with", "less loss"]
    assert names == said
    assert f'mha2mla.load("{destination}")' in shown.out and re.search(r"\d bits|bits \d", shown.out)
    assert 0.3 < float(re.search(r"([\d.]+) of the source's", shown.out)[1]) <= 0.5
    assert json.loads(record.read_text()) == json.loads((destination / "conversion.json").read_text())

    # Once more: refused, and allowed when asked for.
    assert run("convert", tiny_source, destination, *small) == 2
    assert "destination" in capsys.readouterr().err
    assert run("convert", tiny_source, destination, "--layout", "shared", "--overwrite", *small) == 0
    capsys.readouterr()

    report = tmp_path / "inspect.json"
    assert run("inspect", destination, "--dtype", "float16", "--json", report) == 0
    shown = json.loads(report.read_text())
    assert shown["summary"]["cache bytes per token of the source"] == 2 * 2 * 2 * 16 * 2
    (row,) = shown["rows"]
    assert shown["summary"]["cache bytes per token"] == 2 * row["bytes_per_token_and_layer"]
    assert row["layers"] == "0–1" and row["num_rope_heads"] == 1
    assert shown["summary"]["recipe.target.layout"] == "shared" and shown["summary"]["recipe.preset"] == "quick"
    # Without a record of the conversion the rest is still there.
    (destination / "conversion.json").unlink()
    capsys.readouterr()
    assert run("inspect", destination) == 0
    assert "no conversion.json" in capsys.readouterr().out

    report = tmp_path / "quality.json"
    quick = ("--text", "builtin:prose", "builtin:pydoc", "--lengths", "32,64", "--max-tokens", 256, "--device", "cpu")
    capsys.readouterr()
    assert run("eval", "quality", tiny_source, destination, *quick, "--json", report) == 0
    written = json.loads(report.read_text())
    assert [(row["text"], row["seqlen"], row["num_tokens"]) for row in written["rows"]] == [
        ("builtin:prose", 32, 8 * 31),
        ("builtin:prose", 64, 4 * 63),
        ("builtin:pydoc", 32, 8 * 31),
        ("builtin:pydoc", 64, 4 * 63),
    ]
    assert [row["first"] for row in written["by_position"]] == [*range(0, 64, 8)] * 2
    assert "by position in the longest window" in capsys.readouterr().out

    report = tmp_path / "latency.json"
    quick = ("--batch-sizes", "1,2", "--seqlens", "32", "--min-run-time", 0.002, "--device", "cpu")
    assert run("eval", "latency", tiny_source, destination, *quick, "--json", report) == 0
    written = json.loads(report.read_text())
    assert {row["op"] for row in written["rows"]} == {"attention", "decode step"}
    assert written["environment"]["torch"]


def test_heal(tiny_source, tiny_converted, tmp_path, capsys):
    small = ("--length", 32, "--long-length", 32, "--batch-tokens", 128, "--tokens-at-once", 64, "--device", "cpu")
    small += ("--text", "builtin:prose", "--tokens", 384)
    command = ("heal", tiny_source, tiny_converted, tmp_path / "healed", *small)
    assert run(*command, "--json", tmp_path / "healing.json") == 0
    shown = capsys.readouterr().out
    names = [line.partition(":")[0] for line in shown.splitlines()]
    said = ["perplexity", "held-out KL", "training KL", "rate", "trained", "text", "speed", "cache", "written to"]
    assert names == [*said, "load with"]
    written = json.loads((tmp_path / "healing.json").read_text())
    assert written["kind"] == "healing" and written["trained"]["tokens"] == 384
    assert written["rows"] == json.loads((tmp_path / "healed" / "conversion.json").read_text())["healing"]["rows"]
    assert run(*command) == 2 and "exists" in capsys.readouterr().err
    assert run("inspect", tmp_path / "healed", "--verify") == 0
    assert "healed" in capsys.readouterr().out


def test_a_wrong_latency_row_is_exit_code_1(tiny_source, tiny_converted, tmp_path, capsys, monkeypatch):
    from mha2mla.eval import op_latency

    def wrong(inputs):
        right = op_latency.sdpa_baseline(inputs)
        return lambda: right() * 1.01

    report = tmp_path / "latency.json"
    quick = ("--level", "op", "--batch-sizes", "[1]", "--seqlens", "[32]", "--min-run-time", 0.002)
    command = ("eval", "latency", tiny_source, tiny_converted, *quick, "--device", "cpu", "--json", report)
    assert run(*command) == 0
    monkeypatch.setitem(op_latency.BASELINES, "torch SDPA", wrong)
    assert run(*command) == 1
    assert "wrong" in capsys.readouterr().out
    row = next(row for row in json.loads(report.read_text())["rows"] if row["implementation"] == "torch SDPA")
    assert row["status"].startswith("wrong: ") and "us_p50" not in row


def test_latency_of_random_weights_needs_no_checkpoint(tmp_path, capsys):
    report = tmp_path / "latency.json"
    quick = ("--batch-sizes", "2", "--seqlens", "8", "--new-tokens", "2", "--min-run-time", 0.002, "--device", "cpu")
    command = ("eval", "latency", "--random-weights", "tiny", "--layers", "1", "--no-check", *quick)
    assert run(*command, "--level", "step", "e2e", "--layout", "per-group", "--json", report) == 0
    written = json.loads(report.read_text())
    assert (written["random_weights"], written["layers"]) == ("tiny", 1)
    assert [row["status"] for row in written["rows"]] == ["not checked"] * 4
    table = capsys.readouterr().out
    assert "tiny, random weights, 1 layers" in table and "limit µs" in table
    assert "plan µs" not in table, "columns that no row has are left out"


def test_latency_counts_kept_rotary_keys(tmp_path):
    """Of the op and of a step; of this shape as wide as the latent."""
    report = tmp_path / "latency.json"
    quick = ("--batch-sizes", "2", "--seqlens", "8", "--min-run-time", 0.002, "--device", "cpu", "--layers", "1")
    for mode, width in (("none", 32), ("bfloat16", 64)):
        command = ("eval", "latency", "--random-weights", "tiny", *quick, "--rotary-key-cache", mode)
        assert run(*command, "--json", report) == 0
        rows = [row for row in json.loads(report.read_text())["rows"] if row["status"] == "ok"]
        ours = [row["cache_bytes"] for row in rows if row["implementation"] in ("converted", "mla_decode (reference)")]
        assert ours == [2 * 8 * width * 4] * 2


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("wrong: relative error 1e-2", 1)])
def test_a_wrong_demo_row_is_exit_code_1(status, code, monkeypatch):
    monkeypatch.setattr("mha2mla.cli.demo.run_demo", lambda *_, **__: [{"status": "ok"}, {"status": status}])
    assert run("demo") == code


def test_check_kernels_without_a_gpu(tmp_path, capsys, monkeypatch):
    report = tmp_path / "check.json"
    assert run("check", "kernels", "--device", "cpu", "--count", "3", "--calls", "2", "--json", str(report)) == 0
    assert "3 random geometries, 6 calls, 0 not right (seed 0)" in capsys.readouterr().out
    content = json.loads(report.read_text())
    assert content["kind"] == "kernel-check"
    assert [row["status"] for row in content["rows"]] == ["ok"] * 6
    assert content["environment"]["torch"]

    from mha2mla.testing import kernel_check

    rows = [row | {"status": "wrong: by far"} for row in content["rows"]]
    monkeypatch.setattr(kernel_check, "check_kernels", lambda *_, **__: rows)
    assert run("check", "kernels", "--device", "cpu") == 1
    assert "by far" in capsys.readouterr().out


def test_env(tmp_path, capsys):
    assert run("env", "--json", tmp_path / "env.json") == 0
    assert "transformers" in capsys.readouterr().out
    assert json.loads((tmp_path / "env.json").read_text())["kind"] == "environment"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would be compiled")
def test_warm_up_says_that_it_needs_a_gpu(tiny_converted, capsys):
    assert run("warm-up", tiny_converted) == 2
    assert "device is cpu; expected a CUDA device: kernels are compiled for the GPU" in capsys.readouterr().err
