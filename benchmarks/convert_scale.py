"""Memory and time of converting a checkpoint of a large model's shape, whose weights are random.

    python benchmarks/convert_scale.py --layers 2                # a taste; the time of 32 layers is extrapolated
    python benchmarks/convert_scale.py --layers 32 --json scale.json
    python benchmarks/convert_scale.py --layers 32 --device cuda --steps 150
    python benchmarks/convert_scale.py --layers 3 --kv_heads 8 --intermediate 14336 --vocabulary 128256 \
        --context 8192 --preset shared --device cuda --limit_gib 70        # Llama-3-8B's shape, all of the preset

The source is written shard by shard (13.5 GB for 32 layers of the default, Llama-2-7B's shape, in bfloat16), converted
with calibration windows of random tokens, verified as always, and removed. The peak is of this process's resident
memory, which besides its own pages counts the source's mapped ones.
"""

from __future__ import annotations

import json as json_format
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mha2mla
from benchmarks.recording import Recording, command
from mha2mla.conversion.calibration.blocks import default_lengths
from mha2mla.conversion.destination import ShardedWriter


def build_source(folder: Path, config: LlamaConfig, shard_bytes: int) -> int:
    """Writes a random bfloat16 checkpoint, one shard in memory at a time; returns its bytes."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    config.dtype, config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    writer = ShardedWriter(folder, max_shard_bytes=shard_bytes)
    with torch.device("meta"):
        parameters = dict(LlamaForCausalLM(config).named_parameters())
    for name, parameter in parameters.items():
        made = torch.ones(parameter.shape, dtype=torch.bfloat16)
        if made.dim() == 2:
            # Embeddings of unit size: what a layer adds is then of the size of what it is added to.
            scale = 1.0 if "embed" in name else made.shape[1] ** -0.5
            for part in made.split(max(1, (1 << 24) // made.shape[1])):
                part.copy_(torch.randn(part.shape, generator=generator) * scale)
        writer.add(name, made)
    writer.finish()
    config.save_pretrained(folder)
    return writer.total_bytes


def _random_tokens(vocabulary: int, windows: int, length: int, *, seed: int) -> torch.Tensor:
    return torch.randint(vocabulary, (windows, length), generator=torch.Generator().manual_seed(seed))


def _recipe_and_tokens(
    preset: str | None, given: dict[str, Any], windows: int, length: int, steps: int | None, config: LlamaConfig
) -> tuple[mha2mla.Recipe, list[torch.Tensor]]:
    """Recipe, and random windows of every length that it calibrates on."""
    lengths, tokens = (length,), windows * length
    given = given if steps is None else {"fit.steps": steps, **given}
    keys = {"calibration.tokens": tokens, "calibration.lengths": length}
    recipe = mha2mla.Recipe.from_dict(
        {"preset": "minimal", **keys, **given} if preset is None else {"preset": preset, "cache_ratio": 0.5, **given}
    )
    if preset is not None:
        lengths, tokens = default_lengths(config.max_position_embeddings), recipe.calibration.tokens
    blocks = max(1, tokens // len(lengths) // max(lengths))
    return recipe, [
        _random_tokens(config.vocab_size, blocks * max(lengths) // length, length, seed=1) for length in lengths
    ]


def convert_scale(
    layers: int = 2,
    heads: int = 32,
    kv_heads: int = 32,
    hidden: int = 4096,
    intermediate: int = 11008,
    vocabulary: int = 32000,
    context: int = 4096,
    windows: int = 4,
    length: int = 256,
    preset: str | None = None,
    recipe: str = "{}",
    steps: int | None = None,
    shard_mib: int = 1024,
    device: str = "cpu",
    folder: str | None = None,
    limit_gib: float = 16.0,
    json: str | None = None,
) -> bool:
    """Writes a source, converts it, and prints what that took; says whether the peak is within the limit.

    Args:
        layers, heads, kv_heads, hidden, intermediate, vocabulary: of the source.
        context: tokens that the source takes.
        windows: of calibration and of evaluation.
        length: tokens of each.
        preset: all of it, with its own number of tokens at its own lengths.
        recipe: further keys, as JSON.
        steps: of reconstruction; default the preset's, none without one.
        shard_mib: of the source and the result; one is in memory.
        device: of the computation.
        folder: where to work; default the system's for such.
        limit_gib: of the peak of memory.
        json: also write the row to this file.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
    )
    work = Path(tempfile.mkdtemp(prefix="mha2mla-scale-", dir=folder))
    try:
        needed = 2 * layers * (hidden * (5 * hidden + 3 * intermediate))
        needed = 2.5 * (needed + 4 * vocabulary * hidden)  # source, result, and layers under way
        free = shutil.disk_usage(work).free
        if free < needed:
            sys.exit(f"{work} has {free / 1e9:.0f} GB free; expected {needed / 1e9:.0f} GB")
        started = time.perf_counter()
        size = build_source(work / "source", config, shard_mib << 20)
        built, peak = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"source: {size / 1e9:.1f} GB, written in {built:.0f} s, peak {peak / 2**20:.2f} GiB", flush=True)
        asked, calibration = _recipe_and_tokens(preset, json_format.loads(recipe), windows, length, steps, config)
        before = resource.getrusage(resource.RUSAGE_SELF)
        report = mha2mla.convert(
            work / "source",
            work / "converted",
            asked,
            calibration=calibration,
            evaluation=_random_tokens(vocabulary, windows, length, seed=2),
            device=device,
            max_shard_bytes=shard_mib << 20,
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    table = Recording("conversion-scale", json, recipe=report.recipe)
    row = _row(report, size, before)
    row["status"] = "ok" if row["peak_rss_gib"] <= limit_gib else f"wrong: more than {limit_gib} GiB of memory"
    table.add(row)
    return row["status"] == "ok"


def _row(report: mha2mla.ConversionReport, size: int, before: resource.struct_rusage) -> dict[str, Any]:
    """Cost of a conversion of a source of ``size`` bytes, since ``before``."""
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), [row["seconds"] for row in report.layers]
    return {
        "layers": len(seconds),
        "geometry": str(report.geometry),
        "source_gb": size / 1e9,
        "seconds_per_layer": sum(seconds) / len(seconds),
        "seconds_convert": report.seconds["convert"],
        "seconds_write": report.seconds["write"],
        "seconds_verify": report.seconds["verify"],
        "seconds_total": report.seconds["total"],
        # Sum over threads: the wall time on one core without other load.
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "seconds_of_32_layers": 32 / len(seconds) * report.seconds["total"],
        "peak_rss_gib": report.peak_rss_bytes / 2**30,
        "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_initialized() else None,
        "hidden_error": report.layers[-1]["hidden_error"],
    }


if __name__ == "__main__":
    sys.exit(command(convert_scale, cpu=True))
