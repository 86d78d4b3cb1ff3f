"""Fisher metrics, layer by layer, against one backward pass through the whole model and the KL that they stand for."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mha2mla.conversion.sensitivity import DAMPING, fisher_metrics
from mha2mla.conversion.source import CheckpointReader
from mha2mla.conversion.streaming import StreamedModel
from tests.conversion.tiny import checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def source(request, tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("source") / request.param, request.param)


def streamed(source, dtype=torch.float32):
    config = AutoConfig.from_pretrained(source)
    layers = config.num_hidden_layers
    return StreamedModel(config, CheckpointReader(source), (None,) * layers, device=CPU, dtype=dtype)


def windows(model, count=6, length=24):
    return torch.randint(0, model.vocab_size, (count, length), generator=torch.Generator().manual_seed(3))


def moments(source, tokens, seed):
    """E[mean(h²) g gᵀ] after every layer by autograd through transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa").eval()
    states = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: states.append(output))
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for row in tokens:
        states.clear()
        scores = model(row[None], use_cache=False).logits[0].log_softmax(-1)
        sampled = torch.multinomial(scores.detach().exp(), 1, generator=generator)
        gradients = torch.autograd.grad(scores.gather(1, sampled).sum(), states)
        scaled = [g[0] * h[0].square().mean(-1, keepdim=True).sqrt() for g, h in zip(gradients, states, strict=True)]
        total = total + torch.stack([g.T @ g for g in scaled]).detach().double()
    return total / tokens.numel()


def test_layer_by_layer_is_the_whole_backward_pass(source, tmp_path):
    model = streamed(source)
    tokens = windows(model)
    roots = fisher_metrics(model, tokens, folder=tmp_path, batch=4, seed=5)
    expected = moments(source, tokens, 5)
    assert sorted(roots) == list(range(model.num_layers))
    identity = torch.eye(model.hidden_size, dtype=torch.float64)
    for layer, root in roots.items():
        scaled = expected[layer] / expected[layer].diagonal().mean()
        metric = (scaled + DAMPING * identity) / (1 + DAMPING)
        made = root.double() @ root.double()
        assert torch.equal(root, root.T) or torch.allclose(root, root.T, atol=1e-5)
        assert (made - metric).norm() <= 1e-4 * metric.norm()


def test_spilt_activations_give_the_same_bits_and_leave_no_file(source, tmp_path):
    model = streamed(source)
    tokens = windows(model)
    kept = fisher_metrics(model, tokens, folder=tmp_path, batch=4)
    spilt = fisher_metrics(model, tokens, folder=tmp_path, batch=4, spill_bytes=0)
    assert all(torch.equal(kept[layer], spilt[layer]) for layer in kept)
    assert not list(tmp_path.iterdir())


def test_the_metric_foretells_the_divergence(source, tmp_path):
    """KL of a small error against half of eᵀ M e / mean(h²): errors that the metric calls dear cost more."""
    model = streamed(source)
    tokens = windows(model, count=16)
    layer = 0
    root = fisher_metrics(model, tokens, folder=tmp_path, batch=8, damping=0.0)[layer]
    energy, vectors = torch.linalg.eigh(root)
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    @torch.no_grad()
    def divergence(direction):
        def push(module, args, output):
            size = output.square().mean(-1, keepdim=True).sqrt()
            return output + 0.02 * size * direction * len(direction) ** 0.5

        plain = whole(tokens, use_cache=False).logits.log_softmax(-1)
        handle = whole.model.layers[layer].register_forward_hook(push)
        pushed = whole(tokens, use_cache=False).logits.log_softmax(-1)
        handle.remove()
        return float((plain.exp() * (plain - pushed)).sum(-1).mean())

    few = max(1, len(energy) // 8)
    cheap = sum(divergence(vectors[:, i]) for i in range(few))
    dear = sum(divergence(vectors[:, -1 - i]) for i in range(few))
    assert dear > 2 * cheap


def test_a_gradient_that_is_no_number_names_its_layer(source, tmp_path):
    model = streamed(source)
    model.head_rows = lambda start, stop: torch.full((model.vocab_size, model.hidden_size), torch.nan)
    with pytest.raises((ValueError, RuntimeError), match=r"layer|probability"):
        fisher_metrics(model, windows(model), folder=tmp_path, batch=4)
