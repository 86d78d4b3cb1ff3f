"""Captured decode in generate, without a GPU: a tape stands in for CUDA graphs (``tape.py``). The same tokens."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria

from mha2mla.modeling import LatentCache, captured, modeling_mha2mla
from mha2mla.modeling import cache as cache_module
from mha2mla.modeling.captured import CudaGraphs, GraphStore
from tests.few import each
from tests.modeling import models
from tests.modeling.models import padded
from tests.modeling.tape import Refusing, Tape
from tests.ops import noted

LAYOUTS = ("per-group", "shared", "latent")
# So large that the pages of a small cache take less memory, and are kept.
LARGE = {"vocab_size": 8192}
GREEDY = {"do_sample": False, "return_dict_in_generate": True}
ALL_PROCESSORS = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "typical_p": 0.98,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 4,
    "bad_words_ids": [[5], [6, 7]],
    "renormalize_logits": True,
}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, **ALL_PROCESSORS},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.7},
    "sampled beams": {"num_beams": 3, "do_sample": True, "top_k": 20},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "ends": {"eos_token_id": list(range(3, 30)), "pad_token_id": 0},
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """The host looks at masks and positions of several tokens, and not while a step is recorded."""

    def host_may_look(mask, query_length):
        return query_length > 1 and not isinstance(_get_current_dispatch_mode(), Tape)

    for room in (cache_module, modeling_mha2mla):
        monkeypatch.setattr(room, "host_may_look", host_may_look)


def captured_model(case: str = "per-group", recorder: type = Tape, **keys):
    model = models.mla_model(case, **keys)
    model.graph_store = GraphStore(recorder)
    return model


def generate(model, inputs, **options):
    torch.manual_seed(1)
    return model.generate(**inputs, **{**GREEDY, "max_new_tokens": 14, **options})


def recordings(out) -> int:
    return len(out.past_key_values.captured)


def test_the_tape_is_as_strict_as_a_graph():
    """Lengths of the host are those of the recording; the device's are those of now."""
    on_host, on_device, source = [1], torch.tensor([1]), torch.arange(8.0)

    def step():
        return source[on_host[0] :][:2] * on_device + source.sum()

    result, replay = Tape().record(step, lambda: None, torch.device("cpu"))
    assert result.tolist() == [29, 30]
    on_host[0], source[1] = 3, 11.0
    on_device.fill_(2)
    replay()
    assert result.tolist() == [22 + 38, 4 + 38]


@pytest.mark.parametrize("case", models.GEOMETRIES)
def test_greedy_tokens(case):
    model, inputs = captured_model(case), padded(12, 7, 1)
    expected = generate(model, inputs, capture=False, output_logits=True)
    out = generate(model, inputs, output_logits=True)
    assert torch.equal(out.sequences, expected.sequences) and recordings(out) == 1
    for mine, other in zip(out.logits, expected.logits, strict=True):
        assert models.relative_error(mine, other) < models.TOLERANCE
    assert out.past_key_values.get_seq_length() == 25 == int(out.past_key_values.layers[1].cache_seqlens[2])


@pytest.mark.parametrize(
    ("case", "options"),
    [("per-group", {"attention_window": 6, "num_sink_tokens": 2}), ("latent", {"rotary_key_cache": "bfloat16"})],
)
def test_cache_options_of_one_call(case, options):
    """Pages and recordings are kept from call to call, of calls with the same options."""
    model, inputs, kept = captured_model(case, **LARGE), padded(12, 7, 1), []
    expected = [generate(model, inputs, capture=False, **keys).sequences for keys in ({}, options)]
    assert torch.equal(*expected) == ("rotary_key_cache" in options)
    for asked in (1, 1, 0, 0, 1):
        out = generate(model, inputs, **(options if asked else {}))
        assert torch.equal(out.sequences, expected[asked]) and recordings(out) == 1
        kept.append(weakref.ref(out.past_key_values.captured))
        del out
    first, second, third, fourth, last = [each() for each in kept]
    assert first is second is third is fourth is None and last is not None


