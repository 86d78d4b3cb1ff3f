"""``convert`` of a converted checkpoint: exact, streamed, and only what is exact."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mha2mla.checkpoints import CheckpointError
from mha2mla.cli.verbs import main
from mha2mla.conversion.destination import DestinationError, ResumeError
from mha2mla.conversion.families import UnsupportedSourceError
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.source.files import SourceChangedError
from mha2mla.eval.inspection import inspect_checkpoint
from mha2mla.pipeline import relayout
from mha2mla.pipeline.verify import ParityError
from tests.conversion import tiny
from tests.conversion.tiny import SHORT, convert
from tests.few import each
from tests.folders import contents, edit_json, edit_weights, interrupted_layer, read_json

LATENT = {"layout": "latent"}
CASES = ("llama-biases", "qwen3-biases-yarn", "mistral-sliding", "phi3-partial-longrope", "olmo2-mha-biases", "gemma3")
CASES += ("qwen3-moe", "llama-tied", "smollm3-sliding", "qwen2-tied-yarn")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A checkpoint that caches rotary keys, with another rank in each layer."""
    folder = tmp_path_factory.mktemp("stored")
    tiny.checkpoint(folder / "source", "qwen2")
    recipe = {"layout": "per-group", "latent.ranks": [24, 16], "kv_lora_rank": 20, "qk_rope_head_dim": 4, **SHORT}
    convert(folder / "source", folder / "stored", recipe, evaluation=tiny.some_tokens(2, 32))
    return folder / "stored"


@each("case, layout", CASES, ["per-group", "shared"])
def test_logits_and_tokens_are_the_sources(case, layout, tmp_path):
    family, keys = tiny.CASES[case]
    tiny.checkpoint(tmp_path / "source", family, **keys)
    tied = tiny.config(family, **keys).tie_word_embeddings
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    # At half rank a random model may be further from its source than a guess.
    edit_weights(tmp_path / "source", {head: lambda weight: weight / 10})
    stored, latent = tmp_path / "stored", tmp_path / "latent"
    convert(tmp_path / "source", stored, {"layout": layout, **SHORT}, evaluation=tiny.some_tokens(2, 32))
    report = convert(stored, latent, LATENT)
    assert report.parity.logits_relative_error <= 1e-5 and report.cache_ratio == 1.0
    assert tiny.difference(latent, stored) <= 1e-5
    tokens = tiny.some_tokens()
    prompt = {"input_ids": tokens[:, :14], "attention_mask": torch.ones(3, 14, dtype=torch.int64)}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    before, after = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (stored, latent)
    )
    assert torch.equal(after.generate(**prompt, **options), before.generate(**prompt, **options))


def test_ranks_by_layer_shards_records_and_files(converted, tmp_path):
    before = contents(converted)
    report = convert(converted, tmp_path / "out", LATENT, max_shard_bytes=40_000)
    assert contents(converted) == before
    config = read_json(tmp_path / "out" / "config.json")
    assert config["kv_lora_rank"] == [24 + 8, 16 + 8] and config["qk_rope_head_dim"] == 8
    assert config["rope_from_latent"] is True and config["num_rope_heads"] == 1 and config["schema_version"] == 2
    old = json.loads(before["config.json"])
    assert config["recipe"] == {**old["recipe"], "layout_changed_to": "latent"}
    assert config["calibrated_length"] == old["calibrated_length"]
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    assert [layer["kv_lora_rank"] for layer in report.layers] == [32, 24]
    assert report.cache_numel_per_token == report.source_cache_numel_per_token == 32 + 24
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A `mha2mla` checkpoint (`stored`) moved, exactly, into the layout that caches the latent alone" in card
    kept = "1.2857 with rotary keys kept, 1.2143 in 8 bits"
    assert f"| 112 (1.0000; {kept}) |" in card and f"({kept})" in str(report)
    inspected = inspect_checkpoint(tmp_path / "out", "float32")
    assert inspected.summary["cache bytes per token"] == 4 * 56
    key, before_moving = "losses relative to", inspect_checkpoint(converted).summary
    assert "not the source" in inspected.summary[key] and key not in before_moving  # whose sizes stand beside them
    assert [row["bytes_per_token_and_layer"] for row in inspected.geometries] == [4 * 32, 4 * 24]
    assert {row["rotary_keys"] for row in inspected.geometries} == {"from the latent"}
    edit_json(tmp_path / "out" / "config.json", rotary_key_cache="bfloat16")
    kept = inspect_checkpoint(tmp_path / "out", "float32")
    assert kept.summary["cache bytes per token"] == 4 * (56 + 2 * 8)
    assert [row["bytes_per_token_and_layer"] for row in kept.geometries] == [4 * 40, 4 * 32]
    assert {row["rotary_keys"] for row in kept.geometries} == {"kept beside the latent"}
    # Of 2 layers, keys and values, 2 kv heads of width 16.
    assert inspect_checkpoint(converted).summary["cache ratio"] == f"{56 / 128:.4g}"
    both = f"{56 / 128:.4g}, {72 / 128:.4f} with rotary keys kept, {(56 + 12) / 128:.4f} in 8 bits"
    assert kept.summary["cache ratio"] == inspected.summary["cache ratio"] == both
    assert {row["rotary_keys"] for row in inspect_checkpoint(converted).geometries} == {"cached"}
    assert tiny.difference(tmp_path / "out", converted) <= 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_another_dtype(converted, tmp_path):
    report = convert(converted, tmp_path / "out", LATENT, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    full = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert full == {name for name in tensors if name.endswith(("inv_freq", "o_proj.bias"))} and full
    assert report.weights_dtype == "bfloat16"


def test_the_command_line(converted, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(converted), str(out), "--layout", "latent", "--device", "cpu"]) in (0, None)
    said = capsys.readouterr().out
    note = read_json(out / "conversion.json")["prompt_note"]
    assert "perplexity" in said and f"prompts:    {note}\n" in said and "x the source's FLOP" in note
    assert read_json(out / "config.json")["rope_from_latent"]


