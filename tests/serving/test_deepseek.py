"""Exports for engines that drop the latent's bias: their forward pass, written again, gives the model's logits."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from benchmarks.stock_reference import StockModel
from benchmarks.stock_transformers import answers
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.serving.deepseek import ENGINES, GUARD, place_frequencies, refusals
from mha2mla.serving.export import export
from tests.conversion import tiny
from tests.folders import edit_config
from tests.modeling.models import TOLERANCE, mla_config, randomise, relative_error, source_config, tokens

# name -> (source, its keys, places of the rotary pairs in its table, ranks, width of the exported latent).
LIKE = {
    "llama": (
        "llama", {"attention_bias": False, "head_dim": 128, "rms_norm_eps": 1e-6}, range(0, 64, 2), [24, 300], 512,
    ),
    "mistral": ("mistral", {"head_dim": 128, "rms_norm_eps": 1e-5}, range(5, 32), [256, 40], 256),
    "smollm2": (
        "llama",
        {
            "attention_bias": False, "head_dim": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
        range(31, -1, -1), [24, 16], 256,
    ),
}  # fmt: skip


def model_like(name, **keys):
    case, source_keys, places, ranks, _ = LIKE[name]
    source = source_config(case, **source_keys)
    config = mla_config(
        "shared", source_config=source.to_dict(), v_head_dim=source.head_dim, softmax_scale=source.head_dim**-0.5,
        num_rope_heads=1, kv_lora_rank=ranks, qk_rope_head_dim=2 * len(places), qk_nope_head_dim=source.head_dim,
        attention_q_bias=False, attention_kv_bias=False, attention_o_bias=False, **keys,
    )  # fmt: skip
    model = randomise(MHA2MLAForCausalLM(config).eval())
    theta = source.rope_parameters["rope_theta"]
    for layer in model.model.layers:
        layer.self_attn.inv_freq.copy_((theta ** (-torch.tensor(places) * 2.0 / source.head_dim))[None])
    return model


def exported(tmp_path, model, engine="vllm"):
    model.save_pretrained(tmp_path / "mla")
    return export(tmp_path / "mla", tmp_path / engine, "deepseek-v3", engine)


def read_folder(folder):
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return json.loads((folder / "config.json").read_text()), weights


def engine_logits(folder, ids, dtype, absorbed=False):
    return StockModel.load(folder, dtype).logits(ids, ids.shape[1], absorbed=absorbed)


@torch.no_grad()
@pytest.mark.parametrize("name", LIKE)
def test_engines_forward_gives_the_same_logits(name, tmp_path):
    torch.manual_seed(0)
    model = model_like(name)
    folder = exported(tmp_path, model)
    config, _ = read_folder(folder)
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (LIKE[name][-1], 64)
    assert (config["qk_nope_head_dim"], config["v_head_dim"]) == (128, 128)
    ids = tokens(2, 64)
    own = {torch.float32: model(ids).logits}
    own[torch.bfloat16] = model.bfloat16()(ids).logits
    exact = engine_logits(folder, ids, torch.float64)
    assert relative_error(own[torch.float32], exact) < TOLERANCE
    assert relative_error(engine_logits(folder, ids, torch.float64, absorbed=True), exact) < 1e-12
    for dtype, logits in own.items():
        error = relative_error(engine_logits(folder, ids, dtype), exact)
        assert error < 1.25 * relative_error(logits, exact), dtype


@torch.no_grad()
@pytest.mark.parametrize("name", LIKE)
def test_engines_bfloat16_folder_adds_rounding_of_weights(name, tmp_path):
    """q_proj and kv_b_proj are multiplied by no power of two, so that bfloat16 checkpoints are rounded once more."""
    torch.manual_seed(0)
    model = model_like(name).bfloat16()
    folder = exported(tmp_path, model)
    ids = tokens(2, 64)
    own, exact = model(ids).logits, model.float()(ids).logits
    own_error = relative_error(own, exact)
    assert relative_error(engine_logits(folder, ids, torch.float32), exact) < 0.5 * own_error
    assert relative_error(engine_logits(folder, ids, torch.bfloat16), exact) < 1.4 * own_error


@torch.no_grad()
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LIKE)
def test_transformers_classes_give_the_same_tokens(name, engine, tmp_path):
    torch.manual_seed(0)
    model, prompts = model_like(name), [*tokens(8, 24), *tokens(8, 40)]
    own = [model.generate(ids[None], max_new_tokens=12, do_sample=False, pad_token_id=0) for ids in prompts]
    prompts = [ids.tolist() for ids in prompts]
    found = answers(str(exported(tmp_path, model, engine)), engine != "transformers", prompts, 12)
    assert found == [ids[0, len(prompt) :].tolist() for ids, prompt in zip(own, prompts, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_scaled_norm_is_an_identity_for_any_row(dtype, bound, tmp_path):
    """The largest latent of a normed row has a mean square of 2^-14 to 1 times 1e-6 eps, and comes back as it was."""
    torch.manual_seed(0)
    model = model_like("llama")
    config, weights = read_folder(exported(tmp_path, model.to(dtype)))
    width, eps = config["kv_lora_rank"], config["rms_norm_eps"]
    for index, layer in enumerate(model.model.layers):
        at, rank = f"model.layers.{index}.self_attn.", LIKE["llama"][3][index]
        rows = layer.self_attn.kv_a_proj.weight[:rank].double() * layer.input_layernorm.weight.double()
        loudest = torch.linalg.svd(rows).Vh[0] * rows.shape[1] ** 0.5
        tokens = torch.stack((loudest, torch.randn(rows.shape[1]).double()))
        normed = (tokens * layer.input_layernorm.weight.double()).to(dtype)
        c = linear(normed, weights[at + "kv_a_proj_with_mqa.weight"][:width]).float()
        square = c.square().mean(-1, keepdim=True)
        assert 2**-14 < float(square.max()) / (1e-6 * eps) <= 1
        c = (c * torch.rsqrt(square + eps)).to(dtype) * weights[at + "kv_a_layernorm.weight"]
        plain = linear(normed, layer.self_attn.kv_a_proj.weight[:rank]).double()
        # kv_b_proj undoes the rest, the same factor for all channels.
        share = float((c[:, :rank].double() * plain).sum() / plain.square().sum())
        assert 0.7 < share < 1.42 and not c[:, rank:].any()
        assert relative_error(c[:, :rank].double() / share, plain) < bound


@torch.no_grad()
@pytest.mark.parametrize(("selection", "rope"), [("rorope", 16), ("rorope-2", 8)])
def test_rorope_conversions_are_exported_for_engines(selection, rope, tmp_path):
    """Heads of 16 dims: all 8 frequencies once, or every second."""
    tiny.checkpoint(tmp_path / "source")
    keys = {"layout": "shared", "kv_lora_rank": 24, "qk_rope_head_dim": rope, "rope.selection": selection}
    tiny.convert(tmp_path / "source", tmp_path / "mla", {**tiny.SHORT, **keys, "latent.centered": False})
    folder = export(tmp_path / "mla", tmp_path / "vllm", "deepseek-v3", "vllm")
    model, ids = MHA2MLAForCausalLM.from_pretrained(tmp_path / "mla", dtype=torch.float32).eval(), tokens(2, 40)
    assert relative_error(engine_logits(folder, ids, torch.float32), model(ids).logits) < TOLERANCE


@pytest.mark.parametrize("name", LIKE)
def test_vllm_and_sglang_get_the_same_tensors(name, tmp_path):
    model = model_like(name)
    ours = [read_folder(exported(tmp_path, model, engine)) for engine in ("vllm", "sglang")]
    assert ours[0][0] == ours[1][0] and ours[0][1].keys() == ours[1][1].keys()
    assert all(torch.equal(ours[0][1][name], ours[1][1][name]) for name in ours[0][1])


def test_transformers_refuses_a_folder_for_engines(tmp_path):
    folder = exported(tmp_path, model_like("smollm2"))
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_transformers_folder_has_guards_for_engines(tmp_path):
    config, weights = read_folder(exported(tmp_path, model_like("smollm2"), "transformers"))
    assert config["index_topk"] == 1 and config["q_lora_rank"] is None and GUARD in weights
    config, weights = read_folder(exported(tmp_path, model_like("smollm2")))
    assert "index_topk" not in config and GUARD not in weights


def test_sglang_finds_what_it_has_no_default_for(tmp_path):
    """It reads the key for every layer, dense ones too, and stopped without it."""
    config, _ = read_folder(exported(tmp_path, model_like("smollm2"), "sglang"))
    assert config["moe_layer_freq"] == 1 and config["first_k_dense_replace"] == config["num_hidden_layers"]


def test_engines_refusals_name_every_reason(tmp_path):
    model = model_like("llama", attention_window=8)
    model.config.kv_lora_rank = [24, 600]
    model = randomise(MHA2MLAForCausalLM(model.config))
    for layer in model.model.layers:
        layer.self_attn.inv_freq.fill_(0.5)
    with pytest.raises(ValueError, match="the largest rank is 600") as refused:
        exported(tmp_path, model.half())
    for reason in ("dtype is torch.float16", "attention_window is 8", "layer 0 has frequency 0.5 more than once"):
        assert reason in str(refused.value)
    assert not (tmp_path / "vllm").exists()
    config = model_like("llama").config
    config.v_head_dim = 160
    assert [reason for reason in refusals(config, "vllm", torch.float32) if "heads have up to 160 dims" in reason]
    assert not any("heads have" in reason for reason in refusals(config, "transformers", torch.float32))


def test_dtype_of_an_export_is_that_of_the_weights(tmp_path):
    model_like("smollm2").bfloat16().save_pretrained(tmp_path / "mla")
    edit_config(tmp_path / "mla", dtype=...)
    config, _ = read_folder(export(tmp_path / "mla", tmp_path / "vllm", "deepseek-v3", "vllm"))
    assert config["dtype"] == "bfloat16"


def test_engine_frequencies_are_every_kth_of_the_source():
    def table(theta, head_dim, pairs):
        return [(theta ** (-torch.tensor(pairs) * 2.0 / head_dim))[None]]

    for head_dim, pairs, theta, places in (
        (128, range(0, 64, 2), 1e4, tuple(range(32))),
        (128, range(32), 1e2, tuple(range(32))),
        (64, (3, 1), 1e4, (3, 1)),
    ):
        found = place_frequencies(table(1e4, head_dim, pairs), 1e4, head_dim, "vllm")
        assert (found.theta, found.width, found.places) == (pytest.approx(theta), 64, (places,))
    with pytest.raises(ValueError, match="in no table of 64 dims with every k-th frequency of theta=10000"):
        place_frequencies(table(1e4, 128, (*range(31), 40)), 1e4, 128, "vllm")
    with pytest.raises(ValueError, match="in no table of 64 dims"):  # two pairs of one place
        place_frequencies([torch.tensor([[1.0, 1.0 - 2**-20]])], 1e4, 64, "vllm")
