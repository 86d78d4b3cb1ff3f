"""Flags, files and help: accepted words, their explanation, and no torch for either."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from functools import reduce
from typing import get_args

import pytest
import yaml
from rich.console import Console

from mha2mla.cli.flags import RecipeFlags, load_recipe
from mha2mla.cli.verbs import app
from mha2mla.conversion.latent.rules import LowRankRule
from mha2mla.conversion.presets import AUTO, PRESETS, PresetName
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.rope import RopeRule
from mha2mla.conversion.stages import LowRank, Selection
from mha2mla.conversion.target import LAYOUTS, LayoutName
from mha2mla.healing.settings import Settings
from tests.commands import ROOT, VERBS, command, parse, run
from tests.few import few


def parsed_recipe(*flags: str) -> dict:
    given = parse("convert", "from", "to", *flags)
    return load_recipe(given.get("recipe"), given.get("keys", RecipeFlags()))


@pytest.fixture
def wide():
    """Help in 400 columns: an app keeps its first console, and with it the width of that moment."""
    app.console = Console(width=400)
    yield
    app.console = None


def test_help_names_every_verb(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert len(VERBS) == 15 and all(verb[0] in text for verb in VERBS)


@pytest.mark.parametrize("words", [(), ("convert",), ("eval", "quality")], ids=" ".join)
def test_help_is_a_word_too(words, capsys):
    assert run("help", *words) == 0
    said = capsys.readouterr().out
    assert run(*words, "--help") == 0 and capsys.readouterr().out == said and "Usage: mha2mla" in said


@pytest.mark.parametrize("verb", ["plan", "convert"])
def test_the_first_line_comes_before_torch(verb, tiny_source):
    """Importing it takes seconds."""
    argv = [verb, str(tiny_source), *([str(tiny_source)] if verb == "convert" else ["--gpu", "h100-80gb"])]
    code = [sys.executable, "-X", "importtime", "-m", "mha2mla", *argv]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(code, env=environment, stderr=subprocess.PIPE, text=True) as process:
        imported, line = set(), "import time: | "
        while line.startswith("import time:"):
            imported.add(line.rpartition("|")[2].strip().partition(".")[0])
            line = process.stderr.readline()
        process.kill()
    assert str(tiny_source) in line and "mha2mla" in imported and "torch" not in imported


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_option_is_explained(verb, capsys, wide):
    assert run(*verb, "--help") == 0
    out = capsys.readouterr().out
    arguments = [
        each
        for each in reduce(lambda at, word: at[word], verb, app).assemble_argument_collection(parse_docstring=True)
        if each.show
    ]
    for argument in arguments:
        shown = argument.name if argument.name.startswith("-") else argument.name.upper()
        assert argument.parameter.help and f"{shown} " in out, argument.name
    examples = [line.split() for line in out.splitlines() if line.strip().startswith(f"mha2mla {' '.join(verb)}")]
    assert arguments and examples
    for example in examples:
        parse(*example[1:])


ALLOWED = {
    "--preset": (AUTO, *PRESETS),
    "--layout": LAYOUTS,
    "--rope.selection": get_args(Selection),
    "--latent.rule": get_args(LowRank),
    "--latent.up-projections": ("kv-head", "query-head"),
    "--dtype": ("float32", "bfloat16", "float16"),
    "--resume": ("auto", "never"),
}


def test_help_of_convert_lists_allowed_values(capsys, wide):
    assert run("convert", "--help") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for flag, values in ALLOWED.items():
        line = next(line for line in lines if f" {flag} " in line)
        assert f"{flag} {{{','.join(values)}}}" in line or f"[choices: {', '.join(values)}]" in line
    assert any("--device DEVICE cpu, cuda, cuda:1" in line for line in lines)
    assert any("--calibration.lengths N|N,N,…|{auto}" in line for line in lines)
    assert any('"auto" chooses them and the rank of each layer' in line for line in lines)  # bits


def test_help_names_no_modules(capsys, wide):
    """Docstrings name them in brackets; a shell has no use for them."""
    assert run("convert", "--help") == 0
    shown = capsys.readouterr().out
    assert not re.search(r"\((fit|latent|calibration)\.\w+[\w.]*\)", shown)
    assert "default_lengths" not in shown


def test_literal_types_name_what_there_is():
    for hint, values in ((LayoutName, LAYOUTS), (Selection, RopeRule.names()), (LowRank, LowRankRule.names())):
        assert tuple(values)[: len(get_args(hint))] == get_args(hint)  # names that tests register come behind
    assert get_args(PresetName) == (AUTO, *PRESETS)


def test_every_recipe_key_is_a_flag():
    recipe = parsed_recipe(
        "--layout", "shared", "--rope.selection=high", "--latent.rule=svd-split", "--cache-ratio", "0.25",
        "--latent.centered", "false", "--calibration.tokens", "1024", "--latent.up-projections", "query-head",
    )  # fmt: skip
    assert recipe == {
        "layout": "shared",
        "cache_ratio": 0.25,
        "rope.selection": "high",
        "latent.rule": "svd-split",
        "latent.centered": False,
        "latent.up_projections": "query-head",
        "calibration.tokens": 1024,
    }
    assert parsed_recipe() == {}


def test_heal_offers_no_second_gpu(capsys):
    """It refuses one: CUDA_VISIBLE_DEVICES chooses."""
    assert run("heal", "--help") == 0
    assert "cuda:1" not in capsys.readouterr().out


def test_every_setting_of_healing_is_a_flag():
    given = parse("heal", "a", "b", "c", "--rate", "3e-4", "--keep=last")["settings"]
    assert {name for name, value in vars(given).items() if value is not None} == {"rate", "keep"}
    assert vars(given).keys() == {each.name for each in fields(Settings)} - {"preset"}


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"target": {"cache_ratio": 0.25}, "layout": "shared", "calibration": {"seed": 3}}))
    given = {"layout": "shared", "cache_ratio": 0.25, "calibration.seed": 3}
    assert parsed_recipe("--recipe", str(file)) == given
    assert parsed_recipe("--calibration.seed", "0", "--recipe", str(file)) == given | {"calibration.seed": 0}
    assert parsed_recipe("--rope.share", "0.3") == {"rope.share": 0.3}
    preset = Recipe.from_dict(parsed_recipe("--preset", "published-mha2mla", "--recipe", str(file)))
    assert preset.preset == "published-mha2mla" and preset.latent.rule == "svd-joint" and preset.calibration.seed == 3
    ranks = parsed_recipe("--recipe", str(file), "--kv-lora-rank", "64", "--qk-rope-head-dim", "16")
    assert ranks == {"layout": "shared", "kv_lora_rank": 64, "qk_rope_head_dim": 16, "calibration.seed": 3}


def test_lists_need_no_brackets():
    """Some shells take [1,8] for a pattern."""
    for text in ("1,8", "[1,8]", "1, 8"):
        assert parse("eval", "latency", "a", "b", "--batch-sizes", text)["batch_sizes"] == [1, 8]
    for words in (["0.5", "0.25"], ["0.5,0.25"], ["0.5", "--cache-ratio", "0.25"]):
        assert parse("plan", "a", "--cache-ratio", *words)["cache_ratio"] == [0.5, 0.25]
    assert parsed_recipe("--calibration.lengths", "512,1024") == {"calibration.lengths": [512, 1024]}
    assert parsed_recipe("--calibration.lengths", "[512]") == {"calibration.lengths": [512]}
    assert parsed_recipe("--latent.ranks", "8,16") == {"latent.ranks": [8, 16]}


def test_repeated_flags_extend_words_replace_values():
    given = parse("generate", "m", "--seed", "3", "--prompt", "a", "b", "--seed", "4", "--prompt", "c")
    assert given == {"model": "m", "seed": 4, "prompt": ["a", "b", "c"]}
    given = parse("eval", "latency", "a", "b", "--seqlens", "1", "--seqlens", "2,3", "--level", "op", "--level=step")
    assert given["seqlens"] == [2, 3] and given["level"] == ["op", "step"]


@few("words", [(), ("eval",), *VERBS], 4, ids=" ".join)
def test_help_imports_no_torch(words):
    """``command`` asserts it by the modules that Python imported."""
    assert command(*words, "--help").returncode == 0


def test_version_imports_no_torch():
    done = command("--version")
    assert done.returncode == 0 and done.stdout.startswith("mha2mla ")
