"""Decode steps in vLLM of a source's shape and of converted ones, for more and more sequences until the cache is full.

Weights are random (``load_format=dummy``), and so is what the cache holds: vLLM's ``DecodeBenchConnector`` fills the
pages of every prompt but its last token, so that no time goes into prompts and a step is one in which all decode.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter
from transformers import LlamaConfig

from benchmarks.recording import Recording
from benchmarks.vllm_engine import EngineSettings, engine, prompts_of, random_config, with_entry_point

WARM_UP = 8  # steps before the clock runs


@dataclass(frozen=True, kw_only=True)
class SpeedSettings(EngineSettings):
    """Shape and steps.

    Args:
        shape: of the source.
        layout: of the conversion; source for the source's shape.
        layers: default the shape's.
        contexts: cached tokens of a sequence.
        batches: numbers of sequences, beside as many as the cache holds.
        steps: that are timed.
        patience: seconds until all sequences decode.
        most: sequences at a time, however many the cache holds.
        compile: vLLM's default; without, decode graphs of its layers as they are.
        profile: print the kernels of a step.
    """

    shape: Literal["smollm2", "llama-2-7b", "llama-3-8b"] = "llama-2-7b"
    layout: str = "latent"
    layers: int | None = None
    contexts: list[int] = field(default_factory=lambda: [8192])
    batches: list[int] = field(default_factory=lambda: [1, 8])
    steps: int = 64
    patience: float = 60.0
    most: int = 256
    compile: bool = False
    profile: bool = False


def speed(arguments: Annotated[SpeedSettings, Parameter(name="*")] = SpeedSettings()) -> bool:
    """Decode steps of every context, at each number of sequences that is asked for and at as many as the cache
    holds."""
    with_entry_point()
    table = Recording("vllm-speed", arguments.json)
    folder, room = tempfile.mkdtemp(), WARM_UP + arguments.steps + 8
    positions = max(arguments.contexts) + room
    layout = "latent" if arguments.layout == "source" else arguments.layout
    config = random_config(arguments.shape, layout, arguments.layers, positions)
    if arguments.layout == "source":
        config = LlamaConfig(**{key: value for key, value in config.source_config.items() if key != "model_type"})
        config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    options: dict[str, Any] = {
        **arguments.options(),
        "max_model_len": positions,
        "max_num_seqs": max(arguments.batches + [arguments.most]),
        "kv_transfer_config": {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.5},
        },
    }
    compilation: dict[str, Any] = {} if arguments.compile else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    begin = time.time()
    llm = engine(folder, compilation=compilation, load_format="dummy", **options)
    cache = llm.llm_engine.vllm_config.cache_config
    common = {
        "shape": arguments.shape, "layers": config.num_hidden_layers, "layout": arguments.layout,
        "compiled": arguments.compile, "start_s": time.time() - begin,
        "cached tokens": cache.num_gpu_blocks * cache.block_size,
    }  # fmt: skip
    for context in arguments.contexts:
        fit = cache.num_gpu_blocks // -(-(context + room) // cache.block_size)
        held = min(fit, arguments.most)
        for batch in sorted({batch for batch in arguments.batches if batch < held} | {held}):
            rate = _decode_rate(llm, config.vocab_size, context, batch, arguments)
            table.add({**common, "context": context, "fit": fit, "sequences": batch, **rate})
    return table.show(f"vLLM {table.environment['vllm']}, speed")


def _decode_rate(llm: Any, vocabulary: int, context: int, batch: int, arguments: SpeedSettings) -> dict[str, Any]:
    """Milliseconds of a step in which ``batch`` sequences of ``context`` tokens decode, and tokens a second."""
    from vllm import SamplingParams

    own, total = llm.llm_engine, WARM_UP + arguments.steps
    parameters = SamplingParams(temperature=0, max_tokens=total + 8, ignore_eos=True, detokenize=False)
    names = [f"{context}-{batch}-{index}" for index in range(batch)]
    for name, prompt in zip(names, prompts_of(vocabulary, [context] * batch, seed=context + batch), strict=True):
        own.add_request(name, {"prompt_token_ids": prompt}, parameters)
    begin, started = time.time(), set()
    while len(started) < batch:
        started |= {output.request_id for output in own.step()}
        if time.time() - begin > arguments.patience:
            own.abort_request(names)
            return {"status": f"only {len(started)} had decoded after {arguments.patience} s"}
    filled = time.time() - begin
    for _ in range(WARM_UP):
        own.step()
    begin, made = time.time(), 0
    for _ in range(arguments.steps):
        made += len(own.step())
    took = time.time() - begin
    if arguments.profile:
        _profile(own)
    own.abort_request(names)
    while own.has_unfinished_requests():
        own.step()
    return {"fill_s": filled, "step_ms": 1e3 * took / arguments.steps, "tokens_s": made / took,
            "status": "ok" if made == batch * arguments.steps else f"{made} tokens"}  # fmt: skip


def _profile(own: Any, steps: int = 4) -> None:
    """Prints which kernels a step spends its time in, and how much of it none runs."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        begin = time.time()
        for _ in range(steps):
            own.step()
        torch.cuda.synchronize()
        took = time.time() - begin
    kernels = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    busy = sum(one.self_device_time_total for one in kernels)
    print(f"a step: {1e3 * took / steps:.2f} ms, kernels {busy / 1e3 / steps:.2f} ms", file=sys.stderr)
    for one in kernels[:24]:
        share = one.self_device_time_total / steps
        print(f"{share:9.0f} us {one.count / steps:6.0f} x  {one.key[:90]}", file=sys.stderr)
