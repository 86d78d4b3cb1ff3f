"""Converted checkpoints in vLLM: are its tokens the model's own, and how fast are they beside the source's.

    python benchmarks/vllm_serving.py exact path/to/llama-mla --json benchmarks/results/h200-vllm-exact.json
    python benchmarks/vllm_serving.py exact random:latent --eager
    python benchmarks/vllm_serving.py exact random:llama-3-8b:codes3 --layers 2 --eager
    python benchmarks/vllm_serving.py speed --shape llama-2-7b --memory 0.9 --contexts 8192
    python benchmarks/vllm_serving.py speed --shape llama-3-8b --layout codes3 --memory 0.9 --most 1024
    python benchmarks/vllm_serving.py requests source latent latent-bfloat16 shared --shape smollm2 --memory 0.5
    python benchmarks/vllm_serving.py prompts source latent --step-tokens 65536 --memory 0.5

``exact`` judges every greedy token of vLLM by transformers' logits over the same prefix: in float32 it may lie below
the best one by at most twice what transformers' own bfloat16 errs at that position, which is what decides ties.
``speed`` times steps in which all sequences decode, with random weights, up to as many as the cache holds;
``requests`` whole requests, all of them asked for at once; ``prompts`` says where the time of their prompts goes.
Needs vLLM (docs/serving.md); run from a clone, where the plug-in's entry point is made for the process.
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Recording, command
from benchmarks.vllm_engine import (
    EngineSettings,
    checkpoint,
    engine,
    greedy,
    held_cache,
    prompts_of,
    random_config,
    with_entry_point,
)
from mha2mla.modeling import MHA2MLAConfig

WARM_UP = 8  # steps before the clock runs
_SHOWN = 30  # kernels and functions in a row
ROOM = 64  # more tokens, which the first sequences make while the last ones' prompts are filled in
PROMPT_LENGTHS = (12, 40, 100, 333, 700, 1500)
# Counters of vLLM in a row, by its metrics' names: preempted pages, accepted drafts.
COUNTED = {
    "preempted": "vllm:num_preemptions",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def cancelled(llm: Any, prompts: Sequence[list[int]], new_tokens: int) -> dict[int, Any]:
    """Answers to all requests but every fifth, which is aborted on its way."""
    from vllm import SamplingParams

    own = llm.llm_engine
    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        own.add_request(str(index), {"prompt_token_ids": prompt}, parameters)
    finished, steps = {}, 0
    while own.has_unfinished_requests():
        for output in own.step():
            if output.finished:
                finished[int(output.request_id.split("-")[0])] = output
        steps += 1
        if steps == 7:
            own.abort_request([str(index) for index in range(0, len(prompts), 5)])
    return {index: output for index, output in finished.items() if len(output.outputs[0].token_ids) == new_tokens}


def counted(llm: Any) -> Counter[str]:
    """:data:`COUNTED` up to now, in this process."""
    names = {metric: key for key, metric in COUNTED.items()}
    found: Counter[str] = Counter()
    for metric in llm.get_metrics():
        if metric.name in names:
            found[names[metric.name]] += metric.value
    return found


@torch.no_grad()
def judge(
    models: Sequence[Any], prompt: list[int], tokens: list[int], forms: Sequence[Callable[[Tensor, int], Tensor]] = ()
) -> dict[str, Any]:
    """Tokens by the logits of the model in bfloat16 and in float32 over the same prefix.

    Args:
        forms: of the same model in bfloat16, with other roundings: ids [1, N] and n to the last n logits [1, n,
            vocabulary]. The largest error counts.

    Returns:
        ``equal``: how many are bfloat16's own choice; ``worst``: how far one lies below float32's best, over twice the
        largest error of bfloat16's logits there: at most 1 where only ties were decided otherwise; ``beyond``: how many
        lie farther. Where experts are chosen rounding may choose others, and then no such bound holds.
    """
    low, high = models
    ids = torch.tensor([prompt + tokens[:-1]], device=high.device)
    keep = len(tokens)
    mine, exact = (model(ids, use_cache=False, logits_to_keep=keep).logits[0].float() for model in (low, high))
    rounded = torch.stack([mine, *(form(ids, keep)[0].float() for form in forms)])
    error = (rounded - exact).abs().amax((0, -1))
    chosen = torch.tensor(tokens, device=exact.device)[:, None]
    below = exact.amax(-1) - exact.gather(1, chosen)[:, 0]
    share = below / (2 * error)
    return {
        "tokens": keep,
        "equal": int((mine.argmax(-1) == chosen[:, 0]).sum()),
        "beyond": int((share > 1).sum()),
        "worst": float(share.max()),
    }


@dataclass(frozen=True, kw_only=True)
class ExactSettings(EngineSettings):
    """Requests, and settings of vLLM that must not change a token.

    Args:
        tokens: of an answer.
        layers: of random models.
        requests: beside the batch, of which some are cancelled.
        eager: without compilation and CUDA graphs.
        no_prefix_caching: every prompt is computed.
        chunk: most tokens of a step.
        blocks: pages of the cache.
        draft: tokens that are drafted a step.
        drafter: a folder of a model with the same vocabulary; default the sequence's n-grams.
        tp: GPUs.
    """

    tokens: int = 128
    layers: int = 4
    requests: int = 0
    eager: bool = False
    no_prefix_caching: bool = False
    chunk: int | None = None
    blocks: int | None = None
    draft: int | None = None
    drafter: str | None = None
    tp: int = 1


def exact(
    checkpoints: list[str], /, *, arguments: Annotated[ExactSettings, Parameter(name="*")] = ExactSettings()
) -> bool:
    """Every token of a batch of prompts, of the same again, and of requests of which some are cancelled.

    Args:
        checkpoints: folders, or random:LAYOUT or random:SHAPE:LAYOUT.
    """
    with_entry_point()
    table = Recording("vllm-exact", arguments.json)
    for name in checkpoints:
        folder = checkpoint(name, arguments.layers)
        config = MHA2MLAConfig.from_pretrained(folder)
        begin = time.time()
        llm = engine(folder, **_options(arguments))
        print(f"{name}: engine up after {time.time() - begin:.1f} s", flush=True)
        held = held_cache(llm, config)
        prompts = prompts_of(config.vocab_size, PROMPT_LENGTHS)
        lengths = torch.randint(9, 400, (arguments.requests,), generator=torch.Generator().manual_seed(1)).tolist()
        found = {}
        for what, asked in (
            ("batch", prompts),
            ("again", prompts),
            ("requests", prompts_of(config.vocab_size, lengths, 2)),
        ):
            if not asked:
                continue
            before = counted(llm)
            if what == "requests":
                answers = cancelled(llm, asked, 32)
            else:
                answers = dict(enumerate(greedy(llm, asked, arguments.tokens)))
            found[what] = asked, answers, counted(llm) - before
            print(f"{name}: {what} generated after {time.time() - begin:.1f} s", flush=True)
        del llm
        gc.collect()
        models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cuda").eval()
            for dtype in (torch.bfloat16, torch.float32)
        ]
        for what, (asked, answers, counts) in found.items():
            judged = [judge(models, asked[index], [*one.outputs[0].token_ids]) for index, one in answers.items()]
            table.add(
                {
                    "checkpoint": Path(name).name, "layout": _layout(config), **held, "engine": _engine(arguments),
                    "what": what, "sequences": len(judged), "cancelled": len(asked) - len(judged),
                    "tokens": sum(each["tokens"] for each in judged), "equal": sum(each["equal"] for each in judged),
                    "beyond": sum(each["beyond"] for each in judged),
                    "worst": max((each["worst"] for each in judged), default=float("nan")),
                    "tokens_from_cache": sum(one.num_cached_tokens or 0 for one in answers.values()), **counts,
                    "status": "ok" if judged and all(each["worst"] <= 1 for each in judged) else "wrong",
                }
            )  # fmt: skip
        del models
    return table.show(f"vLLM {table.environment['vllm']}, exact")


def _options(arguments: ExactSettings) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    options: dict[str, Any] = {
        **arguments.options(),
        "enforce_eager": arguments.eager,
        "enable_prefix_caching": not arguments.no_prefix_caching,
        "tensor_parallel_size": arguments.tp,
        "disable_custom_all_reduce": True,  # NCCL alone: what others need of the machine is not what is judged
        "max_model_len": 2048,
        "disable_log_stats": False,
    }
    if arguments.draft:
        drafter = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
        if arguments.drafter:
            drafter = {"method": "draft_model", "model": arguments.drafter}
        options["speculative_config"] = {"num_speculative_tokens": arguments.draft, **drafter}
    if arguments.chunk:
        options["max_num_batched_tokens"] = arguments.chunk
    if arguments.blocks:
        options["num_gpu_blocks_override"] = arguments.blocks
    return options


def _engine(arguments: ExactSettings) -> str:
    """Settings that the engine ran with, in words."""
    said = {
        "eager" if arguments.eager else "compiled, CUDA graphs": True,
        "no prefix caching": arguments.no_prefix_caching,
        f"chunks of {arguments.chunk} tokens": arguments.chunk,
        f"{arguments.blocks} pages": arguments.blocks,
        f"drafts of {arguments.draft} tokens by {Path(arguments.drafter or 'n-grams').name}": arguments.draft,
        f"{arguments.tp} GPUs": arguments.tp > 1,
    }
    return ", ".join(words for words, true in said.items() if true)


def _layout(config: MHA2MLAConfig) -> str:
    if config.rope_from_latent:
        return "latent"
    return "shared" if config.num_rope_heads == 1 else "per-group"


@dataclass(frozen=True, kw_only=True)
class SpeedSettings(EngineSettings):
    """Shape and steps.

    Args:
        shape: of the source.
        layout: of the conversion, "codes4" and the like too; source for the source's shape, source-fp8 for its cache in
            8 bits.
        layers: default the shape's.
        contexts: cached tokens of a sequence.
        batches: numbers of sequences, beside as many as the cache holds.
        steps: that are timed.
        patience: seconds until all sequences decode.
        most: sequences at a time, however many the cache holds.
        compile: vLLM's default; without, decode graphs of its layers as they are.
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


