"""Products of few rows, validated and dispatched, with their torch.library schema; and maps of single heads."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.ops import ALIGNMENT, argument_error, check_backend, check_like, register_kernel
from mha2mla.kernels.skinny_linear.selection import (
    COLUMN_STEP,
    OUTPUT_STEP,
    ROW_BUCKETS,
    is_skinny,
    serves_few_tokens,
    serves_linear,
)


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, backend: str | None = None
) -> Tensor:
    """x W^T + b, rounded once, or silu(x W_gate^T) * (x W_up^T) (SwiGLU, arXiv 2002.05202) with each step rounded.

    Args:
        x: [..., K].
        weight: [N, K], contiguous; read before the kernel that is launched before has ended, so not one that it writes.
        bias: [N]; not with ``gated``.
        gated: the first half of the weight's rows is W_gate, the second W_up.
        backend: "tilelang", "reference", or None: TileLang where :func:`is_skinny`.

    Returns:
        [..., N], or [..., N / 2].

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_backend(backend)
    if weight.ndim != 2 or x.ndim < 1 or weight.shape[1] != x.shape[-1]:
        wanted = f"[N, {x.shape[-1] if x.ndim else 1}], by x"
        raise argument_error("weight.shape", tuple(weight.shape), wanted)
    check_like("weight", weight, x, "x")
    if gated and weight.shape[0] % 2:
        raise argument_error("weight.shape[0]", weight.shape[0], "an even number of rows, gate and up")
    if bias is not None and (
        gated or bias.shape != weight.shape[:1] or (bias.dtype, bias.device) != (x.dtype, x.device)
    ):
        raise argument_error(
            "bias",
            f"{bias.dtype} {tuple(bias.shape)} on {bias.device} with gated={gated}",
            f"None, or without gated {x.dtype} {tuple(weight.shape[:1])} on {x.device}",
        )
    asked = backend == "tilelang"
    served = serves_linear(x, weight) if asked else backend is None and is_skinny(x, weight, gated)
    if asked and not served:
        raise argument_error(
            "backend",
            f"'tilelang' for {x.dtype} {tuple(x.shape)} by {tuple(weight.shape)} on {x.device}",
            f"1 to {ROW_BUCKETS[-1]} rows of bfloat16 or float16 on an sm_90, K a multiple of {COLUMN_STEP}, N of"
            f" {OUTPUT_STEP}, and a contiguous weight that begins at a multiple of {ALIGNMENT} bytes",
        )
    return _skinny_linear_op(x, weight, bias, gated, served)


def skinny_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """Oracle of :func:`skinny_linear`, for any number of rows."""
    out = F.linear(x, weight, bias)
    if not gated:
        return out
    gate, up = out.chunk(2, dim=-1)
    return F.silu(gate) * up


_skinny_linear_op = register_kernel(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias, bool gated, bool compiled) -> Tensor",
    skinny_linear_reference,
    lambda x, weight, bias, gated: x.new_empty(*x.shape[:-1], weight.shape[0] // (1 + gated)),
    "mha2mla.kernels.skinny_linear.streamed:launch_skinny_linear",
)


def project_heads(x: Tensor, weight: Tensor, *, transposed: bool = False, out: Tensor | None = None) -> Tensor:
    """x [..., tokens, H, i] by a weight [k, i, o], or with ``transposed`` [k, o, i], for each H / k heads: [..., H, o].

    W_UK, or transposed W_UV (DeepSeek-V2, arXiv 2405.04434, 2.1), rounded once. By the kernel for few tokens where
    :func:`serves_few_tokens`, else by the one that :func:`serves_heads`: weights are not repeated, x is read where it
    lies, and the kernel begins while the one before ends. Into ``out`` of that shape, contiguous, where it is given.
    """
    from mha2mla.kernels.skinny_linear import up_projections as kernels

    if out is None:
        out = x.new_empty(*x.shape[:-1], weight.shape[1 if transposed else 2])
    if not serves_few_tokens(x, weight, transposed):
        kernels.launch_up_projection(x, weight, out, transposed)
    elif transposed:
        kernels.launch_w_uv(x, weight, out)
    else:
        kernels.launch_w_uk(x, weight, out)
    return out
