"""Speeds of the attention op and of a decode step: right first, timed second."""

import copy
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from mha2mla.eval import attention_latency, decode_step_latency, latency, model_latency, op_latency
from mha2mla.eval.latency import _DecodeStep, fitting_batches, model_rows
from mha2mla.eval.measurement import COLUMNS, NOT_CHECKED, LatencyRows, add_speed_ups, in_float64
from mha2mla.eval.op_latency import (
    AttentionInputs,
    _judge_source,
    flash_attention_3_baseline,
    gqa_decode_baseline,
    sdpa_baseline,
)
from mha2mla.eval.report import print_table
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.modeling.config import cache_bytes, layer_token_bytes
from tests.conversion import tiny
from tests.modeling import models

QUICK = {"min_run_time": 0.002}
ALL_LEVELS = {
    "levels": ("op", "step", "prefill", "e2e"), "batch_sizes": [2], "seqlens": [33], "new_tokens": 3, "device": "cpu",
    **QUICK,
}  # fmt: skip
GEOMETRY = MLAGeometry(6, 3, 24, 8, 8, 16, 3)
LATENT_GEOMETRY = MLAGeometry(6, 1, 24, 32, 16, 16, 3, rope_from_latent=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("geometry", "cached"), [(GEOMETRY, 24 + 3 * 8), (LATENT_GEOMETRY, 24)])
def test_attention_rows(geometry, cached, dtype):
    rows = attention_latency(geometry, batch_sizes=(1, 3), seqlens=(1, 64, 65), dtype=dtype, **QUICK)
    assert len(rows) == 2 * 3 * 4
    for row in rows:
        if row["implementation"] in ("FlashAttention-3", "gqa_decode"):
            assert row["status"].startswith("missing: ") and "us_p50" not in row
            continue
        assert row["status"] == "ok", row
        assert 0 < row["us_p20"] <= row["us_p50"] * (1 + 1e-12) <= row["us_p80"] * (1 + 2e-12)
        width = 3 * 2 * 16 if row["implementation"] == "torch SDPA" else cached
        assert row["cache_bytes"] == row["batch"] * row["seqlen"] * width * dtype.itemsize
        assert row["gb_per_s"] == pytest.approx(row["cache_bytes"] / row["us_p50"] / 1e3)
    assert {"mla_decode (reference)", "torch SDPA"} <= {row["implementation"] for row in rows}
    keys = {"us_p20", "us_p50", "us_p80", "gb_per_s", "error", "status", "cache_bytes"}
    assert keys <= COLUMNS.keys() & set().union(*rows)


CODES = replace(LATENT_GEOMETRY, kv_lora_rank=64, latent_bits=4)


