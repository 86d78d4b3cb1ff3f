"""One layer: the identities that conversion rests on, and every recipe against the source's attention."""

import itertools
from dataclasses import replace

import pytest
import torch

from mha2mla.conversion import recipe as recipes
from mha2mla.conversion.calibration.statistics import LayerStatistics, StatisticsCollector
from mha2mla.conversion.families import ADAPTERS, AttentionWeights, SourceSpec
from mha2mla.conversion.latent import rules as latent_rules
from mha2mla.conversion.latent.rules import LOW_RANKS, factorise
from mha2mla.conversion.layer import latent_problem, rotary_basis
from mha2mla.conversion.recipe import selections
from mha2mla.conversion.rope import rules as rope_rules
from mha2mla.conversion.rope.basis import RotaryBasis
from mha2mla.conversion.rope.rules import RoRoPE, folded_components, key_second_moment, rotation_cost
from mha2mla.conversion.target import LAYOUTS
from tests.conversion import tiny
from tests.conversion.plain_mla import plain_mla_attention


def Recipe(**keys) -> recipes.Recipe:
    return tiny.Recipe(**{"layout": "per-group", **keys})  # unless a test says otherwise


SELECTIONS = [(layout, selection) for layout in LAYOUTS for selection in selections(layout)]


class _State:
    """A model's parameters, as a checkpoint would hand them out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tensor = model.state_dict().__getitem__


class Layer:
    """The first layer of a tiny model in float64: its attention, its weights, inputs and their statistics."""

    def __init__(self, case: str = "llama", **keys):
        family, case_keys = tiny.CASES[case]
        self.model = tiny.model(family, **{**case_keys, **keys}).double()
        adapter = ADAPTERS[family]
        self.spec: SourceSpec = adapter.specify(self.model.config).of_layer(0)
        self.weights: AttentionWeights = adapter.attention_weights(
            _State(self.model), self.spec, 0, device=torch.device("cpu"), dtype=torch.float64
        )
        # Correlated inputs with a mean, as real ones are.
        generator = torch.Generator().manual_seed(5)
        mixing = torch.randn(self.spec.hidden_size, self.spec.hidden_size, generator=generator, dtype=torch.float64)
        decay = torch.logspace(0, -2, self.spec.hidden_size, dtype=torch.float64)
        noise = torch.randn(6, 40, self.spec.hidden_size, generator=generator, dtype=torch.float64)
        self.inputs = (
            noise * decay @ mixing / 3 + 0.5 * torch.randn(self.spec.hidden_size, generator=generator).double()
        )
        window = self.spec.sliding_windows[0]
        self.measure()
        distance = torch.arange(40)[:, None] - torch.arange(40)[None]
        self.mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)

    def measure(self) -> None:
        """Takes the statistics of the inputs."""
        window = self.spec.sliding_windows[0]
        collector = StatisticsCollector(
            self.spec, self.weights, window=window, phases=True, attended=True, distances=True
        )
        collector.add(self.inputs[:4])
        collector.add(self.inputs[4:])
        self.statistics: LayerStatistics = collector.finish()

    @torch.no_grad()
    def source_output(self) -> torch.Tensor:
        """What transformers' own attention makes of the inputs."""
        base = self.model.model
        kind = [base.config.layer_types[0]] if isinstance(base.rotary_emb.rope_type, dict) else []
        rotary = base.rotary_emb(self.inputs.float(), torch.arange(40)[None], *kind)
        rotary = tuple(table.double() for table in rotary)
        return base.layers[0].self_attn(self.inputs, position_embeddings=rotary, attention_mask=self.mask[None, None])[
            0
        ]

    def converted(self, recipe: recipes.Recipe) -> dict[str, torch.Tensor]:
        return tiny.convert_layer(self.spec, recipe.geometry(self.spec), recipe, self.weights, self.statistics)

    def output(self, recipe: recipes.Recipe, tensors=None, first_position: int = 0) -> torch.Tensor:
        return plain_mla_attention(
            self.inputs,
            self.converted(recipe) if tensors is None else tensors,
            recipe.geometry(self.spec),
            self.spec,
            self.mask,
            first_position,
        )


