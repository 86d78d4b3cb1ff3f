"""vLLM's engine over converted checkpoints, made ones too, with the plug-in's entry point made for the process."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from mha2mla.modeling import MHA2MLAConfig, MHA2MLAForCausalLM
from mha2mla.trial_models import ShapeName, converted_config, source_config

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, ShapeName] = {"smollm2": "smollm2-135m", "llama-2-7b": "llama-2-7b", "llama-3-8b": "llama-3-8b"}
# Recipe keys by layout's name here; others are the recipes', at half of the cache.
TARGETS = {
    ("smollm2", "by-layer"): {"layout": "latent", "cache_ratio": 0.5},
    ("llama-2-7b", "latent"): {"layout": "latent", "cache_ratio": 0.125},
    ("llama-2-7b", "shared"): {"layout": "shared", "kv_lora_rank": 960, "qk_rope_head_dim": 64},
    ("llama-2-7b", "narrow"): {"layout": "latent", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    ("llama-2-7b", "narrow-per-group"): {"layout": "per-group", "kv_lora_rank": 512, "qk_rope_head_dim": 16},
}
# Other families' layers, small, in whatever widths half of their cache gives; every part of them that a Llama has not.
FAMILIES = {
    "qwen2": {"hidden_size": 896, "intermediate_size": 2432, "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 768, "intermediate_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 2,
              "head_dim": 128},
    "qwen3_moe": {"hidden_size": 768, "intermediate_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 2,
                  "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    "mixtral": {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
                "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmo2": {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8},
    "gemma3_text": {"hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1,
                    "head_dim": 256, "sliding_window": 512},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of vLLM's engine.

    Args:
        memory: share of the GPU's.
        cache_gb: GiB of the cache; default what ``memory`` leaves.
        graphs: batches of CUDA graphs; default vLLM's.
        json: also write every row to this file.
    """

    memory: float = 0.3
    cache_gb: float | None = None
    graphs: list[int] | None = None
    json: str | None = None

    def options(self) -> dict[str, Any]:
        """Arguments of :func:`engine`."""
        cache = {} if self.cache_gb is None else {"kv_cache_memory_bytes": int(self.cache_gb * 2**30)}
        return {"gpu_memory_utilization": self.memory, "graphs": self.graphs, **cache}


def random_config(shape: str, layout: str, layers: int | None = None, positions: int = 8192) -> MHA2MLAConfig:
    """Config of a conversion of one of :data:`SHAPES`, or of a small model of one of :data:`FAMILIES`; ``layout`` may
    be "codes3", "codes4" or "codes8", latent in so many bits; with "-kept" rotary keys are kept if "auto" does, behind
    "latent" also with "-bfloat16", "-int8" and "-none"."""
    bits, keys_kept = 16, ""
    if layout.startswith(("codes", "latent")):
        layout, _, keys_kept = layout.partition("-")
    if layout.startswith("codes"):
        bits, layout = int(layout[5]), "latent"
    keys: dict[str, Any] = {} if layers is None else {"num_hidden_layers": layers}
    keys |= {"max_position_embeddings": positions, "eos_token_id": None, "pad_token_id": 0, "dtype": "bfloat16"}
    if shape in FAMILIES:
        source = AutoConfig.for_model(shape, **FAMILIES[shape], **keys, vocab_size=32000, bos_token_id=None)
    else:
        source = source_config(SHAPES[shape], **keys, tie_word_embeddings=False)
    config = converted_config(source, **TARGETS.get((shape, layout), {"layout": layout, "cache_ratio": 0.5}))
    if bits < 16:
        config.latent_bits = bits
    if bits < 16 or keys_kept:
        config.rotary_key_cache = {"": "none", "kept": "auto"}.get(keys_kept, keys_kept)
    if layout == "by-layer":
        config.kv_lora_rank = [192 if index % 2 == 0 else 128 for index in range(config.num_hidden_layers)]
    config.architectures, config.dtype = ["MHA2MLAForCausalLM"], torch.bfloat16
    return config


def with_entry_point() -> None:
    """Makes the plug-in's entry point where the package lies on the path and is not installed, for all processes."""
    from importlib.metadata import entry_points

    if any(point.name == "mha2mla" for point in entry_points(group="vllm.general_plugins")):
        return
    # Another name than the package's: of two distributions of one name the first is read, and it may be an older one.
    folder = Path(tempfile.mkdtemp()) / "mha2mla_entry_point-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mha2mla-entry-point\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\nmha2mla = mha2mla.serving.plugin:register\n")
    sys.path.append(str(folder.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", ""), str(folder.parent)])


def checkpoint(name: str, layers: int) -> str:
    """``name``, or a folder with random weights for ``random:LAYOUT`` or ``random:SHAPE:LAYOUT``, where SHAPE is one of
    :data:`SHAPES` or of :data:`FAMILIES`."""
    if not name.startswith("random:"):
        return name
    *shape, layout = name.removeprefix("random:").split(":")
    config = random_config(*(shape or ["smollm2"]), layout, layers)
    config.initializer_range = 1.5 * config.hidden_size**-0.5  # so that attention is far from uniform
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    MHA2MLAForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompts_of(vocabulary: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def engine(
    folder: str, graphs: Sequence[int] | None = None, compilation: dict[str, Any] | None = None, **options: Any
) -> Any:
    # A forked process of the engine would hang in torch's CPU threads, which this one has used already.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # held_cache sends a function
    from vllm import LLM

    options["compilation_config"] = {**(compilation or {}), **({"cudagraph_capture_sizes": graphs} if graphs else {})}
    return LLM(folder, skip_tokenizer_init=True, seed=0, **options)


def held_cache(llm: Any, config: Any) -> dict[str, Any]:
    """Dtypes of the cache that vLLM allocated on a GPU, and its bytes a token."""
    (found,) = llm.collective_rpc(_caches)[:1]
    cache = llm.llm_engine.vllm_config.cache_config
    held = sum(size for _, size in found) / (cache.num_gpu_blocks * cache.block_size)
    expected = config.cache_bytes_per_token(2) if isinstance(config, MHA2MLAConfig) else held
    print(f"cache: {len(found)} layers, {held:.1f} bytes a token; the config's caches take {expected}", flush=True)
    return {"cache": " ".join(sorted({dtype for dtype, _ in found})), "bytes_a_token": held}


def _caches(worker: Any) -> list[tuple[str, int]]:
    """In a process of the engine: dtype and bytes of each layer's cache."""
    caches = [
        getattr(layer, "kv_cache", None)
        for layer in worker.vllm_config.compilation_config.static_forward_context.values()
    ]
    flat = [each[0] if isinstance(each, list | tuple) else each for each in caches if each is not None]
    return [(str(each.dtype).removeprefix("torch."), each.numel() * each.itemsize) for each in flat]


def greedy(llm: Any, prompts: Sequence[list[int]], new_tokens: int) -> list[Any]:
    """vLLM's own answers, which say how many tokens of each prompt were cached already."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
