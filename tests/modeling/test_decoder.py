"""A served step by fewer kernels: the base model's own result, and the base model wherever there is more to do."""

import pytest
import torch
from torch import nn

from mha2mla.modeling import LatentCache
from tests.modeling import models
from tests.ops import Calls

KNOWN = ("llama", "qwen2", "qwen3", "mistral", "mistral-sliding", "qwen2-sliding")
OTHERS = ("mixtral", "qwen3-moe", "olmo2", "gemma3")


@torch.no_grad()
def decode(model, ids, **options):
    """Logits of the last token over a cache of the others, and the ops of that step."""
    cache = LatentCache(model.config)
    model(ids[:, :-1], past_key_values=cache)
    with Calls() as calls:
        out = model(ids[:, -1:], past_key_values=cache, **options)
    return out, calls


def with_hook(model):
    model.model.norm.register_forward_hook(lambda module, args, out: None)
    return model


@pytest.mark.parametrize("case", [*KNOWN, *OTHERS])
def test_logits_of_every_family(case):
    model, ids = models.full_rank(models.source_model(case)).eval(), models.tokens(2, 12)
    out, calls = decode(model, ids)
    assert ("rms_norm" in calls) == (case in KNOWN)
    expected, _ = decode(with_hook(model), ids)
    assert models.relative_error(out.logits, expected.logits) < models.TOLERANCE


@pytest.mark.parametrize("case", ["per-group", "per-head", "latent"])
def test_ragged_batches(case):
    model = models.mla_model(case)
    ids = torch.randint(3, 90, (9,))
    found = []
    for _ in range(2):
        cache = model.paged_cache(8)
        one, two = cache.open(), cache.open()
        made = []
        for lengths, part in (({one: 4, two: 3}, ids[:7]), ({one: 1, two: 1}, ids[7:])):
            batch = cache.extend(lengths)
            with Calls() as calls:
                made.append(model.forward_batch(part, cache.step(batch)))
        found.append((made, "rms_norm" in calls))
        with_hook(model)
    (mine, fewer), (expected, as_before) = found
    assert fewer and not as_before
    for logits, right in zip(mine, expected, strict=True):
        assert models.relative_error(logits, right) < models.TOLERANCE


def with_own_forward(model):
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: 2 * forward(x)


def with_own_norm(model):
    layer = model.model.layers[1]
    layer.input_layernorm = type("Norm", (type(layer.input_layernorm),), {})(48, 1e-3)


def with_norm_in_float32(model):
    model.bfloat16().model.norm.float()
    model.lm_head.float()


CHANGES = {
    "hook on a layer": lambda model: model.model.layers[1].register_forward_pre_hook(lambda module, args: None),
    "own norm": with_own_norm,
    "own forward": with_own_forward,
    "another activation": lambda model: setattr(model.model.layers[1].mlp, "act_fn", nn.GELU()),
    "a norm kept in float32": with_norm_in_float32,
    "hidden states": lambda model: setattr(model.model.config, "output_hidden_states", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_run_the_base_model(name):
    model, ids = models.mla_model(), models.tokens(2, 7)
    CHANGES[name](model)
    out, calls = decode(model, ids)
    assert "rms_norm" not in calls
    if name != "a norm kept in float32":
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits[:, -1:]
        assert models.relative_error(out.logits, expected) < models.TOLERANCE


def test_outputs_that_are_asked_for_are_there():
    model, ids = models.mla_model(), models.tokens(2, 7)
    out, calls = decode(model, ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3 and "rms_norm" not in calls
    model.set_attn_implementation("eager")
    out, calls = decode(model, ids, output_attentions=True)
    assert len(out.attentions) == 2 and "rms_norm" not in calls


def test_adapters_in_the_mlp_are_served():
    class Doubled(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return 2 * self.base(x)

    model, ids = models.mla_model(), models.tokens(2, 7)
    decode(model, ids)  # gate and up lie side by side now
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.down_proj = Doubled(mlp.gate_proj), Doubled(mlp.down_proj)
    out, calls = decode(model, ids)
    assert "rms_norm" in calls
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -1:]
    assert models.relative_error(out.logits, expected) < models.TOLERANCE


@torch.no_grad()
def test_weights_move_with_the_prompt_and_not_later():
    """What records a step behind the first prompt finds them where they stay."""
    model, cache = models.mla_model(), None
    addresses = []
    for length in (5, 1, 1):
        cache = model(models.tokens(1, length), past_key_values=cache, use_cache=True).past_key_values
        addresses.append([parameter.data_ptr() for parameter in model.parameters()])
    mlp = model.model.layers[1].mlp
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()
    assert addresses[0] == addresses[1] == addresses[2]


@pytest.mark.parametrize("case", ["maps per query head", "shared", "latent"])
def test_a_layer_launches_few_ops(case):
    """One product for what reads one input, and nothing that computes but products, norms, append and attention."""
    model, ids = models.mla_model(case), models.tokens(1, 12)
    decode(model, ids)  # moves weights
    _, calls = decode(model, ids)
    assert sum(name in ("aten::mm", "aten::addmm") for name in calls.names) == 4 * 2 + 1
    assert calls.names.count("mha2mla::rms_norm") == 2 * 2 + 1
    assert calls.names.count("mha2mla::rope_append") == calls.names.count("mha2mla::silu_mul") == 2
    assert calls.names.count("aten::bmm.out") == 2 * 2
    assert not {"aten::copy_", "aten::clone", "aten::cat"} & set(calls.names)
