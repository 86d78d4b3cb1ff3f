"""The decoder that writes calibration text: every way of running a step gives the model's own predictions."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import mha2mla
from mha2mla.conversion.calibration import batch_decoder
from mha2mla.conversion.calibration.batch_decoder import decoder, filled_cache, rows_at_once
from tests.conversion import tiny
from tests.modeling import models
from tests.modeling.tape import Refusing, Tape

LENGTH = 20


def tokens(rows=3, length=LENGTH):
    return torch.randint(0, tiny.model().config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


SLIDING = [{}, {"family": "mistral", "sliding_window": 7}]


@pytest.mark.parametrize("kind", SLIDING)
@torch.inference_mode()
def test_a_cache_of_which_only_the_filled_part_is_shown_predicts_the_same(kind):
    """With sliding windows that end before the text does, too."""
    model, given = tiny.model(**kind), tokens()
    usual = model.config._attn_implementation
    cache = filled_cache(model, LENGTH)
    predicted = []
    try:
        model.set_attn_implementation(batch_decoder._GROUPED)
        for place in range(LENGTH):
            for layer in cache.layers:
                layer.visible = min(LENGTH, -(-(place + 1) // 8) * 8)
            step = model(given[:, place : place + 1], past_key_values=cache, use_cache=True)
            predicted.append(step.logits[:, -1])
    finally:
        model.set_attn_implementation(usual)
    torch.testing.assert_close(torch.stack(predicted, 1), model(given).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*SLIDING, "converted", "codes"])
def test_a_graph_over_pages_predicts_the_same(kind, tmp_path, monkeypatch):
    """Over two pages and more; nothing of a replay is the host's."""
    monkeypatch.setattr(batch_decoder, "PAGE_SIZE", 16)
    monkeypatch.setattr(batch_decoder, "_MUCH", 0)
    if isinstance(kind, str):
        recipe = {"layout": "latent", "cache_ratio": 0.5, **tiny.SHORT} | (
            {"latent.bits": 4} if kind == "codes" else {}
        )
        tiny.convert(tiny.checkpoint(tmp_path / "source", "llama"), tmp_path / "converted", recipe)
        # float64: codes that float32 rounds to two neighbours, a column at a time and all at once, are no error
        model = mha2mla.load(tmp_path / "converted", device="cpu")[0].double()
    else:
        model = tiny.model(**kind)
    given, usual = tokens(length=40), model.config._attn_implementation
    with torch.inference_mode():
        step = decoder(model, *given.shape, recorder=Tape())
        assert isinstance(step, batch_decoder._PagedDecoder) and model.config._attn_implementation == usual
        predicted = torch.stack([step(column).clone() for column in given.T], 1)
        expected = model(given, use_cache=kind == "codes").logits
    torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-4)


class Addresses(Tape):
    """Keeps of a recorded step what a CUDA graph does: addresses alone."""

    def explain(self, cache):
        self.pages = [weakref.ref(page) for layer in cache.layers for page in layer.tensors.values()]

    def record(self, step, undo, device):
        result = step()
        undo()
        return result, lambda: None


@torch.inference_mode()
def test_a_graph_over_pages_keeps_what_it_reads():
    """And frees it at once: the next batch of rows takes as much memory again."""
    recorder = Addresses()
    step = batch_decoder._PagedDecoder(tiny.model(), 3, LENGTH, recorder)
    gc.collect()
    assert recorder.pages and all(page() is not None for page in recorder.pages)
    gc.disable()
    try:
        del step
        assert not any(page() is not None for page in recorder.pages)
    finally:
        gc.enable()


@torch.inference_mode()
def test_little_text_and_refused_captures_take_other_decoders(monkeypatch):
    model = tiny.model()
    assert isinstance(decoder(model, 2, 16, recorder=Tape()), batch_decoder._CapturedDecoder)
    monkeypatch.setattr(batch_decoder, "_MUCH", 0)
    given = tokens()
    with pytest.warns(UserWarning) as said:
        step = decoder(model, *given.shape, recorder=Refusing())
    assert [str(each.message).partition(" was not captured")[0] for each in said] == [
        "a decode step over pages",
        "a decode step over a static cache",
    ]
    assert all("operation not permitted when stream is capturing" in str(each.message) for each in said)
    predicted = torch.stack([step(column).clone() for column in given.T], 1)
    torch.testing.assert_close(predicted, model(given).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_attention_is_attention_with_repeated_keys(kv_heads, masked):
    query, key, value = torch.randn(2, 6, 1, 16), torch.randn(2, kv_heads, 9, 16), torch.randn(2, kv_heads, 9, 8)
    mask = (torch.arange(9) < 5).expand(2, 1, 1, 9) if masked else None
    module = SimpleNamespace(num_key_value_groups=6 // kv_heads, is_causal=True)
    output, _ = batch_decoder._grouped_attention(module, query, key, value, mask, scaling=0.3)
    repeated = [each.repeat_interleave(6 // kv_heads, 1) for each in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_rows_follow_the_memory_and_not_what_is_free(monkeypatch):
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    config = SimpleNamespace(
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, hidden_size=4096, vocab_size=32000
    )
    config.get_text_config = lambda decoder: config
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=config)
    per_row = 2 * 32 * 4096 * 512 * 2 + 32000 * 14
    assert rows_at_once(model, 512) == int(0.25 * (80 << 30) / per_row) == 79
    memory.total_memory = 1 << 20
    assert rows_at_once(model, 512) == 1
    model.device = torch.device("cpu")
    assert rows_at_once(model, 512) == 64


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SLIDING)
@torch.inference_mode()
def test_captured_steps_predict_what_a_forward_pass_predicts(kind):
    model, given = tiny.model(**kind).to("cuda"), tokens(rows=5, length=1100).cuda()  # six graphs of 192 columns
    usual = model.config._attn_implementation
    step = decoder(model, *given.shape)
    assert isinstance(step, batch_decoder._CapturedDecoder) and len(step.stages) == 6
    assert model.config._attn_implementation == usual
    predicted = torch.stack([step(column).clone() for column in given.T], 1)
    torch.testing.assert_close(predicted, model(given).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@torch.inference_mode()
def test_graphs_over_pages_are_as_right_as_static_ones(monkeypatch):
    monkeypatch.setattr(batch_decoder, "_MUCH", 0)
    model = models.source_model("llama", hidden_size=384, head_dim=64, initializer_range=0.05).cuda()
    given = torch.randint(3, model.config.vocab_size, (5, 200), device="cuda")
    exact, half = model(given).logits, model.bfloat16()
    plain = models.relative_error(half(given).logits, exact)
    step = decoder(half, *given.shape)
    assert isinstance(step, batch_decoder._PagedDecoder)
    assert models.relative_error(torch.stack([step(column).clone() for column in given.T], 1), exact) <= 2 * plain