@pytest.mark.parametrize(
    ("geometry", "token", "status"),
    [
        (CODES, 4 + 64 // 2, "ok"),
        (CODES.with_stored_keys, 4 + 64 // 2 + 2 * 32, "ok"),
        (LATENT_GEOMETRY.with_key_codes, 2 * 24 + 32 + 4, "ok"),
        (replace(CODES, kv_lora_rank=40), None, "missing: no kernel reads these codes"),
        (replace(CODES, kv_lora_rank=40).with_stored_keys, None, "missing: no kernel reads these codes"),
    ],
)
def test_attention_over_codes_reads_their_bytes(geometry, token, status):
    (row,) = attention_latency(geometry, batch_sizes=(2,), seqlens=(65,), baselines={}, **QUICK)
    assert row["status"].startswith(status) and (token is None or row["cache_bytes"] == 2 * 65 * token)


def test_a_wrong_baseline_gets_no_speed():
    def wrong(change):
        return lambda inputs: lambda: change(sdpa_baseline(inputs)())

    baselines = {
        "wrong": wrong(lambda right: right * 1.01),
        "nan": wrong(lambda right: torch.full_like(right, math.nan)),
        "absent": lambda inputs: "not built for this machine",
    }
    rows = attention_latency(GEOMETRY, seqlens=(64,), dtype=torch.float32, baselines=baselines, **QUICK)
    by_name = {row["implementation"]: row for row in rows}
    assert by_name["wrong"]["status"].startswith("wrong: relative error ")
    assert "are NaN or inf where float64 is finite" in by_name["nan"]["status"]
    assert by_name["absent"]["status"] == "missing: not built for this machine"
    for name in baselines:
        assert "us_p50" not in by_name[name] and "gb_per_s" not in by_name[name]


def test_a_refusing_backend_is_missing_with_its_reason():
    rows = attention_latency(GEOMETRY, dtype=torch.float32, backend="tilelang", baselines={}, **QUICK)
    assert [row["implementation"] for row in rows] == ["mla_decode (tilelang)"]
    assert rows[0]["status"].startswith("missing: ") and len(rows[0]["status"]) > len("missing: ")


def test_absent_baselines_say_why():
    inputs = AttentionInputs(*(torch.zeros(1, 1, 1, 8) for _ in range(3)), 1.0)
    assert "CUDA" in flash_attention_3_baseline(inputs)
    assert "float32" in gqa_decode_baseline(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [1, 64, 129])
def test_gqa_baseline_is_the_sources_attention(seqlen):
    geometry = MLAGeometry(6, 2, 24, 8, 8, 64, 2)
    inputs = AttentionInputs.random(geometry, 2, seqlen, 0.125, torch.bfloat16, torch.device("cuda"), seed=0)
    assert _judge_source(gqa_decode_baseline(inputs)(), inputs).ok


@pytest.mark.parametrize(
    ("geometry", "batch", "seqlen"),
    [
        (MLAGeometry(4, 2, 24, 8, 8, 16, 2), 8, 2048),  # long sums: torch's blocks happen to lose a third of SDPA's
        (MLAGeometry(8, 4, 128, 8, 8, 8, 4), 8, 3),  # large scores: their rounding is a weight's relative error
        (MLAGeometry(4, 1, 120, 24, 8, 8, 1), 2, 2048),
    ],
    ids=["8x2048", "large-scores", "2x2048"],
)
def test_float32_rounding_is_not_called_wrong(geometry, batch, seqlen):
    options = {"batch_sizes": (batch,), "seqlens": (seqlen,), "dtype": torch.float32, "min_run_time": 1e-6}
    for seed in range(4):
        rows = attention_latency(geometry, seed=seed, **options)
        assert {row["status"] for row in rows if not row["status"].startswith("missing: ")} == {"ok"}


def test_decode_step_rows(tiny_source, tiny_converted):
    folders = {"source": tiny_source, "converted": tiny_converted}
    models = {name: AutoModelForCausalLM.from_pretrained(folder) for name, folder in folders.items()}
    rows = decode_step_latency(models, batch_sizes=(1, 3), seqlens=(2, 40, 70), prefill_chunk=33, **QUICK)
    assert [(row["implementation"], row["batch"], row["seqlen"]) for row in rows] == [
        (name, batch, seqlen) for name in models for batch in (1, 3) for seqlen in (2, 40, 70)
    ]
    for row in rows:
        assert row["status"] == "ok", row
        assert row["ms_per_token"] == row["us_p50"] / 1e3 > 0
    half = [row["cache_bytes"] for row in rows]
    assert all(after <= before / 2 for before, after in zip(half[:6], half[6:], strict=True))
    assert models["converted"].config.attention_backend is None, "the check leaves the backend as it was"


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        *itertools.product(["per-group", "latent", "latent, keys kept"], [None, "mla_fp8_reference"]),
        ("latent, keys in 8 bits", None),
    ],
)
def test_cached_bytes_count_codes_scales_and_rotary_keys(layout, backend, tiny_converted, tmp_path):
    """A latent of 8 bits is d_c bytes and a float32 scale, and so is a key."""
    folder = tiny_converted
    if layout != "per-group":
        folder = tmp_path / "latent"
        tiny.convert(tiny_converted, folder, {"layout": "latent"})
    model = MHA2MLAForCausalLM.from_pretrained(folder, attention_backend=backend)
    modes = {"latent, keys kept": "bfloat16", "latent, keys in 8 bits": "int8"}
    model.config.rotary_key_cache = modes.get(layout, "none")
    (row,) = decode_step_latency({"converted": model}, batch_sizes=(2,), seqlens=(40,), **QUICK)
    geometries = [model.config.layer_geometry(layer) for layer in range(2)]
    rotary = sum(0 if layout == "latent" else 4 * each.num_rope_heads * each.qk_rope_head_dim for each in geometries)
    rotary = rotary // 4 + 2 * 4 if layout.endswith("8 bits") else rotary
    latent = sum(each.kv_lora_rank for each in geometries)
    per_token = rotary + (4 * latent if backend is None else latent + 2 * 4)
    assert row["cache_bytes"] == 2 * 40 * per_token
    assert rotary + 4 * latent == model.config.cache_bytes_per_token(4)
    assert row["status"] == "ok" or backend is not None or layout.endswith("8 bits")  # eight bits are no rounding of 32


