"""Sources whose statistics have no variance, or far too much: all of conversion stays finite."""

import copy
import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.calibration.statistics import StatisticsCollector
from mha2mla.conversion.families import UnsupportedSourceError
from mha2mla.conversion.latent.ranks import choose_layer_ranks
from mha2mla.conversion.latent.rules import LowRankRule
from mha2mla.conversion.presets import PRESETS
from mha2mla.conversion.recipe import selections
from mha2mla.conversion.target import LAYOUTS
from mha2mla.pipeline.verify import ParityError
from tests.conversion import tiny
from tests.conversion.one_layer import Layer
from tests.conversion.tiny import Recipe
from tests.few import each
from tests.folders import edit_weights

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


def scale(*parts, factor=0.0, rows=slice(None)):
    """Weights and biases of these projections times ``factor``; of ``o_proj`` the columns of the heads."""

    def change(layer):
        for part in parts:
            for name, parameter in getattr(layer.attention, part).named_parameters():
                if part != "o_proj":
                    parameter[rows] *= factor
                elif name == "weight":
                    parameter[:, rows] *= factor

    return change


def attend_one_token(layer):
    """Every query is 300 times the first key: attention on the first token is 1."""
    layer.inputs[:, 0] *= 100
    scale("q_proj", "k_proj", factor=30.0)(layer)


