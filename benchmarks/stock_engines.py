"""Exports in programs without this package: is every greedy token the converted model's own.

    python benchmarks/stock_engines.py vllm path/to/llama-mla --json h200-stock-vllm.json
    python benchmarks/stock_engines.py transformers path/to/llama-mla --json cpu-stock-transformers.json
    python benchmarks/stock_engines.py vllm random:mistral
    python benchmarks/stock_engines.py sglang random:mistral --python path/to/sglang/bin/python

Exports the checkpoint, has 64 prompts answered, and judges every token by the converted model's logits over the same
prefix, as ``vllm_serving.py exact`` does (docs/serving.md); tokens of vLLM and SGLang with an MLA engine's roundings
(``stock_reference.py``) beside the model's own. ``vllm`` and ``sglang`` need a GPU; ``transformers`` runs the folder
for transformers, and the one for engines at their eps, in another process on a CPU. ``random:llama`` and
``random:mistral`` are small models of random weights, converted here and kept in float32: an export scales queries, and
in bfloat16 its weights would be rounded a second time.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from cyclopts import Parameter
from torch import Tensor
from transformers import AutoModelForCausalLM

import mha2mla
from benchmarks.recording import Recording, command
from benchmarks.stock_reference import StockModel
from benchmarks.vllm_engine import EngineSettings, engine, greedy, prompts_of
from benchmarks.vllm_serving import judge
from mha2mla.modeling import MHA2MLAConfig
from mha2mla.serving.export import export
from mha2mla.trial_models import tiny_checkpoint

PROMPTS = 64
GROUPS = 8  # prompts of one length are a batch without padding
# What a family's config.json has beside a Llama's, of these sizes.
SIZES = {"num_attention_heads": 8, "head_dim": 128, "hidden_size": 512, "max_position_embeddings": 2048}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}  # fmt: skip
RECIPE = {
    "preset": "minimal", "layout": "shared", "kv_lora_rank": 256, "qk_rope_head_dim": 64,
    "rope.selection": "rorope-2", "latent.centered": False, "latent.ranks": "uniform", "calibration.tokens": 2048,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StockSettings(EngineSettings):
    """Requests to an unpatched vLLM.

    Args:
        tokens: of an answer.
        eager: without compilation and CUDA graphs.
    """

    tokens: int = 128
    eager: bool = False


@dataclass(frozen=True, kw_only=True)
class SGLangSettings:
    """Requests to SGLang, which pins a transformers of its own.

    Args:
        tokens: of an answer.
        memory: share of the GPU's, weights included.
        eager: without CUDA graphs.
        backend: of attention; default SGLang's choice.
        python: an interpreter that has SGLang.
        json: also write every row to this file.
    """

    tokens: int = 128
    memory: float = 0.3
    eager: bool = False
    backend: str | None = None
    python: str = sys.executable
    json: str | None = None


@dataclass(frozen=True, kw_only=True)
class TransformersSettings:
    """Requests to transformers' classes.

    Args:
        tokens: of an answer.
        longest: tokens of a prompt at most.
        json: also write every row to this file.
    """

    tokens: int = 32
    longest: int = 256
    json: str | None = None


def converted(name: str, work: str) -> str:
    """``name``, or for ``random:llama`` and ``random:mistral`` the folder of a conversion in ``work``."""
    if not name.startswith("random:"):
        return name
    family = name.removeprefix("random:")
    if family not in FAMILIES:
        raise ValueError(f"checkpoint is {name!r}; expected a folder or random: and one of {sorted(FAMILIES)}")
    source = tiny_checkpoint(Path(work) / "source", **SIZES)
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | FAMILIES[family]))
    mha2mla.convert(source, Path(work) / family, RECIPE, evaluation_tokens=2048, progress=False)
    return str(Path(work) / family)


def vllm(checkpoint: str, /, *, arguments: Annotated[StockSettings, Parameter(name="*")] = StockSettings()) -> bool:
    """Every token of 64 prompts of 12 to 1,500 tokens by vLLM's DeepSeek classes and MLA backend, without the plug-in.

    Args:
        checkpoint: folder of a converted checkpoint, or ``random:llama`` or ``random:mistral``.
    """
    os.environ["VLLM_PLUGINS"] = ""  # vLLM loads none
    table = Recording("stock-vllm", arguments.json)
    with tempfile.TemporaryDirectory() as work:
        folder = converted(checkpoint, work)
        prompts = _prompts(folder)
        exported = export(folder, Path(work) / "stock", "deepseek-v3", "vllm")
        begin = time.time()
        answers = _vllm_answers(str(exported), prompts, arguments)
        _add(table, folder, exported, "cuda", prompts, {"vllm": answers}, time.time() - begin)
    return table.show(f"unpatched vLLM {table.environment['vllm']}, exact")


def sglang(checkpoint: str, /, *, arguments: Annotated[SGLangSettings, Parameter(name="*")] = SGLangSettings()) -> bool:
    """Every token of 64 prompts of 12 to 1,500 tokens by SGLang's DeepSeek classes and MLA backend.

    Args:
        checkpoint: folder of a converted checkpoint, or ``random:llama`` or ``random:mistral``.
    """
    table = Recording("stock-sglang", arguments.json)
    with tempfile.TemporaryDirectory() as work:
        folder, answers = converted(checkpoint, work), Path(work) / "answers.json"
        prompts = _prompts(folder)
        exported = export(folder, Path(work) / "stock", "deepseek-v3", "sglang")
        options = {
            "model_path": str(exported), "dtype": "bfloat16", "context_length": 2048, "random_seed": 0,
            "mem_fraction_static": arguments.memory, "disable_cuda_graph": arguments.eager,
            "attention_backend": arguments.backend,
        }  # fmt: skip
        settings = json.dumps({"new_tokens": arguments.tokens, "engine": options})
        script = Path(__file__).with_name("stock_sglang.py")
        begin = time.time()
        run = [arguments.python, str(script), settings, str(answers)]
        subprocess.run(run, input=json.dumps(prompts), text=True, check=True)
        found = json.loads(answers.read_text())
        name = f"sglang {found['sglang']}, {found['backend']}"
        _add(table, folder, exported, "cuda", prompts, {name: found["answers"]}, time.time() - begin)
    return table.show(f"SGLang {found['sglang']}, exact")


def transformers(
    checkpoint: str, /, *, arguments: Annotated[TransformersSettings, Parameter(name="*")] = TransformersSettings()
) -> bool:
    """Every token of 64 prompts by transformers' DeepSeek-V3 classes, of both exports.

    Args:
        checkpoint: folder of a converted checkpoint, or ``random:llama`` or ``random:mistral``.
    """
    table = Recording("stock-transformers", arguments.json)
    lengths = torch.linspace(12, arguments.longest, GROUPS).long().repeat_interleave(PROMPTS // GROUPS).tolist()
    engines = ("transformers", "vllm")
    with tempfile.TemporaryDirectory() as work:
        folder = converted(checkpoint, work)
        prompts = prompts_of(MHA2MLAConfig.from_pretrained(folder).vocab_size, lengths)
        exported = [str(export(folder, Path(work) / f"for-{name}", "deepseek-v3", name)) for name in engines]
        script = Path(__file__).with_name("stock_transformers.py")
        begin = time.time()
        done = subprocess.run(
            [sys.executable, "-I", str(script), str(arguments.tokens), *exported],
            input=json.dumps(prompts), stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        answers = dict(zip(engines, json.loads(done.stdout), strict=True))
        _add(table, folder, None, "cpu", prompts, answers, time.time() - begin)
    return table.show(f"transformers {table.environment['transformers']}, exact")


def _prompts(folder: str) -> list[list[int]]:
    lengths = torch.randint(12, 1500, (PROMPTS,), generator=torch.Generator().manual_seed(0)).tolist()
    return prompts_of(MHA2MLAConfig.from_pretrained(folder).vocab_size, lengths)


def _add(
    table: Recording, checkpoint: str, exported: Path | None, device: str, prompts: list[list[int]],
    answers: dict[str, list[list[int]]], seconds: float,
) -> None:  # fmt: skip
    """Judges answers by engine. ``exported``: the folder that an MLA engine read, by which it rounds; None where
    transformers' classes answered, which never decode in the latent's space. ``seconds`` for all."""
    models = [
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, device_map=device).eval()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    forms = [] if exported is None else _engine_forms(exported, models, prompts[0], device)
    for name, found in answers.items():
        judged = [judge(models, prompt, tokens, forms) for prompt, tokens in zip(prompts, found, strict=True)]
        table.add(
            {
                "checkpoint": Path(checkpoint).name, "engine": name, "sequences": len(judged),
                **{key: sum(each[key] for each in judged) for key in ("tokens", "equal", "beyond")},
                "worst": max(each["worst"] for each in judged), "seconds": seconds,
                "status": "ok" if all(each["worst"] <= 1 for each in judged) else "wrong",
            }
        )  # fmt: skip


@torch.no_grad()
def _engine_forms(
    exported: Path, models: Sequence[Any], prompt: list[int], device: str
) -> list[Callable[[Tensor, int], Tensor]]:
    """The export in bfloat16 as engines run it, prefill and decode; none where in float32 it errs by more than the
    model's own bfloat16: what is wrong itself must not widen the bound."""
    ids = torch.tensor([prompt], device=device)
    low, exact = (model(ids, use_cache=False).logits[0].float() for model in models)
    found = StockModel.load(exported, torch.float32, device).logits(ids, len(prompt), absorbed=True)[0]
    if (found - exact).norm() > (low - exact).norm():
        return []
    stock = StockModel.load(exported, torch.bfloat16, device)
    return [partial(stock.logits, absorbed=absorbed) for absorbed in (False, True)]


def _vllm_answers(folder: str, prompts: list[list[int]], arguments: StockSettings) -> list[list[int]]:
    options: dict[str, Any] = {**arguments.options(), "enforce_eager": arguments.eager, "max_model_len": 2048}
    llm = engine(folder, dtype="bfloat16", **options)
    found = [[*one.outputs[0].token_ids] for one in greedy(llm, prompts, arguments.tokens)]
    del llm
    gc.collect()
    return found


if __name__ == "__main__":
    sys.exit(command(vllm, sglang, transformers, cpu=True))
