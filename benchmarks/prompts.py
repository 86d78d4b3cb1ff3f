"""A prompt's attention by form, and whole steps over prompts, beside the source: SmolLM2's shape at half of its cache.

    python benchmarks/prompts.py --json benchmarks/results/h100-prompts.json
    python benchmarks/prompts.py --shapes 1x512

Random weights, bfloat16. Attention is one layer's call over a paged cache that holds the new tokens: "expanded" is the
mixed op in that form; "absorbed" the decode op over pieces of eight queries; "chosen" the mixed op as steps run it; the
source's keys and values run ``gqa_attention``.
Rows of 64 queries a prompt are judged by float64 before anything is timed. A step is all layers and the last token's
logits: "paged" by ``forward_batch``, "forward" as ``generate`` runs a prompt, by SDPA or by the backend's name. Its
logits for one prompt of 512 tokens may be twice as far from float64's as those of SDPA. ``host_ms`` is the time until
all is launched: where it is near ``ms``, Python takes the time. FLOP are those of ``form_costs``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Recording, asks_for_cpu, command
from mha2mla.eval.measurement import in_float64
from mha2mla.kernels import (
    LatentRope,
    compile_ahead,
    mla_absorbed,
    plan_mla_attention,
    plan_mla_decode,
    rotary_keys,
)
from mha2mla.kernels.mixed_attention.layout import form_costs
from mha2mla.modeling import LatentCache, SequenceBatch, paged_model
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.registry import AttentionConstants, GQAGeometry
from mha2mla.testing.numeric_check import ERROR_FACTOR, PlainAttention, errors
from mha2mla.testing.timing import time_callable
from mha2mla.trial_models import converted_config, random_model, source_config

SHAPES = ((1, 512), (8, 512), (32, 1024), (1, 8192))
CASES = {"128 computed": (128, "none"), "128 kept": (128, "bfloat16"), "64 computed": (64, "none")}
PIECE, JUDGED, TOLERANCE = 8, 64, 2e-2


@dataclass
class Attention:
    """One layer's attention over prompts: a call, and what float64 makes of the last rows of each prompt."""

    call: Callable[[], Tensor]
    expected: Tensor
    flops: int