@each("mode, case, lengths", MODES, LAYOUTS, [(9,), (9, 4)])
def test_every_mode_of_decoding(case, lengths, mode):
    model, inputs = captured_model(case), padded(*lengths)
    expected = generate(model, inputs, **MODES[mode], capture=False).sequences
    for _ in range(2):
        assert torch.equal(generate(model, inputs, **MODES[mode]).sequences, expected)
    out = generate(model, inputs, **MODES[mode])
    assert torch.equal(out.sequences, expected) and (recordings(out) == 1 or mode == "ends")
    static = generate(model, inputs, **MODES[mode], cache_implementation="static")
    assert torch.equal(static.sequences, expected) and static.past_key_values.captured is None


@each("case, sampled", LAYOUTS, [False, True])
def test_assisted_decoding(case, sampled):
    """Drafts of an assistant, captured itself, that is often wrong, and of prompt lookup: a recording per length."""
    model, assistant = captured_model(case), captured_model(case)
    inputs, options = {"input_ids": models.tokens(1, 12).repeat(1, 2)}, {"max_new_tokens": 24, "do_sample": sampled}
    for drafts in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 4}):
        expected = generate(model, inputs, capture=False, **options, **drafts).sequences
        out = generate(model, inputs, **options, **drafts)
        assert torch.equal(out.sequences, expected) and recordings(out) >= 1
        widths = {key[0][0][1] for key in out.past_key_values.captured._graphs}
        assert max(widths) > 1, widths


@pytest.mark.parametrize("name", ["mla_reference", "mla_fp8_reference", "mla_expanded"])
def test_backends_by_name(name):
    """Where no backend attends nothing is recorded."""
    model, inputs = captured_model(attention_backend=name), padded(9, 4)
    expected = generate(model, inputs, capture=False).sequences
    out = generate(model, inputs)
    assert torch.equal(out.sequences, expected) and recordings(out) == (name != "mla_expanded")


class Stops(StoppingCriteria):
    """Ends sequences of so many tokens, of which the host learns from the device."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.tokens, device=input_ids.device)


def test_streamers_and_stopping_criteria():
    model, inputs = captured_model(), padded(6)
    said = []
    streamer = SimpleNamespace(put=lambda tokens: said.extend(tokens.flatten().tolist()), end=lambda: said.append(-1))
    expected = generate(model, inputs, capture=False, stopping_criteria=[Stops(15)]).sequences
    out = generate(model, inputs, streamer=streamer, stopping_criteria=[Stops(15)])
    assert out.sequences.shape[1] == 15 and torch.equal(out.sequences, expected) and recordings(out) == 1
    assert said == [*expected[0].tolist(), -1]


@pytest.mark.parametrize("case", LAYOUTS)
def test_pages_that_grow_are_recorded_anew(case):
    """A cache that the caller brings has no room made for it; afterwards it serves as any, captured or not."""
    model, inputs = captured_model(case), padded(9, 4)
    cache, reference = (LatentCache(model.config, page_size=16) for _ in range(2))
    expected = generate(model, inputs, past_key_values=reference, capture=False, max_new_tokens=60)
    out = generate(model, inputs, past_key_values=cache, max_new_tokens=60)
    assert torch.equal(out.sequences, expected.sequences) and cache.capacity == 128 and recordings(out) == 1
    ones = torch.ones(2, 60, dtype=torch.long)
    more = {
        "input_ids": torch.cat((out.sequences, models.tokens(2, 3)), 1),
        "attention_mask": torch.cat((inputs["attention_mask"], ones, ones[:, :3]), 1),
    }
    for keys in ({}, {"capture": False}, {}):
        second, other = copy.deepcopy(cache), copy.deepcopy(reference)
        assert second.captured is None
        assert torch.equal(
            generate(model, more, past_key_values=second, **keys).sequences,
            generate(model, more, past_key_values=other, capture=False).sequences,
        )
    again = generate(model, more, past_key_values=cache)
    assert torch.equal(again.sequences, generate(model, more, past_key_values=reference, capture=False).sequences)


def test_only_generate_replays(monkeypatch):
    """A cache that generate returned, and was captured over, is any other in a call of one's own."""
    model, inputs = captured_model(), padded(9)
    out = generate(model, inputs)
    recorded = next(iter(out.past_key_values.captured._graphs.values()))
    monkeypatch.setattr(type(recorded), "replay", None)
    last = out.sequences[:, -1:]
    with torch.no_grad():
        logits = model(last, past_key_values=out.past_key_values).logits[:, -1]
        assert models.relative_error(logits, model(out.sequences, use_cache=False).logits[:, -1]) < models.TOLERANCE


