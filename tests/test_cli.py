"""The verbs, called as a user calls them."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
import yaml

from mha2mla.checkpoints import find_checkpoint
from mha2mla.cli import VERBS, main, parsers
from mha2mla.conversion.latent.rules import LOW_RANKS
from mha2mla.conversion.latent.stage import LowRank
from mha2mla.conversion.presets import AUTO, PRESETS, PresetName
from mha2mla.conversion.recipe import KEYS, Recipe
from mha2mla.conversion.rope.rules import SELECTIONS
from mha2mla.conversion.rope.stage import Selection
from mha2mla.conversion.target import LAYOUTS, LayoutName
from mha2mla.verbs import asked_recipe

ROOT = Path(__file__).parents[1]


def run(*argv) -> int:
    return main([str(argument) for argument in argv])


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


def test_convert_inspect_and_evaluate(tiny_source, tmp_path, capsys):
    destination = tmp_path / "mla"
    small = ("--calibration.tokens", 256, "--calibration.lengths", 64, "--device", "cpu")
    record = tmp_path / "new" / "convert.json"
    assert run("convert", tiny_source, destination, "--cache-ratio", 0.5, *small, "--json", record) == 0
    shown = capsys.readouterr()
    assert "preset: quick, chosen by auto" in shown.err
    # Five lines, where three screens of tables were: the ratio at two lengths, the cache, where, how to load, better.
    names = [line.partition(":")[0] for line in shown.out.splitlines()]
    assert names == ["perplexity", "cache", "written to", "load with", "better"]
    assert f'mha2mla.load("{destination}")' in shown.out and "0.5000 of the source's" in shown.out
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
    assert shown["summary"]["cache bytes per token"] == sum(
        2 * row["bytes_per_token_and_layer"] for row in shown["rows"]
    )
    assert shown["rows"][0]["layers"] == "0–1" and shown["rows"][0]["num_rope_heads"] == 1
    assert shown["summary"]["recipe.target.layout"] == "shared" and shown["summary"]["recipe.preset"] == "quick"
    # Without a record of the conversion the rest is still there.
    (destination / "conversion.json").unlink()
    capsys.readouterr()
    assert run("inspect", destination) == 0
    assert "no conversion.json" in capsys.readouterr().out

    report = tmp_path / "quality.json"
    quick = ("--text", "builtin:prose", "builtin:pydoc", "--lengths", "32,64", "--max-tokens", 256, "--device", "cpu")
    quick += ("--plot", tmp_path / "quality.png")
    capsys.readouterr()
    assert run("eval", "quality", tiny_source, destination, *quick, "--json", report) == 0
    assert (tmp_path / "quality.png").is_file()
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "models are given by nothing"),
        (("a", "b", "--preset", "llama-2-7b-decode"), "models are given by SOURCE and CONVERTED, --preset"),
        (("a",), "CONVERTED is not given beside SOURCE 'a'"),
        (("--random-weights", "tiny", "--kv-lora-rank", "8"), "qk_rope_head_dim is not given"),
        (("--random-weights", "tiny", "--layers", "0"), "layers is 0; expected 1 or more"),
        (("a", "b", "--layout", "latent", "--layers", "2"), "--layout, --layers is given beside SOURCE and CONVERTED"),
        (("--preset", "llama-2-7b-decode", "--level", "e2e"), "--level is given beside --preset"),
    ],
)
def test_latency_says_which_models_it_wants(arguments, message, capsys):
    assert run("eval", "latency", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("wrong: relative error 1e-2", 1)])
def test_a_wrong_demo_row_is_exit_code_1(status, code, monkeypatch):
    monkeypatch.setattr("mha2mla.demo.run_demo", lambda *_, **__: [{"status": "ok"}, {"status": status}])
    assert run("demo") == code


def test_check_kernels_without_a_gpu(tmp_path, capsys, monkeypatch):
    report = tmp_path / "check.json"
    assert run("check", "kernels", "--device", "cpu", "--count", "3", "--calls", "2", "--json", str(report)) == 0
    assert "3 random geometries, 6 calls, 0 not right (seed 0)" in capsys.readouterr().out
    content = json.loads(report.read_text())
    assert content["kind"] == "kernel-check"
    assert [row["status"] for row in content["rows"]] == ["ok"] * 6
    assert content["environment"]["torch"]

    from mha2mla.kernel_testing import check

    rows = [row | {"status": "wrong: by far"} for row in content["rows"]]
    monkeypatch.setattr(check, "check_kernels", lambda *_, **__: rows)
    assert run("check", "kernels", "--device", "cpu") == 1
    assert "by far" in capsys.readouterr().out


def test_env(tmp_path, capsys):
    assert run("env", "--json", tmp_path / "env.json") == 0
    assert "transformers" in capsys.readouterr().out
    assert json.loads((tmp_path / "env.json").read_text())["kind"] == "environment"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["convert", "/no/such/folder", "out"], "/no/such/folder"),
        (["inspect", "/no/such/folder"], "checkpoint is '/no/such/folder'"),
        (["demo", "--model", "/no/such/folder"], "model is '/no/such/folder'"),
        (["eval", "quality", "/no/such/a", "/no/such/b"], "/no/such/a"),
        (["convert", "a", "b", "--recipe", "/no/such.yaml"], "/no/such.yaml"),
        (["convert", "a", "b", "--cache-ratio", "1.5"], "cache_ratio is 1.5"),
        (
            ["convert", "a", "b", "--layout", "cubist"],
            "layout is 'cubist'; expected one of 'per-group', 'shared', 'latent'",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("mha2mla: error: ")]
    assert len(lines) == 1 and message in lines[0] and "Traceback" not in error


@pytest.mark.parametrize("verb", [["inspect"], ["export"], ["eval", "latency"]], ids=" ".join)
def test_an_unconverted_checkpoint_is_refused(verb, tiny_source, tmp_path):
    """Before anything is loaded; ``export`` ended in a TypeError of transformers."""
    places = {"export": [tmp_path / "out"], "eval": [tiny_source]}.get(verb[0], [])
    done = command(*map(str, [*verb, tiny_source, *places]), within=2.0)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "has model_type 'llama'; expected 'mha2mla'" in done.stderr


@pytest.mark.parametrize("kind", ["quality", "tasks"])
def test_source_and_converted_the_wrong_way_round(kind, tiny_source, tiny_converted, capsys):
    """The table that was printed showed the loss as a gain."""
    assert run("eval", kind, tiny_converted, tiny_source) == 2
    assert "expected the source first" in capsys.readouterr().err


def test_a_truncated_config_is_one_line(tiny_source, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_source, broken)
    (broken / "config.json").write_text('{"model_type": ')
    assert run("convert", broken, tmp_path / "out") == 2
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_debug_shows_where():
    with pytest.raises(FileNotFoundError):
        main(["--debug", "inspect", "/no/such/folder"])


def command(*argv: str, within: float, **environment: str) -> subprocess.CompletedProcess:
    """``python -m mha2mla`` in a process of its own, which takes less than ``within`` seconds, at least once in three
    times: others use this machine, too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    for _ in range(3):
        started = time.perf_counter()
        code = [sys.executable, "-m", "mha2mla", *argv]
        done = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if seconds < within:
            return done
    pytest.fail(f"{' '.join(argv)} took {seconds:.1f} s")


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


