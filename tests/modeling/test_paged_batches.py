"""A model over ragged batches: prompts in chunks beside decodes, forks, padding; equal to one sequence at a time."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mha2mla.modeling import CacheCapacityError, PagedCache, SequenceBatch
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.registry import AttentionRegistry, GQAGeometry
from mha2mla.modeling.step import with_one_workspace
from tests.modeling import models

TOLERANCE = 2e-5


@pytest.mark.parametrize("case", models.GEOMETRIES)
@torch.no_grad()
def test_mixed_steps_equal_each_sequence_alone(case):
    model = models.mla_model(case)
    ids = models.tokens(3, 60)
    expected = model(ids, use_cache=False).logits
    cache = model.paged_cache(num_pages=20, page_size=16)
    assert cache.nbytes == 20 * 16 * model.config.cache_bytes_per_token(4)
    # a prompt; a chunk of a long one beside a decode; all three, with a draft; a chunk over a longer context
    steps = ({0: 11}, {0: 1, 1: 30}, {2: 25, 0: 1, 1: 20}, {1: 4, 0: 12, 2: 0}, {0: 1, 1: 1, 2: 9})
    errors = models.batch_errors(model, cache, ids, expected, steps)
    assert len(errors) == 11 and max(errors) < TOLERANCE


@pytest.mark.parametrize("rope_from_latent", [False, True])
@pytest.mark.parametrize("case", ["llama-yarn-tied", "qwen3-moe", "gemma3", "olmo2"])
@torch.no_grad()
def test_families(case, rope_from_latent):
    source = models.source_model(case)
    model = models.full_rank(source, rope_from_latent=rope_from_latent)
    ids = models.tokens(2, 40)
    expected = source(ids, use_cache=False).logits
    cache = model.paged_cache(num_pages=8, page_size=16)
    one, two = cache.open(), cache.open()
    models.batch_logits(model, cache, {one: ids[0, :30]})
    logits = models.batch_logits(model, cache, {one: ids[0, 30:], two: ids[1]})
    assert models.relative_error(logits[one], expected[0, 30:]) < 1e-4
    assert models.relative_error(logits[two], expected[1]) < 1e-4


@pytest.mark.parametrize("new", [1, 5, 30])
@pytest.mark.parametrize(
    ("case", "right"), [("latent", True), ("latent some sliding", True), ("per-group", False), ("kept qk-norm", False)]
)
@torch.no_grad()
def test_latent_pages_serve_other_positions(case, right, new):
    """A prefix that saw nothing before it, behind a page that nobody sees; stored keys would be a page too far away."""
    model = models.mla_model(case)
    ids = models.tokens(1, 16 + new)
    expected = model(ids, use_cache=False).logits[0, 16:]
    cache = model.paged_cache(num_pages=6, page_size=16)
    prefix = cache.open()
    models.batch_logits(model, cache, {prefix: ids[0, :16]})
    (page,) = cache.allocator.pages(prefix)
    free = [other for other in range(6) if other != page]
    for tensors in cache.tensors:
        for tensor in tensors.values():
            tensor[free[0]] = torch.nan
    pages = [[free[0], page, *free[1 : 2 + new // 16]]]
    batch = SequenceBatch.build([new], [32], pages, 16, cache_starts=[16])
    logits = model.forward_batch(ids[0, 16:], cache.step(batch), all_logits=True)
    assert (models.relative_error(logits, expected) < TOLERANCE) is right


def test_layers_on_several_devices_are_refused():
    model = models.mla_model()
    attention = model.model.layers[1].self_attn.to("meta")
    attention._hf_hook = SimpleNamespace(execution_device="cuda:1")
    with pytest.raises(ValueError, match="layers run on cpu and cuda:1; expected one device, or generate"):
        model.paged_cache(num_pages=2)


@torch.no_grad()
def test_overflow_changes_nothing():
    model = models.mla_model()
    cache = model.paged_cache(num_pages=3, page_size=16)
    one, two = cache.open(), cache.open()
    cache.extend({one: 20})
    with pytest.raises(CacheCapacityError, match="asks for 40 tokens, 3 pages of 16; 1 of 3 are free"):
        cache.extend({one: 20, two: 20})
    with pytest.raises(CacheCapacityError, match="sequence 0 would have 3 pages; expected at most max_pages=2"):
        cache.extend({one: 20}, max_pages=2)
    with pytest.raises(ValueError, match=r"new_tokens\[1\] is -1"):
        cache.extend({two: -1})
    assert cache.allocator.length(one) == 20 and cache.allocator.num_free == 1
    twin = cache.fork(one)
    cache.extend({one: 3, twin: 3})  # one of the two keeps the shared page
    assert cache.allocator.num_free == 0


@pytest.mark.parametrize("case", ["per-group", "per layer"])
@pytest.mark.parametrize("waiting", [0, 1, 3])
@torch.no_grad()
def test_sequences_that_bring_no_tokens(case, waiting):
    """A step in which nobody has anything to say: rows of zeros, and a cache that is as it was."""
    model = models.mla_model(case)
    ids = models.tokens(1, 9)
    cache = model.paged_cache(num_pages=4, page_size=16)
    sequences = [cache.open() for _ in range(waiting)]
    if waiting:
        models.batch_logits(model, cache, {sequences[0]: ids[0, :5]})
    before = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in cache.tensors]
    batch = cache.extend(dict.fromkeys(sequences, 0))
    nothing = torch.zeros(0, dtype=torch.long)
    logits = model.forward_batch(nothing, cache.step(batch))
    assert logits.shape == (waiting, model.vocab_size) and not logits.any()
    assert model.forward_batch(nothing, cache.step(batch), all_logits=True).shape == (0, model.vocab_size)
    for tensors, old in zip(cache.tensors, before, strict=True):
        assert all(torch.equal(tensor, old[name]) for name, tensor in tensors.items())
    if waiting:
        later = models.batch_logits(model, cache, {sequences[0]: ids[0, 5:]})[sequences[0]]
        assert models.relative_error(later, model(ids, use_cache=False).logits[0, 5:]) < TOLERANCE


def poison_free_pages(cache: PagedCache) -> None:
    free = [page for page in range(cache.allocator.num_pages) if not cache.allocator.owners(page)]
    for tensors in cache.tensors:
        for tensor in tensors.values():
            tensor[free] = torch.nan


@pytest.mark.parametrize("case", ["per-group", "latent"])
@pytest.mark.parametrize("padding", [0, 2])
@torch.no_grad()
def test_nan_in_a_free_page_reaches_nobody(padding, case):
    """Freed pages are not wiped: whoever gets one next, and rows that pad a batch, must not see what is left there.
    Rows of padding are as long as the shortest query, a long one here, and have no page: page 0 is nobody's."""
    model = models.mla_model(case)
    ids = models.tokens(2, 60)
    expected = model(ids, use_cache=False).logits
    cache = model.paged_cache(num_pages=8, page_size=16)
    gone, other, one = (cache.open() for _ in range(3))
    poison_free_pages(cache)
    models.batch_logits(model, cache, {gone: ids[0, :20]})
    models.batch_logits(model, cache, {other: ids[1, :16]})
    cache.close(gone)
    cache.close(other)
    done = 0
    for count in (12, 1, 3):
        poison_free_pages(cache)
        assert not cache.allocator.owners(0)
        new = {one: ids[0, done : done + count]}
        logits = models.batch_logits(model, cache, new, **({"num_sequences": 1 + padding} if padding else {}))[one]
        assert models.relative_error(logits, expected[0, done : done + count]) < TOLERANCE
        done += count


