"""Formulas of `mha2mla plan` against measured points on record."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mha2mla.conversion.families import adapter_for
from mha2mla.modeling.tensor_parallel import HeadShard
from mha2mla.pipeline.sizing import (
    ATTENTION_OVER_PREDICTED,
    AUTO_LOSSES,
    CODES_OVER_PREDICTED,
    CONVERSIONS,
    GPUS,
    HEALED_LOSSES,
    MEASURED_LOSSES,
    MEASURED_OVER_PREDICTED,
    Footprint,
    conversion_cost,
    decode_kernel,
    find_gpu,
    footprint,
    mean_bits,
    recognize_gpu,
)
from mha2mla.trial_models import converted_config, random_model, source_config

ROOT = Path(__file__).parents[2]
H200 = GPUS["h200-141gb"]
LAYOUTS = {
    "per head 512+16": ("llama-2-7b", "per-group", 512, 16),
    "shared 448+64": ("llama-3-8b", "shared", 448, 64),
    "latent 512": ("llama-3-8b", "latent", 512, 64),
}


def rows(*names: str) -> list[dict]:
    texts = [(ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8") for name in names]
    return [row for text in texts for row in json.loads(text)["rows"]]


def sizes(layout: str, *, source: bool = False, tp: int = 1) -> Footprint:
    name, kind, rank, rope = LAYOUTS[layout]
    config = source_config(name)
    spec = adapter_for(config.to_dict()).specify(config)
    if source:
        return footprint(config, None, spec, tp)
    made = converted_config(config, layout=kind, kv_lora_rank=rank, qk_rope_head_dim=rope)
    return footprint(made, HeadShard.of(made.layer_geometry(0), 0, tp).geometry, spec, tp)


def extremes(factors: list[float]) -> tuple[float, float]:
    return round(min(factors), 2), round(max(factors), 2)


def test_step_reads_the_bytes_on_record():
    measured = rows("h200-step", "h200-step-second")
    assert len(measured) == 23
    for row in measured:
        model = sizes(row["layout"])
        assert model.read + row["batch"] * row["context"] * model.cache_bytes_per_token == row["bytes"]


def test_step_times_lie_within_the_stated_factor():
    """A bound: no measured step is faster."""
    factors = [
        row["ms"] / 1e3 / sizes(row["layout"]).step_seconds(H200, row["batch"], row["context"])
        for row in rows("h200-step", "h200-step-second")
    ]
    assert extremes(factors) == MEASURED_OVER_PREDICTED


def test_attention_times_lie_within_the_stated_factor():
    factors = {}
    for row in rows("h200-latent-table", "h200-latent-wide"):
        rank, rope, heads = row["d_c"], row["d_r"], row["H"]
        products, keys = 2 * heads * (2 * rank + rope), 2 * rank * rope
        layer = Footprint(0, 0, 0, 0, 0, 0.0, 2 * rank, products, keys, 0, (None,), True)
        if row["S_q"] == 1:
            tokens = round(row["MB"] * 1e6 / (2 * rank))
            factor = row["us"] / 1e6 / layer.attention_seconds(H200, 1, tokens)
            factors.setdefault(row["kernel"], []).append(factor)
    portable = factors.pop("latent_portable")
    assert extremes(list(chain(*factors.values()))) == ATTENTION_OVER_PREDICTED
    assert min(portable) > 5, "its steps may be predicted, too"


def test_times_over_codes_lie_within_the_stated_factor_of_16_bits():
    factors = []
    for row in rows("h200-codes-decode"):
        if row["status"] == "ok" and row["S_q"] == 1:
            heads, rank, rope = row["H"], row["d_c"], row["d_r"]
            products, keys = 2 * heads * (2 * rank + rope), 2 * rank * rope
            layer = Footprint(0, 0, 0, 0, 0, 0.0, 2 * rank, products, keys, 0, (None,), True)
            predicted = layer.attention_seconds(H200, row["B"], row["longest"])
            factors.append(row["codes_computed_us"] / 1e6 / predicted)
    assert len(factors) == 12 and extremes(factors) == CODES_OVER_PREDICTED


@pytest.mark.parametrize(("tp", "name"), [(1, "h200-one-gpu"), (2, "h200-two-gpus")])
def test_memory_is_the_measured_one(tp, name):
    (row,) = rows(name)
    model = sizes("per head 512+16", tp=tp)
    cache = row["batch"] * model.cache_bytes(row["context"])
    assert cache / 1e9 == pytest.approx(row["cache_gb"])
    assert row["memory_gb"] * 1e9 / (model.weights + cache) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("layout", ["shared 448+64", "latent 512"])
def test_ranks_hold_what_encodes_latents_whole(layout):
    name, kind, rank, rope = LAYOUTS[layout]
    made = converted_config(source_config(name), layout=kind, kv_lora_rank=rank, qk_rope_head_dim=rope)
    whole = {each: p.numel() for each, p in random_model(made, "meta", torch.bfloat16).named_parameters()}
    replicated = sum(whole[each] for each in whole if "norm" in each or "kv_a_proj" in each or "k_rope_proj" in each)
    split = sum(whole.values()) - replicated - whole["model.embed_tokens.weight"]
    model = sizes(layout, tp=8)
    assert model.read == 2 * (replicated + split // 8)
    assert model.weights == model.read + 2 * whole["model.embed_tokens.weight"]


def test_largest_batch_bounds_that_of_generate():
    """On record `generate` prefilled all prompts at once: those of a converted model took most of the memory."""
    factors = {"source": [], "converted": []}
    for row in rows("h200-latency-e2e", "h200-latency-e2e-contexts"):
        if row["op"] == "generate":
            model = sizes("per head 512+16", source=row["implementation"] == "source")
            assert model.read == row["weight_bytes"]
            fits = model.largest_batch(H200, row["seqlen"] + row["new_tokens"])
            factors[row["implementation"]].append(fits / row["largest_batch"])
    assert extremes(factors["source"]) == (1.01, 1.21)
    assert extremes(factors["converted"]) == (2.35, 4.14)


def test_conversion_points_are_those_on_record():
    plain, fitted = rows("h200-convert-scale")[0], rows("h200-convert-scale-llama-3-8b")[0]
    small = {row["name"]: row for row in rows("h200-conversion-latent")}
    for way, large, name in ((False, plain, "0.5 quick, latent"), (True, fitted, "0.5 latent")):
        point = CONVERSIONS[way]
        assert point[1].seconds * 32 == pytest.approx(large["seconds_of_32_layers"], rel=1e-3)
        assert point[1].gpu_gib == pytest.approx(large["peak_gpu_gib"], rel=0.01)
        assert point[1].host_gib == pytest.approx(large["peak_rss_gib"], rel=0.01)
        seconds = small[name]["calibration_seconds"] + small[name]["convert_seconds"]
        assert point[0].seconds * 30 == pytest.approx(seconds, rel=1e-3)


def test_conversion_time_of_a_third_model():
    """Qwen2.5-Coder-0.5B, no point of the line: 425 s (docs/quality.md)."""
    config = source_config("qwen2.5-0.5b")
    model = footprint(config, None, adapter_for(config.to_dict()).specify(config))
    predicted = 60 * conversion_cost(model.layer_parameters, 24, fitted=True)["minutes"]
    assert round(predicted / 425, 2) == 1.55


def test_losses_are_those_of_the_quality_page():
    page = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8").translate(str.maketrans("", "", "*`‡†§"))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    small, larger = (figures for _, figures in MEASURED_LOSSES.values())
    for (preset, layout), by_ratio in small.items():
        name = preset + {("quick", "shared"): ", shared"}.get((preset, layout), ", 16 bits" * (layout == "latent"))
        assert {float(line[0]): line[4] for line in lines if len(line) == 6 and line[1] == name} == by_ratio
    ranks = [line for line in lines if len(line) == 5 and line[0].replace(".", "").isdigit() and line[1].isdigit()]
    on_page = {float(line[0]): line[3].split(" / ") for line in ranks}
    assert {ratio: f"{losses[0]} / {losses[1]}" for ratio, losses in on_page.items()} == larger["latent", "latent"]


def test_losses_after_healing_are_the_worst_of_the_quality_page():
    page = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8").replace("*", "")
    for model, part in zip(HEALED_LOSSES, page.split("## A second model"), strict=True):
        found = {}
        for line in part.splitlines():
            if "healed" in line and line.startswith("| 0.") and line.count(" / ") >= 3:
                ratio, cache, *texts = (cell.strip() for cell in line.strip("|").split("|"))
                pairs = [text.split(" / ") for text in texts if " / " in text]
                worst = map(max, zip(*pairs, strict=True))
                found[16 if cache.startswith("16") else "auto", float(ratio)] = " / ".join(worst)
        assert found == HEALED_LOSSES[model]


def test_losses_of_ranks_and_bits_by_layer_are_those_on_record():
    found = {
        (row["model"], float(row["cache"].split()[-1])): " / ".join(
            f"{row[f'ratio {n}']:.3f}" for n in ("512", "8,192")
        )
        for row in rows("h200-row-codes")
        if row["cache"].startswith("quick, auto")
    }
    told = {(model, ratio): losses for model, each in AUTO_LOSSES.items() for ratio, losses in each.items()}
    assert told == found


def test_bits_to_expect_are_the_means_on_record():
    by_ratio = {}
    for row in rows("h200-row-codes"):
        if row["cache"].startswith("quick, auto"):
            by_ratio.setdefault(float(row["cache"].split()[-1]), []).append(row["bits"])
    assert len(by_ratio) == 7
    for ratio, found in by_ratio.items():
        assert mean_bits(ratio) == pytest.approx(sum(found) / len(found), abs=0.06)
    assert mean_bits(0.03) == mean_bits(0.0625) < mean_bits(0.09) < mean_bits(0.125) and mean_bits(0.9) == 8


def test_routed_experts_are_read_as_tokens_reach_them():
    model = Footprint(0, 0, 0, 0, 8 * 10**9, 0.25, 0, 0, 0, 0, (), True)
    one, many = (model.step_seconds(H200, batch, 0) * H200.read_rate for batch in (1, 100))
    assert one == pytest.approx(2e9) and many == pytest.approx(8e9)


def test_footprint_counts_windows():
    windowed = Footprint(0, 0, 0, 0, 0, 0.0, 2, 0, 0, 0, (None, 128), False)
    assert windowed.cache_bytes(1000) == 2 * (1024 + 128)
    assert windowed.attention_seconds(H200, 3, 1000) * H200.read_rate == pytest.approx(3 * 2 * (1000 + 128))


@pytest.mark.parametrize("layout", [None, *LAYOUTS.values()], ids=["source", *LAYOUTS])
def test_a_prompt_takes_the_flop_that_torch_counts(layout):
    """torch counts all pairs of a query and a key; half of them are masked."""
    source = source_config("tiny", num_hidden_layers=3)
    spec, made, geometry, length = adapter_for(source.to_dict()).specify(source), source, None, 48
    if layout is not None:
        kind, rope = layout[1], 16
        made = converted_config(source, layout=kind, kv_lora_rank=32, qk_rope_head_dim=rope)
        geometry = made.layer_geometry(0)
    model = random_model(made, "cpu", torch.float32)
    model.set_attn_implementation("eager")  # of which all products are counted
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model.base_model(torch.arange(length)[None], use_cache=False)
    size = footprint(made, geometry, spec)
    masked = size.pair * 3 * length * (length - 1) / 2
    assert counted.get_total_flops() == pytest.approx(size.prompt_flops(length) + masked, rel=0.03)
    one = size.prompt_flops(1)
    assert size.prompt_flops(2) == pytest.approx(2 * one + 3 * size.pair)


def test_prompts_of_experts_and_windows():
    experts = Footprint(0, 10.0, 0, 0, 2 * 12, 0.25, 0, 0, 0, 0, (None, None), True)
    assert experts.prompt_flops(5) == 2 * 5 * (20 - 9)
    windowed = Footprint(0, 0, 0, 0, 0, 0.0, 0, 0, 0, 1, (None, 2), True)
    assert windowed.prompt_flops(4) == 10 + 7


def test_decode_kernel_follows_the_gpu():
    config = converted_config(source_config("llama-3-8b"), layout="latent", kv_lora_rank=256, qk_rope_head_dim=64)
    geometry = config.layer_geometry(0)
    assert decode_kernel(geometry, 90) == ("latent_ws", None)
    assert decode_kernel(geometry, 80) == ("latent_portable", None)
    assert decode_kernel(geometry, 90, codes=True)[0] == "latent_fp8"
    kernel, why = decode_kernel(geometry, 80, codes=True)
    assert kernel is None and "8.0" in why and "9.0" in why


def test_gpu_is_refused_by_name():
    with pytest.raises(ValueError, match="gpu is 'h300'; expected one of h200-141gb, "):
        find_gpu("h300")


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie-80gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 3090", 23.6, None),
    ],
)
def test_gpu_is_recognized_by_its_driver_name(name, gib, expected):
    found = recognize_gpu(name, int(gib * 2**30))
    assert (found and found.name) == expected
