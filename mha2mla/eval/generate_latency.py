"""Time of ``generate`` as a user calls it: first token, each further token, memory, and the batch that would fit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mha2mla.eval.float64 import in_float64
from mha2mla.eval.measurement import NOT_CHECKED, WRONG, unless_out_of_memory
from mha2mla.eval.step_latency import Model, cache_sizes, made_or_why, prompt_factor, row_of
from mha2mla.modeling.config import layer_token_bytes
from mha2mla.texts import end_tokens

LONG_ENOUGH = 1.5  # seconds of runs after which none is begun: long ones differ little


@torch.inference_mode()
def generate_latency(
    models: Mapping[str, Model],
    *,
    batch_sizes: Sequence[int] = (1,),
    seqlens: Sequence[int] = (512,),
    new_tokens: int = 64,
    check: bool = True,
    runs: int = 3,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Greedy ``generate`` with its default arguments, after one call that warms up; medians over ``runs``, or over as
    many as begin within :data:`LONG_ENOUGH`.

    The check follows the tokens of the first sequence: each must be float64's most likely one after those before it, or
    as likely but for rounding, where the yardstick is how far the model's own dtype moves its cacheless logits.

    Args:
        models: name → causal language model, or what makes one and lets go of it afterwards; all on one device.
        batch_sizes, seqlens: every pair of them is measured; prompts of ``seqlen`` random tokens.
        new_tokens: tokens that follow each prompt; no text ends before.
        check: without it nothing is compared, and every row's status says so.
        seed: of the prompts.

    Yields:
        Rows with the keys of :data:`COLUMNS`: ``first_token_ms`` is the wall clock of a call that makes one token,
        ``ms_per_token`` what a call of ``new_tokens`` takes longer, by the tokens between; ``tokens_per_s`` counts all
        sequences. On CUDA ``peak_bytes`` is what was allocated at most, and ``largest_batch`` how many such sequences
        the device's memory would hold, from what those of this row took beside the weights: an estimate.
    """
    for name, make in models.items():
        model = made_or_why(make)
        if isinstance(model, str):
            for batch, seqlen in product(batch_sizes, seqlens):
                row = {"op": "generate", "implementation": name, "batch": batch, "seqlen": seqlen}
                yield row | {"status": model}
            continue
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.config.vocab_size, (max(batch_sizes), max(seqlens)), generator=generator)
        for batch in batch_sizes:
            for seqlen in seqlens:
                row = row_of("generate", name, model, batch, seqlen) | {"new_tokens": new_tokens}
                prompts = ids[:batch, :seqlen].to(model.device)
                yield row | unless_out_of_memory(_timed, model, prompts, new_tokens, check, runs)
                if hasattr(model, "release_captured"):
                    model.release_captured()
        del model


def _timed(model: torch.nn.Module, prompts: Tensor, new_tokens: int, check: bool, runs: int) -> dict[str, Any]:
    batch, seqlen = prompts.shape
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    made = greedy(model, prompts, new_tokens)
    token_bytes = layer_token_bytes(model.config, model.dtype.itemsize)
    row = cache_sizes(model.config, batch, seqlen + new_tokens - 1, token_bytes)  # the last token is never cached
    if on_gpu:
        weights = sum(each.nbytes for each in model.parameters())
        peak = torch.cuda.max_memory_allocated(model.device)
        room = torch.cuda.get_device_properties(model.device).total_memory - weights
        row |= {"peak_bytes": peak, "largest_batch": int(room * batch // (peak - weights))}
    row["status"] = _judged(model, made[:1], seqlen) if check else NOT_CHECKED
    if row["status"].startswith(WRONG):
        return row
    first, all_tokens = (median_seconds(model, prompts, count, runs) for count in (1, new_tokens))
    per_token = (all_tokens - first) / (new_tokens - 1)
    return row | {
        "us_p50": per_token * 1e6,
        "first_token_ms": first * 1e3,
        "ms_per_token": per_token * 1e3,
        "tokens_per_s": batch / per_token,
    }


def greedy(model: torch.nn.Module, prompts: Tensor, new_tokens: int, **options: Any) -> Any:
    """What ``model.generate`` returns for ``new_tokens`` behind prompts [B, T] without padding, none of them fewer."""
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )


def median_seconds(model: torch.nn.Module, prompts: Tensor, new_tokens: int, runs: int, **options: Any) -> float:
    """Of the wall clock of :func:`greedy`, over ``runs`` or as many as begin within :data:`LONG_ENOUGH`."""
    times: list[float] = []
    while len(times) < runs and sum(times) < LONG_ENOUGH:
        began = time.perf_counter()
        greedy(model, prompts, new_tokens, **options)[0, -1].item()  # waits for the device
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _judged(model: torch.nn.Module, text: Tensor, prompt: int) -> str:
    """The status of generated ``text [1, T]``, of which ``prompt`` tokens were given."""
    kept = text.shape[1] - prompt + 1

    def logits() -> Tensor:  # [new tokens, vocabulary]
        return model(input_ids=text, use_cache=False, logits_to_keep=kept).logits[0, :-1]

    narrow = logits()
    with in_float64(model):
        exact = logits()
    # Ends of sequences are not let through, whatever their logits.
    for found in (exact, narrow):
        found[:, end_tokens(model)] = -torch.inf
    moved = (narrow.double() - exact).nan_to_num(0.0).abs().amax(-1)
    chosen = exact.gather(1, text[0, prompt:, None])[:, 0]
    behind = exact.amax(-1) - chosen - 2 * prompt_factor(model) * moved  # two logits, each as far off as that
    if bool((behind <= 0).all()):
        return "ok"
    token = int(behind.argmax())
    return f"{WRONG}token {token} of the continuation is {float(behind[token]):.3g} less likely than float64's choice"
