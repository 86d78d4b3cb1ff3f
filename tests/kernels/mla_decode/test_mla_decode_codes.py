"""Decode over integer codes of latents: what is refused, what dispatch takes, and how Hopper kernels dequantise."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import RowQuantizer, decodes_codes, mla_decode
from mha2mla.kernels.mla_decode.api import LATENT_CODES, ROW_CODES
from mha2mla.kernels.mla_decode.codes_selection import bits_of, refusal, select_kernel
from mha2mla.testing.problems import LatentCodesProblem, RowCodesProblem
from tests.few import few
from tests.kernels.compiled import gate_choice
from tests.kernels.problems import kernels_of

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SHAPES = [
    RowCodesProblem(9, 1, 192, 64, (1, 63, 64, 65, 200)),
    RowCodesProblem(14, 2, 64, 16, (5, 70), page_size=16, bits=8),
    RowCodesProblem(6, 1, 96, 24, (129,), page_size=128, bits=3, seqlen_q=4),
    RowCodesProblem(4, 2, 128, 8, (70, 140, 64, 200, 90), starts=(1, 64, 63, 199, 90), bits=8),
    RowCodesProblem(5, 1, 1024, 16, (70, 1), bits=2),
    RowCodesProblem(4, 1, 64, 16, (0, 1, 500), window=70, sinks=5, page_size=32),
]
COMPUTED = [
    LatentCodesProblem(9, 1, 192, 64, (1, 63, 64, 65, 200), bits=3, scaling=1.3),
    LatentCodesProblem(14, 1, 64, 16, (5, 70), page_size=16, bits=8, shuffled=True),
    LatentCodesProblem(4, 1, 96, 24, (500, 129), page_size=128, seqlen_q=4, window=70, sinks=5),
]


def test_bytes_of_a_row_tell_its_bits():
    for width, bits in product((32, 64, 192, 512, 1024), (2, 3, 4, 8)):
        assert bits_of(width, RowQuantizer(bits).bytes_per_row(width)) == bits
    assert bits_of(192, 192) is None and bits_of(200, 200) is None


def test_codes_are_decoded_where_that_beat_a_copy():
    """The kernels that an H200 timed, of 4 and 8 bits; elsewhere a copy in 16 bits is made."""
    rows = json.loads((RESULTS / "h200-codes-decode.json").read_text())["rows"]
    timed = [row for row in rows if row["status"] == "ok"]
    for row, (bits, column) in product(timed, ((4, "us"), (8, "codes8_us"))):
        made = MLAGeometry(row["H"], 1, row["d_c"], row["d_r"], rope_from_latent=True, latent_bits=bits)
        kept, call = made.with_stored_keys, (row["page"], torch.bfloat16)
        assert row[column] < row["copy_us"] and decodes_codes(kept, *call, "cuda", row["S_q"])
        assert decodes_codes(made, *call, "cuda", row["S_q"])
        assert not decodes_codes(made, *call, "cpu") and not decodes_codes(kept, *call, "cpu")
        assert not decodes_codes(replace(kept, latent_bits=16), *call, "cuda")
        shape = ROW_CODES.shape(row["H"], 1, row["d_c"], row["d_r"], row["page"], 1, row["row"], "bfloat16")
        assert bits == 8 or select_kernel(shape, 90).kernel == row["kernel"]
    assert len(timed) == 12 and all(row["us"] < 0.6 * row["copy_us"] for row in timed)
    for width, rope in ((32, 128), (512, 128), (1024, 64)):  # docs/limits.md
        made = MLAGeometry(32, 1, width, rope, rope_from_latent=True, latent_bits=8)
        assert decodes_codes(made, 16, torch.float16, "cuda", 8)
        assert rope == 64 or not decodes_codes(replace(made, kv_lora_rank=544), 16, torch.float16, "cuda", 8)
    odd = MLAGeometry(64, 1, 608, 24, latent_bits=4)  # halves of its columns are no multiples of 64
    assert not decodes_codes(odd, 64, torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "tilelang"}, "backend is 'tilelang', which refuses this call"),
        ({"latent_cache": torch.zeros(5, 64, 20)}, "latent_cache.dtype is torch.float32"),
        ({"centers": torch.zeros(2, 16)}, r"centers.shape is \(2, 16\)"),
        ({"centers": torch.zeros(1, 32)}, r"centers.shape is \(1, 32\); expected \[2, 32\]"),
    ],
)
def test_refusals_name_the_argument(change, message):
    inputs = RowCodesProblem(4, 2, 32, 8, (5,)).inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        mla_decode(**inputs | change)


def test_other_rows_are_refused():
    assert "has 99 bytes" in refusal(ROW_CODES.shape(4, 1, 64, 8, 64, 1, 99, "bfloat16"))
    assert refusal(ROW_CODES.shape(4, 1, 64, 8, 64, 1, 36, "bfloat16")) is None
    assert "qk_rope_head_dim is 0" in refusal(ROW_CODES.shape(4, 1, 64, 0, 64, 1, 36, "bfloat16"))


CHOSEN = [
    (RowCodesProblem(32, 1, 512, 64, ()), "bfloat16", "codes_ws"),
    (RowCodesProblem(9, 1, 192, 64, (), bits=3), "float16", "codes_ws"),
    (RowCodesProblem(32, 1, 1024, 64, ()), "bfloat16", "codes_cluster"),
    (RowCodesProblem(28, 1, 512, 128, (), bits=8), "bfloat16", "codes_ws"),
    (RowCodesProblem(32, 1, 512, 64, (), bits=8, page_size=16, seqlen_q=8), "bfloat16", "codes_ws"),
    (RowCodesProblem(14, 2, 96, 16, (), bits=2), "bfloat16", "codes_ws"),
    (RowCodesProblem(32, 1, 512, 64, (), bits=4), "bfloat16", "codes_portable"),
]
COMPUTING = [
    (LatentCodesProblem(32, 1, 512, 64, ()), "bfloat16", "codes_latent_ws"),
    (LatentCodesProblem(32, 1, 1024, 64, ()), "bfloat16", "codes_latent_cluster"),
    (LatentCodesProblem(28, 1, 448, 128, (), bits=3), "bfloat16", "codes_latent_cluster"),
    (LatentCodesProblem(9, 1, 192, 128, (), bits=8), "float16", "codes_latent_ws"),
    (LatentCodesProblem(9, 1, 192, 64, (), bits=3), "bfloat16", "codes_latent_ws"),
    (LatentCodesProblem(32, 1, 512, 64, (), bits=8, page_size=16, seqlen_q=8), "float16", "codes_latent_ws"),
    (LatentCodesProblem(32, 1, 1024, 64, (), bits=8, page_size=16, seqlen_q=8), "float16", "codes_latent_cluster"),
    (LatentCodesProblem(28, 1, 512, 128, (), bits=8), "bfloat16", "codes_latent_cluster"),
]


@few("problem, dtype, kernel", [*CHOSEN[:4], *COMPUTING[:3], *CHOSEN[4:], *COMPUTING[3:]], count=7)
def test_kernels_fit(problem, dtype, kernel):
    choice = next(c for c in kernels_of(problem.op, problem.shape(dtype), 90) if c.kernel == kernel)
    gate_choice(problem.op, problem.shape(dtype), choice, 90, slack=4096)


@pytest.mark.parametrize("problem, dtype, kernel", COMPUTING)
def test_hoppers_alone_compute_keys_of_codes(problem, dtype, kernel):
    assert LATENT_CODES.select(problem.shape(dtype), 90).kernel == kernel
    with pytest.raises(ValueError, match="capability 8.0"):
        LATENT_CODES.select(problem.shape(dtype), 80)


EACH = [*CHOSEN[:4], (RowCodesProblem(16, 1, 640, 32, (), bits=3), "float16", "codes_cluster"), *COMPUTING[:4]]


@pytest.mark.parametrize("problem, dtype, kernel", EACH)
def test_every_unit_of_a_piece_is_dequantised_once(problem, dtype, kernel):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.mla_decode import codes

    choice = problem.op.select(problem.shape(dtype), 90)
    statics = {"codes_ws": "Static", "codes_cluster": "ClusterStatic", "codes_latent_ws": "LatentStatic"}
    k = getattr(codes, statics.get(choice.kernel, "LatentClusterStatic"))(problem.shape(dtype), choice)
    places = [
        (k.token(thread, r), k.unit(thread))
        for r in range(-(-codes.PIECE // 2 // k.at_once))
        for thread in range(2 * k.at_once * k.units)
    ]
    written = sorted(place for place in places if place[0] < codes.PIECE)
    assert written == [(token, unit) for token in range(codes.PIECE) for unit in range(k.units)]
    assert 2 * k.at_once * k.units <= k.wideners


def test_every_chunk_of_rotary_keys_is_streamed():
    """Of two chunks a CTA of a cluster loaded one, and waited for the other for ever."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.mla_decode import codes

    shape = RowCodesProblem(32, 8, 1024, 64, ()).shape()
    k = codes.ClusterStatic(shape, select_kernel(shape, 90))
    assert k.choice.kernel == "codes_cluster" and k.chunks == 2
    assert [k.rope_lefts(0, half) for half in range(2)] == [[0, 128], [256, 384]]
