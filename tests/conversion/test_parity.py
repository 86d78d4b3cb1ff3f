"""What verification reports, against the same numbers computed from whole models by another road."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mha2mla.conversion import parity
from mha2mla.conversion.source.opening import open_converted, open_source
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.conversion.target import LAYOUTS
from mha2mla.modeling.modeling_mha2mla import apply_rope, rotary_cos_sin
from tests.conversion import tiny
from tests.conversion.tiny import SHORT, relative
from tests.ops import SdpaCalls, noted

CASES = ("llama", "qwen3", "mistral-sliding", "qwen2")


def attention_calls(model, tokens):
    """Per layer: normed input, keyword arguments and output of the attention, and the layer's output."""
    calls, handles = [], []
    for layer in model.model.layers:
        handles.append(
            layer.self_attn.register_forward_hook(
                lambda module, args, kwargs, output: calls.append([kwargs, output[0]]), with_kwargs=True
            )
        )
    with torch.no_grad():
        eager = model.config._attn_implementation == "eager"
        out = model(tokens, output_hidden_states=True, output_attentions=eager, use_cache=False)
    for handle in handles:
        handle.remove()
    return calls, out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_errors_of_layers(case, layout, checkpoint_of, tmp_path):
    folder, tokens = checkpoint_of(case), tiny.some_tokens(3, 40)
    recipe = tiny.Recipe(layout=layout, **SHORT)
    report = tiny.convert(folder, tmp_path / "out", recipe, evaluation=tokens).parity
    source, model = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32, attn_implementation=kind).eval()
        for each, kind in ((folder, "eager"), (tmp_path / "out", "sdpa"))
    )
    (theirs, expected), (ours, actual) = attention_calls(source, tokens), attention_calls(model, tokens)
    assert [layer.layer for layer in report.layers] == [0, 1]
    for index, layer in enumerate(report.layers):
        (given, output), (own, own_output) = theirs[index], ours[index]
        attention = model.model.layers[index].self_attn
        alone = attention(**{**own, "hidden_states": given["hidden_states"]})[0]
        assert layer.output_error == pytest.approx(relative(alone, output), rel=1e-4)
        assert layer.stream_output_error == pytest.approx(relative(own_output, output), rel=1e-4)
        if index == 0:
            assert layer.output_error == pytest.approx(layer.stream_output_error, rel=1e-5)
            error = relative(actual.hidden_states[1], expected.hidden_states[1])
            assert layer.hidden_error == pytest.approx(error, rel=1e-4)

        # Eager probabilities are scores but for a number per query, which centring takes away.
        weights = expected.attentions[index]
        seen = weights > 0
        reference = centred(weights.double().clamp_min(1e-300).log(), seen)
        geometry, position = attention.geometry, torch.arange(40)[None]
        cos, sin = rotary_cos_sin(position, attention.inv_freq, model.config.rope_attention_scaling, torch.float32)
        heads, groups = geometry.num_attention_heads, geometry.num_rope_heads
        q_nope, q_pe, latent, k_pe = attention._encoded(given["hidden_states"])
        q_pe = apply_rope(q_pe.unflatten(2, (groups, -1)), cos[..., None, :], sin[..., None, :]).flatten(2, 3)
        k_pe = attention._rotary_keys(latent, position) if k_pe is None else apply_rope(k_pe, cos, sin)
        scores = torch.einsum("bshr,bthr->bhst", q_pe, k_pe.repeat_interleave(heads // geometry.num_rope_heads, 2))
        if geometry.qk_nope_head_dim:  # in the latent layout all pairs of so small a model rotate
            k_nope = torch.einsum("btc,hnc->bthn", latent, attention.k_b_proj)
            k_nope = k_nope.repeat_interleave(heads // geometry.num_key_value_heads, 2)
            scores = scores + torch.einsum("bshn,bthn->bhst", q_nope, k_nope)
        error = relative(centred((scores * model.config.softmax_scale).double(), seen), reference)
        assert layer.score_error == pytest.approx(error, rel=1e-3)


def centred(scores, seen):
    mean = scores.masked_fill(~seen, 0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    return (scores - mean).masked_fill(~seen, 0)


def test_what_is_constant_over_a_query_s_keys_is_no_score_error():
    query, key = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 12, 8)
    reference = {"query": query, "key": key, "scaling": 0.3}
    for window in (None, 5):
        error = parity._Error()
        parity._add_score_errors(error, {**reference, "key": key + torch.randn(8)}, reference, window)
        assert error.value() < 1e-6
        parity._add_score_errors(error, {**reference, "key": key + 0.1 * torch.randn(2, 2, 12, 8)}, reference, window)
        assert error.value() > 1e-2


def test_slices_and_blocks_do_not_change_the_numbers(source, tmp_path, monkeypatch):
    tokens = tiny.some_tokens(3, 40)
    whole = tiny.convert(source, tmp_path / "one", evaluation=tokens).parity.to_dict()
    monkeypatch.setattr(parity, "_HEAD_BLOCK", 48 * 50)  # six slices of 264 tokens
    monkeypatch.setattr(parity, "_BLOCK", 7 * 50)
    parts = tiny.convert(source, tmp_path / "two", evaluation=tokens).parity.to_dict()
    layers = zip(whole.pop("layers"), parts.pop("layers"), strict=True)
    assert parts == pytest.approx(whole, rel=1e-5)
    for one, two in layers:
        assert two == pytest.approx(one, rel=1e-5)


def test_heads_are_read_once_where_they_fit(source, tmp_path, monkeypatch):
    tokens, read = tiny.some_tokens(3, 40), noted(monkeypatch, StreamedModel, "head_rows")
    kept = tiny.convert(source, tmp_path / "one", evaluation=tokens)
    assert len(read) == 2, "one slice of each model"
    again = tiny.convert(source, tmp_path / "two", evaluation=tokens, spill_bytes=0)
    assert len(read) > 2 + 2 * len(tokens) and again.parity.to_dict() == kept.parity.to_dict()


def test_comparison_attends_over_ungrouped_heads(source, tmp_path):
    """PyTorch's math backend, which serves grouped float32 heads on CUDA, holds squares of the length."""
    out = tmp_path / "out"
    tiny.convert(source, out, tiny.Recipe(layout="per-group", **SHORT))
    cpu, dtype = torch.device("cpu"), torch.float32
    model, reader = open_source(source).model(cpu, dtype), open_converted(out).reader
    converted = StreamedModel(AutoConfig.from_pretrained(out), reader, (None, None), device=cpu, dtype=dtype)
    with SdpaCalls() as sdpa:
        parity.compare(model, converted, tiny.some_tokens(), folder=tmp_path, progress=False)
    assert len(sdpa.calls) == 3 * 2 and set(sdpa.calls) == {(4, 4, False)}