@pytest.mark.parametrize("check", [True, False])
def test_a_sliding_source_reads_its_windows(check, monkeypatch):
    """And holds them in its static cache; ``generate`` holds a token less of each."""
    monkeypatch.setattr(latency, "median_seconds", lambda model, prompts, new_tokens, runs: new_tokens)
    model = tiny.model("gemma3_text", **tiny.GEMMA3)  # two of three layers have a window of 9
    rows = decode_step_latency({"source": model}, batch_sizes=(2,), seqlens=(5, 40), check=check, **QUICK)
    rows += model_rows(
        {"source": model}, levels=["e2e"], batch_sizes=(2,), seqlens=(37,), new_tokens=4, check=check, runs=1
    )
    add_speed_ups(rows, rate=1e9)
    token = 2 * 2 * 2 * 24 * 4  # of two sequences a token's keys and values of two heads in float32, one layer
    assert [row["read_bytes"] for row in rows] == [3 * 5 * token, (40 + 2 * 9) * token, (40 + 2 * 9) * token]
    assert [row["cache_bytes"] for row in rows] == [3 * 5 * token, (40 + 2 * 9) * token, (40 + 2 * 8) * token]
    for row in rows:
        assert row["status"] == ("ok" if check else NOT_CHECKED)
        assert row["limit_us"] == pytest.approx((row["read_bytes"] + row["weight_bytes"]) / 1e3)


def test_a_sliding_conversion_reads_its_windows():
    """A latent cache holds every token; its limit is the time to read what the new token sees."""
    model = models.mla_model("some sliding")
    (row,) = decode_step_latency({"converted": model}, batch_sizes=(2,), seqlens=(40,), **QUICK)
    full, sliding = layer_token_bytes(model.config, 4)
    assert row["cache_bytes"] == 2 * 40 * (full + sliding)
    assert row["read_bytes"] == 2 * (40 * full + models.WINDOW * sliding)


