"""What will serve a geometry: one answer for the model, its paged cache, the converter, the card and inspect."""

import warnings
from dataclasses import replace

import pytest
import torch

from mha2mla.modeling import what_serves
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.served import AttentionReport, batch_backends, describe, widest_served
from tests.modeling import models

CUDA = torch.device("cuda")
# Llama-3-8B per group at half its cache, but for the latent: 4 heads of width 128 for each of 8 kv heads.
SIZES = {"hidden_size": 512, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SERVED = {"num_rope_heads": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 32, "qk_nope_head_dim": 96}


def config(source=None, **geometry):
    keys = {"attention_bias": True, **SIZES, **(source or {})}
    source_config = models.source_config("llama", **keys)
    # attention_backend is a key as well.
    return models.mla_config(source_config=source_config.to_dict(), **{**SERVED, **geometry})


def of_batches(asked, device):
    return batch_backends(asked.attention_backend, asked.attention_constants(), device, torch.bfloat16, 64)


def test_geometry_within_limits_has_kernels():
    layers = what_serves(config(), CUDA)
    assert [layer.layer_idx for layer in layers] == [0, 1] and all(layer.compiled for layer in layers)
    assert {str(layer) for layer in layers} == {"absorbed, mla_paged; batches: mla_paged"}
    assert describe(layers) == "absorbed, mla_paged; batches: mla_paged"


@pytest.mark.parametrize(("d_r", "rank", "way"), [(128, 512, "reads"), (128, 544, "reads a copy of")])
def test_codes_are_read_or_copied_and_named(d_r, rank, way):
    keys = {"num_rope_heads": 1, "rope_from_latent": True, "qk_nope_head_dim": 128, "latent_bits": [4, 3]}
    layers = what_serves(config(kv_lora_rank=rank, qk_rope_head_dim=d_r, **keys), CUDA)
    assert [layer.decodes_codes for layer in layers] == [way == "reads"] * 2
    assert str(layers[1]) == f"absorbed, mla_paged; batches: mla_paged; decode {way} codes of 3 bits"
    assert f"{rank} in 4 bits" in str(AttentionReport(layers))


BEYOND = {
    "kv_lora_rank is 1280; TileLang kernels take multiples of 8 up to 1024": {"kv_lora_rank": 1280},
    "kv_lora_rank is 100; TileLang kernels take multiples of 8 up to 1024": {"kv_lora_rank": 100},
    "qk_rope_head_dim is 4; TileLang kernels take multiples of 8 up to 128": {"qk_rope_head_dim": 4},
    "qk_rope_head_dim is 136; TileLang kernels take multiples of 8 up to 128": {"qk_rope_head_dim": 136},
    "qk_rope_head_dim is 264; TileLang kernels take multiples of 8 up to 256": {
        "num_rope_heads": 1,
        "qk_rope_head_dim": 264,
    },
    "num_rope_heads * qk_rope_head_dim is 4096; TileLang kernels take at most 2048": {
        "source": {"num_key_value_heads": 32},
        "num_rope_heads": 32,
        "qk_rope_head_dim": 128,
    },
    "num_attention_heads is 256; TileLang kernels take 1 to 128": {"source": {"num_attention_heads": 256}},
}


@pytest.mark.parametrize("reason", BEYOND)
def test_geometry_beyond_a_limit_is_named_everywhere(reason):
    beyond = config(**BEYOND[reason])
    layers = what_serves(beyond, CUDA)
    for layer in layers:
        assert (layer.form, layer.backend) == ("expanded", "sdpa")
        assert not layer.compiled and reason in layer.reason and reason in layer.batch_reason and reason in layer.why
    assert reason in describe(layers)
    if reason.startswith(("kv_lora_rank is 100", "qk_rope_head_dim is 4")):  # rows of 16 bytes: the op is one
        with pytest.raises(ValueError, match="layer 0: no attention backend serves .* in 16 bits the op takes mult"):
            of_batches(beyond, CUDA)
        return
    with pytest.warns(UserWarning, match="2 of 2 layers attend in plain torch") as caught:
        assert {backend.name for backend in of_batches(beyond, CUDA)} == {"mla_reference"}
    assert reason in str(caught[0].message)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"page_size": 48}, "page_size is 48; TileLang kernels take powers of two from 16"),
        ({"dtype": torch.float32}, "dtype is float32"),
        ({"query_length": 15}, "15 new tokens; the absorbed form costs less for up to 14"),
    ],
)
def test_call_beyond_a_limit_is_expanded_with_reason(asked, reason):
    layer = what_serves(config(), CUDA, **asked)[0]
    assert layer.form == "expanded" and reason in layer.reason


