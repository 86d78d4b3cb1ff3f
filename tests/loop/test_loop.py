"""Requests that come, fork and lose their pages get the greedy tokens that each gets alone through transformers."""

import random
from dataclasses import replace

import pytest
import torch

from mha2mla.kernels.mixed_attention import plan
from mha2mla.loop import Loop, Sampling, runner
from mha2mla.modeling import BatchModel
from mha2mla.modeling.pages import OutOfPagesError
from tests.few import few
from tests.modeling import models
from tests.modeling.tape import Tape

PAGE = 8
LAYOUTS = (
    "per-group",
    "kept qk-norm",
    "latent",
    "shared",
    "some sliding",
    "kept per layer",
    "sliding",
    "latent sliding",
)
SOURCES = ("qwen2", "llama-yarn-tied", "qwen2-sliding", "qwen3")


def make(case: str):
    if case not in SOURCES:
        return models.mla_model(case)
    model = models.source_model(case)
    model.set_attn_implementation("mha2mla")
    return model


def alone(model, prompt, new_tokens: int) -> list[int]:
    """Through transformers' own generate."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


def make_loop(model, **options) -> Loop:
    keys = {"num_pages": 12, "page_size": PAGE, "max_sequences": 5, "max_tokens": 24, "max_length": 96}
    return Loop(model, **{**keys, **options})


def traffic(loop: Loop, seed: int, count: int = 12, scale: int = 1) -> list:
    """Requests at random moments, some with a beginning of others, some forked from them; until all are finished."""
    draw, requests = random.Random(seed), []
    beginning = [draw.randrange(3, 96) for _ in range(30 * scale)]
    while len(requests) < count or loop.scheduler.has_work:
        if len(requests) < count and draw.random() < 0.8:
            own = [draw.randrange(3, 96) for _ in range(draw.randint(1, 25 * scale))]
            prompt = beginning[: draw.choice((0, 17, 30)) * scale] + own
            requests.append(loop.add(prompt, Sampling(draw.randint(1, 40 * scale))))
        elif requests and len(requests) < count and draw.random() < 0.2:
            parent = draw.choice(requests)
            if len(parent.tokens) < 80 * scale:
                requests.append(loop.fork(parent, Sampling(8)))
        loop.step()
    loop.drain()
    return requests


@few("case", [*LAYOUTS[:3], *SOURCES, *LAYOUTS[3:]], 4)
def test_everyone_gets_the_tokens_it_gets_alone(case):
    model = make(case)
    loop = make_loop(model)
    requests = traffic(loop, seed=5)
    assert loop.progress.preemptions and any(request.shared_tokens for request in requests)
    for request in requests:
        assert request.answer == alone(model, request.prompt, len(request.answer)) and request.finished == "length"


def test_steps_that_are_recorded_say_the_same():
    model = models.mla_model("per-group")
    assert make_loop(model).runner.uncaptured is not None
    loop = make_loop(model, recorder=Tape())
    assert loop.runner.uncaptured is None
    for request in traffic(loop, seed=2, count=6):
        assert request.answer == alone(model, request.prompt, len(request.answer))


def test_what_is_refused():
    model = models.mla_model()
    loop = make_loop(model)
    with pytest.raises(ValueError, match="up to 97 tokens; expected at most max_length=96"):
        loop.add([1] * 90, Sampling(7))
    with pytest.raises(ValueError, match="prompt has token id 96; expected less than vocab_size=96"):
        loop.add([5, 96])
    assert loop.add(torch.tensor([5, 95]), Sampling(7)).prompt == (5, 95)
    with pytest.raises(ValueError, match="attn_implementation 'sdpa'; expected 'mha2mla'"):
        make_loop(models.source_model("llama"))
    for keys in ({"max_length": 0}, {"max_length": -1}, {"page_size": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(keys))} is .*; expected at least 1"):
            make_loop(model, **keys)


def test_a_cache_of_its_own_size():
    """As many pages as all sequences can fill, where memory has them."""
    loop = make_loop(models.mla_model(), num_pages=None)
    assert loop.cache.allocator.num_pages == 5 * 96 // PAGE
    assert loop.cache_bytes_per_token == loop.cache.nbytes / (5 * 96) > 0


def test_random_tokens_are_the_requests_own():
    """Whatever runs beside it, and however often its pages are taken away."""
    model, draw = models.mla_model(), random.Random(3)
    sampling = Sampling(30, temperature=1.0, top_k=20, top_p=0.95, repetition_penalty=1.2, seed=4)
    loop = make_loop(model)
    first = loop.add([5, 6, 7], sampling)
    loop.run()
    loop = make_loop(model)
    others = [loop.add([draw.randrange(3, 96) for _ in range(20)], Sampling(40, temperature=2.0)) for _ in range(2)]
    again = loop.add([5, 6, 7], sampling)
    loop.run()
    assert again.answer == first.answer and len(set(first.answer)) > 5 and len(others[0].answer) == 40
    assert again.preemptions


def test_random_tokens_do_not_depend_on_chunks():
    """A prompt of 23 tokens in chunks of 5, of 7, in one, and behind a beginning that is cached already."""
    model, prompt = models.mla_model(), [3 * token + 5 for token in range(23)]
    samplings = [Sampling(3, temperature=2.0, seed=seed) for seed in range(5)]
    found = []
    for keys in ({"max_tokens": 5}, {"max_tokens": 7}, {"max_tokens": 200}, {"share_prefixes": True}):
        loop = make_loop(model, num_pages=40, **{"share_prefixes": False, **keys})
        requests = []
        for sampling in samplings:
            requests.append(loop.add(prompt, sampling))
            loop.run()
        assert any(request.shared_tokens for request in requests) == ("max_tokens" not in keys)
        found.append([request.answer for request in requests])
    assert found[0] == found[1] == found[2] == found[3] and len(set(map(tuple, found[0]))) > 1


def test_progress_counts_prompts_and_answers_apart():
    loop = make_loop(models.mla_model(), num_pages=40, share_prefixes=False)
    for length in (3, 20, 30):
        loop.add(range(5, 5 + length), Sampling(9))
    done = loop.run()
    assert (done.prompt_tokens, done.new_tokens, done.preemptions) == (53, 27, 0)
    assert done.steps == 3 + 8  # until the last prompt is cached, which gives its first token, and one for each further


def test_progress_counts_prompts_that_run_again():
    loop = make_loop(models.mla_model(), num_pages=5, share_prefixes=False)
    requests = [loop.add(range(5, 15), Sampling(14)) for _ in range(2)]
    done = loop.run()
    assert done.preemptions == sum(request.preemptions for request in requests) > 0
    assert (done.prompt_tokens, done.new_tokens) == (10 * (2 + done.preemptions), 28)


def test_an_answer_ends_with_the_token_that_stops_it():
    model = models.mla_model()
    prompt = [9, 8, 7, 6]
    expected = alone(model, prompt, 20)
    loop = make_loop(model)
    request = loop.add(prompt, Sampling(20, stop_tokens=(expected[6],)))
    loop.run()
    assert request.answer == expected[: expected.index(expected[6]) + 1] and request.finished == "stop"


@pytest.mark.parametrize("case", ["latent", "qwen2"])
def test_kernels_are_compiled_before_requests(case, monkeypatch):
    """By a step of each bucket of rows and by prompts, which leave the cache as it was."""
    shapes, model = [], make(case)

    def compile_ahead(device, call, run):
        with monkeypatch.context() as inside:
            inside.setattr(
                BatchModel, "forward_batch", lambda self, ids, step: shapes.append(step.batch.lengths[0].tolist())
            )
            run()
        run()
        return 7

    monkeypatch.setattr(runner, "compile_ahead", compile_ahead)
    loop = make_loop(model, max_tokens=128)
    assert loop.compiled == 7 and loop.cache.allocator.num_free == 12
    assert shapes == [[1], [1] * 2, [1] * 4, [1] * 5, [16], [64], [95], [96]]  # 12 pages of 8: room for fewer than 128
    for prompt, more in (([5, 7, 11], [3]), ([5, 7, 11, 13], []), ([5, 7, 11, 13, 17], [5]), ([3] * 9, [])):
        shapes.clear()
        request = loop.add(prompt, Sampling(6))
        loop.run()
        assert request.answer == alone(model, prompt, 6)
        assert shapes == [more] * bool(more)  # by the step itself, once for 2, 4 and 8 tokens each


@pytest.mark.parametrize("case", ["latent", "shared"])
def test_both_forms_are_compiled_before_requests(case, monkeypatch):
    """A small model's prompt runs the expanded form on a GPU only where its pieces of 8 tokens overlap."""
    forms, make_plan = set(), plan._plan

    def plan_as_on_a_gpu(*arguments):
        made = make_plan(*arguments[:-1], plan.LAUNCH_FLOP)
        layout = made.parts.layout
        forms.update(["expanded"] * bool(layout.waves), ["pieces"] * any(group.has_pieces for group in layout.groups))
        return made

    monkeypatch.setattr(plan, "_plan", plan_as_on_a_gpu)
    monkeypatch.setattr(runner, "compile_ahead", lambda device, call, run: run())
    loop = make_loop(make(case), num_pages=40, max_tokens=128, share_prefixes=False)
    assert forms == {"expanded", "pieces"}
    for length, form in ((40, "pieces"), (45, "expanded")):
        forms.clear()
        loop.add(list(range(5, 5 + length)), Sampling(1))
        loop.run()
        assert forms == {form}


