"""The model on a GPU: the TileLang kernel behind it, CUDA graphs, compilation, no look at the device."""

import copy
from contextlib import nullcontext

import pytest
import torch

from mha2mla.modeling import LatentCache, MHA2MLAForCausalLM
from tests.commands import python
from tests.gpu import graph_of, no_waits
from tests.modeling import models

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CASES = {
    "per-group": {"num_rope_heads": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48},
    "shared": {"num_rope_heads": 1, "kv_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64},
    "sliding": {"num_rope_heads": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48},
    "full rank": {"num_rope_heads": 2, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 0},
    "latent": {"kv_lora_rank": 96, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64},
    "latent sliding": {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 0},
}
CASES["latent by query head"] = {**CASES["latent"], "num_up_projection_heads": 6}  # as gradient steps fit them
CASES["kept"] = {**CASES["latent"], "rotary_key_cache": "bfloat16"}
CASES["kept in 8 bits"] = {**CASES["latent"], "rotary_key_cache": "int8"}
for case, keys in CASES.items():
    if case.startswith(("latent", "kept")):
        keys |= {"num_rope_heads": 1, "rope_from_latent": True}


@pytest.fixture(params=CASES)
def model(request) -> MHA2MLAForCausalLM:
    return make(request.param)


def make(case: str, **source_keys) -> MHA2MLAForCausalLM:
    """bfloat16, two layers, 6 query and 2 kv heads of width 64; the kernel serves it."""
    keys = {"hidden_size": 384, "head_dim": 64, "initializer_range": 0.05, **source_keys}
    sliding = case.endswith("sliding")
    if sliding:
        source = models.source_config("mistral-sliding", sliding_window=70, **keys)
    else:
        source = models.source_config("llama", **keys)
    config = models.mla_config(
        "sliding" if sliding else "per-group",
        source_config=source.to_dict(),
        v_head_dim=64,
        softmax_scale=0.125,
        **CASES[case],
    )
    made = models.randomise(MHA2MLAForCausalLM(config).eval()).to("cuda", torch.bfloat16)
    assert {line.backend for line in made.attention_report()} == {"mla_paged"}
    return made


def batch(length: int, *paddings: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and positions of a left-padded batch."""
    ids, mask = models.tokens(len(paddings), length).cuda(), models.left_mask(length, *paddings).cuda()
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def decode(model, inputs, prefill: int, form: str, step: int = 1, **cache_keys) -> torch.Tensor:
    """Logits of all tokens behind ``prefill``, ``step`` of them at a time."""
    model.config.attention_backend = {**models.FORMS, "by name": "mla_paged"}[form]
    cache, (ids, mask, position) = LatentCache(model.config, **cache_keys), inputs
    stops = range(prefill, ids.shape[1] + step, step)
    logits = models.logits_of_calls(model, cache, ids, stops, mask, position)
    model.config.attention_backend = None
    return logits[:, prefill:]


@pytest.mark.parametrize("step", [1, 2, 5, 8])
def test_the_kernel_is_as_right_as_the_expanded_form(model, step):
    """Both in bfloat16, against float32; lengths cross pages and tiles, one sequence is mostly padding."""
    inputs = batch(150 + 2 * 40, 0, 7, 190)
    exact = decode(copy.deepcopy(model).float(), inputs, 150, "expanded", step)
    errors = {
        form: models.relative_error(decode(model, inputs, 150, form, step)[:2], exact[:2])
        for form in ("auto", "by name", "expanded")
    }
    assert max(errors["auto"], errors["by name"]) < 1.5 * errors["expanded"] < 0.1
    # Padding is not attended to: the third sequence's last tokens.
    assert models.relative_error(decode(model, inputs, 150, "auto", step)[2, 45:], exact[2, 45:]) < 0.1


def test_dynamic_is_static(model):
    inputs = batch(90, 0, 20)
    assert torch.equal(decode(model, inputs, 60, "auto"), decode(model, inputs, 60, "auto", max_cache_len=128))


@torch.no_grad()
def test_a_step_in_a_cuda_graph(model):
    """Captured at one length, replayed at others, left padding included."""
    ids, mask, position = batch(90, 0, 20)
    expected = decode(model, (ids, mask, position), 60, "auto", max_cache_len=128)
    cache = LatentCache(model.config, max_cache_len=128)
    model(ids[:, :60], attention_mask=mask[:, :60], position_ids=position[:, :60], past_key_values=cache)
    token, here = ids[:, 60:61].clone(), position[:, 60:61].clone()
    whole = model.create_masks_for_generate(model.config, token, mask, cache)

    def step() -> torch.Tensor:
        return model(token, attention_mask=whole, position_ids=here, past_key_values=cache).logits

    for _ in range(2):
        step()
        cache.crop(-1)
    graph, captured = graph_of(step)
    logits = []
    for t in range(60, 90):
        token.copy_(ids[:, t : t + 1])
        here.copy_(position[:, t : t + 1])
        graph.replay()
        logits.append(captured.clone())
    assert torch.equal(torch.cat(logits, dim=1), expected)
    assert cache.layers[0].cache_seqlens.tolist() == [90, 90]


@pytest.mark.parametrize("max_cache_len", [None, 128])
@torch.no_grad()
def test_no_synchronisation_in_a_step(model, max_cache_len):
    ids, mask, position = batch(62, 0, 20)
    cache = LatentCache(model.config, max_cache_len=max_cache_len)
    for start, stop in ((0, 60), (60, 61), (61, 62)):
        part = slice(start, stop)
        with no_waits() if start == 61 else nullcontext():
            model(ids[:, part], attention_mask=mask[:, :stop], position_ids=position[:, part], past_key_values=cache)


@torch.no_grad()
def test_one_full_graph_compiled(model):
    """reduce-overhead: fused, and captured in CUDA graphs by the compiler."""
    ids, _, position = batch(75, 0, 0)
    expected = decode(model, (ids, torch.ones_like(ids), position), 60, "auto")
    cache = LatentCache(model.config, max_cache_len=128)
    model(ids[:, :60], past_key_values=cache)
    step = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    logits = [
        step(
            input_ids=ids[:, t : t + 1].clone(), position_ids=position[:, t : t + 1].clone(), past_key_values=cache
        ).logits.clone()
        for t in range(60, 75)
    ]
    # Fusion rounds elsewhere.
    assert models.relative_error(torch.cat(logits, dim=1), expected) < 0.05
    torch._dynamo.reset()


def test_generate_with_a_static_cache(model):
    ids, mask, _ = batch(40, 0, 11)
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(ids, output_logits=True, **options)
    eager = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(eager.sequences, expected.sequences)
    # Compiled, as transformers does by itself: rounding may turn a close call, so the first logits are compared.
    compiled = model.generate(ids, cache_implementation="static", output_logits=True, **options)
    assert models.relative_error(compiled.logits[1], expected.logits[1]) < 0.05
    torch._dynamo.reset()


@torch.no_grad()
def test_flex_attention_compiled(model):
    """By transformers; where keys are wider than values, and over a static cache."""
    ids, mask, position = batch(70, 0, 20)
    keep = {"attention_mask": mask, "position_ids": position}
    expected = model(ids, **keep, use_cache=False).logits
    step = decode(model, (ids, mask, position), 60, "expanded", max_cache_len=128)
    model.set_attn_implementation("flex_attention")
    assert models.relative_error(model(ids, **keep, use_cache=False).logits[0], expected[0]) < 0.05
    flex = decode(model, (ids, mask, position), 60, "expanded", max_cache_len=128)
    assert models.relative_error(flex, step) < 0.05
    torch._dynamo.reset()


ONE_TOKEN_STEP = """
import sys, torch
from tests.modeling import models
from mha2mla.modeling import LatentCache
case, hole, gap = sys.argv[1], slice(*map(int, sys.argv[2:4])), int(sys.argv[4])
model = models.mla_model(case, attention_backend="mla_reference").cuda()
ids, mask = models.tokens(2, 12).cuda(), models.left_mask(12, 0, 4 if gap else 0).cuda()
positions = (mask.cumsum(1) - 1).clamp(min=0)
with torch.no_grad():
    cache = LatentCache(model.config)
    model(ids[:, :11], attention_mask=mask[:, :11], position_ids=positions[:, :11], past_key_values=cache)
    model(ids[:, 11:], attention_mask=mask, position_ids=positions[:, 11:], past_key_values=cache)
    torch.cuda.synchronize()
    cache.crop(-1)
    print("no hole, no error", flush=True)
    mask[1, hole] = 0
    model(ids[:, 11:], attention_mask=mask, position_ids=positions[:, 11:] + gap, past_key_values=cache)
    torch.cuda.synchronize()
print("not refused", flush=True)
"""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("no nope,4,6,0", "attention_mask hides tokens between visible ones"),
        ("latent,0,0,1", "position_ids do not count on from each row's first visible token"),
    ],
    ids=["hole", "gap"],
)
def test_device_refuses_a_hole_in_a_one_token_step(wrong, message):
    """In a process of its own, whose CUDA context does not survive it."""
    done = python(ONE_TOKEN_STEP, *wrong.split(","))
    assert done.returncode != 0 and "no hole, no error" in done.stdout and "not refused" not in done.stdout
    assert message in done.stderr


@pytest.mark.parametrize("case", models.LATENT_GEOMETRIES)
def test_the_reference_generates_as_no_cache_does(case):
    """float32, where no kernel serves: the same greedy tokens over what is cached, padded rows too."""
    model = models.mla_model(case, attention_backend="mla_reference").cuda()
    ids, mask, _ = batch(20, 0, 9)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", disable_compile=True, **options), expected)


@pytest.mark.parametrize("case", ["per-group", "shared", "latent"])
@torch.no_grad()
def test_window_kernels_are_as_accurate_as_masks(case):
    """A window of the user's, with attention sinks: prompts, drafts and single tokens of a padded batch; then a ragged
    batch; then captured steps of generate."""
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