def test_batches_fit_by_what_is_cached(monkeypatch):
    """On a GPU of so many bytes."""
    models_of = {"source": models.source_model("mistral-sliding"), "converted": models.mla_model("sliding")}
    for name, model in models_of.items():
        weights = sum(each.nbytes for each in model.parameters())
        room = weights + 8 * cache_bytes(model.config, 1000, 4)
        monkeypatch.setattr(type(model), "device", torch.device("cuda"))
        properties = SimpleNamespace(total_memory=math.ceil(room / 0.9) + 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert fitting_batches(model, 1000) == [1, 8], name


def test_a_further_token_is_the_rest_of_a_call(tiny_converted, monkeypatch):
    """A call that makes n tokens takes n - 1 steps longer than one that makes one."""
    calls = {1: 2.0, 5: 2.0 + 4 * 0.25}  # seconds by new tokens
    monkeypatch.setattr(latency, "median_seconds", lambda model, prompts, new_tokens, runs: calls[new_tokens])
    model = MHA2MLAForCausalLM.from_pretrained(tiny_converted)
    (row,) = model_rows({"converted": model}, levels=["e2e"], batch_sizes=(2,), seqlens=(9,), new_tokens=5)
    assert (row["first_token_ms"], row["ms_per_token"], row["us_p50"]) == (2000.0, 250.0, 250_000.0)
    assert row["tokens_per_s"] == 2 / 0.25


@pytest.mark.parametrize("check", [True, False])
def test_noise_is_no_speed(tiny_source, tiny_converted, monkeypatch, check):
    """Two tokens may take less time than one, once; a token then took no time, or less."""
    calls = {1: 2.0, 2: 1.75}
    monkeypatch.setattr(latency, "median_seconds", lambda model, prompts, new_tokens, runs: calls[new_tokens])
    options = {"levels": ["e2e"], "batch_sizes": [1], "seqlens": [9], "new_tokens": 2, "device": "cpu", "check": check}
    for row in model_latency(tiny_source, tiny_converted, **options, **QUICK):
        assert (row["status"], row["first_token_ms"]) == ("ok" if check else NOT_CHECKED, 2000.0)
        assert not {"us_p50", "ms_per_token", "tokens_per_s", "speed_up", "of_limit"} & row.keys()


class WrongStep:
    """Reads another token than it was given, but only when it decodes with a cache."""

    def forward(self, input_ids, past_key_values=None, **keywords):
        wrong = past_key_values is not None and input_ids.shape[1] == 1
        return super().forward(input_ids=input_ids ^ int(wrong), past_key_values=past_key_values, **keywords)


class WrongLlama(WrongStep, LlamaForCausalLM):
    pass


class WrongMLA(WrongStep, MHA2MLAForCausalLM):
    pass


@pytest.mark.parametrize(
    ("folder", "model"), [("tiny_source", WrongLlama), ("tiny_converted", WrongMLA)], ids=["source", "converted"]
)
def test_a_wrong_cached_step_gets_no_speed(folder, model, request):
    wrong = model.from_pretrained(request.getfixturevalue(folder))
    (row,) = decode_step_latency({"model": wrong}, seqlens=(40,), **QUICK)
    assert row["status"].startswith("wrong: ") and "us_p50" not in row


class RoundingLlama(LlamaForCausalLM):
    """Errs as a large bfloat16 model does: of each token in one direction, by a normal number."""

    def forward(self, input_ids, **keywords):
        made = super().forward(input_ids=input_ids, **keywords)
        if made.logits.dtype != torch.float64:
            made.logits *= 1 + 1e-2 * torch.randn(*made.logits.shape[:2], 1)
        return made


def test_a_lucky_yardstick_makes_no_step_wrong(tiny_source):
    torch.manual_seed(0)
    model = {"source": RoundingLlama.from_pretrained(tiny_source)}
    levels = {"levels": ("step", "prefill"), "min_run_time": 1e-6}
    rows = [row for seed in range(6) for row in model_rows(model, seqlens=(40,), seed=seed, **levels)]
    assert {row["status"] for row in rows} == {"ok"} and len(rows) == 12


def test_model_latency_joins_levels_and_saves_rows(tiny_source, tiny_converted, monkeypatch):
    monkeypatch.setattr(latency, "median_seconds", lambda model, prompts, new_tokens, runs: new_tokens)
    saved = []
    keep = {"save": lambda rows: saved.append([dict(row) for row in rows])}
    rows = model_latency(tiny_source, tiny_converted, **keep, **ALL_LEVELS)
    assert [row["op"] for row in rows if row["implementation"] == "converted"] == ["decode step", "prefill", "generate"]
    assert all(row["status"] == "ok" or row["status"].startswith("missing: ") for row in rows)
    assert [len(each) for each in saved] == list(range(1, len(rows) + 1)) and saved[-1] == rows
    by_name = {(row["op"], row["implementation"]): row for row in rows}
    step, source = by_name["decode step", "converted"], by_name["decode step", "source"]
    assert step["speed_up"] == pytest.approx(source["us_p50"] / step["us_p50"])
    assert step["of_limit"] == pytest.approx(step["limit_us"] / step["us_p50"]) and "speed_up" not in source
    assert step["limit_us"] > by_name["attention", "mla_decode (reference)"]["limit_us"] > 0
    ours = by_name["generate", "converted"]
    assert ours["tokens_per_s"] == pytest.approx(2e3 / ours["ms_per_token"]) and ours["first_token_ms"] > 0
    # In Python a line a row, in a notebook a table.
    line = f"decode step, converted, 2 x 33: {step['us_p50']:,.1f} µs, {step['speed_up']:.3g} x the source"
    assert line in str(rows).splitlines() and len(str(rows).splitlines()) == len(rows)
    assert rows._repr_html_().count("<tr>") == len(rows) + 1


def test_a_loaded_model_is_left_as_it_was(tiny_source):
    """With keys kept from then on, it would cache twice the bytes."""
    options = {"levels": ["step"], "batch_sizes": [1], "seqlens": [9], "rotary_key_cache": "bfloat16", "device": "cpu"}
    model = models.mla_model("latent")
    model.config.attention_backend = "mla_reference"
    _, ours = model_latency(tiny_source, model, **options, **QUICK)
    assert ours["status"] == "ok" and ours["cache_bytes"] > 9 * model.config.cache_bytes_per_token(4)
    assert (model.config.attention_backend, model.config.rotary_key_cache) == ("mla_reference", "none")
    source = LlamaForCausalLM.from_pretrained(tiny_source)
    with pytest.raises(ValueError, match="converted has model_type 'llama'"):
        model_latency(source, source, **options)
    assert not {"attention_backend", "rotary_key_cache"} & vars(source.config).keys()


@pytest.mark.parametrize("folder", ["tiny_source", "tiny_converted"])
def test_a_cache_filled_with_noise_is_read_to_its_end(folder, request):
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(folder))
    ids = torch.arange(40).expand(2, -1)
    step = _DecodeStep.filled(model, ids, 8)
    before = step()
    assert torch.equal(step(), before) and before.isfinite().all()
    layer = step.cache.layers[0]
    if hasattr(layer, "tensors"):
        next(iter(layer.tensors.values())).flatten(0, 1)[38].add_(1.0)  # the newest token before the step's
    else:
        layer.values[0, :, 38].add_(1.0)
    after = step()
    assert not torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])


