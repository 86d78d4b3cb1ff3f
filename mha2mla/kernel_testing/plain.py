"""Decode attention of one token as textbooks have it: the reference in float64, the yardstick at a lower dtype.

Beside the reference stands what rounding is expected to do to it: how far one implementation happens to be from float64
depends on the order of its sums, and orders differ by more than the factor that is allowed between implementations.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = torch.finfo(torch.float32).eps / 2  # sums are kept in float32 whatever the dtype of the inputs


def plain_attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
    """Textbook MHA/GQA of one token at its inputs' dtype.

    Args:
        q: [H, d_k]. k: [h_kv, T, d_k]. v: [h_kv, T, d_v]; h_kv divides H.

    Returns:
        [H, d_v].
    """
    return _attend(_scores(q, k), v, softmax_scale)


def plain_mla(q_latent: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, softmax_scale: float) -> Tensor:
    """Textbook absorbed MLA of one token at the dtype of its inputs (the formula of ``mla_decode``'s docstring).

    Args:
        q_latent: [H, d_c]. q_pe: [H, d_r]. latent: [T, d_c]. k_pe: [T, G, d_r]; G divides H.

    Returns:
        [H, d_c].
    """
    return _attend(_mla_scores(q_latent, q_pe, latent, k_pe), latent[None], softmax_scale)


def rounding_of_attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
    """[H, d_v]: root mean square that rounding to float32 is expected to put on :func:`plain_attention`; of float64."""
    return _rounding(_scores(q, k) * softmax_scale, v, q.shape[-1])


def rounding_of_mla(q_latent: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, softmax_scale: float) -> Tensor:
    """[H, d_c]: what :func:`rounding_of_attention` is, of :func:`plain_mla`."""
    score = _mla_scores(q_latent, q_pe, latent, k_pe) * softmax_scale
    return _rounding(score, latent[None], q_latent.shape[-1] + q_pe.shape[-1])


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[groups, heads of a group, T]."""
    return torch.einsum("grd,gtd->grt", q.unflatten(0, (k.shape[0], -1)), k)


def _mla_scores(q_latent: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
    """[1, H, T]."""
    score = torch.einsum("hd,td->ht", q_latent, latent)
    return (score + _scores(q_pe, k_pe.transpose(0, 1)).flatten(0, 1))[None]


def _attend(score: Tensor, values: Tensor, softmax_scale: float) -> Tensor:
    """[H, d] of scores [groups, heads of a group, T] and values [groups, T, d].

    The softmax is taken in at least float32, then rounded to the scores' dtype, as attention in torch has it.
    """
    wide = torch.float64 if score.dtype == torch.float64 else torch.float32
    weight = torch.softmax(score * softmax_scale, dim=-1, dtype=wide).to(score.dtype)
    return torch.einsum("grt,gtd->grd", weight, values).flatten(0, 1)


def _rounding(score: Tensor, values: Tensor, width: int) -> Tensor:
    """[H, d] of scaled scores [groups, heads of a group, T] and values [groups, T, d], float64, to first order in u.

    * A running sum of n numbers rounds each partial sum S_k off by u/sqrt(3) of it. In random order S_k has the mean
      (k/n) S and the variance (k/n)(1 - k/n) Q, where S is the sum and Q the sum of squares, so the squares of the
      errors add up to u² n/6 · (2/3 S² + 1/3 Q). Orders that add blocks first lose less; how much less is luck.
    * A score is such a sum of ``width`` products, then scaled; a weight has its absolute error as a relative one, and
      two units from exp. A relative error e of a weight w moves the output by e w (v - out).
    * The result is rounded once more.
    """
    weight = torch.softmax(score, dim=-1)
    squared = weight.square()
    out = torch.einsum("grt,gtd->grd", weight, values)
    squares = torch.einsum("grt,gtd->grd", squared, values.square())
    around = squares - 2 * out * torch.einsum("grt,gtd->grd", squared, values) + out**2 * squared.sum(-1, keepdim=True)
    of_weight = 4 + score.abs().amax(-1, keepdim=True).square() * ((width - 1) / 6 + 1 / 3)
    of_sum = (score.shape[-1] - 1) / 6 * (2 / 3 * out**2 + 1 / 3 * squares)
    return (UNIT * (around.clamp(min=0) * of_weight + of_sum + out**2).sqrt()).flatten(0, 1)
