"""Unpaged, head-major caches as MHA2MLA's reference has them."""

from __future__ import annotations

import pytest
import torch

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
