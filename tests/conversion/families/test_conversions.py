"""Every family through the whole pipeline: exact at full rank, as measured below it, experts untouched."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from mha2mla.checkpoints import CheckpointError
from mha2mla.conversion.target import LAYOUTS
from tests.conversion import tiny
from tests.conversion.tiny import FAMILIES, FULL, SHORT, convert, relative
from tests.few import each
from tests.folders import WEIGHTS, edit_config, edit_weights, read_json


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@each("case, layout", tiny.CASES, LAYOUTS)
def test_full_rank_reproduces_the_source(case, layout, checkpoint_of, tmp_path):
    """Pairing, biases, norms, head width, rope scaling, tied embeddings, sliding windows."""
    folder = checkpoint_of(case)
    report = convert(folder, tmp_path / "out", tiny.Recipe(layout=layout, **FULL))
    assert report.parity.logits_relative_error <= 1e-4
    assert report.cache_ratio == 1.0 and report.calibration_tokens == 0
    source, converted = loaded(folder), loaded(tmp_path / "out")
    tokens = tiny.some_tokens()
    with torch.inference_mode():
        assert relative(converted(tokens).logits, source(tokens).logits) <= 1e-4
    prompt = {"input_ids": tokens[:, :14], "attention_mask": torch.ones(3, 14, dtype=torch.int64)}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = source.generate(**prompt, **options)
    assert torch.equal(converted.generate(**prompt, **options), expected)
    assert torch.equal(converted.generate(**prompt, past_key_values=DynamicCache(), **options), expected)


def test_activations_with_parameters_run_in_the_dtype_of_loading(checkpoint_of, tmp_path):
    convert(checkpoint_of("apertus"), tmp_path / "out", FULL)
    tokens = tiny.some_tokens()
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    assert relative(narrow(tokens).logits, loaded(tmp_path / "out").to(torch.bfloat16)(tokens).logits) == 0


@pytest.mark.parametrize("case", ["qwen2-moe", "gemma3", "olmo3-yarn"])
def test_families_that_mask_by_a_window_run_without_one(case, checkpoint_of, tmp_path):
    convert(checkpoint_of(case), tmp_path / "out", FULL)
    tokens, logits = tiny.some_tokens(), []
    for window in (None, 1000):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, sliding_window=window)
        logits.append(model.eval()(tokens, use_cache=False).logits)
    assert relative(*logits) <= 1e-6


def soften(folder):
    """Random models are so sure of their predictions that at half rank some are further from them than a guess, which
    convert refuses to publish."""
    if "lm_head.weight" in load_file(folder / WEIGHTS):
        edit_weights(folder, {"lm_head.weight": lambda weight: weight / 10})


@each("case, layout", FAMILIES, LAYOUTS)
def test_half_rank_reloads_as_measured(case, layout, checkpoint_of, tmp_path):
    folder, held_out = shutil.copytree(checkpoint_of(case), tmp_path / "source"), tiny.some_tokens(2, 32)
    soften(folder)
    report = convert(folder, tmp_path / "out", tiny.Recipe(layout=layout, **SHORT), evaluation=held_out)
    expected, actual = (tiny.logits(path, held_out)[:, :-1] for path in (folder, tmp_path / "out"))
    # half the cache of a tiny model with one kv head may lose nothing: then both are float32's rounding
    assert relative(actual, expected) == pytest.approx(report.parity.logits_relative_error, rel=1e-3, abs=1e-6)
    assert report.cache_ratio <= 0.5


@pytest.mark.parametrize("case", ["qwen2", "phi3-partial-longrope", "qwen3-moe", "olmo2", "gemma3"])
def test_full_rank_reproduces_a_bfloat16_source(case, tmp_path):
    """No map at full rank may round what the source stores: norms of weight 1 + w, dims that do not rotate, experts. A
    value bias moves into o_proj: rounded to bfloat16 there, it alone would break parity."""
    family, keys = tiny.CASES[case]
    tiny.model(family, **keys).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    tiny.tokenizer().save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", tiny.Recipe(**FULL))
    assert report.weights_dtype == "bfloat16" and report.parity.logits_relative_error <= 1e-4
    assert tiny.difference(tmp_path / "out", tmp_path / "source") <= 1e-4
    written = load_file(tmp_path / "out" / WEIGHTS)
    wide = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in written if name.endswith(("inv_freq", "o_proj.bias"))}


def test_a_mistral_with_layer_types_is_what_transformers_makes_of_it(tmp_path):
    folder = tiny.checkpoint(tmp_path / "source", "mistral", head_dim=24)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    edit_config(folder, **windows)
    convert(folder, tmp_path / "out", tiny.Recipe(**FULL))
    assert tiny.difference(tmp_path / "out", folder) <= 1e-4


def test_fused_projections_convert_as_separate_ones_do(tmp_path):
    """A Phi-3 is a Llama with q, k, v and gate, up side by side: calibrated at half rank, the very same tensors."""
    llama, phi3 = tmp_path / "llama", tmp_path / "phi3"
    tiny.checkpoint(llama, "llama", hidden_size=64)
    tiny.checkpoint(phi3, "phi3", hidden_size=64, rms_norm_eps=1e-6)
    tensors = load_file(llama / "model.safetensors")
    for prefix in ("model.layers.0.", "model.layers.1."):
        qkv = [tensors.pop(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv"]
        gate_up = [tensors.pop(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{prefix}self_attn.qkv_proj.weight"] = torch.cat(qkv)
        tensors[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    save_file(tensors, phi3 / "model.safetensors", metadata={"format": "pt"})
    convert(llama, tmp_path / "one", tiny.Recipe(**SHORT))
    convert(phi3, tmp_path / "two", tiny.Recipe(**SHORT))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    # The second layer's inputs went through one product instead of two, which rounds otherwise.
    attention = [name for name in one if name.startswith("model.layers.0.self_attn.")]
    assert attention and all(torch.equal(one[name], two[name]) for name in attention)


@pytest.mark.parametrize(("layout", "width"), [("per-group", 16), ("shared", 32)])
def test_values_alone_are_compressed_where_every_pair_rotates(layout, width, checkpoint_of, tmp_path):
    widths = {"cache_ratio": None, "kv_lora_rank": 16, "qk_rope_head_dim": width}
    report = convert(checkpoint_of("llama"), tmp_path / "out", tiny.Recipe(**SHORT | {"layout": layout} | widths))
    assert 0 < report.parity.logits_relative_error < 1


def test_configs_written_by_older_libraries_convert(checkpoint_of, tmp_path):
    """RoPE at the top level and names of remote code, as Phi-3 was published."""
    folder = shutil.copytree(checkpoint_of("phi3-longrope"), tmp_path / "source")
    rope = read_json(folder / "config.json")["rope_parameters"]
    edit_config(
        folder,
        rope_parameters=...,
        rope_theta=rope["rope_theta"],
        rope_scaling={"type": "longrope", **{key: rope[key] for key in ("short_factor", "long_factor")}},
        transformers_version="4.40.2",
        auto_map={
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
    )
    convert(folder, tmp_path / "out", tiny.Recipe(**FULL))
    assert tiny.difference(tmp_path / "out", folder) <= 1e-4


EXPERT = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    "qwen2-moe": "model.layers.1.mlp.experts.2.up_proj.weight",
    "qwen3-moe": "model.layers.1.mlp.experts.2.up_proj.weight",
    "olmoe": "model.layers.1.mlp.experts.2.up_proj.weight",
}


@pytest.mark.parametrize("case", EXPERT)
def test_experts_keep_their_names_and_bits(case, checkpoint_of, tmp_path):
    folder = checkpoint_of(case)
    convert(folder, tmp_path / "out", tiny.Recipe(**SHORT))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert EXPERT[case] in before
    kept = {name for name in before if ".self_attn." not in name}
    assert kept == {name for name in after if ".self_attn." not in name}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    # What transformers writes of the converted model has the same names.
    loaded(tmp_path / "out").save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == after.keys() and all(torch.equal(again[name], after[name]) for name in after)


@pytest.mark.parametrize("case", EXPERT)
def test_stacked_experts_are_read_too(case, checkpoint_of, tmp_path):
    """As a state dict holds them: all experts of a layer in one tensor."""
    family, keys = tiny.CASES[case]
    folder = shutil.copytree(checkpoint_of(case), tmp_path / "source")
    stacked = tiny.model(family, **keys).state_dict()
    assert "model.layers.1.mlp.experts.gate_up_proj" in stacked
    save_file(stacked, folder / WEIGHTS, metadata={"format": "pt"})
    convert(folder, tmp_path / "out", tiny.Recipe(**FULL))
    assert tiny.difference(tmp_path / "out", folder) <= 1e-4


@pytest.mark.parametrize("case", EXPERT)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (..., "tensor {} is absent from .* \\(1 absent in all\\)"),
        (torch.ones(3, 48), "tensor {} has shape \\(3, 48\\)"),
        (lambda weight: weight * torch.nan, "tensor {} in model.safetensors has .* NaN"),
    ],
)
def test_a_damaged_expert_is_named_and_leaves_nothing(case, change, named, checkpoint_of, tmp_path):
    folder = shutil.copytree(checkpoint_of(case), tmp_path / "source")
    edit_weights(folder, {EXPERT[case]: change})
    with pytest.raises(CheckpointError, match=named.format(EXPERT[case])):
        convert(folder, tmp_path / "out", tiny.Recipe(**FULL))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", FAMILIES)
def test_full_rank_reproduces_the_source_on_a_gpu(case, checkpoint_of, tmp_path):
    folder = checkpoint_of(case)
    report = convert(folder, tmp_path / "out", tiny.Recipe(**FULL), device="cuda")
    assert report.device == "cuda" and report.parity.logits_relative_error <= 1e-4
    tokens = tiny.some_tokens()
    models = [loaded(path).cuda() for path in (tmp_path / "out", folder)]
    with torch.inference_mode():
        converted, source = (model(tokens.cuda()).logits for model in models)
    assert relative(converted, source) <= 1e-4


def test_lower_ranks_beside_a_ratio_of_one_are_calibrated(checkpoint_of, tmp_path):
    recipe = tiny.Recipe(**FULL | {"latent.ranks": [16, 64]})
    assert convert(checkpoint_of("llama"), tmp_path / "out", recipe).parity.logits_relative_error > 0
