"""Captured decode in generate on a GPU: CUDA graphs under every mode, no wait for the device, memory given back."""

import copy
import gc

import pytest
import torch

from mha2mla.modeling.captured import CudaGraphs
from tests.commands import python
from tests.modeling import models
from tests.modeling.test_captured import MODES, Stops
from tests.modeling.test_gpu import batch, make
from tests.ops import noted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
LAYOUTS = ("per-group", "shared", "latent", "kept")
# Weights that outweigh the caches of these tests: pages are kept from call to call.
WIDE = {"intermediate_size": 32_768}


def inputs_of(length: int, *paddings: int) -> dict[str, torch.Tensor]:
    ids, mask, _ = batch(length, *paddings)
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, **options):
    torch.manual_seed(1)
    options = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, **options)


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_mode_says_what_it_says_uncaptured(case):
    """Bit by bit: the same kernels, one sequence or a padded batch, from a first call's graph and from a kept one."""
    model = make(case, **WIDE)
    for inputs in (inputs_of(90, 0), inputs_of(90, 0, 20, 88)):
        for mode, options in MODES.items():
            expected = generate(model, inputs, **options, output_logits=True, capture=False)
            for _ in range(2):
                out = generate(model, inputs, **options, output_logits=True)
                assert torch.equal(out.sequences, expected.sequences), mode
                assert all(map(torch.equal, out.logits, expected.logits)), mode
                assert len(out.past_key_values.captured) == 1 or mode == "ends", mode
                del out


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampling"])
def test_assisted_decoding(case, sampled):
    model, assistant = make(case), make(case)
    inputs = {"input_ids": models.tokens(1, 40).repeat(1, 3).cuda()}
    for drafts in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 5}):
        expected = generate(model, inputs, capture=False, do_sample=sampled, **drafts)
        out = generate(model, inputs, do_sample=sampled, **drafts)
        assert torch.equal(out.sequences, expected.sequences) and len(out.past_key_values.captured) >= 1


