"""Bases to quantise a latent in, from its covariance and its importance for predictions over calibration text.

A latent has no basis of its own: c' = M c costs nothing, since M joins the encoder's rows and M⁻¹ the maps that read
the latent. With the covariance C of c and the importance F = E[g gᵀ] (g the gradient of the log-likelihood with respect
to c), codes of a rotated c' lose about tr(F S⁻¹) tr(C S), S = Mᵀ M.

Codes of a row are of its difference from the nearest of two centers: the mean of ordinary tokens, and that of first
tokens, which are attention sinks in most layers: nearly the same latent whatever the token, and any error in it reaches
every query.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from mha2mla.conversion.extension import RecipeObject, described, register
from mha2mla.terminal import Span, progress_bar

RIDGE = 1e-3  # relative to the mean eigenvalue
MAX_CONDITION = 64.0  # condition of M, by which a basis amplifies 16-bit rounding
SINGULAR = 1e12  # condition, by Frobenius norms, from which on a basis is no basis
OUTLYING_ENERGY = 10.0  # times the median: rows beyond do not count in statistics
FIRST_TOKENS = 256  # sampled to find the center of sinks
# Largest element of c' on the calibration text: a model in float16 ends at 65,504.
LARGEST = 2.0**13


@dataclass(frozen=True)
class LatentStatistics:
    """Calibration statistics of one layer's latent.

    Attributes:
        rows: [N, d_c] float32, latents of all calibration tokens but first and outlying ones.
        first: [n, d_c] float32, latents of tokens that begin a text.
        mean: [d_c] float64, of ``rows``.
        covariance: [d_c, d_c] float64, C.
        importance: [d_c, d_c] float64, F.
        outlying: [n, d_c] float32, latents whose energy is far from the others'.
    """

    rows: Tensor
    first: Tensor
    mean: Tensor
    covariance: Tensor
    importance: Tensor
    outlying: Tensor


@dataclass(frozen=True)
class LatentBasis:
    """c' = encoder c, c = decoder c', of one layer.

    Attributes:
        encoder, decoder: [d_c, d_c] float64.
        centers: [2, d_c] float64 in the basis: of ordinary rows, and of sinks.
    """

    encoder: Tensor
    decoder: Tensor
    centers: Tensor

    def encode(self, latent: Tensor) -> Tensor:
        """[..., d_c] -> [..., d_c], in float32, or the latent's dtype where that is wider."""
        latent = latent.to(torch.promote_types(latent.dtype, torch.float32))
        return latent @ self.encoder.mT.to(latent.dtype)

    def decode(self, coded: Tensor) -> Tensor:
        """The inverse of :meth:`encode`."""
        return coded @ self.decoder.mT.to(coded.dtype)

    def fold(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A layer's tensors in this basis, of the same dtypes: the same model to rounding, and ``latent_centers``.

        Args:
            tensors: of ``MLAAttention``, without rotary keys in the cache.
        """
        folded, device = dict(tensors), next(iter(tensors.values())).device
        encoder, decoder, centers = (each.to(device) for each in (self.encoder, self.decoder, self.centers))
        for name in ("kv_a_proj.weight", "k_a_proj.weight", "v_a_proj.weight", "kv_a_proj.bias"):
            if name in tensors:
                folded[name] = (encoder @ tensors[name].double()).to(tensors[name].dtype)
        for name in ("k_b_proj", "v_b_proj", "k_rope_proj.weight"):
            if name in tensors:
                folded[name] = (tensors[name].double() @ decoder).to(tensors[name].dtype)
        return {**folded, "latent_centers": centers.float()}


class BasisRule(RecipeObject, ABC):
    """Basis that a latent is quantised in. A subclass is a frozen dataclass, passed as ``Recipe(basis=MyBasis())``."""

    key: ClassVar[str] = "latent.basis"
    keyword: ClassVar[str] = "basis"

    @abstractmethod
    def encoder(self, statistics: LatentStatistics) -> Tensor:
        """M [d_c, d_c], float64 on the statistics' device; the same statistics must give the same M, whose
        condition is best bounded by :data:`MAX_CONDITION`. A row has one scale, so that M is best rotated."""

    def basis(self, statistics: LatentStatistics) -> LatentBasis:
        """M times a power of two that gives c' elements of about 1, and the centers.

        Raises:
            ValueError: M is no invertible float64 matrix of the latent's width.
        """
        encoder, width, device = self.encoder(statistics), len(statistics.mean), statistics.mean.device
        is_right = isinstance(encoder, Tensor) and encoder.dtype == torch.float64 and encoder.device == device
        if not is_right or encoder.shape != (width, width):
            raise ValueError(
                f"{type(self).__name__}.encoder gave {described(encoder)}; expected torch.float64 {width, width} on"
                f" {device}"
            )
        decoder = torch.linalg.inv_ex(encoder).inverse
        condition = (encoder.norm() * decoder.norm()).item()
        if not condition <= SINGULAR:  # so written that NaN fails, too
            raise ValueError(
                f"{type(self).__name__}.encoder gave a matrix of condition {condition:.3g}; expected an invertible one,"
                f" with a condition of {MAX_CONDITION:g} at best"
            )
        found = (statistics.rows, statistics.first, statistics.outlying)
        rows, first, outlying = (each.double() @ encoder.mT for each in found)
        center = statistics.mean @ encoder.mT
        size = (rows - center).square().mean().sqrt().item()
        largest = max(each.abs().max().item() for each in (rows, first, outlying) if len(each))
        exponent = -round(math.log2(size)) if size > 0 else 0
        if largest > 0:
            exponent = min(exponent, math.floor(math.log2(LARGEST / largest)))
        centers = torch.stack((center, first.mean(0) if len(first) else center))
        return LatentBasis(encoder * 2.0**exponent, decoder * 2.0**-exponent, centers * 2.0**exponent)


@register("plain")
@dataclass(frozen=True)
class Plain(BasisRule):
    """The latent as the low-rank rule made it."""

    def encoder(self, statistics: LatentStatistics) -> Tensor:
        return torch.eye(len(statistics.mean), dtype=torch.float64, device=statistics.mean.device)


@register("rotation")
@dataclass(frozen=True)
class Rotation(BasisRule):
    """A random rotation."""

    seed: int = 0

    def encoder(self, statistics: LatentStatistics) -> Tensor:
        return _rotation(len(statistics.mean), self.seed, statistics.mean.device)


@register("importance")
@dataclass(frozen=True)
class Importance(BasisRule):
    """S = F^power, rotated.

    Args:
        power: from 0, a random rotation, to 1.
    """

    power: float = 0.5
    seed: int = 0

    def encoder(self, statistics: LatentStatistics) -> Tensor:
        return _rotated_root(_ridged(statistics.importance), self.power, self.seed)


@register("balanced")
@dataclass(frozen=True)
class Balanced(BasisRule):
    """The S that makes tr(F S⁻¹) tr(C S) least, S C S = F, rotated."""

    seed: int = 0

    def encoder(self, statistics: LatentStatistics) -> Tensor:
        shape = _geometric_mean(_ridged(statistics.importance), _ridged(statistics.covariance))
        return _rotated_root(shape, 1.0, self.seed)


def _rotated_root(shape: Tensor, power: float, seed: int) -> Tensor:
    """R S^½ for S = ``shape`` ^ ``power``, its condition bounded."""
    values, directions = torch.linalg.eigh(shape)
    values = values.clamp(min=values[-1] * 1e-15) ** power
    values = values.clamp(min=values[-1] / MAX_CONDITION**2)
    stretch = (values / values.mean()).sqrt()
    return _rotation(len(shape), seed, shape.device) @ (stretch[:, None] * directions.mT)


def _ridged(matrix: Tensor) -> Tensor:
    mean = matrix.diagonal().mean()
    mean = torch.where(mean > 0, mean, 1.0)  # of a layer whose output nothing reads
    return matrix + RIDGE * mean * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _geometric_mean(importance: Tensor, covariance: Tensor) -> Tensor:
    """The S with S C S = F."""
    values, directions = torch.linalg.eigh(covariance)
    root, inverse = ((directions * values**exponent) @ directions.mT for exponent in (0.5, -0.5))
    values, directions = torch.linalg.eigh(root @ importance @ root)
    return inverse @ ((directions * values.sqrt()) @ directions.mT) @ inverse


@lru_cache(maxsize=8)  # layers of one width, and bits, share it
def _rotation(width: int, seed: int, device: torch.device) -> Tensor:
    """A random orthogonal matrix [width, width], float64, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).to(device)


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


