"""LatentCache under random appends, verbs and errors: after an error it is what it was before."""

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mha2mla.modeling import LatentCache
from tests.modeling import models
from tests.ops import OutOfMemory, RaisingAt

PAGE, CAPACITY, MOST = 16, 48, 40


def contents(cache: LatentCache) -> list:
    """What a cache says: lengths, sizes, and the tokens; pages behind them are nobody's business."""
    said: list = [cache.padding_is_left, cache.is_empty, cache.batch_size if not cache.is_empty else None]
    for layer in cache.layers:
        length = int(layer.get_seq_length())
        said.append((layer.is_empty, length, layer.get_mask_sizes(3), layer.is_initialized))
        if length:
            said += [layer.cache_seqlens.tolist(), layer.block_table.shape[0], layer.batch_size]
            said += [tokens[:, :length].clone() for tokens in layer.rows()]
    return said


def same(before: list, after: list) -> bool:
    return len(before) == len(after) and all(
        torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1]
        for pair in zip(before, after, strict=True)
    )


class LatentCacheMachine(RuleBasedStateMachine):
    """Against the ids that were fed, whose logits the model gives without a cache."""

    case = "per layer"

    @initialize(static=st.booleans(), seed=st.integers(0, 2**31))
    def start(self, static, seed):
        torch.manual_seed(seed)
        self.model = models.mla_model(self.case)
        self.static = static
        self.cache = LatentCache(self.model.config, max_cache_len=CAPACITY if static else None, page_size=PAGE)
        # What a static cache was made for stays, and so do its sequences when it is reset.
        self.ids = torch.empty(0, 0, dtype=torch.long)
        self.made_for = None

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def do(self, action, points=range(1000)):
        """``action()``, after it was broken off at each of these allocations; at all of them by default."""
        for at in points:
            before = contents(self.cache)
            try:
                with RaisingAt(at, allocating=True):
                    return action()
            except OutOfMemory:
                assert same(before, contents(self.cache)), f"broken off at allocation {at}"
        return action()

    @rule(
        batch=st.integers(1, 3),
        new=st.sampled_from([1, 1, 2, 5, 8, 9, 17]),
        form=st.sampled_from(["auto", "absorbed", "expanded"]),
        gradients=st.booleans(),
        points=st.lists(st.integers(0, 250), max_size=4, unique=True).map(sorted),
    )
    def append(self, batch, new, form, gradients, points):
        if self.length:
            batch = self.ids.shape[0]
        elif self.made_for is not None:
            batch = self.made_for
        new = min(new, MOST - self.length)
        if new == 0:
            return
        ids = models.tokens(batch, new)
        self.model.config.attention_backend = models.FORMS[form]

        def step():
            with torch.set_grad_enabled(gradients):
                return self.model(ids, past_key_values=self.cache).logits

        with torch.no_grad():
            logits = self.do(step, points)
            self.ids = torch.cat((self.ids, ids), dim=1) if self.length else ids
            if self.static:
                self.made_for = batch
            expected = self.model(self.ids, use_cache=False).logits[:, -new:]
        assert models.relative_error(logits, expected) < models.TOLERANCE

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def crop(self, data):
        # A static cache never says that it is empty again: it does not know on the host.
        removed = data.draw(st.integers(0, self.length - (1 if self.static else 0)))
        self.do(lambda: self.cache.crop(-removed))
        self.ids = self.ids[:, : self.length - removed]

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def reorder(self, data):
        order = data.draw(st.lists(st.integers(0, len(self.ids) - 1), min_size=len(self.ids), max_size=len(self.ids)))
        self.do(lambda: self.cache.reorder_cache(torch.tensor(order)))
        self.ids = self.ids[order]

    @precondition(lambda self: self.length and len(self.ids) < 3)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        self.do(lambda: self.cache.batch_repeat_interleave(repeats))
        self.ids = self.ids.repeat_interleave(repeats, dim=0)
        self.made_for = len(self.ids) if self.static else None

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def select(self, data):
        kept = data.draw(st.lists(st.integers(0, len(self.ids) - 1), min_size=1, max_size=3))
        self.do(lambda: self.cache.batch_select_indices(torch.tensor(kept)))
        self.ids = self.ids[kept]
        self.made_for = len(kept) if self.static else None

    @rule()
    def reset(self):
        self.do(self.cache.reset)
        self.ids = self.ids[:, :0]

    @rule()
    def spoil_what_is_nobodys(self):
        """NaN behind the tokens, as after a crop of tokens that were NaN."""
        for layer in self.cache.layers:
            if layer.is_initialized:
                for tokens in layer.rows():
                    tokens[:, self.length :] = torch.nan

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def refused(self, data):
        """What cannot be done changes nothing."""
        batch, before = len(self.ids), contents(self.cache)
        calls = {
            "crop below zero": lambda: self.cache.crop(-self.length - 1),
            "crop above zero": lambda: self.cache.crop(1),
            "no such sequence": lambda: self.cache.reorder_cache(torch.full((batch,), batch)),
            "too few sequences": lambda: self.cache.reorder_cache(torch.zeros(batch - 1, dtype=torch.long)),
            "no such sequence either": lambda: self.cache.batch_select_indices(torch.tensor([batch])),
            "another batch": lambda: self.model(models.tokens(batch + 1, 1), past_key_values=self.cache),
            "a short mask": lambda: self.model(
                models.tokens(batch, 1), attention_mask=torch.ones(batch, self.length), past_key_values=self.cache
            ),
            "bad labels": lambda: self.model(
                models.tokens(batch, 1), labels=torch.full((batch, 3), 2), past_key_values=self.cache
            ),
        }
        if self.static:
            calls["too many tokens"] = lambda: self.model(
                models.tokens(batch, CAPACITY - self.length + 1), past_key_values=self.cache
            )
        name = data.draw(st.sampled_from(sorted(calls)))
        with torch.no_grad(), pytest.raises((ValueError, RuntimeError, IndexError)):
            calls[name]()
        assert same(before, contents(self.cache)), name

    @rule()
    def copy(self):
        self.cache = copy.deepcopy(self.cache)

    @invariant()
    def layers_agree(self):
        if not hasattr(self, "cache"):
            return
        assert {int(layer.get_seq_length()) for layer in self.cache.layers} == {self.length}
        if self.length:
            assert {layer.max_pages for layer in self.cache.layers} == {self.cache.capacity // PAGE}
            assert {layer.batch_size for layer in self.cache.layers} == {len(self.ids)}


class MachineOfLatentsAlone(LatentCacheMachine):
    case = "latent per layer"


class MachineOfKeptKeys(LatentCacheMachine):
    case = "kept some sliding"


TestLatentCacheMachine, TestMachineOfLatentsAlone = LatentCacheMachine.TestCase, MachineOfLatentsAlone.TestCase
TestMachineOfKeptKeys = MachineOfKeptKeys.TestCase
TestLatentCacheMachine.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
TestMachineOfLatentsAlone.settings = TestMachineOfKeptKeys.settings = TestLatentCacheMachine.settings
