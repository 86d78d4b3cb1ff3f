"""Contents of a filled latent cache: pages that the op reads, nothing that leaks, copies.

Its bytes, growth and verbs are in test_cache.py.
"""

import copy

import pytest
import torch

from tests.modeling import models
from tests.modeling.test_cache import filled, next_logits


@pytest.fixture(params=[{}, {"max_cache_len": 64}], ids=["dynamic", "static"])
def kind(request):
    return {"page_size": 16, **request.param}


@pytest.mark.parametrize(
    ("case", "expected"),
    [("per-group", {"latent_cache": (16,), "rope_cache": (2, 4)}), ("latent", {"latent_cache": (24,)})],
)
def test_pages_are_what_the_op_expects(case, expected, kind):
    model = models.mla_model(case)
    cache = filled(model, models.tokens(3, 37), **kind)
    layer, pages = cache.layers[0], cache.capacity // 16
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.tensors.items()}
    assert shapes == {name: (3 * pages, 16, *numbers) for name, numbers in expected.items()}
    assert torch.equal(layer.block_table, torch.arange(3 * pages, dtype=torch.int32).view(3, pages))
    assert torch.equal(layer.cache_seqlens, torch.full((3,), 37, dtype=torch.int32))


@pytest.mark.parametrize("case", ["per-group", "latent"])
def test_a_copy_is_another_cache(case, kind):
    """A prompt is prefilled once and continued several times."""
    model = models.mla_model(case)
    prompt = filled(model, models.tokens(2, 20), **kind)
    more = models.tokens(2, 1)
    first = next_logits(model, copy.deepcopy(prompt), more)
    next_logits(model, copy.deepcopy(prompt), models.tokens(2, 1))
    assert torch.equal(next_logits(model, copy.deepcopy(prompt), more), first)
    assert int(prompt.get_seq_length()) == 20


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
