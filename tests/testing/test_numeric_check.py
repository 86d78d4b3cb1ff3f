"""The numeric check, and the baseline formula and rounding that it takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mha2mla.testing.numeric_check import PlainAttention, verdict


def mla(q: torch.Tensor, latent: torch.Tensor, scale: float) -> PlainAttention:
    """One token of MLA without rotary part: q [H, d_c], latent [T, d_c]."""
    return PlainAttention((q[None],), (latent[:, None],), latent[:, None], None, scale)


def test_plain_attention_is_torchs():
    q, k, v = torch.randn(5, 6, 16), torch.randn(40, 3, 16), torch.randn(40, 3, 16)
    visible = torch.ones(5, 40, dtype=torch.bool).tril(35)
    expected = scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=visible, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(PlainAttention((q,), (k,), v, visible, 0.3).attend(), expected.transpose(0, 1))


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        (lambda x, error: x + error, True),
        (lambda x, error: x + 1.9 * error, True),
        (lambda x, error: x + 2.1 * error, False),
        (lambda x, error: x.clone().index_fill_(0, torch.tensor([3]), math.inf), False),
    ],
)
def test_twice_torchs_error_is_right_and_more_is_wrong(change, passes):
    reference = torch.randn(100, 1, 1).double()
    error = 1e-3 * torch.randn(100, 1, 1).double()
    judgement = verdict(change(reference, error), None, reference, None, reference + error)
    assert judgement.ok is passes
    assert (judgement.reason == "") is passes


def test_where_torch_overflows_nothing_passes():
    reference = torch.randn(100, 1, 1).double()
    other = reference.clone()
    other[3] = torch.inf
    judgement = verdict(torch.zeros_like(reference), None, reference, None, other)
    assert not judgement.ok and judgement.reason.startswith("plain torch has NaN or inf")


def test_one_far_number_is_wrong_even_where_the_norm_is_small():
    reference = torch.randn(100_000, 1, 1).double()
    error = 1e-3 * torch.randn(100_000, 1, 1).double()
    out = reference + error
    out[5] += 0.05
    judgement = verdict(out, None, reference, None, reference + error)
    assert judgement.error < 2 * judgement.torch_error
    assert not judgement.ok and judgement.reason.startswith("largest error")


@pytest.mark.parametrize(("tokens", "scale"), [(3, 10.0), (300, 1.0), (300, 6.0), (2048, 1.0)])
def test_expected_rounding_is_that_of_a_running_sum(tokens, scale):
    """Neither much less, or rounding is called wrong, nor much more, or what is wrong is called rounding."""
    ratios = []
    for _ in range(8):
        q, latent = torch.randn(4, 24) * scale, torch.randn(tokens, 24)
        exact = mla(q, latent, 0.2).to(torch.float64)
        weight = torch.softmax(sum(q[:, None, i] * latent[:, i] for i in range(24)) * 0.2, -1)
        out = torch.zeros_like(q)
        for token in range(tokens):
            out = out + weight[:, token, None] * latent[token]
        ratios.append(float((out.double() - exact.attend()[0]).norm() / exact.rounding().norm()))
    assert min(ratios) > 0.2 and max(ratios) < 2, ratios


def test_rows_that_see_nothing_round_to_nothing():
    q, k, v = torch.randn(3, 4, 8).double(), torch.randn(2, 1, 8).double(), torch.randn(2, 1, 8).double()
    sequence = PlainAttention((q,), (k,), v, torch.ones(3, 2, dtype=torch.bool).tril(-1), 0.3)
    assert not sequence.attend()[0].any() and not sequence.rounding()[0].any()
    assert sequence.rounding()[1:].all() and sequence.rounding().isfinite().all()
    empty = PlainAttention((q,), (k[:0],), v[:0], None, 0.3)
    assert not empty.attend().any() and not empty.rounding().any()


def test_one_lost_token_in_100_000_is_wrong():
    q, k, v = torch.randn(1, 4, 16), torch.randn(100_000, 1, 16), torch.randn(100_000, 1, 16)
    sequence, exact = (PlainAttention((q,), (k,), v, None, 0.25).to(dtype) for dtype in (torch.float32, torch.float64))
    right, short = sequence.attend(), PlainAttention((q,), (k[1:],), v[1:], None, 0.25).attend()
    expected = exact.attend(), None, right, exact.rounding()
    assert verdict(right, None, *expected).ok
    assert not verdict(short, None, *expected).ok


def test_expected_rounding_of_keys_is_that_of_the_log_sum_exp():
    """Over draws; and what rounds halves of a key has errors as large, others than torch's, and is right."""
    make, worst = torch.Generator().manual_seed(0), 0.0
    measured, predicted = [], []
    for _ in range(60):
        q = torch.randn(1, 9, 64, generator=make, dtype=torch.float64)
        halves = torch.randn(2, 3, 1, 64, generator=make, dtype=torch.float64)
        exact = PlainAttention((q,), (halves.sum(0),), torch.ones(3, 1, 8).double(), None, 0.1)
        torchs, ours = (
            replace(exact, keys=(key,))
            for key in (halves.sum(0).bfloat16().double(), halves.bfloat16().double().sum(0))
        )
        lse, torch_lse, our_lse = (torch.logsumexp(x._scores(), -1).T for x in (exact, torchs, ours))
        rounding = exact.lse_rounding(0, torch.bfloat16)
        measured.append((torch_lse - lse).square().mean())
        predicted.append(rounding.square().mean())
        out = exact.attend()
        judged = [out, lse, out.bfloat16(), None, torch_lse, rounding]
        assert verdict(out, our_lse, *judged).ok
        assert not verdict(out, lse + 6 * rounding.max(), *judged).ok
        worst = max(worst, float((our_lse - lse).abs().max() / (torch_lse - lse).abs().max()))
    assert 0.8 < float(torch.stack(measured).mean() / torch.stack(predicted).mean()) < 1.25
    assert worst > 2, "torch's largest error alone would call some of these wrong"
