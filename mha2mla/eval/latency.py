"""What a conversion gained: time of the attention op and of a whole decode step, source against MLA.

Every row is measured after, and only after, the same inputs passed a check against float64. Time comes from a library:
``triton.testing`` on CUDA (cold L2 for each run; CUDA-graph time beside it), ``torch.utils.benchmark`` on a CPU.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mha2mla.eval.loading import check_device, load_model
from mha2mla.geometry import MLAGeometry
from mha2mla.kernel_testing.judgement import Judgement, verdict
from mha2mla.kernel_testing.plain import plain_attention, plain_mla, rounding_of_attention, rounding_of_mla
from mha2mla.kernels import (
    explain_gqa_decode,
    explain_mla_decode,
    gqa_decode,
    mla_decode,
    plan_gqa_decode,
    plan_mla_decode,
)

# The absorbed and the expanded form are equal in exact arithmetic and round differently: how differently depends on the
# conditioning of the latent's basis. Between the two forms, an error this many times larger is still rounding.
ACROSS_FORMS_FACTOR = 8.0
# Both errors are a handful of roundings in float32; below this their ratio says nothing.
ERROR_FLOOR = 4 * torch.finfo(torch.float32).eps

WRONG = "wrong: "  # how the status of a row begins whose check failed

COLUMNS = {
    "op": "op",
    "implementation": "implementation",
    "batch": "batch",
    "seqlen": "length",
    "cache_bytes": "cache bytes",
    "us_p20": "p20 µs",
    "us_p50": "p50 µs",
    "us_p80": "p80 µs",
    "us_graph": "graph µs",
    "plan_us": "plan µs",
    "gb_per_s": "GB/s",
    "error": "error",
    "status": "status",
}


@dataclass(frozen=True)
class Timing:
    """Quantiles of one call in µs, and its CUDA-graph time (``None``: no GPU, or why it cannot be captured)."""

    p20: float
    p50: float
    p80: float
    graph: float | None = None
    graph_refused: str | None = None

    def to_row(self) -> dict[str, Any]:
        row = {"us_p20": self.p20, "us_p50": self.p50, "us_p80": self.p80, "us_graph": self.graph}
        return row | ({"graph_refused": self.graph_refused} if self.graph_refused else {})


GRAPH_REPLAYS = 10  # that do_bench_cudagraph times, each of a graph of as many calls as fit into its ``rep``
SHORTEST_GRAPH = 2.0  # ms, beside which launching the graph (about 8 µs) does not count


def time_callable(
    call: Callable[[], Any], device: torch.device | str, *, min_run_time: float = 0.3, graph: bool = True
) -> Timing:
    """Times a call that leaves its inputs as they were.

    Args:
        call: what to time; takes nothing. Warmed up before anything counts.
        device: where it computes.
        min_run_time: seconds to spend measuring, and again for the graph time.
        graph: measure the graph time too (CUDA).

    Returns:
        Quantiles over runs. CUDA: device time of a run with cold L2, from events; the graph time is with warm L2.
    """
    device = torch.device(device)
    if device.type == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        with torch.cuda.device(device):
            p20, p50, p80 = do_bench(call, warmup=25, rep=int(min_run_time * 1000), quantiles=[0.2, 0.5, 0.8])
            replayed = refused = None
            length = max(SHORTEST_GRAPH, min_run_time * 1000 / GRAPH_REPLAYS)
            try:
                if graph:
                    replayed = do_bench_cudagraph(call, rep=length, return_mode="median") * 1000
            except Exception as error:  # a call that cannot be captured fails in its own way: host sync, allocation, …
                torch.cuda.synchronize()
                refused = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Timing(p20 * 1000, p50 * 1000, p80 * 1000, replayed, refused)

    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    timer.timeit(1)
    times = [seconds * 1e6 for seconds in timer.blocked_autorange(min_run_time=min_run_time).times]
    if len(times) == 1:
        times *= 2  # a single long block: all quantiles are that one
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(tenths[1], tenths[4], tenths[7])


def compare(
    out: Tensor, torch_out: Tensor, reference: Tensor, rounding: Tensor | None = None, factor: float | None = None
) -> Judgement:
    """Judges an output beside plain torch's at the same dtype and a float64 reference, all of the same shape.

    Args:
        rounding, factor: as in :func:`mha2mla.kernel_testing.judgement.verdict`.
    """
    return verdict(
        out, None, reference, None, torch_out, rounding=rounding, units=0.0, floor=ERROR_FLOOR, factor=factor
    )


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


Baseline = Callable[[AttentionInputs], Callable[[], Tensor] | str]
"""Given inputs, returns a call giving [B, H, 1, d_h], or the reason why there is none here ("not installed", …)."""


def sdpa_baseline(inputs: AttentionInputs) -> Callable[[], Tensor]:
    """torch's scaled_dot_product_attention over the source's own KV cache, whichever kernel it picks."""
    from torch.nn.functional import scaled_dot_product_attention

    grouped = inputs.k.shape[1] != inputs.q.shape[1]
    return lambda: scaled_dot_product_attention(
        inputs.q, inputs.k, inputs.v, scale=inputs.softmax_scale, enable_gqa=grouped
    )


def flash_attention_3_baseline(inputs: AttentionInputs) -> Callable[[], Tensor] | str:
    """FlashAttention-3's decode over the source's KV cache, where the package ``flash_attn_interface`` is installed."""
    if inputs.q.device.type != "cuda":
        return f"runs on CUDA devices; device is {inputs.q.device}"
    if inputs.q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16; dtype is {inputs.q.dtype}"
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError as error:
        return f"flash_attn_interface is not installed ({error})"
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (inputs.q, inputs.k, inputs.v))
    seqlens = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    return lambda: flash_attn_with_kvcache(
        q, k, v, cache_seqlens=seqlens, softmax_scale=inputs.softmax_scale, causal=True
    ).transpose(1, 2)


def gqa_decode_baseline(inputs: AttentionInputs, page_size: int = 64) -> Callable[[], Tensor] | str:
    """This package's own decode op of the source's attention, for machines without FlashAttention. Planned once."""
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
    backend: str | None = None,
    baselines: Mapping[str, Baseline] = BASELINES,
    min_run_time: float = 0.3,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Decode attention alone, one new token per sequence: the source's over its KV cache, ours over the latent cache.

    Neither includes projections, RoPE or the write of the new token. Inputs are random normal numbers, pages shuffled.

    Args:
        geometry: of the MLA layer; the source is its ``num_key_value_heads`` heads of width ``v_head_dim``.
        batch_sizes, seqlens: every pair of them is measured; ``seqlen`` counts the new token.
        page_size: tokens per page of the latent cache, a power of two.
        softmax_scale: default ``v_head_dim ** -0.5``, the source's.
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
    heads, kv_heads, head_dim = geometry.num_attention_heads, geometry.num_key_value_heads, geometry.v_head_dim
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    rows = []
    for batch in batch_sizes:
        for seqlen in seqlens:
            generator = torch.Generator(device).manual_seed(seed)

            def normal(*shape: int, generator=generator) -> Tensor:
                return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

            shape = {"op": "attention", "batch": batch, "seqlen": seqlen, "dtype": _name(dtype), "device": device.type}
            inputs = AttentionInputs(
                normal(batch, heads, 1, head_dim),
                normal(batch, kv_heads, seqlen, head_dim),
                normal(batch, kv_heads, seqlen, head_dim),
                scale,
            )
            read = inputs.k.nbytes + inputs.v.nbytes
            for name, baseline in baselines.items():
                row = shape | {"implementation": name, "cache_bytes": read}
                call = baseline(inputs)
                if isinstance(call, str):
                    rows.append(row | {"status": f"missing: {call}"})
                    continue
                rows.append(row | _measured(call, _check_source(call(), inputs), read, device, min_run_time))
            del inputs
            read = batch * seqlen * geometry.cache_bytes_per_token(dtype.itemsize)
            row = shape | {"implementation": "mla_decode", "geometry": str(geometry), "cache_bytes": read}
            why = explain_mla_decode(geometry, page_size, dtype, device)
            chosen = backend or ("tilelang" if why is None else "reference")
            row["implementation"] = f"mla_decode ({chosen})"
            if chosen == "reference" and why is not None:
                row["backend_reason"] = why
            if chosen == "tilelang" and why is not None:
                rows.append(row | {"status": f"missing: {why}"})
                continue
            paged = _PagedInputs.random(geometry, batch, seqlen, page_size, normal)
            plan = plan_mla_decode(
                paged.q_latent,
                paged.rope_cache,
                paged.block_table,
                paged.cache_seqlens,
                qk_rope_head_dim=geometry.qk_rope_head_dim,
                backend=backend,
            )
            out = torch.empty_like(paged.q_latent)

            def call(paged=paged, plan=plan, out=out) -> Tensor:
                return mla_decode(*paged.arguments, softmax_scale=scale, plan=plan, out=out, backend=backend)

            row |= _measured(call, _check_mla(call(), paged, scale), read, device, min_run_time)
            if device.type == "cuda" and "us_p50" in row and plan.num_ctas:
                refresh = partial(plan.refresh, paged.cache_seqlens)
                planning = time_callable(refresh, device, min_run_time=min_run_time, graph=False)
                row["plan_us"] = planning.p50
            rows.append(row)
    return rows


def _measured(
    call: Callable[[], Any], check: Judgement, read: int, device: torch.device, min_run_time: float
) -> dict[str, Any]:
    """The time of a call that passed its check; the reason, and no time, otherwise."""
    row = {"error": check.error, "torch_error": check.torch_error}
    if not check.ok:
        return row | {"status": f"{WRONG}{check.reason}"}
    row["status"] = "ok"
    timing = time_callable(call, device, min_run_time=min_run_time)
    return row | timing.to_row() | {"gb_per_s": read / timing.p50 / 1e3}


def _check_source(out: Tensor, inputs: AttentionInputs) -> Judgement:
    """[B, H, 1, d_h] against :func:`plain_attention`, one sequence at a time (float64 copies are large)."""
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for sequence in zip(inputs.q[:, :, 0], inputs.k, inputs.v, strict=True):
        exact = [tensor.double() for tensor in sequence]
        at_dtype, reference = (plain_attention(*each, inputs.softmax_scale) for each in (sequence, exact))
        results.append((at_dtype, reference, rounding_of_attention(*exact, inputs.softmax_scale)))
    return compare(out[:, :, 0], *map(torch.stack, zip(*results, strict=True)))


@dataclass(frozen=True)
class _PagedInputs:
    """Arguments of one ``mla_decode`` call with one new token per sequence; shapes as in its docstring."""

    q_latent: Tensor
    q_pe: Tensor
    latent_cache: Tensor
    rope_cache: Tensor
    block_table: Tensor
    cache_seqlens: Tensor

    @classmethod
    def random(
        cls, geometry: MLAGeometry, batch: int, seqlen: int, page_size: int, normal: Callable[..., Tensor]
    ) -> _PagedInputs:
        pages = -(-seqlen // page_size)
        q_latent = normal(batch, 1, geometry.num_attention_heads, geometry.kv_lora_rank)
        device = q_latent.device
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).to(device)
        return cls(
            q_latent=q_latent,
            q_pe=normal(batch, 1, geometry.num_attention_heads, geometry.qk_rope_head_dim),
            latent_cache=normal(batch * pages, page_size, geometry.kv_lora_rank),
            rope_cache=normal(batch * pages, page_size, geometry.num_rope_heads, geometry.qk_rope_head_dim),
            block_table=order.view(batch, pages).int(),
            cache_seqlens=torch.full((batch,), seqlen, dtype=torch.int32, device=device),
        )

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.q_latent, self.q_pe, self.latent_cache, self.rope_cache, self.block_table, self.cache_seqlens
        )  # fmt: skip


def _check_mla(out: Tensor, paged: _PagedInputs, scale: float) -> Judgement:
    """[B, 1, H, d_c] against :func:`plain_mla`, one sequence at a time."""
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for row, pages in enumerate(paged.block_table.long()):
        length = int(paged.cache_seqlens[row])
        cached = (cache[pages].flatten(0, 1)[:length] for cache in (paged.latent_cache, paged.rope_cache))
        sequence = (paged.q_latent[row, 0], paged.q_pe[row, 0], *cached)
        exact = [tensor.double() for tensor in sequence]
        at_dtype, reference = (plain_mla(*each, scale) for each in (sequence, exact))
        results.append((at_dtype, reference, rounding_of_mla(*exact, scale)))
    return compare(out[:, 0], *map(torch.stack, zip(*results, strict=True)))


@torch.inference_mode()
def decode_step_latency(
    models: Mapping[str, torch.nn.Module],
    *,
    batch_sizes: Sequence[int] = (1,),
    seqlens: Sequence[int] = (512,),
    min_run_time: float = 0.5,
    prefill_chunk: int = 1024,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One whole decode step of each model: a token in, logits out, ``seqlen`` tokens cached with the new one.

    Each model fills a cache of fixed size with the same random tokens, then makes the same step again and again, the
    cache being put back by one token after each. First the step's logits are checked against the same model in float64
    without a cache (norms and angles in float32, as transformers has them). The yardstick is its cacheless logits at
    its own dtype; for a converted model, whose step is another form of the same sum, those with a wider factor, and the
    same step with the decode op's torch reference.

    Args:
        models: name → causal language model, all on one device; for instance ``{"source": …, "converted": …}``.
        batch_sizes, seqlens: every pair of them is measured.
        min_run_time: seconds of measurement per row.
        prefill_chunk: tokens per sequence that are prefilled at a time.
        seed: of the tokens.

    Returns:
        Rows with the keys of :data:`COLUMNS`, and ``ms_per_token`` (median; a step yields ``batch`` tokens at once).
        The float64 check makes a copy of a model's weights at eight bytes each.
    """
    rows = []
    longest, largest = max(seqlens), max(batch_sizes)
    # The first and the last sequence of every batch are checked.
    checked = sorted({0} | {batch - 1 for batch in batch_sizes})
    for name, model in models.items():
        device, dtype = model.device, model.dtype
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.config.vocab_size, (largest, longest), generator=generator).to(device)
        positions = torch.tensor([seqlen - 1 for seqlen in seqlens], device=device)
        # Attention is causal: the logits after a prefix do not depend on what follows, so one pass serves all lengths.
        yardstick = _logits_without_cache(model, ids[checked], positions)
        exact = _logits_without_cache(copy.deepcopy(model).double(), ids[checked], positions)
        for batch in batch_sizes:
            for column, seqlen in enumerate(seqlens):
                row = {
                    "op": "decode step",
                    "implementation": name,
                    "batch": batch,
                    "seqlen": seqlen,
                    "dtype": _name(dtype),
                    "device": device.type,
                    "cache_bytes": batch * seqlen * cache_bytes_per_token(model, dtype.itemsize),
                }
                step = _DecodeStep.prefilled(model, ids[:batch, :seqlen], prefill_chunk)
                here = [index for index, sequence in enumerate(checked) if sequence in (0, batch - 1)]
                check = _check_step(step, sorted({0, batch - 1}), yardstick[here, column], exact[here, column])
                row |= _measured(step, check, row["cache_bytes"], device, min_run_time)
                if "us_p50" in row:
                    row["ms_per_token"] = row["us_p50"] / 1e3
                rows.append(row)
    return rows


