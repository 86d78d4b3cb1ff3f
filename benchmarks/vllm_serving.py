"""Converted checkpoints in vLLM: are its tokens the model's own, and how fast are they beside the source's.

    python benchmarks/vllm_serving.py exact path/to/llama-mla --json benchmarks/results/h200-vllm-exact.json
    python benchmarks/vllm_serving.py exact random:latent --eager
    python benchmarks/vllm_serving.py speed --shape llama-2-7b --memory 0.4 --context 8192

``exact`` judges every greedy token of vLLM by transformers' logits over the same prefix: in float32 it may lie below
the best one by at most twice what transformers' own bfloat16 errs at that position, which is what decides ties.
``speed`` uses random weights (``load_format=dummy``); its steps are those in which all sequences decode, prefill
excluded.
Needs vLLM (docs/serving.md); run from a clone, where the plug-in's entry point is made for the process.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.report import print_table, write_json
from mha2mla.modeling import MHA2MLAConfig, MHA2MLAForCausalLM

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
                "num_hidden_layers": 30, "vocab_size": 49152},
    "llama-2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
                   "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000},
    "llama-3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256},
}  # fmt: skip
# What conversion takes by itself at these shapes; SmolLM2's at 0.50, the others' at 1024 numbers a token and layer.
GEOMETRIES = {
    ("smollm2", "latent"): {"kv_lora_rank": 192, "qk_rope_head_dim": 128, "rope_from_latent": True},
    ("smollm2", "by-layer"): {"kv_lora_rank": [192, 128] * 15, "qk_rope_head_dim": 128, "rope_from_latent": True},
    ("smollm2", "shared"): {"kv_lora_rank": 152, "qk_rope_head_dim": 40},
    ("smollm2", "per-group"): {"kv_lora_rank": 144, "qk_rope_head_dim": 16, "num_rope_heads": 3,
                               "qk_nope_head_dim": 48},
    ("llama-2-7b", "latent"): {"kv_lora_rank": 1024, "qk_rope_head_dim": 64, "rope_from_latent": True},
    ("llama-2-7b", "narrow"): {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_from_latent": True},
    ("llama-2-7b", "narrow-per-group"): {"kv_lora_rank": 512, "qk_rope_head_dim": 16, "num_rope_heads": 32,
                                         "qk_nope_head_dim": 112},
    ("llama-3-8b", "latent"): {"kv_lora_rank": 1024, "qk_rope_head_dim": 64, "rope_from_latent": True},
}  # fmt: skip
PROMPT_LENGTHS = (12, 40, 100, 333, 700, 1500)


def random_config(shape: str, layout: str, layers: int | None = None, positions: int = 8192) -> MHA2MLAConfig:
    """What a conversion of a Llama of that shape would give, in ``layout``."""
    source = LlamaConfig(**SHAPES[shape], max_position_embeddings=positions, eos_token_id=None, pad_token_id=0)
    source.dtype = torch.bfloat16
    if layers:
        source.num_hidden_layers = layers
    width = source.hidden_size // source.num_attention_heads
    widths = {"num_rope_heads": 1, "qk_nope_head_dim": width, **GEOMETRIES[shape, layout]}
    widths = {key: value[:layers] if isinstance(value, list) else value for key, value in widths.items()}
    return MHA2MLAConfig(
        source_config=source.to_dict(), v_head_dim=width, softmax_scale=width**-0.5, attention_o_bias=True,
        architectures=["MHA2MLAForCausalLM"], dtype="bfloat16", **widths,
    )  # fmt: skip


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
    """``name``, or a folder with random weights for ``random:LAYOUT`` or ``random:SHAPE:LAYOUT``."""
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


def engine(folder: str, graphs: Sequence[int] | None = None, **options: Any) -> Any:
    # A forked process of the engine would hang in torch's CPU threads, which this one has used already.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM

    if graphs:
        options["compilation_config"] = {"cudagraph_capture_sizes": list(graphs)}
    return LLM(folder, skip_tokenizer_init=True, seed=0, **options)


def greedy(llm: Any, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(requests, parameters, use_tqdm=False)]


def cancelled(llm: Any, prompts: Sequence[list[int]], new_tokens: int) -> dict[int, list[int]]:
    """Tokens of all requests but every fifth, which is aborted on its way."""
    from vllm import SamplingParams

    own = llm.llm_engine
    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        own.add_request(str(index), {"prompt_token_ids": prompt}, parameters)
    finished, steps = {}, 0
    while own.has_unfinished_requests():
        for output in own.step():
            if output.finished:
                finished[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == 7:
            own.abort_request([str(index) for index in range(0, len(prompts), 5)])
    return {index: tokens for index, tokens in finished.items() if len(tokens) == new_tokens}


@torch.no_grad()
def judge(models: Sequence[Any], prompt: list[int], tokens: list[int]) -> dict[str, Any]:
    """Tokens by the logits of the model in bfloat16 and in float32 over the same prefix.

    Returns:
        ``equal``: how many are bfloat16's own choice; ``worst``: how far one lies below float32's best, over twice the
        largest error of bfloat16's logits there: at most 1 where only ties were decided otherwise.
    """
    low, high = models
    ids = torch.tensor([prompt + tokens[:-1]], device=high.device)
    keep = len(tokens)
    mine, exact = (model(ids, use_cache=False, logits_to_keep=keep).logits[0].float() for model in (low, high))
    chosen = torch.tensor(tokens, device=exact.device)[:, None]
    below = exact.amax(-1) - exact.gather(1, chosen)[:, 0]
    error = (mine - exact).abs().amax(-1)
    return {
        "tokens": keep,
        "equal": int((mine.argmax(-1) == chosen[:, 0]).sum()),
        "worst": float((below / (2 * error)).max()),
    }


def exact(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    options = {
        "enforce_eager": arguments.eager,
        "enable_prefix_caching": not arguments.no_prefix_caching,
        "tensor_parallel_size": arguments.tp,
        "gpu_memory_utilization": arguments.memory,
        "max_model_len": 2048,
        "graphs": arguments.graphs,
    }
    if arguments.chunk:
        options["max_num_batched_tokens"] = arguments.chunk
    if arguments.blocks:
        options["num_gpu_blocks_override"] = arguments.blocks
    if arguments.cache_gb:
        options["kv_cache_memory_bytes"] = int(arguments.cache_gb * 2**30)
    rows = []
    for name in arguments.checkpoints:
        folder = checkpoint(name, arguments.layers)
        config = MHA2MLAConfig.from_pretrained(folder)
        begin = time.time()
        llm = engine(folder, **options)
        print(f"{name}: engine up after {time.time() - begin:.1f} s", flush=True)
        prompts = prompts_of(config.vocab_size, PROMPT_LENGTHS)
        found = {"batch": dict(enumerate(greedy(llm, prompts, arguments.tokens)))}
        print(f"{name}: batch generated after {time.time() - begin:.1f} s", flush=True)
        found["again"] = dict(enumerate(greedy(llm, prompts, arguments.tokens)))  # from cached prefixes
        many = []
        if arguments.requests:
            lengths = torch.randint(9, 400, (arguments.requests,), generator=torch.Generator().manual_seed(1)).tolist()
            many = prompts_of(config.vocab_size, lengths, seed=2)
            found["requests"] = cancelled(llm, many, 32)
        print(f"{name}: all generated after {time.time() - begin:.1f} s", flush=True)
        del llm
        gc.collect()
        models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cuda").eval()
            for dtype in (torch.bfloat16, torch.float32)
        ]
        for kind, answers in found.items():
            asked = many if kind == "requests" else prompts
            judged = [judge(models, asked[index], tokens) for index, tokens in answers.items()]
            rows.append(
                {
                    "checkpoint": name, "layout": _layout(config), "what": kind, "sequences": len(judged),
                    "tokens": sum(each["tokens"] for each in judged), "equal": sum(each["equal"] for each in judged),
                    "worst": max((each["worst"] for each in judged), default=float("nan")),
                    "status": "ok" if judged and all(each["worst"] <= 1 for each in judged) else "wrong",
                }
            )  # fmt: skip
        del models
    return rows


def _layout(config: MHA2MLAConfig) -> str:
    if config.rope_from_latent:
        return "latent"
    return "shared" if config.num_rope_heads == 1 else "per-group"


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode steps of the source's shape, or of a converted one, at every batch that is asked for."""
    folder = tempfile.mkdtemp()
    positions = arguments.context + 2048
    config = random_config(
        arguments.shape, "latent" if arguments.layout == "source" else arguments.layout, arguments.layers, positions
    )
    if arguments.layout == "source":
        config = LlamaConfig(**{key: value for key, value in config.source_config.items() if key != "model_type"})
        config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    options = {"gpu_memory_utilization": arguments.memory, "max_model_len": positions, "graphs": arguments.graphs}
    if arguments.cache_gb:
        options["kv_cache_memory_bytes"] = int(arguments.cache_gb * 2**30)
    llm = engine(folder, load_format="dummy", **options)
    cache = llm.llm_engine.vllm_config.cache_config
    with alone(arguments.lock):
        return _rows(llm, config, cache, arguments)


@contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """While others that were started with the same lock only start: so engines come up side by side, not one by one."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rows(llm: Any, config: Any, cache: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"shape": arguments.shape, "layout": arguments.layout, "context": arguments.context,
         "cached tokens": cache.num_gpu_blocks * cache.block_size, **_decode_rate(llm, config, batch, arguments)}
        for batch in arguments.batches
    ]  # fmt: skip


def _decode_rate(llm: Any, config: Any, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step in which ``batch`` sequences of ``context`` tokens decode, and tokens a second."""
    from vllm import SamplingParams

    own = llm.llm_engine
    parameters = SamplingParams(temperature=0, max_tokens=arguments.steps + 64, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts_of(config.vocab_size, [arguments.context] * batch, seed=batch)):
        own.add_request(f"{batch}-{index}", {"prompt_token_ids": prompt}, parameters)
    begin, started = time.time(), set()
    while len(started) < batch:
        started |= {output.request_id for output in own.step()}
        if time.time() - begin > arguments.patience:
            own.abort_request([f"{batch}-{index}" for index in range(batch)])
            return {"batch": batch, "status": f"only {len(started)} had decoded after {arguments.patience} s"}
    prefill = time.time() - begin
    for _ in range(8):
        own.step()
    begin, made = time.time(), 0
    for _ in range(arguments.steps):
        made += len(own.step())
    took = time.time() - begin
    own.abort_request([f"{batch}-{index}" for index in range(batch)])
    while own.has_unfinished_requests():
        own.step()
    return {"batch": batch, "prefill_s": prefill, "step_ms": 1e3 * took / arguments.steps, "tokens_s": made / took,
            "status": "ok" if made == batch * arguments.steps else f"{made} tokens"}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = root.add_subparsers(required=True, dest="verb")
    one = verbs.add_parser("exact")
    one.add_argument("checkpoints", nargs="+")
    one.add_argument("--tokens", type=int, default=128)
    one.add_argument("--layers", type=int, default=4)
    one.add_argument("--requests", type=int, default=0)
    one.add_argument("--eager", action="store_true")
    one.add_argument("--no-prefix-caching", action="store_true")
    one.add_argument("--chunk", type=int)
    one.add_argument("--blocks", type=int)
    one.add_argument("--tp", type=int, default=1)
    two = verbs.add_parser("speed")
    two.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    two.add_argument("--layout", default="latent")
    two.add_argument("--layers", type=int)
    two.add_argument("--context", type=int, default=8192)
    two.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    two.add_argument("--steps", type=int, default=64)
    two.add_argument("--patience", type=float, default=60.0)
    two.add_argument("--lock", help="a file: one process with it measures at a time")
    for each in (one, two):
        each.add_argument("--memory", type=float, default=0.3)
        each.add_argument("--cache-gb", type=float, help="of the cache; default what --memory leaves")
        each.add_argument("--graphs", type=int, nargs="+", help="batches of CUDA graphs; default vLLM's")
        each.add_argument("--json")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    with_entry_point()
    rows = {"exact": exact, "speed": speed}[arguments.verb](arguments)
    environment = collect_environment()
    print_table(rows, title=f"vLLM {environment['vllm']}, {arguments.verb}", caption=describe_environment(environment))
    if arguments.json:
        write_json(arguments.json, kind=f"vllm-{arguments.verb}", rows=rows, environment=environment)
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
