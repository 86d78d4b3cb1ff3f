"""Configs and weights that no model has: one sentence that names the field or tensor, before any work."""

import ctypes
import gc
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from mha2mla.checkpoints import CheckpointError
from mha2mla.conversion.families import UnsupportedSourceError
from mha2mla.conversion.source.opening import open_source, read_tokenizer
from mha2mla.eval.loading import load_tokenizer
from mha2mla.pipeline import run
from tests.conversion import tiny
from tests.folders import edit_config, edit_json, edit_weights
from tests.test_hostile_files import FILES

NAN, INF = float("nan"), float("inf")
DEEP = json.loads("[" * 500 + "]" * 500)


def rope(**keys):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **keys}}


# (config keys, what the message must name); a key with the value ... is removed.
CONFIGS = [
    *((f"{field}={value!r:.20}", {field: value}, field) for field, values in {
        "num_attention_heads": (0, -4, "4", 4.0, None, True, [4], 1 << 40, 3),
        "num_key_value_heads": (0, -2, "2", 2.0, False, {"a": 1}, 3),
        "num_hidden_layers": (0, -1, "2", 2.5, None, 100_000, 10**12, 10**30, [2]),
        "hidden_size": (0, -48, "48", 48.5, None, 10**12, NAN),
        "intermediate_size": (0, "80", -1, 10**15),
        "head_dim": (0, -16, "16", 16.0, 15, 1),
        "vocab_size": (0, -1, "264", 1.5, 10**12, None),
        "max_position_embeddings": (0, -1, "256", 1e3, None),
        "rms_norm_eps": (NAN, INF, -1e-6, "1e-6", None, 0, 5, True, []),
        "hidden_act": ("sillu", 3, None, ["silu"], {}),
        "initializer_range": (NAN, "0.02", -1),
        "attention_dropout": (NAN, "0", 1.5, -0.1),
        "attention_bias": (1, "true", None),
        "mlp_bias": ("no", 0),
        "tie_word_embeddings": ("false", 2),
        "pad_token_id": (264, "0", -999, 1.5, [0]),
        "eos_token_id": ("1", 1.5, ["1"], {"a": 1}),
        "bos_token_id": ("0", {}),
        "rope_parameters": ("default", 3, [1]),
        "rope_scaling": ("linear", 7),
        "model_type": (None, 3, ["llama"], {}, "lama", "gpt2"),
        "quantization_config": ("awq", 5, {"quant_method": "awq"}),
        "transformers_weights": ("../other.safetensors",),
        "attn_logit_softcapping": (50.0,),
    }.items() for value in values),
    *((f"rope {key}={value!r:.20}", rope(**{key: value}), f"rope_parameters.{key}") for key, values in {
        "rope_theta": (NAN, INF, 0, -1e4, "10000", None, True, [1e4]),
        "rope_type": (3, ["yarn"]),
        "partial_rotary_factor": (NAN, 0, -1, "0.5", 2),
    }.items() for value in values),
    *((f"llama3 {key}={value!r:.20}", {"rope_parameters": {**tiny.LLAMA3, key: value}}, key) for key, values in {
        "factor": (0, NAN, "8", None, -1),
        "low_freq_factor": (0, NAN, "1", 4.0, None),
        "high_freq_factor": (INF, [], None),
        "original_max_position_embeddings": (0, -1, "64", 1.5),
    }.items() for value in values),
    *((f"yarn {key}={value!r:.20}", {"rope_parameters": {**tiny.YARN, key: value}}, key) for key, values in {
        "factor": (None, NAN, 0, "4"),
        "beta_fast": (NAN, 0, "32"),
        "beta_slow": (NAN, 64, "1"),
        "attention_factor": (NAN, 0, -1, "1"),
        "original_max_position_embeddings": (0, "64", -5),
    }.items() for value in values),
    *((f"longrope {key}={value!r:.20}", {"rope_parameters": {**tiny.LONGROPE, key: value}}, key) for key, values in {
        "short_factor": ([], [1.0], [NAN] * 8, [0] * 8, "short", None, ["1"] * 8),
        "long_factor": (3, {"a": 1}),
    }.items() for value in values),
    ("unknown rope", rope(rope_type="alibi"), "rope_type"),
    ("dynamic rope", rope(rope_type="dynamic", factor=2.0), "rope_type"),
    ("rope by layer", {"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention"),
    ("hidden is no multiple", {"head_dim": None, "hidden_size": 50}, "hidden_size"),
    ("deep", {"num_hidden_layers": DEEP}, "num_hidden_layers"),
    *((f"dtype={value!r}", {"dtype": value}, "dtype") for value in ("float33", 5, "int8", "Tensor")),
    ("labels", {"id2label": 5}, "config.json"),
]  # fmt: skip


@pytest.fixture
def damaged(source, tmp_path):
    """A copy whose big files are links: writing one anew leaves the original alone."""
    return shutil.copytree(source, tmp_path / "source", copy_function=os.link)


def refused(folder):
    """What is said before any work; fails if nothing is."""
    with pytest.raises((UnsupportedSourceError, CheckpointError)) as caught:
        open_source(folder).model(torch.device("cpu"), torch.float32)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 800
    return message


@pytest.mark.parametrize(("keys", "named"), [pytest.param(*rest, id=name) for name, *rest in CONFIGS])
def test_a_config_that_no_model_has_is_refused_by_the_fields_name(keys, named, damaged):
    edit_config(damaged, **keys)
    assert named in refused(damaged)


FAMILIES = [
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": "10"}, "no_rope_layers"),
    ("mistral-sliding", {"sliding_window": 0}, "sliding_window"),
    ("mistral-sliding", {"sliding_window": -9}, "sliding_window"),
    ("mistral-sliding", {"sliding_window": "9"}, "sliding_window"),
    ("mistral-sliding", {"sliding_window": NAN}, "sliding_window"),
    ("qwen2-sliding", {"sliding_window": None}, "sliding_window"),
    ("gemma3", {"sliding_window": None}, "sliding_window"),
    ("qwen2-sliding", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2-sliding", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ("qwen2-sliding", {"layer_types": "full_attention"}, "layer_types"),
    ("qwen2-sliding", {"layer_types": [1, 2]}, "layer_types"),
    ("qwen2-sliding", {"use_sliding_window": "yes"}, "use_sliding_window"),
    ("mixtral", {"num_local_experts": 10**9}, "num_local_experts"),
    ("mixtral", {"num_local_experts": "4"}, "num_local_experts"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3-moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
    ("qwen3-moe", {"moe_intermediate_size": 0}, "moe_intermediate_size"),
    ("qwen2-moe", {"qkv_bias": "yes"}, "qkv_bias"),
    ("qwen2-moe", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size"),
    ("olmoe", {"clip_qkv": "8"}, "clip_qkv"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("phi3-partial", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": NAN}},
     "partial_rotary_factor"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma3", {"query_pre_attn_scalar": NAN}, "query_pre_attn_scalar"),
    ("gemma3", {"query_pre_attn_scalar": "24"}, "query_pre_attn_scalar"),
    ("gemma3", {"hidden_activation": "gelu_nope"}, "hidden_activation"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": NAN},
                                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
     "rope_parameters.full_attention.rope_theta"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "keys", "named"), FAMILIES)
def test_a_familys_own_fields_are_looked_at(case, keys, named, checkpoint_of, tmp_path):
    folder = shutil.copytree(checkpoint_of(case), tmp_path / "source", copy_function=os.link)
    open_source(folder).model(torch.device("cpu"), torch.float32)
    edit_config(folder, **keys)
    assert named in refused(folder)


ATTENTION = "model.layers.1.self_attn."
QUERIES = f"{ATTENTION}q_proj.weight"
NAMES = tiny.model().state_dict()
WEIGHTS = [
    *((f"{part} {dtype}".replace("torch.", ""),
       {part: lambda x, dtype=dtype: x.to(dtype)}, part)
      for part in (ATTENTION + "k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight")
      for dtype in (torch.bool, torch.int8, torch.uint8, torch.int64, torch.complex64, torch.float8_e4m3fn)),
    *((f"zero {part}", {part: torch.zeros_like}, part)
      for part in (f"{ATTENTION}{letter}_proj.weight" for letter in "qkvo")),
    *((f"{value} in {part}", {part: lambda x, value=value: x * value}, part)
      for part in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight", ATTENTION + "v_proj.weight")
      for value in (NAN, INF)),
    ("zero embedding", {"model.embed_tokens.weight": torch.zeros_like}, "model.embed_tokens.weight"),
    ("huge", {QUERIES: lambda x: x * 1e25}, f"{QUERIES} has a value of"),
    ("a scalar", {"model.norm.weight": torch.tensor(1.0)}, "model.norm.weight"),
    ("no rows", {"lm_head.weight": torch.zeros(0, 48)}, "lm_head.weight"),
    ("transposed", {"lm_head.weight": torch.t}, "lm_head.weight"),
    ("nothing at all", dict.fromkeys(NAMES, ...), "is absent"),
    ("only one", dict.fromkeys(NAMES.keys() - {"model.norm.weight"}, ...), "is absent"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), [pytest.param(*rest, id=name) for name, *rest in WEIGHTS])
def test_weights_that_no_model_has_are_refused_by_the_tensors_name(change, named, damaged):
    edit_weights(damaged, change)
    with pytest.raises((UnsupportedSourceError, CheckpointError), match=named):
        source = open_source(damaged)
        source.model(torch.device("cpu"), torch.float32)
        source.check_weights()


@pytest.mark.parametrize("named", [QUERIES, "truncated or damaged"])
def test_damage_that_headers_show_does_not_wait_for_the_destinations_folder(named, damaged, tmp_path, monkeypatch):
    edit_weights(damaged, {QUERIES: lambda x: x.to(torch.float8_e4m3fn)})  # a file of its own, no link
    if named != QUERIES:
        os.truncate(damaged / "model.safetensors", 4096)
    made = []
    monkeypatch.setattr(run, "temporary_folder", lambda *_, **__: made.append(1))
    with pytest.raises(CheckpointError, match=named):
        run.convert(damaged, tmp_path / "mla", {"cache_ratio": 0.5}, preset="minimal", device="cpu", progress=False)
    assert not made


@pytest.mark.parametrize("change", FILES)
def test_a_file_of_weights_that_is_none_is_named(change, damaged):
    path = damaged / "model.safetensors"
    content = FILES[change](path.read_bytes())
    path.unlink()
    path.write_bytes(content)
    message = refused(damaged)
    assert "model.safetensors" in message or message.startswith("tensor ")  # of a whole file with other tensors


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"x"', "{}", '{"version": "1.0"}', "\0", "[" * 99_999])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_a_damaged_file_of_json_is_named_and_never_a_traceback(name, content, damaged):
    path = damaged / name
    path.unlink(missing_ok=True)
    path.write_text(content)
    try:
        open_source(damaged)
        read_tokenizer(str(damaged), "source")
    except (CheckpointError, UnsupportedSourceError) as error:
        assert name in str(error) or "tokenizer" in str(error) or "model_type" in str(error)
    else:
        assert content.startswith("{") and name != "config.json"


OWN_CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import PreTrainedTokenizer
class OwnTokenizer(PreTrainedTokenizer):
    pass
"""


@pytest.mark.parametrize("answer", ["y\n", ""])
def test_code_of_the_sources_is_never_run_nor_asked_about(answer, damaged, tmp_path, monkeypatch):
    """transformers asks on standard input, and runs it when the answer is y."""
    marker = tmp_path / "ran"
    (damaged / "tokenization_own.py").write_text(OWN_CODE.format(marker=str(marker)))
    own = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    edit_json(damaged / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=own)
    edit_config(damaged, auto_map={"AutoModelForCausalLM": "tokenization_own.OwnTokenizer"})
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with pytest.raises(CheckpointError, match="auto_map in tokenizer_config.json names code .* never run"):
        tiny.convert(damaged, tmp_path / "out")
    with pytest.raises(ValueError, match="custom code"):
        load_tokenizer(str(damaged), "source")
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_links_and_pipes_of_a_source_are_refused_before_they_are_opened(damaged, tmp_path):
    (tmp_path / "secret").write_text("secret")
    for name in ("LICENSE", "generation_config.json", "chat_template.jinja"):
        (damaged / name).unlink(missing_ok=True)
        (damaged / name).symlink_to(tmp_path / "secret")
        assert f"{name} is a link to" in refused(damaged)
        (damaged / name).unlink()
    os.mkfifo(damaged / "chat_template.jinja")
    assert "chat_template.jinja is no regular file" in refused(damaged)


def resident_bytes():
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_tokenizer_that_is_let_go_of_leaves_no_memory_behind(source):
    """1.2 MiB a conversion, for a text of 350 kB."""
    text = " ".join(f"{number:x}w{number * 7919:x}" for number in range(10_000))
    grown = []
    for _ in range(6):
        before = resident_bytes()
        read_tokenizer(str(source), "source")(text)
        gc.collect()
        grown.append(resident_bytes() - before)
    assert sum(grown[2:]) < 2 << 20


ON_TEXT = tiny.Recipe(calibration_tokens=256, calibration_lengths=64)


def test_a_layer_without_inputs_is_converted(damaged, tmp_path):
    edit_weights(damaged, {"model.layers.1.input_layernorm.weight": torch.zeros_like})
    report = tiny.convert(damaged, tmp_path / "out", ON_TEXT)
    assert [layer["fallback"] for layer in report.layers] == ["", ""]


def test_a_layer_that_overflows_on_text_is_named(damaged, tmp_path):
    norm, keys = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight"
    edit_weights(damaged, {norm: torch.full((48,), 1e14), keys: lambda weight: 1e13 * weight})
    with pytest.raises(CheckpointError, match="too large on the calibration text: layer 1: no rule gives a finite"):
        tiny.convert(damaged, tmp_path / "out", ON_TEXT)


def test_a_head_beside_a_config_that_ties_it_is_the_embedding(tmp_path):
    """transformers would not tie a head that differs; a copy is as good as none."""
    source = tiny.checkpoint(tmp_path / "source", tie_word_embeddings=False)
    edit_config(source, tie_word_embeddings=True)
    with pytest.raises(UnsupportedSourceError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        open_source(source).check_weights()
    edit_weights(source, {"lm_head.weight": open_source(source).reader.tensor("model.embed_tokens.weight").clone()})
    open_source(source).check_weights()
