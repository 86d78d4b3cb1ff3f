"""The benchmark of generate without a GPU: a small shape, measured from end to end with a tape for a graph."""

import torch
from transformers import LlamaForCausalLM

from benchmarks import generate
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.modeling.captured import StepCapture
from mha2mla.modeling.recorders import CudaGraphs
from tests.modeling.tape import Tape


def test_the_shape():
    config = generate.converted(generate.llama_2_7b(8))
    assert {config.layer_geometry(layer).cache_numel_per_token for layer in range(8)} == {512 + 32 * 16}
    assert config.softmax_scale == 128**-0.5 and config.eos_token_id is None


def test_a_row():
    shape = generate.llama_2_7b(2)
    shape.update({"hidden_size": 64, "intermediate_size": 96, "vocab_size": 8192, "num_attention_heads": 4})
    shape.update({"num_key_value_heads": 4, "head_dim": 16})
    model = MHA2MLAForCausalLM._from_config(generate.converted(shape, 32, 4), dtype=torch.float32).eval()
    model.step_capture = StepCapture(Tape)
    source = LlamaForCausalLM._from_config(shape, dtype=torch.float32).eval()
    row = generate.measure(model, source, 2, 20, new_tokens=6, runs=1)
    assert row["status"] == "ok" and set(generate.COLUMNS) <= set(row)
    assert all(row[name] > 0 for name in ("captured_ms", "uncaptured_ms", "graph_ms", "first_ms", "source_first_ms"))
    model.step_capture = StepCapture(CudaGraphs)
    assert "wrong" in generate.measure(model, source, 2, 20, new_tokens=6, runs=1)["status"]
