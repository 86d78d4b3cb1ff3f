"""Perplexity, KL and agreement of two models on one text."""

import json
import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from tokenizers.normalizers import Lowercase
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

from mha2mla.conversion import predictions
from mha2mla.conversion.calibration.texts import load_text
from mha2mla.eval import Metric, evaluate_quality, quality, write_json
from mha2mla.eval.generation import GenerationSettings
from mha2mla.eval.probes import QUESTIONS, ProbeSettings
from mha2mla.eval.quantized_caches import KeptKeys, KVCodes, LatentCodes, RotaryKeys
from mha2mla.modeling import LatentCache
from mha2mla.trial_models import tiny_checkpoint
from tests.conversion import tiny

SETTINGS = {"texts": "builtin:prose", "lengths": (48,), "max_tokens": 480, "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model with other weights and the same tokenizer."""
    return tiny_checkpoint(tmp_path_factory.mktemp("other") / "source", seed=7)


@pytest.fixture(scope="module")
def half(tiny_source, tmp_path_factory):
    """A conversion to latents of half the bytes."""
    folder = tmp_path_factory.mktemp("half") / "half"
    recipe = {"preset": "minimal", "layout": "latent", "calibration.tokens": 256, "calibration.lengths": 64}
    tiny.convert(str(tiny_source), folder, recipe)
    return folder


def test_a_model_against_itself_loses_nothing(tiny_source):
    report = evaluate_quality(tiny_source, tiny_source, **SETTINGS)
    for row in report.rows + report.by_position:
        assert (row.perplexity_ratio, row.kl, row.top1_agreement, row.excess_over_mean) == (1.0, 0.0, 1.0, None)
    assert (report.rows[0].num_windows, report.rows[0].num_tokens) == (10, 10 * 47)


def test_rounding_has_no_excess_by_position(tiny_source, tokenizer):
    source, rounded = (AutoModelForCausalLM.from_pretrained(tiny_source) for _ in range(2))
    rounded.lm_head.weight.data.mul_(1 + 1e-5)
    report = evaluate_quality(source, rounded, tokenizer=tokenizer, **SETTINGS)
    assert 0 < abs(report.rows[0].perplexity_ratio - 1) < 1e-4
    assert {row.excess_over_mean for row in report.by_position} == {None}


def _by_torch(source, other, length, first=0, stop=None):
    """The same numbers by torch's own losses, all windows in one batch, in float64 after the models."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(load_text("builtin:prose"), add_special_tokens=False, return_tensors="pt")["input_ids"][0, :480]
    ids = ids.view(-1, length)
    scored = slice(max(first - 1, 0), (stop or length) - 1)
    with torch.inference_mode():
        log_p, log_q = (
            AutoModelForCausalLM.from_pretrained(folder)(ids).logits[:, scored].double().log_softmax(-1).flatten(0, 1)
            for folder in (source, other)
        )
    target = ids[:, 1:][:, scored].flatten()
    return {
        "num_tokens": len(target),
        "perplexity_source": math.exp(cross_entropy(log_p, target)),
        "perplexity_converted": math.exp(cross_entropy(log_q, target)),
        "kl": kl_div(log_q, log_p, log_target=True, reduction="batchmean").item(),
        "top1_agreement": (log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item(),
    }


def test_it_equals_torch_at_every_length_and_position(tiny_source, other):
    report = evaluate_quality(tiny_source, other, **SETTINGS | {"lengths": (16, 48, 160)})
    assert [row.seqlen for row in report.rows] == [16, 48, 160]
    assert [(row.first, row.stop) for row in report.by_position] == [(start, start + 20) for start in range(0, 160, 20)]
    for row in report.rows + report.by_position:
        expected = _by_torch(tiny_source, other, row.seqlen, row.first, row.stop)
        assert {key: getattr(row, key) for key in expected} == pytest.approx(expected, rel=1e-4)
    assert sum(row.num_tokens for row in report.by_position) == report.rows[-1].num_tokens == 3 * 159
    for row in report.by_position:
        excess = (row.perplexity_ratio - 1) / (report.rows[-1].perplexity_ratio - 1)
        assert row.excess_over_mean == pytest.approx(excess)
    assert report.rows[0].kl > 0.01, "two random models ought to differ, or this test sees nothing"


def test_slices_change_nothing(tiny_source, other, monkeypatch):
    whole = evaluate_quality(tiny_source, other, **SETTINGS)
    monkeypatch.setattr(predictions, "LOGITS_PER_SLICE", 1000)
    sliced = evaluate_quality(tiny_source, other, **SETTINGS)
    for first, second in zip(whole.rows + whole.by_position, sliced.rows + sliced.by_position, strict=True):
        # Differences of the other numbers multiply their rounding.
        first, second = (row.to_dict() | {"excess_over_mean": 0, "kl_stderr": 0} for row in (first, second))
        assert [*first] == [*second] and [*second.values()] == [
            pytest.approx(value, rel=1e-6) if isinstance(value, float) else value for value in first.values()
        ]


def test_none_is_the_longest_common_window(tiny_source, tmp_path):
    short = tiny_checkpoint(tmp_path / "short", max_position_embeddings=96)
    report = evaluate_quality(short, tiny_source, **SETTINGS | {"lengths": (48, 512, None)})
    assert [row.seqlen for row in report.rows] == [48, 96]
    assert report.skipped == ("windows of 512: the models take at most 96 tokens",)
    assert {row.seqlen for row in report.by_position} == {96}


def test_a_text_by_its_path_is_written_by_its_name(tiny_source, tmp_path):
    path = tmp_path / "tëxt.txt"
    path.write_text("x" * 100)
    for texts in (path, [path]):
        report = evaluate_quality(tiny_source, tiny_source, **SETTINGS | {"texts": texts, "generation": True})
        written = write_json(tmp_path / "quality.json", kind="quality", **report.to_dict())
        found = json.loads(written.read_text())
        assert {row["text"] for key in ("rows", "by_position", "generation") for row in found[key]} == {str(path)}


def test_a_short_text_is_measured_in_short_windows(tiny_source, tmp_path):
    (tmp_path / "short").write_text("x" * 100)
    texts = [str(tmp_path / "short"), "builtin:prose"]
    report = evaluate_quality(tiny_source, tiny_source, **SETTINGS | {"texts": texts, "lengths": (48, 160)})
    assert [(row.text, row.seqlen) for row in report.rows] == [(texts[0], 48), (texts[1], 48), (texts[1], 160)]
    assert (report.rows[0].num_windows, report.rows[0].num_tokens) == (2, 2 * 47), "the text ends before max_tokens"
    assert len(report.skipped) == 1 and "in windows of 160: text has 100 tokens" in report.skipped[0]
    assert [row.seqlen for row in report.by_position if row.text == texts[0]] == [48] * 8
    with pytest.raises(ValueError, match="nothing can be measured; .* text has 100 tokens"):
        evaluate_quality(tiny_source, tiny_source, **SETTINGS | {"texts": texts[0], "lengths": (160,)})


def test_loaded_models_and_a_file_serve_as_well(tiny_source, other, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    settings = SETTINGS | {"texts": str(text)}
    by_name = evaluate_quality(tiny_source, other, **settings)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_source, other)]
    loaded = evaluate_quality(*models, tokenizer=tokenizer, **settings)
    assert loaded == by_name


def test_a_broken_model_has_infinite_perplexity(tiny_source, tokenizer):
    source, broken = (AutoModelForCausalLM.from_pretrained(tiny_source) for _ in range(2))
    broken.lm_head.weight.data.mul_(1e5)
    (row,) = evaluate_quality(source, broken, tokenizer=tokenizer, **SETTINGS).rows
    assert math.isinf(row.perplexity_converted) and math.isfinite(row.perplexity_source)


def test_scaled_logits_are_read_as_they_are(tiny_source, tokenizer):
    """Gemma caps its logits, Cohere and Granite scale them: a head by itself would give other perplexities."""

    class Scaled(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / 4
            return output

    scaled = Scaled.from_pretrained(tiny_source)
    plain = AutoModelForCausalLM.from_pretrained(tiny_source)
    (row,) = evaluate_quality(plain, scaled, tokenizer=tokenizer, **SETTINGS).rows
    plain.lm_head.weight.data.div_(4)
    (expected,) = evaluate_quality(plain, plain, tokenizer=tokenizer, **SETTINGS).rows
    assert row.perplexity_converted == pytest.approx(expected.perplexity_converted, rel=1e-6)
    assert row.perplexity_source != pytest.approx(row.perplexity_converted, rel=1e-3)


def test_no_logits_of_a_whole_window_are_ever_made(tiny_source, other, tokenizer):
    """8192 positions of 152k words are 5 GB, twice."""
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_source, other)]
    seen = []
    for model in models:
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[-2]))
    settings = SETTINGS | {"lengths": (2048,), "max_tokens": 2048}
    evaluate_quality(*models, tokenizer=tokenizer, **settings)
    assert max(seen) == 512 and sum(seen) >= 2 * 2047


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tokenizer: tokenizer.add_tokens(["<more>"]), "a tokenizer of 260 tokens .* not the source's"),
        (
            lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", Lowercase()),
            "a tokenizer that cuts the text into other tokens",
        ),
    ],
    ids=["vocabulary", "cut"],
)
def test_another_tokenizer_is_refused(change, message, tiny_source, tmp_path):
    other = tiny_checkpoint(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    change(tokenizer)
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match=f"converted has {message}"):
        evaluate_quality(tiny_source, other, **SETTINGS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": (48, 1)}, "lengths has 1; expected at least 2"),
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": 64}, "lengths is 64; expected a list"),
        ({"lengths": ["longest"]}, "lengths has 'longest'; expected at least 2"),
        ({"texts": None}, "texts is None; expected a list"),
        ({"max_tokens": 1}, "max_tokens is 1; expected at least 2"),
        ({"texts": []}, "texts is empty"),
        ({"texts": "no-such-file"}, "no-such-file"),
        ({"device": "abacus"}, "device is 'abacus'; expected cpu, cuda or a GPU by number"),
        ({"texts": "builtin:pydoc", "caches": [LatentCodes(4)]}, "texts has 'builtin:pydoc', from which bases are"),
        ({"caches": [LatentCodes(4)]}, "converted has model_type 'llama'; expected latents"),
    ],
)
def test_bad_arguments_are_named(tiny_source, changed, message):
    with pytest.raises(ValueError, match=message):
        evaluate_quality(tiny_source, tiny_source, **SETTINGS | changed)


def test_missing_inputs_are_named(tiny_source, tmp_path):
    with pytest.raises(FileNotFoundError, match="converted is '.*nowhere'; expected an existing checkpoint folder"):
        evaluate_quality(tiny_source, tmp_path / "nowhere", **SETTINGS)
    with pytest.raises(ValueError, match="tokenizer is None; expected one"):
        evaluate_quality(AutoModelForCausalLM.from_pretrained(tiny_source), tiny_source, **SETTINGS)


def test_probes_and_generation_are_measured_where_windows_are(tiny_source, other):
    settings = SETTINGS | {"texts": ["builtin:prose"], "lengths": (128, 640), "max_tokens": 640}
    small = {"generation": GenerationSettings(prompt_lengths=(16,), prompts=1, new_tokens=64, text="builtin:prose")}
    small["probes"] = ProbeSettings((640,), (), 2, text="builtin:prose")
    report = evaluate_quality(tiny_source, other, **small, **settings)
    assert {(row.probe, row.length) for row in report.probes} == {(name, 640) for name in QUESTIONS}
    assert [row.prompt_tokens for row in report.generation] == [16]
    written = report.to_dict()
    assert written["probes"][0]["retained"] is None and written["generation"][0]["num_prompts"] == 1
    assert not evaluate_quality(tiny_source, other, **settings).probes


def test_bad_probes_are_refused_before_models_run(tiny_source, tokenizer):
    model, calls = AutoModelForCausalLM.from_pretrained(tiny_source), []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="items is 0; expected at least 1"):
        evaluate_quality(model, model, tokenizer=tokenizer, probes=0, **SETTINGS)
    assert not calls


def test_default_probes_follow_lengths_and_last_text(tiny_source, other, monkeypatch):
    asked = []

    def record(*models_and_tokenizer, **keywords):
        asked.append((models_and_tokenizer[3], keywords["longest"]))
        return [], ["nothing"]

    monkeypatch.setattr(quality, "run_probes", record)
    monkeypatch.setattr(quality, "compare_generation", record)
    settings = SETTINGS | {"texts": ["builtin:pydoc", "builtin:prose"], "lengths": (32, 48)}
    report = evaluate_quality(tiny_source, other, probes=True, generation=True, **settings)
    text = {"text": "builtin:prose"}
    assert asked == [(ProbeSettings(lengths=(32, 48), **text), 4096), (GenerationSettings(**text), 4096)]
    assert report.skipped == ("nothing", "nothing")
    asked.clear()
    evaluate_quality(tiny_source, other, probes=3, **settings)
    assert asked == [(ProbeSettings(lengths=(32, 48), items=3, **text), 4096)]


def test_probes_ask_other_caches_too(tiny_source, half):
    settings = SETTINGS | {"probes": ProbeSettings((640,), (128,), 2, text="builtin:prose")}
    caches = quality.parse_caches("1", "", "bfloat16,int8")
    report = evaluate_quality(tiny_source, half, **settings | {"caches": caches})
    assert {row.cache for row in report.probes} == {row.cache for row in report.rows}
    first, *names = dict.fromkeys(row.cache for row in report.probes)
    assert len(names) == 4  # keys of the source by channel and by token, rotary keys in two modes
    found = {(row.cache, row.probe): row for row in report.probes}
    for probe in QUESTIONS:
        assert len({found[name, probe].nll_source for name in (first, *names)}) == 1
        computed, exact, codes = (found[name, probe].nll_converted for name in (first, *names[-2:]))
        assert exact == pytest.approx(computed, rel=1e-4) and codes != computed
        assert all(found[name, probe].nll_converted != computed for name in names[:2])


def test_quantised_caches_are_rows_with_their_bytes(tiny_source, half):
    caches = quality.parse_caches("8, 3", "[8,3]")
    settings = SETTINGS | {"lengths": (96,)}  # by channel, nothing is coded before the 64th token
    report = evaluate_quality(tiny_source, half, **settings | {"caches": caches})
    shares = {row.cache: row.cache_share for row in report.rows}
    kl = {row.cache: row.kl for row in report.rows}
    source = [f"source, KV {bits} bits, keys by {keys}" for bits in (8, 3) for keys in ("channel", "token")]
    latent = [f"latent {bits} bits, importance" for bits in (8, 3)]
    assert list(shares) == ["16 bits", *source, *latent]
    assert shares["16 bits"] == 0.5 and [shares[name] for name in latent] == [0.5 * 9 / 16, 0.5 * 4 / 16]
    assert kl[source[0]] < kl[source[2]] and kl[source[1]] < kl[source[3]]
    assert kl[latent[0]] == pytest.approx(kl["16 bits"], rel=0.01)
    plain = evaluate_quality(tiny_source, half, **settings)
    assert (plain.rows[0], plain.by_position) == (report.rows[0], report.by_position)


def test_kept_rotary_keys_are_rows_beside_computed_ones(tiny_source, half):
    """In 8 bits a pass over a window gives what calls over a filled cache give."""
    settings = SETTINGS | {"caches": quality.parse_caches("", "", "bfloat16, int8")}
    report = evaluate_quality(tiny_source, half, **settings)
    computed, kept, eight = (row.to_dict() for row in report.rows[:3])
    assert [row["cache"] for row in (kept, eight)] == ["rotary keys bfloat16", "rotary keys int8"]
    assert computed["cache_share"] < eight["cache_share"] < kept["cache_share"]
    assert "kl_computed" not in computed and "kl_computed" in report.columns
    assert abs(kept["kl_computed"]) < 1e-6 < 1e-5 < eight["kl_computed"] < 0.01
    model = AutoModelForCausalLM.from_pretrained(half, rotary_key_cache="int8").eval()
    ids = torch.randint(200, (2, 48))
    with torch.inference_mode():
        cache = KeptKeys(model, RotaryKeys("int8"))
        whole, filled = cache.run(model, ids).logits, LatentCache(cache.config)
        parts = [model(input_ids=part, past_key_values=filled).logits for part in ids.split(16, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="converted has model_type 'llama'; expected layout latent"):
        evaluate_quality(tiny_source, tiny_source, **settings)


def test_rotary_keys_that_the_config_keeps_are_measured(tiny_source, tokenizer, half):
    report = evaluate_quality(tiny_source, half, caches=[RotaryKeys("int8")], **SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(half, rotary_key_cache="int8").eval()
    assert evaluate_quality(tiny_source, model, **SETTINGS) == report
    assert [row.cache_share for row in report.rows] == [0.5, 0.5 + (32 + 4) / 128]


def test_codes_of_a_checkpoint_are_measured_as_they_are(tiny_source, tmp_path):
    recipe = {"preset": "minimal", "cache_ratio": 0.16, "latent.bits": 4, "calibration.tokens": 256}
    tiny.convert(str(tiny_source), tmp_path / "coded", {**recipe, "calibration.lengths": 64})
    (row,) = evaluate_quality(tiny_source, tmp_path / "coded", **SETTINGS).rows
    assert (row.cache, row.cache_share) == ("4 bits", 0.5 * 5 / 16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "coded", latent_bits=16).eval()
    (plain,) = evaluate_quality(tiny_source, model, **SETTINGS).rows
    assert plain.cache == "16 bits" and plain.kl != row.kl
    with pytest.raises(ValueError, match="converted has latent_bits 4; expected 16 to quantise latents"):
        evaluate_quality(tiny_source, tmp_path / "coded", **SETTINGS, caches=[LatentCodes(4)])


def test_shares_of_a_sliding_source_count_what_caches_hold(checkpoint_of, tmp_path):
    """A sliding layer of the source keeps one token less than its window, a converted one keeps all."""
    source = checkpoint_of("gemma3")
    tiny.convert(source, tmp_path / "half", {**tiny.SHORT, "cache_ratio": 0.5})
    codes = [KVCodes(4, "token", residual=2), LatentCodes(8)]
    report = evaluate_quality(source, tmp_path / "half", **SETTINGS | {"lengths": (48,), "caches": codes})
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "half")]
    caches = DynamicCache(config=models[0].config), LatentCache(models[1].config)
    for model, cache in zip(models, caches, strict=True):
        model(torch.randint(200, (1, 48)), past_key_values=cache)
    tokens = [layer.keys.shape[2] for layer in caches[0].layers]
    assert tokens == [8, 48, 8]
    before = sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in caches[0].layers)
    (rank,) = {layer.tensors["latent_cache"].shape[-1] for layer in caches[1].layers}
    after, latents = 3 * 48 * 2 * rank, 3 * 48 * (4 + -(-rank // 32) * 32)
    # Two kv heads, keys and values: a row of 24 elements is padded to 32 codes, and has a scale and an offset.
    coded = sum(4 * (2 * 2 * 24 + (kept - 2) * (32 // 2 + 4)) for kept in tokens)
    assert [row.cache_share * before for row in report.rows] == pytest.approx([after, coded, latents])


def test_the_standard_error_is_of_stretches(tiny_source, other):
    (row,) = evaluate_quality(tiny_source, other, **SETTINGS).rows
    windows = [
        evaluate_quality(tiny_source, other, **SETTINGS | {"max_tokens": 48 * count}).rows[0] for count in range(1, 11)
    ]
    assert windows[0].kl_stderr is None
    sums = [0.0, *(each.kl * each.num_windows for each in windows)]
    means = torch.tensor(sums, dtype=torch.float64).diff()
    assert row.kl_stderr == pytest.approx(means.std().item() / 10**0.5, rel=1e-6)


@pytest.mark.parametrize("bits", ["4,x", "9", "0", "-3"])
def test_bits_are_refused_by_name(bits):
    with pytest.raises(ValueError, match=f"kv_bits has '{bits.split(',')[-1]}'; expected whole numbers from 1 to 8"):
        quality.parse_caches(bits, "")


def test_an_unknown_cache_of_rotary_keys_is_refused_by_name():
    assert quality.parse_caches("", "", "int8, none") == [quality.RotaryKeys("int8"), quality.RotaryKeys("none")]
    with pytest.raises(ValueError, match="rotary_key_cache has 'float8'; expected some of none, bfloat16, int8, auto"):
        quality.parse_caches("", "", "bfloat16,float8")


class TargetRank(Metric):
    """Rank of the next token, by the converted model; and the largest."""

    columns: ClassVar = {"rank": "rank", "worst": "worst rank"}

    def __init__(self):
        self.slices = []

    def measure(self, at):
        self.slices.append(len(at.targets))
        logits = at.converted_logits
        return {"rank": (logits > logits.gather(1, at.targets[:, None])).sum(-1)}

    def reduce(self, values):
        return super().reduce(values) | {"worst": values["rank"].max().item()}


def test_own_metrics_are_columns_of_every_row(tiny_source, other, tokenizer):
    metric, plain = TargetRank(), evaluate_quality(tiny_source, other, **SETTINGS)
    report = evaluate_quality(tiny_source, other, metrics=[metric], **SETTINGS)
    ids = tokenizer(load_text("builtin:prose"), add_special_tokens=False, return_tensors="pt")["input_ids"][0, :480]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(other)(ids.view(10, 48)).logits[:, :-1]
    order = logits.argsort(-1, descending=True)
    ranks = (order == ids.view(10, 48)[:, 1:, None]).int().argmax(-1).double()
    for row in (*report.rows, *report.by_position):
        here = ranks[:, max(0, row.first - 1) : row.stop - 1]
        assert row.metrics == {"rank": pytest.approx(here.mean().item()), "worst": here.max().item()}
        assert row.to_dict()["rank"] == row.metrics["rank"] and "metrics" not in row.to_dict()
    assert "worst rank" in report._repr_html_() and sum(metric.slices) == 470
    assert [replace(row, metrics={}) for row in report.rows + report.by_position] == [*plain.rows, *plain.by_position]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"columns": {"kl": "KL"}}, "Changed has column 'kl', which exists"),
        ({"columns": {"num_tokens": ""}}, "Changed has column 'num_tokens', which exists"),
        ({"measure": lambda self, at: {"rank": at.source_logits}}, r"measure gave 'rank' of shape \[1, 259\]"),
        ({"reduce": lambda self, values: {"rank": 0.0}}, r"reduce gave \['rank'\]; expected its columns"),
    ],
)
def test_wrong_metrics_are_refused_by_name(tiny_source, changed, message):
    metric = type("Changed", (TargetRank,), changed)()
    with pytest.raises(ValueError, match=message):
        evaluate_quality(tiny_source, tiny_source, metrics=[metric], **SETTINGS)


def test_a_metric_that_is_none_is_refused(tiny_source):
    with pytest.raises(TypeError, match="metrics has 'kl'; expected instances of mha2mla.eval.Metric"):
        evaluate_quality(tiny_source, tiny_source, metrics=["kl"], **SETTINGS)