def make_heads_equal(layer):
    width = layer.spec.head_dim
    for part in PARTS[:3]:
        for parameter in getattr(layer.attention, part).parameters():
            parameter.copy_(parameter[:width].repeat(len(parameter) // width, *[1] * (parameter.dim() - 1)))


def set_biases(layer):
    for part, std in (("q_proj", 80.0), ("k_proj", 150.0), ("v_proj", 10.0)):
        if getattr(layer.attention, part).bias is not None:
            getattr(layer.attention, part).bias.normal_(std=std, generator=torch.Generator().manual_seed(0))


def set_inputs(where, value):
    def change(layer):
        layer.inputs[where] = value

    return change


def repeat_one_token(layer):
    layer.inputs[:] = layer.inputs[0, 0].clone()


def keep_one_window(layer):
    layer.inputs = layer.inputs[:1]


def keep_one_short_window(layer):
    layer.inputs = layer.inputs[:1, :2]


SOURCES = {
    "one token attended": attend_one_token,
    "biases of hundreds": set_biases,
    "dead head": scale(*PARTS, rows=slice(0, 16)),
    "head without queries": scale("q_proj", rows=slice(0, 16)),
    "no queries": scale("q_proj"),
    "no keys": scale("k_proj"),
    "no values": scale("v_proj"),
    "no output": scale("o_proj"),
    "no weights": scale(*PARTS),
    "tiny weights": scale(*PARTS, factor=1e-12),
    "equal heads": make_heads_equal,
    "massive channel": set_inputs((..., 3), 1e4),
    "massive token": set_inputs((slice(None), 0), 1e4),
    "one massive activation": set_inputs((slice(None), 5, 7), 1e4),
    "zero inputs": set_inputs(..., 0.0),
    "one token of a kind": repeat_one_token,
    "one window": keep_one_window,
    "one window of two tokens": keep_one_short_window,
}
MODELS = [("qwen2", torch.float32), ("qwen3-biases-yarn", torch.float32), ("qwen2", torch.float64)]


class DegenerateLayer(Layer):
    """A tiny layer that ``change`` has spoilt, with statistics in ``dtype`` that hold a sample."""

    def __init__(self, case: str, change, dtype: torch.dtype):
        self.change, self.dtype = change, dtype
        super().__init__(case)

    @torch.no_grad()
    def measure(self) -> None:
        self.attention = self.model.model.layers[0].self_attn
        self.change(self)
        self.weights = self.stored_weights()
        narrow = {k: v if v is None else v.to(self.dtype) for k, v in vars(self.weights).items()}
        collector = StatisticsCollector(
            self.spec,
            dataclasses.replace(self.weights, **narrow),
            window=None,
            phases=True,
            attended=True,
            distances=True,
            sample_tokens=10**6,
        )
        collector.add(self.inputs)
        self.statistics = collector.finish()


def not_finite(tensors):
    return [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]


def error(layer, recipe, expected) -> float:
    """Norm of what the converted layer's output is off by."""
    tensors = layer.converted(recipe)
    assert not not_finite(tensors), recipe
    return float((layer.output(recipe, tensors) - expected).norm())


@each("source, model", SOURCES, MODELS)
def test_every_rule_is_finite(source, model):
    """Every selection in every layout, low-rank rules in turn; each of these centred and not. None is worse than no
    attention at all."""
    case, dtype = model
    layer = DegenerateLayer(case, SOURCES[source], dtype)
    assert not not_finite({name: x for name, x in vars(layer.statistics).items() if isinstance(x, torch.Tensor)})
    expected, rules = layer.source_output(), itertools.cycle(itertools.product(LowRankRule.names(), (True, False)))
    for layout in LAYOUTS:
        for selection, (rule, centered) in zip(selections(layout), rules, strict=False):
            keys = {"rope_selection": selection, "latent_rule": rule, "latent_centered": centered, "fit_output": True}
            recipe = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=24, **keys)
            assert error(layer, recipe, expected) <= expected.norm() + 1e-12, recipe


SCALES = st.sampled_from((0.0, 1e-20, 1e-4, 1.0, 1e2, 1e4))


@settings(max_examples=40, deadline=None)
@given(
    scales=st.tuples(*[SCALES] * 6),
    windows=st.integers(1, 3),
    recipe=st.sampled_from(
        [
            Recipe(layout=layout, rope_selection=selection, latent_rule=rule, fit_output=True)
            for layout in LAYOUTS
            for selection in selections(layout)
            for rule in LowRankRule.names()
        ]
    ),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
def test_any_scales_are_finite(scales, windows, recipe, dtype):
    """Of the four projections, their biases, and the inputs of the first head's width."""

    def change(layer):
        layer.inputs = layer.inputs[:windows]
        for part, factor in zip(PARTS, scales[:4], strict=True):
            getattr(layer.attention, part).weight.mul_(factor)
        for part in PARTS[:3]:
            getattr(layer.attention, part).bias.mul_(scales[4])
        layer.inputs[..., :16] *= scales[5]

    layer = DegenerateLayer("qwen2", change, dtype)
    assert not not_finite(layer.converted(recipe))


def change_all(name, change):
    """Applies ``change`` to every parameter whose name holds ``name``."""

    def apply(model):
        for full, parameter in model.named_parameters():
            if name in full:
                change(parameter)

    return apply


def spoil_biases(model):
    for name, std in (("q_proj.bias", 80.0), ("k_proj.bias", 150.0)):
        change_all(name, lambda parameter, std=std: parameter.normal_(std=std))(model)


CHECKPOINTS = {  # what is done to a model, and its calibration tokens [windows, length]
    "biases of hundreds": (spoil_biases, tiny.some_tokens(4, 32)),
    "no attention": (change_all("_proj", lambda parameter: parameter.zero_()), tiny.some_tokens(4, 32)),
    "massive token": (change_all("embed", lambda table: table[7].fill_(1e4)), tiny.some_tokens(4, 32).clamp_max(7)),
    "token of zeros": (change_all("embed", lambda table: table[:130].zero_()), tiny.some_tokens(4, 32)),
    "one token of a kind": (lambda model: None, torch.full((4, 32), 9)),
    "one window": (lambda model: None, tiny.some_tokens(1, 32)),
    "one window of two tokens": (lambda model: None, tiny.some_tokens(1, 2)),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder of a spoilt checkpoint by its name, made once."""

    @functools.cache
    def folder(name):
        path = tmp_path_factory.mktemp("source") / "spoilt"
        model = tiny.model("qwen2")
        with torch.no_grad():
            CHECKPOINTS[name][0](model)
        model.save_pretrained(path)
        return path

    return folder


@each("name, preset", CHECKPOINTS, PRESETS)
def test_every_preset_converts_every_layer(name, preset, checkpoints, tmp_path):
    keys = {"fit_steps": min(2, PRESETS[preset].get("fit.steps", 0)), "latent_ranks": "uniform", "latent_bits": 16}
    if "kv_lora_rank" in PRESETS[preset]:
        keys |= {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "layout": PRESETS[preset]["layout"]}
    walk = tiny.walk_over(checkpoints(name), Recipe(preset, **keys), tiny.config("qwen2"))
    geometries = walk.recipe.geometries(walk.spec)
    walk = dataclasses.replace(
        walk, geometries=geometries, windows=TokenBlocks.of(CHECKPOINTS[name][1]), folder=tmp_path
    )
    made = list(walk)
    assert [layer.layer for layer in made] == [0, 1]
    for layer in made:
        assert not not_finite(layer.tensors) and not layer.fallback
        assert layer.loss_after is None or layer.loss_after <= layer.loss_before
    if walk.recipe.fit.steps:
        chosen, losses = choose_layer_ranks(walk)
        assert sum(rank for rank, _ in chosen) <= 2 * geometries[0].kv_lora_rank
        assert None not in itertools.chain(*losses["ranks"].values())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_rank_and_bits_of_every_layer_are_found(name, checkpoints, tmp_path):
    """Latents and gradients may be constant or zero."""
    recipe = Recipe("quick", cache_ratio=0.16, latent_bits="auto")
    texts = {"calibration": CHECKPOINTS[name][1], "evaluation": tiny.some_tokens(2, 32)}
    if name in ("no attention", "one token of a kind"):  # refused for what they are
        with pytest.raises((UnsupportedSourceError, ParityError)):
            tiny.convert(checkpoints(name), tmp_path / "mla", recipe, **texts)
        return
    report = tiny.convert(checkpoints(name), tmp_path / "mla", recipe, **texts)
    assert {row["latent_bits"] for row in report.layers} <= {2, 3, 4, 8} and report.cache_ratio <= 0.16
    state = load_file(tmp_path / "mla" / "model.safetensors")
    assert not not_finite(state) and sum(key.endswith("latent_centers") for key in state) == 2


def test_biases_of_hundreds_cost_no_more_in_bfloat16_than_the_source_s(checkpoints):
    """Of a layer's output, against float64: the converted one's rounding is at most twice the source's own."""
    walk = tiny.walk_over(
        checkpoints("biases of hundreds"),
        Recipe("latent", latent_ranks="uniform", latent_bits=16),
        tiny.config("qwen2"),
    )
    walk = dataclasses.replace(walk, geometries=walk.recipe.geometries(walk.spec))
    with walk.stores(1) as (store,):
        walk.model.embed(store)
        module, inputs, collector = walk.model.layer(0), walk.first_window(store), walk.collector(0)
        walk.model.run_layer(module, 0, store, tokens=2048, observe=collector.add)
    converted = copy.deepcopy(module)
    converted.self_attn = walk.empty_attention(0)
    converted.self_attn.load_state_dict(walk.convert(0, collector.finish())[0], assign=True)
    errors = []
    for layer in (module, converted):
        exact, rounded = (
            attention_output(walk.model, layer, inputs.to(dtype)) for dtype in (torch.float64, torch.bfloat16)
        )
        errors.append(float((rounded - exact).norm() / exact.norm()))
    assert 0 < errors[1] <= 2 * errors[0]


@torch.no_grad()
def attention_output(model, layer, inputs) -> torch.Tensor:
    """Of a decoder layer's attention alone, computed in the inputs' dtype."""
    arguments = model.layer_arguments(0, inputs)
    arguments["position_embeddings"] = tuple(table.to(inputs.dtype) for table in arguments["position_embeddings"])
    layer = copy.deepcopy(layer).to(inputs.dtype)
    return layer.self_attn(layer.input_layernorm(inputs), **arguments)[0].double()


def test_a_layer_whose_output_nothing_reads_gets_codes(tmp_path):
    source = tiny.checkpoint(tmp_path / "source", "olmo2")
    edit_weights(source, {"model.layers.1.post_attention_layernorm.weight": torch.zeros_like})
    recipe = {**tiny.SHORT, "cache_ratio": 0.5, "latent.bits": 4}
    assert tiny.convert(source, tmp_path / "out", recipe).parity.perplexity_ratio < 2


@pytest.mark.parametrize(("noise", "queries", "kl"), [(0.0, True, 1e-6), (0.0, False, 1e-6), (1e-3, True, 1e-4)])
def test_a_latent_of_one_head_is_enough_for_heads_that_hardly_differ(noise, queries, kl, tmp_path):
    """Un-rotated keys are rounding, which gets no rank and no queries; or a millionth of all keys' variance, which
    would get as much of the latent as the values."""
    source = tiny.checkpoint(tmp_path / "source", num_key_value_heads=4, num_attention_heads=8)

    def nearly_equal(weight):
        random = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        return weight[: len(weight) // 4].repeat(4, 1) + noise * weight.std() * random

    names = (f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "kv")
    edit_weights(source, dict.fromkeys(names, nearly_equal))
    widths = {"layout": "shared", "cache_ratio": None, "kv_lora_rank": 16, "qk_rope_head_dim": 16}
    report = tiny.convert(source, tmp_path / "out", {**tiny.SHORT, **widths, "fit.queries": queries})
    assert report.parity.kl < kl