def fail_in_steps(monkeypatch, loop: Loop, failing: set[int]) -> None:
    """Steps of these numbers raise after they have run and spoiled the tokens that the device chose before."""
    run, calls = loop.runner.run, []

    def run_or_fail(chunks):
        found = run(chunks)
        calls.append(chunks)
        if len(calls) in failing:
            loop.runner.last.fill_(7)
            raise KeyboardInterrupt(f"call {len(calls)}")
        return found

    monkeypatch.setattr(loop.runner, "run", run_or_fail)


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_step_that_raises_is_undone(share_prefixes, monkeypatch):
    """Answers, counts and reports are as if it had not been, whichever step it is."""
    model, found = models.mla_model(), []
    prompts = [[5, 6, 7], list(range(3, 30)), list(range(3, 24))]
    for failing in ({}, {1, 2, 3}, set(range(2, 60, 2)), set(range(3, 60, 5))):
        loop = make_loop(model, num_pages=8, share_prefixes=share_prefixes)
        fail_in_steps(monkeypatch, loop, failing)
        requests = [
            loop.add(prompt, Sampling(20, repetition_penalty=1.2 + number)) for number, prompt in enumerate(prompts)
        ]
        given, raised = [], 0
        while loop.scheduler.has_work:
            try:
                for some in loop.steps():
                    given += some
            except KeyboardInterrupt:
                raised += 1
        given += loop.drain()
        assert bool(raised) == bool(failing) and set(given) == set(requests) and loop.progress.new_tokens == 60
        assert loop.progress.preemptions or failing
        assert not any(request.in_flight for request in requests)
        found.append([request.answer for request in requests])
    assert all(answers == found[0] for answers in found)