@pytest.fixture
def recorded(monkeypatch) -> list:
    """Fills up with what is recorded."""
    return noted(monkeypatch, Tape, "record", lambda *_: None)  # arguments would hold pages


def test_pages_and_recordings_are_used_again(recorded):
    """By the next call of as many sequences, if nobody holds the cache; released on request, and with the cache."""
    model, inputs = captured_model(**LARGE), padded(9, 4)
    expected = generate(model, inputs, capture=False).sequences
    pages = weakref.ref(generate(model, inputs).past_key_values.layers[0].tensors["latent_cache"])
    for _ in range(2):
        out = generate(model, inputs)
        assert torch.equal(out.sequences, expected) and len(recorded) == 1
        assert out.past_key_values.layers[0].tensors["latent_cache"] is pages()
        del out
    longer = generate(model, padded(30, 2), max_new_tokens=3).past_key_values
    assert len(recorded) == 1 and longer.layers[0].tensors["latent_cache"] is pages()
    other = generate(model, inputs)  # while the caller holds that one
    assert torch.equal(other.sequences, expected) and len(recorded) == 2 and longer.get_seq_length() == 32
    assert recordings(other) == 1
    del longer
    gc.collect()
    assert pages() is None
    mine = weakref.ref(other.past_key_values.layers[0].tensors["latent_cache"])
    model.release_captured()
    assert torch.equal(generate(model, inputs).sequences, expected) and len(recorded) == 3
    del other
    gc.collect()
    assert mine() is None
    generate(model, padded(9, 4, 2))
    assert len(recorded) == 4


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "ends"])
def test_a_cache_goes_with_who_holds_it(mode):
    """In every mode, without a garbage collection, so that the next call finds its pages free."""
    model, inputs = captured_model(**LARGE), padded(9, 4)
    gc.collect()
    gc.disable()
    try:
        generate(model, inputs, **MODES[mode])
        assert model.graph_store._kept._owner() is None
    finally:
        gc.enable()


def test_large_caches_are_not_kept(recorded):
    model, inputs = captured_model(num_hidden_layers=1), padded(*[4] * 60)
    for count in (1, 2):
        out = generate(model, inputs)
        assert out.past_key_values.nbytes > sum(parameter.nbytes for parameter in model.parameters())
        pages = weakref.ref(out.past_key_values.layers[0].tensors["latent_cache"])
        del out
        gc.collect()
        assert pages() is None and len(recorded) == count


@pytest.mark.parametrize("change", ["written", "moved", "replaced"])
def test_other_weights(change, recorded):
    model, inputs = captured_model(**LARGE), padded(9, 4)
    before = generate(model, inputs).sequences
    if change == "moved":
        model.double().float()
    with torch.no_grad():
        head = model.lm_head.weight
        if change == "written":
            head.neg_()
        else:
            model.lm_head.weight = torch.nn.Parameter(-head)
    out = generate(model, inputs)
    assert torch.equal(out.sequences, generate(model, inputs, capture=False).sequences) and len(recorded) == 2
    assert not torch.equal(out.sequences, before)


class Moving(StoppingCriteria):
    """Ends nothing; negates a weight, elsewhere in memory, when sequences have so many tokens."""

    def __init__(self, weight, tokens):
        self.weight, self.tokens = weight, tokens

    def __call__(self, input_ids, scores, **_):
        if input_ids.shape[1] == self.tokens:
            self.weight.data = -self.weight.data
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_other_weights_between_two_steps(name, recorded):
    """The first weight is looked at before a replay, that of a layer behind it, when the step has to be done again."""
    found, inputs = [], padded(9, 4)
    for capture in (True, False):
        torch.manual_seed(0)
        model = captured_model(num_hidden_layers=3)
        criteria = [Moving(model.get_parameter(name), inputs["input_ids"].shape[1] + 7)]
        out = generate(model, inputs, capture=capture, stopping_criteria=criteria, output_logits=True)
        found.append(torch.stack(out.logits))
        assert len(recorded) == 2  # before it and after
    torch.testing.assert_close(*found)
    torch.manual_seed(0)
    same = torch.stack(generate(captured_model(num_hidden_layers=3), inputs, output_logits=True).logits)
    torch.testing.assert_close(found[0][:7], same[:7])
    assert not torch.allclose(found[0][7], same[7])


