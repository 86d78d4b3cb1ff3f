"""Rows of `mha2mla plan`, and the page that shows them."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import mha2mla
from mha2mla.conversion.recipe import Recipe
from mha2mla.eval.report import format_value
from mha2mla.pipeline.plan import CACHE_RATIOS, CAPACITY_COLUMNS, COST_COLUMNS, plan
from mha2mla.pipeline.sizing import GPUS, NOT_MEASURED
from tests.commands import parse, run
from tests.modeling.models import source_config

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sizing.md"
LEFT_OUT = {"d_c", "bits", "G", "d_r", "largest_context", "kernel", "note", "growth"}
LEFT_OUT |= {"bytes_per_token_8_bit", "bytes_per_token_kept", "bytes_per_token_kept_8_bit"}
LEFT_OUT |= {"step_ms_largest", "step_ms_by_d_r"}


def as_markdown(rows: list[dict], columns: dict[str, str]) -> list[str]:
    """Lines of a table."""
    columns = {key: heading for key, heading in columns.items() if key not in LEFT_OUT}
    cells = [[format_value(row.get(key)) for key in columns] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in ([*columns.values()], ["---"] * len(columns), *cells)]


def plan_of(command: str):
    given = parse(*shlex.split(command)[1:])
    options = {key: given[key] for key in ("gpu", "tp", "context", "latent_bits") if key in given}
    return plan(given["source"], cache_ratios=given.get("cache_ratio", CACHE_RATIOS), **options)


def test_sizing_page_is_what_the_command_prints():
    text = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^mha2mla plan (?!path).*$", text, re.M)
    sections = re.split(r"^mha2mla plan (?!path).*$", text, flags=re.M)[1:]
    assert len(commands) == 3
    costs = []
    for command, section in zip(commands, sections, strict=True):
        found = plan_of(command)
        lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
        assert lines == as_markdown(found.rows, CAPACITY_COLUMNS)
        costs.append(found.rows[1] | {"target": command.split()[2]})
    lines = [line for line in text.partition("\n## What a conversion costs")[2].splitlines() if line.startswith("|")]
    assert lines == as_markdown(costs, COST_COLUMNS)


def test_plan_has_the_geometry_that_convert_writes(tiny_source, tiny_converted):
    config = mha2mla.load(str(tiny_converted), device="cpu", dtype=torch.float32)[0].config
    source, row = plan(tiny_source, cache_ratios=(0.5,), layouts=("per-group",)).rows
    geometry = config.layer_geometry(0)
    assert (row["d_c"], row["G"], row["d_r"]) == (
        geometry.kv_lora_rank, geometry.num_rope_heads, geometry.qk_rope_head_dim
    )  # fmt: skip
    assert row["bytes_per_token"] == config.cache_bytes_per_token(2)
    assert "bytes_per_token_kept" not in row
    assert source["bytes_per_token"] == config.source_cache_bytes_per_token(2)


def test_plan_says_what_kept_rotary_keys_cost():
    row = plan("qwen2.5-7b", gpu="h200-141gb", cache_ratios=(0.5,), latent_bits=16).rows[1]
    assert (row["d_c"], row["d_r"], row["bytes_per_token"]) == (512, 128, 28 * 2 * 512)
    assert row["bytes_per_token_kept"] == 28 * 2 * (512 + 128)
    assert row["bytes_per_token_kept_8_bit"] == 28 * (2 * 512 + 128 + 4)


def test_plan_gives_the_step_by_rotary_width():
    """Computed keys of half the width: half of their products, and no others of a step's."""
    layouts = ("latent", "shared")
    _, row, shared = plan("qwen2.5-7b", gpu="h200-141gb", cache_ratios=(0.5,), layouts=layouts, latent_bits=16).rows
    steps = dict(part.split(": ") for part in row["step_ms_by_d_r"].split(", "))
    tokens = row["largest_batch"] * 8192 * 28
    saved = tokens * 2 * 512 * 64 / GPUS["h200-141gb"].product_rate * 1e3
    assert list(steps) == ["64", "128"] and float(steps["128"]) == pytest.approx(row["step_ms_largest"], rel=1e-3)
    # Reading latents takes longer than the products of 28 heads, of which d_r is a small part.
    assert float(steps["128"]) - float(steps["64"]) == pytest.approx(saved, rel=0.02)
    assert shared["step_ms_by_d_r"] is None and "step_ms_largest" in shared


