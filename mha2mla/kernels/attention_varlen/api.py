"""The public varlen attention ops: validation, dispatch, and their torch.library schema."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mha2mla.kernels.ops import (
    Argument,
    Layout,
    accumulator,
    argument_error,
    capability,
    check_aligned,
    check_backend,
    check_layouts,
    check_scale,
    dtype_name,
    register,
)
from mha2mla.kernels.split_kv.plan import check_window

MAX_WIDTH = 256  # of d_qk in all, and of d_v
_COMPILED_DTYPES = (torch.bfloat16, torch.float16)
_TENSORS = {
    argument.name: argument
    for argument in (
        Argument("q", "T_q H d_qk"),
        Argument("q_nope", "T_q H d_n"),
        Argument("q_pe", "T_q H d_r"),
        Argument("k", "T_k h_kv|H d_qk"),
        Argument("k_nope", "T_k h_kv|H d_n"),
        Argument("k_pe", "T_k G|H d_r"),
        Argument("v", "T_k h_v|H d_v"),
        Argument("cu_seqlens_q", "B+1", torch.int32),
        Argument("cu_seqlens_k", "B+1", torch.int32),
        Argument("out", "(T_q H d_v)"),
    )
}


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    *,
    softmax_scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention (FlashAttention, arXiv 2205.14135) of concatenated sequences, without padding.

    Args:
        q: [T_q, H, d_qk] of all sequences; like ``k`` and ``v`` with contiguous rows and otherwise any strides that are
            multiples of 16 bytes, as is where they begin (kernels only).
        k: [T_k, h_kv, d_qk]; query head h sees head h // (H / h_kv).
        v: [T_k, h_v, d_v]; h_v is usually h_kv.
        cu_seqlens_q: [B+1] int32, first query of each sequence, then the end of the last one; not read on the host.
            Rows behind the last sequence (the padding of a CUDA graph) are not written.
        cu_seqlens_k: [B+1] int32, the same for its keys and values.
        max_seqlen_q: queries of the longest sequence, or more. A host number: it bounds the grid. Kernels do not see
            that it is too small, or that bounds fall or leave the tensors; the reference on the CPU refuses it.
        softmax_scale: on the scores; positive.
        causal: a query sees no later key. Aligned at the end: a sequence's last query sees all its keys, whether there
            are more keys than queries (a cache) or fewer.
        window: a query sees only the last ``window`` keys up to its own position; None: all. With ``causal`` only.
            Keys that no query of a tile sees are not read.
        sinks: the first ``sinks`` keys of a sequence stay visible (attention sinks, arXiv 2309.17453).
        out: [T_q, H, d_v], contiguous; written.
        return_lse: return the log-sum-exps too.
        backend: "tilelang" (bfloat16 and float16 on CUDA from sm_80 on, widths of multiples of 8 up to 256),
            "reference", or None: TileLang where it serves the tensors.

    Returns:
        ``out`` [T_q, H, d_v]; with ``return_lse`` also ``lse`` [H, T_q] float32 (float64 for float64 inputs), natural
        logarithm. A query that sees no key gives zeros and -inf.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    return _attend(
        {"q": q}, {"k": k}, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, window, sinks, out,
        return_lse, backend,
    )  # fmt: skip


def mla_prefill_varlen(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    *,
    softmax_scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention_varlen` of MLA's expanded form (DeepSeek-V2, arXiv 2405.04434, 2.1): keys in two parts::

        score[h, t] = softmax_scale * (q_nope[h] . k_nope[t, h // (H / h_kv)] + q_pe[h] . k_pe[t, h // (H / G)])

    Nothing is concatenated or repeated in memory.

    Args:
        q_nope: [T_q, H, d_n]; d_n may be 0.
        q_pe: [T_q, H, d_r], rotated.
        k_nope: [T_k, h_kv, d_n], expanded from the latent; ``v`` [T_k, h_kv, d_v] likewise.
        k_pe: [T_k, G, d_r], rotated; G divides H.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, window, sinks, out, return_lse, backend: as in
            :func:`attention_varlen`, and so are the result and the errors.
    """
    queries, keys = {"q_nope": q_nope, "q_pe": q_pe}, {"k_nope": k_nope, "k_pe": k_pe}
    if q_nope.ndim == 3 and q_nope.shape[2] == 0:
        if k_nope.ndim != 3 or k_nope.shape[2]:
            raise ValueError(
                f"k_nope.shape is {tuple(k_nope.shape)}; expected [T_k, h_kv, 0], as q_nope has no columns"
            )
        queries, keys = {"q_pe": q_pe}, {"k_pe": k_pe}
    return _attend(
        queries, keys, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, window, sinks, out,
        return_lse, backend,
    )  # fmt: skip