def speed(arguments: Annotated[SpeedSettings, Parameter(name="*")] = SpeedSettings()) -> bool:
    """Decode steps of every context, at each number of sequences that is asked for and at as many as the cache
    holds."""
    with_entry_point()
    table = Recording("vllm-speed", arguments.json)
    room = WARM_UP + arguments.steps + ROOM
    positions = max(arguments.contexts) + room
    config, folder, cached = _weightless(arguments.shape, arguments.layout, arguments.layers, positions)
    options: dict[str, Any] = {
        **arguments.options(),
        "max_model_len": positions,
        "max_num_seqs": max(arguments.batches + [arguments.most]),
        "kv_transfer_config": {
            "kv_connector": "FillConnector",
            "kv_connector_module_path": "benchmarks.vllm_fill",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.5},
        },
    }
    compilation: dict[str, Any] = {} if arguments.compile else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    begin = time.time()
    llm = engine(folder, compilation=compilation, **cached, **options)
    cache = llm.llm_engine.vllm_config.cache_config
    common = {
        "shape": arguments.shape, "layers": config.num_hidden_layers, "layout": arguments.layout,
        "compiled": arguments.compile, "start_s": time.time() - begin,
        "cached tokens": cache.num_gpu_blocks * cache.block_size, **held_cache(llm, config),
    }  # fmt: skip
    for context in arguments.contexts:
        fit = cache.num_gpu_blocks // -(-(context + room) // cache.block_size)
        held = min(fit, arguments.most)
        for batch in sorted({batch for batch in arguments.batches if batch < held} | {held}):
            rate = _decode_rate(llm, config.vocab_size, context, batch, arguments)
            table.add({**common, "context": context, "fit": fit, "sequences": batch, **rate})
    return table.show(f"vLLM {table.environment['vllm']}, speed")


