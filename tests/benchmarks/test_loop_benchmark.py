"""The benchmark of the loop without a GPU: small shapes, measured from end to end with a tape for a graph."""

import pytest
import torch

from benchmarks import loop
from mha2mla.modeling import paged_model
from mha2mla.random_models import converted_config, random_model, source_config
from tests.modeling.tape import Tape


@pytest.mark.parametrize("name", ["mha", "mla"])
def test_a_row(name):
    shape = source_config("tiny", num_key_value_heads=4)
    if name == "mla":
        shape = converted_config(shape, layout="per-group", kv_lora_rank=32, qk_rope_head_dim=4)
    model = random_model(shape, "cpu", torch.float32)
    if name == "mha":
        model.set_attn_implementation("mha2mla")
        model = paged_model(model)
    row = loop.measure(name, model, 3, 70, 5, recorder=Tape())
    assert row["status"] == "ok" and row["error"] < 1e-4
    assert row["tokens_per_s"] > 0 < row["graph_ms"] and row["cache_gb"] > 0
    assert "wrong" in loop.measure(name, model, 3, 70, 5)["status"]  # no graph was recorded