def new_batch(batch: int, length: int, device: str) -> tuple[SequenceBatch, int]:
    pages = -(-length // PAGE_SIZE)
    tables = [range(row * pages, (row + 1) * pages) for row in range(batch)]
    return SequenceBatch.build([length] * batch, [0] * batch, tables, PAGE_SIZE, device=device), batch * pages


def exact(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """float64 attention of the last rows [B, n, H, d] over [B, T, h, d]: [B, n, H, d_v]."""
    rows, length = queries.shape[1], keys.shape[1]
    seen = torch.arange(length, device=keys.device) <= torch.arange(length - rows, length, device=keys.device)[:, None]
    parts = (PlainAttention((q,), (k,), v, seen, scale) for q, k, v in zip(queries, keys, values, strict=True))
    return torch.stack([part.to(torch.float64).attend() for part in parts])


def source_attention(constants: AttentionConstants, batch: int, length: int, device: str) -> Attention:
    geometry, backend = constants.geometry, ATTENTION_BACKENDS.get("gqa_paged" if device == "cuda" else "gqa_reference")
    rows, pages = new_batch(batch, length, device)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    heads, width, tokens = geometry.num_attention_heads, geometry.qk_head_dim, batch * length
    tensors = {name: normal(tokens, geometry.num_key_value_heads, width) for name in ("key", "value")}
    tensors |= {"query": normal(tokens, heads, width), "inv_freq": torch.rand(1, width // 2, device=device)}
    cache = backend.cache_layout(geometry, PAGE_SIZE, torch.bfloat16).make(pages, torch.device(device))
    query = backend.append(tensors, cache, rows, constants)["query"]
    plan = backend.plan(cache, rows, constants, torch.bfloat16)
    keys, values = (
        cache[name].flatten(0, 1).unflatten(0, (batch, -1))[:, :length] for name in ("key_cache", "value_cache")
    )
    judged = query.unflatten(0, (batch, length))[:, -JUDGED:]
    pairs = batch * length * (length + 1) // 2
    call = partial(backend.attend, {**tensors, "query": query}, cache, rows, plan, constants)
    return Attention(call, exact(judged, keys, values, constants.softmax_scale), 4 * heads * width * pairs)


def converted_attention(constants: AttentionConstants, batch: int, length: int, device: str) -> dict[str, Attention]:
    """By form."""
    geometry, backend = constants.geometry, ATTENTION_BACKENDS.get("mla_paged" if device == "cuda" else "mla_reference")
    rows, pages = new_batch(batch, length, device)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    heads, up, latent = geometry.num_attention_heads, geometry.num_up_projection_heads, geometry.kv_lora_rank
    nope, rope, tokens = geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, batch * length
    tensors: dict[str, Any] = {
        "q_nope": normal(tokens, heads, nope),
        "q_pe": normal(tokens, heads, rope),
        "latent": normal(tokens, latent),
        "k_pe": normal(tokens, 1, rope) if geometry.has_rope_cache else None,
        "k_up": normal(up, nope, latent) * latent**-0.5,
        "v_up": normal(up, geometry.v_head_dim, latent) * latent**-0.5,
        "inv_freq": torch.rand(1, rope // 2, device=device),
    }
    if not geometry.has_rope_cache:
        tensors |= {"rope_weight": normal(rope, latent) * latent**-0.5, "rope_bias": normal(rope)}
    cache = backend.cache_layout(geometry, PAGE_SIZE, torch.bfloat16).make(pages, torch.device(device))
    tensors |= backend.append(tensors, cache, rows, constants)
    chosen = backend.plan(cache, rows, constants, torch.bfloat16)
    expanded = plan_mla_attention(
        cache["latent_cache"], cache.get("rope_cache"), rows.block_table, rows.cache_seqlens, rows.lengths,
        num_attention_heads=heads, num_key_value_heads=up, qk_nope_head_dim=nope, v_head_dim=geometry.v_head_dim,
        qk_rope_head_dim=None if geometry.has_rope_cache else rope, dtype=torch.bfloat16, has_padding=False,
        launch_flop=0,
    )  # fmt: skip
    c = cache["latent_cache"].flatten(0, 1).unflatten(0, (batch, -1))[:, :length].double()
    parameters = None
    if geometry.has_rope_cache:
        k_pe = cache["rope_cache"].flatten(0, 1).unflatten(0, (batch, -1))[:, :length]
    else:
        names = ("rope_weight", "rope_bias")
        parameters = LatentRope(*(tensors[name] for name in names), tensors["inv_freq"][0], constants.attention_scaling)
        wide = LatentRope(*(tensors[name].double() for name in names), parameters.inv_freq, parameters.scaling)
        k_pe = rotary_keys(c, wide, torch.arange(length, device=device)[None])[:, :, None]
    keys = torch.cat(
        (torch.einsum("btc,hdc->bthd", c, tensors["k_up"].double()), k_pe.double().expand(-1, -1, up, -1)), -1
    )
    values = torch.einsum("btc,hdc->bthd", c, tensors["v_up"].double())
    query = torch.cat((tensors["q_nope"], tensors["q_pe"]), -1).unflatten(0, (batch, length))[:, -JUDGED:]
    expected = exact(query, keys, values, constants.softmax_scale)
    costs = {form: cost.flops(length, 0) * batch for form, cost in form_costs(geometry).items()}

    pieces = batch * length // PIECE
    table = rows.block_table.repeat_interleave(length // PIECE, 0)
    seqlens = (torch.arange(length // PIECE, device=device, dtype=torch.int32) * PIECE + PIECE).repeat(batch)
    split = {name: tensors[name].unflatten(0, (pieces, PIECE)) for name in ("q_nope", "q_pe")}
    shape = torch.empty((), device=device, dtype=torch.bfloat16).expand(pieces, PIECE, heads, latent)
    pages_of = cache.get("rope_cache", cache["latent_cache"])
    decode = plan_mla_decode(shape, pages_of, table, seqlens, qk_rope_head_dim=rope, latent_dtype=torch.bfloat16)
    caches = cache["latent_cache"], cache.get("rope_cache")
    absorbed = partial(
        mla_absorbed, *split.values(), *caches, tensors["k_up"], tensors["v_up"], table, seqlens,
        softmax_scale=constants.softmax_scale, rope=parameters, plan=decode,
    )  # fmt: skip
    form = "expanded" if chosen.parts.layout.waves else "absorbed"
    return {
        "expanded": Attention(
            partial(backend.attend, tensors, cache, rows, expanded, constants), expected, costs["expanded"]
        ),
        "absorbed": Attention(lambda: absorbed().flatten(0, 1), expected, costs["absorbed"]),
        f"chosen, {form}": Attention(
            partial(backend.attend, tensors, cache, rows, chosen, constants), expected, costs[form]
        ),
    }


def host_ms(call: Callable[[], Any], device: str, runs: int = 5) -> tuple[float, float]:
    """Median ms until a call has returned, and until the device is done."""
    times = []
    for _ in range(runs + 1):
        wait(device)
        began = time.perf_counter()
        call()
        launched = time.perf_counter() - began
        wait(device)
        times.append((launched * 1e3, (time.perf_counter() - began) * 1e3))
    launched, done = zip(*times[1:], strict=True)
    return statistics.median(launched), statistics.median(done)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def attention_rows(table: Recording, shapes: list[tuple[int, int]], configs: dict[str, Any], device: str) -> None:
    for batch, length in shapes:
        source = GQAGeometry(9, 3, 64, 64)
        found = {"source": source_attention(AttentionConstants(source, 0.125), batch, length, device)}
        for name, config in configs.items():
            forms = converted_attention(config.attention_constants()[0], batch, length, device)
            found |= {f"{name} {form}": each for form, each in forms.items()}
        base = None
        for name, each in found.items():
            row = {"what": "attention", "case": name, "batch": batch, "length": length}
            judged = each.call().unflatten(0, (batch, length))[:, -JUDGED:]
            row |= {"error": errors(judged, each.expected)[0], "GFLOP": each.flops / 1e9}
            row["status"] = "ok" if row["error"] <= TOLERANCE else f"wrong: more than {TOLERANCE}"
            if row["status"] == "ok":
                timing = time_callable(each.call, device, min_run_time=0.05, graph=False)
                base = timing.p50 if name == "source" else base
                row |= {"ms": timing.p50 / 1e3, "host_ms": host_ms(each.call, device)[0]}
                row |= {"TFLOP/s": each.flops / timing.p50 / 1e6}
                row |= {} if base is None else {"of_source": timing.p50 / base}
            table.add(row)


@torch.inference_mode()
def steps_of(model: Any, rotary_key_cache: str | None, batch: int, length: int, device: str) -> dict[str, Callable]:
    """Calls that run all prompts of a shape: by ``forward_batch``, and of a converted model as ``generate`` does."""
    ids = torch.arange(batch * length, device=device).view(batch, length) % 40000 % model.config.vocab_size
    paged = paged_model(model)
    cache = paged.paged_cache(batch * -(-length // PAGE_SIZE), PAGE_SIZE, rotary_key_cache=rotary_key_cache)

    def run_paged() -> Tensor:
        sequences = [cache.open() for _ in range(batch)]
        step = cache.step(cache.extend(dict.fromkeys(sequences, length)))
        logits = paged.forward_batch(ids.flatten(), step)
        for sequence in sequences:
            cache.close(sequence)
        return logits

    calls = {"paged": run_paged}
    if paged is model:
        for name in (None, "mla_paged") if device == "cuda" else (None,):
            config = model.config.with_options(rotary_key_cache=rotary_key_cache)
            config = config if name is None else config.with_options(attention_backend=name)
            calls[f"forward, {name or 'sdpa'}"] = partial(forward, model, config, ids)
    return calls


def forward(model: Any, config: Any, ids: Tensor) -> Tensor:
    kept = model.config.attention_backend
    model.config.attention_backend = config.attention_backend
    try:
        return model(ids, past_key_values=LatentCache(config), logits_to_keep=1).logits[:, 0]
    finally:
        model.config.attention_backend = kept


def prompts(
    shapes: tuple[str, ...] = tuple(f"{batch}x{length}" for batch, length in SHAPES),
    layers: int = 30,
    device: str = "cuda",
    json: str | None = None,
) -> bool:
    """Judges and times attention of prompts by form, then whole steps; prints both in one table.

    Args:
        shapes: BATCHxLENGTH, lengths in multiples of 8.
        layers: of the models.
        device: a CPU tries the script out.
        json: also write every row to this file.
    """
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes]
    table, dtype = Recording("prompts", json), torch.bfloat16
    shape = source_config("smollm2-135m", num_hidden_layers=layers)
    configs = {
        name: converted_config(shape, layout="latent", kv_lora_rank=192, qk_rope_head_dim=width).with_options(
            rotary_key_cache=keys
        )
        for name, (width, keys) in CASES.items()
    }
    torch.manual_seed(0)
    models = {"source": random_model(shape, device, dtype)}
    models |= {name: random_model(config, device, dtype) for name, config in configs.items()}
    with torch.inference_mode():
        ids = torch.arange(512, device=device)[None]
        sdpa, wide = {}, {}
        for name, model in models.items():
            sdpa[name] = model(ids, use_cache=False, logits_to_keep=1).logits[:, 0]
            with in_float64(model):
                wide[name] = model(ids, use_cache=False, logits_to_keep=1).logits[:, 0]
        models["source"].set_attn_implementation("mha2mla")
        steps = {
            (name, size): steps_of(model, CASES[name][1] if name in CASES else None, *size, device)
            for size in dict.fromkeys([(1, 512), *sizes])
            for name, model in models.items()
        }

        def launch_all() -> None:
            for size in sizes:
                for config in configs.values():
                    for each in converted_attention(config.attention_constants()[0], *size, device).values():
                        each.call()
                source_attention(AttentionConstants(GQAGeometry(9, 3, 64, 64), 0.125), *size, device).call()
            for calls in steps.values():
                for call in calls.values():
                    call()

        compile_ahead(torch.device(device), ("prompts", shapes, layers), launch_all)
        attention_rows(table, sizes, configs, device)
        base: dict[tuple[int, ...], float] = {}
        judged: dict[tuple[str, str], str] = {}
        for (name, size), calls in steps.items():
            for way, call in calls.items():
                row = {"what": f"step, {way}", "case": name, "batch": size[0], "length": size[1]}
                if size == (1, 512):
                    row["error"] = errors(call(), wide[name])[0]
                    limit = ERROR_FACTOR * errors(sdpa[name], wide[name])[0]
                    judged[name, way] = "ok" if row["error"] <= limit else f"wrong: more than {limit:.2g}"
                row["status"] = judged[name, way]
                if row["status"] == "ok":
                    row["host_ms"], row["ms"] = host_ms(call, device, 5 if device == "cuda" else 1)
                    if name == "source" and size in sizes:
                        base[size] = row["ms"]
                    row |= {"of_source": row["ms"] / base[size]} if size in base else {}
                table.add(row)
    columns = ["what", "case", "batch", "length", "error", "GFLOP", "TFLOP/s", "ms", "of_source"]
    return table.show("prompts, SmolLM2's shape, half of its cache", [*columns, "host_ms", "status"])


if __name__ == "__main__":
    sys.exit(command(prompts, cpu=asks_for_cpu()))
