"""The entry point ``vllm.general_plugins``: what every process of vLLM calls before it reads a model's config."""

from __future__ import annotations

ARCHITECTURE = "MHA2MLAForCausalLM"
MODEL = "mha2mla.serving.vllm_model:VLLMForCausalLM"


def register() -> None:
    """Makes ``model_type: mha2mla`` known to transformers' ``AutoConfig`` and its architecture to vLLM.

    May be called any number of times. Imports nothing that touches CUDA: the model's class is given by name, and vLLM
    imports it where it is built.
    """
    from vllm import ModelRegistry

    import mha2mla.modeling  # noqa: F401  (registers the config)

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)
