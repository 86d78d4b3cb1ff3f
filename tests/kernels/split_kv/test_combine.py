"""The merge of partials alone: counts of partials on both sides of what a thread weighs by itself, many widths."""

from __future__ import annotations

import pytest
import torch

from mha2mla.kernels.split_kv.combine import SIZES, combine_rows, compile_combine, make_combine
from tests.kernels.compiled import for_cpu

COUNTS = (0, 1, 2, 5, 9, 16, 17, 70)


def partials(heads: int, width: int, device: str) -> list[torch.Tensor]:
    """Partials of sequences with COUNTS each, the first in the second place of a CTA; what nobody reads is NaN."""
    make = torch.Generator().manual_seed(width)
    starts = [sum(COUNTS[:i]) for i in range(len(COUNTS))]
    splits = torch.tensor([[count, 2 * start + 1] for count, start in zip(COUNTS, starts, strict=True)])
    out = torch.randn(sum(COUNTS), 2, 1, heads, width, generator=make)
    lse = torch.randn(sum(COUNTS), 2, 1, heads, generator=make) * 3
    for start in starts[1:]:
        out[start, 0], lse[start, 0] = torch.nan, torch.nan
    lse[starts[5] + 3] = -torch.inf  # without weight, and so without meaning
    out[starts[5] + 3] = torch.nan
    return [splits.int().to(device), out.to(device), lse.to(device)]


def merged(splits: torch.Tensor, partial_out: torch.Tensor, partial_lse: torch.Tensor, b: int) -> list[torch.Tensor]:
    """Output [H, width] and log-sum-exp [H] of a sequence, in float64."""
    count, first = splits[b].tolist()
    places = [(first // 2 + i, first % 2 if i == 0 else 0, 0) for i in range(count)]
    out = torch.stack([partial_out[place] for place in places]).double()
    lse = torch.stack([partial_lse[place] for place in places]).double()
    weight = lse.softmax(0)[..., None]
    return [torch.where(weight == 0, 0, weight * out).sum(0), lse.logsumexp(0)]


def check(kernel, heads: int, width: int, device: str, dtype: torch.dtype) -> None:
    given = partials(heads, width, device)
    out = torch.full((len(COUNTS), 1, heads, width), torch.nan, device=device, dtype=dtype)
    lse = torch.full((len(COUNTS), heads, 1), torch.nan, device=device)
    kernel(*given, out, lse)
    for b, count in enumerate(COUNTS):
        if count == 0:
            assert not out[b].any() and (lse[b] == -torch.inf).all()
        elif count == 1:
            assert out[b].isnan().all(), "one CTA has written it"
        else:
            exact, total = merged(*given, b)
            # weights of a difference of up to 25, and a sum of up to 70 terms
            rounded = 100 * torch.finfo(torch.float32).eps * given[1].nan_to_num().abs().max()
            assert ((out[b, 0].double() - exact).abs() <= rounded + torch.finfo(dtype).eps / 2 * exact.abs()).all()
            torch.testing.assert_close(lse[b, :, 0].double(), total, rtol=0, atol=2e-6 * max(1, total.abs().max()))


def test_on_cpu_target():
    """A width that no block of the merge takes whole; a quarter of a block divides it."""
    check(for_cpu(make_combine(3, 160, "float32", 16, on_cpu=True)), 3, 160, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SIZES)
@pytest.mark.parametrize("width", [448, 192, 320, 512, 200])
def test_on_a_gpu(width, splits):
    kernel = compile_combine(32, width, "bfloat16", splits, 90, combine_rows(32, 1, splits))
    check(kernel, 32, width, "cuda", torch.bfloat16)
