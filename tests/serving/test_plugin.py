"""The entry point that vLLM calls, without vLLM: what it registers, how often, and what it imports."""

import tomllib
from importlib import import_module

from tests.commands import ROOT, python

ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]

CODE = """
import sys
from types import ModuleType

class ModelRegistry:
    models = {}
    register_model = models.__setitem__
    get_supported_archs = staticmethod(models.keys)

sys.modules["vllm"] = vllm = ModuleType("vllm")
vllm.ModelRegistry = ModelRegistry
from mha2mla.serving.plugin import register
register()
ours = dict(ModelRegistry.models)
ModelRegistry.models["MHA2MLAForCausalLM"] = "what a second call would overwrite"
register()
assert ModelRegistry.models == {"MHA2MLAForCausalLM": "what a second call would overwrite"}, ModelRegistry.models
assert ours == {"MHA2MLAForCausalLM": "mha2mla.serving.vllm_model:VLLMForCausalLM"}, ours
import torch
from transformers import CONFIG_MAPPING
assert "mha2mla" in CONFIG_MAPPING
assert not torch.cuda.is_initialized()
assert not {"tilelang", "triton", "mha2mla.serving.vllm_model"} & set(sys.modules), "imported too much"
"""


def test_the_entry_point_is_the_function():
    (target,) = ENTRY_POINTS["vllm.general_plugins"].values()
    module, _, name = target.partition(":")
    assert callable(getattr(import_module(module), name))


def test_plugin_registers_once_without_cuda_or_model():
    done = python(CODE)
    assert done.returncode == 0, done.stderr[-2000:]
