"""Ragged batches on a GPU: TileLang behind every length, CUDA graphs with padding rows, no look at the device."""

import copy

import pytest
import torch

from mha2mla.modeling import MHA2MLAForCausalLM, SequenceBatch
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.registry import AttentionConstants, GQAGeometry
from tests.gpu import graph_of, no_waits
from tests.modeling import models
from tests.modeling.test_backends import AttentionLayer
from tests.modeling.test_gpu import CASES, make

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(params=["per-group", "latent", "kept"])
def model(request) -> MHA2MLAForCausalLM:
    return make(request.param)


@torch.no_grad()
def steps(model, ids, plan) -> torch.Tensor:
    """Logits of every token of ids [sequences, T] fed as ``plan`` says: per step, new tokens of each sequence."""
    cache = model.paged_cache(num_pages=24)
    sequences = [cache.open() for _ in ids]
    out = [[] for _ in ids]
    done = [0] * len(ids)
    for counts in plan:
        batch = cache.extend(dict(zip(sequences, counts, strict=True)))
        new = [ids[i, done[i] : done[i] + count] for i, count in enumerate(counts)]
        step = cache.step(batch)
        with no_waits():
            logits = model.forward_batch(batch.flatten(new), step, all_logits=True)
        for i, mine in enumerate(batch.unflatten(logits)):
            out[i].append(mine)
            done[i] += counts[i]
    assert done == [ids.shape[1]] * len(ids)
    return torch.stack([torch.cat(mine) for mine in out])


PLAN = [(150, 0, 40), (1, 130, 1), (1, 0, 100), (48, 70, 59)]


@pytest.mark.parametrize("name", ["mla_paged", "mla_fp8"])
@torch.no_grad()
def test_mixed_steps_are_as_right_as_the_expanded_form(model, name):
    model.config.attention_backend = name
    ids = models.tokens(3, 200).cuda()
    exact = copy.deepcopy(model).float()(ids, use_cache=False).logits
    expanded = models.relative_error(model(ids, use_cache=False).logits, exact)
    error = models.relative_error(steps(model, ids, PLAN), exact)
    assert error < (1.5 * expanded if name == "mla_paged" else 0.2)


@torch.no_grad()
def test_decode_step_in_a_cuda_graph_with_padding(model):
    """Captured over padding alone; replayed for two sequences, then three; nobody else's page is touched."""
    ids = models.tokens(3, 90).cuda()
    cache = model.paged_cache(num_pages=9)
    first, second, third = (cache.open() for _ in range(3))
    model.forward_batch(ids[:, :80].flatten(), cache.step(cache.extend(dict.fromkeys((first, second, third), 80))))
    largest = SequenceBatch.build([], [], [], 64, max_pages=3, num_sequences=4, device="cuda")
    step, token = cache.step(largest), torch.zeros(4, dtype=torch.long, device="cuda")

    def run():
        step.refresh()
        return model.forward_batch(token, step)

    run()
    graph, captured = graph_of(run)
    for t, sequences in ((80, (first, third)), (81, (third, first)), (80, (second,))):
        before = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in cache.tensors]
        batch = cache.extend(dict.fromkeys(sequences, 1), max_pages=3, num_sequences=4)
        new = batch.flatten([ids[s, t : t + 1] for s in sequences])
        step.load(batch)
        token.copy_(new)
        graph.replay()
        written = batch.slots[batch.slots >= 0].long()
        assert len(written) == len(sequences)
        for tensors, old in zip(cache.tensors, before, strict=True):
            for name, tensor in tensors.items():
                changed = (tensor != old[name]).flatten(2).any(-1).flatten()
                assert not changed.index_fill(0, written, False).any()
        expected = model(ids[:, : t + 1], use_cache=False).logits[:, -1]
        for row, index in enumerate(batch.order.tolist()):
            if index >= 0:
                assert models.relative_error(captured[row], expected[sequences[index]]) < 0.03


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("mla_paged", "per-group"),
        ("mla_paged", "latent"),
        ("mla_fp8", "per-group"),
        ("mla_fp8", "latent"),
        ("gqa_paged", ""),
    ],
)
@torch.no_grad()
def test_a_layer_compiles_with_inductor(name, case):
    """fullgraph, mutated caches included; another mix takes the same graph."""
    backend = ATTENTION_BACKENDS.get(name)
    geometry = GQAGeometry(8, 2, 64, 64) if name == "gqa_paged" else models.mla_config(
        source_config=models.source_config("llama", hidden_size=384, head_dim=64).to_dict(), v_head_dim=64,
        **CASES[case],
    ).layer_geometry(0)  # fmt: skip
    layer = AttentionLayer(backend, AttentionConstants(geometry, 0.125), "cuda")
    layer.inv_freq.copy_(10.0 ** -torch.rand(layer.inv_freq.shape))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    heads = geometry.num_attention_heads
    for lengths, cached in (([1, 30, 100], [200, 100, 5]), ([1, 1, 3], [63, 64, 70])):
        n, pages = sum(lengths), [range(i * 5, i * 5 + 5) for i in range(len(lengths))]
        batch = SequenceBatch.build(lengths, cached, pages, 64, device="cuda")
        if name == "gqa_paged":
            shapes = {"query": (n, heads, 64), "key": (n, 2, 64), "value": (n, 2, 64)}
        else:
            nope, rope, width = geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, geometry.kv_lora_rank
            shapes = {
                "q_nope": (n, heads, nope), "q_pe": (n, heads, rope), "latent": (n, width), "k_up": (2, nope, width),
                "v_up": (2, 64, width),
            }  # fmt: skip
            alone = geometry.rope_from_latent
            shapes |= {"rope_weight": (rope, width), "rope_bias": (rope,)} if alone else {"k_pe": (n, 2, rope)}
        tensors = {key: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for key, shape in shapes.items()}
        cache = backend.cache_layout(geometry, 64, torch.bfloat16).make(15, "cuda")
        for tensor in cache.values():
            tensor.copy_(torch.rand(tensor.shape))
        mine = {key: tensor.clone() for key, tensor in cache.items()}
        plan = backend.plan(cache, batch, layer.constants, torch.bfloat16)
        expected = layer(tensors, cache, batch, plan)
        assert torch.equal(compiled(tensors, mine, batch, plan), expected) and expected.any()
        assert all(torch.equal(mine[key].float(), cache[key].float()) for key in cache)
    torch._dynamo.reset()
