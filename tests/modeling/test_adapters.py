"""What LoRA tools put in the place of a projection is what computes, with a cache and without."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.modeling.decoder import affine_map, own_map
from tests.modeling import models

IDS = torch.arange(5, 25)[None]


class Adapted(nn.Module):
    """A projection and a low-rank update of it, as LoRA's layers are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.3)

    @property
    def weight(self) -> torch.Tensor:  # peft's layers show that of what they wrap
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.base(states) + states @ self.down.T @ self.up.T


def agrees_with_its_cache(model: nn.Module) -> None:
    """Logits of greedy steps over a cache are those without one, to rounding."""
    with torch.no_grad():
        made = model.generate(
            input_ids=IDS,
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        without = model(made.sequences, use_cache=False).logits[:, IDS.shape[1] - 1 : -1]
    assert torch.allclose(torch.stack(made.logits, 1), without, rtol=0, atol=1e-4 * float(without.abs().max()))


@pytest.mark.parametrize("case", models.GEOMETRIES)
def test_linear_layers_keep_their_signature(case):
    """Tools that wrap every ``nn.Linear`` call it with one tensor and believe its sizes."""
    linear = [module for module in models.mla_model(case).modules() if isinstance(module, nn.Linear)]
    assert len(linear) > 10
    for module in linear:
        assert module.weight.shape == (module.out_features, module.in_features)
        states = torch.randn(2, 3, module.in_features)
        assert torch.equal(module(states), functional.linear(states, module.weight, module.bias))


@pytest.mark.parametrize("case", ["per-group", "shared", "latent", "per-head", "latent qk-norm"])
def test_lora_all_linear_by_peft(case, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = models.mla_model(case)
    model.save_pretrained(tmp_path / "model")
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora).eval()
    assert isinstance(model.model.layers[0].self_attn.q_proj, peft.tuners.lora.LoraLayer)
    agrees_with_its_cache(adapted)
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    adapted.train()
    optimiser, losses = torch.optim.SGD(trained, lr=1e-2), []
    for _ in range(2):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[1] < losses[0] and all(weight.grad is not None for weight in trained)
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted.eval()(IDS, use_cache=False).logits
        again = MHA2MLAForCausalLM.from_pretrained(tmp_path / "model")
        again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
        assert torch.equal(again(IDS, use_cache=False).logits, expected)
        merged = again.merge_and_unload()
        assert models.relative_error(merged(IDS, use_cache=False).logits, expected) < models.TOLERANCE
    agrees_with_its_cache(merged)


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.float16, 8)])
@torch.no_grad()
def test_affine_map_keeps_weights_beside_biases(dtype, roundings):
    """What backends are given of an adapter is as good as the adapter merged, with biases of hundreds too."""
    torch.manual_seed(0)
    base = nn.Linear(64, 24, dtype=dtype)
    nn.init.constant_(base.bias, 145.0)
    assert own_map(base)[0] is base.weight
    adapted = Adapted(base).to(dtype)
    weight, bias = affine_map(adapted, base.weight)
    merged = base.weight.double() + adapted.up.double() @ adapted.down.double()
    assert torch.equal(bias, base.bias)
    assert models.relative_error(weight.double(), merged) < roundings * torch.finfo(dtype).eps
