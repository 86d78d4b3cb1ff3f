"""FlashMLA's dense interface (https://github.com/deepseek-ai/FlashMLA, ``flash_mla_interface.py``) over these ops.

What is the same: arguments, their order and defaults (``softmax_scale=None`` means the width of a key to the power
-1/2, absorbed or not: what FlashMLA does, and right for DeepSeek's own callers only if they pass theirs, as they do),
shapes, natural logarithms, and that metadata is made once per step and shared by all of its layers.

What differs:

* any number of heads, rope width and latent width (``head_dim_v``) that :func:`mha2mla.kernels.explain_mla_decode` has
  nothing against, pages of 16 tokens and more, and any device (the reference serves where no kernel does);
* metadata that outlives its lengths is planned again, where FlashMLA computes garbage: whenever it meets another tensor
  of lengths, or one that torch has written to since (not what a replayed CUDA graph or a foreign kernel writes: capture
  the first call of a step too, or make new metadata);
* the log-sum-exp of a query that sees no key is -inf (FlashMLA: +inf), its output 0 as there;
* sparse attention, attention sinks and FlashMLA's 656-byte fp8 cache (four scales a token) are refused by name; the fp8
  cache of this package has one scale a token, in a tensor of its own (``mla_decode(latent_scale=)``);
* nothing is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mha2mla.kernels import DecodePlan, attention_varlen, mla_decode, plan_mla_decode


@dataclass
class MLAMetadata:
    """What FlashMLA calls FlashMLASchedMeta: the plan of a step, made in the first call that is given it.

    Attributes:
        plan: for the lengths that it was given last.
        planned_for: these, and how often torch had written to them by then.
    """

    plan: DecodePlan | None = None
    planned_for: tuple[Tensor, int] | None = None

    def plan_for(self, cache_seqlens: Tensor, make: Callable[[], DecodePlan]) -> DecodePlan:
        """The plan, refreshed if these are other lengths; ``make`` makes one. Nothing is read on the device."""
        # Tensors of inference mode do not count what is written to them.
        written = -1 if cache_seqlens.is_inference() else cache_seqlens._version
        if self.plan is None:
            self.plan = make()
        elif written < 0 or self.planned_for[0] is not cache_seqlens or self.planned_for[1] != written:
            self.plan.refresh(cache_seqlens)
        self.planned_for = (cache_seqlens, written)
        return self.plan


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[MLAMetadata, None]:
    """Metadata for a step's calls, and None for ``num_splits``; FlashMLA ignores arguments too."""
    return MLAMetadata(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: MLAMetadata,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Decode attention over a paged cache that holds latent and k_pe of a token side by side.

    Args:
        q: [B, S_q, H, d_c + d_r].
        k_cache: [P, page, 1, d_c + d_r].
        block_table: [B, max_pages] int32. cache_seqlens: [B] int32.
        head_dim_v: d_c.
        tile_scheduler_metadata: from :func:`get_mla_metadata`; new whenever shapes are.
        num_splits: None.
        softmax_scale: None means (d_c + d_r) ** -0.5.
        causal: as in :func:`mla_decode`.
        is_fp8_kvcache, others: FlashMLA's further arguments; anything but False and None is refused.

    Returns:
        out [B, S_q, H, d_c] and lse [B, H, S_q].

    Raises:
        ValueError: as :func:`mla_decode`, or for what is not served.
    """
    wanted = [name for name, value in {"is_fp8_kvcache": is_fp8_kvcache or None, **others}.items() if value is not None]
    if wanted or k_cache.ndim != 4 or k_cache.shape[2] != 1:
        what = f"{wanted[0]} is given" if wanted else f"k_cache.shape is {tuple(k_cache.shape)}"
        raise ValueError(f"{what}; expected dense attention over [P, page, 1, d_c + d_r] and none of FlashMLA's others")
    queries, cache = q.split([head_dim_v, q.shape[-1] - head_dim_v], -1), k_cache[:, :, 0, :head_dim_v]
    rope_cache = k_cache[..., head_dim_v:]
    plan = tile_scheduler_metadata.plan_for(
        cache_seqlens,
        lambda: plan_mla_decode(
            queries[0], rope_cache, block_table, cache_seqlens, qk_rope_head_dim=rope_cache.shape[3], causal=causal
        ),
    )
    return mla_decode(
        *queries, cache, rope_cache, block_table, cache_seqlens, causal=causal, plan=plan,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, return_lse=True,
    )  # fmt: skip


def flash_mla_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """FlashMLA's ``flash_attn_varlen_func``: prefill over keys and values that lie one sequence behind the other.

    Args:
        q: [T_q, H, d_qk]. k: [T_k, h_kv, d_qk]. v: [T_k, h_kv, d_v].
        cu_seqlens_qo, cu_seqlens_kv: [B + 1] int32. max_seqlen_qo: host int. max_seqlen_kv: not needed.
        dropout_p: 0. softmax_scale: None means d_qk ** -0.5. causal: bottom-right aligned.
        deterministic: results always are. is_varlen: not needed.

    Returns:
        out [T_q, H, d_v] and lse [T_q, H].
    """
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}; expected 0: this is inference")
    out, lse = attention_varlen(
        q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, causal=causal, return_lse=True,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
    )  # fmt: skip
    return out, lse.T