@pytest.mark.parametrize("case", LAYOUTS)
def test_logits_are_as_accurate_as_uncached(case):
    """In bfloat16, against float32 without a cache, over the tokens that captured steps chose."""
    model, inputs = make(case), inputs_of(90, 0, 20)
    out = generate(model, inputs, output_logits=True, max_new_tokens=64)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 64, dtype=torch.long, device="cuda")), 1)
    whole = {"input_ids": out.sequences, "attention_mask": mask, "use_cache": False}
    whole["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(**whole).logits[:, 89:-1]
        uncached = model(**whole).logits[:, 89:-1]
    error = models.relative_error(torch.stack(out.logits, 1), exact)
    assert len(out.past_key_values.captured) == 1
    assert error <= 2 * models.relative_error(uncached, exact)


def test_growing_pages_are_captured_anew():
    from mha2mla.modeling import LatentCache

    model, inputs = make("per-group"), inputs_of(60, 0, 7)
    expected = generate(model, inputs, max_new_tokens=150, capture=False)
    cache = LatentCache(model.config, page_size=64)
    out = generate(model, inputs, max_new_tokens=150, past_key_values=cache)
    assert torch.equal(out.sequences, expected.sequences) and cache.capacity == 256


@pytest.mark.parametrize("paddings", [(0,), (0, 20)], ids=["one", "padded"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_no_synchronisation_in_a_captured_step(case, paddings, monkeypatch):
    """In all of forward, which is our part, once the step is recorded; later steps are launched before that."""
    model, steps = make(case), []
    launches = noted(monkeypatch, CudaGraphs, "launch", lambda *_: None)

    def before(module, args):
        steps.append(len(steps))
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 4 else "default")

    def after(module, args, out):
        torch.cuda.set_sync_debug_mode("default")

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        out = generate(model, inputs_of(90, *paddings), max_new_tokens=12)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for hook in hooks:
            hook.remove()
    assert len(steps) == 12 and len(out.past_key_values.captured) == 1 and len(launches) == 10


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_step_that_was_launched_in_vain_is_taken_back(case):
    """The host hears of the end when the step behind it runs; the next call says what it should."""
    model, inputs = make(case), inputs_of(90, 0)
    caches, found = [], []
    for capture in (False, True):
        out = generate(model, inputs, capture=capture, stopping_criteria=[Stops(110)])
        assert out.sequences.shape[1] == 110
        caches.append(out.past_key_values)
        ids = torch.cat((out.sequences, inputs["input_ids"][:, :7]), 1)
        more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found.append(generate(model, more, past_key_values=out.past_key_values, capture=capture).sequences)
    assert torch.equal(*found) and len(caches[1].captured) >= 1
    for mine, other in zip(caches[1].layers, caches[0].layers, strict=True):
        assert torch.equal(mine.cache_seqlens, other.cache_seqlens)
        assert all(map(torch.equal, mine.used(), other.used()))


def test_memory_is_kept_between_calls_and_released():
    model, inputs = make("per-group", **WIDE), inputs_of(90, 0, 20)
    generate(model, inputs, capture=False)
    generate(model, inputs)
    model.release_captured()

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = held()
    generate(model, inputs)
    kept = held()
    assert kept > before
    for _ in range(3):
        generate(model, inputs)
    assert held() == kept
    model.release_captured()
    assert held() == before
    cache = generate(model, inputs).past_key_values
    model.release_captured()
    assert held() > before
    del cache
    assert held() == before


def test_a_captured_step_is_one_launch():
    """Of ten layers, whose kernels an eager step launches one after another."""
    model, inputs = make("per-group", num_hidden_layers=10), inputs_of(90, 0)

    def launches(**options) -> int:
        generate(model, inputs, **options)
        with torch.profiler.profile() as found:
            generate(model, inputs, max_new_tokens=100, **options)
        return sum(event.count for event in found.key_averages() if "LaunchKernel" in event.key)

    assert 2 * launches() < launches(capture=False)


FAILS = """
import warnings
import torch
from tests.modeling import models
from tests.modeling.test_gpu import batch, make

class Reads(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x) * (1.0 if x.sum().item() > -1e30 else 0.0)

model = make("per-group")
model.model.layers[1].mlp.act_fn = Reads()
ids, mask, _ = batch(90, 0, 20)
keys = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
expected = model.generate(ids, capture=False, **keys)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert torch.equal(model.generate(ids, **keys), expected)
    assert torch.equal(model.generate(ids, **keys), expected)
keys |= {"do_sample": True}
for sampler in (model, other := make("shared")):
    torch.manual_seed(3)
    expected = sampler.generate(ids, capture=False, **keys)
    torch.manual_seed(3)
    assert torch.equal(sampler.generate(ids, **keys), expected)
keys |= {"do_sample": False}
said = [str(warning.message) for warning in said if "without captured" in str(warning.message)]
assert len(said) == 1, said
expected = other.generate(ids, capture=False, **keys)
assert torch.equal(other.generate(ids, **keys), expected)
assert other.explain_uncaptured() is None
torch.cuda.empty_cache()
torch.cuda.synchronize()
print("the same, and alive", flush=True)
"""


def test_a_module_that_cannot_be_captured():
    """One warning, the same tokens, and a device that goes on, captures of another model included; in a process of its
    own."""
    done = python(FAILS)
    assert done.returncode == 0 and "the same, and alive" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["mla_reference", "mla_expanded", "mla_paged", "mla_fp8"])
def test_kernels_by_name_are_captured_and_nothing_else(name):
    model, inputs = make("per-group"), inputs_of(90, 0, 20)
    model.config.attention_backend = name
    expected = generate(model, inputs, capture=False)
    out = generate(model, inputs)
    captured = int(name in ("mla_paged", "mla_fp8"))
    assert torch.equal(out.sequences, expected.sequences) and len(out.past_key_values.captured) == captured