def explain_attention_varlen(
    widths: Sequence[int], v_head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> str | None:
    """Reason that TileLang does not serve calls on ``device``, or None.

    Args:
        widths: of the parts of queries and keys: (d_qk,), or d_n and d_r of MLA; 0 is no part.
        v_head_dim: d_v.
        dtype: of all tensors.
        device: a CUDA device that this machine lacks counts as a Hopper.
    """
    device, widths = torch.device(device), [width for width in widths if width]
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device}"
    if dtype not in _COMPILED_DTYPES:
        return f"it takes bfloat16 and float16, not {dtype_name(dtype)}"
    if capability(device) < 80:
        return f"it needs compute capability 8.0; {device} has {capability(device) / 10}"
    for name, width in (("d_qk", sum(widths)), ("d_v", v_head_dim)):
        if width > MAX_WIDTH:
            return f"{name} is {width}; it takes up to {MAX_WIDTH}"
    odd = [width for width in (*widths, v_head_dim) if width % 8]
    return f"a width is {odd[0]}; it takes multiples of 8" if odd else None


def _attend(
    queries: dict[str, Tensor], keys: dict[str, Tensor], v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, softmax_scale: float, causal: bool, window: int | None, sinks: int, out: Tensor | None,
    return_lse: bool, backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Checks and call of both ops; ``queries`` and ``keys``: one or two parts by name."""
    tensors = queries | keys | {"v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if out is not None:
        tensors["out"] = out
    layouts = tuple([(x.shape, x.stride(), x.dtype, x.device) for x in tensors.values()])
    # Dynamo traces the check itself: its sizes may be symbols, which cannot be remembered.
    check = _check_call if torch.compiler.is_compiling() else _check_call_once
    compiled = check(tuple(tensors), layouts, softmax_scale, causal, window, sinks, backend)
    if max_seqlen_q < 0:
        raise argument_error("max_seqlen_q", max_seqlen_q, "at least 0")
    parts = [part for parts in (queries, keys) for part in (*parts.values(), None)[:2]]
    limits = (-1 if window is None else window, sinks)
    operands = (*parts, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, *limits, compiled)
    if out is None:
        out, lse = _attention_varlen_op(*operands)
    else:
        lse = _attention_varlen_out_op(*operands, out)
    return (out, lse) if return_lse else out


def _check_call(
    names: tuple[str, ...], layouts: tuple[tuple, ...], softmax_scale: float, causal: bool, window: int | None,
    sinks: int, backend: str | None,
) -> bool:  # fmt: skip
    """Checks of all but addresses and the longest query; whether kernels run the call."""
    sizes = check_layouts(tuple([_TENSORS[name] for name in names]), layouts)
    named = {name: Layout(*layout) for name, layout in zip(names, layouts, strict=True) if name[0] in "qkv"}
    for name, x in named.items():
        if x.shape[2] == 0:
            raise argument_error(f"{name}.shape", tuple(x.shape), "a width of at least 1")
    if sizes["B+1"] < 1:
        raise argument_error("cu_seqlens_q.shape", (sizes["B+1"],), "[B+1]")
    check_scale(softmax_scale)
    check_window(window, sinks)
    if window is not None and not causal:
        raise ValueError(f"causal is {causal} with window={window}; expected True, or no window")
    check_backend(backend)
    if backend == "reference":
        return False
    v = named["v"]
    widths = [x.shape[2] for name, x in named.items() if name[0] == "k"]
    why = explain_attention_varlen(widths, v.shape[2], v.dtype, v.device)
    if backend == "tilelang" and why:
        raise ValueError(f"backend is 'tilelang', which does not serve this call: {why}")
    if why is None:
        for name, x in named.items():
            _check_strides(name, x)
    return why is None


_check_call_once = lru_cache(maxsize=1024)(_check_call)  # every layer of a step asks


def _check_strides(name: str, x: Layout) -> None:
    """TMA's rules; the stride of a dimension of size one does not matter."""
    if x.shape[2] > 1 and x.strides[2] != 1:
        raise argument_error(f"{name}.stride(2)", x.strides[2], 1)
    for dim, stride in enumerate(x.strides[:2]):
        if x.shape[dim] > 1 and (stride <= 0 or stride * x.dtype.itemsize % 16):
            raise argument_error(f"{name}.stride({dim})", stride, "a positive multiple of 8 elements (16 bytes)")


def _attention_varlen_out(
    q: Tensor, q_pe: Tensor | None, k: Tensor, k_pe: Tensor | None, v: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool, window: int, sinks: int,
    compiled: bool, out: Tensor,
) -> Tensor:  # fmt: skip
    if not compiled:
        queries, keys = ([x for x in parts if x is not None] for parts in ((q, q_pe), (k, k_pe)))
        result, lse = attention_varlen_reference(
            queries, keys, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal,
            window=None if window < 0 else window, sinks=sinks, max_seqlen_q=max_seqlen_q,
        )  # fmt: skip
        out.copy_(result)
        return lse
    # Not beside the strides: tensors that torch.compile traces have no addresses.
    first = ("q", "k") if q_pe is None else ("q_nope", "k_nope")
    check_aligned(**{first[0]: q, "q_pe": q_pe, first[1]: k, "k_pe": k_pe, "v": v, "out": out})
    from mha2mla.kernels.attention_varlen.warp_specialised import launch_attention_varlen

    lse = _lse_fake(q)
    launch_attention_varlen(
        q, q_pe, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, window, sinks, out, lse
    )
    return lse


def _attention_varlen(q: Tensor, q_pe: Tensor | None, k: Tensor, k_pe: Tensor | None, v: Tensor, *rest):
    out = q.new_empty(*q.shape[:2], v.shape[2])
    return out, _attention_varlen_out(q, q_pe, k, k_pe, v, *rest, out)


def _lse_fake(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], dtype=accumulator(q.dtype))


