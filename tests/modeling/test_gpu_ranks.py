"""Two GPUs: tensor parallelism by NCCL, and layers on different devices; the tokens of one GPU."""

import os
import subprocess
import sys

import pytest
import torch

from mha2mla.modeling import MHA2MLAForCausalLM
from tests.commands import ROOT
from tests.modeling import models
from tests.modeling.test_tensor_parallel import OPTIONS, prompt, write, write_source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs on this machine"),
]
CASE = "32 heads"


def llama_of_32_heads() -> MHA2MLAForCausalLM:
    """A random Llama with a rotary key per head, float32, on a GPU."""
    keys = {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 1024, "num_hidden_layers": 4}
    source = models.source_config("llama", **keys, head_dim=32, initializer_range=0.05)
    geometry = {"num_rope_heads": 32, "kv_lora_rank": 128, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24}
    config = models.mla_config(source_config=source.to_dict(), v_head_dim=32, softmax_scale=32**-0.5, **geometry)
    return models.randomise(MHA2MLAForCausalLM(config).eval()).cuda()


def test_two_gpus_compute_what_one_does(tmp_path):
    write(tmp_path, CASE, llama_of_32_heads())
    write(tmp_path, "odd groups", models.mla_model("odd groups"))
    write_source(tmp_path)
    code = f"from tests.modeling.test_tensor_parallel import rank_main; rank_main({str(tmp_path)!r}, [{CASE!r}])"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@torch.no_grad()
def test_layers_on_two_devices(tmp_path):
    model = llama_of_32_heads()
    given = {name: tensor.cuda() for name, tensor in prompt().items()}
    expected = model.generate(**given, **OPTIONS)
    model.save_pretrained(tmp_path)
    size = sum(parameter.nbytes for parameter in model.parameters())
    limits = {0: int(0.6 * size), 1: size}
    spread = MHA2MLAForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map="auto", max_memory=limits)
    assert {parameter.device.index for parameter in spread.parameters()} == {0, 1}
    assert torch.equal(spread.eval().generate(**given, **OPTIONS).cpu(), expected.cpu())
    with pytest.raises(ValueError, match="layers run on cuda:0 and cuda:1"):
        spread.paged_cache(num_pages=2)
