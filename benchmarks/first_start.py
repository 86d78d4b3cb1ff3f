"""Time to the first tokens of ``generate`` with an empty kernel cache: kernels compiled in parallel, or one by one.

    python benchmarks/first_start.py measure --json benchmarks/results/h100-first-start.json

Each row is a process of its own, of random weights of Llama-3-8B's layer shapes, two layers, latent 1024 + 64, and a
cache folder of its own. "parallel" compiles ahead by all cores, "2 cores" by two of them, "serial" leaves each kernel
to its first launch, and "filled" starts over the first row's cache. PREDICTED is for 16 cores. Seconds count from the
call of ``generate``, whose first token needs a prompt's kernels and the second those of decode, which are compiled
meanwhile; ``process_s`` from the start of Python, imports and weights included. All rows must give the same tokens, and
only "serial" may compile a kernel in its own process. The last two run side by side.
"""

from __future__ import annotations

import json as json_module
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import StoppingCriteria, StoppingCriteriaList

from benchmarks.recording import Recording, asks_for_cpu, command

TOKENS = 8
ROWS = {"parallel": None, "filled": None, "2 cores": 2, "serial": None}  # name -> cores, None: all
PREDICTED = {"parallel": 18.0, "filled": 3.5, "2 cores": 30.0, "serial": 35.0}  # s to the first token


@dataclass
class Clock(StoppingCriteria):
    """Seconds from its making to each token."""

    began: float = field(default_factory=time.perf_counter)
    seconds: list[float] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        input_ids[0, -1].item()  # waits for the device
        self.seconds.append(time.perf_counter() - self.began)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def start(folder: str, shape: str = "llama-3-8b", device: str = "cuda", cores: int | None = None) -> None:
    """One process: prints its row as JSON."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    from mha2mla.trial_models import converted_config, random_model, source_config

    torch.manual_seed(0)
    source = source_config(shape, num_hidden_layers=2, eos_token_id=None, pad_token_id=0)
    widths = {"kv_lora_rank": 1024, "qk_rope_head_dim": 64} if shape != "tiny" else {"cache_ratio": 0.5}
    model = random_model(converted_config(source, layout="latent", **widths), device, torch.bfloat16)
    prompt = torch.arange(3, 3 + 200, device=device)[None]
    compiled: list[str] = []  # in this process
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())
    logging.getLogger("tilelang").addHandler(handler)
    clock = Clock()
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), stopping_criteria=StoppingCriteriaList([clock]), **options
    )
    found = {"first_s": clock.seconds[0], "second_s": clock.seconds[1], "last_s": clock.seconds[-1]}
    found |= {"compiled_alone": sum("begins to compile" in message for message in compiled)}
    found |= {"kernels": len(list(Path(folder).glob("*/*/kernels/*"))), "tokens": out[0, prompt.shape[1] :].tolist()}
    print(json_module.dumps(found))


def begin(name: str, folder: str, shape: str, device: str) -> tuple[subprocess.Popen, float]:
    env = {**os.environ, "TILELANG_CACHE_DIR": folder}
    env |= {"MHA2MLA_COMPILE_PROCESSES": "0"} if name == "serial" else {}
    words = [sys.executable, __file__, "start", folder, "--shape", shape, "--device", device]
    words += [] if ROWS[name] is None else ["--cores", str(ROWS[name])]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True), time.perf_counter()


def end(name: str, process: subprocess.Popen, began: float) -> dict[str, Any]:
    output, _ = process.communicate()
    row = {"case": name, "cores": ROWS[name] or len(os.sched_getaffinity(0)), "predicted_s": PREDICTED[name]}
    if process.returncode:
        return row | {"status": f"failed: exit code {process.returncode}"}
    return row | json_module.loads(output.splitlines()[-1]) | {"process_s": time.perf_counter() - began}


def measure(shape: str = "llama-3-8b", device: str = "cuda", json: str | None = None) -> bool:
    """Starts the processes and prints their table.

    Args:
        shape: of the source; "tiny" tries the script out.
        device: of the model; a CPU compiles nothing.
        json: also write every row to this file.
    """
    table = Recording("first-start", json)
    expected = None
    with tempfile.TemporaryDirectory() as root:
        folders = {name: str(Path(root, "parallel" if name == "filled" else name)) for name in ROWS}
        for names in (["parallel"], ["filled"], ["2 cores", "serial"]):
            begun = {name: begin(name, folders[name], shape, device) for name in names}
            for name, (process, at) in begun.items():
                row = end(name, process, at)
                expected = expected or row.get("tokens")
                if "status" in row:
                    pass  # it failed
                elif row["tokens"] != expected:
                    row["status"] = "wrong: other tokens than the first row's"
                elif name != "serial" and row["compiled_alone"]:
                    row["status"] = f"wrong: {row['compiled_alone']} kernels were not compiled ahead"
                row.setdefault("status", "ok")
                table.add(row)
    return table.show("time to tokens of generate, empty kernel cache")


if __name__ == "__main__":
    sys.exit(command(measure, start, cpu=asks_for_cpu()))
