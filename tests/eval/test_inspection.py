import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from mha2mla.checkpoints import CheckpointError
from mha2mla.cli.verbs import main
from mha2mla.eval.inspection import inspect_checkpoint
from tests.conversion import tiny
from tests.folders import edit_json, edit_weights, read_json


def test_bytes_of_any_batch_and_length(tiny_converted):
    found = inspect_checkpoint(tiny_converted, "float16", batches=(1, 8), lengths=(10, 4096))
    assert [(row["batch"], row["length"]) for row in found.cache] == [(1, 10), (1, 4096), (8, 10), (8, 4096)]
    # 2 layers, keys and values, 2 kv heads of width 16, 2 bytes; half of it after the conversion.
    source = 2 * 2 * 2 * 16 * 2
    for row in found.cache:
        assert row["source_cache_bytes"] == row["batch"] * row["length"] * source
        assert row["cache_bytes"] == row["source_cache_bytes"] // 2 and row["reduction"] == "50.0%"
        assert row["source_mib"] * 2**20 == row["source_cache_bytes"]
    assert found.summary["cache bytes per token"] == source // 2


def test_a_sliding_source_caches_window_minus_one(tmp_path):
    source = tiny.checkpoint(tmp_path / "source", "mistral", sliding_window=9)
    recipe = {"preset": "minimal", "cache_ratio": 1.0}
    tiny.convert(source, tmp_path / "out", recipe)
    short, row = inspect_checkpoint(tmp_path / "out", lengths=[8, 80]).cache
    assert short["cache_bytes"] == short["source_cache_bytes"] and short["reduction"] == "0.0%"
    # One token less than the window is kept: the next one sees itself.
    assert row["cache_bytes"] == 10 * row["source_cache_bytes"] and row["reduction"] == "-900.0%"


def test_the_record_of_the_conversion_is_shown(tiny_converted, tmp_path, capsys):
    record = read_json(tiny_converted / "conversion.json")
    found = inspect_checkpoint(tiny_converted)
    assert found.measured[0]["perplexity_converted"] == record["parity"]["perplexity_converted"]
    assert [row["length"] for row in found.measured] == [record["evaluation_length"]]
    assert found.run["seconds.total"] == record["seconds"]["total"] and found.run["torch"]
    assert [row["score_error"] for row in found.layers] == [row["score_error"] for row in record["rows"]]

    written = tmp_path / "inspect.json"
    assert main(["inspect", str(tiny_converted), "--batch", "[2]", "--length=[7]", "--json", str(written)]) == 0
    shown = read_json(written)
    assert shown["measured"][0]["kl"] == record["parity"]["kl"] and len(shown["layers"]) == 2
    assert [(row["batch"], row["length"]) for row in shown["cache"]] == [(2, 7)]
    out = capsys.readouterr().out
    for text in ("perplexity source", "relative errors by layer", "converted, MiB", "recipe.target.layout"):
        assert text in out


def test_calibrated_length_is_part_of_a_checkpoint(tiny_converted, tiny_source, tmp_path):
    assert AutoConfig.from_pretrained(tiny_converted).calibrated_length == 64
    assert inspect_checkpoint(tiny_converted).summary["calibrated length"] == "up to 64 tokens"
    assert "| tokens of a sequence that it was made for | | up to 64 |" in (tiny_converted / "README.md").read_text()

    exact = {"preset": "minimal", "cache_ratio": 1.0}
    report = tiny.convert(tiny_source, tmp_path / "exact", exact)
    assert report.calibrated_length is None
    assert AutoConfig.from_pretrained(tmp_path / "exact").calibrated_length is None
    assert inspect_checkpoint(tmp_path / "exact").summary["calibrated length"] == "any that the source takes"
    assert "it was made for | | as many as the source takes |" in (tmp_path / "exact" / "README.md").read_text()