class GradientTap(LatentTap):
    """Keeps latents, and a zero added to each whose gradient is the latent's."""

    def __init__(self, num_layers: int, has_rope_cache: bool) -> None:
        super().__init__(num_layers, has_rope_cache)
        self.latents: list[Tensor] = []
        self.zeros: list[Tensor] = []

    def seen(self, latent: Tensor, layer_idx: int) -> Tensor:
        self.latents.append(latent.detach())
        self.zeros.append(torch.zeros_like(latent, requires_grad=torch.is_grad_enabled()))
        return latent + self.zeros[-1]


def latent_statistics(
    model: nn.Module, windows: Tensor, seed: int = 0, *, progress: bool | Span = False
) -> list[LatentStatistics]:
    """Statistics of every layer of a converted model.

    The gradient is of the log-likelihood of tokens that the model itself draws at every position of a window, so that
    E[g gᵀ] is the curvature of its KL.

    Args:
        model: a converted causal language model, ready to evaluate, whose latents are not quantised.
        windows: int64 [windows, length], calibration text.
    """
    config, layers = model.config, model.config.num_hidden_layers
    generator = torch.Generator(model.device).manual_seed(seed)
    latents: list[list[Tensor]] = [[] for _ in range(layers)]
    gradients: list[list[Tensor]] = [[] for _ in range(layers)]
    each = windows.to(model.device).split(1)
    for ids in progress_bar(each, show=progress, desc="basis of the codes", unit="window"):
        tap = GradientTap(layers, config.has_rope_cache)
        with torch.enable_grad():
            logits = model(input_ids=ids, past_key_values=tap, use_cache=True).logits[0].float()
            with torch.no_grad():
                drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            found = torch.autograd.grad(nn.functional.cross_entropy(logits, drawn, reduction="sum"), tap.zeros)
        for layer in range(layers):
            latents[layer].append(tap.latents[layer][0, 1:])  # without the first token, which is a sink
            gradients[layer].append(found[layer][0, 1:])
    step = max(1, windows.numel() // FIRST_TOKENS)
    tap = GradientTap(layers, config.has_rope_cache)
    with torch.no_grad():
        model(input_ids=windows.flatten()[::step][:, None].to(model.device), past_key_values=tap, use_cache=True)
    first = [latent[:, 0].float() for latent in tap.latents]
    return [statistics_of(torch.cat(latents[i]), torch.cat(gradients[i]), first[i]) for i in range(layers)]


def layer_statistics(
    forward: Callable[..., Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    layer_idx: int,
    has_rope_cache: bool,
    seed: int = 0,
) -> LatentStatistics:
    """Statistics of one layer's latent, whose importance is that of its errors for the layer's output.

    E[g gᵀ] of the gradients g of Σ ξ √w out, ξ standard normal, is the curvature of the squared errors' sum, each with
    its weight w.

    Args:
        forward: inputs [n, L, hidden] and ``past_key_values`` → outputs [n, L, hidden], without a quantised latent.
        batches: inputs, and weights [n, L] of a token's squared error.
        seed: of ξ.
    """
    latents, gradients, first = [], [], []
    for inputs, weights in batches:
        tap = GradientTap(layer_idx + 1, has_rope_cache)
        generator = torch.Generator(inputs.device).manual_seed(seed + len(first))
        with torch.enable_grad():
            made = forward(inputs, past_key_values=tap)
            drawn = torch.randn(made.shape, generator=generator, device=made.device, dtype=made.dtype)
            (found,) = torch.autograd.grad((made * drawn * weights.sqrt()[..., None]).sum(), tap.zeros)
        latents.append(tap.latents[0][:, 1:].flatten(0, 1).float())
        gradients.append(found[:, 1:].flatten(0, 1))
        first.append(tap.latents[0][:, 0].float())
    return statistics_of(torch.cat(latents), torch.cat(gradients), torch.cat(first))


def statistics_of(latents: Tensor, gradients: Tensor, first: Tensor) -> LatentStatistics:
    """Statistics of latents and gradients [N, d_c], without rows of outlying energy."""
    energy = (latents - latents.mean(0)).square().sum(-1)
    kept = energy <= OUTLYING_ENERGY * energy.median()
    rows, outlying, gradients = latents[kept].float(), latents[~kept].float(), gradients[kept].double()
    mean = rows.double().mean(0)
    centered = rows.double() - mean
    covariance = centered.mT @ centered / len(rows)
    return LatentStatistics(rows, first, mean, covariance, gradients.mT @ gradients / len(gradients), outlying)
