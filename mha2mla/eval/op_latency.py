"""Time of the decode attention op of one layer: the source's over its KV cache, ours over the latent cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mha2mla.eval.measurement import measured, unless_out_of_memory
from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import explain_gqa_decode, explain_mla_decode, gqa_decode, mla_decode, plan_gqa_decode
from mha2mla.testing.numeric_check import Judgement, PlainAttention, plain_attention, verdict
from mha2mla.testing.problems import LatentProblem, Problem, judge
from mha2mla.testing.timing import time_callable


@dataclass(frozen=True)
class AttentionInputs:
    """One decode shape of the source's attention: what every baseline gets.

    Attributes:
        q: [B, H, 1, d_h]. k, v: [B, h_kv, T, d_h]. softmax_scale: of the source.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float

    @classmethod
    def random(
        cls,
        geometry: MLAGeometry,
        batch: int,
        seqlen: int,
        softmax_scale: float,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> AttentionInputs:
        """Normal numbers for the source of an MLA layer."""
        make = torch.Generator(device).manual_seed(seed)
        heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
        q, k, v = (
            torch.randn(batch, *size, geometry.v_head_dim, generator=make, device=device).to(dtype)
            for size in ((heads, 1), (kv_heads, seqlen), (kv_heads, seqlen))
        )
        return cls(q, k, v, softmax_scale)


Baseline = Callable[[AttentionInputs], Callable[[], Tensor] | str]
"""Given inputs, returns a call giving [B, H, 1, d_h], or the reason why there is none here ("not installed", …)."""


def sdpa_baseline(inputs: AttentionInputs) -> Callable[[], Tensor]:
    """torch's scaled_dot_product_attention over the source's own KV cache, whichever kernel it picks."""
    from torch.nn.functional import scaled_dot_product_attention

    grouped = inputs.k.shape[1] != inputs.q.shape[1]
    return lambda: scaled_dot_product_attention(
        inputs.q, inputs.k, inputs.v, scale=inputs.softmax_scale, enable_gqa=grouped
    )


def flash_attention(inputs: AttentionInputs, package: str) -> Callable[[], Tensor] | str:
    """The decode of a package that has ``flash_attn_with_kvcache``, over the source's KV cache."""
    if inputs.q.device.type != "cuda":
        return f"runs on CUDA devices; device is {inputs.q.device}"
    if inputs.q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16; dtype is {inputs.q.dtype}"
    try:
        decode = import_module(package).flash_attn_with_kvcache
    except ImportError as error:
        return f"{package} is not installed ({error})"
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (inputs.q, inputs.k, inputs.v))
    seqlens = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    options = {"cache_seqlens": seqlens, "softmax_scale": inputs.softmax_scale, "causal": True}
    return lambda: decode(q, k, v, **options).transpose(1, 2)