def test_a_weight_that_comes_back_after_the_last_step(recorded):
    """The step that found it elsewhere dropped the pages, and no step behind it made new ones."""
    model, inputs = captured_model(num_hidden_layers=3, **LARGE), padded(9, 4)
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    own, last = weight.data, inputs["input_ids"].shape[1] + 13
    generate(model, inputs, stopping_criteria=[Moving(weight, last)])
    weight.data = own
    again = generate(model, inputs)
    assert torch.equal(again.sequences, generate(model, inputs, capture=False).sequences) and len(recorded) == 2


def test_a_model_takes_what_it_keeps_with_it():
    """Without a garbage collection."""
    model, inputs = captured_model(**LARGE), padded(9, 4)
    pages = weakref.ref(generate(model, inputs).past_key_values.layers[0].tensors["latent_cache"])
    home = weakref.ref(model.graph_store)
    gc.collect()
    gc.disable()
    try:
        assert pages() is not None
        model.graph_store = GraphStore(Tape)
        assert home() is None and pages() is None
    finally:
        gc.enable()


def test_what_comes_once_is_not_recorded(recorded):
    model = captured_model()
    generate(model, padded(9), max_new_tokens=2)
    assert not recorded


def test_off_by_an_argument(recorded):
    model, inputs = captured_model(), padded(9)
    assert generate(model, inputs, capture=False).past_key_values.captured is None
    config = GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=0, capture=False)
    model.generate(**inputs, generation_config=config)
    cache = LatentCache(model.config)
    generate(model, inputs, past_key_values=cache, capture=False)
    model.generation_config.capture = False
    assert generate(model, inputs).past_key_values.captured is None and not recorded
    assert recordings(generate(model, inputs, capture=True)) == 1


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: None)


def adapted(model):
    class LoRA(torch.nn.Linear):
        adapter_layer_names = ("lora_A",)

    model.model.layers[0].mlp.up_proj.__class__ = LoRA


