"""An export for vLLM in vLLM without the plug-in: is every greedy token the converted model's own.

    python benchmarks/stock_vllm.py path/to/llama-mla --json benchmarks/results/h200-stock-vllm.json

Exports the checkpoint with ``--engine vllm``, answers 64 prompts in vLLM's DeepSeek classes and MLA backend, and judges
every token by the converted model's logits over the same prefix, as ``vllm_serving.py exact`` does (docs/serving.md).
"""

from __future__ import annotations

import gc
import os
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
from benchmarks.vllm_exact import judge
from mha2mla.modeling import MHA2MLAConfig
from mha2mla.serving.export import export

PROMPTS = 64


@dataclass(frozen=True, kw_only=True)
class StockSettings(EngineSettings):
    """Requests to an unpatched vLLM.

    Args:
        tokens: of an answer.
        eager: without compilation and CUDA graphs.
    """

    tokens: int = 128
    eager: bool = False


def stock(
    checkpoints: list[str], /, *, arguments: Annotated[StockSettings, Parameter(name="*")] = StockSettings()
) -> bool:
    """Every token of 64 prompts of 12 to 1,500 tokens.

    Args:
        checkpoints: folders of converted checkpoints.
    """
    os.environ["VLLM_PLUGINS"] = ""  # vLLM loads none
    table = Recording("stock-vllm", arguments.json)
    lengths = torch.randint(12, 1500, (PROMPTS,), generator=torch.Generator().manual_seed(0)).tolist()
    for folder in checkpoints:
        config = MHA2MLAConfig.from_pretrained(folder)
        prompts = prompts_of(config.vocab_size, lengths)
        with tempfile.TemporaryDirectory() as work:
            stock_folder = export(folder, Path(work) / "stock", "deepseek-v3", "vllm")
            answers, seconds = _answers(str(stock_folder), prompts, arguments)
        models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cuda").eval()
            for dtype in (torch.bfloat16, torch.float32)
        ]
        judged = [judge(models, prompt, tokens) for prompt, tokens in zip(prompts, answers, strict=True)]
        table.add(
            {
                "checkpoint": Path(folder).name, "sequences": len(judged),
                "tokens": sum(each["tokens"] for each in judged), "equal": sum(each["equal"] for each in judged),
                "beyond": sum(each["beyond"] for each in judged), "worst": max(each["worst"] for each in judged),
                "seconds": seconds, "status": "ok" if all(each["worst"] <= 1 for each in judged) else "wrong",
            }
        )  # fmt: skip
        del models
    return table.show(f"unpatched vLLM {table.environment['vllm']}, exact")


def _answers(folder: str, prompts: list[list[int]], arguments: StockSettings) -> tuple[list[list[int]], float]:
    """Tokens of each answer, and the seconds that all took."""
    options: dict[str, Any] = {**arguments.options(), "enforce_eager": arguments.eager, "max_model_len": 2048}
    llm = engine(folder, dtype="bfloat16", **options)
    begin = time.time()
    found = [[*one.outputs[0].token_ids] for one in greedy(llm, prompts, arguments.tokens)]
    seconds = time.time() - begin
    del llm
    gc.collect()
    return found, seconds


if __name__ == "__main__":
    sys.exit(command(stock))
