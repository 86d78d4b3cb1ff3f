"""Bases to quantise a latent in, from its covariance and its importance for predictions over calibration text.

A latent has no basis of its own: c' = M (c - m) costs nothing, since M joins the encoder's rows and M⁻¹ the maps that
read the latent. With the covariance C of c and the importance F = E[g gᵀ] (g the gradient of the log-likelihood with
respect to c), codes of a rotated c' whose groups all have the same bits lose about tr(F S⁻¹) tr(C S), S = Mᵀ M.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from mha2mla.texts import load_text, token_windows

BasisName = Literal["plain", "mean", "rotation", "components", "importance", "balanced"]
BASES: tuple[str, ...] = get_args(BasisName)

CALIBRATION_TEXT = "builtin:pydoc"
CALIBRATION_LENGTH = 1024
CALIBRATION_TOKENS = 4096

RIDGE = 1e-3  # relative to the mean eigenvalue
MAX_CONDITION = 64.0  # condition of M, by which a basis amplifies 16-bit rounding
SINK_ENERGY = 10.0  # times the median of calibration rows


@dataclass(frozen=True)
class LatentStatistics:
    """Calibration statistics of one layer's latent.

    Attributes:
        rows: [N, d_c] float32, latents of all calibration tokens but sinks.
        mean: [d_c] float64.
        covariance: [d_c, d_c] float64, C.
        importance: [d_c, d_c] float64, F.
    """

    rows: Tensor
    mean: Tensor
    covariance: Tensor
    importance: Tensor


@dataclass(frozen=True)
class LatentBasis:
    """c' = encoder (c - mean), c = decoder c' + mean, of one layer.

    Attributes:
        mean: [d_c]; encoder, decoder: [d_c, d_c]; float32.
        sink_energy: squared norm of c' above which a row stays in 16 bits.
    """

    mean: Tensor
    encoder: Tensor
    decoder: Tensor
    sink_energy: float

    def encode(self, latent: Tensor) -> Tensor:
        """[..., d_c] -> [..., d_c], in float32, or the latent's dtype where that is wider."""
        latent = latent.to(torch.promote_types(latent.dtype, torch.float32))
        return (latent - self.mean.to(latent.dtype)) @ self.encoder.mT.to(latent.dtype)

    def decode(self, coded: Tensor) -> Tensor:
        """The inverse of :meth:`encode`."""
        return coded @ self.decoder.mT.to(coded.dtype) + self.mean.to(coded.dtype)

    def is_sink(self, coded: Tensor) -> Tensor:
        """[...] bool of rows c' [..., d_c]."""
        return coded.square().sum(-1) > self.sink_energy


class LatentTap(Cache):
    """Cache of one forward pass that lets :meth:`seen` replace every layer's latent."""

    def __init__(self, num_layers: int, has_rope_cache: bool) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])
        self._has_rope_cache = has_rope_cache

    def seen(self, latent: Tensor, layer_idx: int) -> Tensor:
        """Latents [B, S, d_c] of new tokens -> what attention reads of them."""
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Keys and values are halves of the latent, or the latent and rotary keys."""
        if not self._has_rope_cache:
            halves = torch.cat((key_states, value_states), -1)[:, 0]
            halves = self.seen(halves, layer_idx)[:, None]
            key_states, value_states = halves.split((key_states.shape[-1], value_states.shape[-1]), -1)
        else:
            key_states = self.seen(key_states[:, 0], layer_idx)[:, None]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _GradientTap(LatentTap):
    """Keeps latents, and a zero added to each whose gradient is the latent's."""

    def __init__(self, num_layers: int, has_rope_cache: bool) -> None:
        super().__init__(num_layers, has_rope_cache)
        self.latents: list[Tensor] = []
        self.zeros: list[Tensor] = []

    def seen(self, latent: Tensor, layer_idx: int) -> Tensor:
        self.latents.append(latent.detach())
        self.zeros.append(torch.zeros_like(latent, requires_grad=True))
        return latent + self.zeros[-1]