REFUSALS = {
    "training mode": lambda model: model.train(),
    "modules have hooks": hooked,
    "may be swapped": adapted,
    "model is compiled": lambda model: model.compile(backend="eager"),
    "quantisation cannot": lambda model: setattr(model, "hf_quantizer", SimpleNamespace(is_compileable=False)),
    "not on one cuda device": lambda model: setattr(model, "graph_store", GraphStore(CudaGraphs)),
    "not on one cpu device": lambda model: model.lm_head.to("meta"),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refusals(reason):
    model = captured_model()
    assert model.explain_uncaptured() is None
    REFUSALS[reason](model)
    assert reason in model.explain_uncaptured()
    if "cpu" not in reason:
        assert generate(model, padded(9), max_new_tokens=4).past_key_values.captured is None


def test_more_refusals():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    source = models.source_config("llama", rope_parameters=rope)
    assert "RoPE looks at" in captured_model(source_config=source.to_dict()).explain_uncaptured()
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in captured_model().explain_uncaptured()


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_outputs_beside_logits_are_not_captured(asked, recorded):
    model, inputs = captured_model(), padded(9, 4)
    model.set_attn_implementation("eager")
    expected = generate(model, inputs, capture=False, **{asked: True})
    out = generate(model, inputs, **{asked: True})
    assert not recorded and torch.equal(out.sequences, expected.sequences)
    name = asked.removeprefix("output_")
    assert len(getattr(out, name)) == len(getattr(expected, name)) == 14
    # What transformers leaves behind for hidden states is in nobody's way.
    assert recordings(generate(model, inputs)) == 1


def test_a_hole_in_the_mask_is_not_captured(recorded):
    """The expanded form obeys it."""
    model, inputs = captured_model(), padded(9, 9)
    inputs["attention_mask"][1, 4:6] = 0
    expected = generate(model, inputs, use_cache=False).sequences
    assert torch.equal(generate(model, inputs).sequences, expected) and not recorded


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_failing_capture_changes_nothing(case):
    """One warning, the same tokens, and no second try before a release."""
    model, inputs = captured_model(case, Refusing), padded(9, 4)
    expected = generate(model, inputs, capture=False)
    with pytest.warns(
        UserWarning, match="without captured decode steps: RuntimeError: operation not permitted"
    ) as said:
        out = generate(model, inputs)
        assert torch.equal(out.sequences, expected.sequences)
        assert torch.equal(generate(model, inputs).sequences, expected.sequences)
    assert len([warning for warning in said if "captured" in str(warning.message)]) == 1
    for layer, other in zip(out.past_key_values.layers, expected.past_key_values.layers, strict=True):
        for mine, theirs in zip(layer.used(), other.used(), strict=True):
            assert torch.equal(mine, theirs)
    assert "operation not permitted" in model.explain_uncaptured()
    model.release_captured()
    assert model.explain_uncaptured() is None


def test_copies_and_pickles_have_no_recordings():
    model, inputs = captured_model(**LARGE), padded(9, 4)
    out = generate(model, inputs)
    twin = copy.deepcopy(model)
    assert twin.graph_store._kept is None and model.graph_store._kept is out.past_key_values.captured
    assert torch.equal(generate(twin, inputs).sequences, out.sequences)
    assert pickle.loads(pickle.dumps(model.graph_store))._kept is None
    assert copy.deepcopy(out.past_key_values).captured is None


def test_inference_mode_and_no_grad_share_recordings(recorded):
    model, inputs = captured_model(**LARGE), padded(9, 4)
    expected = generate(model, inputs, capture=False).sequences
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(generate(model, inputs).sequences, expected)
    assert len(recorded) == 1


@pytest.mark.parametrize("lengths", [(9,), (9, 4)])
def test_steps_are_launched_before_the_host_asks_whether_to_go_on(monkeypatch, lengths):
    """All but the first, which is not recorded, and the second, which is recorded first; none behind the last token."""
    recorded_first = ["launched", "waited"]
    model, inputs = captured_model(), padded(*lengths)
    expected = generate(model, inputs, capture=False).sequences
    order = []
    monkeypatch.setattr(Tape, "launch", lambda tape, replay, _: (order.append("launched"), replay()))
    noted(monkeypatch, GenerationMixin, "_has_unfinished_sequences", lambda *_, **__: order.append("asked"))
    waits = noted(monkeypatch, Tape, "wait", lambda *_: order.append("waited"))
    out = generate(model, inputs)
    assert torch.equal(out.sequences, expected) and len(waits) == 12
    assert order == [*["asked"] * 3, *recorded_first, *["launched", "asked", "waited"] * 11, "asked"]
    assert out.past_key_values.captured._launched is out.past_key_values.captured.ahead is None


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_step_that_was_launched_in_vain_is_taken_back(case):
    """The cache holds what was asked for, and serves a next call; by a criterion, and by an error."""
    model, inputs = captured_model(case), padded(9)
    options = {"stopping_criteria": [Stops(15)]}
    reference = generate(model, inputs, capture=False, **options)
    out = generate(model, inputs, **options)
    assert torch.equal(out.sequences, reference.sequences) and recordings(out) == 1

    cut = LatentCache(model.config)

    def fails(tokens):
        if cut.get_seq_length() == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, inputs, past_key_values=cut, streamer=SimpleNamespace(put=fails))
    for cache in (out.past_key_values, cut):
        assert cache.captured._launched is None
        assert [int(layer.cache_seqlens[0]) for layer in cache.layers] == [out.sequences.shape[1] - 1] * 2
        more = {"input_ids": torch.cat((out.sequences, models.tokens(1, 3)), 1)}
        other = copy.deepcopy(reference.past_key_values)
        expected = generate(model, more, past_key_values=other, capture=False).sequences
        assert torch.equal(generate(model, more, past_key_values=cache).sequences, expected)


def test_a_launched_step_is_taken_back_before_another_call(monkeypatch):
    """A call of one's own between two steps, by a streamer, sees the cache as uncaptured steps left it."""
    model, inputs, found = captured_model(), padded(9), []
    for capture in (False, True):
        cache, logits = LatentCache(model.config), []

        def looks(tokens, cache=cache, logits=logits):
            if cache.get_seq_length() == 15 and not logits:
                logits.append(model(tokens[:, None], past_key_values=cache).logits)
                cache.crop(-1)

        streamer = SimpleNamespace(put=looks, end=lambda: None)
        out = generate(model, inputs, past_key_values=cache, streamer=streamer, capture=capture)
        found.append((out.sequences, *logits))
    assert torch.equal(found[0][0], found[1][0])
    assert models.relative_error(found[1][1], found[0][1]) < models.TOLERANCE


