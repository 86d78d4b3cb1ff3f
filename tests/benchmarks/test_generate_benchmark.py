"""The benchmark of generate without a GPU: a small shape, measured from end to end with a tape for a graph."""

import torch

from benchmarks import generate
from mha2mla.modeling.captured import StepCapture
from mha2mla.modeling.recorders import CudaGraphs
from mha2mla.random_models import converted_config, random_model, source_config
from tests.modeling.tape import Tape


def test_a_row():
    shape = source_config("tiny", num_key_value_heads=4, vocab_size=8192, eos_token_id=None, pad_token_id=0)
    widths = converted_config(shape, layout="per-group", kv_lora_rank=32, qk_rope_head_dim=4)
    model, source = (random_model(config, "cpu", torch.float32) for config in (widths, shape))
    model.step_capture = StepCapture(Tape)
    row = generate.measure(model, source, 2, 20, new_tokens=6, runs=1)
    assert row["status"] == "ok" and row["of_graph"] > 0 < row["of_source"]
    assert all(row[name] > 0 for name in ("captured_ms", "uncaptured_ms", "graph_ms", "first_ms", "source_first_ms"))
    model.step_capture = StepCapture(CudaGraphs)
    assert "wrong" in generate.measure(model, source, 2, 20, new_tokens=6, runs=1)["status"]
