"""The loop on a GPU: decode steps are CUDA graphs, and logits in bfloat16 as right as those of plain transformers."""

import copy
import logging

import pytest
import torch

from mha2mla.loop import Loop, Sampling
from tests.gpu import no_waits
from tests.loop.test_loop import traffic
from tests.modeling import models, test_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def make(case: str):
    if case != "source":
        return test_gpu.make(case)
    model = models.source_model("llama", hidden_size=384, head_dim=64, initializer_range=0.05)
    model.set_attn_implementation("mha2mla")
    return model.to("cuda", torch.bfloat16)


@torch.no_grad()
def errors(model, loop: Loop) -> tuple[float, float]:
    """Relative errors, against float32 without a cache, of all logits that a token was chosen by, and of the same
    positions in the model's dtype through transformers."""
    seen: dict = {}
    run = loop.runner.run

    def noting(chunks):
        logits, ordered, slots = run(chunks)
        for row, chunk in zip(logits, ordered, strict=True):
            if chunk is not None and chunk.samples:
                seen[chunk.request, chunk.start + chunk.count - 1] = row.clone()
        return logits, ordered, slots

    loop.runner.run = noting
    requests = traffic(loop, seed=6, count=10, scale=6)
    assert loop.progress.preemptions and any(request.shared_tokens for request in requests)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).float()
    for each in (plain, exact):
        each.set_attn_implementation("sdpa")
    found = {"loop": [], "plain": [], "exact": []}
    for request in requests:
        assert request.finished == "length"
        ids = torch.tensor([request.tokens], device="cuda")
        asked = range(len(request.prompt) - 1, len(request.tokens) - 1)
        found["loop"] += [seen[request, position].float() for position in asked]
        for name, other in (("plain", plain), ("exact", exact)):
            found[name] += list(other(ids, use_cache=False).logits[0, asked.start : asked.stop].float())
    rows = {name: torch.stack(mine) for name, mine in found.items()}
    return tuple(models.relative_error(rows[name], rows["exact"]) for name in ("loop", "plain"))


def loop_of(model) -> Loop:
    return Loop(model, num_pages=10, max_sequences=6, max_tokens=200, max_length=600)


@pytest.mark.parametrize("case", ["per-group", "shared", "latent", "source"])
def test_logits_are_as_right_as_plain_transformers(case):
    model = make(case)
    loop = loop_of(model)
    mine, plain = errors(model, loop)
    assert mine <= 2 * plain
    assert loop.runner.uncaptured is None and len(loop.runner.graphs) > 1


def test_eight_bit_latents_run_too():
    model = make("per-group")
    model.config.attention_backend = "mla_fp8"
    loop = loop_of(model)
    mine, _ = errors(model, loop)
    assert mine < 0.2 and len(loop.runner.graphs) > 1


def test_host_reads_only_the_previous_tokens():
    """All of a step but its read is launched without a wait, once its graph is there."""
    model = make("per-group")
    loop = Loop(model, num_pages=40, max_sequences=4, max_length=600, share_prefixes=False)
    for length in (100, 70, 30):
        loop.add(list(range(3, 3 + length % 90)))
    for _ in range(5):
        loop.step()
    read = loop._read

    def alone(launched):
        torch.cuda.set_sync_debug_mode("default")
        given = read(launched)
        torch.cuda.set_sync_debug_mode("error")
        return given

    loop._read = alone
    with no_waits():
        for _ in range(20):
            assert len(loop.step()) == 3


@pytest.mark.parametrize("case", ["latent", "latent by query head", "shared"])
def test_no_prompt_waits_for_one_kernel_after_another(case):
    """Of a conversation: its first message, and what a later one has behind full pages that are shared."""
    compiled: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())
    loop = Loop(make(case), num_pages=40, max_sequences=1, max_length=600)
    logger, prompt = logging.getLogger("tilelang"), [*range(3, 90)] * 6
    logger.addHandler(handler)
    try:
        for length in (500, 5, 16, 40, 45, 100, 66, 67, 72, 201):
            loop.add(prompt[:length], Sampling(2))
            loop.run()
    finally:
        logger.removeHandler(handler)
    assert [message for message in compiled if "begins to compile" in message] == []
