"""The walk over the layers: streams, targets, resuming, and what it leaves alone."""

import functools
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from mha2mla.conversion import layer_walk
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.families import adapter_for
from mha2mla.conversion.fit import reconstruction
from mha2mla.conversion.fit.reconstruction import ReconstructionError, reconstruct
from mha2mla.conversion.latent.basis import layer_statistics
from mha2mla.conversion.layer import finish_layer, prepare_layer
from mha2mla.conversion.layer_walk import LayerSteps, LayerWalk, block_forward, token_weights
from mha2mla.conversion.source import streaming
from mha2mla.conversion.source.files import CheckpointReader
from mha2mla.conversion.source.streaming import StreamedModel
from tests.conversion import tiny
from tests.conversion.tiny import Recipe
from tests.few import few

CPU = torch.device("cpu")
TARGETS = {
    "corrected": (1.0, {}),
    "half corrected": (0.5, {"latent_up_projections": "query-head"}),
    "not corrected": (0.0, {}),
}
Fitted = functools.partial(Recipe, layout="shared", fit_steps=64, qk_rope_head_dim=8, kv_lora_rank=24)


@pytest.fixture(autouse=True)
def a_rate_for_few_steps(monkeypatch):
    monkeypatch.setattr(reconstruction, "_LEARNING_RATE", 0.01)


@pytest.fixture
def sources(checkpoint_of):
    """Folder of a checkpoint of three layers by the name of its case."""
    return functools.partial(checkpoint_of, num_hidden_layers=3)


def sequence(source, recipe, scratch, dtype=torch.float32, windows=16, **keys):
    config = AutoConfig.from_pretrained(source)
    adapter = adapter_for(config.to_dict())
    spec = adapter.specify(config)
    model = StreamedModel(config, CheckpointReader(source), spec.sliding_windows, device=CPU, dtype=dtype)
    tokens = TokenBlocks.of(tiny.some_tokens(windows, 32))
    geometries = keys.pop("geometries", recipe.geometries(spec))
    return LayerWalk(model, adapter, spec, geometries, recipe, tokens, scratch, **keys)


def first(walk):
    """The first layer alone: each takes seconds."""
    return next(iter(walk))


