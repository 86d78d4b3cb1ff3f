"""Weights in and out of a folder: names, dtypes, tied embeddings, construction without memory, other heads."""

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
)

from mha2mla.modeling import MHA2MLAForCausalLM, MLAAttention
from tests.few import each
from tests.modeling import models

TIED = "llama-yarn-tied"


def tables(model) -> list[torch.Tensor]:
    return [layer.self_attn.inv_freq for layer in model.model.layers]


@each("case, dtype", models.GEOMETRIES, [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_round_trip(case, dtype, tmp_path):
    model = models.mla_model(case)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(again) is MHA2MLAForCausalLM and not again.training
    state, expected = again.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        kept = name.endswith("inv_freq")
        assert tensor.dtype == (torch.float32 if kept else dtype), name
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    ids = models.tokens(2, 9)
    assert torch.equal(again(ids).logits, model.to(dtype)(ids).logits)


def test_experts_run_as_from_pretrained_is_told(tmp_path):
    source = models.source_model("mixtral")
    models.full_rank(source).save_pretrained(tmp_path)
    for given, expected in ((None, source.config._experts_implementation), ("eager", "eager")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=given)
        assert model.model.config._experts_implementation == expected


def test_names_are_the_sources_outside_attention():
    source, model = models.source_model("qwen3"), models.mla_model("per-head")
    ours, theirs = ({name for name in m.state_dict() if ".self_attn." not in name} for m in (model, source))
    assert ours == theirs
    attention = {name.partition(".self_attn.")[2] for name in model.state_dict()} - {""}
    assert attention == {
        "q_proj.weight", "q_proj.bias", "q_norm.weight", "q_b_proj", "k_proj.weight", "k_proj.bias", "k_norm.weight",
        "k_a_proj.weight", "v_a_proj.weight", "k_b_proj", "v_b_proj", "o_proj.weight", "o_proj.bias", "inv_freq",
    }  # fmt: skip
    attention = {name.partition(".self_attn.")[2] for name in models.mla_model("no nope").state_dict()} - {""}
    assert attention == {
        "q_proj.weight", "q_proj.bias", "kv_a_proj.weight", "kv_a_proj.bias", "v_b_proj", "o_proj.weight",
        "o_proj.bias", "inv_freq",
    }  # fmt: skip


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_frequencies_stay_float32_under_casts(cast):
    model = models.mla_model()
    before = [table.clone() for table in tables(model)]
    model.to(cast)
    model.to(torch.float32)
    model.bfloat16().half().double()
    assert model.dtype == torch.float64
    for table, expected in zip(tables(model), before, strict=True):
        assert table.dtype == torch.float32 and torch.equal(table, expected)


def test_far_positions_in_bfloat16():
    """Positions are counted in float32: 10000 and 10001 differ, which they do not in bfloat16."""
    model = models.full_rank(models.source_model("mistral")).to(torch.bfloat16)
    hidden = torch.randn(1, 2, 48, dtype=torch.bfloat16)
    attention: MLAAttention = model.model.layers[0].self_attn
    with torch.no_grad():
        near, far = (attention(hidden, position_ids=torch.tensor([[0, at]]))[0][0, 1] for at in (1, 10001))
        shifted = attention(hidden, position_ids=torch.tensor([[10000, 10001]]))[0][0, 1]
    assert models.relative_error(shifted, near) < 0.03 < 0.1 < models.relative_error(far, near)


def test_tied_embeddings_stay_tied(tmp_path):
    model = models.full_rank(models.source_model(TIED))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight


@torch.no_grad()
def test_resized_embeddings(tmp_path):
    model = models.full_rank(models.source_model(TIED))
    model.resize_token_embeddings(104)
    ids = torch.tensor([[1, 100, 103]])
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, expected)


@pytest.mark.parametrize("case", models.GEOMETRIES)
@torch.no_grad()
def test_random_weights_are_sane(case):
    model = AutoModelForCausalLM.from_config(models.mla_config(case))
    std = model.config.initializer_range
    for name, parameter in model.named_parameters():
        if "_b_proj" in name:
            assert 0.7 * std < parameter.std() < 1.3 * std, name
    for table in tables(model):
        assert (table[:, 0] == 1).all() and (table.diff(dim=1) < 0).all() and (table > 0).all()
    assert model(models.tokens(2, 9)).logits.isfinite().all()


def test_construction_without_memory():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.mla_config("per layer"))
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model.model.layers[0].self_attn.inv_freq.dtype == torch.float32
    # accelerate places whole decoder layers.
    assert model._no_split_modules == {"LlamaDecoderLayer"}


