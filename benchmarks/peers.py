"""Other implementations of the same attention, each given as a call on the same inputs or as the reason why not.

FlashMLA and FlashAttention-3 come from the folder that MHA2MLA_PEERS names (compiled ops out of the vLLM wheel, packed
with xz); FlashAttention-3 also from the package flash_attn_interface. FlashMLA's schedule is made before the call, as
ours is; FlashAttention-3 makes its own in the call, as its public function does.
"""

from __future__ import annotations

import inspect
import lzma
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mha2mla.testing.numeric_check import errors
from mha2mla.testing.problems import GQAProblem, Problem

Peer = Callable[[], Tensor] | str
WRONG = 1e-2  # relative error from which on a peer's result is no rounding


def load_peer(namespace: str, op: str) -> str | None:
    """Registers ``torch.ops.NAMESPACE.OP`` from MHA2MLA_PEERS; returns why it cannot be done, or None."""
    folder = os.environ.get("MHA2MLA_PEERS")
    if not folder:
        return "MHA2MLA_PEERS names no folder"
    if not hasattr(getattr(torch.ops, namespace), op):
        packed = Path(folder) / f"{namespace}.abi3.so.xz"
        try:
            library = Path(tempfile.gettempdir()) / f"mha2mla-{packed.stat().st_size}-{namespace}.abi3.so"
            if not library.exists():
                unpacked = library.with_name(f"{library.name}.{os.getpid()}")
                unpacked.write_bytes(lzma.decompress(packed.read_bytes()))
                os.replace(unpacked, library)
            torch.ops.load_library(str(library))
        except OSError as error:
            return str(error).splitlines()[0]
    return None


