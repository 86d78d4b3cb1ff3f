"""Speeds of the attention op and of a decode step: right first, timed second."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import mha2mla
from mha2mla.eval import attention_latency, decode_step_latency, model_latency
from mha2mla.eval.measurement import COLUMNS
from mha2mla.eval.op_latency import (
    AttentionInputs,
    _judge_source,
    flash_attention_3_baseline,
    gqa_decode_baseline,
    sdpa_baseline,
)
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling import MHA2MLAForCausalLM

QUICK = {"min_run_time": 0.002}
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
    assert set(COLUMNS) - {"us_graph", "plan_us"} <= set().union(*rows)


def test_a_wrong_baseline_gets_no_speed():
    def wrong(inputs: AttentionInputs):
        right = sdpa_baseline(inputs)
        return lambda: right() * 1.01

    def not_a_number(inputs: AttentionInputs):
        right = sdpa_baseline(inputs)
        return lambda: torch.full_like(right(), math.nan)

    def absent(inputs: AttentionInputs):
        return "not built for this machine"

    rows = attention_latency(
        GEOMETRY,
        seqlens=(64,),
        dtype=torch.float32,
        baselines={"wrong": wrong, "nan": not_a_number, "absent": absent},
        **QUICK,
    )
    by_name = {row["implementation"]: row for row in rows}
    assert by_name["wrong"]["status"].startswith("wrong: relative error ")
    assert "are NaN or inf where float64 is finite" in by_name["nan"]["status"]
    assert by_name["absent"]["status"] == "missing: not built for this machine"
    for name in ("wrong", "nan", "absent"):
        assert "us_p50" not in by_name[name] and "gb_per_s" not in by_name[name]


def test_a_backend_that_refuses_is_missing_with_its_reason():
    rows = attention_latency(GEOMETRY, dtype=torch.float32, backend="tilelang", baselines={}, **QUICK)
    assert [row["implementation"] for row in rows] == ["mla_decode (tilelang)"]
    assert rows[0]["status"].startswith("missing: ") and len(rows[0]["status"]) > len("missing: ")


def test_flash_attention_and_our_kernel_say_why_they_are_not_here():
    inputs = AttentionInputs(*(torch.zeros(1, 1, 1, 8) for _ in range(3)), 1.0)
    assert "CUDA" in flash_attention_3_baseline(inputs)
    assert "float32" in gqa_decode_baseline(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [1, 64, 129])
def test_our_own_baseline_is_the_sources_attention(seqlen):
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
def test_rounding_in_float32_is_not_called_wrong(geometry, batch, seqlen):
    for seed in range(4):
        rows = attention_latency(
            geometry, batch_sizes=(batch,), seqlens=(seqlen,), dtype=torch.float32, min_run_time=1e-6, seed=seed
        )
        assert {row["status"] for row in rows if not row["status"].startswith("missing: ")} == {"ok"}


def test_decode_step_rows(tiny_source, tiny_converted):
    models = {
        "source": AutoModelForCausalLM.from_pretrained(tiny_source),
        "converted": AutoModelForCausalLM.from_pretrained(tiny_converted),
    }
    rows = decode_step_latency(models, batch_sizes=(1, 3), seqlens=(2, 40, 70), prefill_chunk=33, **QUICK)
    assert [(row["implementation"], row["batch"], row["seqlen"]) for row in rows] == [
        (name, batch, seqlen) for name in models for batch in (1, 3) for seqlen in (2, 40, 70)
    ]
    for row in rows:
        assert row["status"] == "ok", row
        assert row["ms_per_token"] == row["us_p50"] / 1e3 > 0
    half = [row["cache_bytes"] for row in rows]
    assert all(after <= before / 2 for before, after in zip(half[:6], half[6:], strict=True))


@pytest.mark.parametrize("backend", [None, "mla_fp8_reference"])
def test_a_step_over_a_cache_of_the_latent_alone(backend, tiny_converted, tmp_path):
    """From the same checkpoint, and as many numbers; those of 8 bits are all of them then."""
    mha2mla.convert(tiny_converted, tmp_path / "latent", {"layout": "latent"}, device="cpu", progress=False)
    model = MHA2MLAForCausalLM.from_pretrained(tmp_path / "latent", attention_backend=backend)
    row = decode_step_latency({"converted": model}, batch_sizes=(2,), seqlens=(40,), **QUICK)[0]
    numbers = sum(model.config.layer_geometry(layer).kv_lora_rank for layer in range(2))
    stored = MHA2MLAForCausalLM.from_pretrained(tiny_converted).config
    assert 4 * numbers == stored.cache_bytes_per_token(4) == model.config.cache_bytes_per_token(4)
    assert row["status"] == "ok" or backend is not None  # eight bits are no rounding of 32
    assert row["cache_bytes"] == 2 * 40 * (4 * numbers if backend is None else numbers + 2 * 4)


def test_cached_bytes_count_latents_of_eight_bits_and_their_scales(tiny_converted):
    model = MHA2MLAForCausalLM.from_pretrained(tiny_converted, attention_backend="mla_fp8_reference")
    row = decode_step_latency({"converted": model}, batch_sizes=(2,), seqlens=(40,), **QUICK)[0]
    geometries = [model.config.layer_geometry(layer) for layer in range(model.config.num_hidden_layers)]
    itemsize = model.dtype.itemsize
    per_token = sum(
        each.kv_lora_rank + 4 + each.num_rope_heads * each.qk_rope_head_dim * itemsize for each in geometries
    )
    assert row["cache_bytes"] == 2 * 40 * per_token < 2 * 40 * model.config.cache_bytes_per_token(itemsize)


class WrongStep:
    """Reads another token than it was given, but only when it decodes with a cache."""

    def forward(self, input_ids, past_key_values=None, **keywords):
        wrong = past_key_values is not None and input_ids.shape[1] == 1
        return super().forward(
            input_ids=input_ids ^ 1 if wrong else input_ids, past_key_values=past_key_values, **keywords
        )


class WrongLlama(WrongStep, LlamaForCausalLM):
    pass


class WrongMLA(WrongStep, MHA2MLAForCausalLM):
    pass


def test_a_model_whose_cached_step_is_wrong_gets_no_speed(tiny_source):
    rows = decode_step_latency({"source": WrongLlama.from_pretrained(tiny_source)}, seqlens=(40,), **QUICK)
    assert rows[0]["status"].startswith("wrong: ") and "us_p50" not in rows[0]


def test_a_converted_model_whose_cached_step_is_wrong_gets_no_speed(tiny_converted):
    rows = decode_step_latency({"converted": WrongMLA.from_pretrained(tiny_converted)}, seqlens=(40,), **QUICK)
    assert rows[0]["status"].startswith("wrong: ") and "us_p50" not in rows[0]


def test_the_check_leaves_the_backend_as_it_was(tiny_converted):
    model = MHA2MLAForCausalLM.from_pretrained(tiny_converted)
    model.config.attention_backend = None
    decode_step_latency({"converted": model}, seqlens=(8,), **QUICK)
    assert model.config.attention_backend is None


def test_model_latency_joins_both_measurements(tiny_source, tiny_converted):
    rows = model_latency(tiny_source, tiny_converted, batch_sizes=[1], seqlens=[33], device="cpu", **QUICK)
    assert {row["op"] for row in rows} == {"attention", "decode step"}
    assert {row["implementation"] for row in rows if row["op"] == "decode step"} == {"source", "converted"}
    assert all(row["status"] == "ok" or row["status"].startswith("missing: ") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "prefill"}, "op is 'prefill'"),
        ({"batch_sizes": [0]}, r"batch_sizes is \[0\]"),
        ({"seqlens": []}, r"seqlens is \[\]"),
        ({"layer": 2}, "layer is 2; expected 0 to 1"),
    ],
)
def test_bad_arguments_are_named(tiny_source, tiny_converted, arguments, message):
    with pytest.raises(ValueError, match=message):
        model_latency(tiny_source, tiny_converted, device="cpu", **arguments)


def test_an_unconverted_model_is_refused(tiny_source):
    with pytest.raises(ValueError, match="converted has model_type 'llama'; expected 'mha2mla'"):
        model_latency(tiny_source, tiny_source, device="cpu")


@pytest.mark.gpu
def test_attention_rows_on_a_gpu():
    geometry = MLAGeometry(16, 1, 256, 64, 64, 64, 16)
    rows = attention_latency(geometry, batch_sizes=(2,), seqlens=(1000,), device="cuda", min_run_time=0.05)
    ours = next(row for row in rows if row["implementation"].startswith("mla_decode"))
    assert ours["implementation"] == "mla_decode (tilelang)"
    assert ours["status"] == "ok" and ours["us_p50"] > 0
    assert ours["us_graph"] is not None, ours.get("graph_refused")
    assert ours["plan_us"] > 0
