"""How much the source's predictions depend on each direction of a hidden state: a matrix a layer, made layer by layer.

The second moment of score gradients is the Fisher information (Amari 1998), and to second order the KL divergence that
a small error causes; K-FAC (arXiv 1503.05671) and BRECQ (2102.05426) measure errors of layers by it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from mha2mla.conversion.calibration import SPILL_BYTES, ActivationStore
from mha2mla.conversion.streaming import StreamedModel

DAMPING = 0.1  # share of the identity in a metric: gradients of a few tokens miss directions that others need
_LOGITS = 1 << 26  # that exist at a time


def fisher_metrics(
    model: StreamedModel,
    windows: torch.Tensor,
    *,
    folder: Path,
    batch: int,
    seed: int = 0,
    spill_bytes: int = SPILL_BYTES,
    damping: float = DAMPING,
    progress: bool = False,
) -> dict[int, torch.Tensor]:
    """Metrics of hidden states after each layer, from the gradients of what the source itself predicts.

    With h the hidden state of a token after a layer and g the gradient of the log-likelihood, summed over the window,
    of tokens *sampled* from the source's own predictions (there are no labels), M = E[mean(h²) g gᵀ]: an error e of
    h costs about eᵀ M e / mean(h²) nats over two. M is scaled to a mean diagonal of one and damped,
    (M + damping · I) / (1 + damping).

    Activations of all layer boundaries wait in stores (on disk when larger than ``spill_bytes``); one layer's weights
    and the head are in memory at a time.

    Args:
        model: the source.
        windows: int64 [windows, length] of calibration tokens; some 10,000 tokens suffice.
        folder: where large activations go.
        batch: windows at a time.
        seed: of the sampled tokens.

    Returns:
        Layer index -> R [hidden, hidden] float32 on ``model.device``, symmetric, with R R = M.

    Raises:
        ValueError: a gradient is not finite; names the layer.
    """
    stores: list[ActivationStore] = []

    def new_store(dtype: torch.dtype) -> ActivationStore:
        stores.append(
            ActivationStore(*windows.shape, model.hidden_size, dtype=dtype, folder=folder, spill_bytes=spill_bytes)
        )
        return stores[-1]

    try:
        hidden = [new_store(model.dtype)]
        model.embed(windows, hidden[0])
        for layer in tqdm(range(model.num_layers), desc="sensitivity", unit="layer", disable=not progress):
            hidden.append(new_store(model.dtype))
            _forward(model, layer, hidden[layer], hidden[layer + 1], batch)
            model.source.release()
        gradients = new_store(torch.float32)
        _start(model, hidden[-1], gradients, seed)
        metrics = {}
        for layer in reversed(range(model.num_layers)):
            metrics[layer] = _root(_moment(hidden[layer + 1], gradients, model.device, layer), damping)
            hidden[layer + 1].close()
            if layer:  # nobody asks for errors of the embeddings
                _backward(model, layer, hidden[layer], gradients, batch)
                model.source.release()
        return metrics
    finally:
        for store in stores:
            store.close()


@torch.inference_mode()
def _forward(model: StreamedModel, layer: int, inputs: ActivationStore, outputs: ActivationStore, batch: int) -> None:
    module = model.layer(layer)
    for start in range(0, len(inputs), batch):
        states = inputs.read(start, min(start + batch, len(inputs)), model.device)
        outputs.write(start, model.forward_layer(module, layer, states))


def _start(model: StreamedModel, hidden: ActivationStore, gradients: ActivationStore, seed: int) -> None:
    """Gradients of the log-likelihood of sampled tokens with respect to the last hidden state."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.inference_mode(False), torch.enable_grad():
        norm, head = model.final_norm(), model.head_rows(0, model.vocab_size)
        step = max(1, _LOGITS // model.vocab_size)
        for window in range(len(hidden)):
            states = hidden.read(window, window + 1, model.device)[0]
            found = []
            for part in states.split(step):
                leaf = part.clone().requires_grad_()
                scores = (norm(leaf) @ head.T).float().log_softmax(-1)
                with torch.no_grad():
                    sampled = torch.multinomial(scores.exp(), 1, generator=generator)
                found.append(torch.autograd.grad(scores.gather(1, sampled).sum(), leaf)[0].float())
            gradients.write(window, torch.cat(found)[None])


def _backward(
    model: StreamedModel, layer: int, hidden: ActivationStore, gradients: ActivationStore, batch: int
) -> None:
    """Replaces gradients after ``layer`` by those before it; ``hidden``: its inputs."""
    with torch.inference_mode(False), torch.enable_grad():
        module = model.layer(layer)
        for start in range(0, len(hidden), batch):
            stop = min(start + batch, len(hidden))
            leaf = hidden.read(start, stop, model.device).clone().requires_grad_()
            output = model.forward_layer(module, layer, leaf)
            above = gradients.read(start, stop, model.device).to(output.dtype)
            gradients.write(start, torch.autograd.grad(output, leaf, above)[0].float())


def _moment(hidden: ActivationStore, gradients: ActivationStore, device: torch.device, layer: int) -> torch.Tensor:
    """[hidden, hidden] float64, E[mean(h²) g gᵀ]."""
    total = None
    for window in range(len(hidden)):
        energy = hidden.read(window, window + 1, device)[0].double().square().mean(-1, keepdim=True)
        scaled = gradients.read(window, window + 1, device)[0].double() * energy.sqrt()
        total = scaled.T @ scaled if total is None else total.addmm_(scaled.T, scaled)
    if not torch.isfinite(total).all():
        raise ValueError(f"layer {layer}: the gradient of the source's predictions is not finite")
    return total / (len(hidden) * hidden.length)


def _root(moment: torch.Tensor, damping: float) -> torch.Tensor:
    """Symmetric root of the scaled and damped metric, float32."""
    identity = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    scaled = moment / moment.diagonal().mean().clamp_min(torch.finfo(moment.dtype).tiny)
    energy, vectors = torch.linalg.eigh((scaled + damping * identity) / (1 + damping))
    return ((vectors * energy.clamp_min(0).sqrt()) @ vectors.T).float()
