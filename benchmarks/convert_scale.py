"""Memory and time of converting a checkpoint of a large model's shape, whose weights are random.

    python benchmarks/convert_scale.py --layers 2                # a taste; the time of 32 layers is extrapolated
    python benchmarks/convert_scale.py --layers 32 --json scale.json
    python benchmarks/convert_scale.py --layers 32 --device cuda --steps 150
    python benchmarks/convert_scale.py --layers 3 --kv-heads 8 --intermediate 14336 --vocabulary 128256 \
        --context 8192 --preset shared --device cuda --limit-gib 70        # Llama-3-8B's shape, all of the preset

The source is written shard by shard (13.5 GB for 32 layers of the default, Llama-2-7B's shape, in bfloat16), converted
with calibration windows of random tokens, verified as always, and removed. The peak is of this process's resident
memory, which besides its own pages counts the source's mapped ones.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mha2mla
from mha2mla.conversion.calibration.blocks import default_lengths
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.report import print_table, write_json


def build_source(folder: Path, config: LlamaConfig, *, layers_per_shard: int = 3, seed: int = 0) -> int:
    """Writes a random bfloat16 checkpoint, one shard in memory at a time; returns its bytes."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        made = torch.empty(rows, columns, dtype=torch.bfloat16)
        for part in made.split(max(1, (1 << 24) // columns)):
            part.copy_(torch.randn(part.shape, generator=generator) * columns**-0.5)
        return made

    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    weight_map: dict[str, str] = {}
    total = 0

    def write(tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    write(
        {
            # Embeddings of unit size: what a layer adds is then of the size of what it is added to.
            "model.embed_tokens.weight": weight(config.vocab_size, hidden) * hidden**0.5,
            "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            "lm_head.weight": weight(config.vocab_size, hidden),
        }
    )
    for first in range(0, config.num_hidden_layers, layers_per_shard):
        tensors = {}
        for layer in range(first, min(first + layers_per_shard, config.num_hidden_layers)):
            prefix = f"model.layers.{layer}."
            tensors |= {
                f"{prefix}self_attn.q_proj.weight": weight(heads, hidden),
                f"{prefix}self_attn.k_proj.weight": weight(kv_heads, hidden),
                f"{prefix}self_attn.v_proj.weight": weight(kv_heads, hidden),
                f"{prefix}self_attn.o_proj.weight": weight(hidden, heads),
                f"{prefix}mlp.gate_proj.weight": weight(inner, hidden),
                f"{prefix}mlp.up_proj.weight": weight(inner, hidden),
                f"{prefix}mlp.down_proj.weight": weight(hidden, inner),
                f"{prefix}input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
                f"{prefix}post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            }
        write(tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return total


def _random_tokens(vocabulary: int, windows: int, length: int, *, seed: int) -> torch.Tensor:
    return torch.randint(vocabulary, (windows, length), generator=torch.Generator().manual_seed(seed))


def _recipe_and_tokens(arguments: argparse.Namespace, config: LlamaConfig) -> tuple[mha2mla.Recipe, list[torch.Tensor]]:
    """What is converted by, and random windows of every length that it calibrates on."""
    lengths, tokens = (arguments.length,), arguments.windows * arguments.length
    keys = {"calibration.tokens": tokens, "calibration.lengths": arguments.length}
    keys = {"preset": "minimal", **keys, "fit.steps": arguments.steps} | json.loads(arguments.recipe)
    if arguments.preset is not None:
        keys = {"preset": arguments.preset, "cache_ratio": 0.5} | json.loads(arguments.recipe)
    recipe = mha2mla.Recipe.from_dict(keys)
    if arguments.preset is not None:
        lengths, tokens = default_lengths(config.max_position_embeddings), recipe.calibration.tokens
    blocks = max(1, tokens // len(lengths) // max(lengths))
    return recipe, [
        _random_tokens(config.vocab_size, blocks * max(lengths) // length, length, seed=1) for length in lengths
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--windows", type=int, default=4, help="of calibration and of evaluation")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096, help="tokens that the model takes")
    parser.add_argument("--preset", default=None, help="all of it, with its own number of tokens at its own lengths")
    parser.add_argument("--recipe", default="{}", help="recipe keys as JSON")
    parser.add_argument("--steps", type=int, default=0, help="of reconstruction")
    parser.add_argument("--shard-mib", type=int, default=1024, help="of the result; one is in memory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default the system's for such")
    parser.add_argument("--limit-gib", type=float, default=16.0, help="exit code 1 when the peak is above")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.context,
    )
    folder = Path(tempfile.mkdtemp(prefix="mha2mla-scale-", dir=arguments.folder))
    try:
        needed = 2 * arguments.layers * (arguments.hidden * (5 * arguments.hidden + 3 * arguments.intermediate))
        needed = 2.5 * (needed + 4 * arguments.vocabulary * arguments.hidden)  # source, result, and layers under way
        free = shutil.disk_usage(folder).free
        if free < needed:
            sys.exit(f"{folder} has {free / 1e9:.0f} GB free; expected {needed / 1e9:.0f} GB")
        started = time.perf_counter()
        size = build_source(folder / "source", config)
        built, peak = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"source: {size / 1e9:.1f} GB, written in {built:.0f} s, peak {peak / 2**20:.2f} GiB", flush=True)
        recipe, calibration = _recipe_and_tokens(arguments, config)
        before = resource.getrusage(resource.RUSAGE_SELF)
        report = mha2mla.convert(
            folder / "source",
            folder / "converted",
            recipe,
            calibration=calibration,
            evaluation=_random_tokens(arguments.vocabulary, arguments.windows, arguments.length, seed=2),
            device=arguments.device,
            max_shard_bytes=arguments.shard_mib << 20,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row = _row(report, size, before)
    environment = collect_environment()
    what = [{"what": key.replace("_", " "), "value": value} for key, value in row.items()]
    caption = describe_environment(environment)
    print_table(what, title=f"converted on {report.device}", columns={"what": "", "value": ""}, caption=caption)
    if arguments.json is not None:
        write_json(arguments.json, kind="conversion-scale", rows=[row], environment=environment, recipe=report.recipe)
    if row["peak_rss_gib"] > arguments.limit_gib:
        sys.exit(f"peak memory {row['peak_rss_gib']:.2f} GiB is above {arguments.limit_gib} GiB")


def _row(report: mha2mla.ConversionReport, size: int, before: resource.struct_rusage) -> dict[str, Any]:
    """What a conversion of a source of ``size`` bytes took, since ``before``."""
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
        # Of all threads: what wall time would be on one core that nobody else uses.
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "seconds_of_32_layers": 32 / len(seconds) * report.seconds["total"],
        "peak_rss_gib": report.peak_rss_bytes / 2**30,
        "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_initialized() else None,
        "hidden_error": report.layers[-1]["hidden_error"],
    }


if __name__ == "__main__":
    main()
