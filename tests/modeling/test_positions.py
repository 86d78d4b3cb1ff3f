"""``position_ids`` over a LatentCache that keeps no rotary keys: obeyed where they count on, refused where they do not.

Stock caches are in test_rope_from_latent.py.
"""

import random

import pytest
import torch

from mha2mla.modeling import LatentCache, modeling_mha2mla
from mha2mla.modeling import cache as cache_module
from tests.few import few
from tests.modeling import models
from tests.modeling.models import TOLERANCE
from tests.modeling.test_cache_machine import contents, same
from tests.modeling.test_masks import assert_same, pieces, random_mask

REFUSED = "position_ids do not count on from each row's first visible token"


def numbering(rng: random.Random, mask: torch.Tensor) -> torch.Tensor:
    """[B, T]: places, or counted among visible tokens as ``generate`` does; sometimes one token's is another."""
    place = torch.arange(mask.shape[1]).expand(mask.shape)
    made = rng.choice(
        [place, (mask.cumsum(1) - 1).clamp(min=0), (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)]
    ).clone()
    if rng.random() < 0.4:
        made[rng.randrange(len(made)), rng.randrange(mask.shape[1])] += rng.choice([-1, 1, 7])
    return made


def counts_on(mask: torch.Tensor, numbers: torch.Tensor, start: int, stop: int) -> bool:
    """Whether in every row the visible ones of ``start … stop - 1`` are their places, or these less the first place."""
    for shown, row in zip(mask[:, :stop].bool().tolist(), numbers.tolist(), strict=True):
        seen = [row[t] - t for t in range(start, stop) if shown[t]]
        first = shown.index(True) if True in shown else 0
        if any(ahead != 0 for ahead in seen) and any(ahead != -first for ahead in seen):
            return False
    return True


@few("seed", range(40), count=16)
@torch.no_grad()
def test_fuzz_against_the_uncached_forward(seed, monkeypatch):
    """Any mask, any numbering, in every form: the logits are those without a cache, or nothing has happened."""
    rng = random.Random(seed)
    model = models.mla_model(rng.choice(["latent", "kept some sliding", "kept per layer"]))
    batch, length = rng.randint(1, 3), rng.randint(4, 26)
    ids, mask = models.tokens(batch, length), random_mask(rng, batch, length)
    numbers, looks = numbering(rng, mask), rng.random() < 0.6
    expected = model(ids, attention_mask=mask, use_cache=False).logits  # at places
    if not looks:
        monkeypatch.setattr(modeling_mha2mla, "host_may_look", lambda given, query_length: False)
    cache = LatentCache(model.config, max_cache_len=rng.choice([None, 32]), page_size=16)
    for start, stop in pieces(rng, length):
        model.config.attention_backend = models.FORMS[rng.choice(["auto", "absorbed", "expanded"])]
        given = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop], "past_key_values": cache}
        numbered = {**given, "position_ids": numbers[:, start:stop]}
        if counts_on(mask, numbers, start, stop):
            logits = model(**numbered).logits
        else:
            before = contents(cache)
            with pytest.raises(ValueError if looks else RuntimeError, match=REFUSED):
                model(**numbered)
            assert same(before, contents(cache))
            logits = model(**given).logits
        assert_same(logits, expected[:, start:stop], mask[:, start:stop])


@torch.no_grad()
def test_compiled_steps_are_asserted_by_the_device(fresh_dynamo):
    """One graph; a step that is refused leaves the cache as it was."""
    model = models.mla_model("latent", attention_backend="mla_reference")
    ids, mask = models.tokens(2, 16), models.left_mask(16, 0, 3)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    numbers = (mask.cumsum(1) - 1).clamp(min=0)
    cache = LatentCache(model.config, max_cache_len=16, page_size=16)
    model(ids[:, :12], attention_mask=mask[:, :12], position_ids=numbers[:, :12], past_key_values=cache)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    for at in range(12, 16):
        given = {"input_ids": ids[:, at : at + 1], "attention_mask": mask, "past_key_values": cache}
        before = contents(cache)
        with pytest.raises(RuntimeError, match=REFUSED):
            step(**given, position_ids=numbers[:, at : at + 1] + 1)
        assert same(before, contents(cache))
        logits = step(**given, position_ids=numbers[:, at : at + 1]).logits
        assert models.relative_error(logits, expected[:, at : at + 1]) < TOLERANCE


def test_generate_refuses_latents_after_right_padding():
    """Its numbering is among visible tokens: no place less one number, from the first new token on."""
    model = models.mla_model("latent")
    ids, mask = models.tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    ids[1, 5:], mask[1, 5:] = 0, 0
    for kind in ("dynamic", "static"):
        with pytest.raises(ValueError, match=r"tokenizer\.padding_side = 'left'"):
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation=kind)
    one = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, use_cache=False)
    assert one.shape == (2, 12)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@torch.no_grad()
def test_a_prompt_is_looked_at_once(static, monkeypatch):
    """And not where no positions are given: then they are places."""
    model, reads = models.mla_model("latent"), []
    for name in ("tolist", "__bool__"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, name=name, read=read: (reads.append(name), read(x))[1])
    monkeypatch.setattr(cache_module, "host_may_look", lambda given, query_length: query_length > 1)
    monkeypatch.setattr(modeling_mha2mla, "host_may_look", lambda given, query_length: query_length > 1)
    ids, numbers = models.tokens(2, 9), torch.arange(9)[None]
    for given, expected in (({}, []), ({"position_ids": numbers}, ["__bool__"])):
        cache = LatentCache(model.config, max_cache_len=16 if static else None, page_size=16)
        reads.clear()
        model(ids, past_key_values=cache, **given)
        assert reads == expected


def test_the_device_takes_the_refusal_as_its_message():
    # Beyond it torch._assert_async raises at once on CUDA, whatever the positions.
    assert len(modeling_mha2mla.REFUSED_POSITIONS) < 255
