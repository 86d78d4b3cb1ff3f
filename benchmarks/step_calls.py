"""Python calls of one eager step: how many, into how many functions of how many files.

    python benchmarks/step_calls.py
    python benchmarks/step_calls.py --tree

The model is a random two-layer Llama in layout ``latent`` on the CPU. The tree is of a decode step of ``generate``;
what a layer adds to a step over a prompt stands below it. Steps before the counted one warm up: they allocate pages,
fuse weights and make plans. A call is a ``call`` event of ``sys.setprofile`` in a file below
``mha2mla/``, list comprehensions and resumed generators included; what torch and transformers do is not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mha2mla
from benchmarks.recording import command
from mha2mla.modeling import LatentCache, paged_model
from mha2mla.trial_models import converted_config, random_model, source_config

PACKAGE = Path(mha2mla.__file__).resolve().parent
WARM_STEPS = 4  # the prompt, and steps that make what later ones reuse


@dataclass
class Calls(StoppingCriteria):
    """Profiles one step of ``generate``: from the end of step ``WARM_STEPS`` to the end of the next.

    Attributes:
        entered: per call, its depth among frames of the package, file, function, and first line.
        steps: that have ended.
    """

    entered: list[tuple[int, str, str, int]] = field(default_factory=list)
    steps: int = 0
    _open: list[FrameType] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.steps += 1
        sys.setprofile(self._event if self.steps == WARM_STEPS else None)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return
        if event == "call":
            code = frame.f_code
            name = str(path.relative_to(PACKAGE))
            self.entered.append((len(self._open), name, code.co_qualname, code.co_firstlineno))
            self._open.append(frame)
        elif event == "return" and self._open:
            self._open.pop()

    @property
    def functions(self) -> Counter[tuple[str, str, int]]:
        """Calls of each function, by file, name and first line."""
        return Counter(call[1:] for call in self.entered)

    def __str__(self) -> str:
        functions = self.functions
        return f"{len(self.entered)} calls, {len(functions)} functions, {len({name for name, *_ in functions})} files"


def count_step() -> Calls:
    """The calls of a warm decode step of one sequence under a padding mask."""
    torch.manual_seed(0)
    config = converted_config(source_config("tiny"), layout="latent", kv_lora_rank=32, qk_rope_head_dim=16)
    model = random_model(config, "cpu", torch.float32)
    calls = Calls()
    prompt = torch.arange(3, 13)[None]
    try:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=WARM_STEPS + 2,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[calls],
        )
    finally:
        sys.setprofile(None)
    return calls


WAYS = ("paged", "absorbed", "forward", "sdpa")
PROMPTS = ("source, paged", *(f"{keys}, {way}" for way in WAYS for keys in ("computed", "kept")))


@torch.inference_mode()
def count_prompt(which: str, layers: int) -> Calls:
    """The calls of a warm step over a prompt of 16 tokens.

    Args:
        which: of ``PROMPTS``: the source, or layout latent with rotary keys computed or kept; by ``forward_batch``
            ("absorbed": of 12 tokens more, which run that form), or by ``forward`` over a new cache, where a backend
            attends that is asked for by name, or SDPA.
        layers: of the model.
    """
    (name, way), ids = which.split(", "), torch.arange(3, 19)
    with torch.inference_mode(False):
        config = source_config("tiny", num_hidden_layers=layers)
        if name != "source":
            config = converted_config(config, layout="latent", kv_lora_rank=32, qk_rope_head_dim=16)
            config = config.with_options(rotary_key_cache={"computed": "none", "kept": "bfloat16"}[name])
            config = config.with_options(attention_backend=None if way == "sdpa" else "mla_reference")
        model = random_model(config, "cpu", torch.float32)
    if name == "source":
        model.set_attn_implementation("mha2mla")
    model = paged_model(model)
    is_paged = way in ("paged", "absorbed")
    cache = model.paged_cache(4) if is_paged else None

    def run(sequence: int, tokens: Tensor) -> None:
        if cache is None:
            model(tokens[None], past_key_values=LatentCache(model.config), logits_to_keep=1)
        else:
            model.forward_batch(tokens, cache.step(cache.extend({sequence: len(tokens)})))

    for calls in (Calls(), Calls(), Calls()):
        sequence = cache.open() if is_paged else 0
        if way == "absorbed":
            run(sequence, ids)
        sys.setprofile(calls._event)
        try:
            run(sequence, ids[:12] if way == "absorbed" else ids)
        finally:
            sys.setprofile(None)
    return calls


def calls_per_layer(which: str) -> Counter[tuple[str, str, int]]:
    """Calls that each further layer adds to :func:`count_prompt`, by file, function and first line."""
    return count_prompt(which, 3).functions - count_prompt(which, 2).functions


def main(tree: bool = False) -> bool:
    """Prints the three counts, and the calls that a layer adds to a prompt.

    Args:
        tree: also print every call, indented by its depth, and the calls of each file and function.
    """
    calls = count_step()
    if tree:
        for depth, name, function, line in calls.entered:
            print(f"{'  ' * depth}{name}:{line} {function}")
        files = Counter(name for _, name, *_ in calls.entered)
        for name, count in files.most_common():
            print(f"{count:5} {name}")
            for (where, function, line), times in calls.functions.most_common():
                if where == name:
                    print(f"      {times:5} {function}:{line}")
    print(calls)
    for which in PROMPTS:
        print(f"prompt, {which}: {calls_per_layer(which).total()} calls a layer")
    return True


if __name__ == "__main__":
    sys.exit(command(main, cpu=True))