def test_help_within_a_second():
    for flag in ("--help", "--version"):
        assert command(flag, within=1.0).returncode == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", "{}"],
        ["eval", "quality", "{}", "b"],
        ["eval", "tasks", "{}", "b"],
        ["eval", "latency", "{}", "b"],
        ["demo", "--model", "{}"],
        ["convert", "{}", "out"],
        ["generate", "{}", "--prompt", "a"],
        ["chat", "{}"],
        ["export", "{}", "out"],
    ],
    ids=lambda argv: argv[0] + argv[1][:8].strip("-{}"),
)
@pytest.mark.parametrize("path", ["./modles/llama", "modles/llama", "llama"])
def test_a_mistyped_path_was_looked_for_on_the_hub_for_half_a_minute(path, argv, tmp_path):
    """Five retries a file, 27 to 54 s, and an error that named an address of the hub."""
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}  # refuses connections
    done = command(*(word.replace("{}", path) for word in argv), within=2.0, **hub)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and f"is {path!r}" in done.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["plot", "a.png", "no.json"],
        ["generate", "{}", "--file", "no.json"],
        ["generate", "{}", "--file", "empty.jsonl"],
    ],
    ids=" ".join,
)
def test_files_were_looked_for_after_torch_was_imported(argv, tiny_source, tmp_path, monkeypatch):
    """``plot`` took 13 s to miss its file on a busy machine, ``generate`` 9 s."""
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    done = command(*(word.replace("{}", str(tiny_source)) for word in argv), within=2.0)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert ("no.json" if "no.json" in argv else "empty.jsonl has no prompts") in done.stderr