def test_wide_heads_have_a_decode_kernel_only():
    layer = what_serves(config(qk_rope_head_dim=96, qk_nope_head_dim=168), CUDA)[0]
    assert layer.backend == "mla_paged" and layer.batch_backend.name == "mla_reference"
    assert not layer.compiled and "d_qk is 264; it takes up to 256" in layer.why


@pytest.mark.parametrize(
    ("geometry", "widest"),
    [
        ({"kv_lora_rank": 3400}, 1024),
        ({"kv_lora_rank": 1024}, 1024),
        ({"kv_lora_rank": 100}, 96),
        ({"qk_rope_head_dim": 4}, None),
    ],
)
def test_the_widest_latent_that_kernels_serve(geometry, widest):
    asked = config(source={"num_key_value_heads": 32}, **geometry).layer_geometry(0)
    assert widest_served(asked, CUDA) == widest
    if widest is not None:
        assert what_serves(config(kv_lora_rank=widest), CUDA)[0].compiled
        assert widest == 1024 or not what_serves(config(kv_lora_rank=asked.kv_lora_rank), CUDA)[0].compiled


def test_layers_that_differ_are_told_apart():
    layers = what_serves(config(kv_lora_rank=[512, 1280]), CUDA)
    assert [layer.backend for layer in layers] == ["mla_paged", "sdpa"]
    text = describe(layers)
    assert text.startswith("1 layers: absorbed, mla_paged; batches: mla_paged | 1 layers: expanded, sdpa")
    with pytest.warns(UserWarning, match="1 of 2 layers attend in plain torch"):
        names = [backend.name for backend in of_batches(config(kv_lora_rank=[512, 1280]), CUDA)]
    assert names == ["mla_paged", "mla_reference"]


