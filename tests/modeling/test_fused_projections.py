"""Projections of one input are one product, and their parameters stay what they are to everything else."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from mha2mla.modeling import LatentCache
from mha2mla.modeling.decoder import fuse_weights, fused_weight, project
from tests.modeling import models

WIDTHS = (12, 5, 8)


def linears(bias: bool = False, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(16, width, bias=bias, dtype=dtype) for width in WIDTHS]


def are_one(parts) -> bool:
    return len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fused_product_is_as_accurate_as_parts(bias, mode):
    parts, x = linears(bias), torch.randn(2, 3, 16)
    exact = [copy.deepcopy(part).double()(x.double()).detach() for part in parts]
    alone = [part(x).detach() for part in parts]
    names = [dict(part.named_parameters()) for part in parts]
    with mode():
        fuse_weights(parts)
        made = project(x, *parts)
    assert are_one(parts) and [dict(part.named_parameters()) for part in parts] == names
    for out, separate, right in zip(made, alone, exact, strict=True):
        assert out.shape == right.shape
        least = 16 * torch.finfo(torch.float32).eps * float(right.abs().max())
        assert float((out - right).abs().max()) <= max(2 * float((separate - right).abs().max()), least)


def test_fused_parts_run_one_by_one_for_gradients():
    parts, x = linears(), torch.randn(1, 16)
    fuse_weights(parts)
    out = project(x, *parts)
    assert fused_weight(x, parts) is None
    assert all(torch.equal(mine, part(x)) for mine, part in zip(out, parts, strict=True))
    sum(part.sum() for part in out).backward()
    assert all(part.weight.grad is not None for part in parts)


def served(parts, x):
    with torch.no_grad():
        return [out.clone() for out in project(x, *parts)]


def changes():
    def in_place(parts):
        with torch.no_grad():
            parts[1].weight.mul_(3)

    def optimizer(parts):
        x = torch.randn(4, 16)
        trained = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.5)
        sum(part(x).square().sum() for part in parts).backward()
        trained.step()

    def load(parts):
        for part in parts:
            part.load_state_dict({"weight": torch.randn_like(part.weight)})

    def assign(parts):
        parts[1].load_state_dict({"weight": torch.randn(5, 16)}, assign=True)

    def new_data(parts):
        parts[0].weight.data = torch.randn(12, 16)

    def new_parameter(parts):
        parts[2].weight = nn.Parameter(torch.randn(8, 16))

    def cast_and_back(parts):
        for part in parts:
            part.to(torch.bfloat16).to(torch.float32)
            part.weight.data.add_(1)

    return [in_place, optimizer, load, assign, new_data, new_parameter, cast_and_back]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_changed_weight_is_used_at_once(change):
    parts, x = linears(), torch.randn(2, 16)
    fuse_weights(parts)
    before = served(parts, x)
    assert are_one(parts)
    change(parts)
    after = served(parts, x)
    assert any(not torch.equal(mine, was) for mine, was in zip(after, before, strict=True))
    for out, part in zip(after, parts, strict=True):
        torch.testing.assert_close(out, F.linear(x, part.weight.detach().clone()))


def test_parts_that_are_not_plain_are_not_fused():
    class Adapted(nn.Linear):
        pass

    def with_part(part):
        return [*linears()[:2], part]

    hooked, prehooked, overridden = (linears()[2] for _ in range(3))
    hooked.register_forward_hook(lambda module, args, out: out + 1)
    prehooked.register_forward_pre_hook(lambda module, args: None)
    overridden.forward = lambda x: F.linear(x, overridden.weight) * 2
    frozen = nn.utils.parametrizations.weight_norm(linears()[2])
    x = torch.randn(2, 16)
    for part in (hooked, prehooked, overridden, Adapted(16, 8, bias=False), nn.Linear(16, 8), frozen):
        parts = with_part(part)
        with torch.no_grad():
            expected = [each(x) for each in parts]
            fuse_weights(parts)
            assert not are_one(parts[:2]) and fused_weight(x, parts) is None, part
            made = project(x, *parts)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, expected, strict=True))


def of_weights(parameters) -> list[nn.Linear]:
    parts = [nn.Linear(1, 1, bias=False) for _ in parameters]
    for part, parameter in zip(parts, parameters, strict=True):
        part.weight = parameter
    return parts


def test_weights_that_others_may_look_at_are_not_moved():
    whole, x = torch.randn(2, 12, 16), torch.randn(1, 16)
    views = [nn.Parameter(whole[1]), nn.Parameter(torch.randn(5, 16))]
    shared = [nn.Parameter(torch.randn(4, 16).share_memory_()), nn.Parameter(torch.randn(5, 16))]
    captured = [nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(5, 16))]
    captured[0].is_captured = True
    mixed = [nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(4, 16, dtype=torch.bfloat16))]
    for parameters in (views, shared, captured, mixed, [nn.Parameter(torch.empty(3, 16, device="meta"))] * 2):
        addresses = [each.data_ptr() for each in parameters]
        parts = of_weights(parameters)
        fuse_weights(parts)
        with torch.no_grad():
            assert fused_weight(x, parts) is None
        assert [each.data_ptr() for each in parameters] == addresses
    neighbours = of_weights([nn.Parameter(whole[0]), nn.Parameter(whole[1])])  # as a file that was mapped has them
    with torch.no_grad():
        assert fused_weight(x, neighbours)[0].data_ptr() == whole.data_ptr()


def fused_model():
    """A model, and the same after it served a step."""
    model = models.mla_model("shared")
    plain = copy.deepcopy(model)
    with torch.no_grad():
        model(models.tokens(1, 3), past_key_values=LatentCache(model.config))
    attention = model.model.layers[0].self_attn
    assert are_one([attention.q_proj, attention.kv_a_proj])
    return model, plain


def test_names_values_folders_and_files_are_as_before(tmp_path):
    model, plain = fused_model()
    state, expected = model.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    model.save_pretrained(tmp_path / "folder")
    save_file(state, tmp_path / "file")
    torch.save(state, tmp_path / "pickle")
    files = load_file(tmp_path / "folder" / "model.safetensors"), load_file(tmp_path / "file")
    for found in (*files, torch.load(tmp_path / "pickle")):
        assert all(torch.equal(found[name], expected[name]) for name in found) and found.keys() <= expected.keys()
    copied = copy.deepcopy(model)
    ids = models.tokens(2, 5)
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, model(ids).logits)


def test_prompts_look_into_a_model_again_only_if_it_changed():
    model, _ = fused_model()
    attention, made = model.model.layers[0].self_attn, model._decoder
    parts = [attention.q_proj, attention.kv_a_proj]

    def prompt():
        with torch.no_grad():
            model(models.tokens(1, 3), past_key_values=LatentCache(model.config))

    prompt()
    assert model._decoder is made
    for parameter in (parameter for part in parts for parameter in part.parameters()):
        parameter.data = parameter.data.clone()
    assert not are_one(parts)
    prompt()
    assert are_one(parts) and model._decoder is not made
    made, model.model.layers[1].mlp.up_proj = model._decoder, copy.deepcopy(model.model.layers[1].mlp.up_proj)
    prompt()
    assert model._decoder is not made
