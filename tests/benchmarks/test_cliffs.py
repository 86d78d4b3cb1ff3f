"""The benchmark of random geometries on a CPU: what is drawn, how it is judged, and what limits a call."""

from dataclasses import replace

import pytest

from benchmarks import cliffs
from benchmarks.cliffs import NAMED, OTHERS, Call, calls_of, complete, draw, is_slow, measure, problem_of
from benchmarks.shapes import with_kept_keys
from mha2mla.testing.problems import LatentProblem

RATE = 4e12


def test_every_drawn_geometry_has_kernels_and_its_bytes():
    problems = [*(problem_of(*shape) for shape in NAMED), *(draw(3, number) for number in range(20))]
    for problem in problems:
        assert problem.cache_bytes() == pytest.approx(cliffs.CACHE_BYTES, rel=0.01)
        calls = calls_of(problem)
        assert Call(problem) in calls and all(call.choice() for call in calls)
        own = [call for call in calls if call.kernel is None]
        assert len(own) == (1 + isinstance(problem, LatentProblem)) * (1 + (problem.seqlen_q > 1))
    assert problems[len(NAMED) :] == [draw(3, number) for number in range(20)] != [draw(4, n) for n in range(20)]
    kernels = [call.kernel for problem in problems for call in calls_of(problem) if call.kernel]
    assert kernels == [kernel for shape in NAMED for kernel in OTHERS.get(shape, ())] and len(kernels) >= len(OTHERS)
    assert {isinstance(problem, LatentProblem) for problem in problems[len(NAMED) :]} == {True, False}


@pytest.mark.parametrize("shape", [(6, 3, 48, 16, 16, 1), (9, 0, 48, 16, 64, 3)])
def test_calls_are_judged_on_some_sequences(shape, monkeypatch):
    problem = problem_of(*shape, batch=5, size=60_000)
    assert measure(Call(problem), 0.01, "cpu")["status"] == "ok"
    right = cliffs.judge
    monkeypatch.setattr(cliffs, "judge", lambda inputs, out, lse: right(inputs, out.roll(1, 0), lse))
    found = measure(Call(problem), 0.01, "cpu")
    assert found["status"].startswith("wrong: ") and "us" not in found


def test_a_row_names_what_limits_it():
    problem = problem_of(28, 0, 512, 128, 64, 4)
    computed, kept, one = Call(problem), Call(with_kept_keys(problem)), Call(replace(problem, seqlen_q=1))
    rows = {one: complete(one, {"us": 100.0}, RATE, {}, {})}
    rows[computed] = complete(computed, {"us": 200.0, "status": "ok"}, RATE, rows, {rows[one]["name"]: 1.0})
    row = rows[computed]
    # FLOP of a byte: d_r + S_q (2 H + H d_r / d_c)
    assert row["products_us"] == pytest.approx((128 + 4 * (56 + 7)) * problem.cache_bytes() / 800e12 * 1e6)
    assert (row["binds"], row["limit_us"], row["of_one"]) == ("products", row["products_us"], 2.0)
    assert row["over"] == 200 / row["limit_us"] and "before_us" not in row and not is_slow(row)
    stored = complete(kept, {"us": 50.0}, RATE, rows, {"H28 G1 c512 r128 64x3052 q4": 80.0})
    assert stored["of_computed"] == 0.25 and stored["before_us"] == 80 and stored["keys"] == "stored"
    assert (stored["auto"], row["auto"], rows[one]["auto"]) == (True, False, False)
    assert rows[one]["modelled_us"] > rows[one]["limit_us"] and "modelled_us" not in row
    other = complete(Call(problem, ("latent_portable", 4, "resident")), {"us": 300.0}, RATE, rows, {})
    assert (other["of_rule"], other["auto"]) == (1.5, False)
    assert is_slow({"S_q": 2, "H": 40, "keys": "stored", "of_one": 1.7})
    assert not is_slow({"S_q": 2, "H": 40, "keys": "computed", "of_one": 1.7})
