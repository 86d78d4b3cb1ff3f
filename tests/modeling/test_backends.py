"""Every attention backend behind one layer: compiled as one graph, exported with dynamic shapes, the same numbers."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.batch import SequenceBatch
from mha2mla.modeling.cache_layout import quantizer_of
from mha2mla.modeling.registry import AttentionConstants, GQAGeometry
from tests.few import few

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
STORED, LATENT = MLAGeometry(6, 2, 16, 8, 8, 16, 2), MLAGeometry(6, 1, 16, 8, 8, 16, 2, rope_from_latent=True)
CODES = replace(LATENT, latent_bits=4)
PAGE, PAGES = 16, 19
CASES = [
    (ATTENTION_BACKENDS.get(name), geometry)
    for name, geometry in (
        ("mla_paged", STORED),
        ("gqa_paged", GQAGeometry(6, 2, 16, 8)),
        ("mla_fp8", LATENT),
        ("mla_paged", LATENT),
        ("mla_reference", CODES),
        ("mla_fp8", STORED),
        ("mla_fp8_reference", STORED),
        ("mla_reference", LATENT),
        ("gqa_reference", GQAGeometry(6, 2, 16, 8)),
    )
]
each_case = few("backend, geometry", CASES, count=5, ids=lambda value: getattr(value, "name", str(value)))


class AttentionLayer(nn.Module):
    """One layer's attention by a backend: to be traced and exported."""

    def __init__(self, backend, constants, device="cpu"):
        super().__init__()
        self.backend, self.constants = backend, constants
        geometry = constants.geometry
        heads, width = (1, geometry.qk_head_dim) if isinstance(geometry, GQAGeometry) else (
            geometry.num_rope_heads, geometry.qk_rope_head_dim
        )  # fmt: skip
        self.register_buffer("inv_freq", torch.zeros(heads, width // 2, device=device))

    def forward(self, tensors, cache, batch, plan):
        tensors = {**tensors, **dict(self.named_buffers())}
        rotated = self.backend.append(tensors, cache, batch, self.constants)
        return self.backend.attend({**tensors, **rotated}, cache, batch, plan, self.constants)


def batches():
    """A mix; another mix of other lengths; decodes alone."""
    table = [range(0, 4), range(4, 6), range(6, 9), range(9, 12)]
    return [
        # No two sizes alike in the first: torch takes those for one and the same symbol.
        SequenceBatch.build(lengths, cached, table[: len(lengths)], PAGE, max_pages=7)
        for lengths, cached in (([1, 20, 3, 12], [50, 3, 30, 30]), ([2, 9, 30], [11, 0, 5]), ([1, 1], [20, 7]))
    ]


def layer_of(backend, geometry):
    layer = AttentionLayer(backend, AttentionConstants(geometry, softmax_scale=0.25))
    layer.inv_freq.copy_(10.0 ** -torch.rand(layer.inv_freq.shape))
    return layer


def arguments(backend, geometry, batch):
    """Queries, keys, values, weights; and a cache of random tokens."""
    n, unused = batch.num_tokens, set()
    if backend.geometry is GQAGeometry:
        shapes = {"query": (n, 6, 16), "key": (n, 2, 16), "value": (n, 2, 8)}
    else:
        shapes = {"q_nope": (n, 6, 8), "q_pe": (n, 6, 8), "k_pe": (n, 2, 8), "latent": (n, 16)}
        shapes |= {"k_up": (2, 8, 16), "v_up": (2, 16, 16), "rope_weight": (8, 16), "rope_bias": (8,)}
        shapes |= {"latent_centers": (2, 16)}
        unused = {"k_pe"} if geometry.rope_from_latent else {"rope_weight", "rope_bias"}
        unused |= set() if geometry.has_codes else {"latent_centers"}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items() if name not in unused}
    assert {*tensors, *unused, "inv_freq"} == {*backend.per_token, *backend.weights}
    cache = backend.cache_layout(geometry, PAGE, torch.float32).make(PAGES)
    for cached in cache.values():
        rows = torch.rand(*cached.shape[:2], 16) + 0.1 if cached.dtype == torch.uint8 else None
        cached.copy_(torch.rand(cached.shape) + 0.1 if rows is None else quantizer_of(geometry).encode(rows))
    return tensors, cache


def copies(cache):
    return {name: tensor.clone() for name, tensor in cache.items()}


@each_case
def test_one_full_graph_for_any_mix(backend, geometry):
    """torch.compile(fullgraph=True): what the host decides stays behind the op; sizes become symbols, once."""
    layer = layer_of(backend, geometry)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for batch in batches():
        tensors, cache = arguments(backend, geometry, batch)
        mine = copies(cache)
        plan = backend.plan(cache, batch, layer.constants, torch.float32)
        expected = layer(tensors, cache, batch, plan)
        assert torch.equal(compiled(tensors, mine, batch, plan), expected) and expected.any()
        for name in cache:
            assert torch.equal(mine[name].float(), cache[name].float())
        graphs.append(counter.frame_count)  # dynamo may trace the first twice
    assert graphs == graphs[:1] * 3


@each_case
def test_export_with_dynamic_shapes(backend, geometry):
    """One exported program serves other numbers of sequences, tokens and pages."""
    layer = layer_of(backend, geometry)
    table = [range(0, 4), range(4, 6), range(6, 9), range(9, 12)]

    def decodes(lengths, count, **options):
        return SequenceBatch.build([1] * count, lengths, table[:count], PAGE, **options)

    first, second = decodes([20, 7, 33], 3), decodes([5, 9, 2, 40], 4, max_pages=6)
    tensors, cache = arguments(backend, geometry, first)
    plan = backend.plan(cache, first, layer.constants, torch.float32)
    shapes = plan.dynamic_shapes(first.dynamic_shapes())
    for name in {*backend.per_token} & tensors.keys():
        shapes[tensors[name]] = {0: Dim.AUTO}
    given = (tensors, copies(cache), first, plan)
    program = torch.export.export(layer, given, dynamic_shapes=shapes)
    for batch in (first, second):
        tensors, cache = arguments(backend, geometry, batch)
        plan = backend.plan(cache, batch, layer.constants, torch.float32)
        expected = layer(tensors, copies(cache), batch, plan)
        assert torch.equal(program.module()(tensors, copies(cache), batch, plan), expected)
