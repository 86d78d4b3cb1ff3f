"""Fourth stage: the written folder, read back from disk and compared with the source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig

from mha2mla.checkpoints import CheckpointError
from mha2mla.conversion.parity import ParityReport, compare
from mha2mla.conversion.source.files import CheckpointReader
from mha2mla.conversion.source.opening import OpenedFolder
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.pipeline.check import Arguments, HeldOut
from mha2mla.terminal import split

FULL_RANK_TOLERANCE = 1e-4  # relative error of float32 logits


class ParityError(ValueError):
    """A conversion that must be exact is not, or one that must resemble its source does not at all; nothing was
    written under the destination's name."""


def verify(
    arguments: Arguments,
    opened: OpenedFolder,
    model: StreamedModel,
    folder: Path,
    held_out: Sequence[HeldOut],
    *,
    exact: str | None,
) -> list[ParityReport]:
    """Reads ``folder`` back and compares it with the source ``model`` on each text, on the first layer by layer.

    Args:
        exact: what a result is called that must be the source to rounding, with latents in 16 bits; None: another.

    Raises:
        CheckpointError: the written names are not the model's.
        ParityError: the logits of what must be exact differ by more than rounding; or the predictions are further from
            the source's than a guess.
    """
    config, reader = AutoConfig.from_pretrained(folder, trust_remote_code=False), CheckpointReader(folder)
    converted = StreamedModel(config, reader, model.sliding_windows, device=model.device, dtype=model.dtype)
    if different := sorted(reader.names() ^ converted.expected_names()):
        raise CheckpointError(f"written tensors are not the model's: {', '.join(different[:5])}")
    compared = partial(compare, model, converted, folder=folder, spill_bytes=arguments.spill_bytes)
    spans = split(arguments.progress, *(each.work for each in held_out))
    parities = [
        compared(each.tokens, by_layer=each is held_out[0], progress=span)
        for each, span in zip(held_out, spans, strict=True)
    ]
    error = parities[0].logits_relative_error
    has_codes = any(config.layer_geometry(layer).has_codes for layer in range(config.num_hidden_layers))
    if exact is not None and has_codes:
        config.latent_bits = 16
        error = compared(held_out[0].tokens, by_layer=False, progress=False).logits_relative_error
    converted.source.release()
    dtypes = (arguments.compute_dtype, arguments.written_dtype(opened), opened.dtype)
    computed, written, source = (torch.finfo(dtype).eps for dtype in dtypes)
    # A few roundings where numbers are narrower, or those of another basis.
    tolerance = max(FULL_RANK_TOLERANCE, 8 * computed, 8 * written if written > source or has_codes else 0)
    if exact is not None and not error <= tolerance:  # so written that NaN fails, too
        raise ParityError(
            f"logits of {exact} differ from the source's by {error:.3g} (relative); expected at most {tolerance:.3g}"
        )
    guess = math.log(model.vocab_size)
    for parity in parities:
        if not parity.kl <= guess:
            raise ParityError(
                f"the converted model's predictions are {parity.kl:.3g} nats a token from the source's (KL); expected"
                f" at most {guess:.3g}, as far as a guess among {model.vocab_size} tokens can be from certainty"
            )
    return parities