def test_a_launched_step_that_ran_with_other_inputs_is_taken_back():
    """A hook on the model may change what ``prepare_inputs_for_generation`` gave; and all else is the same."""
    model, inputs = captured_model(), padded(9, 4)

    def later(module, _, arguments):
        is_step = arguments["input_ids"] is not None and arguments["input_ids"].shape[1] == 1
        return (), {**arguments, "position_ids": arguments["position_ids"] + 40} if is_step else arguments

    model.register_forward_pre_hook(later, with_kwargs=True)
    expected, out = (generate(model, inputs, capture=capture, output_logits=True) for capture in (False, True))
    assert torch.equal(out.sequences, expected.sequences) and recordings(out) == 1
    errors = [models.relative_error(*pair) for pair in zip(out.logits, expected.logits, strict=True)]
    assert max(errors) < models.TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-3),
        lambda cache: cache.reset(),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        copy.deepcopy,
        lambda cache: pickle.loads(pickle.dumps(cache)),
    ],
    ids=["crop", "reset", "reorder", "copy", "pickle"],
)
def test_a_cache_that_a_streamer_changes_has_no_launched_step(change):
    model, inputs, found = captured_model(), padded(9, 9), []
    for capture in (False, True):
        cache, made = LatentCache(model.config), []

        def looks(tokens, cache=cache, made=made):
            if cache.get_seq_length() == 15 and not made:
                made.append(change(cache) or cache)
                lengths = [int(layer.cache_seqlens[0]) for layer in made[0].layers]
                assert lengths == [made[0].get_seq_length()] * 2

        options = {"streamer": SimpleNamespace(put=looks, end=lambda: None), "capture": capture}
        out = generate(model, inputs, past_key_values=cache, output_logits=True, **options)
        latents = [layer.used()[0].clone() for layer in made[0].layers]
        found.append((out.sequences, torch.stack(out.logits), *latents))
    for expected, mine in zip(*found, strict=True):
        assert expected.shape == mine.shape and models.relative_error(mine, expected) < models.TOLERANCE


def test_two_threads_do_not_get_the_same_pages(monkeypatch):
    model, both = captured_model(**LARGE), threading.Barrier(2)
    generate(model, padded(9))
    share = LatentCache.sharing_pages

    def shared(cache, static):
        if not static:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # for the other thread to come here, too
        return share(cache, static=static)

    monkeypatch.setattr(LatentCache, "sharing_pages", shared)
    call = (model, model.config, 1, 9, 23)
    with ThreadPoolExecutor(2) as threads:
        caches = [each.result() for each in [threads.submit(model.graph_store.new_cache, *call) for _ in range(2)]]
    assert sum(cache.is_initialized for cache in caches) == 1


def test_pages_that_outgrow_the_model_are_not_kept(monkeypatch):
    monkeypatch.setattr(captured, "_ROOM_FOR_ANSWER", 16)
    monkeypatch.setattr(captured, "_CAPACITY_STEP", 16)
    model = captured_model(vocab_size=256, num_hidden_layers=1)
    generate(model, padded(*[9] * 20))
    assert model.graph_store._kept is not None
    out = generate(model, padded(*[9] * 20), max_new_tokens=70)
    assert out.past_key_values.nbytes > sum(parameter.nbytes for parameter in model.parameters())
    assert model.graph_store._kept is None


def test_kernels_are_compiled_before_the_first_token(monkeypatch):
    """By a prompt and a step over pages of their own; once while pages are kept."""
    model, inputs = captured_model(**LARGE), padded(9, 4)
    expected, model.graph_store = generate(model, inputs).sequences, GraphStore(Tape)
    calls, shapes, forward = [], [], type(model)._run_base_model

    def compile_ahead(device, call, run, later):
        def note(self, **given):
            shapes.append(tuple(given["input_ids"].shape))
            return forward(self, **given)

        calls.append(call[-2:])
        with monkeypatch.context() as inside:
            inside.setattr(type(model), "_run_base_model", note)
            run()
            shapes.append("later")
            later()

    monkeypatch.setattr(captured, "compile_ahead", compile_ahead)
    for _ in range(2):
        assert torch.equal(generate(model, inputs).sequences, expected)
    assert calls == [(2, 16)] and shapes == [(2, 16), "later", (2, 1)]