def gqa_decode_baseline(inputs: AttentionInputs) -> Callable[[], Tensor] | str:
    """This package's own decode op of the source's attention, for machines without FlashAttention. Planned once."""
    page_size = 64
    q = inputs.q.transpose(1, 2)  # [B, 1, H, d_h]
    batch, kv_heads, seqlen, head_dim = inputs.k.shape
    why = explain_gqa_decode(q.shape[2], kv_heads, head_dim, inputs.v.shape[3], page_size, q.dtype, q.device)
    if why is not None:
        return why
    pages = -(-seqlen // page_size)

    def paged(cache: Tensor) -> Tensor:  # [B, h_kv, T, d] -> [B * pages, page, h_kv, d]
        padded = torch.nn.functional.pad(cache.transpose(1, 2), (0, 0, 0, 0, 0, pages * page_size - seqlen))
        return padded.reshape(batch * pages, page_size, kv_heads, -1)

    k_cache, v_cache = paged(inputs.k), paged(inputs.v)
    table = torch.arange(batch * pages, dtype=torch.int32, device=q.device).view(batch, pages)
    seqlens = torch.full((batch,), seqlen, dtype=torch.int32, device=q.device)
    plan = plan_gqa_decode(q, k_cache, table, seqlens, v_head_dim=v_cache.shape[3])
    return lambda: gqa_decode(
        q, k_cache, v_cache, table, seqlens, softmax_scale=inputs.softmax_scale, plan=plan
    ).transpose(1, 2)


flash_attention_3_baseline = partial(flash_attention, package="flash_attn_interface")
BASELINES: Mapping[str, Baseline] = {
    "torch SDPA": sdpa_baseline,
    "FlashAttention-3": flash_attention_3_baseline,
    "gqa_decode": gqa_decode_baseline,
}


@torch.inference_mode()
def attention_latency(
    geometry: MLAGeometry,
    *,
    batch_sizes: Sequence[int] = (1,),
    seqlens: Sequence[int] = (1024,),
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    page_size: int = 64,
    softmax_scale: float | None = None,
    check: bool = True,
    backend: str | None = None,
    baselines: Mapping[str, Baseline] = BASELINES,
    min_run_time: float = 0.3,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Decode attention alone, one new token per sequence: the source's over its KV cache, ours over the latent cache.

    Neither includes projections, RoPE of the new token or its write; rotary keys that are read from the latent are
    part of ours. Inputs are random normal numbers, pages shuffled.

    Args:
        geometry: of the MLA layer; the source is its ``num_key_value_heads`` heads of width ``v_head_dim``.
        batch_sizes, seqlens: every pair of them is measured; ``seqlen`` counts the new token.
        page_size: tokens per page of the latent cache, a power of two.
        softmax_scale: default ``v_head_dim ** -0.5``, the source's.
        check: without it nothing is compared with float64, and every row's status says so.
        backend: of ``mla_decode``; ``None`` lets it choose.
        baselines: name → :data:`Baseline`; one that is absent here gives a row ``missing: why``.
        min_run_time: seconds of measurement per row.

    Returns:
        Rows for :func:`mha2mla.eval.print_table` with the keys of :data:`COLUMNS`. ``cache_bytes`` is what one call
        reads of the cache, ``gb_per_s`` that over the median time. A row whose check failed has no time. On CUDA,
        ``plan_us`` is the median time of planning, which a decode step does once for all layers and no other column
        includes.
    """
    device = torch.device(device)
    scale = geometry.v_head_dim**-0.5 if softmax_scale is None else softmax_scale
    rows = []
    for batch in batch_sizes:
        for seqlen in seqlens:
            shape = {"op": "attention", "batch": batch, "seqlen": seqlen}
            shape |= {"dtype": str(dtype).removeprefix("torch."), "device": device.type}
            random = partial(AttentionInputs.random, geometry, batch, seqlen, scale, dtype, device, seed)
            for name, found in _source_rows(random, baselines, check, min_run_time).items():
                rows.append(shape | {"implementation": name} | found)
            made = Problem if geometry.has_rope_cache else LatentProblem
            problem = made(
                geometry.num_attention_heads, geometry.num_rope_heads, geometry.kv_lora_rank,
                geometry.qk_rope_head_dim, (seqlen,) * batch, page_size=page_size, slack=0, seed=seed,
            )  # fmt: skip
            rows.append(shape | _mla_row(problem, geometry, scale, dtype, device, backend, check, min_run_time))
    return rows


def _source_rows(
    random: Callable[[], AttentionInputs], baselines: Mapping[str, Baseline], check: bool, min_run_time: float
) -> dict[str, dict[str, Any]]:
    """A row per baseline, all on the same inputs."""
    made: dict[str, Any] = unless_out_of_memory(lambda: {"inputs": random()}) if baselines else {}
    if "status" in made:
        return dict.fromkeys(baselines, made)

    def measure(baseline: Baseline) -> dict[str, Any]:
        inputs = made["inputs"]
        row = {"cache_bytes": inputs.k.nbytes + inputs.v.nbytes}
        call = baseline(inputs)
        if isinstance(call, str):
            return row | {"status": f"missing: {call}"}
        judgement = _judge_source(call(), inputs) if check else None
        return row | measured(call, judgement, row["cache_bytes"], inputs.q.device, min_run_time)

    return {name: unless_out_of_memory(partial(measure, baseline)) for name, baseline in baselines.items()}


def _judge_source(out: Tensor, inputs: AttentionInputs) -> Judgement:
    """[B, H, 1, d_h] against the formula in float64, one sequence at a time (float64 copies are large)."""
    sequences = [
        PlainAttention((q.transpose(0, 1),), (k.transpose(0, 1),), v.transpose(0, 1), None, inputs.softmax_scale)
        for q, k, v in zip(inputs.q, inputs.k, inputs.v, strict=True)
    ]
    outs, roundings = plain_attention(sequences, out.dtype)
    exact = torch.stack([sequence.to(torch.float64).attend() for sequence in sequences])
    rounding = None if roundings is None else torch.stack(roundings)
    return verdict(out.transpose(1, 2), None, exact, None, torch.stack(outs), rounding)


def _mla_row(
    problem: Problem,
    geometry: MLAGeometry,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
    backend: str | None,
    check: bool,
    min_run_time: float,
) -> dict[str, Any]:
    read = problem.cache_bytes(dtype.itemsize)
    why = explain_mla_decode(geometry, problem.page_size, dtype, device)
    chosen = backend or ("tilelang" if why is None else "reference")
    row = {"implementation": f"mla_decode ({chosen})", "geometry": str(geometry), "cache_bytes": read}
    if why is not None and chosen == "tilelang":
        return row | {"status": f"missing: {why}"}
    if why is not None:
        row["backend_reason"] = why

    def measure() -> dict[str, Any]:
        inputs = problem.inputs(dtype, device) | {"softmax_scale": scale}
        plan = problem.plan(inputs, backend)
        call = partial(mla_decode, **inputs, plan=plan, out=torch.empty_like(inputs["q_latent"]), backend=backend)
        judgement = judge(inputs, call(), None) if check else None
        found = measured(call, judgement, read, device, min_run_time)
        if device.type == "cuda" and "us_p50" in found and plan.num_ctas:
            refresh = partial(plan.refresh, inputs["cache_seqlens"])
            found["plan_us"] = time_callable(refresh, device, min_run_time=min_run_time, graph=False).p50
        return found

    return row | unless_out_of_memory(measure)