def calibration_tokens(tokenizer: Any, longest: int | None = None) -> Tensor:
    """int64 [windows, length] of :data:`CALIBRATION_TEXT`."""
    length = min(CALIBRATION_LENGTH, longest or CALIBRATION_LENGTH)
    return token_windows(tokenizer, load_text(CALIBRATION_TEXT), length, CALIBRATION_TOKENS // length, seed=0)


def latent_statistics(model: nn.Module, windows: Tensor, seed: int = 0) -> list[LatentStatistics]:
    """Statistics of every layer of a converted model.

    The gradient is of the log-likelihood of tokens that the model itself draws at every position of a window, so that
    E[g gᵀ] is the curvature of its KL.

    Args:
        model: a converted causal language model, ready to evaluate.
        windows: int64 [windows, length], calibration text.
        seed: of the drawn tokens.
    """
    config, layers = model.config, model.config.num_hidden_layers
    generator = torch.Generator(model.device).manual_seed(seed)
    latents: list[list[Tensor]] = [[] for _ in range(layers)]
    gradients: list[list[Tensor]] = [[] for _ in range(layers)]
    for ids in windows.to(model.device).split(1):
        tap = _GradientTap(layers, config.has_rope_cache)
        with torch.enable_grad():
            logits = model(input_ids=ids, past_key_values=tap, use_cache=True).logits[0].float()
            with torch.no_grad():
                drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            found = torch.autograd.grad(nn.functional.cross_entropy(logits, drawn, reduction="sum"), tap.zeros)
        for layer in range(layers):
            latents[layer].append(tap.latents[layer][0, 1:])  # without the first token, which is a sink
            gradients[layer].append(found[layer][0, 1:])
    return [_statistics(torch.cat(latents[layer]), torch.cat(gradients[layer])) for layer in range(layers)]


def _statistics(latents: Tensor, gradients: Tensor) -> LatentStatistics:
    """Statistics of latents and gradients [N, d_c], without rows of outlying energy."""
    energy = (latents - latents.mean(0)).square().sum(-1)
    kept = energy <= SINK_ENERGY * energy.median()
    rows, gradients = latents[kept].float(), gradients[kept].double()
    mean = rows.double().mean(0)
    centered = rows.double() - mean
    return LatentStatistics(rows, mean, centered.mT @ centered / len(rows), gradients.mT @ gradients / len(gradients))


def latent_basis(
    name: BasisName, statistics: LatentStatistics, *, group: int | None = 32, power: float = 0.5, seed: int = 0
) -> LatentBasis:
    """The basis of one layer.

    Args:
        name: ``"plain"``: the latent as it is; ``"mean"``: less its mean; ``"rotation"``: and rotated at random;
            ``"components"``: principal components, rotated inside groups of like variance; ``"importance"``: S =
            F^power, rotated; ``"balanced"``: the S that makes tr(F S⁻¹) tr(C S) least, rotated.
        statistics: of the layer.
        group: of ``"components"``.
        power: of ``"importance"``.
        seed: of the rotation.

    Raises:
        ValueError: ``name`` is none of :data:`BASES`.
    """
    if name not in BASES:
        raise ValueError(f"basis is {name!r}; expected one of {BASES}")
    width, device = len(statistics.mean), statistics.mean.device
    encoder = decoder = torch.eye(width, dtype=torch.float64, device=device)
    mean = torch.zeros_like(statistics.mean) if name == "plain" else statistics.mean
    if name == "components":
        directions = torch.linalg.eigh(statistics.covariance)[1].flip(-1)
        groups = range(0, width, group or width)
        rotations = [_rotation(min(group or width, width - first), seed + first, device) for first in groups]
        encoder = torch.block_diag(*rotations) @ directions.mT
        decoder = encoder.mT
    elif name == "rotation":
        encoder = _rotation(width, seed, device)
        decoder = encoder.mT
    elif name in ("importance", "balanced"):
        shape = _ridged(statistics.importance)
        if name == "balanced":
            shape, power = _geometric_mean(shape, _ridged(statistics.covariance)), 1.0
        values, directions = torch.linalg.eigh(shape)
        values = values.clamp(min=values[-1] * 1e-15) ** power
        values = values.clamp(min=values[-1] / MAX_CONDITION**2)
        stretch = (values / values.mean()).sqrt()
        rotation = _rotation(width, seed, device)
        encoder = rotation @ (stretch[:, None] * directions.mT)
        decoder = (directions / stretch) @ rotation.mT
    energy = ((statistics.rows.double() - mean) @ encoder.mT).square().sum(-1)
    return LatentBasis(mean.float(), encoder.float(), decoder.float(), SINK_ENERGY * energy.median().item())


def _ridged(matrix: Tensor) -> Tensor:
    return matrix + RIDGE * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _geometric_mean(importance: Tensor, covariance: Tensor) -> Tensor:
    """The S with S C S = F."""
    values, directions = torch.linalg.eigh(covariance)
    root, inverse = ((directions * values**exponent) @ directions.mT for exponent in (0.5, -0.5))
    values, directions = torch.linalg.eigh(root @ importance @ root)
    return inverse @ ((directions * values.sqrt()) @ directions.mT) @ inverse


def _rotation(width: int, seed: int, device: torch.device) -> Tensor:
    """A random orthogonal matrix [width, width], float64, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).to(device)
