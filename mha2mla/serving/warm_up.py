"""Kernels of a checkpoint, compiled before it is served: ``mha2mla warm-up``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mha2mla.loop import Loop
from mha2mla.loop.answering import served
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.captured import compile_steps
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.registry import AttentionConstants
from mha2mla.modeling.tensor_parallel import HeadShard
from mha2mla.serving.paged_step import SERVED_BY, codes_without_kernel, compile_layer
from mha2mla.trial_models import random_model


def compile_kernels(
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    batches: Sequence[int] = (1,),
    prompt: int = 256,
    max_sequences: int = 64,
    max_tokens: int = 2048,
    tensor_parallel_size: int = 1,
) -> dict[str, int]:
    """Compiles the kernels that a model launches in ``generate``, in a loop over ragged batches and in vLLM.

    The model is made of random weights, and takes as much of the GPU's memory as the real one.

    Args:
        config: of a converted model or a source; a source has no kernels in ``generate`` and vLLM.
        batches, prompt: sequences of a ``generate``, and tokens of their prompts.
        max_sequences: of a step of a loop. max_tokens: of a step of a loop, or of vLLM.
        tensor_parallel_size: processes among which vLLM splits the heads.

    Returns:
        By use, how many kernels TileLang's disk cache lacked.

    Raises:
        ValueError: ``device`` is no CUDA device, or so many processes cannot share the heads.
    """
    if device.type != "cuda":
        raise ValueError(f"device is {device}; expected a CUDA device: kernels are compiled for the GPU that runs them")
    layers = engine_layers(config, dtype, tensor_parallel_size) if isinstance(config, MHA2MLAConfig) else []
    model, counts = random_model(config, device, dtype), {}
    if isinstance(model, MHA2MLAForCausalLM):
        counts["generate"] = sum(compile_steps(model, config, rows, prompt) for rows in batches)
    pages = max_sequences + 8  # a page for each sequence, and a prompt's
    counts["loop"] = Loop(served(model), num_pages=pages, max_sequences=max_sequences, max_tokens=max_tokens).compiled
    if isinstance(model, MHA2MLAForCausalLM):
        longest, backend = config.max_position_embeddings, ATTENTION_BACKENDS.get(SERVED_BY)
        counts["vLLM"] = sum(
            compile_layer(layer_tensors(layer, max_tokens, dtype, device), backend, layer, longest) for layer in layers
        )
    return counts


def engine_layers(config: MHA2MLAConfig, dtype: torch.dtype, ranks: int) -> list[AttentionConstants]:
    """Constants of the different layers in vLLM, with one rank's heads and without speculation. Its cache holds latents
    of ``dtype`` if no kernel decodes their codes.

    Raises:
        ValueError: the ranks cannot share the heads.
    """
    if codes_without_kernel(config, dtype, ranks, drafted=0) is not None:
        config = config.with_options(latent_bits=16)
    layers = config.attention_constants()
    return list(
        dict.fromkeys(replace(each, geometry=HeadShard.of(each.geometry, 0, ranks).geometry) for each in layers)
    )


def layer_tensors(
    layer: AttentionConstants, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor | None]:
    """Zeros by a backend's names, of a layer and its new tokens."""
    geometry = layer.geometry
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    heads, up, latent = geometry.num_attention_heads, geometry.num_up_projection_heads, geometry.kv_lora_rank
    widths = (geometry.qk_nope_head_dim, geometry.qk_rope_head_dim)
    q_nope, q_pe = zeros(tokens, heads, sum(widths)).split(widths, dim=-1)
    tensors = {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "latent": zeros(tokens, latent),
        "k_pe": zeros(tokens, geometry.num_rope_heads, widths[1]) if geometry.has_rope_cache else None,
        "k_up": zeros(up, widths[0], latent) if widths[0] else None,
        "v_up": zeros(up, geometry.v_head_dim, latent),
        "inv_freq": torch.zeros(geometry.num_rope_heads, widths[1] // 2, device=device),
    }
    if geometry.has_key_codes or not geometry.has_rope_cache:
        tensors |= {"rope_weight": zeros(widths[1], latent), "rope_bias": zeros(widths[1])}
    if geometry.has_codes:
        tensors["latent_centers"] = zeros(2, latent)
    return tensors