def test_plan_counts_the_bytes_of_codes():
    """Of 1,024 cached elements, 640 in 4 bits with a scale take 0.158 of the bytes."""
    found = plan("qwen2.5-7b", gpu="h200-141gb", cache_ratios=(0.16,), latent_bits=4)
    row = found.rows[1]
    assert (row["d_c"], row["bits"], row["bytes_per_token"]) == (640, 4, 28 * (320 + 4))
    (sixteen,) = plan("qwen2.5-7b", gpu="h200-141gb", cache_ratios=(0.625,), latent_bits=16).rows[1:]
    assert sixteen["d_c"] == 640 and row["step_ms_1"] == pytest.approx(sixteen["step_ms_1"], rel=0.05)
    assert row["note"] is None and row["loss"] == "not measured"
    assert "--latent.bits 4" in found.commands[0] and row["kernel"] == "codes_latent_cluster"
    (_, older) = plan("qwen2.5-7b", gpu="a100-80gb", cache_ratios=(0.16,), latent_bits=4).rows
    assert older["kernel"] == "latent_portable" and older["note"] == "decode copies codes in 16 bits first"


def test_plan_shows_bits_by_layer_beside_16_with_their_losses():
    found = plan("smollm2-135m", gpu="h200-141gb")
    assert [row["target"] for row in found.rows[1:]] == [
        f"latent {ratio:g}, {bits} bits" for bits in ("auto", 16) for ratio in CACHE_RATIOS
    ]
    row = found.rows[len(CACHE_RATIOS)]
    assert (row["target"], row["bits"], row["bytes_per_token"]) == ("latent 0.125, auto bits", "auto", 23040 // 8)
    assert row["SmolLM2-135M-Instruct"] == "1.040 / 1.051 (quick), healed 1.016 / 1.031"
    assert found.rows[1 + len(CACHE_RATIOS)]["SmolLM2-135M-Instruct"] == "1.028 / 1.040, healed 1.006 / 1.017"
    assert [row["target"] for row in plan("smollm2-135m", cache_ratios=(1.0,)).rows[1:]] == ["latent 1"]
    (_, asked) = plan("smollm2-135m", cache_ratios=(1.0,), latent_bits="auto").rows
    assert asked["target"] == "latent 1, auto bits" and asked["bytes_per_token"] == 23040
    (_, three) = plan("smollm2-135m", gpu="h200-141gb", cache_ratios=(0.125,), latent_bits=3).rows
    assert three["SmolLM2-135M-Instruct"] == NOT_MEASURED and three["bytes_per_token"] == 2640
    (_, four) = plan("smollm2-135m", gpu="h200-141gb", cache_ratios=(0.3,), latent_bits=4).rows
    assert four["SmolLM2-135M-Instruct"] == NOT_MEASURED
    auto = found.rows[3]
    assert (auto["target"], auto["bits"], auto["bytes_per_token"]) == ("latent 0.25, auto bits", "auto", 23040 // 4)
    assert auto["SmolLM2-135M-Instruct"] == "1.007 / 1.007 (quick)" and "step_ms_1" in auto
    assert found.commands[2].endswith("--cache-ratio 0.25") and "each layer" in auto["note"]
    assert found.commands[7].endswith("--cache-ratio 0.25 --latent.bits 16")


@pytest.mark.parametrize("ratio", [0.5, 0.3125, 0.25, 0.1875, 0.125])
def test_ranks_and_bits_by_layer_are_sized_as_on_record(ratio):
    """The budget is spent; weights are those of a rank near the mean one that was chosen."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200-row-codes.json").read_text(encoding="utf-8"))["rows"]
    (record,) = [row for row in rows if row["cache"] == f"quick, auto {ratio:g}" and row["model"].startswith("SmolLM2")]
    found = plan("smollm2-135m", gpu="h200-141gb", cache_ratios=(ratio,), latent_bits="auto").rows[1]
    assert found["bytes_per_token"] == ratio * 23040 == pytest.approx(record["bytes"] * 23040, rel=0.005)
    assert found["bytes_per_token_kept"] == found["bytes_per_token"] + 30 * 2 * 128
    rank = int(found["note"].split()[-1])
    assert abs(rank - record["rank"]) < 0.1 * record["rank"] and "d_c" not in found


def test_plan_reads_nothing_but_the_config(tiny_source, tmp_path):
    shutil.copy(tiny_source / "config.json", tmp_path)
    expected = plan(tiny_source, cache_ratios=(0.5,)).rows
    for source in (tmp_path, tmp_path / "config.json"):
        assert plan(source, cache_ratios=(0.5,)).rows == expected


def test_plan_gives_commands_that_parse():
    found = plan("llama-3-70b", gpu="h100-80gb", tp=4, cache_ratios=(0.5, 1.0), layouts=("latent", "shared"))
    for command, row in zip(found.commands, found.rows[1:], strict=True):
        given = parse(*shlex.split(command)[1:])
        recipe = {key.replace("__", "."): value for key, value in vars(given["keys"]).items() if value is not None}
        assert float(recipe["cache_ratio"]) == row["cache_ratio"] and recipe.get("layout", "latent") == row["layout"]
        recipe = Recipe(**recipe | {"cache_ratio": float(recipe["cache_ratio"])})
        assert recipe.preset == "quick" == row["preset"]
        assert (recipe.latent.bits == "auto") == ("auto" in row["target"] or row["target"] == "latent 1")


def test_plan_never_extrapolates_a_loss():
    assert {row["loss"] for row in plan("llama-3-8b", gpu="h200-141gb").rows[1:]} == {NOT_MEASURED}


def test_plan_predicts_no_step_without_a_fast_kernel():
    for row in plan("llama-3-8b", gpu="a100-80gb", cache_ratios=(1.0, 0.25)).rows[1:]:
        assert "step_ms_1" not in row and row["note"] and row["largest_batch"] > 0


def test_plan_says_which_ratio_is_too_small(tiny_source):
    (row,) = plan(tiny_source, cache_ratios=(0.0001,), layouts=("shared",)).rows[1:]
    assert row["note"].startswith("no conversion: cache_ratio is 0.0001, 0 elements per token and layer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp is 3; expected a divisor of the source's 4 query heads"),
        ({"context": 0}, "context is 0; expected 1 or more"),
        ({"cache_ratios": (1.5,)}, "cache_ratio is 1.5; expected a number above 0, at most 1"),
    ],
)
def test_plan_refuses_by_name(tiny_source, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(tiny_source, **options)


def test_plan_notes_what_no_rank_shares(tmp_path):
    source_config("olmo2").save_pretrained(tmp_path)
    for tp, noted in ((1, False), (2, True)):
        rows = plan(tmp_path, gpu="h200-141gb", tp=tp, cache_ratios=(0.5,)).rows
        found = ["olmo2 normalises the queries of all heads" in (row.get("note") or "") for row in rows]
        assert found == [False, noted, noted]


def test_plan_names_the_shape_that_was_meant():
    with pytest.raises(FileNotFoundError, match=r"source is './llama-3-8c'.*; did you mean 'llama-3-8b'\?"):
        plan("./llama-3-8c")


def test_plan_refuses_what_is_converted(tiny_converted):
    with pytest.raises(ValueError, match="it is already converted"):
        plan(tiny_converted)


def test_plan_verb_prints_and_writes(tiny_source, tmp_path, capsys):
    file = tmp_path / "plan.json"
    options = ("--gpu", "h100-80gb", "--cache-ratio", "0.5", "--latent-bits", "16")
    assert run("plan", tiny_source, *options, "--json", file) == 0
    out = capsys.readouterr().out
    for text in ("latent 0.5", NOT_MEASURED, "SmolLM2-135M-Instruct", f"mha2mla convert {tiny_source}"):
        assert text in out
    assert not re.search(r"\b(d_c +bits|note)\b", out.partition("Largest batch")[0]), "columns without a value"
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["kind"] == "plan" and len(written["rows"]) == 2 and len(written["commands"]) == 1
