"""The loss in chunks: the plain definition's value and gradients."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mha2mla.healing.loss import distillation_loss


def plain(student, teacher, student_head, teacher_head, weights):
    log_p, log_q = teacher_head(teacher).log_softmax(-1), student_head(student).log_softmax(-1)
    return (weights * (log_p.exp() * (log_p - log_q)).sum(-1)).sum()


def case(tokens=13, bias=True):
    heads = [nn.Linear(width, 37, bias=bias).double() for width in (6, 5)]
    student = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    return student, torch.randn(tokens, 5, dtype=torch.float64), *heads


@pytest.mark.parametrize("chunk", [1, 4, 13, None])
@pytest.mark.parametrize("trains_head", [True, False])
def test_loss_is_the_plain_definition(chunk, trains_head):
    student, teacher, student_head, teacher_head = case()
    student_head.requires_grad_(trains_head)
    weights = torch.rand(13, dtype=torch.float64)
    inputs = [student, *(student_head.parameters() if trains_head else ())]
    expected = plain(student, teacher, student_head, teacher_head, weights)
    found = distillation_loss(student, teacher, student_head, teacher_head, weights=weights, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for gradient, right in zip(
        torch.autograd.grad(3 * found, inputs), torch.autograd.grad(3 * expected, inputs), strict=True
    ):
        torch.testing.assert_close(gradient, right, rtol=1e-11, atol=1e-14)


def test_masked_tokens_do_not_count():
    student, teacher, *heads = case()
    weights = torch.ones(13)
    weights[5:] = 0
    masked = distillation_loss(student, teacher, *heads, weights=weights, chunk=4)
    torch.testing.assert_close(masked, distillation_loss(student[:5], teacher[:5], *heads))
    assert not torch.autograd.grad(masked, student)[0][5:].any()


def test_the_source_itself_has_no_gradient():
    student, _, head, _ = case()
    loss = distillation_loss(student, student.detach(), head, head, chunk=4)
    assert loss == 0 and not torch.autograd.grad(loss, student)[0].abs().max() > 1e-16


class CountingHead(nn.Linear):
    """Remembers the largest number of tokens it was given."""

    most = 0

    def forward(self, x):
        self.most = max(self.most, len(x))
        return super().forward(x)


def test_heads_see_one_chunk_at_a_time():
    heads = [CountingHead(6, 37), CountingHead(6, 37)]
    student = torch.randn(50, 6, requires_grad=True)
    distillation_loss(student, torch.randn(50, 6), *heads, chunk=8).backward()
    assert [head.most for head in heads] == [8, 8]


class Casts(TorchDispatchMode):
    """Counts casts of matrices of a shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("trains_head", [True, False])
def test_autocast_casts_a_head_once(trains_head):
    heads = [nn.Linear(6, 37).requires_grad_(trains_head), nn.Linear(6, 37).requires_grad_(False)]
    student, teacher = torch.randn(50, 6, requires_grad=True), torch.randn(50, 6)
    with torch.autocast("cpu", torch.bfloat16):
        with Casts(heads[0].weight.shape) as casts:
            loss = distillation_loss(student, teacher, *heads, chunk=8)
        autocasts = distillation_loss(student, teacher, *map(nn.Sequential, heads), chunk=8)
    assert casts.count == 2 + 7 * trains_head  # a trained one's gradient is cast for each chunk
    assert torch.equal(loss, autocasts)
    assert torch.equal(*(torch.autograd.grad(each, student)[0] for each in (loss, autocasts)))


def test_loss_refuses_other_shapes():
    student, teacher, *heads = case()
    with pytest.raises(ValueError, match=r"student is \(13, 6\) beside teacher of \(12, 5\)"):
        distillation_loss(student, teacher[1:], *heads)
    with pytest.raises(ValueError, match=r"weights is \(3,\); expected \[13\]"):
        distillation_loss(student, teacher, *heads, weights=torch.ones(3))


class Matrices(TorchDispatchMode):
    """Counts operations that write a new [tokens, vocabulary] matrix."""

    def __init__(self, size):
        super().__init__()
        self.size, self.made = size, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        known = {each.data_ptr() for each in args if isinstance(each, torch.Tensor)}
        self.made += isinstance(found, torch.Tensor) and found.shape == self.size and found.data_ptr() not in known
        return found


def test_gradients_take_five_matrices():
    heads = [nn.Linear(6, 37).requires_grad_(False) for _ in range(2)]
    student = torch.randn(8, 6, requires_grad=True)
    with Matrices((8, 37)) as mode:
        distillation_loss(student, torch.randn(8, 6), *heads, chunk=8).backward()
    assert mode.made == 5, "two of logits, two of log-probabilities, one of probabilities"