def test_a_hub_id_needs_no_owner(monkeypatch):
    """gpt2 is one. Where the network is, the hub is asked for it once; where the files are in its cache, not at all."""
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **_: asked.append(name))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    assert find_checkpoint("gpt2", "source") == "gpt2" and find_checkpoint("a/b", "source") == "a/b"
    assert asked == ["gpt2", "a/b"]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    assert find_checkpoint("gpt2", "source") == "gpt2" and len(asked) == 2
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="source is 'a b', which is no folder here and no hub id"):
        find_checkpoint("a b", "source")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--preset", "fast"], "preset is 'fast'; expected one of 'auto', 'minimal', "),
        (["--layout", "cubist"], "layout is 'cubist'; expected one of 'per-group', 'shared', 'latent'"),
        (["--calibration.lengths", "512,700"], "calibration.lengths is [512, 700]; expected lengths that divide"),
        (["--latent.ranks", "uneven"], "latent.ranks is 'uneven'; expected 'uniform', 'measured' or a list of ints"),
        (["--dtype", "float8"], "argument --dtype: invalid choice: 'float8' (choose from"),
        (["--resume", "maybe"], "argument --resume: invalid choice: 'maybe' (choose from"),
    ],
)
def test_a_bad_value_was_answered_with_49_lines(flags, sentence, tmp_path):
    """Of every type that a union of them could have had; YAML and Python always said one sentence."""
    done = command("convert", "a", "b", *flags, within=2.0)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and sentence in done.stderr


def test_lists_need_no_brackets():
    """--batch-sizes 1,8 was refused: it had to be [1,8], which some shells take for a pattern."""
    for text in ("1,8", "[1,8]", "1, 8"):
        given = parsers()[""].parse_args(["eval", "latency", "a", "b", "--batch-sizes", text])
        assert given.batch_sizes == [1, 8]
    assert parsers()[""].parse_args(["tune", "--batch", "64"]).batch == [64]
    assert parsed_recipe("--calibration.lengths", "512,1024") == {"calibration.lengths": [512, 1024]}
    assert parsed_recipe("--calibration.lengths", "[512]") == {"calibration.lengths": [512]}
    assert parsed_recipe("--latent.ranks", "8,16") == {"latent.ranks": [8, 16]}


def test_messages_named_python_arguments(tiny_source, tiny_converted, capsys):
    """What to type is --overwrite; overwrite=True is what to write in Python."""
    assert run("convert", tiny_source, tiny_converted, "--device", "cpu") == 2
    error = capsys.readouterr().err
    assert "expected a new folder, or --overwrite" in error and "=True" not in error


def test_debug_may_follow_the_verb():
    with pytest.raises(FileNotFoundError):
        main(["inspect", "/no/such/folder", "--debug"])


def test_unknown_flags_and_values_are_refused(capsys):
    """And told by whom: that verb's help lists what there is."""
    for argv, who in (
        (["convert", "a", "b", "--layot", "shared"], "mha2mla convert"),
        (["frobnicate"], "mha2mla"),
        (["eval", "quality", "a", "b", "--speed", "11"], "mha2mla eval quality"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2 and f"({who} --help lists what there is)" in capsys.readouterr().err


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "mha2mla", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("mha2mla ")