@pytest.mark.parametrize(
    ("recipe", "keys", "named"),
    [
        (None, {}, "layout is None; expected 'latent'"),
        ({"layout": "shared"}, {}, "layout is 'shared'; expected 'latent'"),
        ({"layout": "latent", "cache_ratio": 0.25}, {}, "cache_ratio is 0.25; expected nothing beside layout='latent'"),
        ({"layout": "latent", "latent.rule": "svd-joint"}, {}, "latent.rule is 'svd-joint'; expected nothing"),
        ({"layout": "latent", "preset": "quick"}, {}, "preset is 'quick'; expected none"),
        ({"layout": "latent"}, {"preset": "cpu"}, "preset is 'cpu'; expected none"),
        (Recipe(), {}, "recipe is a Recipe; expected the mapping"),
        ({"layot": "latent"}, {}, "'layot' is unknown"),
    ],
)
def test_whatever_loses_something_is_refused_by_name(converted, tmp_path, recipe, keys, named):
    with pytest.raises(ValueError, match=named):
        convert(converted, tmp_path / "out", recipe, **keys)
    assert not list(tmp_path.iterdir())


def test_what_is_there_already_is_refused(converted, tmp_path):
    convert(converted, tmp_path / "out", LATENT)
    for recipe in (LATENT, {"cache_ratio": 0.25}, None):
        with pytest.raises(UnsupportedSourceError, match="to the layout 'latent'; for another size convert the check"):
            convert(tmp_path / "out", tmp_path / "again", recipe)
    with pytest.raises(DestinationError, match="exists"):
        convert(converted, tmp_path / "out", LATENT)
    convert(converted, tmp_path / "out", LATENT, overwrite=True)
    with pytest.raises(DestinationError, match="overlap"):
        convert(converted, converted, LATENT, overwrite=True)


def test_layers_of_an_interrupted_convert_are_kept_or_discarded(converted, tmp_path):
    layer = interrupted_layer(tmp_path / "out")
    with pytest.raises(ResumeError, match=r"holds 1 files such as layer-00000\.safetensors.*resume='never'"):
        convert(converted, tmp_path / "out", LATENT)
    assert layer.exists()
    convert(converted, tmp_path / "out", LATENT, resume="never")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out" / "work").exists()


@pytest.mark.parametrize("change", [torch.ones(3, 48), lambda weight: weight * torch.nan], ids=["shape", "NaN"])
def test_a_damaged_source_is_named_and_leaves_nothing(converted, tmp_path, change):
    """Before any work, and after some."""
    damaged, name = shutil.copytree(converted, tmp_path / "damaged"), "model.layers.1.self_attn.kv_a_proj.weight"
    edit_weights(damaged, {name: change})
    with pytest.raises(CheckpointError, match=f"tensor {name} .*has"):
        convert(damaged, tmp_path / "out", LATENT)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_source_that_changes_meanwhile_is_named(converted, tmp_path, monkeypatch):
    source = shutil.copytree(converted, tmp_path / "source")

    def changing(*args):
        (source / "config.json").write_text((source / "config.json").read_text() + " ")
        return write(*args)

    write = relayout._write
    monkeypatch.setattr(relayout, "_write", changing)
    with pytest.raises(SourceChangedError, match=r"config\.json"):
        convert(source, tmp_path / "out", LATENT)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_result_that_is_not_the_source_is_thrown_away(converted, tmp_path, monkeypatch):
    exact = relayout.latent_tensors

    def wrong(geometry, tensors):
        found = exact(geometry, tensors)
        return found | {"inv_freq": found["inv_freq"].flip(1)}

    monkeypatch.setattr(relayout, "latent_tensors", wrong)
    with pytest.raises(ParityError, match="logits of the layout 'latent' differ from the source's"):
        convert(converted, tmp_path / "out", LATENT)
    assert not list(tmp_path.iterdir())