def frequencies(spec, basis: RotaryBasis) -> torch.Tensor:
    """[G, d_r // 2], index of each kept pair's frequency in the source's table."""
    return (basis.inv_freq[..., None] == spec.inv_freq.double()).int().argmax(-1)


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", tiny.CASES)
def test_full_rank_is_the_source(case, layout):
    layer = Layer(case)
    recipe = Recipe(layout=layout, cache_ratio=1.0)
    assert relative(layer.output(recipe), layer.source_output()) < 2e-6  # the source's cos and sin are float32
    # Nothing is left to choose at full rank, so what holds for one recipe holds for all.
    expected = layer.converted(recipe)
    for selection, low_rank in itertools.product(selections(layout), LOW_RANKS):
        other = Recipe(layout=layout, cache_ratio=1.0, rope_selection=selection, latent_rule=low_rank)
        tensors = layer.converted(other)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("layout", "selection"), SELECTIONS)
def test_all_pairs_but_one_rank_everything_is_the_source_when_nothing_is_un_rotated(layout, selection):
    layer = Layer("qwen2")
    width = layer.spec.num_key_value_heads * layer.spec.head_dim
    rope = layer.spec.head_dim if layout == "per-group" else width
    rank = 2 * width if layout == "latent" else width  # rotary keys too
    recipe = Recipe(layout=layout, rope_selection=selection, qk_rope_head_dim=rope, kv_lora_rank=rank)
    assert relative(layer.output(recipe), layer.source_output()) < 2e-6


def shared_basis(layer: Layer, kept: int, selection: str = "rotation", **keys) -> RotaryBasis:
    width = 2 * layer.spec.num_key_value_heads * layer.spec.head_dim
    keys = {"layout": "shared", "fit_queries": False, "rope_selection": selection} | keys
    recipe = Recipe(qk_rope_head_dim=kept, kv_lora_rank=width - kept, **keys)
    return rotary_basis(layer.spec, recipe.geometry(layer.spec), recipe, layer.statistics, layer.weights)


# A fold treats neighbouring frequencies as one: what it mixes commutes only nearly.
EXACT = [name for name in selections("shared") if not name.startswith("rorope-")]


@pytest.mark.parametrize("selection", EXACT)
def test_rope_commutes_with_a_unitary_map_across_heads(selection):
    """Kept and dropped parts of a shared basis add up to the source's scores when both are rotated."""
    layer = Layer("qwen2", num_key_value_heads=4)
    basis = shared_basis(layer, 12, selection)
    spec = layer.spec
    heads, kv_heads, d = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    query = torch.randn(heads, d, dtype=torch.float64)
    key = torch.randn(kv_heads, d, dtype=torch.float64)

    def score(query, key, inv_freq, distance):
        half = query.shape[-1] // 2
        turn = torch.polar(torch.ones(half, dtype=torch.float64), inv_freq.double() * distance)
        return (
            (torch.complex(query[..., :half], query[..., half:]) * turn)
            .conj()
            .mul(torch.complex(key[..., :half], key[..., half:]))
            .real.sum(-1)
        )

    for distance in (0, 1, 17):
        expected = score(query, key.repeat_interleave(spec.group_size, 0), spec.inv_freq, distance)
        stacked = key.flatten()
        kept = score(
            torch.einsum("hed,hd->he", basis.query_rope, query),
            basis.key_rope[0] @ stacked,
            basis.inv_freq[0],
            distance,
        )
        left = (basis.key_nope @ stacked).repeat_interleave(spec.group_size, 0)
        dropped = score(torch.einsum("hed,hd->he", basis.query_nope, query), left, spec.inv_freq, distance)
        assert torch.allclose(kept + dropped, expected)


@pytest.mark.parametrize("case", ["llama", "glm4-no-biases", "olmo2", "gemma3"])
def test_the_gain_of_an_output_is_that_of_the_norms_before_the_mlp(case):
    """With nothing in the residual stream, and all channels of the attention's output equally large."""
    layer = Layer(case)
    block = layer.model.model.layers[0]
    for name, parameter in block.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter)
    weights = ADAPTERS[layer.spec.model_type].attention_weights(
        _State(layer.model), layer.spec, 0, device=torch.device("cpu"), dtype=torch.float64
    )
    output = torch.randn(1, 1, layer.spec.hidden_size).sign().double()
    block.self_attn.forward = lambda **_: (output, None)
    seen = []
    block.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    block(torch.zeros_like(output), position_embeddings=None)
    expected = torch.nn.functional.normalize(output * weights.output_gain, dim=-1)
    torch.testing.assert_close(torch.nn.functional.normalize(seen[0], dim=-1), expected, rtol=0, atol=1e-6)


