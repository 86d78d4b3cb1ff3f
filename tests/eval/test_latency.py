"""Speeds of the attention op and of a decode step: right first, timed second."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from mha2mla.eval import attention_latency, decode_step_latency, model_latency
from mha2mla.eval.latency import (
    COLUMNS,
    AttentionInputs,
    compare,
    flash_attention_3_baseline,
    gqa_decode_baseline,
    sdpa_baseline,
    time_callable,
)
from mha2mla.geometry import MLAGeometry
from mha2mla.kernel_testing.plain import plain_attention, plain_mla, rounding_of_attention, rounding_of_mla
from mha2mla.kernels import mla_decode
from mha2mla.modeling import MHA2MLAForCausalLM

QUICK = {"min_run_time": 0.002}
GEOMETRY = MLAGeometry(6, 3, 24, 8, 8, 16, 3)


def test_plain_attention_is_torchs():
    q, k, v = torch.randn(6, 16), torch.randn(3, 40, 16), torch.randn(3, 40, 16)
    expected = scaled_dot_product_attention(q[None, :, None], k[None], v[None], scale=0.3, enable_gqa=True)
    torch.testing.assert_close(plain_attention(q, k, v, 0.3), expected[0, :, 0])


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_plain_mla_is_the_decode_ops_reference(groups):
    """Two implementations that know nothing of one another, in float64."""
    heads, d_c, d_r, page, seqlen = 6, 24, 8, 16, 43
    q_latent, q_pe = torch.randn(1, 1, heads, d_c).double(), torch.randn(1, 1, heads, d_r).double()
    latent, k_pe = torch.randn(3, page, d_c).double(), torch.randn(3, page, groups, d_r).double()
    table, seqlens = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([seqlen], dtype=torch.int32)
    expected = mla_decode(q_latent, q_pe, latent, k_pe, table, seqlens, softmax_scale=0.2, backend="reference")
    order = table[0].long()
    got = plain_mla(
        q_latent[0, 0], q_pe[0, 0], latent[order].flatten(0, 1)[:seqlen], k_pe[order].flatten(0, 1)[:seqlen], 0.2
    )
    torch.testing.assert_close(got, expected[0, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_rows(dtype):
    rows = attention_latency(GEOMETRY, batch_sizes=(1, 3), seqlens=(1, 64, 65), dtype=dtype, **QUICK)
    assert len(rows) == 2 * 3 * 4
    for row in rows:
        if row["implementation"] in ("FlashAttention-3", "gqa_decode"):
            assert row["status"].startswith("missing: ") and "us_p50" not in row
            continue
        assert row["status"] == "ok", row
        assert 0 < row["us_p20"] <= row["us_p50"] * (1 + 1e-12) <= row["us_p80"] * (1 + 2e-12)
        width = 3 * 2 * 16 if row["implementation"] == "torch SDPA" else 24 + 3 * 8
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
    q, k, v = (
        torch.randn(2, heads, t, 64, device="cuda").bfloat16() for heads, t in ((6, 1), (2, seqlen), (2, seqlen))
    )
    inputs = AttentionInputs(q, k, v, 0.125)
    exact = torch.stack(
        [plain_attention(*x, 0.125) for x in zip(q[:, :, 0].double(), k.double(), v.double(), strict=True)]
    )
    torch_out = torch.stack([plain_attention(*x, 0.125) for x in zip(q[:, :, 0], k, v, strict=True)])
    assert compare(gqa_decode_baseline(inputs)()[:, :, 0], torch_out, exact).ok


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        (lambda x, error: x + error, True),
        (lambda x, error: x + 1.9 * error, True),
        (lambda x, error: x + 2.1 * error, False),
        (lambda x, error: x.clone().index_fill_(0, torch.tensor([3]), math.inf), False),
    ],
)
def test_the_rule_is_twice_torchs_error(change, passes):
    reference = torch.randn(100).double()
    error = 1e-3 * torch.randn(100).double()
    check = compare(change(reference, error), reference + error, reference)
    assert check.ok is passes
    assert (check.reason == "") is passes


def test_one_far_element_fails_even_where_the_norm_is_small():
    reference = torch.randn(100_000).double()
    error = 1e-3 * torch.randn(100_000).double()
    out = reference + error
    out[5] += 0.05
    check = compare(out, reference + error, reference)
    assert check.error < 2 * check.torch_error and not check.ok and check.reason.startswith("largest error")


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


def float32_problem(tokens, scale, heads=4, width=24):
    q, latent = torch.randn(heads, width) * scale, torch.randn(tokens, width)
    return q, torch.zeros(heads, 2), latent, torch.zeros(tokens, 1, 2)


@pytest.mark.parametrize(("tokens", "scale"), [(3, 10.0), (300, 1.0), (300, 6.0), (2048, 1.0)])
def test_expected_rounding_is_that_of_a_running_sum(tokens, scale):
    """Neither much less, or rounding is called wrong, nor much more, or what is wrong is called rounding."""
    ratios = []
    for _ in range(8):
        q, q_pe, latent, k_pe = float32_problem(tokens, scale)
        exact = [tensor.double() for tensor in (q, q_pe, latent, k_pe)]
        weight = torch.softmax(sum(q[:, None, i] * latent[:, i] for i in range(24)) * 0.2, -1)
        out = torch.zeros_like(q)
        for token in range(tokens):
            out = out + weight[:, token, None] * latent[token]
        error = (out.double() - plain_mla(*exact, 0.2)).norm()
        ratios.append((error / rounding_of_mla(*exact, 0.2).norm()).item())
    assert min(ratios) > 0.2 and max(ratios) < 2, ratios


def test_one_lost_token_in_100_000_is_wrong():
    q, k, v = torch.randn(4, 16), torch.randn(1, 100_000, 16), torch.randn(1, 100_000, 16)
    exact = [tensor.double() for tensor in (q, k, v)]
    reference, rounding = plain_attention(*exact, 0.25), rounding_of_attention(*exact, 0.25)
    right = plain_attention(q, k, v, 0.25)
    short = plain_attention(q, k[:, 1:], v[:, 1:], 0.25)
    assert compare(right, right, reference, rounding).ok
    assert not compare(short, right, reference, rounding).ok


def test_timing_of_a_known_duration():
    import time

    timing = time_callable(lambda: time.sleep(0.004), "cpu", min_run_time=0.05)
    assert 4000 <= timing.p20 <= timing.p50 * (1 + 1e-12) <= timing.p80 * (1 + 2e-12) and timing.p50 < 40_000
    assert timing.graph is None


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
    model.config.decode_backend = None
    decode_step_latency({"converted": model}, seqlens=(8,), **QUICK)
    assert model.config.decode_backend is None


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
