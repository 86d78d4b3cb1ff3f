"""Where the time of a fit's gradient step goes: one layer, nothing converted or written.

    python benchmarks/fit_step.py --checkpoint PATH --layer 3 --steps 200

The source runs up to the layer over calibration text (`builtin:pydoc`, which no model must write), the closed form
makes the layer's tensors, and the steps are those of `reconstruct`. A row a window length: a step with its batch (`ms`)
and alone (`step_ms`), of that its forward pass and its optimiser, then how the profiler's kernels share a step:
attention, products of matrices, all else. On CUDA the layer's attention is timed by itself, forward and backward, as
the fit runs it and by PyTorch's SDPA (`attention_ms`, `sdpa_ms`); `attention_error` is how far their gradients are
apart.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Recording, command
from mha2mla.conversion.calibration.blocks import calibration_lengths
from mha2mla.conversion.calibration.windows import calibration_windows
from mha2mla.conversion.fit import reconstruction
from mha2mla.conversion.fit.repeatable import deterministic_sdpa, repeatable_attention
from mha2mla.conversion.layer_walk import LayerWalk, block_forward, token_weights
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.source.opening import open_source
from mha2mla.environment import compute_device
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.captured import CudaGraphs
from mha2mla.trial_models import fetch_smollm2

TEXT = "builtin:pydoc"
_RATE = 1e-6  # small: hundreds of steps on one batch's schedule must not diverge
_ATTENTION = re.compile(r"attention|flash|fmha|attn|key_gradients|query_gradients|scaled_dot", re.IGNORECASE)
_PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|::(add|ba?dd)?b?mm\b|::addmm_", re.IGNORECASE)
COLUMNS = (
    "length", "windows", "ms", "step_ms", "forward_ms", "optimiser_ms", "kernels", "attention", "products", "rest",
    "attention_ms", "sdpa_ms", "attention_error",
)  # fmt: skip


class Clock:
    """Seconds of the stages before the steps, each measured when the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.last = device, {}, time.perf_counter()

    def stop(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now


def prepared(walk: LayerWalk, layer: int, clock: Clock, seed: int) -> reconstruction._Fit:
    """The fit of ``layer`` on the source's own activations, as ``reconstruct`` begins it."""
    model = walk.model
    stream, targets = walk.new_stores(2, on_device=True)
    model.embed(stream)
    for index in range(layer):
        model.run_layer(model.layer(index), index, stream, tokens=16384)
        model.source.release()
    clock.stop("source")
    module = model.layer(layer)
    collector = walk.collector(layer)
    for part in stream.blocks.batches(16384):
        targets.write(part, stream.read(part, model.device))
    model.run_layer(module, layer, targets, tokens=16384, observe=collector.add)
    weights = token_weights(targets, 16384, model.device)
    clock.stop("statistics")
    tensors, _ = walk.convert(layer, collector.finish())
    clock.stop("closed form")
    forward = block_forward(walk, layer, module)
    problem = reconstruction.ReconstructionProblem(stream, targets, weights, forward, model.device)
    return reconstruction._Fit(problem, tensors, walk.recipe.fit, seed, layer)


def timed(call: Callable[[], Any], device: torch.device, times: int) -> float:
    """Median milliseconds of a call, after two."""
    found = []
    for _ in range(times + 2):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - started))
    return median(found[2:])


