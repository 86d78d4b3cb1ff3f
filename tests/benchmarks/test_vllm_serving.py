"""What the vLLM benchmark decides by, without vLLM: random checkpoints, and which tokens are right."""

import os
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

from benchmarks import vllm_engine, vllm_exact, vllm_serving, vllm_speed
from mha2mla.modeling import ATTENTION_BACKENDS, MHA2MLAForCausalLM

SMALL, LARGE = ("latent", "by-layer", "shared", "per-group"), ("latent", "shared", "narrow", "narrow-per-group")


@pytest.mark.parametrize(
    ("shape", "layout"),
    [*(("smollm2", each) for each in SMALL), *(("llama-2-7b", each) for each in LARGE), ("llama-3-8b", "latent")],
)
def test_shapes(shape, layout):
    config = vllm_engine.random_config(shape, layout, layers=2)
    widths = [config.layer_geometry(layer).cache_numel_per_token for layer in range(2)]
    width = {"smollm2": 192, "narrow": 512}.get(shape if shape == "smollm2" else layout, 1024)
    assert widths == ([192, 128] if layout == "by-layer" else [width] * 2)
    assert config.softmax_scale == (config.hidden_size // config.num_attention_heads) ** -0.5


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", "latent"),
        ("qwen3", "latent"),
        ("qwen3_moe", "latent"),
        ("mixtral", "latent"),
        ("olmo2", "shared"),
        ("gemma3_text", "per-group"),
    ],
)
def test_other_families_have_kernels(family, layout):
    config = vllm_engine.random_config(family, layout, layers=6)
    assert config.source_config["model_type"] == family
    assert {layer.window for layer in config.attention_constants()} == ({512, None} if "gemma" in family else {None})
    backend, (geometry,) = ATTENTION_BACKENDS.get("mla_paged"), {config.layer_geometry(layer) for layer in range(6)}
    assert backend.refusal(geometry, 64, torch.bfloat16, "cuda") is None


def test_a_token_is_right_if_only_rounding_decided_against_it():
    torch.manual_seed(0)
    config = vllm_engine.random_config("smollm2", "shared", layers=2)
    config.vocab_size, config.initializer_range = 96, 0.06
    high = MHA2MLAForCausalLM(config).eval()
    low = MHA2MLAForCausalLM(config).to(torch.bfloat16).eval()
    low.load_state_dict(high.state_dict())
    (prompt,) = vllm_engine.prompts_of(96, [20])
    tokens = []
    for _ in range(6):
        ids = torch.tensor([prompt + tokens])
        tokens.append(int(low(ids, use_cache=False).logits[0, -1].argmax()))
    row = vllm_exact.judge((low, high), prompt, tokens)
    assert (row["tokens"], row["equal"], row["beyond"]) == (6, 6, 0) and row["worst"] <= 1
    worst_choice = int(high(torch.tensor([prompt + tokens[:3]]), use_cache=False).logits[0, -1].argmin())
    row = vllm_exact.judge((low, high), prompt, [*tokens[:3], worst_choice])
    assert (row["equal"], row["beyond"]) == (3, 1) and row["worst"] > 1


class Engine:
    """An engine that decodes one sequence more in every step, until all do."""

    def __init__(self):
        self.waiting, self.decoding, self.aborted = [], [], []

    def add_request(self, name, prompt, parameters):
        self.waiting.append(name)

    def step(self):
        if self.waiting:
            self.decoding.append(self.waiting.pop(0))
        return [SimpleNamespace(request_id=name, finished=False) for name in self.decoding]

    def abort_request(self, names):
        self.aborted += names
        self.decoding = []

    def has_unfinished_requests(self):
        return bool(self.decoding)


def test_a_decode_rate_counts_steps_in_which_all_decode(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **_: None))
    engine = Engine()
    arguments = vllm_serving.parser().parse_args(["speed", "--contexts", "9", "--steps", "5", "--patience", "60"])
    rate = vllm_speed._decode_rate
    row = rate(SimpleNamespace(llm_engine=engine), 20, 9, 3, arguments)
    assert row["status"] == "ok" and len(engine.aborted) == 3
    assert row["tokens_s"] * row["step_ms"] == pytest.approx(3000)
    arguments.patience = -1.0
    row = rate(SimpleNamespace(llm_engine=Engine()), 20, 9, 3, arguments)
    assert "only 1 had decoded" in row["status"]


def test_the_entry_point_is_made_for_this_process_and_those_that_it_starts(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    vllm_engine.with_entry_point()
    found = [point.value for point in entry_points(group="vllm.general_plugins") if point.name == "mha2mla"]
    assert set(found) == {"mha2mla.serving.plugin:register"}
    inherited = os.environ["PYTHONPATH"].split(os.pathsep)
    assert inherited == ["before"] or inherited == [str(vllm_engine.ROOT), "before", sys.path[-1]]


def test_cancelled_requests_give_no_answer(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda max_tokens, **_: max_tokens))

    class Answering(Engine):
        steps = 0

        def add_request(self, name, prompt, new_tokens):
            self.decoding.append(name)

        def abort_request(self, names):
            self.aborted += names
            self.decoding = [name for name in self.decoding if name not in names]

        def step(self):
            self.steps += 1
            done = self.steps > 8
            outputs = [SimpleNamespace(token_ids=[1] * 4)]
            said = [SimpleNamespace(request_id=f"{n}-x", finished=done, outputs=outputs) for n in self.decoding]
            self.decoding = [] if done else self.decoding
            return said

    engine = Answering()
    answers = vllm_exact.cancelled(SimpleNamespace(llm_engine=engine), [[1]] * 11, 4)
    assert engine.aborted == ["0", "5", "10"] and sorted(answers) == [1, 2, 3, 4, 6, 7, 8, 9]
