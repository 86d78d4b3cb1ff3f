"""Unpaged, head-major caches as MHA2MLA's reference has them."""

from __future__ import annotations

import pytest
import torch

from mha2mla.adapters import dense
from mha2mla.adapters.dense import mla_decode_dense


def formula(q_latent, q_pe, latent, k_pe, lengths, scale):
    score = torch.einsum("bhsd,btd->bhst", q_latent, latent)
    score = score + torch.einsum("bhsd,bhtd->bhst", q_pe, k_pe.repeat_interleave(q_pe.shape[1] // k_pe.shape[1], 1))
    token, query = torch.arange(latent.shape[1]), torch.arange(q_pe.shape[2])
    limit = lengths[:, None] - q_pe.shape[2] + 1 + query  # [B, S_q]
    score = (score * scale).masked_fill(token >= limit[:, None, :, None], -torch.inf)
    return torch.einsum("bhst,btd->bhsd", score.softmax(-1), latent), score.logsumexp(-1)


@pytest.mark.parametrize("token_major", [True, False])
@pytest.mark.parametrize(("tokens", "groups", "seqlen_q"), [(64, 4, 1), (96, 2, 2), (37, 1, 1), (300, 4, 3)])
def test_against_the_formula(tokens, groups, seqlen_q, token_major):
    make = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    q_latent, q_pe, latent = normal(2, 4, seqlen_q, 24), normal(2, 4, seqlen_q, 8), normal(2, tokens, 24)
    k_pe = normal(2, tokens, groups, 8).transpose(1, 2) if token_major else normal(2, groups, tokens, 8)
    for lengths in (None, torch.tensor([tokens, tokens - 9], dtype=torch.int32)):
        out, lse = mla_decode_dense(q_latent, q_pe, latent, k_pe, lengths, softmax_scale=0.2, return_lse=True)
        known = torch.full((2,), tokens) if lengths is None else lengths.long()
        expected, expected_lse = formula(q_latent, q_pe, latent, k_pe, known, 0.2)
        assert torch.allclose(out, expected) and torch.allclose(lse, expected_lse)


def test_a_token_major_cache_is_not_copied(monkeypatch):
    seen = {}

    def spy(q_latent, q_pe, latent_cache, rope_cache, *_, **__):
        seen.update(latent=latent_cache.data_ptr(), rope=rope_cache.data_ptr())
        return torch.zeros(2, 1, 4, 24), torch.zeros(2, 4, 1)

    monkeypatch.setattr("mha2mla.adapters.dense.mla_decode", spy)
    latent, keys = torch.randn(2, 64, 24), torch.randn(2, 64, 4, 8)
    q_latent, q_pe = torch.randn(2, 4, 1, 24), torch.randn(2, 4, 1, 8)
    mla_decode_dense(q_latent, q_pe, latent, keys.transpose(1, 2), softmax_scale=0.2)
    assert seen == {"latent": latent.data_ptr(), "rope": keys.data_ptr()}


@pytest.mark.parametrize("tokens", [8191, 2050, 15, 1])
def test_an_odd_number_of_tokens_is_staged_for_a_kernel(tokens, monkeypatch):
    """Pages of one or two tokens are what no kernel takes: T = 8191 ran the reference without a word."""
    pages, op = [], dense.mla_decode

    def spy(q_latent, q_pe, latent_cache, *arguments, **options):
        pages.append(latent_cache.shape[1])
        return op(q_latent, q_pe, latent_cache, *arguments, **options)

    monkeypatch.setattr(dense, "mla_decode", spy)
    q_latent, q_pe = torch.randn(2, 4, 1, 24), torch.randn(2, 4, 1, 8)
    latent, k_pe = torch.randn(2, tokens, 24), torch.randn(2, 2, tokens, 8)
    lengths = torch.tensor([tokens + 3, max(1, tokens - 9)], dtype=torch.int32)
    call = (q_latent, q_pe, latent, k_pe)
    expected = [mla_decode_dense(*call, given, softmax_scale=0.2, return_lse=True) for given in (None, lengths)]
    assert set(pages) == {tokens & -tokens}
    pages.clear()
    monkeypatch.setattr(dense, "explain_mla_decode", lambda *_: None)
    for given, (out, lse) in zip((None, lengths), expected, strict=True):
        with pytest.warns(UserWarning, match=f"latent has {tokens} tokens of room; kernels take multiples of 16"):
            staged, staged_lse = mla_decode_dense(*call, given, softmax_scale=0.2, return_lse=True)
        assert torch.allclose(staged, out, atol=1e-6) and torch.allclose(staged_lse, lse, atol=1e-6)
    assert pages == [64, 64]
    mla_decode_dense(*call, softmax_scale=0.2, backend="reference")
    assert pages[2:] == [tokens & -tokens]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tokens", [8191, 2050, 2048])
def test_a_kernel_serves_any_number_of_tokens(tokens, recwarn):
    q_latent, q_pe = (torch.randn(2, 16, 1, width, device="cuda").bfloat16() for width in (128, 32))
    latent, k_pe = torch.randn(2, tokens, 128, device="cuda"), torch.randn(2, 2, tokens, 32, device="cuda")
    latent, k_pe = latent.bfloat16(), k_pe.bfloat16()
    lengths = torch.tensor([tokens, tokens - 100], dtype=torch.int32, device="cuda")
    out = mla_decode_dense(q_latent, q_pe, latent, k_pe, lengths, softmax_scale=0.1, backend="tilelang")
    assert bool([one for one in recwarn if "copied in every call" in str(one.message)]) == (tokens % 16 > 0)
    wide = [x.double().cpu() for x in (q_latent, q_pe, latent, k_pe)]
    expected, _ = formula(*wide, lengths.cpu().long(), 0.1)
    assert (out.double().cpu() - expected).norm() < 0.01 * expected.norm()
