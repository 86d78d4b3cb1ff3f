"""Latency of the decode attention op of one layer: the source's over its KV cache, ours over the latent cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mha2mla.eval.measurement import measured, unless_out_of_memory
from mha2mla.geometry import CODE_BLOCK, MLAGeometry
from mha2mla.kernels import (
    decodes_codes,
    explain_gqa_decode,
    explain_mla_decode,
    gqa_decode,
    mla_decode,
    plan_gqa_decode,
)
from mha2mla.terminal import progress_bar
from mha2mla.testing.numeric_check import Judgement, PlainAttention, plain_attention, verdict
from mha2mla.testing.problems import KeyCodesProblem, LatentCodesProblem, LatentProblem, Problem, RowCodesProblem, judge
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
        make = torch.Generator(device).manual_seed(seed)
        cached = (geometry.num_key_value_heads, seqlen)
        sizes = ((batch, *size, geometry.v_head_dim) for size in ((geometry.num_attention_heads, 1), cached, cached))
        return cls(*(torch.randn(*size, generator=make, device=device).to(dtype) for size in sizes), softmax_scale)


# By whether rotary keys are cached, and latents are integer codes.
PROBLEMS: Mapping[tuple[bool, bool], type[Problem]] = MappingProxyType(
    {
        (True, False): Problem,
        (False, False): LatentProblem,
        (True, True): RowCodesProblem,
        (False, True): LatentCodesProblem,
    }
)


# From inputs: a call that gives [B, H, 1, d_h], or the reason why there is none here ("not installed", …).
Baseline = Callable[[AttentionInputs], Callable[[], Tensor] | str]


def sdpa_baseline(inputs: AttentionInputs) -> Callable[[], Tensor]:
    """torch's scaled_dot_product_attention over the source's own KV cache, whichever kernel it picks."""
    options = {"scale": inputs.softmax_scale, "enable_gqa": inputs.k.shape[1] != inputs.q.shape[1]}
    return lambda: scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, **options)


def sdpa_flash_baseline(inputs: AttentionInputs) -> Callable[[], Tensor] | str:
    """FlashAttention-2 as torch's scaled_dot_product_attention has it."""
    attend = sdpa_baseline(inputs)

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend()

    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return call


def flash_attention(inputs: AttentionInputs, package: str) -> Callable[[], Tensor] | str:
    """Decode of a package that has ``flash_attn_with_kvcache``, over the source's KV cache."""
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
    """This package's own decode op of the source's attention, for machines without FlashAttention; planned once."""
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
    options = {"softmax_scale": inputs.softmax_scale, "plan": plan}
    return lambda: gqa_decode(q, k_cache, v_cache, table, seqlens, **options).transpose(1, 2)