def test_a_checkpoint_of_an_earlier_version_is_shown(tiny_converted, tmp_path):
    """No calibrated length in config and record, and a recipe that had no stages, of a preset under its old name, and
    values that are gone."""
    old = shutil.copytree(tiny_converted, tmp_path / "old")
    for name in ("config.json", "conversion.json"):
        recipe = {"layout": "per-group", "rope_selection": "uneven", "rope_search": None, "preset": "mha2mla"}
        edit_json(old / name, calibrated_length=..., preset=..., recipe={**recipe, "rope": {"share": "auto"}})
    found = inspect_checkpoint(old)
    assert found.summary["calibrated length"] == "not recorded" and found.summary["recipe.preset"] == "mha2mla"
    assert found.summary["recipe.rope_selection"] == "uneven" and found.summary["recipe.rope.share"] == "auto"
    assert AutoModelForCausalLM.from_pretrained(old).config.calibrated_length is None


@pytest.mark.parametrize(("name", "value"), [("lengths", [0]), ("batches", [-1]), ("batches", 1), ("lengths", ["4"])])
def test_bad_arguments_are_named(name, value, tiny_converted):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value}; expected one or more whole numbers")):
        inspect_checkpoint(tiny_converted, **{name: value})


def test_growth_of_the_weights_is_said(tiny_converted, tiny_source):
    """By inspect, record and card."""
    source, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_source, tiny_converted))
    before, after = source.num_parameters(), model.num_parameters()
    record = read_json(tiny_converted / "conversion.json")
    assert (record["source_parameters"], record["parameters"]) == (before, after)
    assert record["weight_growth"] == after / before != 1
    assert record["source_weight_bytes"] == 4 * before
    assert record["weight_bytes"] == sum(tensor.nbytes for tensor in model.state_dict().values())
    card = (tiny_converted / "README.md").read_text()
    assert f"| parameters | {before:,} | {after:,} ({after / before:.4f}) |" in card
    found = inspect_checkpoint(tiny_converted).summary
    assert (found["parameters of the source"], found["parameters"]) == (before, after)
    assert found["growth"] == f"{after / before - 1:+.1%}"
    assert found["bytes of weights in bfloat16"] == 2 * after
    assert found["bytes of weights, as stored"] == record["weight_bytes"]


@pytest.mark.parametrize("max_shard_bytes", [40_000, 1 << 30])
def test_verify_finds_a_transposed_square(max_shard_bytes, tmp_path, capsys):
    """Which no header shows."""
    source = tiny.checkpoint(tmp_path / "source", num_key_value_heads=4, head_dim=12)
    tiny.convert(source, tmp_path / "mla", {**tiny.SHORT, "cache_ratio": 0.5}, max_shard_bytes=max_shard_bytes)
    assert main(["inspect", str(tmp_path / "mla"), "--verify"]) == 0
    files = sorted(path.name for path in (tmp_path / "mla").glob("*.safetensors"))
    assert f"weights and code are what the conversion wrote: {len(files) + 2} files" in capsys.readouterr().out
    name = "model.layers.0.self_attn.o_proj.weight"
    damaged = next(file for file in files if name in load_file(tmp_path / "mla" / file))
    edit_weights(tmp_path / "mla", {name: torch.t}, damaged)  # a square one
    assert main(["inspect", str(tmp_path / "mla")]) == 0
    assert main(["inspect", str(tmp_path / "mla"), "--verify"]) == 2
    assert f"{damaged} has SHA-256" in capsys.readouterr().err


def test_verify_names_what_has_no_digest(tiny_converted, tmp_path, capsys):
    old = shutil.copytree(tiny_converted, tmp_path / "old")
    for digests, message in ((..., "conversion.json has no weights_sha256"), ({}, "model.safetensors is in one of")):
        edit_json(old / "conversion.json", weights_sha256=digests)
        assert main(["inspect", str(old), "--verify"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"rows": 3}', '{"parity": {"kl": 1}}', '{"rows": [[1]], "seconds": 1}']
)
def test_a_damaged_record_is_named(content, tiny_converted, tmp_path):
    copy = shutil.copytree(tiny_converted, tmp_path / "copy")
    (copy / "conversion.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"conversion\.json"):
        inspect_checkpoint(copy)