def _weightless(shape: str, layout: str, layers: int | None, positions: int) -> tuple[Any, str, dict[str, str]]:
    """Config of a shape in a layout, or of its source, a folder with it, and the options of an engine that draws the
    weights and caches as the layout says."""
    is_source = layout in ("source", "source-fp8")
    config = random_config(shape, "latent" if is_source else layout, layers, positions)
    if is_source:
        config = LlamaConfig(**{key: value for key, value in config.source_config.items() if key != "model_type"})
        config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    folder = tempfile.mkdtemp()
    config.save_pretrained(folder)
    return config, folder, {"load_format": "dummy", **({"kv_cache_dtype": "fp8"} if layout == "source-fp8" else {})}


@dataclass(frozen=True, kw_only=True)
class RequestSettings(EngineSettings):
    """Requests.

    Args:
        shape: of the source.
        layers: default the shape's.
        tokens_in: of a prompt. tokens_out: of an answer.
        sequences: requests, all at once.
        step_tokens: new tokens of a step, at most; default vLLM's.
        runs: the fastest counts, since another process only ever slows one down.
    """

    shape: Literal["smollm2", "llama-2-7b", "llama-3-8b"] = "smollm2"
    layers: int | None = None
    tokens_in: int = 7168
    tokens_out: int = 1024
    sequences: int = 64
    step_tokens: int | None = None
    runs: int = 2

    def engine_options(self, positions: int) -> dict[str, Any]:
        """Arguments of ``engine`` for sequences of so many tokens."""
        given = {} if self.step_tokens is None else {"max_num_batched_tokens": self.step_tokens}
        sizes = {"max_model_len": positions, "max_num_seqs": self.sequences, "enable_prefix_caching": False}
        return {**self.options(), **sizes, **given}


