"""``torch.compile`` of a model: fresh, with caches of its own and given ones, in one full graph."""

from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig

from mha2mla.modeling import LatentCache
from tests.few import few
from tests.modeling import models

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FROZEN = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="Dynamo of torch 2.11 hands no frozen dataclass to what it does not trace"
)


@few(
    "case, padded",
    [("per-group", False), ("latent some sliding", True), ("some sliding", True), ("shared", True)],
    count=2,
)
@torch.no_grad()
def test_one_full_graph_serves_all_lengths(case, padded):
    model = models.mla_model(case, attention_backend="mla_reference").double()  # what differs is no rounding
    ids, mask = models.tokens(2, 24), models.left_mask(24, 0, 6) if padded else None

    def seen(length, cache):
        """The mask as generate hands it over."""
        if mask is None:
            return None
        return model.create_masks_for_generate(model.config, ids[:, :1], mask[:, :length], cache)

    cache, reference = (LatentCache(model.config, max_cache_len=32, page_size=16) for _ in range(2))
    for prefilled in (cache, reference):
        model(ids[:, :13], attention_mask=seen(13, prefilled), past_key_values=prefilled)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counter, fullgraph=True)
    for index in range(13, 24):
        inputs = {
            "input_ids": ids[:, index : index + 1],
            "position_ids": torch.full((2, 1), index),
            "attention_mask": seen(index + 1, cache),
            "use_cache": True,
        }
        logits = step(**inputs, past_key_values=cache).logits
        expected = model(**inputs, past_key_values=reference).logits
        assert models.relative_error(logits, expected) < 1e-12
    assert counter.frame_count == 1
    for layer in cache.layers:
        assert torch.equal(layer.cache_seqlens, torch.full((2,), 24, dtype=torch.int32))


@few("case", ["per layer", "latent per layer", "sliding"], count=2)
@torch.no_grad()
def test_several_new_tokens_compiled(case):
    """The compiled step makes its own plan: none has to lie in the cache, and none is left there."""
    model = models.mla_model(case, attention_backend="mla_reference")
    ids = models.tokens(2, 25)
    expected = model(ids, use_cache=False).logits
    cache = LatentCache(model.config, max_cache_len=32, page_size=16)
    model(ids[:, :13], past_key_values=cache)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counter, fullgraph=True)
    for index in range(13, 25, 3):
        position_ids = torch.arange(index, index + 3).expand(2, -1)
        logits = step(input_ids=ids[:, index : index + 3], position_ids=position_ids, past_key_values=cache).logits
        assert models.relative_error(logits, expected[:, index : index + 3]) < 2e-5
    assert counter.frame_count == 1 and not cache.planner.plans


@FROZEN
@few(
    "case, use_cache",
    [("latent", True), ("per-group", True), *product(models.GEOMETRIES, (True, False))],
    count=1,
)
def test_fresh_model_compiles_in_one_graph(case, use_cache):
    """The cache is made inside the graph, comes out of it, and serves the compiled model and the eager one."""
    model = models.mla_model(case)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (11, 7):
        ids, mask = models.tokens(2, length), models.left_mask(length, 3, 0)
        prompt = {"input_ids": ids, "attention_mask": mask, "use_cache": use_cache}
        with torch.no_grad():
            out, expected = compiled(**prompt), model(**prompt)
            assert models.relative_error(out.logits, expected.logits) < 1e-6
            if not use_cache:
                assert out.past_key_values is None
                continue
            prompt = {"input_ids": models.tokens(2, 1), "attention_mask": torch.cat((mask, mask[:, -1:]), 1)}
            after = compiled(**prompt, past_key_values=out.past_key_values).logits
            assert models.relative_error(after, model(**prompt, past_key_values=expected.past_key_values).logits) < 2e-6
            assert out.past_key_values.get_seq_length() == length + 1


@FROZEN
@few("case, training", [("latent", False), *product(["per-group", "shared", "per-head"], (True, False))], count=2)
def test_compiled_loss_has_the_eager_gradients(case, training):
    """In eval mode a cache is made beside the loss, as users get it who forget ``torch.no_grad``."""
    model = models.mla_model(case, num_hidden_layers=1).train(training)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (9, 12):
        ids = models.tokens(2, length)
        gradients = []
        for each in (compiled, model):
            model.zero_grad()
            out = each(input_ids=ids, labels=ids)
            out.loss.backward()
            assert (out.past_key_values is None) == training
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for gradient, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@FROZEN
@few("case, name", [("latent", None), ("per layer", "mla_fp8_reference"), ("per layer", None)], count=2)
@torch.no_grad()
def test_a_prompt_compiled_before_the_cache_has_pages(case, name):
    """Which backend serves is found while the step is traced, and not traced itself."""
    model = models.mla_model(case, attention_backend=name)
    ids = models.tokens(2, 7)
    expected, cache = LatentCache(model.config, max_cache_len=32), LatentCache(model.config, max_cache_len=32)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    for part in (ids[:, :6], ids[:, 6:]):
        torch._dynamo.reset()
        logits = step(input_ids=part, past_key_values=cache, use_cache=True).logits
        assert models.relative_error(logits, model(part, past_key_values=expected).logits) < 1e-6
    assert {layer.backend.name for layer in cache.layers} == {name or "mla_reference"}


@pytest.mark.parametrize(("case", "form"), [("per-group", "auto"), ("per-group", "expanded"), ("latent", "auto")])
def test_generate_compiles_its_step(case, form):
    """As generate does by itself on a GPU with a static cache, in both forms: one graph, and one for two prompts."""
    model = models.mla_model(case, attention_backend=models.FORMS[form])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    compile_config._compile_all_devices = True
    for length in (11, 9):
        options = models.padded(length, length - 4) | {"max_new_tokens": 8, "do_sample": False}
        expected = model.generate(use_cache=False, **options)
        out = model.generate(cache_implementation="static", compile_config=compile_config, **options)
        assert torch.equal(out, expected)
    assert len(graphs) == 1
