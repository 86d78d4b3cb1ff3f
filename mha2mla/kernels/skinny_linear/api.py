"""The public ops of products of few rows: validation, dispatch, plain torch, and their torch.library schemas."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.ops import ALIGNMENT, argument_error, check_backend, check_like, register_kernel
from mha2mla.kernels.skinny_linear.selection import (
    COLUMN_STEP,
    HEAD_COLUMNS,
    HEAD_ROWS,
    OUTPUT_STEP,
    ROW_BUCKETS,
    W_UK_ROWS,
    W_UK_TOKENS,
    WIDTH_STEP,
    is_skinny,
    serves_linear,
    serves_w_uk,
)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    groups: int = 1,
    gated: bool = False,
    backend: str | None = None,
) -> Tensor:
    """x W^T + b, rounded once, or silu(x W_gate^T) * (x W_up^T) (SwiGLU, arXiv 2002.05202) with each step rounded.

    Args:
        x: [..., groups K].
        weight: [N, K], contiguous; read before the kernel that is launched before has ended, so not one that it writes.
        bias: [N]; with neither ``gated`` nor more groups than one.
        groups: of the weight's rows, as many in each, and each for K columns of x of its own: a weight a head.
        gated: the first half of the weight's rows is W_gate, the second W_up; of one group.
        backend: "tilelang", "reference", or None: TileLang where :func:`is_skinny`.

    Returns:
        [..., N], or [..., N / 2].

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_backend(backend)
    if groups < 1 or (gated and groups > 1):
        raise argument_error("groups", groups, "at least 1, and no more with gated")
    if weight.ndim != 2 or x.ndim < 1 or weight.shape[1] * groups != x.shape[-1] or weight.shape[0] % groups:
        wanted = f"[a multiple of {groups}, {x.shape[-1] / groups if x.ndim else 1:g}], by x"
        raise argument_error("weight.shape", tuple(weight.shape), wanted)
    check_like("weight", weight, x, "x")
    if gated and weight.shape[0] % 2:
        raise argument_error("weight.shape[0]", weight.shape[0], "an even number of rows, gate and up")
    if bias is not None and (
        gated or groups > 1 or bias.shape != weight.shape[:1] or (bias.dtype, bias.device) != (x.dtype, x.device)
    ):
        raise argument_error(
            "bias",
            f"{bias.dtype} {tuple(bias.shape)} on {bias.device} with gated={gated}, groups={groups}",
            f"None, or without gated and groups {x.dtype} {tuple(weight.shape[:1])} on {x.device}",
        )
    asked = backend == "tilelang"
    served = serves_linear(x, weight, groups) if asked else backend is None and is_skinny(x, weight, groups, gated)
    if asked and not served:
        raise argument_error(
            "backend",
            f"'tilelang' for {x.dtype} {tuple(x.shape)} by {tuple(weight.shape)} on {x.device}",
            f"1 to {ROW_BUCKETS[-1]} rows of bfloat16 or float16 on an sm_90 (with groups 1 to {HEAD_ROWS}, K at"
            f" most {HEAD_COLUMNS}, from sm_80 on), K a multiple of {COLUMN_STEP}, N / groups of {OUTPUT_STEP}, and a"
            f" contiguous weight that begins at a multiple of {ALIGNMENT} bytes",
        )
    return _skinny_linear_op(x, weight, bias, groups, gated, served)


def skinny_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, gated: bool) -> Tensor:
    """Oracle of :func:`skinny_linear`, for any number of rows."""
    if groups > 1:
        return (x.unflatten(-1, (groups, 1, -1)) @ weight.unflatten(0, (groups, -1)).mT).flatten(-3)
    out = F.linear(x, weight, bias)
    if not gated:
        return out
    gate, up = out.chunk(2, dim=-1)
    return F.silu(gate) * up


def project_w_uk(x: Tensor, k_up: Tensor, *, backend: str | None = None) -> Tensor:
    """Queries through W_UK (DeepSeek-V2, arXiv 2405.04434, 2.1), a weight for each H / h_kv heads, rounded once.

    Args:
        x: [..., tokens, H, d_n], read where it lies; by TileLang of at most 16 tokens.
        k_up: [h_kv, d_n, d_c], contiguous; h_kv divides H.
        backend: "tilelang", "reference", or None: TileLang where :func:`serves_w_uk`.

    Returns:
        [..., H, d_c].

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_backend(backend)
    if k_up.ndim != 3 or x.ndim < 3 or k_up.shape[1] != x.shape[-1] or not len(k_up) or x.shape[-2] % len(k_up):
        heads, inner = x.shape[-2:] if x.ndim > 1 else ("H", "d_n")
        raise argument_error("k_up.shape", tuple(k_up.shape), f"[a divisor of {heads}, {inner}, d_c], by x")
    check_like("k_up", k_up, x, "x")
    served = backend != "reference" and serves_w_uk(x, k_up)
    if backend == "tilelang" and not served:
        raise argument_error(
            "backend",
            f"'tilelang' for {x.dtype} {tuple(x.shape)} by {tuple(k_up.shape)} on {x.device}",
            f"1 to {W_UK_TOKENS} tokens of bfloat16 or float16 on a CUDA device from sm_80 on, d_n at most {W_UK_ROWS},"
            f" d_c a multiple of {WIDTH_STEP}, and a contiguous k_up that begins at a multiple of {ALIGNMENT} bytes",
        )
    return _project_w_uk_op(x, k_up, served)


def up_project(x: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """x through W_UK, or transposed W_UV, a weight for each H / k heads, rounded once, where
    :func:`serves_up_project`: weights are not repeated, and the kernel begins while the one before ends.

    Args:
        x: [..., tokens, H, i], read where it lies.
        weight: [k, i, o], or with ``transposed`` [k, o, i].

    Returns:
        [..., H, o].
    """
    from mha2mla.kernels.skinny_linear.up_projections import launch_up_projection

    out = x.new_empty(*x.shape[:-1], weight.shape[1 if transposed else 2])
    launch_up_projection(x, weight, out, transposed)
    return out


_skinny_linear_op = register_kernel(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias, int groups, bool gated, bool compiled) -> Tensor",
    skinny_linear_reference,
    lambda x, weight, bias, groups, gated: x.new_empty(*x.shape[:-1], weight.shape[0] // (1 + gated)),
    "mha2mla.kernels.skinny_linear.streamed:launch_skinny_linear",
)
_project_w_uk_op = register_kernel(
    "project_w_uk(Tensor x, Tensor k_up, bool compiled) -> Tensor",
    lambda x, k_up: (x.unflatten(-2, (len(k_up), -1)) @ k_up).flatten(-3, -2),
    lambda x, k_up: x.new_empty(*x.shape[:-1], k_up.shape[2]),
    "mha2mla.kernels.skinny_linear.up_projections:launch_w_uk",
)
