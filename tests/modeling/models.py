"""Tiny random models for the tests of this folder: sources of every family, and MLA models with un-rotated dims."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mha2mla.conversion.families import adapter_for
from mha2mla.conversion.layer_walk import converted_config
from mha2mla.modeling import MHA2MLAConfig, MHA2MLAForCausalLM, configuration_mha2mla, modeling_mha2mla
from tests.conversion import tiny
from tests.conversion.tiny import YARN

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Large enough for attention to be far from uniform.
    "initializer_range": 0.25,
}
WINDOW = 9
# Between two ways of computing the same in float32.
TOLERANCE = 2e-5
# What config.attention_backend is for each form on a CPU; with None a LatentCache prefills in the expanded form.
FORMS = {"auto": None, "absorbed": "mla_reference", "expanded": "mla_expanded"}
# name -> (family, config keys): biases, norms, head widths, RoPE scaling, tied embeddings, windows, each at least once.
SOURCES = {
    "llama": ("llama", {"attention_bias": True}),
    "llama-yarn-tied": ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "mistral": ("mistral", {"head_dim": 12, "sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def geometry_keys(kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, num_rope_heads=None, **keys) -> dict[str, object]:
    """Keys of a config; without ``num_rope_heads`` only the latent is cached: rotary widths cost no cache."""
    keys |= {"rope_from_latent": True} if num_rope_heads is None else {}
    widths = {"qk_rope_head_dim": qk_rope_head_dim, "qk_nope_head_dim": qk_nope_head_dim}
    return {"kv_lora_rank": kv_lora_rank, **widths, "num_rope_heads": num_rope_heads or 1, **keys}


# name -> (source, geometry): G = 1, between and h_kv; d_n = 0 and not; ranks that differ between layers.
LATENT_GEOMETRIES = {
    "latent": ("llama", geometry_keys(24, 6, 8)),
    "latent no nope": ("llama-yarn-tied", geometry_keys(16, 16, 0)),
    "latent qk-norm": ("qwen3", geometry_keys(16, 10, 12)),
    "latent per layer": ("qwen2", geometry_keys([16, 8], [4, 6], [8, 0], num_up_projection_heads=6)),
    "latent sliding": ("mistral-sliding", geometry_keys(16, 8, 8)),
    "latent some sliding": ("qwen2-sliding", geometry_keys(16, 8, 8)),
}
# Caches that keep the rotary keys of such a checkpoint, each computed once.
KEPT_GEOMETRIES = {
    f"kept {case}": (source, {**keys, "rotary_key_cache": "bfloat16"})
    for case, (source, keys) in (
        (case, LATENT_GEOMETRIES[f"latent {case}"]) for case in ("no nope", "qk-norm", "per layer", "some sliding")
    )
}
GEOMETRIES = {
    "per-group": ("llama", geometry_keys(16, 4, 4, 2)),
    "shared": ("qwen2", geometry_keys(24, 6, 8, 1)),
    "per-head": ("qwen3", geometry_keys(16, 2, 10, 6)),
    "odd groups": ("llama", geometry_keys(16, 4, 4, 3)),
    "maps per query head": ("qwen2", geometry_keys(24, 4, 8, 2, num_up_projection_heads=6)),
    "no nope": ("llama", geometry_keys(16, 8, 0, 2)),
    "per layer": ("llama", geometry_keys([16, 8], [4, 6], [4, 0], 2)),
    "sliding": ("mistral-sliding", geometry_keys(16, 4, 4, 2)),
    "some sliding": ("qwen2-sliding", geometry_keys(16, 4, 4, 2)),
    **LATENT_GEOMETRIES,
    **KEPT_GEOMETRIES,
}


def source_config(case: str, **keys):
    family, case_keys = SOURCES[case]
    return AutoConfig.for_model(family, **{**SIZES, **case_keys, **keys})


def source_model(case: str, **keys) -> nn.Module:
    """A random source model in float32; biases and norms random too, so that losing one shows."""
    model = AutoModelForCausalLM.from_config(source_config(case, **keys), attn_implementation="sdpa").eval()
    return randomise(model)


def mla_config(case: str = "per-group", **keys) -> MHA2MLAConfig:
    source, geometry = GEOMETRIES[case]
    config = source_config(source, **{key: keys[key] for key in ("num_hidden_layers",) if key in keys})
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "source_config": config.to_dict(),
        "v_head_dim": head_dim,
        "softmax_scale": head_dim**-0.5,
        "qk_norm": config.model_type == "qwen3",
        "attention_q_bias": config.model_type != "mistral",
        "attention_kv_bias": config.model_type != "mistral",
        "attention_o_bias": True,
        "rope_attention_scaling": 1.3 if "yarn" in source else 1.0,
    }
    return MHA2MLAConfig(**{**values, **geometry, **keys})


def mla_model(case: str = "per-group", **keys) -> MHA2MLAForCausalLM:
    """A random MLA model in float32."""
    return randomise(MHA2MLAForCausalLM(mla_config(case, **keys)).eval())


def full_rank(source: nn.Module, *, rope_from_latent: bool = False) -> MHA2MLAForCausalLM:
    """``source``'s weights as an MLA model of full rank, the same model to rounding: every pair rotates, of a latent of
    the values beside rotary keys, or with ``rope_from_latent`` of the keys before RoPE and the values."""
    adapter = adapter_for(source.config.to_dict())
    spec = adapter.specify(source.config)
    recipe = tiny.Recipe(layout="latent" if rope_from_latent else "per-group", cache_ratio=1.0)
    geometries = recipe.geometries(spec)
    model = MHA2MLAForCausalLM(converted_config(source.config, spec, geometries, recipe)).eval()
    own, cpu = tiny.State(source), torch.device("cpu")
    state = {name: tensor for name, tensor in source.state_dict().items() if ".self_attn." not in name}
    for index, geometry in enumerate(geometries):
        weights = adapter.attention_weights(own, spec, index, device=cpu, dtype=torch.float64)
        tensors = tiny.convert_layer(spec.of_layer(index), geometry, recipe, weights, None)
        state |= {f"model.layers.{index}.self_attn.{name}": tensor.float() for name, tensor in tensors.items()}
    model.load_state_dict(state, strict=True)
    return model


def as_file(model: MHA2MLAForCausalLM) -> modeling_mha2mla.MHA2MLAForCausalLM:
    """The model again, by the classes of the file that lies in converted folders."""
    config = configuration_mha2mla.MHA2MLAConfig(**model.config.to_dict())
    made = modeling_mha2mla.MHA2MLAForCausalLM(config).eval()
    made.set_attn_implementation(model.config._attn_implementation)
    made.load_state_dict(model.state_dict())
    return made


# Both definitions of a model: with the package, and without.
BUILDS = {"package": lambda model: model, "file": as_file}


def randomise(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def logits_of_calls(model, cache, ids, stops=(15, 16, 17, 22, 29), mask=None, positions=None) -> torch.Tensor:
    """Logits of calls that end at ``stops``, by default a prompt, single tokens and chunks; ``mask`` and ``positions``
    [B, T]."""
    parts, start = [], 0
    for stop in stops:
        given = {} if positions is None else {"position_ids": positions[:, start:stop]}
        shown = None if mask is None else mask[:, :stop]
        parts.append(model(ids[:, start:stop], attention_mask=shown, past_key_values=cache, **given).logits)
        start = stop
    return torch.cat(parts, 1)


@torch.no_grad()
def batch_logits(model, cache, new: dict[int, torch.Tensor], **options) -> dict[int, torch.Tensor]:
    """Logits of new tokens ``new`` [S_i] per sequence, of a step over a paged cache; the last ones alone too."""
    batch = cache.extend({sequence: len(ids) for sequence, ids in new.items()}, **options)
    flat, step = batch.flatten(list(new.values())), cache.step(batch)
    logits = batch.unflatten(model.forward_batch(flat, step, all_logits=True))
    last = model.forward_batch(flat, step)
    for row, index in enumerate(batch.order.tolist()):
        if index >= 0 and batch.lengths[0, row]:
            assert relative_error(last[row], logits[index][-1]) < TOLERANCE
    return dict(zip(new, logits, strict=True))


def batch_errors(model, cache, ids, expected, steps: Iterable[dict[int, int]]) -> list[float]:
    """Relative errors of the logits of ``steps`` over a paged cache: in each, how many more tokens of which rows of ids
    [B, T] come, against ``expected`` [B, T, V]."""
    sequences, done, errors = [cache.open() for _ in ids], [0] * len(ids), []
    for counts in steps:
        parts = {row: slice(done[row], done[row] + count) for row, count in counts.items()}
        logits = batch_logits(model, cache, {sequences[row]: ids[row, part] for row, part in parts.items()})
        for row, part in parts.items():
            done[row] = part.stop
            errors += [relative_error(logits[sequences[row]], expected[row, part])] if counts[row] else []
    return errors


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random ids that are no special tokens."""
    return torch.randint(3, SIZES["vocab_size"], (batch, length))


def left_mask(length: int, *paddings: int) -> torch.Tensor:
    """An attention mask [B, length] whose rows begin with so many zeros."""
    return (torch.arange(length) >= torch.tensor(paddings)[:, None]).long()


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    """A left-padded batch of random prompts, as generate takes it."""
    mask = left_mask(max(lengths), *(max(lengths) - length for length in lengths))
    return {"input_ids": tokens(*mask.shape) * mask + SIZES["pad_token_id"] * (1 - mask), "attention_mask": mask}


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected``."""
    difference, norm = (torch.linalg.vector_norm(t.detach().double()) for t in (value - expected, expected))
    return float(difference / norm)
