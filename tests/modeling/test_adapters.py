"""What LoRA tools put in the place of a projection is what computes, with a cache and without."""

import pytest
import torch
from torch import nn

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


def projections(model: nn.Module) -> list[str]:
    return sorted(name for name, module in model.named_modules() if type(module) is nn.Linear and ".self_attn." in name)


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


@pytest.mark.parametrize("name", ["per-group", "shared", "per-head", "latent", "latent qk-norm"])
def test_an_adapter_around_every_projection_counts_in_every_path(name):
    model = models.mla_model(name)
    with torch.no_grad():
        before = model(IDS, use_cache=False).logits
    for each in projections(model):
        parent, _, child = each.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapted(model.get_submodule(each)))
    with torch.no_grad():
        assert not torch.allclose(model(IDS, use_cache=False).logits, before, rtol=0, atol=1e-2)
    agrees_with_its_cache(model)


def test_lora_by_peft(tiny_converted):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import mha2mla

    model, _ = mha2mla.load(tiny_converted, device="cpu", dtype=torch.float32)
    names = sorted({each.rpartition(".")[2] for each in projections(model)})
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)).eval()
    agrees_with_its_cache(adapted)
    adapted(IDS, labels=IDS).loss.backward()
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    assert len(trained) == 2 * len(projections(adapted.merge_and_unload())) and all(w.grad is not None for w in trained)


def test_the_up_projections_were_missing_from_what_torch_prints(tiny_converted):
    import mha2mla

    model, _ = mha2mla.load(tiny_converted, device="cpu")
    attention = model.model.layers[0].self_attn
    for name in ("k_b_proj", "v_b_proj"):
        assert f"{name}={list(getattr(attention, name).shape)}" in repr(model)
