"""Exports in programs without this package: is every greedy token the converted model's own.

    python benchmarks/stock_engines.py vllm path/to/llama-mla --json h200-stock-vllm.json
    python benchmarks/stock_engines.py transformers path/to/llama-mla --json cpu-stock-transformers.json

Exports the checkpoint, has 64 prompts answered, and judges every token by the converted model's logits over the same
prefix, as ``vllm_serving.py exact`` does (docs/serving.md). ``vllm`` needs a GPU; ``transformers`` runs the folder for
transformers, and the one for engines at their eps, in another process on a CPU.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from cyclopts import Parameter
from transformers import AutoModelForCausalLM

from benchmarks.recording import Recording, command
from benchmarks.vllm_engine import EngineSettings, engine, greedy, prompts_of
from benchmarks.vllm_serving import judge
from mha2mla.modeling import MHA2MLAConfig
from mha2mla.serving.export import export

PROMPTS = 64
GROUPS = 8  # prompts of one length are a batch without padding


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


def vllm(checkpoint: str, /, *, arguments: Annotated[StockSettings, Parameter(name="*")] = StockSettings()) -> bool:
    """Every token of 64 prompts of 12 to 1,500 tokens by vLLM's DeepSeek classes and MLA backend, without the plug-in.

    Args:
        checkpoint: folder of a converted checkpoint.
    """
    os.environ["VLLM_PLUGINS"] = ""  # vLLM loads none
    table = Recording("stock-vllm", arguments.json)
    lengths = torch.randint(12, 1500, (PROMPTS,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = prompts_of(MHA2MLAConfig.from_pretrained(checkpoint).vocab_size, lengths)
    with tempfile.TemporaryDirectory() as work:
        folder = export(checkpoint, Path(work) / "stock", "deepseek-v3", "vllm")
        begin = time.time()
        answers = _vllm_answers(str(folder), prompts, arguments)
    _add(table, checkpoint, "cuda", prompts, {"vllm": answers}, time.time() - begin)
    return table.show(f"unpatched vLLM {table.environment['vllm']}, exact")


def transformers(
    checkpoint: str, /, *, arguments: Annotated[TransformersSettings, Parameter(name="*")] = TransformersSettings()
) -> bool:
    """Every token of 64 prompts by transformers' DeepSeek-V3 classes, of both exports.

    Args:
        checkpoint: folder of a converted checkpoint.
    """
    table = Recording("stock-transformers", arguments.json)
    lengths = torch.linspace(12, arguments.longest, GROUPS).long().repeat_interleave(PROMPTS // GROUPS).tolist()
    prompts = prompts_of(MHA2MLAConfig.from_pretrained(checkpoint).vocab_size, lengths)
    engines = ("transformers", "vllm")
    with tempfile.TemporaryDirectory() as work:
        folders = [str(export(checkpoint, Path(work) / name, "deepseek-v3", name)) for name in engines]
        script = Path(__file__).with_name("stock_transformers.py")
        begin = time.time()
        done = subprocess.run(
            [sys.executable, "-I", str(script), str(arguments.tokens), *folders],
            input=json.dumps(prompts), stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    answers = dict(zip(engines, json.loads(done.stdout), strict=True))
    _add(table, checkpoint, "cpu", prompts, answers, time.time() - begin)
    return table.show(f"transformers {table.environment['transformers']}, exact")


def _add(
    table: Recording, checkpoint: str, device: str, prompts: list[list[int]], answers: dict[str, list[list[int]]],
    seconds: float,
) -> None:  # fmt: skip
    """Judges answers by exported engine; ``seconds`` for all."""
    models = [
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, device_map=device).eval()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    for name, found in answers.items():
        judged = [judge(models, prompt, tokens) for prompt, tokens in zip(prompts, found, strict=True)]
        table.add(
            {
                "checkpoint": Path(checkpoint).name, "engine": name, "sequences": len(judged),
                **{key: sum(each[key] for each in judged) for key in ("tokens", "equal", "beyond")},
                "worst": max(each["worst"] for each in judged), "seconds": seconds,
                "status": "ok" if all(each["worst"] <= 1 for each in judged) else "wrong",
            }
        )  # fmt: skip


def _vllm_answers(folder: str, prompts: list[list[int]], arguments: StockSettings) -> list[list[int]]:
    options: dict[str, Any] = {**arguments.options(), "enforce_eager": arguments.eager, "max_model_len": 2048}
    llm = engine(folder, dtype="bfloat16", **options)
    found = [[*one.outputs[0].token_ids] for one in greedy(llm, prompts, arguments.tokens)]
    del llm
    gc.collect()
    return found


if __name__ == "__main__":
    sys.exit(command(vllm, transformers, cpu=True))