_ARGUMENTS = (
    "Tensor q, Tensor? q_pe, Tensor k, Tensor? k_pe, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    " SymInt max_seqlen_q, float softmax_scale, bool causal, int window, int sinks, bool compiled"
)
_attention_varlen_op = register(
    f"attention_varlen({_ARGUMENTS}) -> (Tensor, Tensor)",
    _attention_varlen,
    lambda q, q_pe, k, k_pe, v, *_: (q.new_empty(*q.shape[:2], v.shape[2]), _lse_fake(q)),
)
_attention_varlen_out_op = register(
    f"attention_varlen_out({_ARGUMENTS}, Tensor(a!) out) -> Tensor", _attention_varlen_out, lambda q, *_: _lse_fake(q)
)


def attention_varlen_reference(
    queries: list[Tensor],
    keys: list[Tensor],
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    max_seqlen_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * sum_i queries[i] keys[i]^T) v`` of each sequence by itself.

    Args:
        queries: parts [T_q, H, d_i] of the queries; a score is the sum of their products with the keys' parts.
        keys: parts [T_k, G_i, d_i]; query head h meets head h // (H / G_i) of part i.
        v: [T_k, G_v, d_v].
        cu_seqlens_q, cu_seqlens_k, causal, window, sinks: as in :func:`mha2mla.kernels.attention_varlen`.
        max_seqlen_q: what a kernel would be told, or None.

    The arithmetic is float64 for float64 inputs and float32 for all others; only ``out`` is rounded to the input's
    dtype. Keys and values of other sequences, behind the last one, and that a query does not see are never used: NaN
    stays in its request. Reads no tensor on the host (but of the CPU).

    Returns:
        ``out [T_q, H, d_v]`` and ``lse [H, T_q]`` (natural log) in the dtype of the arithmetic. A query that sees no
        key, or lies behind the last sequence, gives zeros and ``-inf``.

    Raises:
        ValueError: on the CPU, where looking costs nothing, bounds that fall or leave the tensors, or a longer sequence
            than ``max_seqlen_q``: kernels would read and write behind tensors, and leave rows unwritten.
    """
    dtype = accumulator(v.dtype)
    tokens_q, heads, _ = queries[0].shape
    tokens_k = v.shape[0]
    device = v.device
    # Sequence (-1 behind the last one), position in it and length, of every query and key
    query_of, query_position, query_length = _positions("cu_seqlens_q", cu_seqlens_q, tokens_q, device)
    key_of, key_position, key_length = _positions("cu_seqlens_k", cu_seqlens_k, tokens_k, device)
    if max_seqlen_q is not None and device.type == "cpu" and tokens_q:
        longest = int(torch.where(query_of >= 0, query_length, 0).max())
        if longest > max_seqlen_q:
            raise argument_error("max_seqlen_q", max_seqlen_q, f"at least {longest}, queries of the longest sequence")
    visible = (query_of[:, None] == key_of) & (query_of[:, None] >= 0)
    if causal:  # bottom-right aligned: the last query sees everything
        behind = (query_position - query_length)[:, None] - (key_position - key_length)  # distance to the key
        visible = visible & (behind >= 0)
        if window is not None:
            visible = visible & ((behind < window) | (key_position < sinks))
    used = visible.any(0)[:, None, None]

    def wide(x: Tensor) -> Tensor:  # of keys and values, for every query head
        x = torch.where(used, x.to(dtype), 0)
        return x.repeat_interleave(heads // x.shape[1], 1)

    score = sum(torch.einsum("qhd,khd->hqk", q.to(dtype), wide(k)) for q, k in zip(queries, keys, strict=True))
    score = torch.where(visible, score * softmax_scale, -torch.inf)
    lse = torch.logsumexp(score, -1) if tokens_k else score.new_full(score.shape[:2], -torch.inf)
    weight = torch.exp(score - torch.where(lse == -torch.inf, 0, lse)[..., None])
    return weighted_sum(weight, visible, wide(v)).to(v.dtype), lse


def _positions(name: str, bounds: Tensor, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    last = 0
    for index, bound in enumerate(bounds.tolist() if device.type == "cpu" else ()):
        if not last <= bound <= tokens:
            raise argument_error(f"{name}[{index}]", bound, f"a number from {last} to {tokens}")
        last = bound
    token = torch.arange(tokens, device=device, dtype=bounds.dtype)
    if bounds.shape[0] < 2:
        return torch.full_like(token, -1), token, token
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    inside = token < bounds[-1]
    sequence = torch.where(inside, sequence, 0)
    first = bounds[sequence]
    return torch.where(inside, sequence, -1), token - first, bounds[sequence + 1] - first


def weighted_sum(weight: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    """``sum_k weight[h, q, k] values[k, h, d]`` over the keys that a query sees: [Q, H, d].

    NaN and infinities reach the queries that see them and no others, wherever they lie. Reads no device's memory on the
    host but the CPU's.

    Args:
        weight: [H, Q, K], zero where ``visible`` [Q, K] is not.
        values: [K, H, d].
    """
    finite = values.isfinite()
    out = torch.einsum("hqk,khd->qhd", weight, torch.where(finite, values, 0))
    if values.device.type == "cpu" and bool(finite.all()):
        return out
    kinds = torch.stack((values.isnan(), values == torch.inf, values == -torch.inf)).to(weight.dtype)
    seen = torch.einsum("qk,xkhd->xqhd", visible.to(weight.dtype), kinds) > 0
    for kind, found in zip((torch.nan, torch.inf, -torch.inf), seen, strict=True):
        out = out + torch.where(found, kind, 0.0)
    return out
