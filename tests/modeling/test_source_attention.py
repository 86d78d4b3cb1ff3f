"""Source models of transformers on the ops here: what sdpa computes, over every cache, or refused by name."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, StaticCache

from mha2mla.modeling.decoder import FusedDecoder, run_source_model
from mha2mla.modeling.source_attention import (
    PagedSource,
    attend,
    explain_window_attention,
    paged_model,
    pages_of,
    warn_where_no_kernel_serves,
    window_attention,
)
from tests.conversion import tiny
from tests.modeling import models

# All that some family's attention has of its own: windows, norms, biases, scales, layers without RoPE, experts.
CASES = ("llama", "smollm3", "mistral-sliding", "qwen2", "qwen3", "phi3", "glm4-no-biases", "olmo2-mha-biases")
CASES += ("seed-oss", "ernie", "apertus", "olmo3-yarn", "gemma3", "mixtral", "qwen2-moe-sliding", "olmoe")
OPTIONS = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}


def source(case: str):
    family, keys = tiny.CASES[case]
    config = tiny.config(family, **keys)
    return models.randomise(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval())


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_and_greedy_tokens_are_those_of_sdpa(case):
    model = source(case)
    ids = tiny.some_tokens()
    mask = models.left_mask(ids.shape[1], 0, 5, 0)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    prompt = {"input_ids": ids[:, :14], "attention_mask": mask[:, :14]}
    wanted = model.generate(**prompt, **OPTIONS)
    model.set_attn_implementation("mha2mla")
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    assert models.relative_error(logits[:, 5:], expected[:, 5:]) < models.TOLERANCE
    for kind in ("dynamic", "static"):
        assert torch.equal(model.generate(**prompt, cache_implementation=kind, **OPTIONS), wanted), kind


@pytest.mark.parametrize("case", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_chunks_of_a_prompt_and_drafts_over_a_cache(case, kind):
    model = source(case)
    ids = tiny.some_tokens()
    mask = models.left_mask(ids.shape[1], 3, 0, 0)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    model.set_attn_implementation("mha2mla")
    cache = kind(config=model.config, **({"max_cache_len": 48} if kind is StaticCache else {}))
    logits = models.logits_of_calls(model, cache, ids, (4, 14, 15, 18, ids.shape[1]), mask)
    assert models.relative_error(logits[:, 3:], expected[:, 3:]) < models.TOLERANCE


def test_memory_of_a_cache_is_paged_or_none():
    values = torch.randn(3, 2, 64, 8)  # as a static cache has it
    keys = torch.randn(3, 64, 2, 8).transpose(1, 2)  # heads of a token side by side
    for x in (values, keys):
        pages, _, table = pages_of(x, x)
        assert pages.data_ptr() == x.data_ptr()
        assert torch.equal(pages[table.long()].flatten(1, 2), x.transpose(1, 2))
    assert pages_of(keys, values) is None  # sequences lie in other distances
    assert pages_of(values[:, :, :60], values[:, :, :60]) is None
    assert pages_of(values[:, :, :48], values[:, :, :48])[0].shape[1] == 16


def test_shapes_without_a_kernel_are_said_once():
    device = torch.device("cuda")
    with pytest.warns(UserWarning, match="attends in plain torch, slowly: qk_head_dim is 12; TileLang kernels take"):
        warn_where_no_kernel_serves(6, 2, 12, 12, torch.bfloat16, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_where_no_kernel_serves(6, 2, 12, 12, torch.bfloat16, device)
        warn_where_no_kernel_serves(6, 2, 64, 64, torch.bfloat16, device)


def random(*shape):
    return torch.randn(2, 4, *shape)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"softcap": 50.0}, "softcap is 50.0 and attn_implementation 'mha2mla'"),
        ({"dropout": 0.1}, "dropout is 0.1"),
        ({"output_attentions": True}, "output_attentions is True"),
        ({"s_aux": torch.zeros(4)}, "s_aux is given"),
        ({"is_causal": False}, "is_causal is False"),
        ({"attention_mask": torch.ones(2, 1, 3, 3, dtype=torch.bool)}, r"attention_mask is torch.bool \(2, 1, 3, 3\)"),
    ],
)
def test_what_the_ops_cannot_do_is_refused_by_name(given, named):
    arguments = {"attention_mask": None, **given}
    with pytest.raises(ValueError, match=named):
        attend(torch.nn.Module(), random(3, 8), random(3, 8), random(3, 8), **arguments)


@torch.no_grad()
def test_models_and_masks_that_need_more_are_refused():
    keys = {**models.SIZES, "head_dim": 8, "attn_implementation": "mha2mla"}
    with pytest.raises(ValueError, match="softcap is 50.0"):
        AutoModelForCausalLM.from_config(Gemma2Config(**keys)).eval()(models.tokens(1, 5))
    model = models.source_model("llama")
    model.set_attn_implementation("mha2mla")
    ids = models.tokens(1, 6)
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
    with pytest.raises(ValueError, match="hides tokens between visible ones"):
        model(ids, attention_mask=torch.tensor([[1, 1, 0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="output_attentions is True"):
        model(ids, output_attentions=True)


def test_a_backward_pass_is_refused():
    model = models.source_model("llama")
    model.set_attn_implementation("mha2mla")
    loss = model(models.tokens(1, 6)).logits.sum()
    with pytest.raises(ValueError, match="keeps no gradients; expected 'sdpa'"):
        loss.backward()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_ragged_batches_equal_each_sequence_alone(case):
    model = source(case)
    ids = tiny.some_tokens()
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("mha2mla")
    paged = paged_model(model)
    cache = paged.paged_cache(num_pages=12, page_size=16)
    heads, width = model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
    assert cache.nbytes == 12 * 16 * 2 * heads * width * 4 * model.config.num_hidden_layers
    errors = models.batch_errors(paged, cache, ids, expected, ({0: 11}, {0: 1, 1: 12}, {1: 3, 0: 6}))
    assert max(errors) < models.TOLERANCE


@pytest.mark.parametrize("case", ["llama-biases", "mistral-sliding", "qwen2", "qwen3"])
@torch.no_grad()
def test_known_families_are_fused_without_hooks(case):
    model = source(case)
    model.set_attn_implementation("mha2mla")
    paged, ids = PagedSource(model), tiny.some_tokens()[0, :9]
    logits, states = [], []
    for hooked in (False, True):
        if hooked:
            model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)
            model.model.norm.register_forward_hook(lambda *_: None)
        cache = paged.paged_cache(2, 16)
        batch = cache.extend({cache.open(): len(ids)})
        step = cache.step(batch)
        states.append(run_source_model(FusedDecoder.prepare_source(model), ids[None], step))
        logits.append(paged.forward_batch(ids, step, all_logits=True))
    assert states[0] is not None and states[1] is None
    assert models.relative_error(logits[0], logits[1]) < models.TOLERANCE


@torch.no_grad()
def test_a_paged_source_names_what_it_needs():
    model = models.source_model("llama")
    with pytest.raises(ValueError, match="attn_implementation 'sdpa'; expected 'mha2mla'"):
        PagedSource(model)
    model.set_attn_implementation("mha2mla")
    with pytest.raises(ValueError, match="attention backend 'mla_paged' refuses: it serves MLAGeometry"):
        PagedSource(model, "mla_paged").paged_cache(4)
    paged = PagedSource(model)
    cache = paged.paged_cache(4, 16)
    batch = cache.extend({cache.open(): 3})
    with pytest.raises(ValueError, match=r"input_ids.shape is \(4,\); expected \(3,\)"):
        paged.forward_batch(torch.zeros(4, dtype=torch.long), cache.step(batch))
    converted = models.mla_model()
    assert paged_model(converted) is converted


@pytest.mark.parametrize("case", ["llama-longrope", "phi3-longrope", "dynamic"])
def test_tables_by_length_are_refused_in_batches(case):
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    family, keys = tiny.CASES.get(case, ("llama", dynamic))
    model = AutoModelForCausalLM.from_config(tiny.config(family, **keys), attn_implementation="mha2mla")
    with pytest.raises(ValueError, match="'longrope' or 'dynamic'.*one table for all sequences"):
        PagedSource(model.eval())


@pytest.mark.parametrize("scaling", [None, 0.2])
def test_window_attention_is_causal_sdpa(scaling):
    query, key = (torch.randn(2, 3, 20, 16, dtype=torch.float64).requires_grad_() for _ in range(2))
    value = torch.randn(2, 3, 20, 8, dtype=torch.float64).requires_grad_()
    mine = window_attention(query, key, value, scaling)
    sdpa = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    assert torch.allclose(mine, sdpa.transpose(1, 2))
    weight = torch.randn_like(mine)
    for one, other in zip(
        torch.autograd.grad((mine * weight).sum(), (query, key, value)),
        torch.autograd.grad((sdpa.transpose(1, 2) * weight).sum(), (query, key, value)),
        strict=True,
    ):
        assert torch.allclose(one, other)


def test_explain_names_lengths_that_differ():
    assert "3 queries and 5 keys" in explain_window_attention(torch.bfloat16, torch.device("cpu"), 3, 5, 2, 8, 8)
