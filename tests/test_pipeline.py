"""convert(), end to end on tiny checkpoints: exactness, refusals, crashes, what is written and what is reported."""

import hashlib
import itertools
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import mha2mla
from mha2mla.conversion.families import UnsupportedSourceError
from mha2mla.conversion.latent.rules import LOW_RANKS
from mha2mla.conversion.recipe import selections
from mha2mla.conversion.result.writer import DestinationError
from mha2mla.conversion.source.checkpoint import CheckpointError
from mha2mla.conversion.source.files import SourceChangedError
from mha2mla.conversion.target import LAYOUTS
from mha2mla.pipeline import ParityError, prepare, run, verify, write
from mha2mla.texts import load_text, token_windows
from tests.conversion import tiny
from tests.conversion.tiny import SHORT
from tests.few import few


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("source") / "tiny")


def convert(source, destination, recipe=None, **keys):
    keys = {"evaluation_tokens": 256, "device": "cpu", "progress": False, **keys}
    return mha2mla.convert(source, destination, tiny.Recipe(**SHORT) if recipe is None else recipe, **keys)


def checksums(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def test_full_rank_reproduces_a_bfloat16_source_with_biases(tmp_path):
    """The value bias moves into o_proj: rounded to bfloat16 there, it alone would break parity."""
    tiny.model("qwen2").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    tiny.tokenizer().save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", tiny.Recipe(cache_ratio=1.0, **SHORT))
    tokens = tiny.some_tokens()
    assert relative(tiny.logits(tmp_path / "out", tokens), tiny.logits(tmp_path / "source", tokens)) <= 1e-4
    assert report.weights_dtype == "bfloat16"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    narrow = {name for name, dtype in dtypes.items() if dtype == "F32"}
    assert narrow == {f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ("inv_freq", "o_proj.bias")}


LOW_RANK_NAMES = tuple(LOW_RANKS)
RULES = [(layout, selection) for layout in LAYOUTS for selection in selections(layout)]
# Each selection once, by the low-rank rules in turn; then all of them.
RECIPES = [(*rule, LOW_RANK_NAMES[i % len(LOW_RANKS)]) for i, rule in enumerate(RULES)]
RECIPES += [(*rule, low_rank) for rule in RULES for low_rank in LOW_RANKS if (*rule, low_rank) not in RECIPES]


@few("layout, selection, low_rank", RECIPES, count=len(RULES))
def test_every_recipe_runs_and_reloads_as_measured(layout, selection, low_rank, source, tmp_path):
    recipe = tiny.Recipe(layout=layout, rope_selection=selection, latent_rule=low_rank, **SHORT)
    held_out = tiny.some_tokens(2, 32)
    report = convert(source, tmp_path / "out", recipe, evaluation=held_out)
    expected = tiny.logits(source, held_out)[:, :-1]
    actual = tiny.logits(tmp_path / "out", held_out)[:, :-1]
    assert relative(actual, expected) == pytest.approx(report.parity.logits_relative_error, rel=1e-3)
    loss = torch.nn.functional.cross_entropy(actual.flatten(0, 1), held_out[:, 1:].flatten())
    assert report.parity.perplexity_converted == pytest.approx(float(loss.exp()), rel=1e-3)
    assert report.cache_ratio <= 0.5


@pytest.mark.parametrize(
    ("arguments", "preset", "says"),
    [
        ({}, "quick", "quick, chosen by auto: minutes without a GPU"),
        ({"recipe": {"cache_ratio": 0.25}, "preset": "quick"}, "quick", "quick, as asked for; with cache_ratio=0.25"),
        (
            {"recipe": {"preset": "minimal", "layout": "per-group"}},
            "minimal",
            "minimal, as asked for; with layout='per-",
        ),
    ],
)
def test_convert_takes_the_preset_that_it_is_told_or_chooses_and_says_so(arguments, preset, says, source, tmp_path):
    arguments = {"recipe": None, "calibration": tiny.some_tokens(64, 32), "evaluation_tokens": 64, **arguments}
    report = mha2mla.convert(source, tmp_path / "out", **arguments, device="cpu", progress=False)
    given = {**(arguments["recipe"] or {}), "preset": preset}
    assert report.recipe == mha2mla.Recipe.from_dict(given).to_dict()
    assert report.preset.startswith(says) and report.preset in str(report)
    assert f"Preset: {report.preset}." in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["preset"] == report.preset


def test_a_conversion_over_lengths_is_verified_at_both_ends(source, tmp_path):
    recipe = tiny.Recipe(preset="minimal", calibration_tokens=2048, calibration_lengths=[32, 128])
    report = mha2mla.convert(source, tmp_path / "out", recipe, evaluation_tokens=64, device="cpu", progress=False)
    assert report.calibration_tokens == 2048 and report.calibrated_length == 128
    assert (report.evaluation_text, report.evaluation_length) == ("builtin:prose", 32)
    assert (report.long_evaluation_text, report.long_evaluation_length) == ("builtin:stdlib", 128)
    assert report.long_parity.tokens == 127 and report.long_parity.kl > 0 and not report.long_parity.layers
    text = load_text("builtin:stdlib")
    window = token_windows(tiny.loaded_tokenizer(source), text, 128, 1)
    p, q = (tiny.logits(folder, window)[:, :-1].double().log_softmax(-1) for folder in (source, tmp_path / "out"))
    assert report.long_parity.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert f"{report.long_parity.perplexity_ratio:.4f} x in one of 128" in str(report)
    assert "In a window of 128 tokens of `builtin:stdlib`" in (tmp_path / "out" / "README.md").read_text()
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["long_parity"]["kl"] == report.long_parity.kl


def test_an_evaluation_text_too_short_for_the_long_window_is_said_and_no_refusal(source, tmp_path, capsys):
    (tmp_path / "text").write_text("Some ninety tokens, each of which is a letter. " * 2)
    recipe = tiny.Recipe(preset="minimal", calibration_tokens=2048, calibration_lengths=[32, 128])
    report = mha2mla.convert(
        source, tmp_path / "out", recipe, evaluation=str(tmp_path / "text"), evaluation_tokens=64, device="cpu"
    )
    assert report.parity.tokens == 62 and report.long_parity is None
    said = capsys.readouterr().err
    assert said.count("not compared with the source in a window of 128 tokens") == 1
    assert "In a window of" not in (tmp_path / "out" / "README.md").read_text()


def test_the_report_measures_what_the_models_say(source, tmp_path):
    held_out = tiny.some_tokens(3, 50)
    report = convert(source, tmp_path / "out", evaluation=held_out)
    p, q = (tiny.logits(folder, held_out)[:, :-1].double().log_softmax(-1) for folder in (source, tmp_path / "out"))
    parity = report.parity
    assert parity.tokens == 147
    assert parity.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert parity.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    nll = -p.gather(-1, held_out[:, 1:, None]).mean()
    assert parity.perplexity_source == pytest.approx(float(nll.exp()), rel=1e-3)
    assert len(parity.layers) == 2 and 0 < parity.layers[0].hidden_error <= 1.5
    assert report.peak_rss_bytes > 50 << 20 and set(report.seconds) == {
        "prepare",
        "convert",
        "write",
        "verify",
        "total",
    }
    assert json.loads(json.dumps(report.to_dict()))["cache_ratio"] == report.cache_ratio
    assert "peak memory" in str(report)


def test_the_folder_is_a_whole_checkpoint(tmp_path):
    """Names equal the model's, companions are there, the card says what was measured."""
    source = tiny.checkpoint(tmp_path / "source", tie_word_embeddings=True, shard_bytes=20_000)
    (source / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    (source / "LICENSE").write_text("terms")
    report = convert(source, tmp_path / "out", max_shard_bytes=30_000)
    out = tmp_path / "out"
    names = set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    assert names == set(model.state_dict()) - {"lm_head.weight"}
    assert model.config.model_type == "mha2mla"
    assert model.config.source_config["model_type"] == "llama"
    assert mha2mla.Recipe.from_dict(model.config.recipe).target.cache_ratio == 0.5
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.5
    assert (out / "LICENSE").read_text() == "terms"
    assert tiny.loaded_tokenizer(out)("abc").input_ids == tiny.loaded_tokenizer(source)("abc").input_ids
    card = (out / "README.md").read_text()
    for text in ("import mha2mla", f"{report.parity.perplexity_converted:.4f}", "selection: rotation", "`llama`"):
        assert text in card
    for layer in report.parity.layers:
        assert f"| {layer.layer} | {layer.score_error:.3g} | {layer.output_error:.3g} |" in card
    assert not [path.name for path in out.iterdir() if path.name.startswith(("shard-", "activations-"))]


def test_the_record_is_machine_readable(source, tmp_path):
    report = convert(source, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["kind"] == "conversion" and record["recipe"] == report.recipe
    assert record["parity"]["perplexity_converted"] == report.parity.perplexity_converted
    assert record["environment"]["torch"] and record["device"] == "cpu"
    rows = record["rows"]
    assert [row["layer"] for row in rows] == [0, 1] and all(row["seconds"] > 0 for row in rows)
    assert [row["score_error"] for row in rows] == [layer.score_error for layer in report.parity.layers]
    assert mha2mla.Recipe.from_dict(record["recipe"]).calibration.tokens == 512


def test_the_card_shows_the_loss_by_layer(source, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    convert(source, tmp_path / "one")
    picture = tmp_path / "one" / "loss_per_layer.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and 1000 < picture.stat().st_size < 100_000
    assert f"]({picture.name})" in (tmp_path / "one" / "README.md").read_text()

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what import finds where it is not installed
    convert(source, tmp_path / "two", progress=True)
    assert "pip install 'mha2mla[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "two" / picture.name).exists()
    assert picture.name not in (tmp_path / "two" / "README.md").read_text()


def test_the_source_is_not_touched(source, tmp_path):
    """Writing to a tensor that maps the source would zero it."""
    before = checksums(source)
    os.chmod(source / "model.safetensors", 0o400)
    convert(source, tmp_path / "out")
    assert checksums(source) == before


def test_the_same_recipe_gives_the_same_weights_however_memory_is_cut(source, tmp_path):
    convert(source, tmp_path / "one")
    convert(source, tmp_path / "two", spill_bytes=0, max_shard_bytes=10_000)
    one = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())["weight_map"]
    two = {}
    for shard in set(index.values()):
        two |= load_file(tmp_path / "two" / shard)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_another_seed_gives_other_weights(source, tmp_path):
    convert(source, tmp_path / "one")
    convert(source, tmp_path / "two", tiny.Recipe(calibration_seed=1, **SHORT))
    assert checksums(tmp_path / "one")["model.safetensors"] != checksums(tmp_path / "two")["model.safetensors"]


def test_the_written_dtype_can_be_chosen(source, tmp_path):
    recipe = tiny.Recipe(cache_ratio=1.0, **SHORT)
    report = convert(source, tmp_path / "out", recipe, dtype=torch.bfloat16)
    assert report.weights_dtype == "bfloat16" and 1e-4 < report.parity.logits_relative_error < 0.06
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float64])
def test_layers_can_run_in_another_dtype(compute_dtype, source, tmp_path):
    usual = convert(source, tmp_path / "usual")
    report = convert(source, tmp_path / "out", compute_dtype=compute_dtype)
    assert report.weights_dtype == "float32"
    close = 0.2 if compute_dtype is torch.bfloat16 else 1e-3
    assert report.parity.perplexity_source == pytest.approx(usual.parity.perplexity_source, rel=close)
    assert report.parity.perplexity_converted == pytest.approx(usual.parity.perplexity_converted, rel=close)


def test_old_rotary_buffers_in_a_source_are_passed_over(tmp_path):
    source = tiny.checkpoint(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", tiny.Recipe(cache_ratio=1.0, **SHORT))


def edit_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damage_config(folder):
    (folder / "config.json").write_text("{")


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def put_nan(tensors):
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = float("nan")


def put_inf_in_mlp(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")


def shard(folder):
    tiny.model().save_pretrained(folder, max_shard_size=60_000)
    (folder / "model.safetensors").unlink()
    return folder


def missing_shard(folder):
    next(shard(folder).glob("model-00002-of-*.safetensors")).unlink()


def index_naming_an_absent_tensor(folder):
    path = shard(folder) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))


DAMAGES = {
    "unknown family": (
        lambda f: edit_config(f, model_type="gpt2"),
        UnsupportedSourceError,
        "'gpt2' cannot be converted",
    ),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "awq"}),
        UnsupportedSourceError,
        "quantised",
    ),
    "dynamic ntk": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        UnsupportedSourceError,
        "dynamic NTK",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), CheckpointError, "has no config.json"),
    "broken config": (damage_config, CheckpointError, "is not JSON"),
    "truncated shard": (truncate, CheckpointError, "truncated or damaged"),
    "missing tensor": (
        lambda f: edit_weights(f, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight")),
        CheckpointError,
        "model.layers.1.self_attn.k_proj.weight is absent",
    ),
    "unknown tensor": (
        lambda f: edit_weights(f, lambda t: t.update({"model.layers.0.self_attn.sinks": torch.ones(4)})),
        UnsupportedSourceError,
        "self_attn.sinks",
    ),
    "other shape": (
        lambda f: edit_config(f, num_key_value_heads=4),
        CheckpointError,
        r"k_proj.weight has shape \(32, 48\); the config says \(64, 48\)",
    ),
    "NaN in attention": (
        lambda f: edit_weights(f, put_nan),
        CheckpointError,
        "layers.1.self_attn.v_proj.weight in model.safetensors has 1 NaN",
    ),
    "Inf in an MLP": (
        lambda f: edit_weights(f, put_inf_in_mlp),
        CheckpointError,
        "up_proj.weight in model.safetensors has 1",
    ),
    "NaN in the head": (
        lambda f: edit_weights(f, lambda t: t["lm_head.weight"][7].fill_(float("nan"))),
        CheckpointError,
        "lm_head.weight in model.safetensors has 48 NaN",
    ),
    "missing shard": (missing_shard, CheckpointError, "model-00002-of-.*safetensors is missing"),
    "index naming an absent tensor": (
        index_naming_an_absent_tensor,
        CheckpointError,
        "says that model.layers.9.mlp.up_proj.weight is in .* which does not hold it",
    ),
    "no tokenizer": (
        lambda f: [(f / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        CheckpointError,
        "no usable tokenizer",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_source_is_named_and_leaves_nothing(damage, tmp_path):
    source = tiny.checkpoint(tmp_path / "source")
    change, error, named = DAMAGES[damage]
    change(source)
    with pytest.raises(error, match=named):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("keys", "error", "named"),
    [
        ({"calibration": "builtin:novel"}, ValueError, "calibration 'builtin:novel'"),
        ({"calibration": "EMPTY"}, ValueError, "is empty"),
        ({"calibration": "SHORT"}, ValueError, "at least one window"),
        ({"calibration": "LATIN"}, ValueError, "is not UTF-8"),
        ({"calibration": torch.zeros(3, dtype=torch.int64)}, ValueError, "calibration is torch.int64"),
        (
            {"calibration": torch.full((1, 8), 999)},
            ValueError,
            "token 999; expected tokens from 0, below vocab_size=264",
        ),
        ({"recipe": "TEXT LATIN"}, ValueError, "calibration .*LATIN.* is not UTF-8"),
        ({"recipe": "TEXT absent"}, ValueError, "calibration .*absent' is no file"),
        ({"evaluation": "EMPTY"}, ValueError, "is empty"),
        ({"evaluation": "SHORT"}, ValueError, "evaluation .*at least one window"),
        ({"evaluation": "LATIN"}, ValueError, "evaluation .*is not UTF-8"),
        ({"device": "cuda:77"}, ValueError, "device is 'cuda:77'"),
        ({"device": "gpu"}, ValueError, "device is 'gpu'"),
        ({"device": "meta"}, ValueError, "device is 'meta'"),
        ({"device": [0]}, ValueError, r"device is '\[0\]'"),
        ({"dtype": torch.int8}, ValueError, "dtype is torch.int8"),
        ({"recipe": ["layout"]}, ValueError, "recipe is a list; expected a Recipe or a mapping of its keys"),
        ({"recipe": {"layot": "shared"}}, ValueError, "recipe key 'layot' is unknown"),
        ({"recipe": {"preset": "quick"}, "preset": "shared"}, ValueError, "preset is 'shared' beside a recipe of pres"),
        ({"recipe": {}, "preset": "best"}, ValueError, "preset is 'best'; expected one of 'auto'"),
        ({"dtype": "bfloat16"}, ValueError, "dtype is 'bfloat16'"),
        ({"compute_dtype": torch.float8_e4m3fn}, ValueError, "compute_dtype is torch.float8_e4m3fn"),
        ({"evaluation_tokens": 0}, ValueError, "evaluation_tokens is 0"),
        ({"evaluation_tokens": "256"}, ValueError, "evaluation_tokens is '256'"),
        ({"evaluation": None}, ValueError, "evaluation is None"),
        ({"evaluation": [[1, 2]]}, ValueError, "evaluation is"),
        ({"evaluation": torch.zeros(2, 1, dtype=torch.int64)}, ValueError, "evaluation is torch.int64"),
        ({"calibration": 5}, ValueError, "calibration is 5"),
        ({"calibration": torch.full((1, 8), -1)}, ValueError, "calibration has token -1"),
        ({"spill_bytes": "1G"}, ValueError, "spill_bytes is '1G'"),
        ({"spill_bytes": -1}, ValueError, "spill_bytes is -1"),
        ({"max_shard_bytes": None}, ValueError, "max_shard_bytes is None"),
        ({"overwrite": "no"}, ValueError, "overwrite is 'no'"),
        ({"progress": 1}, ValueError, "progress is 1"),
        ({"recipe": "TOO WIDE"}, ValueError, "qk_rope_head_dim is 18"),
    ],
)
def test_a_bad_argument_is_named_before_work(keys, error, named, source, tmp_path):
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "SHORT").write_text("short")
    (tmp_path / "LATIN").write_bytes("Grüße".encode("latin-1"))
    texts = sorted(path.name for path in tmp_path.iterdir())
    keys = {key: str(tmp_path / value) if value in texts else value for key, value in keys.items()}
    if keys.get("recipe") == "TOO WIDE":
        keys["recipe"] = tiny.Recipe(layout="per-group", qk_rope_head_dim=18, kv_lora_rank=8)
    elif str(keys.get("recipe")).startswith("TEXT "):
        name = keys["recipe"].removeprefix("TEXT ")
        keys["recipe"] = tiny.Recipe(**{**SHORT, "calibration.text": str(tmp_path / name)})
    with pytest.raises(error, match=named):
        convert(source, tmp_path / "out", **keys)
    assert sorted(path.name for path in tmp_path.iterdir()) == texts


@pytest.mark.parametrize("keys", [{"layout": "shared", "rope_share": 0.5}, {"layout": "latent"}])
def test_a_head_of_zeros_is_converted(keys, tmp_path):
    """Pruned heads are; where every other pair rotates, all that is left for the latent's keys is zero."""
    source = tiny.checkpoint(tmp_path / "source")
    edit_weights(source, lambda tensors: tensors["model.layers.1.self_attn.k_proj.weight"][:16].zero_())
    convert(source, tmp_path / "out", tiny.Recipe(**keys, cache_ratio=0.5, **SHORT))


@pytest.mark.parametrize("name", [None, 5, b"x"])
def test_a_path_that_is_none_is_named(name, source, tmp_path):
    with pytest.raises(ValueError, match="source is"):
        convert(name, tmp_path / "out")
    with pytest.raises(ValueError, match="destination is"):
        convert(source, name)


def replace_weights(folder):
    tiny.model(seed=9).save_pretrained(folder / "new")
    os.replace(folder / "new" / "model.safetensors", folder / "model.safetensors")


def cut_weights(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 4096)


def flip_a_bit_in_place(folder):
    path = folder / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-4, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_the_tokenizer(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 17}))