def same(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left.layer == right.layer and list(left.tensors) == list(right.tensors)
        for name, tensor in left.tensors.items():
            assert tensor.dtype == right.tensors[name].dtype and torch.equal(tensor, right.tensors[name]), name


@few(
    "case, layout, target",
    [("llama", "shared", "half corrected"), ("qwen3-biases-yarn", "per-group", "corrected")]
    + [("llama", "shared", target) for target in ("corrected", "not corrected")]
    + [("qwen3-biases-yarn", "shared", "corrected")]
    + [("qwen2-sliding", layout, "corrected") for layout in ("shared", "per-group")]
    + [("qwen3-biases-yarn", "latent", "half corrected"), ("qwen2-sliding", "latent", "corrected")],
    count=2,
)
def test_every_target_lowers_the_loss_of_every_layer(case, layout, target, sources, tmp_path, monkeypatch):
    correction, keys = TARGETS[target]
    monkeypatch.setattr(layer_walk, "_CORRECTION", correction)
    # Fewer windows would be overfitted: then the start is the best on held-out ones, and stays.
    made = list(sequence(sources(case), Fitted(layout=layout, **keys), tmp_path, windows=160))
    assert [layer.layer for layer in made] == [0, 1, 2]
    for layer in made:
        assert 0 < layer.loss_after < layer.loss_before
        assert layer.seconds > 0 and layer.note.startswith("eager")
    assert not list(tmp_path.iterdir())


def test_reconstruction_brings_the_logits_closer(sources, tmp_path):
    texts = {"calibration": tiny.some_tokens(160, 32), "evaluation": tiny.some_tokens(4, 32)}
    plain, fitted = (
        tiny.convert(sources("llama"), tmp_path / str(steps), Fitted(fit_steps=steps), **texts) for steps in (0, 100)
    )
    assert fitted.parity.logits_relative_error < 0.9 * plain.parity.logits_relative_error


@pytest.mark.parametrize("case", ["llama", "qwen3-biases-yarn"])
def test_steps_fit_the_map_from_the_latent_to_rotary_keys(case, sources, tmp_path):
    source = sources(case)
    start, fitted = (
        first(sequence(source, Fitted(layout="latent", fit_steps=steps), tmp_path, windows=64)).tensors
        for steps in (0, 24)
    )
    for name in ("k_rope_proj.weight", "k_rope_proj.bias"):
        assert (start[name] != fitted[name]).float().mean() > 0.9, name
    assert torch.equal(start["inv_freq"], fitted["inv_freq"])


@pytest.mark.parametrize(
    "keys",
    [
        {"layout": "shared"},
        {"layout": "shared", "fit_steps": 5},
        {"layout": "latent", "fit_steps": 5, "latent_up_projections": "query-head"},
    ],
)
def test_a_resumed_walk_goes_on_to_the_bit(keys, sources, tmp_path):
    recipe = Recipe(qk_rope_head_dim=8, kv_lora_rank=24, **keys)
    walk = functools.partial(sequence, sources("llama"), recipe, tmp_path, weights_dtype=torch.bfloat16)
    undisturbed = list(walk())
    for finished in range(4):
        resumed = list(walk(done={index: undisturbed[index].tensors for index in range(finished)}))
        same(resumed, undisturbed[finished:])


@pytest.mark.parametrize("keys", [{}, {"fit_steps": 24}])
def test_a_walk_over_several_lengths_resumes_to_the_bit(keys, sources, tmp_path):
    recipe = Fitted(**{"fit_steps": 0, **keys})
    windows = TokenBlocks.of([tiny.some_tokens(64, 16), tiny.some_tokens(16, 64)])
    walk = functools.partial(sequence, sources("llama"), recipe, tmp_path)
    undisturbed = list(replace(walk(), windows=windows))
    resumed = list(replace(walk(done={0: undisturbed[0].tensors}), windows=windows))
    same(resumed, undisturbed[1:])
    same(undisturbed, list(replace(walk(spill_bytes=0), windows=windows)))
    for one in ([tiny.some_tokens(64, 16)], [tiny.some_tokens(16, 64)]):
        alone = first(replace(walk(), windows=TokenBlocks.of(one)))
        assert not torch.equal(alone.tensors["v_b_proj"], undisturbed[0].tensors["v_b_proj"])
    if recipe.fit.steps:
        assert all(layer.loss_after < layer.loss_before for layer in undisturbed)


def test_the_converted_stream_passes_the_stored_tensors(sources, tmp_path):
    """Layer 1 is fitted behind layer 0 as it is stored: in bfloat16, not as it was fitted."""
    recipe = Recipe(layout="shared", qk_rope_head_dim=8, kv_lora_rank=24, fit_steps=5)
    wide, narrow = (
        list(sequence(sources("llama"), recipe, tmp_path, weights_dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(wide[0].tensors["kv_a_proj.weight"].bfloat16(), narrow[0].tensors["kv_a_proj.weight"])
    handed = {0: {name: tensor.float() for name, tensor in narrow[0].tensors.items()}}
    follows = list(sequence(sources("llama"), recipe, tmp_path, done=handed))
    assert torch.equal(follows[0].tensors["v_b_proj"].bfloat16(), narrow[1].tensors["v_b_proj"])


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_a_full_rank_layer_is_left_alone(case, sources, tmp_path):
    fitted, plain = (
        list(sequence(sources(case), Recipe(cache_ratio=1.0, fit_steps=steps), tmp_path)) for steps in (5, 0)
    )
    same(fitted, plain)
    assert all(layer.loss_before is None for layer in fitted)


CODED = {"layout": "latent", "fit_steps": 40, "kv_lora_rank": 32, "qk_rope_head_dim": 8}


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_steps_feel_the_codes_and_gradients_pass(case, sources, tmp_path):
    """Layers are fitted over latents that their codes give back, in a basis that is held: errors are those of codes."""
    found = []

    def observed(problem, tensors, fit, **keys):
        inputs = problem.inputs.read(slice(0, 4), CPU)
        held = {"inv_freq", "latent_centers"}
        leaves = {name: tensor.float().requires_grad_(name not in held) for name, tensor in tensors.items()}
        coded = problem.forward(leaves, inputs)
        coded.square().sum().backward()
        assert leaves[encoder].grad.norm() > 0
        with torch.no_grad():
            moved = problem.forward(leaves | {"latent_centers": leaves["latent_centers"] + 0.1}, inputs)
        assert tiny.relative(moved, coded.detach()) > 1e-4  # codes are differences from other centers
        found.append(reconstruct(problem, tensors, fit, **keys))
        assert torch.equal(found[-1].tensors["latent_centers"], tensors["latent_centers"])
        # The same steps over latents without codes end at larger errors of codes.
        unfelt = replace(problem, forward=block_forward(walks[0], 0, walks[0].model.layer(0)))
        rest = {name: tensor for name, tensor in tensors.items() if name != "latent_centers"}
        others = tensors | reconstruct(unfelt, rest, fit, **keys).tensors
        assert error(problem, found[-1].tensors) < error(problem, others)
        return found[-1]

    @torch.no_grad()
    def error(problem, tensors):
        inputs, targets = (store.read(slice(0, len(store)), CPU) for store in (problem.inputs, problem.targets))
        return tiny.relative(problem.forward({name: each.float() for name, each in tensors.items()}, inputs), targets)

    encoder = "kv_a_proj.weight" if case == "llama" else "v_a_proj.weight"
    walks = [
        sequence(sources(case), Recipe(**CODED, latent_bits=bits), tmp_path, windows=256, steps=steps)
        for bits, steps in ((3, LayerSteps(reconstruct=observed)), (16, LayerSteps()))
    ]
    coded, plain = map(first, walks)
    assert len(found) == 1 and "latent_centers" not in coded.tensors
    assert coded.loss_before > 1.1 * plain.loss_before
    assert coded.loss_after < coded.loss_before


def test_the_basis_of_a_fit_is_of_the_layer_s_errors():
    """For out = 2 c A + b the importance is 4 A Aᵀ weighted by token; first tokens do not count."""
    torch.manual_seed(0)
    latents, matrix = torch.randn(64, 9, 6), torch.randn(6, 6)

    def forward(inputs, past_key_values):
        halves = inputs[:, None].split((3, 3), -1)
        cached = past_key_values.update(*halves, 0)
        return 2 * torch.cat(cached, -1)[:, 0] @ matrix

    batches = [(part, torch.full(part.shape[:2], 0.25)) for part in latents.split(8)]
    found = layer_statistics(forward, batches, 0, has_rope_cache=False)
    assert len(found.rows) <= 64 * 8 and torch.equal(found.first, latents[:, 0])
    expected = (matrix @ matrix.T).double()
    assert tiny.relative(found.importance, expected) < 0.2


@pytest.mark.parametrize("correction", [0.0, 0.25])
def test_a_correction_lies_between_the_two_streams(correction, sources, tmp_path, monkeypatch):
    seen = []

    def observed(problem, tensors, fit, **keys):
        if keys["layer"] == 1:
            seen.append([store.read(slice(0, len(store)), CPU) for store in (problem.inputs, problem.targets)])
        return reconstruct(problem, tensors, fit, **keys)

    recipe = Fitted(fit_steps=2)
    for share in (correction, 1.0):
        monkeypatch.setattr(layer_walk, "_CORRECTION", share)
        walk = sequence(sources("llama"), recipe, tmp_path, steps=LayerSteps(reconstruct=observed))
        list(walk)
    (inputs, blended), (_, theirs) = seen
    # Layer 0 was fitted to the same target in both walks: with it nothing was lost yet.
    with torch.inference_mode():
        own = walk.model.forward_layer(walk.model.layer(1), 1, inputs)
    assert torch.equal(blended, own.lerp(theirs, correction))
    assert not torch.equal(own, theirs)


def test_spilt_streams_and_inference_mode_give_the_same_bits(sources, tmp_path):
    recipe, spilt = Fitted(fit_steps=4), []
    kept = list(sequence(sources("llama"), recipe, tmp_path))
    for layer in sequence(sources("llama"), recipe, tmp_path, spill_bytes=0):
        spilt.append(layer)
        assert tiny.spilt_files(tmp_path) == 3  # one file per stream
    same(kept, spilt)
    assert tiny.spilt_files(tmp_path) == 0
    with torch.inference_mode():  # steps have gradients all the same
        same(kept, list(sequence(sources("llama"), recipe, tmp_path)))


def test_an_abandoned_walk_frees_its_streams(sources, tmp_path):
    walk = iter(sequence(sources("llama"), Fitted(fit_steps=1), tmp_path, spill_bytes=0))
    next(walk)
    assert tiny.spilt_files(tmp_path)
    walk.close()
    assert not tiny.spilt_files(tmp_path)


def test_bfloat16_products_fit_float32_weights(sources, tmp_path, monkeypatch):
    """As on a GPU."""
    full = first(sequence(sources("llama"), Fitted(fit_steps=24), tmp_path, windows=160))
    monkeypatch.setattr(reconstruction, "_NARROW", ("cpu",))
    made = first(sequence(sources("llama"), Fitted(fit_steps=24), tmp_path, windows=160))
    assert made.loss_after < made.loss_before
    assert made.loss_after == pytest.approx(full.loss_after, rel=0.02) and made.loss_after != full.loss_after


class FailingSteps:
    """Gradient steps that fail at layer 1 as ``fail`` says; remembers what they started from."""

    def __init__(self, fail):
        self.fail, self.start = fail, {}

    def reconstruct(self, problem, tensors, fit, *, seed, layer):
        self.start[layer] = tensors
        found = reconstruct(problem, tensors, fit, seed=seed, layer=layer)
        return self.fail(found) if layer == 1 else found


def without_number(found):
    return replace(found, tensors={**found.tensors, "v_b_proj": found.tensors["v_b_proj"] * float("nan")})


def raises(error):
    def fail(found):
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (raises(ReconstructionError("layer 1: the loss before reconstruction is nan")), "the loss before .* is nan"),
        (raises(torch.linalg.LinAlgError("linalg.eigh: did not converge.\nDetails")), "linalg.eigh: did not converge"),
        (without_number, "v_b_proj was not finite after them"),
    ],
    ids=["loss", "eigenvectors", "result"],
)
def test_a_layer_without_steps_keeps_its_closed_form(fail, reason, sources, tmp_path):
    failing = FailingSteps(fail)
    walk = sequence(sources("llama"), Fitted(fit_steps=2), tmp_path, steps=LayerSteps(reconstruct=failing.reconstruct))
    made = list(walk)
    assert [bool(layer.fallback) for layer in made] == [False, True, False]
    assert re.fullmatch(f"left without gradient steps, since {reason}", made[1].fallback)
    assert made[1].record()["fallback"] == made[1].fallback and made[1].loss_after is None
    assert all(torch.equal(tensor, failing.start[1][name].float()) for name, tensor in made[1].tensors.items())


def test_inherited_errors_do_not_outweigh_a_layers_own(sources, tmp_path):
    """A first layer that goes astray: what nothing can mend counts less than once in the losses of the others."""

    def astray(problem, tensors, fit, *, seed, layer):
        found = reconstruct(problem, tensors, fit, seed=seed, layer=layer)
        if layer > 0:
            return found
        return replace(found, tensors={**found.tensors, "v_b_proj": found.tensors["v_b_proj"] * 1e4})

    walk = sequence(sources("llama"), Fitted(fit_steps=2), tmp_path, steps=LayerSteps(reconstruct=astray))
    assert all(layer.loss_before < 1 for layer in walk)


class FailingForms:
    """Closed forms of which the first ``failures`` of a layer fail; ``spoil`` instead of an error where given."""

    def __init__(self, failures, spoil=None):
        self.failures, self.spoil, self.recipes = failures, spoil, []

    def prepare(self, spec, geometry, recipe, weights, statistics):
        self.recipes.append((recipe, statistics))
        return prepare_layer(spec, geometry, recipe, weights, statistics)

    def finish(self, spec, geometry, recipe, prepared):
        tensors = finish_layer(spec, geometry, recipe, prepared)
        if len(self.recipes) > self.failures:
            return tensors
        if self.spoil is None:
            raise torch.linalg.LinAlgError("linalg.solve: singular")
        return {**tensors, "q_proj.weight": tensors["q_proj.weight"] * self.spoil}


@pytest.mark.parametrize(
    ("spoil", "reason", "steps"),
    [
        (None, "linalg.solve: singular", 2),
        (float("nan"), "q_proj.weight was not finite", 0),
        (1e38, "the layer's output", 2),
    ],
    ids=["error", "nan", "output"],
)
def test_failing_closed_forms_give_way_to_plainer_ones(spoil, reason, steps, sources, tmp_path):
    for failures, said in ((1, "the recipe's rules without refits"), (2, "rope.selection high and latent.rule svd")):
        forms = FailingForms(failures, spoil)
        walk = sequence(
            sources("llama"),
            Fitted(fit_steps=steps, fit_output=True),
            tmp_path,
            steps=LayerSteps(forms.prepare, forms.finish),
        )
        first, second, _ = walk
        assert first.fallback.startswith(f"converted by {said}") and f"since {reason}" in first.fallback
        assert not second.fallback and len(forms.recipes) == failures + 3
        assert all(torch.isfinite(tensor).all() for tensor in first.tensors.values())
        used, statistics = forms.recipes[failures]
        assert not used.refit_queries and not used.refit_output and (statistics is None) == (failures == 2)
    with pytest.raises(ReconstructionError, match=f"layer 0: no rule gives a finite layer: {reason}"):
        list(replace(walk, steps=LayerSteps(forms.prepare, FailingForms(9, spoil).finish)))


def test_tokens_without_energy_do_not_count(sources, tmp_path):
    values = torch.randn(2, 32, 48)
    values[0, 3], values[1, 5] = 0, 1e-12
    with sequence(sources("llama"), Fitted(), tmp_path, windows=2).stores(1) as (store,):
        store.write(slice(0, 2), values)
        weights = token_weights(store, 64, CPU)
    assert weights[0, 3] == weights[1, 5] == 0
    expected = 1 / values.square().mean(-1)
    kept = weights > 0
    assert kept.sum() == 62 and torch.allclose(weights[kept], expected[kept])


def test_a_walk_keeps_activations_where_they_fit(sources, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(streaming, "device_for_activations", lambda device, size: asked.append(size) or CPU)
    walk = sequence(sources("llama"), Recipe(layout="latent", cache_ratio=0.5), tmp_path)
    assert len(list(walk)) == 3 and asked == [walk.windows.tokens.numel() * walk.spec.hidden_size * 4]