@each("offloaded, case", ["model.embed_tokens", "model.layers.0", "model."], ["per-group", "latent", "kept qk-norm"])
@torch.no_grad()
def test_offloaded_weights(offloaded, case, tmp_path):
    """They are on the device "meta" until their module runs; neither cache, positions nor masks are ever there."""
    models.mla_model(case).save_pretrained(tmp_path / "model")
    # Read from the file too: MKL's product of one row (the logits of the last token) sums in an order that depends on
    # where the weight begins modulo 16 bytes, and a tensor mapped from a safetensors file may begin at a multiple of 8.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    device_map = {part: "disk" if part.startswith(offloaded) else "cpu" for part in parts}
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offloaded"
    )
    assert any(parameter.is_meta for parameter in again.parameters())
    assert [line.form for line in again.attention_report()] == [line.form for line in model.attention_report()]
    ids, mask = models.tokens(2, 9), models.left_mask(9, 0, 3)
    for kind in ("dynamic", "static"):
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "cache_implementation": kind}
        assert torch.equal(again.generate(ids, **options), model.generate(ids, **options))
    logits = []
    for made in (model, again):
        pages = made.paged_cache(num_pages=2, page_size=16)
        step = pages.step(pages.extend({pages.open(): 9}))
        logits.append(made.forward_batch(ids[0], step))
    assert torch.equal(*logits)


@torch.no_grad()
@pytest.mark.parametrize("case", ["shared", "latent qk-norm"])
def test_auto_model_loads_the_base_model(tmp_path, case):
    model = models.mla_model(case)
    model.save_pretrained(tmp_path)
    base, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = models.tokens(2, 12)
    hidden = base.eval()(ids, use_cache=False).last_hidden_state
    assert models.relative_error(model.lm_head(hidden), model(ids).logits) < models.TOLERANCE
    cached = base(ids[:, :9], use_cache=True)
    last = base(ids[:, 9:], past_key_values=cached.past_key_values).last_hidden_state
    assert models.relative_error(last, hidden[:, 9:]) < models.TOLERANCE
    base.save_pretrained(tmp_path / "base")
    assert not AutoModel.from_pretrained(tmp_path / "base", output_loading_info=True)[1]["missing_keys"]


@pytest.mark.parametrize("rope_from_latent", [False, True])
def test_classifier_has_the_sources_scores_and_trains(tmp_path, rope_from_latent):
    source = models.source_model("llama")
    models.full_rank(source, rope_from_latent=rope_from_latent).save_pretrained(tmp_path)
    options = {"num_labels": 3, "pad_token_id": 0}
    mine, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, **options, output_loading_info=True)
    assert report["missing_keys"] == {"score.weight"} and not report["unexpected_keys"]
    source.config.num_labels = 3
    theirs = LlamaForSequenceClassification(source.config).eval()
    theirs.model.load_state_dict(source.model.state_dict())
    mine.score.load_state_dict(theirs.score.state_dict())
    ids = models.tokens(2, 10)
    ids[1, 7:] = 0
    mask = (ids != 0).long()
    labels = torch.tensor([0, 2])
    expected = theirs(ids, attention_mask=mask, labels=labels)
    found = mine.eval()(ids, attention_mask=mask, labels=labels)
    assert models.relative_error(found.logits, expected.logits) < models.TOLERANCE
    assert models.relative_error(found.loss, expected.loss) < models.TOLERANCE
    found.loss.backward()
    assert float(mine.model.layers[0].self_attn.v_b_proj.grad.norm()) > 0


@torch.no_grad()
@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_heads_share_positions_outputs_and_defaults(tmp_path, kind):
    """The base model and the classifier, over the cache that they make: as without one, or refused."""
    models.mla_model("latent").save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, pad_token_id=0, attn_implementation="eager").eval()
    ids, mask = models.tokens(2, 12), models.left_mask(12, 0, 5)
    numbered = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    made, expected = model(ids, **numbered), model(ids, use_cache=False, **numbered)
    assert made.past_key_values.get_seq_length() == 12 and expected.past_key_values is None
    assert models.relative_error(made[0][:, -1], expected[0][:, -1]) < models.TOLERANCE
    with pytest.raises(ValueError, match="position_ids do not count on"):
        model(ids, position_ids=torch.arange(12)[None] % 7)

    assert [weights.shape for weights in model(ids, output_attentions=True).attentions] == [(2, 6, 12, 12)] * 2
    model.config.output_attentions = model.config.output_hidden_states = True
    assert len(model(ids).attentions) == 2 and len(model(ids).hidden_states) == 3
    model.model.config.output_hidden_states = True
    assert model(ids, output_hidden_states=False).hidden_states is None
    model.config.use_cache = False
    assert model(ids).past_key_values is None
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="output_attentions is True"):
        model(ids)


def test_causal_model_loads_from_a_classifier(tmp_path):
    models.mla_model("shared").save_pretrained(tmp_path / "a")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert report["missing_keys"] == {"lm_head.weight"}
