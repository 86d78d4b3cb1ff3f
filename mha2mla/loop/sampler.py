"""The next token of every row, on the device. Nothing is read back.

A request's random numbers are a function of its seed, the token's position and the vocabulary entry, by splitmix64
(Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195): which rows run beside it, on which device and how often its
pages were taken away makes no difference. A token is drawn by Gumbel's trick: argmax of log p - log(-log u).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mha2mla.loop.scheduler import Chunk, Request, Sampling
from mha2mla.modeling.batch import to_device

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def choose(
    logits: Tensor, rows: Sequence[Sampling], positions: Sequence[int], occurred: Tensor | None = None
) -> Tensor:
    """[B] int64, the next tokens.

    Args:
        logits: [B, V] float.
        rows: how each is chosen.
        positions: in its sequence, of each token that is chosen.
        occurred: [B, V] bool, tokens of prompt and answer; needed where a row has a repetition penalty.
    """
    if all(row.temperature == 0 and row.repetition_penalty == 1 for row in rows):
        return logits.argmax(-1)
    numbers = [
        [row.temperature, row.top_k or logits.shape[1], row.top_p, row.min_p, row.repetition_penalty] for row in rows
    ]
    packed = to_device(torch.tensor(numbers, dtype=torch.float64), logits.device)[..., None]
    temperature, top_k, top_p, min_p, penalty = packed.unbind(1)
    logits = logits.float()
    if occurred is not None:
        factor = penalty.float()
        logits = torch.where(occurred, torch.where(logits > 0, logits / factor, logits * factor), logits)
    greedy = logits.argmax(-1)
    if all(row.temperature == 0 for row in rows):
        return greedy
    logits = logits / torch.where(temperature > 0, temperature, 1.0).float()
    if any(row.top_k or row.top_p < 1 or row.min_p for row in rows):
        logits = _kept(logits, top_k, top_p, min_p)
    where = [[row.seed, position] for row, position in zip(rows, positions, strict=True)]
    seeds, places = to_device(torch.tensor(where), logits.device).unbind(1)
    sampled = (logits + _gumbel(seeds, places, logits.shape[1])).argmax(-1)
    return torch.where(temperature[:, 0] > 0, sampled, greedy)


class History:
    """Tokens that occurred in the request of each slot, on the device: [slots, V] bool."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._occurred = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        self._requests: dict[int, Request] = {}

    def of(self, chunks: Sequence[Chunk | None], slots: Tensor) -> Tensor:
        """[B, V] bool: tokens that a request brought to its slot, and those of :meth:`add` since."""
        for chunk in filter(None, chunks):
            if not chunk.samples:
                self._requests.pop(chunk.slot, None)
            elif self._requests.get(chunk.slot) is not chunk.request:
                self._requests[chunk.slot] = chunk.request
                row = self._occurred[chunk.slot]
                row.zero_()
                row[to_device(torch.tensor(chunk.request.tokens), row.device)] = True
        return self._occurred[slots]

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """One token [B] more in each slot."""
        self._occurred[slots, tokens] = True


def _kept(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """``logits`` with -inf where no limit, each [B, 1], allows a token. The likeliest one always stays."""
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # probability of the likelier ones
    rank = torch.arange(logits.shape[1], device=logits.device)
    stays = (rank < top_k) & (before < top_p) & (probability >= min_p * probability[:, :1])
    stays[:, 0] = True
    return torch.full_like(logits, -torch.inf).scatter(1, index, ordered.masked_fill(~stays, -torch.inf))


def _gumbel(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """[B, size] float32 of Gumbel's distribution."""
    entry = torch.arange(size, device=seeds.device)
    bits = _mixed(_mixed(_mixed(seeds) + positions)[:, None] + entry)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53  # inside (0, 1)
    return -(-uniform.log()).log().float()


def _mixed(x: Tensor) -> Tensor:
    """splitmix64 of int64 numbers, which wrap around as its unsigned ones do."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits, as of an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - 2**64
