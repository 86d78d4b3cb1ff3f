"""Who waits for whom in ``swap_ab_ws``: a model of its rings and turns, in which nobody may wait for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from mha2mla.kernels.mla_decode.selection import DecodeShape, list_kernels, rope_blocks, takes_turns
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.testing.kernel_check import draw_cases

TILES = 5


def comes_to_an_end(choice: KernelChoice, d_r: int, *, turns: bool) -> bool:
    """True where ``choice`` runs through TILES tiles; each role is a generator of conditions that it waits for."""
    rope = rope_blocks(choice.tiling, d_r)
    chunks, total = rope.chunks_per_block, rope.num_blocks * rope.chunks_per_block
    by_block, rows = rope.block_rows < choice.tiling.rows, choice.tiling.rows // choice.warpgroups
    readers = 1 if by_block else choice.warpgroups
    stages, rope_stages = choice.num_stages, choice.rope_stages
    full, free, turn = set(), Counter(), Counter()

    def stream():
        for k in range(TILES):
            yield lambda k=k: k < stages or free["latent", k - stages] == choice.warpgroups
            full.add(("latent", k))

    def stream_rope():
        for n in range(TILES * total):
            yield lambda n=n: n < rope_stages or free["rope", n - rope_stages] == readers
            full.add(("rope", n))

    def compute(w):
        blocks = [q for q in range(rope.num_blocks) if not by_block or q * rope.block_rows // rows == w]
        mine = [q * chunks + u for q in blocks for u in range(chunks)]
        turn[0] += w == 1
        for k in range(TILES):
            yield lambda k=k: ("latent", k) in full
            if turns:
                yield lambda k=k: turn[w] > k
            for v, chunk in enumerate(mine):
                yield lambda n=k * total + chunk: ("rope", n) in full
                if rope_stages - 1 <= v < len(mine) - 1:
                    free["rope", k * total + mine[v - rope_stages + 1]] += 1
            for chunk in mine[max(0, len(mine) - rope_stages) :]:
                free["rope", k * total + chunk] += 1
            turn[1 - w] += 1
            free["latent", k] += 1

    roles = [stream(), stream_rope(), *(compute(w) for w in range(choice.warpgroups))]
    waits = {role: next(role) for role in roles}
    while waits:
        ready = [role for role, condition in waits.items() if condition()]
        if not ready:
            return False
        for role in ready:
            waits[role] = next(role, None)
            if waits[role] is None:
                del waits[role]
    return True


def choices():
    shapes = [case.shape() for case in draw_cases(120, 0, calls=1)]
    shapes.append(DecodeShape(14, 1, 256, 216, 64, 4, "bfloat16"))  # hung: 4 chunks of rope columns, a ring of 3
    for shape in shapes:
        for choice in list_kernels(shape, 90):
            if choice.kernel == "swap_ab_ws":
                yield shape, choice, rope_blocks(choice.tiling, shape.qk_rope_head_dim)


def test_no_role_waits_for_ever_and_turns_are_given_up_only_where_one_would():
    seen = Counter()
    for shape, choice, rope in choices():
        turns = choice.warpgroups > 1 and takes_turns(choice.tiling, rope, choice.rope_stages)
        assert comes_to_an_end(choice, shape.qk_rope_head_dim, turns=turns), (shape, choice)
        if choice.warpgroups > 1 and not turns:
            assert not comes_to_an_end(choice, shape.qk_rope_head_dim, turns=True), (shape, choice)
        seen[choice.warpgroups, turns] += 1
    assert set(seen) == {(1, False), (2, False), (2, True)}


@pytest.mark.parametrize("d_r, expected", [(216, False), (128, True)], ids=["chunks exceed the ring", "chunks fit"])
def test_the_kernel_takes_turns_where_the_model_says(d_r, expected):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.mla_decode.api import MLA
    from mha2mla.kernels.mla_decode.swap_ab_ws import TURN

    shape = DecodeShape(14, 1, 256, d_r, 64, 4, "bfloat16")
    choice = list_kernels(shape, 90)[0]
    rope = rope_blocks(choice.tiling, d_r)
    assert choice.warpgroups == 2 and takes_turns(choice.tiling, rope, choice.rope_stages) == expected
    script = MLA.make_split(shape, choice).script()
    assert any(f"named_barrier_arrive({turn}" in script for turn in (TURN, TURN + 1)) == expected
