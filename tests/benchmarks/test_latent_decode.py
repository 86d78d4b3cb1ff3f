"""The benchmark of the latent layout's decode: pairs of equal bytes, and one measured from end to end."""

from __future__ import annotations

import pytest

from benchmarks import latent_decode
from benchmarks.shapes import target_us


def test_both_forms_of_a_pair_read_the_same_bytes():
    cases = latent_decode.cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        stored = latent_decode.stored_form(case.problem)
        assert case.problem.cache_bytes() == stored.cache_bytes() > 256e6, case.name
        assert stored.kv_lora_rank % 8 == stored.qk_rope_head_dim % 8 == 0
        assert case.target.share == 0.55 or case.target.peers[1] in (1.15, 1.2, 1.6)


def test_one_pair_from_end_to_end(monkeypatch):
    monkeypatch.setattr(latent_decode, "TELLING", ((4, 72, 32, 70, 1.2),))
    (case,) = latent_decode.cases()
    row = latent_decode.measure(case, True, 0.03, "cpu")
    assert row["status"] == "ok" and row["stored"] == "48 + 24"
    assert row["ratio"] == pytest.approx(row["us"] / row["stored_us"])
    assert target_us(case, row, {}, None) == pytest.approx(1.2 * row["stored_us"])
