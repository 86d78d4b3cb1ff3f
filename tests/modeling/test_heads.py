"""AutoModel and sequence classification of a converted checkpoint."""

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
)

from tests.modeling.full_rank import full_rank
from tests.modeling.models import TOLERANCE, mla_model, relative_error, source_model, tokens


@torch.no_grad()
@pytest.mark.parametrize("case", ["shared", "latent qk-norm"])
def test_auto_model_loads_the_base_model(tmp_path, case):
    model = mla_model(case)
    model.save_pretrained(tmp_path)
    base, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = tokens(2, 12)
    hidden = base.eval()(ids, use_cache=False).last_hidden_state
    assert relative_error(model.lm_head(hidden), model(ids).logits) < TOLERANCE
    cached = base(ids[:, :9], use_cache=True)
    last = base(ids[:, 9:], past_key_values=cached.past_key_values).last_hidden_state
    assert relative_error(last, hidden[:, 9:]) < TOLERANCE
    base.save_pretrained(tmp_path / "base")
    assert not AutoModel.from_pretrained(tmp_path / "base", output_loading_info=True)[1]["missing_keys"]


@pytest.mark.parametrize("rope_from_latent", [False, True])
def test_classifier_has_the_sources_scores_and_trains(tmp_path, rope_from_latent):
    source = source_model("llama")
    full_rank(source, rope_from_latent=rope_from_latent).save_pretrained(tmp_path)
    options = {"num_labels": 3, "pad_token_id": 0}
    mine, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, **options, output_loading_info=True)
    assert report["missing_keys"] == {"score.weight"} and not report["unexpected_keys"]
    source.config.num_labels = 3
    theirs = LlamaForSequenceClassification(source.config).eval()
    theirs.model.load_state_dict(source.model.state_dict())
    mine.score.load_state_dict(theirs.score.state_dict())
    ids = tokens(2, 10)
    ids[1, 7:] = 0
    mask = (ids != 0).long()
    labels = torch.tensor([0, 2])
    expected = theirs(ids, attention_mask=mask, labels=labels)
    found = mine.eval()(ids, attention_mask=mask, labels=labels)
    assert relative_error(found.logits, expected.logits) < TOLERANCE
    assert relative_error(found.loss, expected.loss) < TOLERANCE
    found.loss.backward()
    assert float(mine.model.layers[0].self_attn.v_b_proj.grad.norm()) > 0


def test_causal_model_loads_from_a_classifier(tmp_path):
    mla_model("shared").save_pretrained(tmp_path / "a")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert report["missing_keys"] == {"lm_head.weight"}