flash_attention_3_baseline = partial(flash_attention, package="flash_attn_interface")
BASELINES: Mapping[str, Baseline] = {
    "torch SDPA": sdpa_baseline,
    "FlashAttention-3": flash_attention_3_baseline,
    "gqa_decode": gqa_decode_baseline,
}
PRESET_BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "FlashAttention-2": partial(flash_attention, package="flash_attn"),
        "SDPA flash": sdpa_flash_baseline,
        "FlashAttention-3": flash_attention_3_baseline,
        "gqa_decode": gqa_decode_baseline,
    }
)


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
        page_size: tokens per page of the latent cache, a power of two >= 16.
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

    Raises:
        ValueError: ``page_size`` or ``min_run_time`` is out of range.
    """
    check_op(page_size, min_run_time)
    device = torch.device(device)
    scale = geometry.v_head_dim**-0.5 if softmax_scale is None else softmax_scale
    rows = []
    for batch, seqlen in product(batch_sizes, seqlens):
        shape = {"op": "attention", "batch": batch, "seqlen": seqlen}
        shape |= {"dtype": str(dtype).removeprefix("torch."), "device": device.type}
        random = partial(AttentionInputs.random, geometry, batch, seqlen, scale, dtype, device, seed)
        for name, found in _source_rows(random, baselines, check, min_run_time).items():
            rows.append(shape | {"implementation": name} | found)
        codes = {"bits": geometry.latent_bits} if geometry.has_codes else {}
        kind = KeyCodesProblem if geometry.has_key_codes else PROBLEMS[geometry.has_rope_cache, geometry.has_codes]
        problem = kind(
            geometry.num_attention_heads, geometry.num_rope_heads, geometry.kv_lora_rank,
            geometry.qk_rope_head_dim, (seqlen,) * batch, page_size=page_size, slack=0, seed=seed, **codes,
        )  # fmt: skip
        rows.append(shape | _mla_row(problem, geometry, scale, dtype, device, backend, check, min_run_time))
    return rows


def check_op(page_size: int, min_run_time: float) -> None:
    """Raises ValueError unless :func:`attention_latency` takes both."""
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f"page_size is {page_size}; expected a power of two >= 16")
    if not min_run_time > 0:
        raise ValueError(f"min_run_time is {min_run_time}; expected more than 0 seconds")


def _source_rows(
    random: Callable[[], AttentionInputs], baselines: Mapping[str, Baseline], check: bool, min_run_time: float
) -> dict[str, dict[str, Any]]:
    """A row per baseline, all on the same inputs."""
    drawn: dict[str, Any] = unless_out_of_memory(lambda: {"inputs": random()}) if baselines else {}
    if "status" in drawn:
        return dict.fromkeys(baselines, drawn)

    def measure(baseline: Baseline) -> dict[str, Any]:
        inputs = drawn["inputs"]
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
    exact, _, torch_out, rounding = plain_attention(sequences, out.dtype)
    return verdict(out.transpose(1, 2).flatten(0, 1), None, exact, None, torch_out, rounding)


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
    if geometry.has_codes:
        is_read = chosen == "reference" or decodes_codes(geometry, problem.page_size, dtype, device)
        if geometry.kv_lora_rank % CODE_BLOCK or not is_read:
            return row | {"status": "missing: no kernel reads these codes; a decode step copies them in 16 bits"}

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


# MHA2MLA's authors asked for a decode kernel of the shapes that their conversions have, and gave the latency of
# attention, hardware not named. (batch, length) → ms of MHA by FlashAttention-2, and of an MLA kernel fed with
# zero-padded heads.
PRESET, _LLAMA_2, _LAYERS = "llama-2-7b-decode", MLAGeometry(32, 32, 512, 16, 112, 128, 32), 32
PUBLISHED = {(8, 2048): (5.95, 3.52), (8, 4096): (10.66, 6.08), (64, 2048): (43.74, 4.10)}
PRESET_COLUMNS = {
    "batch": "batch",
    "seqlen": "length",
    "implementation": "implementation",
    "us": "µs a layer",
    "layers_ms": "ms, all layers",
    "speed_up": "MLA's speed-up",
    "published_ms": "published ms",
    "status": "status",
}


def preset_latency(name: str, *, progress: bool = False, **options: Any) -> Iterator[dict[str, Any]]:
    """Rows of a preset: every implementation at each of its shapes, a layer and all layers, beside published times.

    Args:
        options: ``dtype``, ``device``, ``min_run_time``, ``check`` of :func:`attention_latency`.

    Yields:
        Rows with the keys of :data:`PRESET_COLUMNS` and those of :func:`attention_latency`. ``us`` is the device's time
        with a cold L2. ``speed_up`` is a row's time over that of ``mla_decode``; ``published_ms`` stands beside the
        implementations that the published figures are of, or of the same attention.

    Raises:
        ValueError: there is no such preset.
    """
    if name != PRESET:
        raise ValueError(f"preset is {name!r}; expected {PRESET!r}")
    shapes = PUBLISHED.items()
    for (batch, seqlen), (mha_ms, mla_ms) in progress_bar(shapes, desc=name, unit="shape", show=progress):
        shape = {"batch_sizes": (batch,), "seqlens": (seqlen,)}
        rows = attention_latency(_LLAMA_2, baselines=PRESET_BASELINES, **shape, **options)
        ours = rows[-1].get("us_p50")
        for row in rows:
            us = row.get("us_p50")
            if us is not None:
                row |= {"us": us, "layers_ms": us * _LAYERS / 1e3}
                row |= {"speed_up": us / ours} if ours is not None else {}
            if row["implementation"] in ("FlashAttention-2", "SDPA flash"):
                row["published_ms"] = mha_ms
            elif row is rows[-1]:
                row["published_ms"] = mla_ms
            yield row
