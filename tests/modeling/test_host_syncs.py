"""Failure 14: nothing in a decode step reads a tensor on the host, which on a GPU would wait for it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mha2mla.kernels.split_kv import reference
from mha2mla.modeling import LatentCache, modeling_mha2mla
from mha2mla.modeling import cache as cache_module
from mha2mla.modeling.step import AttentionStep
from tests.few import each
from tests.modeling import models

READS = ("item", "tolist", "numpy", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__", "__contains__")
READING_OPS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
)


class _Methods(TorchFunctionMode):
    """What Python calls; on a CPU ``tolist`` reaches no op."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", "") not in READS, f"reads a tensor on the host: {func.__name__}"
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    """What reaches the device, from wherever it is called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in READING_OPS, f"reads a tensor on the host: {func}"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What looks at values on a CPU, since it costs nothing there, does not: masks, and references, which are kernels
    elsewhere. And what the host keeps for itself (a batch's sequence versions) is no tensor of the device."""

    def unwatched(function):
        def call(*args, **keys):
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return function(*args, **keys)

        return call

    for room in (cache_module, modeling_mha2mla):
        monkeypatch.setattr(room, "host_may_look", lambda mask, query_length: query_length > 1)
    monkeypatch.setattr(reference, "mla_decode_reference", unwatched(reference.mla_decode_reference))
    monkeypatch.setattr(AttentionStep, "check", unwatched(AttentionStep.check))


class NoHostReads:
    def __enter__(self):
        self.modes = (_Methods(), _Ops())
        for mode in self.modes:
            mode.__enter__()

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)


@pytest.mark.parametrize(
    "read",
    [bool, int, float, list(range(3)).__getitem__, torch.Tensor.item, torch.Tensor.tolist, torch.nonzero],
    ids=["bool", "int", "float", "index", "item", "tolist", "nonzero"],
)
def test_the_watch_sees_a_read(read):
    number = torch.tensor(2)
    with pytest.raises(AssertionError, match="reads a tensor on the host"), NoHostReads():
        read(number)


CASES = ("per-group", "some sliding", "per layer", "latent", "latent per layer", "kept per layer")
KINDS = itertools.product([False, True], repeat=3)  # left padding, positions given, static cache


@each("kind, case", KINDS, CASES)
@torch.no_grad()
def test_a_one_token_step_reads_nothing(kind, case, as_on_a_gpu):
    """Positions are the model's own to find, as when a caller passes tokens and a cache and nothing else; or given, as
    ``generate`` gives them."""
    masked, placed, static = kind
    model = models.mla_model(case, attention_backend="mla_reference")
    ids, mask = models.tokens(2, 12), models.left_mask(12, 0, 3 if masked else 0)
    expected = model(ids, attention_mask=mask).logits[:, 10:]
    cache = LatentCache(model.config, max_cache_len=16 if static else None, page_size=16)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    keys = {"position_ids": positions[:, :10]} if placed else {}
    model(ids[:, :10], attention_mask=mask[:, :10], past_key_values=cache, **keys)
    logits = []
    for stop in (11, 12):
        keys = {"attention_mask": mask[:, :stop]} if masked else {}
        keys |= {"position_ids": positions[:, stop - 1 : stop]} if placed else {}
        with NoHostReads():
            logits.append(model(ids[:, stop - 1 : stop], past_key_values=cache, **keys).logits)
    assert models.relative_error(torch.cat(logits, 1), expected) < 2e-5


@pytest.mark.parametrize("case", ["per-group", "latent"])
@torch.no_grad()
def test_a_batch_of_decodes_reads_nothing(case, as_on_a_gpu):
    model = models.mla_model(case)
    cache = model.paged_cache(8, page_size=16)
    first, second = cache.open(), cache.open()
    batch = cache.extend({first: 5, second: 9})
    model.forward_batch(batch.flatten([models.tokens(1, 5)[0], models.tokens(1, 9)[0]]), cache.step(batch))
    batch = cache.extend({first: 1, second: 1})
    ids, step = models.tokens(1, 2)[0], cache.step(batch)
    with NoHostReads():
        model.forward_batch(ids, step)
