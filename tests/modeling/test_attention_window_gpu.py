"""A window of the user's, with attention sinks, on a GPU: kernels beside the expanded form under masks."""

import copy

import pytest
import torch

from tests.modeling import models
from tests.modeling.test_gpu import batch, decode, make

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("case", ["per-group", "shared", "latent"])
@torch.no_grad()
def test_window_kernels_are_as_accurate_as_masks(case):
    """Prompts, drafts and single tokens of a padded batch; then a ragged batch; then captured steps of generate."""
    model = make(case)
    model.config.attention_window, model.config.num_sink_tokens = 70, 5
    exactly, inputs = copy.deepcopy(model).float(), batch(330, 0, 7, 190)
    for prefill, step in ((290, 1), (90, 8), (30, 100)):
        exact = decode(exactly, inputs, prefill, "expanded", step)
        found, masked = (decode(model, inputs, prefill, form, step) for form in ("auto", "expanded"))
        torch_error = models.relative_error(masked[:2], exact[:2])
        assert models.relative_error(found[:2], exact[:2]) < 1.5 * torch_error < 0.1

    exactly.config.attention_backend = "mla_expanded"
    exact = exactly(inputs[0][:1], use_cache=False).logits[0]
    cache, done = model.paged_cache(num_pages=8), 0
    sequence, logits = cache.open(), []
    for length in (200, 1, 3, 90, 36):
        step = cache.step(cache.extend({sequence: length}))
        logits.append(model.forward_batch(inputs[0][0, done : done + length], step, all_logits=True))
        done += length
    assert models.relative_error(torch.cat(logits), exact) < 1.5 * torch_error

    given = {"input_ids": inputs[0], "attention_mask": inputs[1], "do_sample": False, "max_new_tokens": 30}

    def generate(**options) -> torch.Tensor:
        out = model.generate(**given, output_logits=True, return_dict_in_generate=True, **options)
        assert options.get("capture") is False or len(out.past_key_values.captured) == 1
        return torch.stack(out.logits)

    uncaptured = generate(capture=False)
    assert models.relative_error(uncaptured[0, 0], exact[-1]) < 1.5 * torch_error
    assert torch.equal(generate(), uncaptured)
    model.config.num_sink_tokens, model.config.attention_window = 0, None
    assert torch.equal(generate(attention_window=70, num_sink_tokens=5), uncaptured)
    assert models.relative_error(generate()[0, 0], exact[-1]) > 2 * torch_error, "the window is one call's"
