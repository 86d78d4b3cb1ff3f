"""What a conversion leaves and says: a whole checkpoint, its record, its card, and whether a kernel serves it."""

import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mha2mla
from mha2mla.conversion.families import adapter_for
from mha2mla.eval.inspection import inspect_checkpoint
from mha2mla.eval.report import format_value
from mha2mla.pipeline.report import note_on_prompts, note_on_steps
from mha2mla.pipeline.sizing import DEFAULT_GPU, GPUS, footprint
from mha2mla.trial_models import converted_config, source_config
from tests.conversion import tiny
from tests.conversion.tiny import SHORT, convert
from tests.folders import edit_weights, read_json


def test_the_folder_is_a_whole_checkpoint(tmp_path):
    """Names equal the model's, companions are there, the card says what was measured."""
    source = tiny.checkpoint(tmp_path / "source", tie_word_embeddings=True, shard_bytes=20_000)
    (source / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    (source / "LICENSE").write_text("terms")
    report = convert(source, tmp_path / "out", max_shard_bytes=30_000)
    out = tmp_path / "out"
    names = set(read_json(out / "model.safetensors.index.json")["weight_map"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    assert names == set(model.state_dict()) - {"lm_head.weight"}
    assert model.config.model_type == "mha2mla"
    assert model.config.source_config["model_type"] == "llama"
    assert mha2mla.Recipe.from_dict(model.config.recipe).target.cache_ratio == 0.5
    assert read_json(out / "generation_config.json")["temperature"] == 0.5
    assert (out / "LICENSE").read_text() == "terms"
    assert tiny.loaded_tokenizer(out)("abc").input_ids == tiny.loaded_tokenizer(source)("abc").input_ids
    card = (out / "README.md").read_text()
    for text in ("import mha2mla", f"{report.parity.perplexity_converted:.4f}", "selection: rotation", "`llama`"):
        assert text in card
    for layer in report.parity.layers:
        errors = map(format_value, (layer.layer, layer.score_error, layer.output_error))
        assert f"| {' | '.join(errors)} |" in card
    assert not [path.name for path in out.iterdir() if path.name.startswith(("shard-", "activations-"))]


@pytest.mark.parametrize("case", ["mistral-sliding", "gemma3", "llama"])
def test_share_of_a_cache_with_sliding_windows_is_said(case, checkpoint_of, tmp_path):
    report = convert(checkpoint_of(case), tmp_path / "out")
    length = 256  # the source's whole context
    held = []
    for folder in (checkpoint_of(case), tmp_path / "out"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            cache = model(tiny.some_tokens(1, length), use_cache=True).past_key_values
        if hasattr(cache, "nbytes"):
            held.append(cache.nbytes * length / cache.capacity)
        else:
            held.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
    said = f"{held[1] / held[0]:.4f} at 256 tokens"
    has_windows = case != "llama"
    for text in (str(report), (tmp_path / "out" / "README.md").read_text()):
        assert (said in text) is has_windows and ("sliding windows" in text) is has_windows
    assert report.cache_ratio == 0.5


@pytest.mark.parametrize("named", [True, False])
def test_tokenizer_keeps_the_class_of_the_source(named, tmp_path):
    """Qwen2Tokenizer splits "12" into digits; the class that tokenizer_config.json names does not."""
    source = tiny.checkpoint(tmp_path / "source", "qwen2")
    tiny.tokenizer(merges=[("1", "2")]).save_pretrained(source)
    if not named:
        (source / "tokenizer_config.json").unlink()
    expected = tiny.loaded_tokenizer(source)
    assert type(expected).__name__ == "Qwen2Tokenizer" and 258 not in expected("12").input_ids
    convert(source, tmp_path / "out")
    made = tiny.loaded_tokenizer(tmp_path / "out")
    assert type(made) is type(expected) and made("it's 12").input_ids == expected("it's 12").input_ids
    assert made.init_kwargs.get("bos_token") == expected.init_kwargs.get("bos_token")


def test_layers_that_were_not_fitted_are_named(source, tmp_path, capsys):
    """Inputs so small that a latent of unit variance needs an encoder beyond float16."""
    spoilt = shutil.copytree(source, tmp_path / "source")
    edit_weights(spoilt, {"model.layers.1.input_layernorm.weight": lambda weight: weight * 1e-7})
    report = convert(spoilt, tmp_path / "out", dtype=torch.float16, progress=True)
    said = "converted by rope.selection high and latent.rule svd-joint, since kv_a_proj.weight was not finite"
    rows = read_json(tmp_path / "out" / "conversion.json")["rows"]
    assert [row["fallback"] for row in rows] == [row["fallback"] for row in report.layers] == ["", said]
    assert f"layer 1: {said}" in capsys.readouterr().err
    assert f"layer 1: {said}" in str(report) and said in report._repr_html_()
    assert "not fitted" not in convert(source, tmp_path / "good").lines()


def test_closing_lines_and_card_say_what_prompts_cost(source, tmp_path):
    """Of keys that are wider than the source's; nothing where they are not."""
    report = convert(source, tmp_path / "out", {**SHORT, "layout": "latent"})
    opened = AutoConfig.from_pretrained(source)
    spec = adapter_for(opened.to_dict()).specify(opened)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    before, after = footprint(opened, None, spec), footprint(config, config.layer_geometry(0), spec)
    ratio = after.prompt_flops(256) / before.prompt_flops(256)
    said = f"{ratio:.2f} x the source's FLOP for one of 256 tokens"
    assert ratio > 1.05 and report.lines()["prompts"] == said
    assert f"Prompts: {said}." in (tmp_path / "out" / "README.md").read_text()
    shared = source_config("llama-3-8b", max_position_embeddings=512)
    other = converted_config(shared, layout="shared", kv_lora_rank=960, qk_rope_head_dim=64)
    spec = adapter_for(shared.to_dict()).specify(shared)
    assert note_on_prompts(shared, other, other.layer_geometry(0), spec) == ""


def test_the_card_shows_the_loss_by_layer(source, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    convert(source, tmp_path / "one", plot=True)
    picture = tmp_path / "one" / "loss_per_layer.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and 1000 < picture.stat().st_size < 100_000
    assert f"]({picture.name})" in (tmp_path / "one" / "README.md").read_text()

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what import finds where it is not installed
    convert(source, tmp_path / "two", plot=True, progress=True)
    assert "pip install -e '.[plots]' in the clone" in capsys.readouterr().err
    assert not (tmp_path / "two" / picture.name).exists()
    assert picture.name not in (tmp_path / "two" / "README.md").read_text()


def test_a_geometry_that_no_kernel_serves_is_said_at_conversion_in_the_card_and_by_inspect(source, tmp_path, recwarn):
    recipe = tiny.Recipe(layout="per-group", kv_lora_rank=24, qk_rope_head_dim=8, **SHORT)
    report, served = convert(source, tmp_path / "served", recipe), "absorbed, mla_paged; batches: mla_paged"
    assert not [warning for warning in recwarn if "kernel" in str(warning.message)]
    row = inspect_checkpoint(tmp_path / "served").geometries[0]
    assert report.decode_backend == f"on CUDA {served}" and row["decode_on_cuda"] == served
    assert row["no_kernel_because"] is None
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
    coded = [replace(layer, geometry=replace(layer.geometry, latent_bits=4)) for layer in layers(3328, 24)]
    bytes_of_limit = 1024 / 3328 * (3328 // 32 * 20 + 2 * 32 * 24) / (2 * 8192)
    assert served_cache_ratio(coded) <= bytes_of_limit < served_cache_ratio(coded) + 0.01
    with pytest.warns(UserWarning, match=f"a cache_ratio up to {ratio:.2f} would give a geometry that one serves"):
        warn_of_slow_layers(layers(3328, 24))


def test_closing_lines_predict_the_step_by_rotary_width():
    source = source_config("qwen2.5-7b")
    spec = adapter_for(source.to_dict()).specify(source)

    def note(layout):
        config = converted_config(source, layout=layout, cache_ratio=0.5)
        return note_on_steps(config, config.layer_geometry(0), spec)

    found = re.fullmatch(
        r"(\S+) ms with d_r 64, (\S+) ms with d_r 128, computed, 16 x 8,192 tokens, .*", note("latent")
    )
    saved = 28 * 16 * 8192 * 2 * 512 * 64 / GPUS[DEFAULT_GPU].product_rate * 1e3
    assert float(found[2]) - float(found[1]) == pytest.approx(saved, abs=0.01)
    assert note("shared") == ""
