"""Exports: the same logits in stock classes and in a folder of remote code, and everything that is refused."""

import hashlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from mha2mla.checkpoints import CheckpointError
from mha2mla.conversion.destination import ResumeError
from mha2mla.eval.inspection import verify_weights
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.serving.deepseek import latent_width, place_frequencies
from mha2mla.serving.export import export
from tests.conversion import tiny
from tests.folders import edit_weights, interrupted_layer
from tests.modeling.models import GEOMETRIES, mla_config, mla_model, randomise, relative_error, source_config, tokens

FREQUENCIES = "model.layers.0.self_attn.inv_freq"
BIAS_FREE = {"attention_q_bias": False, "attention_kv_bias": False, "attention_o_bias": False}
SHARED = {"num_rope_heads": 1, "kv_lora_rank": 24, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8}


def table(layers, pairs, head_dim=8, theta=10000.0):
    frequency = theta ** (-torch.arange(head_dim // 2) * 2.0 / head_dim)
    return [frequency[list(pairs(layer))][None] for layer in range(layers)]


def shared_model(pairs=lambda layer: (0, 1, 3) if layer else (2, 0, 1), **keys):
    source = source_config("mistral", head_dim=8)
    config = mla_config("per-group", **{**SHARED, **BIAS_FREE, "source_config": source.to_dict(), **keys})
    model = randomise(MHA2MLAForCausalLM(config).eval())
    for layer, frequency in zip(model.model.layers, table(2, pairs), strict=True):
        layer.self_attn.inv_freq.copy_(frequency)
    return model


@torch.no_grad()
@pytest.mark.parametrize(("maps", "rank"), [(2, 24), (6, [24, 16])])  # padded to the largest
def test_deepseeks_classes_give_the_same_logits(tmp_path, maps, rank):
    torch.manual_seed(0)
    model = shared_model(num_up_projection_heads=maps, kv_lora_rank=rank)
    model.save_pretrained(tmp_path / "mla")
    export(tmp_path / "mla", tmp_path / "deepseek", "deepseek-v3")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "deepseek").eval()
    assert isinstance(theirs, DeepseekV3ForCausalLM)
    assert theirs.config.qk_rope_head_dim == 8
    assert theirs.config.kv_lora_rank == latent_width(model.config, "transformers") == 32
    ids = tokens(2, 40)
    expected = model(ids).logits
    latents = max(float(layer.self_attn.kv_a_proj.weight.norm()) for layer in model.model.layers)
    # |c|² / 2C², of latents of normed rows; far above float32's own rounding of C beside c.
    bound = max((latents * 48**0.5) ** 2 / (2 * 4096**2), 1e-4)
    assert relative_error(theirs(ids).logits, expected) < bound
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert theirs.generate(ids[:1], **options).tolist() == model.generate(ids[:1], **options).tolist()


def test_export_names_the_bias_engines_would_drop(tmp_path):
    shared_model().save_pretrained(tmp_path / "mla")
    export(tmp_path / "mla", tmp_path / "deepseek", "deepseek-v3")
    _, report = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "deepseek", output_loading_info=True)
    assert list(report["unexpected_keys"]) == ["model.kv_a_proj_with_mqa_needs_its_bias"]
    assert not report["missing_keys"] and not report["mismatched_keys"]


@pytest.mark.parametrize(
    ("case", "keys", "reason"),
    [
        ("latent", {}, "the layout is 'latent'"),
        ("per-group", BIAS_FREE, r"num_rope_heads is \[2\]"),
        ("shared", {}, "queries have a bias"),
        ("shared", {"attention_q_bias": False}, "keys and values have a bias"),
        ("shared", {**BIAS_FREE, "attention_o_bias": True}, "o_proj has a bias"),
        ("per layer", {}, "layers differ in more than their rank"),
        ("per-head", {}, "normalised before RoPE"),
        ("sliding", {**SHARED, **BIAS_FREE}, r"sliding window \(\[9\]\)"),
        ("shared", {**BIAS_FREE, "rope_attention_scaling": 1.3}, "scaled by"),
        ("shared", {**BIAS_FREE, "qk_nope_head_dim": 0}, "every pair rotates"),
        ("shared", {**BIAS_FREE, "attention_window": 8}, "attention_window is 8"),
    ],
)
def test_what_deepseek_cannot_hold_is_refused_by_name(tmp_path, case, keys, reason):
    assert case in GEOMETRIES
    mla_model(case, **keys).save_pretrained(tmp_path / "mla")
    with pytest.raises(ValueError, match=reason):
        export(tmp_path / "mla", tmp_path / "out", "deepseek-v3")
    assert not (tmp_path / "out").exists()


