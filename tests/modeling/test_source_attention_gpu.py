"""Source models on the TileLang kernels: bfloat16 logits at most twice as far from float64 as sdpa's."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from mha2mla.modeling import PagedSource
from tests.gpu import graph_of, no_waits
from tests.modeling import models

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SIZES = {"hidden_size": 384, "head_dim": 64, "initializer_range": 0.05}
PADDING, PROMPT, STEPS = 5, 150, 6


@pytest.fixture(params=["llama", "mistral-sliding"])
def source(request):
    """6 query heads on 2 kv heads of width 64; a window of 70 tokens, or none."""
    window = {"sliding_window": 70} if request.param == "mistral-sliding" else {}
    return models.source_model(request.param, **SIZES, **window).to("cuda", torch.bfloat16)


def over_cache(model, ids, mask, kind) -> torch.Tensor:
    """Logits of a prompt, of single tokens, and of a draft of four."""
    cache = kind(config=model.config, **({"max_cache_len": 192} if kind is StaticCache else {}))
    stops = (*range(PROMPT, PROMPT + STEPS + 1), PROMPT + STEPS + 4)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return models.logits_of_calls(model, cache, ids, stops, mask, positions)[:, PADDING:]


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_prompts_and_steps_over_a_cache(source, kind):
    ids = models.tokens(3, PROMPT + STEPS + 4).cuda()
    mask = models.left_mask(ids.shape[1], 0, PADDING, 0).cuda()
    exact = over_cache(copy.deepcopy(source).double(), ids, mask, DynamicCache)
    torchs = models.relative_error(over_cache(source, ids, mask, DynamicCache), exact)
    source.set_attn_implementation("mha2mla")
    assert models.relative_error(over_cache(source, ids, mask, kind), exact) <= 2 * torchs


@torch.no_grad()
def test_ragged_batches_and_a_step_in_a_cuda_graph(source):
    ids = models.tokens(3, 160).cuda()
    exact = copy.deepcopy(source).double()(ids, use_cache=False).logits
    torchs = models.relative_error(source(ids, use_cache=False).logits, exact)
    source.set_attn_implementation("mha2mla")
    paged = PagedSource(source)
    cache = paged.paged_cache(num_pages=12)
    assert {layer.backend.name for layer in cache.layers} == {"gqa_paged"}
    sequences, done = [cache.open() for _ in ids], [0, 0, 0]
    for counts in ((100, 40, 1), (1, 70, 1), (50, 1, 150)):
        batch = cache.extend(dict(zip(sequences, counts, strict=True)))
        new = [ids[i, done[i] : done[i] + count] for i, count in enumerate(counts)]
        with no_waits():
            logits = paged.forward_batch(batch.flatten(new), cache.step(batch), all_logits=True)
        for i, mine in enumerate(batch.unflatten(logits)):
            assert models.relative_error(mine, exact[i, done[i] : done[i] + counts[i]]) <= 2 * torchs
            done[i] += counts[i]

    batch = cache.extend(dict.fromkeys(sequences, 1))
    step, token = cache.step(batch), torch.stack([ids[i, done[i]] for i in batch.order.tolist()])
    expected = paged.forward_batch(token, step)
    graph, replayed = graph_of(lambda: (step.refresh(), paged.forward_batch(token, step))[1])
    graph.replay()
    assert torch.equal(replayed, expected)


@torch.no_grad()
def test_generate_compiles_static_cache_steps(source):
    """As transformers does by itself. A compiler keeps in float32 what uncompiled steps round, so each greedy token is
    float64's choice or as near to it as two logits may come that are each twice as far off as sdpa's."""
    ids = models.tokens(2, 52).cuda()
    exact_model, sdpa = copy.deepcopy(source).double(), copy.deepcopy(source)
    source.set_attn_implementation("mha2mla")
    # A cache of 64 tokens, which is read where it lies: the last token is not cached.
    options = {"max_new_tokens": 13, "do_sample": False, "cache_implementation": "static"}
    for disable_compile in (True, False):
        out = source.generate(ids, attention_mask=torch.ones_like(ids), disable_compile=disable_compile, **options)
        assert out.shape[1] == ids.shape[1] + 13
        exact, rounded = (
            model(out[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :].double() for model in (exact_model, sdpa)
        )
        below = exact.amax(-1) - exact.gather(2, out[:, ids.shape[1] :, None])[..., 0]
        assert (below <= 2 * 2 * (rounded - exact).abs().amax(-1)).all()