def test_value_errors_count_as_the_mlp_is_given_them():
    layer = Layer("gemma3")
    layer.weights = replace(layer.weights, output_gain=torch.rand(layer.spec.hidden_size, dtype=torch.float64))
    basis = shared_basis(layer, 4)
    problem = latent_problem(layer.spec, layer.weights, basis, layer.statistics)
    error = torch.randn(layer.spec.num_attention_heads, layer.spec.head_dim, dtype=torch.float64)
    for kv_head, metric in enumerate(problem.value_metric):
        group = slice(kv_head * layer.spec.group_size, (kv_head + 1) * layer.spec.group_size)
        one = error[group.start]  # of a value, which all heads of the group read
        each = torch.zeros(layer.spec.group_size, *error.shape, dtype=torch.float64)
        each[range(layer.spec.group_size), range(group.start, group.stop)] = one
        cost = (layer.weights.output_gain * (each.flatten(1) @ layer.weights.o_weight.T)).square().sum()
        torch.testing.assert_close(one @ metric @ one, cost)


def test_a_shared_basis_keeps_the_largest_components():
    layer = Layer("llama", num_key_value_heads=4)
    few, more = shared_basis(layer, 8), shared_basis(layer, 24)
    listed = [sorted(frequencies(layer.spec, basis).flatten().tolist()) for basis in (few, more)]
    remaining = list(listed[1])
    for frequency in listed[0]:
        remaining.remove(frequency)  # ValueError if a pair kept first is dropped later
    assert len(remaining) == 8


def test_heads_earn_uneven_numbers_of_pairs():
    """A head whose queries hardly read its keys gets none."""
    layer = Layer("llama", num_key_value_heads=2)
    weight = layer.weights.q_weight.clone()
    weight[:32] *= 1e-3  # the query heads of the first kv head
    layer.weights = AttentionWeights(**{**vars(layer.weights), "q_weight": weight})
    layer.measure()
    basis = shared_basis(layer, 12, "2-norm")
    read = basis.key_rope[0].view(12, 2, 16).abs().sum((0, 2))
    assert read.tolist() == [0.0, 12.0]