def checked(make: Callable[[], Peer], expected: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Peer:
    """The call that ``make`` gives if it runs and its result is right, else "missing: why".

    Args:
        make: builds the call, or says why there is none.
        expected: from the call's result, the part to compare and what float64 has there.
    """
    try:
        call = make()
        if isinstance(call, str):
            return f"missing: {call}"
        error, _ = errors(*expected(call()))  # reading the error waits for the device
    except Exception as error:  # whatever keeps a peer from running is what its column says
        return f"missing: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return call if error < WRONG else f"missing: wrong result (relative error {error:.1e})"


def mla_peers(problem: Problem, inputs: dict[str, Any], expected: Tensor) -> dict[str, Peer]:
    """Column → peer for the MLA call itself; ``expected`` [B, S_q, H, d_c] is float64's result."""
    makers = {"FlashMLA_us": flash_mla, "FA3_MLA_us": flash_attention_3_mla, "Triton_us": triton_mla}
    peers = {}
    if (problem.num_rope_heads, problem.kv_lora_rank, problem.qk_rope_head_dim) == (1, 512, 64):
        for column, maker in makers.items():
            peers[column] = checked(lambda maker=maker: maker(problem, inputs), lambda out: (out, expected))
    peers["torch_us"] = checked(lambda: torch_mla(problem, inputs), lambda out: (out, expected))
    return peers


def _restricted(problem: Problem) -> str | None:
    return "no sinks or first tokens" if problem.window is not None or problem.starts is not None else None


def flash_mla(problem: Problem, inputs: dict[str, Any]) -> Peer:
    """FlashMLA's dense decode over the buffer [P, 64, 1, 576] that latent and k_pe are views of."""
    if why := _restricted(problem) or load_peer("_flashmla_C", "dense_decode_fwd"):
        return why
    if problem.page_size != 64 or not problem.combined:
        return "takes pages of 64 tokens, latent and k_pe side by side"
    latent = inputs["latent_cache"]
    cache = latent.as_strided((*latent.shape[:2], 1, 576), (*latent.stride()[:2], 576, 1))
    q = torch.cat([inputs["q_latent"], inputs["q_pe"]], -1)

    def call(schedule: Tensor | None, splits: Tensor | None) -> tuple[Tensor, ...]:
        return torch.ops._flashmla_C.dense_decode_fwd(
            q, cache, 512, inputs["cache_seqlens"], inputs["block_table"], inputs["softmax_scale"], problem.causal,
            schedule, splits, None,
        )  # fmt: skip

    _, _, schedule, splits = call(None, None)
    return lambda: call(schedule, splits)[0]


def _fa3(q: Tensor, k: Tensor, v: Tensor, q_v: Tensor | None, seqlen_q: int, inputs: dict[str, Any]) -> Peer:
    """FlashAttention-3 over pages. q [B*S_q, H, d], q_v [B*S_q, H, d_v] or None, k [P, page, h_kv, d], v likewise."""
    lengths, table, scale = inputs["cache_seqlens"], inputs["block_table"], inputs["softmax_scale"]
    longest = int(lengths.max())
    starts = torch.arange(0, q.shape[0] + 1, seqlen_q, dtype=torch.int32, device=q.device)
    why = load_peer("_vllm_fa3_C", "fwd")
    if why is None:
        return lambda: torch.ops._vllm_fa3_C.fwd(
            q, k, v, None, None, q_v, None, starts, None, None, None, lengths, seqlen_q, longest, table,
            None, None, None, None, None, None, None, None, scale, True, -1, -1, 0.0, True, None, 0, None, 0, None,
            1, 0, None,
        )[0]  # fmt: skip
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError as error:
        return f"{why}; {error}"
    wide = [None if x is None else x.unflatten(0, (-1, seqlen_q)) for x in (q, q_v)]
    return lambda: flash_attn_with_kvcache(
        wide[0], k, v, qv=wide[1], cache_seqlens=lengths, page_table=table, softmax_scale=scale, causal=True
    ).flatten(0, 1)


def flash_attention_3_mla(problem: Problem, inputs: dict[str, Any]) -> Peer:
    """FlashAttention-3 with the latent as values and the latent queries as q_v."""
    if why := _restricted(problem):
        return why
    q_pe, q_latent = (inputs[name].flatten(0, 1).contiguous() for name in ("q_pe", "q_latent"))
    k, v = inputs["rope_cache"], inputs["latent_cache"].unsqueeze(2)
    call = _fa3(q_pe, k, v, q_latent, problem.seqlen_q, inputs)
    return call if isinstance(call, str) else lambda: call().view(inputs["q_latent"].shape)


def triton_mla(problem: Problem, inputs: dict[str, Any]) -> Peer:
    """The Triton kernel that vLLM decodes MLA with where nothing better runs."""
    if why := _restricted(problem):
        return why
    if problem.seqlen_q != 1 or not problem.combined:
        return "takes one new token, latent and k_pe side by side"
    try:
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
    except ImportError as error:
        return str(error)
    latent = inputs["latent_cache"]
    cache = latent.as_strided((*latent.shape[:2], 1, 576), (*latent.stride()[:2], 576, 1))
    q = torch.cat([inputs["q_latent"], inputs["q_pe"]], -1)[:, 0]
    batch, heads, splits = q.shape[0], q.shape[1], 4
    out = torch.empty_like(inputs["q_latent"])
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    partials = torch.empty(batch, heads, splits, 513, dtype=torch.float32, device=q.device)
    one = torch.ones((), device=q.device)
    further = {"k_scale": one, "v_scale": one, "is_mla": True}
    further = {
        name: value for name, value in further.items() if name in inspect.signature(decode_attention_fwd).parameters
    }

    def call() -> Tensor:
        decode_attention_fwd(
            q, cache, cache[..., :512], out[:, 0], lse, inputs["block_table"], inputs["cache_seqlens"], partials,
            splits, inputs["softmax_scale"], page_size=problem.page_size, **further,
        )  # fmt: skip
        return out

    return call


def torch_mla(problem: Problem, inputs: dict[str, Any]) -> Peer:
    """Batched matrix products and a softmax at the inputs' dtype over latents that already lie in order."""
    if why := _restricted(problem):
        return why
    if problem.seqlen_q != 1 or len(set(problem.lengths)) != 1 or problem.cache_bytes() > 1e9:
        return "one new token, equal lengths, a cache of up to 1 GB"
    length, groups = problem.lengths[0], problem.num_rope_heads
    pages = inputs["block_table"][:, : -(-length // problem.page_size)].long()
    latent = inputs["latent_cache"][pages].flatten(1, 2)[:, :length].contiguous()
    k_pe = inputs["rope_cache"][pages].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()  # [B, G, T, d_r]
    q_latent, q_pe = inputs["q_latent"][:, 0], inputs["q_pe"][:, 0].unflatten(1, (groups, -1))

    def call() -> Tensor:
        score = (q_pe @ k_pe.mT).flatten(1, 2) + q_latent @ latent.mT
        weight = torch.softmax(score * problem.softmax_scale, -1)
        return (weight @ latent).unsqueeze(1)

    return call


def flash_attention_3_gqa(problem: GQAProblem, inputs: dict[str, Any], expected: Tensor) -> Peer:
    """FlashAttention-3 on the same pages; ``expected`` [B, S_q, H, d_v] is float64's result."""
    if problem.window is not None or problem.starts is not None:
        return "missing: no sinks or first tokens"
    q = inputs["q"].flatten(0, 1).contiguous()

    def make() -> Peer:
        call = _fa3(q, inputs["k_cache"], inputs["v_cache"], None, problem.seqlen_q, inputs)
        return call if isinstance(call, str) else lambda: call().view(expected.shape)

    return checked(make, lambda out: (out, expected))


def flash_attention_3_mha(heads: int, head_dim: int, batch: int, length: int, page: int = 64) -> Peer:
    """MHA decode of the source model: heads keys and values of head_dim per token, in shuffled pages."""
    pages = -(-length // page)
    make = torch.Generator("cuda").manual_seed(0)
    like = {"device": "cuda", "dtype": torch.bfloat16, "generator": make}
    k, v = (torch.randn(batch * pages, page, heads, head_dim, **like) for _ in range(2))
    q = torch.randn(batch, heads, head_dim, **like)
    inputs = {
        "cache_seqlens": torch.full((batch,), length, dtype=torch.int32, device="cuda"),
        "block_table": torch.randperm(batch * pages, device="cuda").int().view(batch, pages),
        "softmax_scale": head_dim**-0.5,
    }

    def expected(out: Tensor) -> tuple[Tensor, Tensor]:  # one head is enough
        rows = inputs["block_table"].long()
        keys, values = (x[:, :, 0][rows].flatten(1, 2)[:, :length].double() for x in (k, v))
        score = torch.einsum("bd,btd->bt", q[:, 0].double(), keys) * head_dim**-0.5
        return out[:, 0], torch.einsum("bt,btd->bd", score.softmax(-1), values)

    return checked(lambda: _fa3(q, k, v, None, 1, inputs), expected)


def flash_attention_3_prefill(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor] | None, longest: tuple[int, int], scale: float,
    causal: bool,
) -> Peer:  # fmt: skip
    """FlashAttention-3 without a cache: q [T_q, H, d], k, v [T_k, h_kv, d] with cu_seqlens of both as ``bounds``, or
    ([B, S, H, d]) without; ``longest``: queries and keys of the longest sequence."""
    starts_q, starts_k = bounds or (None, None)
    why = load_peer("_vllm_fa3_C", "fwd")
    if why is None:
        longest = longest if bounds else (None, None)
        return lambda: torch.ops._vllm_fa3_C.fwd(
            q, k, v, None, None, None, None, starts_q, starts_k, None, None, None, *longest, None, None, None, None,
            None, None, None, None, None, scale, causal, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip
    try:
        from flash_attn_interface import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        return f"{why}; {error}"

    def call() -> Tensor:
        if bounds:
            out = flash_attn_varlen_func(
                q, k, v, starts_q, starts_k, *longest, softmax_scale=scale, causal=causal
            )  # fmt: skip
        else:
            out = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return call


def torch_prefill(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Peer:
    """torch's scaled_dot_product_attention over [B, S, heads, d], as many queries as keys."""
    if q.shape[1] != k.shape[1]:
        return "its causal mask is aligned at the beginning"
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=causal, scale=scale, enable_gqa=keys.shape[1] != queries.shape[1]
    ).transpose(1, 2)
