"""The module that is trained: its state and loss, codes as noise, and graphs of its layers."""

import itertools

import pytest
import torch

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.fit.repeatable import deterministic
from mha2mla.healing import distillation as distillation_module
from mha2mla.healing.distillation import Distillation, warm_up
from mha2mla.healing.settings import Settings
from mha2mla.healing.student import load_models, prepare_models
from mha2mla.healing.training import tokens_in
from mha2mla.trial_models import converted_config, random_model, source_config
from tests.conversion import tiny
from tests.healing.conftest import LATENT
from tests.ops import Calls


def test_state_is_the_trained_weights(folders):
    settings = Settings.of("quick", tokens=64, length=32, long_length=32)
    distillation = Distillation(load_models(*folders, torch.device("cpu"), settings), None)
    state = distillation.state_dict()
    assert state and all(name.startswith("student.model.layers.") and ".self_attn." in name for name in state)
    assert not any(name.endswith("inv_freq") for name in state)


def test_windows_of_several_lengths_are_one_mean(folders):
    settings = Settings.of("quick", tokens=64, length=16, long_length=32)
    distillation = Distillation(load_models(*folders, torch.device("cpu"), settings), None)
    ids = torch.randint(2, 258, (3, 32))
    lengths = [16, 32, 16]
    alone = [distillation(ids[row : row + 1], lengths[row : row + 1])["loss"] for row in range(3)]
    torch.testing.assert_close(distillation(ids, lengths)["loss"], sum(alone) / 3)


@pytest.mark.parametrize(("window", "looks"), [(None, 0), (32, 0), (31, 2)])
def test_a_pass_waits_for_the_device_where_windows_are_masked_alone(window, looks):
    """And the loss is that of both models as they are."""
    source = tiny.config("mistral", sliding_window=window)
    config = converted_config(source, layout="latent", cache_ratio=0.5)
    teacher, student = (random_model(each, "cpu", torch.float32) for each in (source, config))
    ids = torch.randint(3, 60, (2, 32))
    with torch.no_grad():
        expected, found = (each.eval()(ids, use_cache=False).logits.log_softmax(-1) for each in (teacher, student))
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    settings = Settings.of("quick", tokens=64, length=32, long_length=32, train="all")
    distillation = Distillation(
        prepare_models(teacher.requires_grad_(False), student, torch.device("cpu"), settings), None
    ).train()
    with Calls() as calls:
        loss = distillation(ids, [32, 32])["loss"]
        loss.backward()
    torch.testing.assert_close(loss, kl, rtol=1e-4, atol=1e-6)
    assert calls.names.count("aten::_local_scalar_dense") == looks


@pytest.fixture(scope="module")
def coded(folders, tmp_path_factory):
    """Folder of a conversion over 3-bit codes."""
    folder = tmp_path_factory.mktemp("coded") / "converted"
    tiny.convert(folders[0], folder, {**LATENT, "latent.bits": 3}, evaluation="builtin:prose")
    return folder


@pytest.fixture
def models(folders, coded):
    """Both models, the student over codes, all weights trained."""
    settings = Settings.of("quick", tokens=64, length=32, long_length=32, train="all")
    return load_models(folders[0], coded, torch.device("cpu"), settings)


def test_codes_are_noise_that_gradients_pass(folders, coded):
    settings = Settings.of("quick", tokens=64, length=32, long_length=32)
    models = load_models(folders[0], coded, torch.device("cpu"), settings)
    ids, distillation = tiny.some_tokens(2, 32), Distillation(models, None)
    loss = distillation(ids, [32, 32])["loss"]
    expected = models.teacher(ids).logits.log_softmax(-1)
    for bits, same in ((3, True), (16, False)):
        models.student.config.latent_bits = bits
        found = models.student(ids, use_cache=True).logits.log_softmax(-1)
        kl = (expected.exp() * (expected - found)).sum(-1).mean()
        assert (abs(kl.item() / loss.item() - 1) < 1e-4) is same
    loss.backward()
    names = ("kv_a_proj.weight", "v_b_proj")
    attention = models.student.model.layers[0].self_attn
    assert all(attention.get_parameter(name).grad.abs().sum() > 0 for name in names)


def test_compiled_layers_train_as_they_are(models):
    ids, lengths = tiny.some_tokens(2, 32), [32, 32]
    found = []
    for compiled in (False, True):
        distillation = Distillation(models, None)
        if compiled:
            distillation.compile_layers()
        with Calls() as calls:
            evaluated = distillation.eval()(ids, lengths)["loss"]
        assert "aten::silu" in calls.names  # evaluation compiles nothing
        loss = distillation.train()(ids, lengths)["loss"]
        loss.backward()
        found.append(
            [evaluated, loss, *(each.grad.clone() for each in distillation.parameters() if each.requires_grad)]
        )
        distillation.zero_grad()
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-6)
    with torch.profiler.profile() as profile:
        distillation(ids, lengths)["loss"].backward()
    names = [each.key for each in profile.key_averages()]
    assert not {"aten::silu", "aten::_log_softmax"} & set(names)


