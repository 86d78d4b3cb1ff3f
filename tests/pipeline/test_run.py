"""A run does what its recipe says, leaves its source alone, and publishes nothing of a source that changes."""

import io
import itertools
import math
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mha2mla
from mha2mla.conversion.destination import DestinationError
from mha2mla.conversion.latent.rules import LowRankRule
from mha2mla.conversion.recipe import Recipe, selections
from mha2mla.conversion.source.files import CheckpointReader, SourceChangedError
from mha2mla.conversion.target import LAYOUTS
from mha2mla.pipeline import prepare, run, verify
from mha2mla.pipeline.check import HeldOut
from mha2mla.terminal import progress_bar, split, whole_bar
from tests.conversion import tiny
from tests.conversion.tiny import SHORT, convert, relative
from tests.few import few
from tests.folders import WEIGHTS, edit_json, edit_weights, flip_bit, read_json

LOW_RANK_NAMES = tuple(LowRankRule.names())
RULES = [(layout, selection) for layout in LAYOUTS for selection in selections(layout)]
# Each selection once, by the low-rank rules in turn; then all of them.
RECIPES = [(*rule, LOW_RANK_NAMES[i % len(LowRankRule.names())]) for i, rule in enumerate(RULES)]
RECIPES += [(*rule, low_rank) for rule in RULES for low_rank in LowRankRule.names() if (*rule, low_rank) not in RECIPES]


@few("layout, selection, low_rank", RECIPES, count=len(RULES))
def test_every_recipe_runs_and_reloads_as_measured(layout, selection, low_rank, source, tmp_path):
    recipe = tiny.Recipe(layout=layout, rope_selection=selection, latent_rule=low_rank, **SHORT)
    held_out = tiny.some_tokens(2, 32)
    report = convert(source, tmp_path / "out", recipe, evaluation=held_out)
    expected, actual = (tiny.logits(path, held_out)[:, :-1] for path in (source, tmp_path / "out"))
    assert relative(actual, expected) == pytest.approx(report.parity.logits_relative_error, rel=1e-3)
    loss = torch.nn.functional.cross_entropy(actual.flatten(0, 1), held_out[:, 1:].flatten())
    assert report.parity.perplexity_converted == pytest.approx(float(loss.exp()), rel=1e-3)
    assert report.cache_ratio <= 0.5


@pytest.mark.parametrize(
    ("arguments", "preset", "says"),
    [
        ({}, "quick", "quick, chosen by auto: without a GPU, no gradient steps"),
        ({"recipe": {"cache_ratio": 0.25}, "preset": "quick"}, "quick", "quick, as asked for; with cache_ratio=0.25"),
        ({"recipe": {"preset": "minimal", "layout": "shared"}}, "minimal", "minimal, as asked for; with layout='sha"),
    ],
)
def test_convert_takes_the_preset_that_it_is_told_or_chooses_and_says_so(arguments, preset, says, source, tmp_path):
    arguments = {"recipe": None, "calibration": tiny.some_tokens(64, 32), "evaluation_tokens": 64, **arguments}
    report = convert(source, tmp_path / "out", **arguments)
    given = {**(arguments["recipe"] or {}), "preset": preset}
    assert report.recipe == mha2mla.Recipe.from_dict(given).to_dict()
    assert report.preset.startswith(says) and report.preset in str(report)
    assert f"Preset: {report.preset}." in (tmp_path / "out" / "README.md").read_text()
    assert read_json(tmp_path / "out" / "conversion.json")["preset"] == report.preset


def test_overwriting_takes_no_file_that_the_conversion_did_not_write(source, tmp_path):
    """Though its name is one that could have come with a source."""
    for overwrite in (False, True):
        convert(source, tmp_path / "out", tiny.FULL, overwrite=overwrite)
    (tmp_path / "out" / "vocab_counts.csv").write_text("mine")
    with pytest.raises(DestinationError, match="holds vocab_counts.csv, which no conversion writes"):
        convert(source, tmp_path / "out", tiny.FULL, overwrite=True)


def test_another_seed_gives_other_weights(source, tmp_path):
    convert(source, tmp_path / "one")
    convert(source, tmp_path / "two", tiny.Recipe(calibration_seed=1, **SHORT))
    one, two = ((tmp_path / name / WEIGHTS).read_bytes() for name in ("one", "two"))
    assert one != two