def test_frequencies_in_no_table_are_refused():
    def placed(*tables):
        return place_frequencies(tables, 10000.0, 8, "transformers")

    found = placed(*table(2, lambda layer: (0, 2) if layer else (2, 1)))
    assert (found.width, found.places) == (8, ((2, 1), (0, 2)))
    assert placed(*table(1, lambda layer: (0, 2))).width == 4  # theirs, of 4 dims
    with pytest.raises(ValueError, match="layer 1 has frequency 0.1 more than once"):
        placed(*table(2, lambda layer: (1, 1) if layer else (0, 1)))
    with pytest.raises(ValueError, match="does not rotate"):
        placed(torch.tensor([[0.0, 1.0]]))
    with pytest.raises(ValueError, match="in no table of theta=10000 up to 8"):
        placed(table(1, lambda layer: (0, 1))[0] / torch.tensor([1.0, 8.0]))


def test_formats_and_destinations_are_refused_by_name(tmp_path):
    mla_model("shared").save_pretrained(tmp_path / "mla")
    with pytest.raises(ValueError, match="format is 'gguf'; expected one of"):
        export(tmp_path / "mla", tmp_path / "out", "gguf")
    with pytest.raises(ValueError, match="engine is 'tgi'; expected one of"):
        export(tmp_path / "mla", tmp_path / "out", "deepseek-v3", "tgi")
    with pytest.raises(ValueError, match="engine is 'vllm' with format 'remote-code'"):
        export(tmp_path / "mla", tmp_path / "out", "remote-code", "vllm")
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="exists; expected a new folder$"):  # export has no overwrite
        export(tmp_path / "mla", tmp_path / "there", "remote-code")


def test_layers_of_an_interrupted_convert_are_kept(tmp_path):
    mla_model("shared").save_pretrained(tmp_path / "mla")
    layer = interrupted_layer(tmp_path / "out")
    with pytest.raises(ResumeError, match=r"holds 1 files such as layer-00000\.safetensors.*resume='never'"):
        export(tmp_path / "mla", tmp_path / "out", "remote-code")
    assert layer.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("format", "engine"), [("remote-code", None), ("deepseek-v3", None), ("deepseek-v3", "sglang")]
)
def test_an_export_has_card_and_record(format, engine, tmp_path):
    """The record has the digests of the files that are there."""
    tiny.checkpoint(tmp_path / "source")
    keys = {"layout": "shared", "cache_ratio": 0.5, "latent.centered": False, "rope.selection": "uniform"}
    tiny.convert(tmp_path / "source", tmp_path / "mla", {**tiny.SHORT, **keys})
    folder = export(tmp_path / "mla", tmp_path / "out", format, engine)
    record, card = json.loads((folder / "conversion.json").read_text()), (folder / "README.md").read_text()
    assert record["exported_as"] == format and card.startswith((tmp_path / "mla" / "README.md").read_text())
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in record["weights_sha256"]}
    assert record["weights_sha256"] == digests and set(digests) == {p.name for p in folder.glob("*.safetensors")}
    if format == "remote-code":
        assert verify_weights(folder) == verify_weights(tmp_path / "mla")
    else:
        assert record["code_sha256"] == {} and "DeepseekV3ForCausalLM" in card
        assert record["exported_for"] == (engine or "transformers")
        assert ("float16" in card and "do not quantise" in card) == (engine == "sglang")


@pytest.mark.parametrize("format", ["remote-code", "deepseek-v3"])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.norm.weight", lambda weight: weight * torch.nan, r"model\.norm\.weight .* NaN"),
        ("model.norm.weight", ..., r"model\.norm\.weight is absent"),
        (FREQUENCIES, torch.neg, r"inv_freq has a frequency of -"),
    ],
)
def test_a_damaged_checkpoint_is_not_exported(format, name, change, message, tmp_path):
    shared_model().save_pretrained(tmp_path / "mla")
    edit_weights(tmp_path / "mla", {name: change})
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "mla", tmp_path / "out", format)
    assert not (tmp_path / "out").exists()
