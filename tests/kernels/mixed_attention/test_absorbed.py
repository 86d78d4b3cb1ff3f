"""W_UK and W_UV around the decode op: the products, and that nothing is copied for them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mha2mla.kernels.mixed_attention.api import _up_project


class Calls(TorchDispatchMode):
    """Names of the ops that write something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(
            part in func.name()
            for part in ("view", "transpose", "expand", "unsqueeze", "slice", "select", "empty", "unflatten")
        ):
            self.names.append(func.name())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "maps"), [(1, 1, 2), (3, 1, 6), (2, 3, 6), (4, 2, 2), (1, 1, 6), (2, 1, 1)]
)
def test_every_head_goes_through_its_map(batch, length, maps, transposed):
    torch.manual_seed(0)
    whole = torch.randn(batch, length, 6, 14, dtype=torch.float64)
    x = whole[..., 3:11]  # part of a wider projection, read where it lies
    weight = torch.randn(maps, 8, 5, dtype=torch.float64)
    given = weight.mT.contiguous() if transposed else weight
    expected = torch.einsum("bshi,hio->bsho", x, weight.repeat_interleave(6 // maps, 0))
    with torch.no_grad(), Calls() as calls:
        out = _up_project(x, given, transposed)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    copies = 1 if 1 < maps < 6 and batch * length > 1 else 0
    assert out.is_contiguous() and calls.names == ["aten::clone"] * copies + ["aten::bmm.out"]
    torch.testing.assert_close(_up_project(x.requires_grad_(), given, transposed), expected, rtol=1e-13, atol=1e-13)


def test_gradients_pass():
    x, weight = torch.randn(2, 1, 4, 3, requires_grad=True), torch.randn(4, 3, 5, requires_grad=True)
    _up_project(x, weight).square().sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