def test_what_is_asked_for_by_name_is_no_surprise():
    wide = config(kv_lora_rank=1280, attention_backend="mla_reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of_batches(wide, CUDA)[0].name == "mla_reference"
        assert of_batches(config(kv_lora_rank=1280), "cpu")[0].name == "mla_reference"
    refused = config(kv_lora_rank=1280, attention_backend="mla_paged")
    assert str(what_serves(refused, CUDA)[0]).endswith("batches: refused")
    with pytest.raises(ValueError, match="layer 0: attention backend 'mla_paged' refuses: kv_lora_rank is 1280"):
        of_batches(refused, CUDA)


@pytest.mark.parametrize(
    ("name", "width", "device", "expected"),
    [
        (None, 512, "cuda", ("absorbed", "mla_paged", "mla_paged")),
        (None, 1024, "cuda", ("absorbed", "mla_paged", "mla_paged")),
        (None, 1280, "cuda", ("expanded", "sdpa", "mla_reference")),
        (None, 512, "cpu", ("absorbed", "mla_reference", "mla_reference")),
        ("mla_reference", 512, "cuda", ("absorbed", "mla_reference", "mla_reference")),
        ("mla_fp8", 512, "cuda", ("absorbed", "mla_fp8", "mla_fp8")),
        ("mla_expanded", 512, "cuda", ("expanded", "sdpa", None)),
        ("mla_fp8", 1024, "cuda", ("expanded", "sdpa", None)),
        ("mla_paged", 1280, "cuda", ("expanded", "sdpa", None)),
    ],
)
def test_a_name_decides_both_ways_of_calling_the_model(name, width, device, expected):
    layer = what_serves(config(attention_backend=name, kv_lora_rank=width), device)[1]
    assert (layer.form, layer.backend, layer.batch_backend and layer.batch_backend.name) == expected
    if name is None:
        assert layer.batch_backend is ATTENTION_BACKENDS.find(None, layer.geometry, 64, torch.bfloat16, device)[0]


LATENT = {"num_rope_heads": 1, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "rope_from_latent": True}


def test_rotary_key_kernels_serve_steps_and_batches():
    """And what they do not take is named in every answer."""
    layers = what_serves(config(**LATENT), CUDA)
    assert all(layer.compiled for layer in layers)
    assert describe(layers) == "absorbed, mla_paged; batches: mla_paged"
    for beyond, why in (
        ({"qk_rope_head_dim": 136}, "qk_rope_head_dim is 136; TileLang kernels that make rotary keys take at most 128"),
        ({"kv_lora_rank": 1088}, "kv_lora_rank is 1088; TileLang kernels that make rotary keys take at most 1024"),
    ):
        layer = what_serves(config(**{**LATENT, **beyond}), CUDA)[0]
        assert (layer.form, layer.backend, layer.batch_backend.name) == ("expanded", "sdpa", "mla_reference")
        assert why in layer.reason and why in layer.batch_reason and not layer.compiled


def test_eight_bit_latents_have_kernels_up_to_a_width():
    layer = what_serves(config(attention_backend="mla_fp8", **LATENT), CUDA)[0]
    assert (layer.form, layer.backend, layer.batch_backend.name) == ("absorbed", "mla_fp8", "mla_fp8")
    asked = config(attention_backend="mla_fp8", **LATENT | {"kv_lora_rank": 1024})
    layer = what_serves(asked, CUDA)[0]
    assert (layer.form, layer.backend, layer.batch_backend, layer.compiled) == ("expanded", "sdpa", None, False)
    why = "kv_lora_rank is 1024; kernels over e4m3 latents take at most 512"
    assert why in layer.reason and why in layer.batch_reason
    with pytest.raises(ValueError, match=f"layer 0: attention backend 'mla_fp8' refuses: {why}"):
        of_batches(asked, CUDA)
    asked.attention_backend = "mla_fp8_reference"
    layer = what_serves(asked, CUDA)[0]
    assert (layer.form, layer.backend, layer.batch_backend.name) == ("absorbed", *["mla_fp8_reference"] * 2)
    assert not layer.compiled


@pytest.mark.parametrize("case", ["some sliding", "latent some sliding"])
@torch.no_grad()
def test_the_answer_is_what_a_cache_does(case):
    for name in (None, "mla_reference", "mla_expanded", "mla_fp8_reference"):
        model = models.mla_model(case, attention_backend=name)
        cache = model(models.tokens(2, 9)).past_key_values
        for layer, said in zip(cache.layers, model.attention_report(), strict=True):
            assert layer.attends(1) is (said.form == "absorbed")
            assert not layer.attends(1) or layer.backend.name == said.backend


@pytest.mark.parametrize("case", ["some sliding", "latent some sliding"])
def test_report_and_paged_cache_give_the_same_answer(case):
    model = models.mla_model(case)
    expected = what_serves(model.config, "cpu", torch.float32)
    assert model.attention_report() == list(expected)
    assert [layer.sliding_window for layer in expected] == [None, models.WINDOW]
    paged = model.paged_cache(4)
    assert [layer.backend for layer in paged.layers] == [layer.batch_backend for layer in expected]
    assert [layer.constants.geometry for layer in paged.layers] == [layer.geometry for layer in expected]
    assert [replace(layer, device=CUDA) for layer in expected] != list(what_serves(model.config, CUDA, torch.float32))


def test_report_prints_as_a_table(capsys):
    model = models.mla_model("some sliding")
    print(model.attention_report())
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["layers", "generate", "batches", "window", "latent", "why", "no", "kernel"]
    assert len(rows) == 2 and rows[0].startswith("0 ") and "absorbed, mla_reference" in rows[0]
    alike = replace(model.attention_report()[0], layer_idx=1)
    assert str(AttentionReport([*model.attention_report()[:1], alike])).splitlines()[1].startswith("0–1 ")