def test_an_interrupt_while_tokens_are_awaited_loses_none():
    model = models.mla_model()
    loop = make_loop(model)
    request = loop.add([9, 8, 7], Sampling(8))
    loop.step()

    class Interrupted:
        def synchronize(self):
            loop._launched[0] = replace(loop._launched[0], done=None)
            raise KeyboardInterrupt

    loop._launched[0] = replace(loop._launched[0], done=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    loop.run()
    assert request.answer == alone(model, request.prompt, 8)


def test_half_a_change_ends_the_loop(monkeypatch):
    loop = make_loop(models.mla_model())
    request = loop.add([9, 8, 7], Sampling(8))
    loop.step()

    def complete(chunks, tokens):
        raise KeyboardInterrupt("here")

    monkeypatch.setattr(loop.scheduler, "complete", complete)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    monkeypatch.undo()
    for call in (loop.run, loop.step, loop.drain, lambda: loop.add([1]), lambda: loop.fork(request)):
        with pytest.raises(RuntimeError, match=r"KeyboardInterrupt\('here'\).*expected a new Loop"):
            call()


def test_pages_held_elsewhere_are_named():
    model = models.mla_model()
    loop = make_loop(model, num_pages=4)
    mine = loop.cache.open()
    loop.cache.extend({mine: 17})
    request = loop.add([9, 8, 7], Sampling(8))
    for _ in range(2):
        with pytest.raises(OutOfPagesError, match="1 requests wait .*: 3 of 4 pages are held"):
            loop.run()
    loop.cache.close(mine)
    loop.run()
    assert request.answer == alone(model, request.prompt, 8)


def test_a_fork_hides_no_token_of_others():
    loop = make_loop(models.mla_model())
    first, reports, twin = loop.add([9, 8, 7], Sampling(5)), [], None
    for given in loop.steps():
        reports += given
        if len(first.answer) == 3 and twin is None:
            twin = loop.fork(first, Sampling(3))  # reads the fourth
    assert (reports.count(first), reports.count(twin)) == (5, 3) and first.finished == "length"


def test_a_fork_of_another_loops_request_takes_none_of_its_pages():
    model = models.mla_model()
    loop, other = make_loop(model), make_loop(model)
    request, running = loop.add([9, 8, 7, 6], Sampling(20)), other.add([5, 4, 3], Sampling(20))
    for each in (loop, other):
        each.step()
        each.step()
        each.drain()
    assert request.sequence == running.sequence
    twin = other.fork(request, Sampling(6))
    other.run()
    assert twin.answer == alone(model, twin.prompt, 6)


@pytest.mark.parametrize("sinks, shared", [(2 * PAGE, 2 * PAGE), (0, 0)])
@torch.no_grad()
def test_pages_given_back_are_not_shared(sinks, shared):
    """Of a sequence that the caller cached, and that keeps pages behind its window and for its sinks alone."""
    model = models.mla_model(attention_window=12, num_sink_tokens=sinks)
    loop, prompt = make_loop(model), models.tokens(1, 50)[0]
    mine = loop.cache.open()
    model.forward_batch(prompt[:47], loop.cache.step(loop.cache.extend({mine: 47})))
    assert loop.cache.give_back(mine) == 4 - sinks // PAGE
    adopted = loop.adopt(prompt.tolist(), mine, Sampling(6))
    loop.run()
    later = loop.add(prompt[:30].tolist(), Sampling(6))
    loop.run()
    assert later.shared_tokens == shared
    for request in (adopted, later):
        assert request.answer == alone(model, request.prompt, 6)
