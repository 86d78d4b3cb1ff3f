"""Passes that fit the device's memory: as many tokens at once as do, and activations recomputed where one window's
do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mha2mla.conversion.fit.repeatable import deterministic
from mha2mla.environment import process_count
from mha2mla.healing.distillation import Distillation, is_out_of_memory, run_pass
from mha2mla.healing.settings import Settings
from mha2mla.healing.student import Models

MARGIN = 1 / 50  # of the memory


@deterministic(warn_only=True)  # the mode of train, whose kernels take other memory
def why_not(distillation: Distillation, settings: Settings) -> str | None:
    """The GPU's error if passes over random tokens do not fit its memory beside the state of training; None if they
    do."""
    device = distillation.student.device
    said = _try(distillation, settings)
    distillation.zero_grad()
    if device.type == "cuda":  # behind the handler, whose error holds the frames that hold the tensors
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return said


def _try(distillation: Distillation, settings: Settings) -> str | None:
    device, vocabulary = distillation.student.device, distillation.student.config.vocab_size
    trained = sum(each.numel() for each in distillation.student.parameters() if each.requires_grad)
    spare = int(MARGIN * torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
    # In float32: AdamW's two moments, or weights and directions while a rate is measured; buckets of several processes.
    copies = 2 + (process_count() > 1)
    shape = settings.pass_tokens // settings.long_length, settings.long_length
    try:
        held = torch.empty(4 * copies * trained + spare, dtype=torch.uint8, device=device)
        ids = torch.randint(vocabulary, shape, generator=torch.Generator()).to(device)
        for length in {settings.length, settings.long_length}:
            run_pass(distillation, ids, length)
        del held
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None


def fit_memory(
    settings: Settings,
    models: Models,
    distillation: Distillation,
    refusal: Callable[[Distillation, Settings], str | None] = why_not,
) -> Settings:
    """``settings``, with the largest ``tokens_at_once`` up to theirs, halved again and again, at which a pass fits.

    Where not even one long window fits, the backward pass recomputes activations from then on, if that is left to
    choose.

    Args:
        distillation: not compiled, which takes no less.
        refusal: why a pass does not; None: it does.

    Raises:
        ValueError: one window does not fit all the same.
    """
    while said := refusal(distillation, settings):
        if settings.pass_tokens > settings.long_length:
            settings = replace(settings, tokens_at_once=settings.pass_tokens // 2)
        elif settings.checkpointing == "auto" and not models.recomputes:
            models.recompute()
        else:
            raise ValueError(
                f"long_length is {settings.long_length} and train {settings.train!r}; expected a shorter window or"
                f" 'lora': a pass over one window does not fit the device's memory: {said:.200}"
            )
    return settings
