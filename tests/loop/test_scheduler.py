"""Who runs and on which pages, without a model: each request's cache holds its own tokens, whatever comes and goes."""

import random

import pytest
import torch

from mha2mla.loop import Request, Sampling, Scheduler
from mha2mla.modeling.pages import PageAllocator
from tests.modeling.test_pages import allocated

PAGE = 4


def next_token(tokens) -> int:
    """What a model would say: depends on all tokens."""
    return hash(tuple(tokens)) % 97 + 3


def alone(prompt, sampling) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + sampling.max_new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in sampling.stop_tokens:
            break
    return tokens[len(prompt) :]


class Device:
    """Pages of tokens, written by steps; the host reads what is chosen one step later."""

    def __init__(self, num_pages: int, max_sequences: int, max_tokens: int, share: bool = True) -> None:
        self.allocator = PageAllocator(num_pages, PAGE)
        self.scheduler = Scheduler(self.allocator, max_sequences, max_tokens, share)
        self.slots: list = [None] * num_pages * PAGE
        self.last = [None] * max_sequences
        self.launched: tuple = ([], [])
        self.longest_step = 0

    def step(self) -> None:
        chunks = self.scheduler.schedule()
        assert sum(chunk.count for chunk in chunks) <= self.scheduler.max_tokens
        assert len({chunk.slot for chunk in chunks}) == len(chunks) <= self.scheduler.max_sequences
        self.longest_step = max(self.longest_step, sum(chunk.count for chunk in chunks))
        growth = self.allocator.plan_growth({chunk.sequence: chunk.count for chunk in chunks})
        for copy in growth.copies:
            for offset in range(PAGE):
                self.slots[copy.target * PAGE + offset] = self.slots[copy.source * PAGE + offset]
        self.allocator.commit(growth)
        chosen = []
        for chunk in chunks:
            pages = self.allocator.pages(chunk.sequence)
            for position, token in enumerate(chunk.token_ids(), chunk.start):
                token = self.last[chunk.slot] if token < 0 else token
                self.slots[pages[position // PAGE] * PAGE + position % PAGE] = token
            cached = [self.slots[pages[p // PAGE] * PAGE + p % PAGE] for p in range(chunk.start + chunk.count)]
            chosen.append(next_token(cached))
            self.last[chunk.slot] = chosen[-1]
        before, self.launched = self.launched, (chunks, chosen)
        self.scheduler.complete(*before)

    def drain(self) -> None:
        self.scheduler.complete(*self.launched)
        self.launched = ([], [])


@pytest.mark.parametrize("seed", range(12))
def test_everyone_gets_what_it_gets_alone(seed):
    """Random arrivals, shared beginnings, forks, stops, and pages for about two requests."""
    draw = random.Random(seed)
    device = Device(num_pages=draw.choice([12, 20, 60]), max_sequences=draw.choice([1, 4, 9]), max_tokens=16)
    beginnings = [[draw.randrange(3, 100) for _ in range(12)] for _ in range(2)]
    requests: list[Request] = []
    for _ in range(40):
        if len(requests) < 16 and draw.random() < 0.5:
            prompt = draw.choice(beginnings)[: draw.randint(1, 12)]
            prompt = prompt + [draw.randrange(9) for _ in range(draw.randint(0, 9))]
            sampling = Sampling(draw.randint(1, 20), stop_tokens=(draw.randrange(3, 100), draw.randrange(3, 100)))
            requests.append(Request(prompt, sampling))
            device.scheduler.add(requests[-1])
        if requests and draw.random() < 0.15:
            device.drain()
            parent = draw.choice(requests)
            requests.append(Request(parent.tokens, Sampling(5)))
            device.scheduler.fork(parent, requests[-1])
        device.step()
    for _ in range(2000):
        if not device.scheduler.has_work:
            break
        device.step()
    device.drain()
    for request in requests:
        assert request.finished and request.answer == alone(request.prompt, request.sampling)
    # what is kept for those who come is all that is still there
    while device.scheduler._forget_ended():
        pass
    assert device.allocator.num_free == device.allocator.num_pages and not device.allocator.sequences
    assert not device.scheduler._prefixes._nodes


def run(device: Device, *requests: Request) -> None:
    for request in requests:
        device.scheduler.add(request)
    while device.scheduler.has_work:
        device.step()
    device.drain()


def test_prompts_in_chunks_do_not_delay_decodes():
    device = Device(num_pages=100, max_sequences=4, max_tokens=8)
    first = Request([5] * 3, Sampling(20))
    device.scheduler.add(first)
    device.step()
    device.step()
    before = len(first.answer)
    device.scheduler.add(Request(range(40), Sampling(1)))
    for _ in range(5):
        device.step()
    assert len(first.answer) == before + 5 and device.longest_step == 8


def test_full_pages_of_a_shared_prefix_run_once():
    device = Device(num_pages=100, max_sequences=4, max_tokens=64)
    prompt = list(range(3, 23))
    first, second, third = (Request([*prompt, *more], Sampling(2)) for more in ([], [9], []))
    for request in (first, second, third):
        run(device, request)
    assert [first.shared_tokens, second.shared_tokens] == [0, 20]
    assert third.shared_tokens == 16  # the last token is always run: the next one comes from it


def test_running_requests_share_prefixes_if_allowed():
    for share, expected in ((True, 16), (False, 0)):
        device = Device(num_pages=100, max_sequences=4, max_tokens=64, share=share)
        first, second = Request(range(18), Sampling(9)), Request(range(18), Sampling(2))
        device.scheduler.add(first)
        device.step()
        run(device, second)
        assert second.shared_tokens == expected and first.finished


def test_the_one_that_came_last_gives_its_pages_back():
    device = Device(num_pages=6, max_sequences=4, max_tokens=64)
    old, new = Request([3] * 7, Sampling(15)), Request([4] * 7, Sampling(15))
    run(device, old, new)
    assert old.preemptions == 0 and new.preemptions > 0 == old.preemptions
    assert new.answer == alone(new.prompt, new.sampling)


def test_a_sequence_of_the_callers_is_gone_on_with():
    device = Device(num_pages=30, max_sequences=1, max_tokens=64)
    sequence = allocated(device.allocator, 9)
    for position, page in ((p, device.allocator.pages(sequence)[p // PAGE]) for p in range(9)):
        device.slots[page * PAGE + position % PAGE] = 50 + position
    request = Request(range(50, 60), Sampling(3))
    device.scheduler.adopt(request, sequence)
    with pytest.raises(ValueError, match="max_sequences=1"):
        device.scheduler.adopt(Request([1, 2]), allocated(device.allocator, 1))
    run(device)
    assert request.answer == alone(request.prompt, request.sampling)
    with pytest.raises(ValueError, match="has 3 tokens; expected fewer than"):
        device.scheduler.adopt(Request([1, 2]), allocated(device.allocator, 3))


def test_a_sequence_of_another_request_is_not_adopted():
    """Which both would write to, or which is freed under the request once its pages are needed."""
    device = Device(num_pages=8, max_sequences=2, max_tokens=64)
    request = Request([5] * 9, Sampling(3))
    device.scheduler.add(request)
    device.step()
    sequence = request.sequence
    for _ in ("runs", "ended"):
        with pytest.raises(ValueError, match=f"sequence is {sequence}, another request's; expected one of the"):
            device.scheduler.adopt(Request([5] * 30), sequence)
        run(device)
    assert request.answer == alone(request.prompt, request.sampling)


def test_what_is_refused():
    with pytest.raises(ValueError, match="max_tokens is 3; expected at least 4"):
        Scheduler(PageAllocator(4, PAGE), max_sequences=4, max_tokens=3)
    with pytest.raises(ValueError, match="max_sequences is 0"):
        Scheduler(PageAllocator(4, PAGE), max_sequences=0)
    scheduler = Scheduler(PageAllocator(4, PAGE))
    with pytest.raises(ValueError, match="up to 17 tokens; expected at most 16"):
        scheduler.add(Request([1] * 10, Sampling(8)))
    with pytest.raises(ValueError, match="prompt is empty"):
        Request([])
    with pytest.raises(ValueError, match="prompt has token id -1; expected 0 or more"):
        Request([5, -1])
    for prompt in ([5.0], "text", 5, [[5, 6]], torch.tensor([[5, 6]])):
        with pytest.raises(ValueError, match="prompt is .*; expected token ids"):
            Request(prompt)
    wrong = ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"seed": -1})
    wrong += (
        {"stop_tokens": 4},
        {"stop_tokens": "text"},
        {"stop_tokens": (4.0,)},
        {"seed": 0.5},
        {"top_k": 2.0},
        {"temperature": 1e-50},
        {"temperature": None},
        {"top_p": "0.9"},
    )
    for keys in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(keys))} is "):
            Sampling(**keys)


def test_ended_sequences_are_evicted_before_preemption():
    device = Device(num_pages=10, max_sequences=4, max_tokens=64)
    run(device, Request([3] * 19, Sampling(1)))
    request = Request([4] * 3, Sampling(30))
    run(device, request)
    assert request.preemptions == 0 and request.answer == alone(request.prompt, request.sampling)


def test_a_cancelled_request_ends_and_others_go_on():
    device = Device(num_pages=30, max_sequences=2, max_tokens=64)
    requests = [Request([3 + number] * 7, Sampling(9)) for number in range(4)]
    for request in requests:
        device.scheduler.add(request)
    for _ in range(3):
        device.step()
    for request in (requests[0], requests[3]):  # with a token in flight, and waiting
        device.scheduler.cancel(request)
    run(device)
    device.scheduler.cancel(requests[1])
    assert [request.finished for request in requests] == ["cancelled", "length", "length", "cancelled"]
    assert [len(request.answer) for request in requests] == [2, 9, 9, 0]
    for request in requests:
        assert request.answer == alone(request.prompt, request.sampling)[: len(request.answer)]


def test_a_request_of_another_scheduler_is_not_cancelled():
    device, other = (Device(num_pages=30, max_sequences=2, max_tokens=64) for _ in range(2))
    request = Request([3] * 7, Sampling(9))
    device.scheduler.add(request)
    with pytest.raises(ValueError, match="request is another loop's"):
        other.scheduler.cancel(request)
    run(device)
    assert request.answer == alone(request.prompt, request.sampling)


def test_a_fork_that_is_refused_holds_no_pages():
    device = Device(num_pages=4, max_sequences=2, max_tokens=64)
    request = Request([3] * 7, Sampling(9))
    device.scheduler.add(request)
    device.step()
    device.drain()
    with pytest.raises(ValueError, match="expected at most 16, those of all pages"):
        device.scheduler.fork(request, Request(request.tokens, Sampling(30)))
    assert device.allocator.sequences == (request.sequence,)
