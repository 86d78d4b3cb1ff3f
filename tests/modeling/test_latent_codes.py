"""Latents cached as codes: one model over every cache, in any chunks, of the bytes that its config says."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, DynamicCache

from mha2mla.geometry import MLAGeometry
from mha2mla.loop import Loop, Sampling
from mha2mla.modeling import LatentCache
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.batch import UniformBatch
from mha2mla.modeling.config import cache_bytes
from mha2mla.modeling.registry import AttentionConstants
from tests.few import each
from tests.modeling import models
from tests.ops import Calls

EXACT = 1e-6  # in float64, but norms are float32
CHUNKS = {"whole": (29,), "chunks": (15, 16, 17, 22, 29), "tokens": tuple(range(1, 30))}


def coded_model(case="latent", bits=4, **keys):
    """In float64, so that no rounding of another order of sums moves a code; centers where latents are."""
    model = models.mla_model(case, latent_bits=bits, **keys).double()
    for layer in model.model.layers:
        layer.self_attn.latent_centers.normal_(std=0.5)
    return model


def unquantised(model, ids):
    model.config.latent_bits, bits = 16, model.config.latent_bits
    logits = model(ids, use_cache=False).logits
    model.config.latent_bits = bits
    return logits


@each("form_case, chunks", itertools.product(models.FORMS, models.LATENT_GEOMETRIES), CHUNKS)
@torch.no_grad()
def test_chunks_of_any_size_are_one_model(form_case, chunks):
    """Equal to a pass without a cache, and to that over transformers' own: attention reads codes everywhere."""
    form, case = form_case
    model, ids = coded_model(case, attention_backend=models.FORMS[form]), models.tokens(3, 29)
    expected = model(ids, use_cache=False).logits
    assert models.relative_error(expected, unquantised(model, ids)) > 1e-3
    cache = LatentCache(model.config, page_size=16)
    assert models.relative_error(models.logits_of_calls(model, cache, ids, CHUNKS[chunks]), expected) < EXACT
    assert {name: each.dtype for name, each in cache.layers[0].tensors.items()} == {"latent_cache": torch.uint8}
    assert cache.nbytes == 3 * cache.capacity * model.config.cache_bytes_per_token(8)
    assert (
        models.relative_error(
            models.logits_of_calls(model, DynamicCache(config=model.model.config), ids, (15, 29)), expected
        )
        < EXACT
    )


