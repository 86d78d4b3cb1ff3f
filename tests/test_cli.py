"""Flags, files and help: what the parsers take, what they say of themselves, and how soon."""

import os
import shlex
import subprocess
import sys
from typing import get_args

import pytest
import yaml

from mha2mla.cli import VERBS, parsers
from mha2mla.conversion.latent.rules import LOW_RANKS
from mha2mla.conversion.latent.stage import LowRank
from mha2mla.conversion.presets import AUTO, PRESETS, PresetName
from mha2mla.conversion.recipe import KEYS, Recipe
from mha2mla.conversion.rope.rules import SELECTIONS
from mha2mla.conversion.rope.stage import Selection
from mha2mla.conversion.target import LAYOUTS, LayoutName
from mha2mla.verbs import asked_recipe
from tests.commands import ROOT, command, run


def parsed_recipe(*flags: str) -> dict:
    given = vars(parsers()[""].parse_args(["convert", "from", "to", *flags]))
    return asked_recipe(given["recipe"], {key: given[key] for key in ("preset", *KEYS)})


def test_help_names_every_verb(capsys):
    with pytest.raises(SystemExit) as stopped:
        run("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(verb.split()[0] in text for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*verb.split(), "--help")
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for action in parsers()[verb]._actions:
        shown = action.option_strings[0] if action.option_strings else action.metavar
        assert action.help and shown in out, action.dest
    example = next(line for line in out.splitlines() if line.startswith("  mha2mla "))
    words = shlex.split(example)
    assert words[1 : 1 + len(verb.split())] == verb.split()
    parsers()[""].parse_args(words[1:])


ALLOWED = {
    "--preset": (AUTO, *PRESETS),
    "--layout": LAYOUTS,
    "--rope.selection": SELECTIONS,
    "--latent.rule": LOW_RANKS,
    "--latent.up-projections": ("kv-head", "query-head"),
    "--dtype": ("float32", "bfloat16", "float16"),
    "--resume": ("auto", "never"),
}


def test_allowed_values_were_not_in_the_help_of_convert():
    """--layout LAYOUT, --rope.selection SELECTION: what may stand there was to be looked up in the code."""
    help_text = " ".join(parsers()["convert"].format_help().split())
    for flag, values in ALLOWED.items():
        assert f"{flag} {{{','.join(values)}}}" in help_text
    assert "--device DEVICE cpu, cuda, cuda:1" in help_text
    assert "--calibration.lengths N|N,N,…|{auto}" in help_text


def test_literal_types_name_what_there_is():
    for hint, values in ((LayoutName, LAYOUTS), (Selection, SELECTIONS), (LowRank, LOW_RANKS)):
        assert get_args(hint) == tuple(values)
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


def test_presets_are_listed_by_help(capsys):
    with pytest.raises(SystemExit):
        run("convert", "--help")
    text = "".join(capsys.readouterr().out.split())  # lines break at hyphens, too
    assert f"--preset{{auto,{','.join(PRESETS)}}}" in text and "[auto]" in text


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
    """--batch-sizes 1,8 was refused: it had to be [1,8], which some shells take for a pattern."""
    for text in ("1,8", "[1,8]", "1, 8"):
        given = parsers()[""].parse_args(["eval", "latency", "a", "b", "--batch-sizes", text])
        assert given.batch_sizes == [1, 8]
    assert parsed_recipe("--calibration.lengths", "512,1024") == {"calibration.lengths": [512, 1024]}
    assert parsed_recipe("--calibration.lengths", "[512]") == {"calibration.lengths": [512]}
    assert parsed_recipe("--latent.ranks", "8,16") == {"latent.ranks": [8, 16]}


# Prints which of the slow libraries a command has imported by the time it ends.
IMPORTED = """
import sys
sys.argv = ["mha2mla", *sys.argv[1:]]
from mha2mla.cli import main
try:
    main()
except SystemExit:
    pass
print("imported:", *({"torch", "transformers", "numpy", "rich", "tilelang"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "argv", [["--version"], ["--help"], *([*verb.split(), "--help"] for verb in VERBS)], ids=" ".join
)
def test_help_took_as_long_as_importing_torch(argv):
    """4.5 s for --version, since importing the package registered the model."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-c", IMPORTED, *argv]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("imported:\n"), done.stdout[-80:]


def test_python_dash_m_imports_no_more_for_help():
    for flag in ("--help", "--version"):
        assert command(flag).returncode == 0


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "mha2mla", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("mha2mla ")