def test_the_written_dtype_can_be_chosen(source, tmp_path):
    recipe = tiny.Recipe(cache_ratio=1.0, **SHORT)
    report = convert(source, tmp_path / "out", recipe, dtype=torch.bfloat16)
    assert report.weights_dtype == "bfloat16" and 1e-4 < report.parity.logits_relative_error < 0.06
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_no_tensor_is_narrowed_where_dtypes_differ(tmp_path):
    source, wide = (
        tiny.checkpoint(tmp_path / "source", "qwen3", attention_bias=True),
        ("norm", "bias", "1.self_attn.q_"),
    )
    names = [name for name in load_file(source / WEIGHTS) if not any(part in name for part in wide)]
    edit_weights(source, dict.fromkeys(names, lambda tensor: tensor.bfloat16()))
    report = convert(source, tmp_path / "out", tiny.FULL)
    made = {name: tensor.dtype for name, tensor in load_file(tmp_path / "out" / WEIGHTS).items()}
    dtypes = [made[f"model.layers.{name}"] for name in ("0.self_attn.q_norm.weight", "0.self_attn.v_b_proj")]
    assert dtypes == [torch.float32, torch.bfloat16] and report.weights_dtype == "float32"
    assert report.parity.logits_relative_error < 1e-5


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float64])
def test_layers_can_run_in_another_dtype(compute_dtype, source, tmp_path):
    usual = convert(source, tmp_path / "usual")
    report = convert(source, tmp_path / "out", compute_dtype=compute_dtype)
    assert report.weights_dtype == "float32"
    close = 0.2 if compute_dtype is torch.bfloat16 else 1e-3
    assert report.parity.perplexity_source == pytest.approx(usual.parity.perplexity_source, rel=close)
    assert report.parity.perplexity_converted == pytest.approx(usual.parity.perplexity_converted, rel=close)


def replace_weights(folder):
    tiny.model(seed=9).save_pretrained(folder / "new")
    os.replace(folder / "new" / "model.safetensors", folder / "model.safetensors")


def cut_weights(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 4096)


def flip_a_bit_in_place(folder):
    path = folder / "model.safetensors"
    before = path.stat()
    flip_bit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_the_tokenizer(folder):
    edit_json(folder / "tokenizer_config.json", model_max_length=17)


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
    ranks = {"latent.ranks": "measured"} if name == "choose_layer_ranks" else {}
    with pytest.raises(SourceChangedError, match="changed during the conversion"):
        convert(source, tmp_path / "out", SHORT | ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


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


def test_convert_reads_a_key_projection_three_times(source, tmp_path):
    """To check it, to take statistics and convert by, and to verify. A search, and bases of codes, read it again."""
    reads, code = [], CheckpointReader._finite.__code__

    def count(frame, event, _):
        if event == "call" and frame.f_code is code:
            reads.append(frame.f_locals["name"])

    sys.setprofile(count)
    try:
        convert(source, tmp_path / "out", {**SHORT, "preset": "quick", "latent.bits": 16})
    finally:
        sys.setprofile(None)
    assert reads.count("model.layers.0.self_attn.k_proj.weight") == 3


@pytest.mark.parametrize(
    "case", ["gemma3", "glm4-no-biases", "olmo3-yarn", "phi3-partial-longrope", "qwen3-moe-sliding"]
)
def test_the_default_takes_every_family(case, checkpoint_of, tmp_path):
    """Rank and bits by layer: with experts, windows, two tables, norms of queries and keys, partial rotation."""
    texts = {"calibration": tiny.some_tokens(32, 32), "evaluation": tiny.some_tokens(2, 32)}
    report = convert(checkpoint_of(case), tmp_path / "mla", {"preset": "quick", "cache_ratio": 0.25}, **texts)
    assert {row["latent_bits"] for row in report.layers} <= {2, 3, 4, 8} and 0.1 < report.cache_ratio <= 0.25
    assert not any(row["fallback"] for row in report.layers) and report.parity.kl < 1


@pytest.mark.parametrize(("family", "given"), [("llama", {"attention_bias": True}), ("qwen3", {}), ("gemma3_text", {})])
def test_a_folded_basis_changes_no_prediction(family, given, tmp_path):
    """In 16 bits: of the same layers, which an unfolded conversion of the same rank writes."""
    source, held_out = tiny.checkpoint(tmp_path / "source", family, **given), tiny.some_tokens(2, 32)
    keys = {**SHORT, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "layout": "latent"}
    plain = convert(source, tmp_path / "plain", keys, evaluation=held_out)
    coded = convert(source, tmp_path / "coded", {**keys, "latent.bits": 4}, evaluation=held_out)
    expected = tiny.logits(tmp_path / "plain", held_out)
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "coded", latent_bits=16)
    assert relative(folded(held_out).logits, expected) < 1e-4
    lost = relative(tiny.logits(tmp_path / "coded", held_out), expected)
    assert lost > 1e-3 and plain.parity.kl != coded.parity.kl
    assert (coded.cache_ratio, plain.cache_ratio) == (plain.cache_ratio * 5 / 16, plain.cache_ratio)
    assert coded.geometry.has_codes and coded.geometry.kv_lora_rank == 32
    weights, written = load_file(tmp_path / "plain/model.safetensors"), load_file(tmp_path / "coded/model.safetensors")
    assert written.keys() - weights.keys() == {
        f"model.layers.{i}.self_attn.latent_centers" for i in range(coded.num_layers)
    }
    changed = {name.rpartition("self_attn.")[2] for name in weights if not torch.equal(weights[name], written[name])}
    assert "v_b_proj" in changed and not any(name.startswith(("q_", "o_", "model")) for name in changed)