@pytest.mark.parametrize("keys", ["none", "bfloat16"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
@torch.no_grad()
def test_padding_static_caches_and_kept_keys(bits, static, keys):
    """Kept rotary keys are those of the codes."""
    model, ids = coded_model(bits=bits, rotary_key_cache=keys), models.tokens(3, 29)
    mask = models.left_mask(29, 0, 6, 13)
    rows = [model(ids[i : i + 1, (mask[i] == 0).sum() :], use_cache=False).logits[0] for i in range(3)]
    cache = LatentCache(model.config, max_cache_len=29 if static else None, page_size=16)
    found = models.logits_of_calls(model, cache, ids, CHUNKS["chunks"], mask)[mask.bool()]
    assert models.relative_error(found, torch.cat(rows)) < EXACT
    assert ("rope_cache" in cache.layers[0].tensors) == (keys == "bfloat16")
    assert cache.nbytes == 3 * 32 * model.config.cache_bytes_per_token(8)


@pytest.mark.parametrize("case", ["latent", "latent qk-norm", "latent some sliding"])
@torch.no_grad()
def test_paged_batches_share_forked_codes(case):
    """Prompts in chunks beside decodes, a fork in the middle of a page, a crop."""
    model, ids = coded_model(case), models.tokens(2, 60)
    ids[1, :20] = ids[0, :20]
    expected = model(ids, use_cache=False).logits
    cache = model.paged_cache(num_pages=20, page_size=16)
    assert cache.nbytes == 20 * 16 * model.config.cache_bytes_per_token(8)

    def check(*sequences: int, part: slice) -> None:
        new = {sequence: ids[row, part] for row, sequence in enumerate(sequences)}
        for row, found in enumerate(models.batch_logits(model, cache, new).values()):
            assert models.relative_error(found, expected[row, part]) < EXACT

    first = cache.open()
    check(first, part=slice(0, 20))
    second = cache.fork(first)
    for start, stop in ((20, 41), (41, 42), (42, 60)):
        check(first, second, part=slice(start, stop))
    cache.crop(first, 33)
    check(first, part=slice(33, 60))


@torch.no_grad()
def test_beams_and_the_loop_generate_alike():
    """Greedy tokens of a loop are those of ``generate``; beams over codes are those over transformers' own cache."""
    model, prompt = coded_model(bits=3), models.tokens(1, 11)
    options = {"max_new_tokens": 12, "do_sample": False}
    greedy = model.generate(prompt, **options)[0, 11:].tolist()
    loop = Loop(model, num_pages=8, page_size=16, max_length=96)
    assert loop.cache_bytes_per_token == model.config.cache_bytes_per_token(8)
    request = loop.add(prompt[0].tolist(), Sampling(12))
    loop.run()
    assert request.tokens[-12:] == greedy
    beams = {**options, "num_beams": 3, "num_return_sequences": 2}
    plain = model.generate(prompt, **beams, past_key_values=DynamicCache(config=model.model.config))
    assert torch.equal(model.generate(prompt, **beams), plain)


def test_gradients_pass_codes_straight_through():
    attention = coded_model(bits=3).model.layers[0].self_attn
    latent = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    seen, weight = attention._read_latent(latent, None), torch.randn(2, 5, 24, dtype=torch.float64)
    (seen * weight).sum().backward()
    assert torch.equal(latent.grad, weight)
    with torch.no_grad():
        assert torch.equal(attention._read_latent(latent, None), seen) and not torch.equal(seen, latent)
    model, ids = coded_model(), models.tokens(2, 9)
    grads = []
    for options in ({"use_cache": False}, {"use_cache": True}):  # a first call keeps gradients
        model.zero_grad()
        model(ids, labels=ids, **options).loss.backward()
        grads.append(model.model.layers[0].self_attn.kv_a_proj.weight.grad.clone())
    assert models.relative_error(grads[1], grads[0]) < EXACT


def test_bytes_are_of_codes_scales_and_kept_keys():
    config = models.mla_config("latent per layer", latent_bits=[4, 3], kv_lora_rank=[64, 40], qk_rope_head_dim=[4, 6])
    each = [64 * 4 // 8 + 4, 64 * 3 // 8 + 4]  # 40 are padded to 64
    assert config.cache_bytes_per_token(2) == sum(each) and cache_bytes(config, 5, 2) == 5 * sum(each)
    config.rotary_key_cache = "bfloat16"
    assert config.cache_bytes_per_token(2) == sum(each) + 2 * (4 + 6)
    config.latent_bits = 16
    assert config.cache_bytes_per_token(2) == 2 * (64 + 40 + 4 + 6)


@pytest.mark.parametrize("bits", [5, 0, "4"])
def test_bits_that_no_code_has_are_refused(bits):
    with pytest.raises((ValueError, TypeError), match="latent_bits"):
        models.mla_config("latent", latent_bits=bits)


@torch.no_grad()
def test_the_folders_file_reads_the_latents_themselves():
    model, ids = coded_model(), models.tokens(2, 20)
    file = models.as_file(model).double()
    assert models.relative_error(file(ids, use_cache=True).logits, unquantised(model, ids)) < EXACT


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["bfloat16", "none"])
@pytest.mark.parametrize("bits", [3, 4, 8])
@torch.no_grad()
def test_steps_on_a_gpu_read_the_same_codes(bits, keys):
    """Over kept and over computed keys, token by token, by the kernels over codes."""
    widths = {"kv_lora_rank": 64, "qk_rope_head_dim": 8}
    model = coded_model(bits=bits, rotary_key_cache=keys, **widths).to("cuda", torch.bfloat16)
    ids = models.tokens(3, 29).cuda()
    found = models.logits_of_calls(model, LatentCache(model.config, page_size=16), ids, CHUNKS["tokens"])
    assert models.relative_error(found.float(), model(ids, use_cache=False).logits.float()) < 0.2


@pytest.mark.parametrize("kept", [True, False])
@torch.no_grad()
def test_steps_call_the_kernel_over_codes(kept):
    """Of fake CUDA tensors: a decode is one op over the codes, and no copy of them."""
    geometry = MLAGeometry(6, 1, 64, 8, 8, 16, 2, rope_from_latent=True, latent_bits=4)
    geometry = geometry.with_stored_keys if kept else geometry
    backend, constants = ATTENTION_BACKENDS.get("mla_paged"), AttentionConstants(geometry, softmax_scale=0.25)
    with FakeTensorMode(), torch.device("cuda"):
        shapes = {"q_nope": (1, 6, 8), "q_pe": (1, 6, 8), "latent": (1, 64), "k_up": (2, 8, 64), "v_up": (2, 16, 64)}
        shapes |= {"latent_centers": (2, 64)} | ({} if kept else {"rope_weight": (8, 64), "rope_bias": (8,)})
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        tensors["inv_freq"] = torch.empty(1, 4).unbind()  # indexing a fake tensor asks CUDA
        cache = backend.cache_layout(geometry, 16, torch.bfloat16).make(9, "cuda")
        table, lengths = torch.empty(1, 4, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
        planner = ATTENTION_BACKENDS.get("mla_reference")  # kernels' plans count multiprocessors
        plan = planner.plan_decode(cache, table, 1, constants, torch.bfloat16)
        batch = UniformBatch(lengths, lengths, table, lengths, None)
        with Calls() as calls:
            backend.attend(tensors, cache, batch, plan, constants)
    name = "mla_decode_codes" if kept else "mla_decode_latent_codes"
    assert f"{name}_out" in calls and "read_codes" not in calls


@torch.no_grad()
def test_codes_need_the_centers_of_their_checkpoint(tmp_path):
    coded_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, latent_bits=16)
    model.config.latent_bits = 4
    for keys in ({"use_cache": False}, {"past_key_values": DynamicCache(config=model.model.config)}, {}):
        with pytest.raises(ValueError, match="loaded with latent_bits=16, without the centers of codes"):
            model(models.tokens(1, 9), **keys)
    with pytest.raises(ValueError, match="loaded with latent_bits=16, without the centers of codes"):
        models.batch_logits(model, cache := model.paged_cache(2, 16), {cache.open(): models.tokens(1, 9)[0]})
