"""Perplexity, KL and agreement of two models on one text."""

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

from mha2mla.eval import evaluate_quality, quality
from mha2mla.sources import tiny_checkpoint
from mha2mla.texts import load_text

SETTINGS = {"seqlen": 48, "max_tokens": 480, "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model with other weights and the same tokenizer."""
    return tiny_checkpoint(tmp_path_factory.mktemp("other") / "source", seed=7)


def test_a_model_against_itself_loses_nothing(tiny_source):
    report = evaluate_quality(tiny_source, tiny_source, **SETTINGS)
    assert report.perplexity_ratio == 1.0
    assert report.kl == 0.0
    assert report.top1_agreement == 1.0
    assert (report.num_windows, report.num_tokens) == (10, 10 * 47)


def test_it_is_what_torch_says(tiny_source, other):
    """The same numbers by torch's own losses, all windows in one batch, in float64 after the models."""
    report = evaluate_quality(tiny_source, other, **SETTINGS)
    tokenizer = AutoTokenizer.from_pretrained(tiny_source)
    ids = tokenizer(load_text("builtin:prose"), add_special_tokens=False, return_tensors="pt")["input_ids"][0, :480]
    ids = ids.view(10, 48)
    with torch.inference_mode():
        log_p, log_q = (
            AutoModelForCausalLM.from_pretrained(folder)(ids).logits[:, :-1].double().log_softmax(-1).flatten(0, 1)
            for folder in (tiny_source, other)
        )
    target = ids[:, 1:].flatten()
    assert report.perplexity_source == pytest.approx(math.exp(cross_entropy(log_p, target)), rel=1e-5)
    assert report.perplexity_converted == pytest.approx(math.exp(cross_entropy(log_q, target)), rel=1e-5)
    assert report.kl == pytest.approx(kl_div(log_q, log_p, log_target=True, reduction="batchmean").item(), rel=1e-4)
    assert report.top1_agreement == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item())
    assert report.kl > 0.01, "two random models ought to differ, or this test sees nothing"


def test_slices_change_nothing(tiny_source, other, monkeypatch):
    whole = evaluate_quality(tiny_source, other, **SETTINGS)
    monkeypatch.setattr(quality, "_LOGITS_PER_SLICE", 1000)
    sliced = evaluate_quality(tiny_source, other, **SETTINGS)
    for field in dataclasses.fields(whole):
        first, second = getattr(whole, field.name), getattr(sliced, field.name)
        assert second == (pytest.approx(first, rel=1e-9) if isinstance(first, float) else first)


def test_loaded_models_and_a_file_serve_as_well(tiny_source, other, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    by_name = evaluate_quality(tiny_source, other, text=str(text), **SETTINGS)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_source, other)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_source)
    loaded = evaluate_quality(*models, text=str(text), tokenizer=tokenizer, **SETTINGS)
    assert loaded == by_name


def test_the_text_ends_before_max_tokens(tiny_source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("x" * 100)
    report = evaluate_quality(tiny_source, tiny_source, text=str(text), **SETTINGS | {"max_tokens": 10**6})
    assert (report.num_windows, report.num_tokens) == (2, 2 * 47)


def test_a_broken_model_has_an_infinite_perplexity_not_a_crash(tiny_source):
    source, broken = (AutoModelForCausalLM.from_pretrained(tiny_source) for _ in range(2))
    broken.lm_head.weight.data.mul_(1e5)
    tokenizer = AutoTokenizer.from_pretrained(tiny_source)
    report = evaluate_quality(source, broken, tokenizer=tokenizer, **SETTINGS)
    assert math.isinf(report.perplexity_converted) and math.isfinite(report.perplexity_source)


def test_other_vocabularies_are_refused_by_name(tiny_source, tmp_path):
    other = tiny_checkpoint(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match="converted has a tokenizer of 260 tokens .* not the source's"):
        evaluate_quality(tiny_source, other, **SETTINGS)


def test_the_same_vocabulary_cut_otherwise_is_refused(tiny_source, tmp_path):
    from tokenizers import normalizers

    other = tiny_checkpoint(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match="cuts the text into other tokens"):
        evaluate_quality(tiny_source, other, **SETTINGS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seqlen": 1}, "seqlen is 1; expected at least 2"),
        ({"max_tokens": 47}, "max_tokens is 47; expected at least one window of seqlen=48"),
        ({"text": "no-such-file"}, "no-such-file"),
        ({"device": "abacus"}, "device is 'abacus'; expected cpu, cuda or cuda:N"),
    ],
)
def test_bad_arguments_are_named(tiny_source, changed, message):
    with pytest.raises(ValueError, match=message):
        evaluate_quality(tiny_source, tiny_source, **SETTINGS | changed)


def test_missing_folders_are_named(tiny_source, tmp_path):
    with pytest.raises(FileNotFoundError, match="converted is '.*nowhere'; expected an existing checkpoint folder"):
        evaluate_quality(tiny_source, tmp_path / "nowhere", **SETTINGS)
    with pytest.raises(FileNotFoundError, match=r"source is .* a folder without config\.json"):
        evaluate_quality(tmp_path, tiny_source, **SETTINGS)


def test_a_loaded_source_needs_a_tokenizer(tiny_source):
    model = AutoModelForCausalLM.from_pretrained(tiny_source)
    with pytest.raises(ValueError, match="tokenizer is None; expected one"):
        evaluate_quality(model, tiny_source, **SETTINGS)