def requests(
    layouts: list[str], /, *, arguments: Annotated[RequestSettings, Parameter(name="*")] = RequestSettings()
) -> bool:
    """Whole requests with random weights, and their prompts alone, of each layout as ``speed`` names them; vLLM's
    default compilation and CUDA graphs."""
    with_entry_point()
    table = Recording("vllm-end-to-end", arguments.json)
    for layout in layouts:
        positions = arguments.tokens_in + arguments.tokens_out
        config, folder, cached = _weightless(arguments.shape, layout, arguments.layers, positions)
        begin = time.time()
        llm = engine(folder, **arguments.engine_options(positions), **cached)
        cache, scheduler = llm.llm_engine.vllm_config.cache_config, llm.llm_engine.vllm_config.scheduler_config
        row = {
            "shape": arguments.shape, "layers": config.num_hidden_layers, "layout": layout,
            "start_s": time.time() - begin, "tokens in": arguments.tokens_in, "tokens out": arguments.tokens_out,
            "sequences": arguments.sequences, "step tokens": scheduler.max_num_batched_tokens,
            "cached tokens": cache.num_gpu_blocks * cache.block_size,
            **held_cache(llm, config),
        }  # fmt: skip
        prompts = prompts_of(config.vocab_size, [arguments.tokens_in] * arguments.sequences)
        greedy(llm, prompts[:2], 2)  # warms up
        for name, count in (("prompts_s", 1), ("elapsed_s", arguments.tokens_out)):
            times, answers = _seconds(llm, prompts, count, arguments.runs)
            row |= {name: min(times), f"{name}_all": times}
        made = sum(len(answer.outputs[0].token_ids) for answer in answers)
        row |= {"requests_s": arguments.sequences / row["elapsed_s"], "tokens_out_s": made / row["elapsed_s"]}
        row["status"] = "ok" if made == arguments.sequences * arguments.tokens_out else f"{made} tokens"
        table.add(row)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    return table.show(f"vLLM {table.environment['vllm']}, whole requests")


def _seconds(llm: Any, prompts: list[list[int]], count: int, runs: int) -> tuple[list[float], list[Any]]:
    """Of each run that answers all prompts with ``count`` tokens; and the last run's answers."""
    times, answers = [], []
    for _ in range(runs):
        begin = time.time()
        answers = greedy(llm, prompts, count)
        times.append(time.time() - begin)
    return times, answers


def prompts(
    layouts: list[str], /, *, arguments: Annotated[RequestSettings, Parameter(name="*")] = RequestSettings(sequences=8)
) -> bool:
    """Where steps of prompts go, with the engine in this process: their time, that of kernels, and that of the host's
    functions (cProfile, which slows Python)."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with_entry_point()
    table = Recording("vllm-prompts", arguments.json)
    for layout in layouts:
        config, folder, cached = _weightless(arguments.shape, layout, arguments.layers, arguments.tokens_in + 1)
        llm = engine(folder, **arguments.engine_options(arguments.tokens_in + 1), **cached)
        asked = prompts_of(config.vocab_size, [arguments.tokens_in] * arguments.sequences)
        greedy(llm, asked, 1)  # warms up
        times, _ = _seconds(llm, asked, 1, arguments.runs)
        with profile(activities=[ProfilerActivity.CUDA]) as kernels:
            greedy(llm, asked, 1)
            torch.cuda.synchronize()
        found = sorted(kernels.key_averages(), key=lambda each: -each.self_device_time_total)
        host = cProfile.Profile()
        host.runcall(greedy, llm, asked, 1)
        functions = sorted(pstats.Stats(host).stats.items(), key=lambda each: -each[1][2])[:_SHOWN]
        table.add(
            {
                "shape": arguments.shape, "layout": layout, "tokens in": arguments.tokens_in,
                "sequences": arguments.sequences,
                "step tokens": llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens,
                "ms": 1e3 * min(times), "kernels_ms": sum(each.self_device_time_total for each in found) / 1e3,
                "kernels": [[each.key[:80], each.count, each.self_device_time_total / 1e3] for each in found[:_SHOWN]],
                "functions": [
                    [f"{Path(file).name}:{line} {name}", calls, 1e3 * own, 1e3 * whole]
                    for (file, line, name), (_, calls, own, whole, _) in functions
                ],
            }
        )  # fmt: skip
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    columns = ("shape", "layout", "tokens in", "sequences", "step tokens", "ms", "kernels_ms")
    return table.show(f"vLLM {table.environment['vllm']}, prompts", columns)


def _decode_rate(llm: Any, vocabulary: int, context: int, batch: int, arguments: SpeedSettings) -> dict[str, Any]:
    """Milliseconds of a step in which ``batch`` sequences of ``context`` tokens decode, and tokens a second."""
    from vllm import SamplingParams

    own, total = llm.llm_engine, WARM_UP + arguments.steps
    parameters = SamplingParams(temperature=0, max_tokens=total + ROOM, ignore_eos=True, detokenize=False)
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
    own.abort_request(names)
    while own.has_unfinished_requests():
        own.step()
    return {"fill_s": filled, "step_ms": 1e3 * took / arguments.steps, "tokens_s": made / took,
            "status": "ok" if made == batch * arguments.steps else f"{made} tokens"}  # fmt: skip


if __name__ == "__main__":
    sys.exit(command(exact, speed, requests, prompts))
