"""The benchmark of the loop without a GPU: small shapes, measured from end to end with a tape for a graph."""

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import generate, loop
from mha2mla.modeling import MHA2MLAForCausalLM, paged_model
from tests.modeling.tape import Tape


@pytest.mark.parametrize("name", ["mha", "mla"])
def test_a_row(name):
    shape = generate.llama_2_7b(1)
    shape.update({"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "num_attention_heads": 4})
    shape.update({"num_key_value_heads": 4, "head_dim": 16})
    if name == "mla":
        model = MHA2MLAForCausalLM._from_config(generate.converted(shape, 32, 4), dtype=torch.float32).eval()
    else:
        source = LlamaForCausalLM._from_config(shape, dtype=torch.float32, attn_implementation="mha2mla")
        model = paged_model(source.eval())
    row = loop.measure(name, model, 3, 70, 5, recorder=Tape())
    assert row["status"] == "ok" and row["error"] < 1e-4
    assert set(loop.COLUMNS) - set(row) == {"of_source"}
    assert row["tokens_per_s"] > 0 < row["graph_ms"] and row["cache_gb"] > 0
    assert "wrong" in loop.measure(name, model, 3, 70, 5)["status"]  # no graph was recorded