STAGES = ((run, "convert_layers"), (run, "write_weights"), (verify, "compare"), (run, "write_report"))
CHANGES = (replace_weights, cut_weights, flip_a_bit_in_place, change_the_tokenizer)
TIMES = [(replace_weights, (prepare, "choose_layer_ranks")), *zip(CHANGES, STAGES, strict=True)]
TIMES += [pair for pair in itertools.product(CHANGES, STAGES) if pair not in TIMES]


@few("change, when", TIMES, count=1 + len(CHANGES))
def test_a_source_that_changes_during_the_run_is_never_published(change, when, tmp_path, monkeypatch):
    """Half of the layers from one model and half from another: KL 16 and no error."""
    source = tiny.checkpoint(tmp_path / "source")
    stage, name = when
    usual = getattr(stage, name)

    def changed(*arguments, **keys):
        change(source)
        return usual(*arguments, **keys)

    monkeypatch.setattr(stage, name, changed)
    recipe = tiny.Recipe(latent_ranks="measured", **SHORT) if name == "choose_layer_ranks" else None
    with pytest.raises(SourceChangedError, match="changed during the conversion"):
        convert(source, tmp_path / "out", recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


KEPT = [".out.mha2mla-tmp", ".out.mha2mla-tmp/work"]  # finished layers are of use to another run, nothing else is


def left(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir())


def test_predictions_worse_than_a_guess_are_an_error_and_not_a_number(source, tmp_path, monkeypatch):
    from mha2mla.conversion import layer_walk

    right = layer_walk.finish_layer

    def wrong(*arguments):
        return {name: tensor * 1e3 if name == "o_proj.weight" else tensor for name, tensor in right(*arguments).items()}

    monkeypatch.setattr(layer_walk, "finish_layer", wrong)
    with pytest.raises(ParityError, match=r"nats a token from the source's \(KL\); expected at most 5.58"):
        convert(source, tmp_path / "out")
    assert left(tmp_path) == KEPT


def test_a_checkpoint_of_other_names_than_the_models_is_never_published(source, tmp_path, monkeypatch):
    class OneMore(write.ShardedWriter):
        def finish(self):
            self.add("model.layers.0.self_attn.extra", torch.ones(1))
            super().finish()

    class OneLess(write.ShardedWriter):
        def add(self, name, tensor):
            if name != "model.norm.weight":
                super().add(name, tensor)

    for writer, named in ((OneMore, "self_attn.extra"), (OneLess, "model.norm.weight")):
        monkeypatch.setattr(write, "ShardedWriter", writer)
        with pytest.raises(CheckpointError, match=f"written tensors are not the model's: .*{named}"):
            convert(source, tmp_path / writer.__name__)
        assert not (tmp_path / writer.__name__).exists()


def test_a_source_that_is_no_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="absent'; expected an existing checkpoint folder"):
        convert(tmp_path / "absent", tmp_path / "out")