def test_layers_have_one_graph(models):
    graphs = []
    torch.compiler.reset()

    def backend(graph, _):
        graphs.append(graph)
        return graph

    for layer in models.student.base_model.layers:
        layer.compile(dynamic=False, backend=backend)
    states = torch.randn(2, 32, models.student.config.hidden_size)
    counts = []
    for layer in models.student.base_model.layers:
        layer(states, position_ids=torch.arange(32)[None])
        counts.append(len(graphs))
    assert 0 < counts[0] == counts[-1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_is_one_graph(device, monkeypatch):
    """Of the teacher, and of the student: attention is an op in it."""
    monkeypatch.setattr(distillation_module, "_COMPILATION", {"dynamic": False, "backend": "eager"})
    source = source_config("smollm2-135m", num_hidden_layers=2, vocab_size=512)
    config = converted_config(source, layout="latent", cache_ratio=0.1875)
    teacher, student = (random_model(each, device, torch.float32) for each in (source, config))
    settings = Settings.of("quick", tokens=256, length=128, long_length=128, train="all")
    models = prepare_models(teacher.requires_grad_(False), student, torch.device(device), settings)
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    distillation = Distillation(models, torch.bfloat16).train()
    distillation.compile_layers()
    distillation(torch.randint(3, 500, (2, 128), device=device), [128, 128])["loss"].backward()
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"], "two layers and the loss"


def test_every_shape_has_its_graph(models, monkeypatch):
    monkeypatch.setattr(distillation_module, "_COMPILATION", {"dynamic": False, "backend": "eager"})
    torch.compiler.reset()
    distillation, counts = Distillation(models, None).train(), []
    distillation.compile_layers()
    for length in range(16, 21):  # with a teacher and a student 10 graphs of layers, PyTorch's limit is 8
        distillation(tiny.some_tokens(1, length), [length])
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len({after - before for before, after in itertools.pairwise(counts)}) == 1


def test_training_runs_what_warm_up_compiled(models):
    torch.compiler.reset()
    distillation = Distillation(models, None)
    distillation.compile_layers()
    blocks = TokenBlocks.of(tiny.some_tokens(4, 32))
    warm_up(distillation, blocks, 2)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with deterministic(warn_only=True):
        distillation.train()(blocks.tokens[:2], torch.full((2,), 32))["loss"].backward()
    assert graphs and torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.gpu
def test_compiled_codes_are_those_of_their_rows():
    """At the size of a real pass, where kernels loop over rows; memory that a kernel has not written holds NaN."""
    source = source_config("smollm2-135m", num_hidden_layers=2)
    config = converted_config(source, layout="latent", cache_ratio=0.5)
    config.latent_bits, place = 3, torch.device("cuda")
    teacher, student = (random_model(each, "cuda", torch.float32) for each in (source, config))
    settings = Settings.of("standard", tokens=2**16, train="all")
    models = prepare_models(teacher.requires_grad_(False), student, place, settings)
    torch.compiler.reset()
    distillation = Distillation(models, torch.bfloat16)
    distillation.compile_layers()
    ids, lengths = torch.randint(100, 49000, (4, 8192), device=place), torch.full((4,), 1024)
    with torch.no_grad():
        expected = distillation.eval()(ids, lengths)["loss"]
    for _ in range(8):
        distillation.zero_grad()
        torch.cuda.empty_cache()
        torch.full((2**31,), torch.nan, device=place)  # and freed
        found = distillation.train()(ids, lengths)["loss"]
        found.backward()
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


def test_a_step_runs_few_ops_and_fills_no_memory(models):
    distillation = Distillation(models, None)
    with deterministic(warn_only=True), torch.profiler.profile() as profile:
        distillation(tiny.some_tokens(2, 32), [32, 32])["loss"].backward()
    counts = {each.key: each.count for each in profile.key_averages()}
    assert counts["aten::fill_"] < 60 < counts["aten::empty_strided"]


@pytest.mark.parametrize("from_minutes", [False, True])
def test_layers_that_do_not_compile_train_plainly(from_minutes, folders, monkeypatch):
    settings = Settings.of("quick", tokens=64, length=32, long_length=32)
    distillation = Distillation(load_models(*folders, torch.device("cpu"), settings), None)
    distillation.compile_layers()
    forward = Distillation._forward

    def broken(self, *inputs):
        if self.compiled:
            raise RuntimeError("no compiler")
        return forward(self, *inputs)

    monkeypatch.setattr(Distillation, "_forward", broken)
    with pytest.warns(UserWarning, match="not compiled.*no compiler") as told:
        if from_minutes:
            assert tokens_in(2.0, distillation, settings, 258) > 0
        warm_up(distillation, TokenBlocks.of(tiny.some_tokens(2, 32)), 2)
    assert len(told) == 1
    assert distillation(tiny.some_tokens(2, 32), [32, 32])["loss"].isfinite()
