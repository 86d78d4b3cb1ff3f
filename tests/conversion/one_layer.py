"""One layer of a tiny model in float64 with its statistics, for tests that convert it alone."""

import torch

from mha2mla.conversion import recipe as recipes
from mha2mla.conversion.calibration.statistics import LayerStatistics, StatisticsCollector
from mha2mla.conversion.families import ADAPTERS, AttentionWeights, SourceSpec
from mha2mla.conversion.layer import rotary_basis
from mha2mla.conversion.rope import RotaryBasis
from tests.conversion import tiny
from tests.conversion.plain_mla import plain_mla_attention


def Recipe(**keys) -> recipes.Recipe:
    return tiny.Recipe(**{"layout": "per-group", **keys})  # unless a test says otherwise


class Layer:
    """The first layer of a tiny model in float64: its attention, its weights, inputs and their statistics."""

    def __init__(self, case: str = "llama", **keys):
        family, case_keys = tiny.CASES[case]
        self.model = tiny.model(family, **{**case_keys, **keys}).double()
        self.spec: SourceSpec = ADAPTERS[family].specify(self.model.config).of_layer(0)
        self.weights = self.stored_weights()
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
        self.position = torch.arange(self.inputs.shape[1])[None]
        distance = self.position.T - self.position
        self.mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)

    def stored_weights(self) -> AttentionWeights:
        """The model's, as they are now."""
        state, cpu = tiny.State(self.model), torch.device("cpu")
        return ADAPTERS[self.spec.model_type].attention_weights(state, self.spec, 0, device=cpu, dtype=torch.float64)

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
        rotary = tuple(table.double() for table in base.rotary_emb(self.inputs.float(), self.position, *kind))
        mask = self.mask[None, None]
        return base.layers[0].self_attn(self.inputs, position_embeddings=rotary, attention_mask=mask)[0]

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


def shared_basis(layer: Layer, kept: int, selection: str = "rotation", **keys) -> RotaryBasis:
    width = 2 * layer.spec.num_key_value_heads * layer.spec.head_dim
    keys = {"layout": "shared", "fit_queries": False, "rope_selection": selection} | keys
    recipe = Recipe(qk_rope_head_dim=kept, kv_lora_rank=width - kept, **keys)
    return basis_of(layer, recipe)


def basis_of(layer: Layer, recipe: recipes.Recipe, statistics: LayerStatistics | None = ...) -> RotaryBasis:
    """The rotary basis that ``recipe`` chooses, on the layer's statistics unless others are given."""
    geometry, found = recipe.geometry(layer.spec), layer.statistics if statistics is ... else statistics
    rules = recipe.layer_rules(geometry)
    keys = {"per_group": rules.per_group, "turn_queries": rules.turn_queries}
    return rotary_basis(layer.spec, geometry, rules.rope, found, layer.weights, **keys)