def test_too_little_memory_is_a_row(tiny_source, monkeypatch):
    """No copy in float64, no lost rows: what fits is measured, what does not says so."""

    def greedy(inputs: AttentionInputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total of 8 GiB.")

    rows = attention_latency(
        GEOMETRY, dtype=torch.float32, baselines={"greedy": greedy, "sdpa": sdpa_baseline}, **QUICK
    )
    assert [row["status"] for row in rows] == ["out of memory: Tried to allocate 20.00 GiB", "ok", "ok"]
    model = AutoModelForCausalLM.from_pretrained(tiny_source)
    forward = type(model).forward

    def too_long(self, input_ids=None, **keywords):
        if input_ids.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return forward(self, input_ids=input_ids, **keywords)

    monkeypatch.setattr(type(model), "forward", too_long)
    for level in ("step", "prefill"):
        rows = list(model_rows({"source": model}, levels=(level,), batch_sizes=(2, 3), seqlens=(9,), **QUICK))
        assert [row["status"].partition(":")[0] for row in rows] == ["ok", "out of memory"]


def test_too_little_memory_of_a_cpu_is_a_row():
    def greedy(inputs: AttentionInputs):
        return lambda: torch.empty(2**55, dtype=torch.uint8)

    def broken(inputs: AttentionInputs):
        raise RuntimeError("something else")

    short = {"batch_sizes": (1,), "seqlens": (9,), "dtype": torch.float32, **QUICK}
    row, ours = attention_latency(GEOMETRY, baselines={"greedy": greedy}, **short)
    assert row["status"].startswith("out of memory: DefaultCPUAllocator: can't allocate memory: you tried to")
    assert "us_p50" not in row and ours["status"] == "ok"
    with pytest.raises(RuntimeError, match="something else"):
        attention_latency(GEOMETRY, baselines={"broken": broken}, **short)


def test_weights_without_room_are_rows(tiny_converted):
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total of 8 GiB.")

    models = {"source": too_large, "converted": MHA2MLAForCausalLM.from_pretrained(tiny_converted)}
    grid = {"batch_sizes": (1, 2), "seqlens": (8,)}
    rows = list(model_rows(models, levels=("step", "prefill"), **grid, **QUICK))
    rows += model_rows(models, levels=["e2e"], new_tokens=2, **grid)
    refused = [row for row in rows if row["implementation"] == "source"]
    assert {row["status"] for row in refused} == {"out of memory: Tried to allocate 9.00 GiB, for weights"}
    assert [(row["op"], row["batch"]) for row in refused] == [
        (op, batch) for op in ("decode step", "prefill", "generate") for batch in (1, 2)
    ]
    assert [row["status"] for row in rows if row["implementation"] == "converted"] == ["ok"] * 6
    with pytest.raises(ValueError, match="converted does not fit into the memory of cpu: out of memory: Tried"):
        model_latency(too_large, too_large, device="cpu")


def test_float64_needs_no_copy_and_leaves_no_trace(tiny_source, tiny_converted):
    ids = torch.arange(20)[None]
    for folder in (tiny_source, tiny_converted):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        expected = copy.deepcopy(model).double()(input_ids=ids, use_cache=False).logits
        before = {name: (id(each), each.detach().clone()) for name, each in model.named_parameters()}
        with in_float64(model):
            found = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(found, expected) and found.dtype == torch.float64
        for name, each in model.named_parameters():
            assert id(each) == before[name][0] and torch.equal(each, before[name][1])
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        with pytest.raises(IndexError), in_float64(model):
            model(input_ids=ids + model.config.vocab_size, use_cache=False)
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_float64_reaches_routed_experts():
    """By default they are one grouped product, of narrower numbers alone."""
    model, ids = tiny.model("mixtral", num_local_experts=4).bfloat16(), torch.arange(20)[None]
    usual, exact = model.config._experts_implementation, copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    with in_float64(model):
        found = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(found, exact(input_ids=ids, use_cache=False).logits)
    assert model.config._experts_implementation == usual != "eager"
    (row,) = model_rows({"source": model.float()}, levels=["step"], seqlens=(9,), **QUICK)
    assert row["status"] == "ok"


def test_a_step_reads_the_experts_that_its_tokens_go_to(checkpoint_of, tmp_path):
    """Two of four for one token; three quarters of them for two tokens, by uniform routing."""
    tiny.convert(checkpoint_of("mixtral"), tmp_path / "half", {**tiny.SHORT, "cache_ratio": 0.5})
    for folder in (checkpoint_of("mixtral"), tmp_path / "half"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = [
            row["weight_bytes"]
            for row in model_rows({"": model}, levels=["step"], batch_sizes=(1, 2), seqlens=(9,), **QUICK)
        ]
        experts = 4 * sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
        dense = 4 * sum(each.numel() for each in model.parameters()) - experts - 4 * model.lm_head.weight.numel()
        assert found == [dense + experts // 2, dense + experts * 3 // 4]


class Stubborn(LlamaForCausalLM):
    """Says the least likely token, with a cache."""

    def forward(self, *args, past_key_values=None, **keywords):
        out = super().forward(*args, past_key_values=past_key_values, **keywords)
        if past_key_values is not None:
            out.logits = -out.logits
        return out


def test_wrong_generated_tokens_get_no_speed(tiny_source):
    model = Stubborn.from_pretrained(tiny_source)
    (row,) = model_rows({"source": model}, levels=["e2e"], seqlens=(9,), new_tokens=3)
    assert row["status"].startswith("wrong: token ") and "us_p50" not in row


@pytest.mark.parametrize(
    "name", ["repetition_penalty", "num_beams", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"]
)
def test_generate_is_greedy_whatever_the_checkpoint_prefers(source, name):
    """Qwen2.5's chat models have a repetition penalty, with which right tokens are not float64's choice."""
    plain, model = (LlamaForCausalLM.from_pretrained(source) for _ in range(2))
    prompts = torch.arange(2, 26)[None]
    expected = latency.greedy(plain, prompts, 24)[0].tolist()
    preferred = {"repetition_penalty": 1.3, "num_beams": 2, "no_repeat_ngram_size": 2}
    preferred |= {"bad_words_ids": [[expected[24]]], "suppress_tokens": [expected[24]]}
    model.generation_config.update(**{name: preferred[name]})
    assert latency.greedy(model, prompts, 24)[0].tolist() == expected
    (row,) = model_rows({"source": model}, levels=["e2e"], seqlens=(24,), new_tokens=24)
    assert row["status"] == "ok"


def test_preset_rows_stand_beside_published_times(monkeypatch):
    monkeypatch.setattr(op_latency, "PUBLISHED", {(2, 16): (5.0, 3.0)})
    rows = list(op_latency.preset_latency("llama-2-7b-decode", dtype=torch.float32, device="cpu", **QUICK))
    named = {row["implementation"]: row for row in rows}
    assert list(named) == ["FlashAttention-2", "SDPA flash", "FlashAttention-3", "gqa_decode", "mla_decode (reference)"]
    ours = named["mla_decode (reference)"]
    assert ours["layers_ms"] == pytest.approx(32 * ours["us"] / 1e3) and ours["published_ms"] == 3.0
    assert named["FlashAttention-2"]["status"].startswith("missing: ") and ours["speed_up"] == 1
    with pytest.raises(ValueError, match="preset is 'llama-9'"):
        next(op_latency.preset_latency("llama-9"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": ["attention"]}, r"levels is \['attention'\]"),
        ({"new_tokens": 1}, "new_tokens is 1"),
        ({"batch_sizes": [0]}, r"batch_sizes is \[0\]"),
        ({"batch_sizes": 1}, "batch_sizes is 1; expected one or more whole numbers, at least 1"),
        ({"seqlens": []}, r"seqlens is \[\]"),
        ({"seqlens": None}, "seqlens is None"),
        ({"layer": 2}, "layer is 2; expected 0 to 1"),
        ({"page_size": 24}, "page_size is 24; expected a power of two >= 16"),
        ({"min_run_time": -1.0}, "min_run_time is -1.0; expected more than 0 seconds"),
        ({"converted": "source"}, "converted has model_type 'llama'; expected 'mha2mla'"),
    ],
)
def test_bad_arguments_are_named(tiny_source, tiny_converted, arguments, message):
    converted = tiny_source if arguments.pop("converted", None) else tiny_converted
    with pytest.raises(ValueError, match=message):
        model_latency(tiny_source, converted, device="cpu", **arguments)


@pytest.mark.gpu
def test_attention_rows_on_a_gpu():
    geometry = MLAGeometry(16, 1, 256, 64, 64, 64, 16)
    rows = attention_latency(geometry, batch_sizes=(2,), seqlens=(1000,), device="cuda", min_run_time=0.05)
    ours = next(row for row in rows if row["implementation"].startswith("mla_decode"))
    assert ours["implementation"] == "mla_decode (tilelang)"
    assert ours["status"] == "ok" and ours["us_p50"] > 0
    assert ours["us_graph"] is not None, ours.get("graph_refused")
    assert ours["plan_us"] > 0


def test_latency_tables_fit_100_columns(capsys):
    def row(op, implementation, *found, status="ok"):
        row = {"op": op, "implementation": implementation, "batch": 256, "seqlen": 131072, "status": status}
        return row | {key: value for each in found for key, value in each.items()}

    times = {"us_p20": 123.4, "us_p50": 123.4, "us_p80": 123.4, "us_graph": 123.4, "gb_per_s": 4321.0, "error": 1e-7}
    rest = {"speed_up": 0.1234, "limit_us": 123.4, "of_limit": 0.1234, "cache_bytes": 9 * 2**30}
    whole = {"first_token_ms": 123.4, "tokens_per_s": 54321.0, "peak_bytes": 70 * 2**30, "largest_batch": 12345}
    rows = LatencyRows(
        [
            row("attention", "mla_decode (reference)", times, rest),
            row("attention", "gqa_decode", status="missing: runs on CUDA devices; device is cpu"),
            row("decode step", "converted", times, rest, {"ms_per_token": 12.34}),
            row("generate", "converted", rest, whole, {"ms_per_token": 12.34}),
        ]
    )
    for op, shown, columns in rows.tables():
        print_table(shown, title=op, columns=columns, longest=24)
    out = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in out.splitlines() if not line.startswith("[")) <= 100
    assert [op for op, _, _ in rows.tables()] == ["attention", "decode step", "generate"]
    assert "0.1234" in out and "missing [1]" in out and "[1] missing: runs on CUDA devices" in out
