"""KL divergence to the source's full logits, computed in chunks of tokens with both heads inside the chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LOGITS_PER_CHUNK = 2**26  # float32 elements of one model's logits: 256 MiB


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    student_head: nn.Module,
    teacher_head: nn.Module,
    *,
    weights: Tensor | None = None,
    chunk: int | None = None,
    diverge: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Sum over tokens of w · KL(teacher ‖ student) of the full vocabulary at temperature 1, in nats.

    Logits, probabilities and their gradients exist for one chunk of tokens at a time, in float32 or wider. The forward
    pass computes the gradients of hidden states and head together with the value; the backward pass scales them.

    Args:
        student: [N, hidden], last hidden states; may require gradients, as may the parameters of ``student_head``.
        teacher: [N, hidden of the teacher]; no gradient reaches it.
        student_head, teacher_head: [n, hidden] to logits [n, vocabulary].
        weights: w [N]; None: ones. A token of weight 0 is masked.
        chunk: tokens of a chunk; default a power of two within :data:`LOGITS_PER_CHUNK` elements of logits.
        diverge: :func:`divergence`, compiled; default as it is.

    Returns:
        Scalar, float32 or wider.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if student.ndim != 2 or teacher.ndim != 2 or len(student) != len(teacher):
        raise ValueError(
            f"student is {tuple(student.shape)} beside teacher of {tuple(teacher.shape)}; expected [N, hidden] each"
        )
    weights = student.new_ones(len(student), dtype=torch.float32) if weights is None else weights
    if weights.shape != student.shape[:1]:
        raise ValueError(f"weights is {tuple(weights.shape)}; expected [{len(student)}], a number for each token")
    if chunk is None:
        fitting = LOGITS_PER_CHUNK // teacher_head(teacher[:1].detach()).shape[-1]
        chunk = 1 << max(0, fitting.bit_length() - 1)  # divides passes: chunks of one shape
    trained = [parameter for parameter in student_head.parameters() if parameter.requires_grad]
    heads = (student_head, teacher_head)
    how = (heads, chunk, diverge or divergence, torch.is_grad_enabled())
    return _ChunkedKL.apply(student, teacher, weights, how, *trained)


class _ChunkedKL(torch.autograd.Function):
    """Sum of weighted divergences; ``trained``: parameters of the student's head that get gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        weights: Tensor,
        how: tuple[tuple[nn.Module, nn.Module], int, Callable[..., tuple[Tensor, Tensor]], bool],
        *trained: Tensor,
    ) -> Tensor:
        heads, chunk, diverge, differentiable = how
        student_head, teacher_head = map(_cast_once, heads)
        total, gradient = None, torch.empty_like(student)
        sums = [torch.zeros_like(parameter) for parameter in trained]
        for start in range(0, len(student), chunk):
            part = slice(start, start + chunk)
            expected = teacher_head(teacher[part])
            with torch.set_grad_enabled(differentiable):
                hidden = student[part].detach().requires_grad_(differentiable)
                found = student_head(hidden)
            loss, slope = diverge(expected, found.detach(), weights[part])
            if differentiable:
                gradient[part], *of_head = torch.autograd.grad(found, [hidden, *trained], slope)
                for running, added in zip(sums, of_head, strict=True):
                    running += added
            total = loss if total is None else total + loss
        ctx.save_for_backward(gradient, *sums)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *sums = (saved * scale for saved in ctx.saved_tensors)
        return gradient.to(ctx.saved_tensors[0].dtype), None, None, None, *sums


def _cast_once(head: nn.Module) -> Callable[[Tensor], Tensor]:
    """A frozen ``head`` under autocast with its weights cast here: autocast, which keeps casts of trained ones alone,
    would cast them again for each chunk."""
    device = next(head.parameters()).device.type
    # not a head that computes something else, nor one whose weights are sharded
    plain = type(head) is nn.Linear and all(type(x) is nn.Parameter for x in head.parameters())
    if not plain or head.weight.requires_grad or not torch.is_autocast_enabled(device):
        return head
    weight, bias = (x if x is None else x.to(torch.get_autocast_dtype(device)) for x in (head.weight, head.bias))
    return lambda hidden: nn.functional.linear(hidden, weight, bias)


def divergence(expected: Tensor, found: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of w · KL(softmax(expected) ‖ softmax(found)), and its gradient with respect to ``found``, w · (q - p).

    Written out, since autograd would read and write the [n, vocabulary] matrices half as often again.

    Args:
        expected, found: logits [n, vocabulary].
        weights: w [n].
    """
    dtype = torch.promote_types(expected.dtype, torch.float32)
    log_p, log_q = expected.to(dtype).log_softmax(-1), found.to(dtype).log_softmax(-1)
    p, weights = log_p.exp(), weights.to(dtype)
    loss = (log_p.sub_(log_q).mul_(p).sum(-1) * weights).sum()
    return loss, log_q.exp_().sub_(p).mul_(weights[:, None]).to(found.dtype)