@pytest.mark.parametrize(
    ("keys", "rank", "full"),
    [({"cache_ratio": 0.2}, 32, False), ({}, 64, True), ({"cache_ratio": 0.2, "latent.bits": 3}, 32, False)],
)
def test_a_ratio_counts_the_bytes_of_codes(keys, rank, full, source, tmp_path):
    """Of 64 cached elements: 32 in 4 bits take 0.156 of the bytes, all of them 0.3125."""
    report = convert(source, tmp_path / "out", {**SHORT, "latent.bits": 4, **keys})
    assert (report.geometry.kv_lora_rank, report.geometry.is_full_rank) == (rank, full)


def test_codes_of_full_rank_of_a_bfloat16_source(tmp_path):
    """Weights in the basis of codes are not the source's: they are rounded once more."""
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path / "source")
    tiny.tokenizer().save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", {**SHORT, "latent.bits": 8, "cache_ratio": 1.0})
    assert report.geometry.is_full_rank and report.weights_dtype == "bfloat16"
    assert report.parity.logits_relative_error < 0.03


# Longest window compared on, and the seconds of every step of every bar of every stage, in three conversions of
# SmolLM2-135M on two cores, as their logs and reports have them. The last was calibrated on a text that lay there.
LOGGED = {
    "3 bits": (
        *(8192, [[1.0]], [[0.119] * 575] * 2, [], [[15.0] * 4 + [20.1] * 2 + [8.7] * 24]),
        *([[2.9] * 16], [[0.1] * 30], [[0.4] * 30, [6.2] * 30]),
    ),
    "4 bits": (
        *(8192, [[1.0]], [[0.138] * 575] * 2, [], [[15.8] * 30]),
        *([[6.2] * 16], [[0.1] * 30], [[0.9] * 30, [10.8] * 30]),
    ),
    "demo": (1024, [[1.0]], [], [], [[2.3] * 30], [[1.1] * 16], [[0.03] * 30], [[0.16] * 30, [0.14] * 30]),
}


@pytest.mark.parametrize("name", LOGGED)
def test_time_left_is_near_the_truth(name, monkeypatch):
    """From 5 s on: within 2.5 times while text is written, else within 1.6 times."""
    length, *stages = LOGGED[name]
    held_out = [HeldOut("short", torch.zeros(4, 512)), HeldOut("long", torch.zeros(1, length))]
    recipe, _ = Recipe.choose({"preset": "quick", "cache_ratio": 0.125, "latent.bits": 3}, "cpu")
    now, end = 0.0, sum(sum(steps) for stage in stages for steps in stage)
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with whole_bar("converting", show=True) as bar:
        for stage, span in zip(stages, split(bar, *run.stage_shares(recipe, held_out)), strict=True):
            if not stage:
                span.skip()
                continue
            shares = [each.work for each in held_out] if stage is stages[-1] else [1.0] * len(stage)
            for steps, part in zip(stage, split(span, *shares), strict=True):
                for seconds in progress_bar(steps, show=part, desc="", unit=""):
                    now += seconds
                    if now >= 5 and end - now >= 10:
                        minutes, rest = str(bar.bar).partition(" left")[0].rpartition(", ")[2].split(":")
                        ratio, most = (60 * int(minutes) + int(rest)) / (end - now), 2.5 if stage is stages[1] else 1.6
                        assert 1 / most < ratio < most, str(bar.bar)
