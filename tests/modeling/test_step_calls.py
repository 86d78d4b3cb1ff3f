"""Python calls of one eager step: few, and none of what a prompt or another layer has done already.

A call is a ``call`` event of ``sys.setprofile`` in a file of the package, list comprehensions and resumed generators
included; what torch and transformers do is not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import mha2mla
from mha2mla.modeling import LatentCache, paged_model
from mha2mla.trial_models import converted_config, random_model, source_config

PACKAGE = f"{Path(mha2mla.__file__).resolve().parent}/"
WARM_STEPS = 4  # the prompt, and steps that make what later ones reuse


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls in here, by qualified name."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def config(layers: int = 2, **keys: Any) -> Any:
    """A tiny Llama in layout latent; without ``keys`` the source's own."""
    source = source_config("tiny", num_hidden_layers=layers)
    if not keys:
        return source
    return converted_config(source, layout="latent", kv_lora_rank=32, qk_rope_head_dim=16).with_options(**keys)


def test_step_calls_stay_few():
    """Of a decode step of ``generate`` under a padding mask."""
    model, steps = random_model(config(rotary_key_cache="none"), "cpu", torch.float32), []
    prompt = torch.arange(3, 13)[None]
    with ExitStack() as profiled:

        def profile(*_: Any, **__: Any) -> torch.Tensor:  # from the end of a warm step to the end of the next
            begins = len(steps) + 1 == WARM_STEPS
            steps.append(profiled.enter_context(counted()) if begins else profiled.close())
            return torch.zeros(1, dtype=torch.bool)

        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "stopping_criteria": [profile]}
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=WARM_STEPS + 2, **options)
    calls = steps[WARM_STEPS - 1]
    assert next(iter(calls)).endswith("prepare_inputs_for_generation")
    assert "AttentionStep.run" in calls  # or the step was not served
    # Fusing weights and looking into modules belongs to the prompt.
    assert calls.keys().isdisjoint(
        {"fuse_weights", "FusedDecoder.prepare", "is_plain", "_is_own", "StepPlanner._allocate"}
    )
    assert calls.total() <= 210


@torch.no_grad()
def prompt_calls(way: str, layers: int, **keys: Any) -> Counter[str]:
    """Calls of a warm step over a prompt of 16 tokens: by ``forward_batch`` ("paged"; "absorbed": of 12 more tokens,
    which run so), or by ``forward`` over a new cache, where a backend that is named attends or SDPA."""
    keys |= {"attention_backend": None if way == "sdpa" else "mla_reference"} if keys else {}
    model, ids = random_model(config(layers, **keys), "cpu", torch.float32), torch.arange(3, 19)
    if not keys:
        model.set_attn_implementation("mha2mla")
    model = paged_model(model)
    is_paged = way in ("paged", "absorbed")
    cache = model.paged_cache(4) if is_paged else None

    def run(sequence: int, tokens: torch.Tensor) -> None:
        if cache is None:
            model(tokens[None], past_key_values=LatentCache(model.config), logits_to_keep=1)
        else:
            model.forward_batch(tokens, cache.step(cache.extend({sequence: len(tokens)})))

    for _ in range(3):
        sequence = cache.open() if is_paged else 0
        if way == "absorbed":
            run(sequence, ids)
        with counted() as calls:
            run(sequence, ids[:12] if way == "absorbed" else ids)
    return calls


@pytest.mark.parametrize(
    ("keys", "way", "most"),
    [
        ({}, "paged", 83),
        ({"rotary_key_cache": "none"}, "paged", 96),
        ({"rotary_key_cache": "bfloat16"}, "paged", 94),
        ({"rotary_key_cache": "bfloat16"}, "absorbed", 96),
        ({"rotary_key_cache": "bfloat16"}, "forward", 107),
        ({"rotary_key_cache": "bfloat16"}, "sdpa", 75),
    ],
)
def test_prompt_calls_per_layer_stay_few(keys, way, most):
    calls = prompt_calls(way, 3, **keys) - prompt_calls(way, 2, **keys)
    assert {"AttentionStep.run", "rms_norm"} <= calls.keys() and ("_attention" in calls) == (way != "sdpa")
    # Configs, backends and modules are asked once for all layers that are alike, plans are unpacked once.
    assert calls.keys().isdisjoint(
        {"fuse_weights", "_is_own", "_unpack", "MHA2MLAConfig.layer_geometry", "LatentLayer.choose", "check_layouts"}
    )
    assert calls.total() <= most