def test_a_bad_destination_is_refused_before_work(source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").write_text("x")
    with pytest.raises(DestinationError, match="exists"):
        convert(source, tmp_path / "there")
    assert (tmp_path / "there" / "precious").read_text() == "x"
    with pytest.raises(DestinationError, match="overlap"):
        convert(source, source, overwrite=True)
    with pytest.raises(DestinationError, match="cannot be written"):
        convert(source, "/proc/mha2mla-cannot-exist/out")


def test_a_tilde_is_the_home_folder(source, monkeypatch):
    """A folder named "~" was made in the current one, and ``load`` did not find it by the name that was printed."""
    monkeypatch.setenv("HOME", str(source.parent))
    with pytest.raises(DestinationError, match=f"destination '{source}' and source '{source}' overlap"):
        convert(source, f"~/{source.name}")
    with pytest.raises(DestinationError, match="overlap"):
        convert(f"~/{source.name}", source)


def test_overwriting_replaces_a_converted_checkpoint_as_a_whole_and_nothing_else(source, tmp_path, monkeypatch):
    """A mistyped destination must not cost anybody a folder."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    for change in (None, lambda f: (f / "config.json").write_text("{}"), lambda f: tiny.checkpoint(f / "model")):
        if change is not None:
            change(precious)
        with pytest.raises(DestinationError, match="neither empty nor a converted checkpoint"):
            convert(source, precious, overwrite=True)
    monkeypatch.chdir(precious)
    for name in ("", ".", "..", str(tmp_path), "../precious", "../.."):
        with pytest.raises(DestinationError, match="is the current folder, or holds it"):
            convert(source, name, overwrite=True)
    assert (precious / "thesis.tex").read_text() == "x"

    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "stale").write_text("x")
    convert(source, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "stale").exists() and (tmp_path / "out" / "config.json").exists()


def test_a_full_rank_conversion_that_is_not_exact_is_thrown_away(source, tmp_path, monkeypatch):
    """Loads, but talks nonsense."""
    from mha2mla.conversion import layer_walk

    right = layer_walk.finish_layer

    def wrong(*arguments):
        tensors = right(*arguments)
        return {**tensors, "inv_freq": tensors["inv_freq"].flip(-1)}

    monkeypatch.setattr(layer_walk, "finish_layer", wrong)
    with pytest.raises(ParityError, match="differ from the source's"):
        convert(source, tmp_path / "out", tiny.Recipe(cache_ratio=1.0, **SHORT))
    assert left(tmp_path) == KEPT


def test_a_full_rank_conversion_whose_error_is_nan_is_thrown_away(source, tmp_path, monkeypatch):
    measure = verify.compare
    monkeypatch.setattr(
        verify, "compare", lambda *args, **keys: replace(measure(*args, **keys), logits_relative_error=math.nan)
    )
    with pytest.raises(ParityError, match="differ from the source's by nan"):
        convert(source, tmp_path / "out", tiny.Recipe(cache_ratio=1.0, **SHORT))
    assert left(tmp_path) == KEPT


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_converts_as_a_cpu_does(layout, source, tmp_path):
    for ratio in (1.0, 0.5):
        recipe = tiny.Recipe(layout=layout, cache_ratio=ratio, **SHORT)
        on_cpu = convert(source, tmp_path / f"cpu-{ratio}", recipe)
        on_gpu = convert(source, tmp_path / f"gpu-{ratio}", recipe, device="cuda")
        assert on_gpu.device == "cuda"
        # The loss, not its exponential: a random model has 21 nats a token, and e^21 turns rounding into percents.
        losses = [math.log(report.parity.perplexity_converted) for report in (on_gpu, on_cpu)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert convert(source, tmp_path / "default", recipe, device=None).device == "cuda"


def test_a_geometry_that_no_kernel_serves_is_said_at_conversion_in_the_card_and_by_inspect(source, tmp_path):
    from mha2mla.eval.inspection import inspect_checkpoint

    reason = "qk_rope_head_dim is 4; TileLang kernels take multiples of 8 up to 128 for num_rope_heads=2"
    recipe = tiny.Recipe(layout="per-group", kv_lora_rank=24, qk_rope_head_dim=4, **SHORT)
    with pytest.warns(UserWarning, match="no kernel will serve 2 of 2 converted layers on a GPU") as caught:
        report = convert(source, tmp_path / "out", recipe)
    assert reason in str(caught[0].message)
    assert report.decode_backend.startswith("on CUDA expanded, sdpa; batches: refused (") and reason in str(report)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "expanded, sdpa; batches: refused" in card and reason in card
    rows = inspect_checkpoint(tmp_path / "out").geometries
    assert [row["decode_on_cuda"] for row in rows] == ["expanded, sdpa; batches: refused"]
    assert reason in rows[0]["no_kernel_because"]


def test_a_geometry_too_wide_is_told_the_ratio_that_a_kernel_serves():
    """Llama-2-7B at half its cache: at the ratio named a latent in proportion is within the limit, above it is not."""
    from mha2mla.modeling import what_serves
    from mha2mla.pipeline.report import served_cache_ratio, warn_of_slow_layers
    from tests.modeling import models

    source = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}

    def layers(kv_lora_rank, d_r):
        geometry = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": d_r, "qk_nope_head_dim": 128 - d_r}
        keys = {"num_rope_heads": 32, "v_head_dim": 128, **geometry}
        return what_serves(
            models.mla_config(source_config=models.source_config("llama", **source).to_dict(), **keys), "cuda"
        )

    assert served_cache_ratio(layers(3456, 20)) is None, "20 is no multiple of 8, whatever the latent is"
    assert all(layer.compiled for layer in layers(1024, 24))
    ratio = served_cache_ratio(layers(3328, 24))
    assert 3328 * ratio <= 1024 * 0.5 < 3328 * (ratio + 0.01)
    with pytest.warns(UserWarning, match=f"a cache_ratio up to {ratio:.2f} would give a geometry that one serves"):
        warn_of_slow_layers(layers(3328, 24))


def test_a_geometry_that_a_kernel_serves_is_converted_without_a_warning(source, tmp_path, recwarn):
    from mha2mla.eval.inspection import inspect_checkpoint

    recipe = tiny.Recipe(layout="per-group", kv_lora_rank=24, qk_rope_head_dim=8, **SHORT)
    report = convert(source, tmp_path / "out", recipe)
    assert not [warning for warning in recwarn if "kernel" in str(warning.message)]
    assert report.decode_backend == "on CUDA absorbed, mla_paged; batches: mla_paged"
    row = inspect_checkpoint(tmp_path / "out").geometries[0]
    assert row["decode_on_cuda"] == "absorbed, mla_paged; batches: mla_paged" and row["no_kernel_because"] is None
