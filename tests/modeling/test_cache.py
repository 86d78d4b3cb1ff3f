"""LatentCache: bytes to the number, contents, growth, and transformers' verbs on it."""

import pytest
import torch

from mha2mla.modeling import LatentCache
from tests.modeling import models


@torch.no_grad()
def filled(model, ids, **keys) -> LatentCache:
    cache = LatentCache(model.config, **keys)
    model(ids, past_key_values=cache)
    return cache


@torch.no_grad()
def next_logits(model, cache, ids, **keys):
    return model(ids, past_key_values=cache, **keys).logits


def tensors(cache) -> list[torch.Tensor]:
    """Every tensor that hangs on a cache."""
    attributes = [vars(layer) | layer.tensors for layer in cache.layers]
    return [value for values in attributes for value in values.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["per-group", "shared", "per-head", "per layer", "latent", "kept per layer"])
def test_bytes_are_exact(case, dtype):
    """Nothing but c and k_pe: pages times the config's bytes per token, and a few integers of bookkeeping."""
    model = models.mla_model(case).to(dtype)
    per_token = model.config.cache_bytes_per_token(dtype.itemsize)
    numbers = sum(model.config.cached_geometry(i).cache_numel_per_token for i in range(2))
    assert per_token == numbers * dtype.itemsize < model.config.source_cache_bytes_per_token(dtype.itemsize)
    ids = models.tokens(3, 33)
    for keys, pages in (({}, 3), ({"max_cache_len": 60}, 4)):
        cache = filled(model, ids, page_size=16, **keys)
        assert cache.nbytes == 3 * pages * 16 * per_token
        assert sum(t.nbytes for t in tensors(cache) if t.is_floating_point()) == cache.nbytes
        assert sum(t.nbytes for t in tensors(cache) if not t.is_floating_point()) == 2 * 4 * (3 * pages + 3)


def test_growth_doubles_and_keeps_what_is_there():
    model = models.mla_model()
    ids = models.tokens(2, 150)
    cache, capacities = LatentCache(model.config, page_size=16), []
    for start in range(0, 150, 10):
        with torch.no_grad():
            logits = model(ids[:, start : start + 10], past_key_values=cache).logits
        capacities.append(cache.capacity)
        assert cache.get_mask_sizes(5, 0) == (start + 15, 0)
    assert sorted(set(capacities)) == [16, 32, 64, 128, 256]
    expected = model(ids, use_cache=False).logits[:, 140:]
    assert models.relative_error(logits, expected) < 2e-5


def test_a_static_cache_does_not_move_and_has_an_end():
    model = models.mla_model()
    cache = LatentCache(model.config, max_cache_len=40, page_size=16)
    assert cache.get_max_length() == cache.capacity == 48 and LatentCache(model.config).get_max_length() == -1
    with torch.no_grad():
        model(models.tokens(2, 5), past_key_values=cache)
        addresses = [tensor.data_ptr() for tensor in tensors(cache)]
        model(models.tokens(2, 3), past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-2)
        cache.reset()
        model(models.tokens(2, 20), past_key_values=cache)
    assert [tensor.data_ptr() for tensor in tensors(cache)] == addresses
    fresh = LatentCache(model.config, max_cache_len=40, page_size=16)
    with torch.no_grad(), pytest.raises(ValueError, match="key_states has 49 tokens; expected at most 48"):
        model(models.tokens(2, 49), past_key_values=fresh)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("case", ["some sliding", "latent some sliding", "kept some sliding"])
@torch.no_grad()
def test_early_initialization(case, static):
    model, ids = models.mla_model(case), models.tokens(2, 18)
    keys = {"max_cache_len": 40 if static else None, "page_size": 16}
    cache = LatentCache(model.config, **keys)
    cache.early_initialization(2, num_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.is_initialized and int(cache.get_seq_length()) == 0
    model(ids[:, :17], past_key_values=cache)
    expected = next_logits(model, filled(model, ids[:, :17], **keys), ids[:, 17:])
    assert models.relative_error(next_logits(model, cache, ids[:, 17:]), expected) < 1e-6


@torch.no_grad()
def test_refusals_of_verbs_name_the_argument(kind):
    """What the verbs do and leave is in test_cache_machine.py."""
    model = models.mla_model()
    cache = filled(model, models.tokens(2, 15), **kind)
    for call, message in (
        (lambda: cache.crop(3), "tokens_to_remove is 3"),
        (lambda: cache.crop(-16), "tokens_to_remove is -16; the cache holds 15 tokens"),
        (lambda: cache.reorder_cache(torch.tensor([1])), r"beam_idx.shape is \(1,\); expected \(2,\)"),
        (lambda: model(models.tokens(3, 1), past_key_values=cache), "key_states has batch size 3; expected 2"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    cache.batch_select_indices(torch.tensor([False, True]))
    cache.crop(-15)
    assert int(cache.get_seq_length()) == 0 and cache.layers[0].batch_size == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"page_size": 24}, "page_size is 24"),
        ({"page_size": 8}, "page_size is 8"),
        ({"max_cache_len": 0}, "max_cache_len is 0"),
    ],
)
def test_bad_arguments(keys, message):
    with pytest.raises(ValueError, match=message):
        LatentCache(models.mla_config(), **keys)


@torch.no_grad()
def test_full_static_cache_raises_and_writes_nothing():
    """Its length is known to the device alone, which checks it (on a GPU by an assertion in its stream)."""
    model = models.mla_model(attention_backend="mla_reference")
    cache = LatentCache(model.config, max_cache_len=16, page_size=16)
    model(models.tokens(2, 15), past_key_values=cache)
    model(models.tokens(2, 1), past_key_values=cache)
    before = [tensor.clone() for layer in cache.layers for tensor in layer.tensors.values()]
    with pytest.raises(RuntimeError, match="past_key_values is full: it holds 16 tokens a sequence"):
        model(models.tokens(2, 1), past_key_values=cache)
    after = [tensor for layer in cache.layers for tensor in layer.tensors.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.fixture(params=[{}, {"max_cache_len": 64}], ids=["dynamic", "static"])
def kind(request):
    return {"page_size": 16, **request.param}


@pytest.mark.parametrize("backend", ["mla_reference", "mla_expanded"])
@pytest.mark.parametrize("case", ["per-group", "latent", "latent no nope"])
def test_unused_pages_do_not_matter(case, backend, kind):
    """The expanded form multiplies masked values by zero, so NaN behind a static layer's tokens would show."""
    model = models.mla_model(case, attention_backend=backend)
    ids, more = models.tokens(2, 20), models.tokens(2, 1)
    expected = next_logits(model, filled(model, ids, **kind), more)
    cache = filled(model, ids, **kind)
    for layer in cache.layers:
        for tokens in layer.rows():
            tokens[:, 21:] = torch.nan
    assert torch.equal(next_logits(model, cache, more), expected)


def test_a_tensor_may_say_how_much_is_cropped():
    """As assisted decoding of some versions of transformers does: the host's length stays a number of its own."""
    model = models.mla_model()
    with torch.no_grad():
        cache = model(models.tokens(1, 9)).past_key_values
    cache.crop(torch.tensor(-2))
    assert type(cache.get_seq_length()) is int and cache.get_seq_length() == 7 and cache.is_empty is False
    assert cache.layers[1].cache_seqlens.tolist() == [7]