def cache_bytes_per_token(model: torch.nn.Module, itemsize: int) -> int:
    """Bytes that all layers of a model cache per token, for elements of ``itemsize`` bytes; source or converted."""
    config = model.config
    if hasattr(config, "cache_bytes_per_token"):
        return config.cache_bytes_per_token(itemsize)
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize


def _logits_without_cache(model: torch.nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """[sequences, positions, vocabulary] logits of whole texts, one text at a time."""
    return torch.cat([model(input_ids=text[None], use_cache=False, logits_to_keep=positions).logits for text in ids])


@dataclass(frozen=True)
class _DecodeStep:
    """A model, its filled cache and the next token: calling it makes the step, and leaves the cache as it was."""

    model: torch.nn.Module
    cache: Any
    token: Tensor
    position: Tensor

    @classmethod
    def prefilled(cls, model: torch.nn.Module, ids: Tensor, chunk: int) -> _DecodeStep:
        """All but the last of ``ids [B, T]`` go into the cache; the last is the step's token."""
        batch, seqlen = ids.shape
        cache = _fixed_cache(model, seqlen)
        for start in range(0, seqlen - 1, chunk):
            part = slice(start, min(start + chunk, seqlen - 1))
            positions = torch.arange(part.start, part.stop, device=ids.device).expand(batch, -1)
            model(
                input_ids=ids[:, part], past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1
            )
        position = torch.full((batch, 1), seqlen - 1, device=ids.device)
        return cls(model, cache, ids[:, -1:].clone(), position)

    def __call__(self) -> Tensor:
        logits = self.model(
            input_ids=self.token, past_key_values=self.cache, position_ids=self.position, use_cache=True
        ).logits[:, 0]
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(1)
        return logits


def _check_step(step: _DecodeStep, sequences: list[int], yardstick: Tensor, exact: Tensor) -> Judgement:
    """The logits ``[sequences, vocabulary]`` of a step, for some of its sequences."""
    out = step()[sequences]
    config = step.model.config
    if config.model_type != "mha2mla":
        return compare(out, yardstick, exact)
    across_forms = compare(out, yardstick, exact, factor=ACROSS_FORMS_FACTOR)
    if not across_forms.ok:
        return across_forms
    backend = config.decode_backend
    config.decode_backend = "reference"
    try:
        same_form = compare(out, step()[sequences], exact)
    finally:
        config.decode_backend = backend
    # The reference keeps its softmax weights in float32, a kernel in the model's dtype like torch's own attention: in
    # 16 bits the expanded form is the fairer yardstick, in 32 bits the reference.
    other_form = compare(out, yardstick, exact)
    return max(same_form, other_form, key=lambda check: check.torch_error)


def _fixed_cache(model: torch.nn.Module, length: int) -> Any:
    """The cache of fixed size that ``generate(cache_implementation="static")`` gives a model."""
    if model.config.model_type == "mha2mla":
        from mha2mla.modeling import LatentCache

        return LatentCache(model.config, max_cache_len=length)
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def model_latency(
    source: Any,
    converted: Any,
    *,
    op: str = "both",
    batch_sizes: Sequence[int] = (1, 8),
    seqlens: Sequence[int] = (512, 2048),
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    page_size: int = 64,
    layer: int = 0,
    backend: str | None = None,
    min_run_time: float = 0.5,
) -> list[dict[str, Any]]:
    """Latency of a converted checkpoint beside its source: attention op of one layer, whole decode step, or both.

    Args:
        source, converted: folder, hub id, or a loaded causal language model.
        op: ``"attention"``, ``"step"`` or ``"both"``.
        dtype: what to compute in; default bfloat16 on CUDA, float32 on a CPU. Loaded models keep theirs.
        layer: whose geometry the attention op has.
        backend: of the decode op, in both measurements; ``None`` lets it choose.
        batch_sizes, seqlens, page_size, min_run_time: as in :func:`attention_latency` and :func:`decode_step_latency`.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: an argument out of range, or ``converted`` is no converted model.
    """
    if op not in ("attention", "step", "both"):
        raise ValueError(f"op is {op!r}; expected 'attention', 'step' or 'both'")
    for name, values in (("batch_sizes", batch_sizes), ("seqlens", seqlens)):
        least = 1 if name == "batch_sizes" else 2
        if not values or any(value < least for value in values):
            raise ValueError(f"{name} is {list(values)}; expected one or more numbers >= {least}")
    device = check_device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    converted = load_model(converted, "converted", device=device, dtype=dtype)
    config = converted.config
    if config.model_type != "mha2mla":
        raise ValueError(f"converted has model_type {config.model_type!r}; expected 'mha2mla', a converted checkpoint")
    if not 0 <= layer < config.num_hidden_layers:
        raise ValueError(f"layer is {layer}; expected 0 to {config.num_hidden_layers - 1}")
    rows = []
    if op in ("attention", "both"):
        rows += attention_latency(
            config.layer_geometry(layer),
            batch_sizes=batch_sizes,
            seqlens=seqlens,
            dtype=converted.dtype,
            device=converted.device,
            page_size=page_size,
            softmax_scale=config.softmax_scale,
            backend=backend,
            min_run_time=min_run_time,
        )
    if op in ("step", "both"):
        source = load_model(source, "source", device=device, dtype=dtype)
        converted.config.decode_backend = backend
        rows += decode_step_latency(
            {"source": source, "converted": converted},
            batch_sizes=batch_sizes,
            seqlens=seqlens,
            min_run_time=min_run_time,
        )
    return rows


def wrong_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows whose check failed; those that are missing, with a reason, are not among them."""
    return [row for row in rows if row["status"].startswith(WRONG)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