def test_a_registry_keeps_names_apart():
    registry = AttentionRegistry(ATTENTION_BACKENDS.backends.values())
    paged = registry.get("mla_paged")
    with pytest.raises(ValueError, match="backend.name is 'mla_paged'; expected none of"):
        registry.register(paged)
    with pytest.raises(TypeError):
        registry.backends["mla_paged"] = paged
    geometry = GQAGeometry(6, 2, 16, 8)
    assert paged.refusal(geometry, 16, torch.float32, "cpu") == "it serves MLAGeometry, not GQAGeometry"
    where = (geometry, 16, torch.float32, "cpu")
    chosen, _ = registry.find(None, *where)
    assert chosen.name == "gqa_reference" and chosen.per_token == ("query", "key", "value")
    assert AttentionRegistry().find(None, *where) == (None, "none is registered")
    backend, why = AttentionRegistry([registry.get("gqa_paged")]).find(None, *where)
    assert backend is None and "gqa_paged: dtype is float32" in why
    with pytest.raises(ValueError, match="attention backend is 'no'; expected one of"):
        registry.find("no", *where)


def test_layers_of_other_ranks_share_a_workspace():
    model = models.mla_model("per layer")
    cache = model.paged_cache(num_pages=4, page_size=16)
    batch = cache.extend({cache.open(): 12})
    sizes = (32, 96)
    plans = [
        replace(plan, workspace=torch.zeros(size)) for size, plan in zip(sizes, cache.step(batch).plans, strict=True)
    ]
    first, second = with_one_workspace(plans, ["workspace"], {})
    assert (first.workspace.numel(), second.workspace.numel()) == sizes
    assert first.workspace.data_ptr() == second.workspace.data_ptr() == plans[1].workspace.data_ptr()