def replayed(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``call`` as a graph on CUDA, so that launches cost nothing."""
    return CudaGraphs().record(call, lambda: None, device)[1] if device.type == "cuda" else call


def shares(step: Callable[[], Any], device: torch.device) -> tuple[dict[str, float], list[str]]:
    """Shares of attention, matrix products and the rest in a step's time in kernels (ops on a CPU); names of the
    attention's kernels."""
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        step()
        if on_cuda:
            torch.cuda.synchronize(device)
    times: Counter[str] = Counter()
    for event in profiler.events():
        if on_cuda == (event.device_type == torch.autograd.DeviceType.CUDA):
            times[event.name] += event.time_range.elapsed_us() if on_cuda else event.self_cpu_time_total
    kinds: Counter[str] = Counter()
    for name, spent in times.items():
        kinds["attention" if _ATTENTION.search(name) else "products" if _PRODUCT.search(name) else "rest"] += spent
    total = sum(kinds.values()) or 1.0
    names = [name for name, _ in times.most_common() if _ATTENTION.search(name)]
    return {kind: kinds[kind] / total for kind in ("attention", "products", "rest")}, names


def attention_alone(geometry: MLAGeometry, length: int, windows: int, device: torch.device, times: int) -> dict:
    """Milliseconds of the fit's attention and of SDPA, forward and backward, on random bfloat16 tensors."""
    heads, width = geometry.num_attention_heads, geometry.qk_nope_head_dim + geometry.qk_rope_head_dim
    generator = torch.Generator().manual_seed(0)

    def tensor(columns: int) -> torch.Tensor:
        made = torch.randn(windows, length, heads, columns, generator=generator).to(device, torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    operands = [tensor(columns) for columns in (width, width, geometry.v_head_dim)]
    weight = tensor(geometry.v_head_dim).detach().transpose(1, 2)

    def ours() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((repeatable_attention(None, *operands, None)[0] * weight).sum(), operands)

    def theirs() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((deterministic_sdpa(*operands, None, None) * weight).sum(), operands)

    differences = [(a - b).float().norm() / b.float().norm() for a, b in zip(ours(), theirs(), strict=True)]
    return {
        "attention_ms": timed(replayed(ours, device), device, times),
        "sdpa_ms": timed(replayed(theirs, device), device, times),
        "attention_error": float(max(differences)),
    }


def fit_step(
    checkpoint: str | None = None,
    layer: int = 3,
    steps: int = 200,
    cache_ratio: float = 0.5,
    layout: str = "latent",
    tokens: int = 8192,
    blocks: int = 4,
    lengths: list[int] | None = None,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """Prints milliseconds of a gradient step by window length, and what they are spent on.

    Args:
        checkpoint: source, a folder; default SmolLM2-135M-Instruct.
        layer: whose attention is fitted; the source runs through those before it.
        steps: that are timed, over all lengths.
        cache_ratio, layout: of the converted layer, at the uniform rank.
        tokens: of a step.
        blocks: of calibration text of each length, as long as the longest window.
        lengths: of windows; default those that the presets calibrate at.
        device: of the computation; default CUDA where there is one, else the CPU.
        json: also write the rows to this file.
    """
    on = compute_device(device)
    clock, source = Clock(on), open_source(Path(checkpoint or fetch_smollm2()))
    context = getattr(source.config, "max_position_embeddings", None)
    lengths = list(calibration_lengths(source.spec, lengths or "auto", context))
    keys = {"layout": layout, "cache_ratio": cache_ratio, "latent.ranks": "uniform", "fit.tokens": tokens}
    keys |= {"calibration.lengths": lengths, "calibration.tokens": blocks * len(lengths) * max(lengths)}
    recipe = Recipe.from_preset("latent", **keys, **{"calibration.text": TEXT, "fit.steps": steps})
    asked = {"lengths": lengths, "tokens": recipe.calibration.tokens, "seed": recipe.calibration.seed}
    windows = calibration_windows(source, TEXT, **asked, device=on)
    model, geometry = source.model(on, torch.float32), recipe.geometry(source.spec)
    clock.stop("text")
    with tempfile.TemporaryDirectory() as folder:
        geometries = (geometry,) * source.spec.num_layers
        walk = LayerWalk(model, source.adapter, source.spec, geometries, recipe, windows, Path(folder))
        fit = prepared(walk, layer, clock, recipe.calibration.seed)
        table = Recording("fit-step", json, geometry=str(geometry), steps=steps, tokens=tokens, seconds=clock.seconds)
        with reconstruction._numerics(on):
            _measure(fit, table, clock, geometry, max(1, steps // len(lengths)))
    print("; ".join(f"{name} {seconds:.2f} s" for name, seconds in clock.seconds.items()))
    return table.show(f"A gradient step of layer {layer}, {geometry}: {fit.note}", COLUMNS)


def _measure(fit: reconstruction._Fit, table: Recording, clock: Clock, geometry: MLAGeometry, times: int) -> None:
    device, order = fit.problem.device, fit._order(max(32, 4 * times))
    fit._choose_bases(order[:8])
    clock.stop("bases of 8 batches")
    step_of, fit.note = fit._compile(order)
    clock.stop("compiling")
    fit._held_out_loss()
    clock.stop("held-out loss")
    fit.rate.fill_(_RATE)
    for length, step in step_of.items():
        batches = [blocks for of, blocks in order if of == length]
        turns = iter(batches * (-(-(times + 2) // len(batches))))

        def whole(length: int = length, step: Any = step, turns: Any = turns) -> None:
            fit._fill(length, next(turns))
            step()

        def forward(length: int = length) -> torch.Tensor:
            with torch.no_grad():
                return fit._loss(*fit.buffers[length])

        def optimiser() -> None:
            with torch.no_grad():
                fit._descend(torch.ones_like(fit.vector))

        share, names = shares(step, device)
        few = min(times, 20)
        row = {
            "length": length,
            "windows": len(fit.buffers[length][0]),
            "ms": timed(whole, device, times),
            "step_ms": timed(step, device, few),
            "forward_ms": timed(replayed(forward, device), device, few),
            "optimiser_ms": timed(replayed(optimiser, device), device, few),
            **share,
            "kernels": ", ".join(name[:40] for name in names),
        }
        if device.type == "cuda":
            row |= attention_alone(geometry, length, row["windows"], device, few)
        table.add(row)


if __name__ == "__main__":
    sys.exit(command(fit_step, cpu=True))
