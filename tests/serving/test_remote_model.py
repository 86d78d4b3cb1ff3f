"""The file of remote code beside the package's model: the same losses, outputs and caches, or a refusal by name."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from mha2mla.serving import remote_model
from tests.modeling.full_rank import full_rank
from tests.modeling.models import GEOMETRIES, SOURCES, TOLERANCE, mla_model, relative_error, source_model, tokens


def remote_of(model):
    """The model again, by the classes of the remote-code file."""
    config = remote_model.MHA2MLAConfig(**model.config.to_dict())
    remote = remote_model.MHA2MLAForCausalLM(config).eval()
    remote.load_state_dict(model.state_dict())
    return remote


def padded(batch, length):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :3] = 0
    return mask


@pytest.mark.parametrize("rope_from_latent", [False, True])
@pytest.mark.parametrize("case", SOURCES)
@torch.no_grad()
def test_static_cache_gives_the_same_tokens(case, rope_from_latent):
    """In every family, beyond its windows, from a batch padded on the left."""
    model = full_rank(source_model(case), rope_from_latent=rope_from_latent)
    remote, ids = remote_of(model), tokens(2, 8)
    options = {"attention_mask": padded(2, 8), "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    for kind in ("dynamic", "static"):
        assert torch.equal(remote.generate(ids, cache_implementation=kind, **options), expected), kind


@pytest.mark.parametrize("case", GEOMETRIES)
def test_outputs_and_losses_are_the_packages(case):
    model = mla_model(case)
    remote, ids, mask = remote_of(model), tokens(2, 12), padded(2, 12)
    given = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "num_items_in_batch": 7}
    for each in (model, remote):
        each.set_attn_implementation("eager")
    expected, out = (each(ids, output_hidden_states=True, output_attentions=True, **given) for each in (model, remote))
    assert relative_error(out.logits[mask == 1], expected.logits[mask == 1]) < TOLERANCE
    torch.testing.assert_close(out.loss, expected.loss)
    for name, count in (("hidden_states", 3), ("attentions", 2)):
        found = [torch.stack(getattr(each, name)) for each in (out, expected)]
        assert len(found[0]) == count and relative_error(*found) < TOLERANCE, name
    assert torch.equal(remote(ids, attention_mask=mask, return_dict=False)[0], remote(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe"])
@torch.no_grad()
def test_router_loss_is_the_sources(case):
    source = source_model(case)
    remote, ids, mask = remote_of(full_rank(source)), tokens(2, 12), padded(2, 12)
    given = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "output_router_logits": True}
    expected, out = source(ids, **given), remote(ids, **given)
    assert expected.aux_loss > 0 and len(out.router_logits) == 2
    torch.testing.assert_close(out.aux_loss, expected.aux_loss)
    torch.testing.assert_close(out.loss, expected.loss)
    assert out.loss > remote(ids, attention_mask=mask, labels=given["labels"]).loss


@pytest.mark.parametrize("case", GEOMETRIES)
@pytest.mark.parametrize("make", [DynamicCache, StaticCache])
@torch.no_grad()
def test_positions_over_a_cache_count_or_are_refused(case, make):
    """Padding counted or not, and gaps: right where rotated keys are cached, else refused."""
    model = mla_model(case)
    remote, ids, mask = remote_of(model), tokens(2, 12), padded(2, 12)
    among_shown = (mask.cumsum(-1) - 1).clamp(min=0)
    gaps = torch.cat((torch.arange(8), torch.arange(11, 15)))[None]
    for position_ids in (torch.arange(12)[None], among_shown, gaps):
        expected = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits[:, 8:]
        cache = make(config=remote.model.config, max_cache_len=16) if make is StaticCache else make()
        made = []
        for part in (slice(0, 8), slice(8, 11), slice(11, 12)):
            given = {"attention_mask": mask[:, : part.stop], "position_ids": position_ids[:, part]}
            if position_ids is gaps and model.config.rope_from_latent and part.start:
                with pytest.raises(ValueError, match="position_ids do not count on"):
                    remote(ids[:, part], past_key_values=cache, **given)
                continue
            made.append(remote(ids[:, part], past_key_values=cache, **given).logits)
        if len(made) == 3:
            assert relative_error(torch.cat(made[1:], 1), expected) < TOLERANCE


@torch.no_grad()
def test_positions_with_gaps_need_no_cache():
    model = mla_model("latent")
    remote, ids = remote_of(model), tokens(1, 8)
    position_ids = torch.cat((torch.arange(5), torch.arange(9, 12)))[None]
    expected = model(ids, position_ids=position_ids, use_cache=False).logits
    assert relative_error(remote(ids, position_ids=position_ids, use_cache=False).logits, expected) < TOLERANCE
    with pytest.raises(ValueError, match="position_ids do not count on"):
        remote(ids, position_ids=position_ids)
    assert relative_error(remote.train()(ids, position_ids=position_ids).logits, expected) < TOLERANCE
    mask = torch.ones(1, 1, 8, 8).tril().bool()
    with pytest.raises(ValueError, match=r"attention_mask.shape is \(1, 1, 8, 8\) .* expected \[B, T\]"):
        remote.eval()(ids, position_ids=position_ids, attention_mask=mask)


@pytest.mark.parametrize("rope_from_latent", [False, True])
@torch.no_grad()
def test_yarn_leaves_unrotated_pairs_alone(rope_from_latent):
    """The factor on cos and sin is for pairs that rotate; a frequency of zero stands for those that do not."""
    model = full_rank(source_model("llama-yarn-tied"), rope_from_latent=rope_from_latent)
    for layer in model.model.layers:
        layer.self_attn.inv_freq[:, ::2] = 0
    assert model.config.rope_attention_scaling == 1.3
    ids = tokens(2, 12)
    expected = model(ids, use_cache=False).logits
    assert relative_error(remote_of(model)(ids).logits, expected) < TOLERANCE


def test_dropout_of_the_source_is_there():
    remote, ids = remote_of(mla_model(attention_dropout=0.5)), tokens(2, 14)
    assert torch.equal(remote(ids).logits, remote(ids).logits)
    remote.train()
    assert not torch.equal(remote(ids).logits, remote(ids).logits)


def test_what_the_file_cannot_do_is_refused():
    model = mla_model()
    with pytest.raises(ValueError, match="attention_window is 8; expected None"):
        remote_model.MHA2MLAConfig(**{**model.config.to_dict(), "attention_window": 8})
    with pytest.raises(ValueError, match="schema_version is 9; expected at most 2"):
        remote_model.MHA2MLAConfig(**{**model.config.to_dict(), "schema_version": 9})
    remote = remote_of(model)
    with pytest.raises(ValueError, match="output_attentions is True with attn_implementation 'sdpa'; expected 'eager'"):
        remote(tokens(1, 3), output_attentions=True)
    assert not remote.tp_plan
