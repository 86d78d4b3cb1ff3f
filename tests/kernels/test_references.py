"""Every decode op on any machine is the formula over the cache that its codes, scales and maps stand for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from mha2mla.testing.numeric_check import errors
from mha2mla.testing.problems import GQAProblem, KeyCodesProblem, LatentProblem, Problem, exact
from tests.kernels.mla_decode.test_mla_decode_codes import COMPUTED, SHAPES
from tests.kernels.problems import assert_right, decode, name

PAGED = {"lengths": (0, 1, 70), "page_size": 16, "seqlen_q": 2}
STORED, GQA = Problem(6, 3, 24, 8, **PAGED), GQAProblem(6, 2, 24, 16, **PAGED)
LATENT = LatentProblem(6, 1, 24, 8, **PAGED, scaling=1.3)
KEYS = KeyCodesProblem(6, 1, 24, 16, **PAGED, scaling=1.3)
LATE = {"starts": (0, 1, 69)}
FAR = {"first_position": 131072}
WINDOWS = ({"window": 1}, {"window": 20, "sinks": 3}, {"window": 2, "sinks": 40})
PROBLEMS = [
    *(replace(STORED, **change, combined=combined) for change in ({}, LATE) for combined in (False, True)),
    *(replace(GQA, **change) for change in ({}, LATE)),
    *(replace(LATENT, **change) for change in ({}, LATE, FAR, {"shuffled": True})),
    *(replace(KEYS, **change) for change in ({}, LATE, {**FAR, "bias": 600.0})),
    *(
        replace(LATENT, seqlen_q=3, **window, causal=causal, starts=starts)
        for window, causal, starts in itertools.product(({}, *WINDOWS), (True, False), (None, (0, 1, 30)))
    ),
    *(*SHAPES, *COMPUTED),
    Problem(32, 1, 512, 64, (0, 1, 63, 64, 65, 700), codes=True),
    Problem(9, 3, 80, 16, (5, 130), page_size=16, codes=True),
    Problem(8, 8, 64, 8, (3, 70, 66), seqlen_q=2, codes=True),
    Problem(4, 2, 48, 16, (90, 70), starts=(3, 65), codes=True),
    Problem(4, 1, 64, 16, (500,), window=70, sinks=5, codes=True),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("problem", PROBLEMS, ids=name)
def test_reference_is_the_formula(problem, dtype):
    inputs = problem.inputs(dtype)
    out, lse = decode(problem, inputs, plan=problem.plan(inputs), return_lse=True)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_right(inputs, out, lse, **problem.visibility)
    if dtype == torch.float64:
        expected = exact(inputs, **problem.visibility)
        assert errors(out, expected[0])[0] < 1e-14
        torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("problem", [STORED, GQA, LATENT, KEYS, SHAPES[0], COMPUTED[0]], ids=name)
def test_empty_batch_and_empty_cache_are_served(problem):
    inputs = replace(problem, lengths=(0, 0)).inputs(torch.float32)

    def cut(size):
        tensors = {key: x for key, x in inputs.items() if isinstance(x, torch.Tensor) and key != "centers"}
        return inputs | {key: x[:0] for key, x in tensors.items() if len(x) == size}

    pages = len(inputs[problem.op.names[2]])
    for given in (inputs, cut(pages)):
        out, lse = decode(problem, given, return_lse=True)
        assert not out.any() and (lse == -torch.inf).all()
    assert pages == 3 and decode(problem, cut(2)).shape == (0, *out.shape[1:])
