"""Attention functions for transformers: gradients that repeat, float32 without squares of the length."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mha2mla.modeling.source_attention import explain_window_attention, window_attention

REPEATABLE_ATTENTION = "mha2mla_repeatable"  # for ``config._attn_implementation``
UNGROUPED_SDPA = "mha2mla_ungrouped_sdpa"
# For windows without padding of models that see all of them: no function makes masks, before which transformers waits
# for the device to hear whether positions count on.
UNMASKED_REPEATABLE, UNMASKED_SDPA = "mha2mla_unmasked_repeatable", "mha2mla_unmasked_sdpa"


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """torch's deterministic mode; ``warn_only``: what has no kernel that repeats runs all the same.

    Memory that nothing was written to stays as it is: the mode would fill it.
    """
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextmanager
def tf32_on_cuda(device: torch.device) -> Iterator[None]:
    """float32 products with TF32's mantissa on a CUDA device: errors of 1e-3, where fits make do with 1e-2."""
    usual = torch.get_float32_matmul_precision()
    try:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(usual)


class _Attention(torch.autograd.Function):
    """SDPA whose two passes run where PyTorch insists on kernels that repeat.

    PyTorch chooses them in its strict deterministic mode only, not where it merely warns; and strict for a whole step
    would ask every user for an environment variable of cuBLAS (torch.use_deterministic_algorithms). The forward pass
    keeps SDPA's own graph, which the backward pass runs: once.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict) -> torch.Tensor:
        inputs = [tensor.detach() for tensor in (query, key, value)]
        for tensor, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True):
            tensor.requires_grad_(needed)
        with deterministic(warn_only=False), torch.enable_grad():
            made = F.scaled_dot_product_attention(*inputs, **options)
        ctx.inputs, ctx.made = [tensor for tensor in inputs if tensor.requires_grad], made
        return made.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with deterministic(warn_only=False):
            found = iter(torch.autograd.grad(ctx.made, ctx.inputs, gradient))
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None


@cache
def _warn(message: str) -> None:
    """Once, not for every layer."""
    warnings.warn(message, stacklevel=3)


def repeatable_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA attention (the same arguments and result); on CUDA its gradients repeat to the bit.

    16-bit causal windows on a Hopper are :func:`mha2mla.kernels.causal_attention`, all else
    :func:`deterministic_sdpa`, which torch.compile does not trace.

    Warns:
        UserWarning: why 16-bit causal windows are PyTorch's.
    """
    if query.device.type != "cuda":
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Casts outside, where autograd sees them: the backward pass runs without autocast.
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    repeats = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
    sizes = query.shape[2], key.shape[2], query.shape[1], query.shape[3], value.shape[3]
    if attention_mask is None and _has_kernels(dtype, query.device, *sizes):
        return window_attention(query, key, value, scaling), None
    return deterministic_sdpa(query, key, value, attention_mask, scaling), None


@torch.compiler.assume_constant_result
def _has_kernels(dtype: torch.dtype, device: torch.device, *sizes: int) -> bool:
    """True where 16-bit causal windows have kernels; warns why not. ``sizes``: of ``explain_window_attention``."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    why = explain_window_attention(dtype, device, *sizes)
    if why is not None:
        _warn(f"attention that is trained through is PyTorch's SDPA, not causal_attention: {why}")
    return why is None


@torch.compiler.disable  # modes that torch.compile does not trace
def deterministic_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """PyTorch's SDPA of query and key [B, H, S, d_qk] and value [B, H, S, d_v], causal without a mask: [B, S, H, d_v].

    Not cuDNN's backward pass, which PyTorch prefers on Hopper and which adds up in any order, but FlashAttention's in
    its deterministic mode. That takes values as wide as keys: they get columns of zeros.
    """
    width = value.shape[-1]
    padded = F.pad(value, (0, max(0, query.shape[-1] - width)))
    causal = attention_mask is None and query.shape[2] > 1
    options = {"attn_mask": attention_mask, "is_causal": causal, "scale": scaling}
    return _Attention.apply(query, key, padded, options)[..., :width].transpose(1, 2).contiguous()


def ungrouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA attention (same arguments and result) over one key and value head per query head.

    PyTorch runs float32 of grouped heads (``enable_gqa``) on CUDA by its math backend, which holds several
    [B, H, L, L] tensors: 14 heads at 16,384 tokens took 121 GiB. Its memory-efficient backend takes ungrouped heads.
    A single new token keeps grouped heads: its scores are one row, and repeating would copy the KV cache in every step.
    """
    if query.shape[2] == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=is_causal, **kwargs)
    groups = query.shape[1] // key.shape[1]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    ungrouped = torch.nn.Module()  # has no num_key_value_groups
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return sdpa_attention_forward(ungrouped, query, key, value, attention_mask, is_causal=causal, **kwargs)


for _name, _function in ((REPEATABLE_ATTENTION, repeatable_attention), (UNGROUPED_SDPA, ungrouped_sdpa)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)
AttentionInterface.register(UNMASKED_REPEATABLE, repeatable_attention)
AttentionInterface.register(UNMASKED_SDPA, sdpa_attention_forward)