def test_keys_of_one_direction_need_one_component_per_fold():
    """RoRoPE: keys that lie in one real direction of (head, frequency in a fold) are kept whole by one component."""
    layer = Layer("llama", num_key_value_heads=4)
    spec, fold = layer.spec, 2
    half, kv_heads = spec.head_dim // 2, spec.num_key_value_heads
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(half // fold, kv_heads, fold, generator=generator, dtype=torch.float64)
    content = torch.randn(2, half // fold, 500, generator=generator, dtype=torch.float64)  # of both halves of a pair
    keys = torch.einsum("gaf,igt->aigft", direction, content).reshape(kv_heads * spec.head_dim, -1)
    components = folded_components(spec, keys @ keys.T / 500, half // fold, fold)
    assert components.frequency.tolist() == [0, 2, 4, 6]
    z = torch.complex(*keys.view(kv_heads, 2, half, -1).unbind(1))
    kept = torch.einsum("ajn,nbl,blt->ajt", components.decode, components.encode, z)
    assert torch.allclose(kept, z)
    fewer = folded_components(spec, keys @ keys.T / 500, half // fold - 1, fold)
    lost = z - torch.einsum("ajn,nbl,blt->ajt", fewer.decode, fewer.encode, z)
    assert torch.allclose(lost[:, :6], torch.zeros_like(z[:, :6])) and torch.allclose(lost[:, 6:], z[:, 6:])


@pytest.mark.parametrize(("fold", "pairs"), [(1, 8), (2, 4), (4, 6), (8, 11)])
def test_folded_frequencies_are_taken_at_even_steps(fold, pairs):
    layer = Layer("qwen3", num_key_value_heads=4, head_dim=16)
    moment = key_second_moment(layer.spec, layer.statistics, layer.weights)
    components = folded_components(layer.spec, moment, pairs, fold)
    expected = {1: list(range(8)), 2: [0, 2, 4, 6], 4: [0, 1, 2, 4, 5, 6], 8: [8 * i // 11 for i in range(11)]}
    assert components.frequency.tolist() == expected[fold]
    product = torch.einsum("naj,ajm->nm", components.encode, components.decode)
    assert torch.allclose(product, torch.eye(pairs, dtype=product.dtype))
    assert float(components.encode.imag.abs().max()) == 0.0


@pytest.mark.parametrize("case", ["qwen2", "qwen3-biases-yarn"])
def test_second_moments_of_keys_agree_with_those_per_frequency(case):
    layer = Layer(case)
    spec, half = layer.spec, layer.spec.head_dim // 2
    heads = spec.num_key_value_heads
    moment = key_second_moment(spec, layer.statistics, layer.weights).view(heads, 2, half, heads, 2, half)
    parts = moment.diagonal(dim1=2, dim2=5).permute(4, 0, 2, 1, 3)  # [half, h_kv, h_kv, 2, 2]
    expected = torch.complex(parts[..., 0, 0] + parts[..., 1, 1], parts[..., 1, 0] - parts[..., 0, 1])
    assert torch.allclose(layer.statistics.key_covariance, expected)


def test_rules_of_the_shared_layout_are_refused_in_the_other():
    with pytest.raises(ValueError, match="rope.selection is 'rorope' in the per-group layout"):
        Recipe(rope_selection="rorope")
    with pytest.raises(ValueError, match="rope.selection folds 3 frequencies; expected a divisor of a head's 8"):
        RoRoPE(3).check(Layer("llama").spec)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["qwen2", "qwen3", "phi3", "olmo2", "gemma3"])
def test_without_rotation_dropping_it_costs_nothing(case, layout):
    """At one position all pairs are un-rotated: partial RoPE at full rank is then exact, biases, norms and all."""
    layer = Layer(case)
    still = SourceSpec(**{**vars(layer.spec), "inv_freq": torch.zeros_like(layer.spec.inv_freq)})
    layer.spec = still
    width = layer.spec.num_key_value_heads * layer.spec.head_dim
    rank = 2 * width - {"latent": 0, "shared": 8, "per-group": 8 * layer.spec.num_key_value_heads}[layout]
    # Of a shared basis this rank is the target's very own, below the number of its rows.
    recipe = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=rank, fit_queries=False, latent_rule="svd-joint")
    exact = Recipe(layout=layout, cache_ratio=1.0)
    # Principal components come from eigenvalues, squares of singular values: half of float64's digits.
    assert relative(layer.output(recipe), layer.output(exact)) < 1e-6


def test_a_key_bias_on_un_rotated_dims_is_dropped_and_on_rotated_ones_kept():
    layer = Layer("qwen2")
    recipe = Recipe(qk_rope_head_dim=4, kv_lora_rank=40)
    tensors = layer.converted(recipe)
    bias = tensors["kv_a_proj.bias"]
    assert (bias[:40] == 0).all() and (bias[40:] != 0).all()
    # Any bias of un-rotated key rows shifts all scores of a query alike.
    shifted = {**tensors, "kv_a_proj.bias": bias.clone()}
    shifted["k_b_proj"] = torch.cat([tensors["k_b_proj"], torch.randn_like(tensors["k_b_proj"][..., :1])], -1)
    shifted["v_b_proj"] = torch.cat([tensors["v_b_proj"], torch.zeros_like(tensors["v_b_proj"][..., :1])], -1)
    shifted["kv_a_proj.bias"] = torch.cat([bias[:40], torch.ones(1).double(), bias[40:]])
    weight = tensors["kv_a_proj.weight"]
    shifted["kv_a_proj.weight"] = torch.cat([weight[:40], torch.zeros_like(weight[:1]), weight[40:]])
    wider = Recipe(qk_rope_head_dim=4, kv_lora_rank=41)
    assert relative(layer.output(wider, shifted), layer.output(recipe, tensors)) < 1e-9


@pytest.mark.parametrize("case", ["qwen2", "qwen3-biases-yarn"])
def test_a_key_bias_is_that_of_the_rotary_map_where_keys_come_from_the_latent(case):
    """The latent holds keys without their bias; under q/k-norm it holds normed keys, which have none."""
    layer = Layer(case)
    tensors = layer.converted(Recipe(layout="latent", cache_ratio=1.0))
    width = layer.spec.num_key_value_heads * layer.spec.head_dim
    encoder = "k_a_proj" if layer.spec.qk_norm else "kv_a_proj"
    assert tensors[f"{encoder}.weight"].shape[0] == 2 * width and f"{encoder}.bias" not in tensors
    assert tensors["k_rope_proj.weight"].shape == (width, 2 * width)
    bias = torch.zeros(width) if layer.spec.qk_norm else layer.weights.k_bias
    assert torch.equal(tensors["k_rope_proj.bias"].sort().values, bias.double().sort().values)
    assert ("k_proj.bias" in tensors) == layer.spec.qk_norm


def test_the_mean_that_a_latent_loses_of_rotary_keys_is_in_their_bias():
    """Inputs that are their mean alone: rotary keys are right then, whatever the rank."""
    layer = Layer("qwen2")
    recipe = Recipe(layout="latent", qk_rope_head_dim=16, kv_lora_rank=12, fit_queries=False)
    tensors, basis = (
        layer.converted(recipe),
        rotary_basis(layer.spec, recipe.geometry(layer.spec), recipe, layer.statistics),
    )
    mean = layer.statistics.mean
    expected = basis.key_rope[0] @ (layer.weights.k_weight @ mean + layer.weights.k_bias)
    latent = tensors["kv_a_proj.weight"] @ mean
    found = tensors["k_rope_proj.weight"] @ latent + tensors["k_rope_proj.bias"]
    assert relative(found, expected) < 1e-9
    assert relative(tensors["k_rope_proj.weight"] @ latent, expected) > 0.1


def test_a_value_bias_is_folded_into_the_output_bias():
    layer = Layer("qwen2")
    recipe = Recipe(cache_ratio=1.0)
    tensors = layer.converted(recipe)
    heads = layer.weights.v_bias.view(-1, layer.spec.head_dim).repeat_interleave(layer.spec.group_size, 0)
    assert torch.allclose(tensors["o_proj.bias"], layer.weights.o_weight @ heads.flatten())
    assert layer.spec.o_bias is False


def test_the_attention_factor_reaches_un_rotated_pairs_squared():
    layer = Layer("llama-yarn")
    assert layer.spec.attention_factor == 1.3
    recipe = Recipe(qk_rope_head_dim=4, kv_lora_rank=56, fit_queries=False, rope_selection="high")
    basis = rotary_basis(layer.spec, recipe.geometry(layer.spec), recipe, layer.statistics)
    assert torch.allclose(basis.query_nope.square().sum(-1), torch.full((4, 12), 1.3**4, dtype=torch.float64))
    assert torch.equal(basis.query_rope.square().sum(-1), torch.ones(4, 4, dtype=torch.float64))


def test_the_mean_phase_is_the_best_constant_and_its_loss_is_the_cost():
    angle = torch.linspace(0, 2, 50, dtype=torch.float64)
    turns = torch.polar(torch.ones_like(angle), angle)
    mean = turns.mean()
    least = (turns - mean).abs().square().mean()
    assert torch.allclose(rotation_cost(mean), least)
    assert all((turns - factor).abs().square().mean() > least for factor in (1.0, 0.9 * mean, 1.1 * mean, mean.conj()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_mean_phase_is_a_linear_fold_of_the_query(layout, strength, monkeypatch):
    """Un-rotated queries are the source's times 1 + s (g − 1), pair by pair."""
    layer = Layer("llama")
    recipe = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=32)
    monkeypatch.setattr(rope_rules, "MEAN_PHASE", strength)
    plain = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=32, fit_queries=False)
    folded, unfolded = (rotary_basis(layer.spec, r.geometry(layer.spec), r, layer.statistics) for r in (recipe, plain))
    factor = 1 + strength * (layer.statistics.mean_phase - 1)
    turn = torch.cat(
        [
            torch.cat([torch.diag_embed(factor.real), torch.diag_embed(-factor.imag)], -1),
            torch.cat([torch.diag_embed(factor.imag), torch.diag_embed(factor.real)], -1),
        ],
        -2,
    )
    assert torch.allclose(folded.query_nope, unfolded.query_nope @ turn)
    assert torch.equal(folded.query_rope, unfolded.query_rope)
    assert torch.equal(folded.key_nope, unfolded.key_nope)


def test_statistics_are_those_of_the_formulas():
    layer = Layer("qwen3-biases-yarn")
    spec, weights, x = layer.spec, layer.weights, layer.inputs

    def project(weight, bias, norm):
        heads = (x @ weight.T + bias).unflatten(-1, (-1, spec.head_dim))
        return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + spec.norm_eps) * norm

    query = project(weights.q_weight, weights.q_bias, weights.q_norm)
    key = project(weights.k_weight, weights.k_bias, weights.k_norm)
    features = torch.cat([key.flatten(2), x], -1).flatten(0, 1)
    statistics = layer.statistics
    assert torch.allclose(statistics.mean, features.mean(0))
    assert torch.allclose(statistics.covariance, torch.cov(features.T, correction=0))
    expected = torch.einsum("wlhd,wlhe->hde", query, query) / 240
    assert torch.allclose(statistics.query_second_moment, expected)
    half = spec.head_dim // 2
    pairs = torch.complex(key[..., :half], key[..., half:])
    assert torch.allclose(statistics.key_covariance, torch.einsum("wlaj,wlbj->jab", pairs, pairs.conj()) / 240)
    # Phases, one attention weight at a time.
    turned = torch.polar(torch.ones(40, half).double(), torch.arange(40).double()[:, None] * spec.inv_freq.double())
    q = torch.complex(query[..., :half], query[..., half:]) * turned[:, None]
    k = (pairs * turned[:, None]).repeat_interleave(spec.group_size, 2)
    scores = torch.einsum("wshj,wthj->whst", q.conj(), k).real * spec.softmax_scale * spec.attention_factor**2
    weight = scores.masked_fill(~layer.mask, float("-inf")).softmax(-1)
    weight[..., 0] = 0
    distance = torch.arange(40)[:, None] - torch.arange(40)[None]
    turns = torch.polar(torch.ones(40, 40, half).double(), distance[..., None] * spec.inv_freq.double())
    expected = torch.einsum("whst,stj->hj", weight.to(turns.dtype), turns) / weight.sum((0, 2, 3))[:, None]
    assert torch.allclose(statistics.mean_phase, expected)


def test_attended_statistics_are_those_of_the_formulas():
    layer = Layer("qwen2-sliding", max_window_layers=0)
    spec, weights, x = layer.spec, layer.weights, layer.inputs
    query = (x @ weights.q_weight.T + weights.q_bias).unflatten(-1, (-1, spec.head_dim))
    key = (x @ weights.k_weight.T + weights.k_bias).unflatten(-1, (-1, spec.head_dim))
    turn = torch.polar(torch.ones(40, 8).double(), torch.arange(40).double()[:, None] * spec.inv_freq.double())[:, None]
    q, k = (torch.complex(*part.chunk(2, -1)) * turn for part in (query, key))
    scores = (
        torch.einsum("wshj,wthj->whst", q.conj(), k.repeat_interleave(spec.group_size, 2)).real * spec.softmax_scale
    )
    assert layer.mask.sum() < 40 * 9
    weight = scores.masked_fill(~layer.mask, float("-inf")).softmax(-1)[:, :, ::8]
    averages = weight @ x[:, None]  # [windows, H, queries, E]
    statistics = layer.statistics
    assert torch.allclose(statistics.attended_mean, averages.mean((0, 2)))
    centred = averages - averages.mean((0, 2))[:, None]
    count = averages[..., 0].numel()
    assert torch.allclose(statistics.attended_covariance, torch.einsum("whse,whsf->ef", centred, centred) / count)
    within = x[:, None, None] - averages[:, :, :, None]  # [windows, H, queries, keys, E]
    expected = torch.einsum("whst,whste,whstf->ef", weight, within, within) / count
    assert torch.allclose(statistics.attention_covariance, expected)
    distance = (torch.arange(40)[::8, None] - torch.arange(40)).clamp_min(0)
    mass = weight[..., 1:].sum(0).flatten(1)  # without the sink
    expected = torch.zeros(4, 40).double().index_add_(1, distance[:, 1:].flatten(), mass)
    assert torch.allclose(statistics.distances, expected / expected.sum(-1, keepdim=True))


def test_a_head_that_looks_nowhere_but_at_the_sink_looks_no_distance_back():
    layer = Layer("llama")
    collector = StatisticsCollector(layer.spec, layer.weights, window=None, distances=True)
    collector.add(layer.inputs[:, :1])
    collector.add(layer.inputs[:, :1])
    assert collector.finish().distances.tolist() == [[1.0]] * 4
    collector.add(layer.inputs)  # longer windows than before
    assert torch.allclose(collector.finish().distances, layer.statistics.distances)


def test_blocks_of_an_attention_map_add_up(monkeypatch):
    layer = Layer("mistral-sliding")
    monkeypatch.setattr("mha2mla.conversion.calibration.statistics._MAP_ELEMENTS", 6 * 4 * 40 * 7)
    collector = StatisticsCollector(layer.spec, layer.weights, window=9, phases=True)
    collector.add(layer.inputs)
    assert torch.allclose(collector.finish().mean_phase, layer.statistics.mean_phase)
    assert collector.finish().attended_mean is None


@pytest.mark.parametrize("case", ["llama-biases", "qwen3-biases-yarn"])
@pytest.mark.parametrize(("layout", "selection"), SELECTIONS)
@pytest.mark.parametrize("low_rank", LOW_RANKS)
def test_every_recipe_gives_the_tensors_of_its_geometry(case, layout, selection, low_rank):
    layer = Layer(case)
    recipe = Recipe(layout=layout, rope_selection=selection, latent_rule=low_rank, qk_rope_head_dim=8, kv_lora_rank=24)
    geometry = recipe.geometry(layer.spec)
    tensors = layer.converted(recipe)
    assert tensors["inv_freq"].shape == (geometry.num_rope_heads, 4) and tensors["inv_freq"].dtype == torch.float32
    assert set(tensors["inv_freq"].flatten().tolist()) <= set(layer.spec.inv_freq.tolist())
    assert tensors["k_b_proj"].shape == (2, geometry.qk_nope_head_dim, 24)
    assert tensors["v_b_proj"].shape == (2, 16, 24)
    if geometry.rope_from_latent:
        assert tensors["k_rope_proj.weight"].shape == (8, 24) and tensors["k_rope_proj.bias"].shape == (8,)
    encoders = [name for name in tensors if name in ("kv_a_proj.weight", "k_a_proj.weight")]
    assert [tensors[name].shape[0] for name in encoders] == [geometry.cache_numel_per_token]
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert relative(layer.output(recipe), layer.source_output()) < 1.5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_maps_per_query_head_start_as_the_same_layer(case, layout):
    layer = Layer(case)
    recipe = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=24, fit_output=True)
    split = Recipe(
        layout=layout, qk_rope_head_dim=8, kv_lora_rank=24, fit_output=True, latent_up_projections="query-head"
    )
    geometry, heads = split.geometry(layer.spec), layer.spec.num_attention_heads
    tensors = layer.converted(split)
    assert tensors["k_b_proj"].shape == (heads, geometry.qk_nope_head_dim, 24)
    assert tensors["v_b_proj"].shape == (heads, layer.spec.head_dim, 24)
    assert geometry.cache_numel_per_token == recipe.geometry(layer.spec).cache_numel_per_token
    assert geometry.source_cache_numel_per_token == recipe.geometry(layer.spec).source_cache_numel_per_token
    assert relative(layer.output(split), layer.output(recipe)) < 1e-12


@pytest.mark.parametrize("low_rank", LOW_RANKS)
@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_the_error_falls_with_the_rank(case, low_rank):
    layer = Layer(case)
    expected = layer.source_output()
    width = 2 * layer.spec.num_key_value_heads * layer.spec.head_dim

    def error(rank):
        rope = layer.spec.head_dim - 2
        recipe = Recipe(latent_rule=low_rank, rope_selection="rotation", qk_rope_head_dim=rope, kv_lora_rank=rank)
        problem = latent_problem(
            layer.spec,
            layer.weights,
            rotary_basis(layer.spec, recipe.geometry(layer.spec), recipe, layer.statistics),
            layer.statistics,
        )
        factors = factorise(LOW_RANKS[low_rank], problem, rank, centered=True)
        approximate = factors.value_decoder @ factors.encoder
        return relative(layer.output(recipe), expected), relative(approximate, problem.value)

    full = width - 2 * (layer.spec.head_dim - 2)
    ranks = [4, 12, 20, 28, full]
    errors = [error(rank) for rank in ranks]
    assert all(later[1] <= earlier[1] + 1e-9 for earlier, later in itertools.pairwise(errors))
    assert errors[-1][1] < 1e-12 and errors[-1][0] < errors[0][0]


def test_whitening_fits_the_inputs_that_occur(monkeypatch):
    """On inputs in a subspace the whitened latent is exact at the subspace's rank; plain SVD is not."""
    layer = Layer("llama")
    directions = torch.randn(8, layer.spec.hidden_size, dtype=torch.float64)
    layer.inputs = torch.randn(6, 40, 8, dtype=torch.float64) @ directions
    collector = StatisticsCollector(layer.spec, layer.weights, window=None, phases=True)
    collector.add(layer.inputs)
    layer.statistics = collector.finish()
    recipe = {"rope_selection": "high", "qk_rope_head_dim": 14, "kv_lora_rank": 8, "fit_queries": False}
    monkeypatch.setattr(latent_rules, "SHRINKAGE", 0.0)
    full = Recipe(**{**recipe, "kv_lora_rank": 36})
    expected = layer.output(full)
    assert relative(layer.output(Recipe(**recipe, latent_rule="whitened-joint")), expected) < 1e-6
    assert relative(layer.output(Recipe(**recipe, latent_rule="svd-joint")), expected) > 1e-2


def test_centring_leaves_the_mean_output_of_every_head_intact():
    layer = Layer("llama")
    recipe = Recipe(qk_rope_head_dim=8, kv_lora_rank=8, latent_rule="svd-joint", latent_centered=True)
    tensors = layer.converted(recipe)
    mean = layer.statistics.attended_mean  # [H, E]
    latent = mean @ tensors["kv_a_proj.weight"][:8].T
    approximate = torch.einsum("hdr,hr->hd", tensors["v_b_proj"].repeat_interleave(2, 0), latent).flatten()
    values = layer.weights.v_weight.view(2, 16, -1).repeat_interleave(2, 0)
    exact = torch.einsum("hde,he->hd", values, mean).flatten()
    weight = layer.weights.o_weight
    assert torch.allclose(weight @ approximate + tensors["o_proj.bias"], weight @ exact)
    assert "o_proj.bias" not in layer.converted(Recipe(qk_rope_head_dim=8, kv_lora_rank=8, latent_centered=False))


def test_positions_are_relative():
    layer = Layer("qwen2-tied-yarn")
    for layout in LAYOUTS:
        recipe = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=32)
        assert relative(layer.output(recipe, first_position=1000), layer.output(recipe)) < 1e-6


def test_a_kept_pair_keeps_both_its_halves():
    """A dim kept without its partner."""
    layer = Layer("llama-mha")
    recipe = Recipe(rope_selection="2-norm", qk_rope_head_dim=6, kv_lora_rank=32)
    basis = rotary_basis(layer.spec, recipe.geometry(layer.spec), recipe, layer.statistics)
    for head in range(4):
        rows = basis.key_rope[head].view(6, 4, 16)
        chosen = rows.nonzero()
        assert (chosen[:, 1] == head).all()
        dims = chosen[:, 2].tolist()
        assert [dim - 8 for dim in dims[3:]] == dims[:3] == frequencies(layer.spec, basis)[head].tolist()
        rest = set(basis.key_nope[head].view(10, 4, 16).nonzero()[:, 2].tolist())
        assert rest | set(dims) == set(range(16)) and not rest & set(dims)


@pytest.mark.parametrize(("selection", "expected"), [("high", [0, 1]), ("low", [6, 7]), ("uniform", [0, 4])])
def test_fixed_rules_choose_by_frequency(selection, expected):
    layer = Layer("llama")
    recipe = Recipe(rope_selection=selection, qk_rope_head_dim=4, kv_lora_rank=32, fit_queries=False)
    basis = rotary_basis(layer.spec, recipe.geometry(layer.spec), recipe, None)
    assert frequencies(layer.spec, basis).tolist() == [expected, expected]
    recipe = Recipe(layout="shared", rope_selection=selection, qk_rope_head_dim=8, kv_lora_rank=32, fit_queries=False)
    basis = rotary_basis(layer.spec, recipe.geometry(layer.spec), recipe, None)
    wanted = [0, 2, 4, 6] if selection == "uniform" else sorted(2 * expected)
    assert frequencies(layer.spec, basis).tolist() == [wanted]
