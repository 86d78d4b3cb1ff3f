"""Tokens are drawn from the right distribution, by each request's own numbers."""

import pytest
import torch

from mha2mla.loop import Chunk, Request, Sampling
from mha2mla.loop.sampler import History, choose

DRAWS = 4000


def frequencies(logits, sampling: Sampling) -> torch.Tensor:
    """Of each entry, over DRAWS positions of one request."""
    drawn = choose(logits.expand(DRAWS, -1), [sampling] * DRAWS, range(DRAWS))
    return torch.bincount(drawn, minlength=len(logits)) / DRAWS


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({}, 8),
        ({"temperature": 0.5}, 8),
        ({"top_k": 3}, 3),
        ({"top_p": 0.6}, None),
        ({"min_p": 0.3}, None),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 1.7}, None),
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(keys, kept):
    """Of limits that are applied one entry at a time, in plain Python."""
    logits = torch.randn(8) * 1.5
    sampling = Sampling(**{"temperature": 1.0, "seed": 5, **keys})
    probability = (logits.double() / sampling.temperature).softmax(0)
    expected, before = torch.zeros(8, dtype=torch.double), 0.0
    for rank, index in enumerate(probability.argsort(descending=True).tolist()):
        mine = float(probability[index])
        in_k, in_p = not sampling.top_k or rank < sampling.top_k, before < sampling.top_p
        if rank == 0 or (in_k and in_p and mine >= sampling.min_p * float(probability.max())):
            expected[index] = mine
        before += mine
    expected /= expected.sum()
    found = frequencies(logits, sampling)
    assert kept is None or (expected > 0).sum() == kept
    assert not found[expected == 0].any()
    spread = (expected * (1 - expected) / DRAWS).sqrt()
    assert ((found - expected).abs() <= 4.5 * spread).all()


def test_draws_do_not_depend_on_the_batch():
    logits, mine = torch.randn(3, 50), Sampling(temperature=1.0, seed=9)
    together = choose(logits, [Sampling(), mine, Sampling(temperature=2.0, top_k=4, seed=1)], [4, 7, 7])
    assert together[1] == choose(logits[1:2], [mine], [7])[0] and together[0] == logits[0].argmax()
    places = choose(logits[1:2].expand(40, -1), [mine] * 40, range(40))
    seeds = choose(logits[1:2].expand(40, -1), [Sampling(temperature=1.0, seed=s) for s in range(40)], [7] * 40)
    assert len(set(places.tolist())) > 8 < len(set(seeds.tolist()))


def test_penalty_follows_the_request_of_the_slot():
    history, logits = History(3, 10, torch.device("cpu")), torch.tensor([[2.0, 1.9] + [-9.0] * 8] * 2)
    first, second = (Request(prompt, Sampling(repetition_penalty=2.0)) for prompt in ([0], [1, 5]))
    slots = torch.tensor([0, 2])

    def step(*chunks):
        occurred = history.of(chunks, slots)
        tokens = choose(logits, [chunk.request.sampling for chunk in chunks], [1, 1], occurred)
        history.add(slots, tokens)
        return tokens.tolist(), occurred

    a, b = Chunk(first, 0, 0, 0, 1, True), Chunk(second, 1, 2, 0, 2, True)
    assert step(a, b)[0] == [1, 0]
    assert step(a, b)[1].nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 5]]
    tokens, occurred = step(Chunk(second, 1, 0, 0, 2, True), b)  # a slot changes hands
    assert occurred[0].nonzero().flatten().tolist() == [1, 5] and tokens[0] == 0
    negative = choose(torch.tensor([[-1.0, -1.5]]), [first.sampling], [1], torch.tensor([[True, False]]))
    assert negative.tolist() == [1]
