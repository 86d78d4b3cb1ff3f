"""Perplexity over an e4m3 cache of a converted model's latents, beside the latents as computed.

    python benchmarks/fp8_loss.py SOURCE CONVERTED --json benchmarks/results/h200-fp8-loss.json

A cache rounds every token's latent by itself, so reading a text whose latents are rounded where they are made loses
what decoding over that cache loses. In the layout ``latent`` rotary keys are computed of the rounded numbers; other
layouts keep theirs as they are beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Recording, command
from mha2mla.eval.loading import load_model, load_tokenizer
from mha2mla.eval.quality import TEXTS, evaluate_quality, parse_lengths
from mha2mla.kernels import dequantize_latent, quantize_latent


@contextmanager
def eight_bit_latents(model: nn.Module) -> Iterator[None]:
    """While open, every latent of ``model`` is what an e4m3 cache of it gives back.

    Raises:
        ValueError: the model has QK-norm, whose latent no single projection makes.
    """
    if model.config.qk_norm:
        raise ValueError("model has QK-norm; expected one whose kv_a_proj alone makes the latent")

    def rounded(width: int, module: nn.Module, given: object, encoded: Tensor) -> Tensor:
        latent = dequantize_latent(*quantize_latent(encoded[..., :width]), encoded.dtype)
        return torch.cat((latent, encoded[..., width:]), -1)

    with ExitStack() as hooks:
        for layer in model.model.layers:
            hook = partial(rounded, layer.self_attn.geometry.kv_lora_rank)
            hooks.callback(layer.self_attn.kv_a_proj.register_forward_hook(hook).remove)
        yield


def loss(
    source: str,
    converted: str,
    texts: list[str] | None = None,
    lengths: str = "512,longest",
    max_tokens: int = 24576,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """Perplexity over the source's, with latents as computed and rounded to 8 bits.

    Args:
        source: folder of the source checkpoint.
        converted: folder of the converted one, without QK-norm.
        texts: what is read.
        lengths: tokens of a window, joined by commas.
        max_tokens: of each text.
        device: cpu, cuda, …; default CUDA when there is one.
        json: file to write.
    """
    read = partial(load_model, device=device, dtype=torch.float32)
    models = read(source, "source"), read(converted, "converted")
    measure = partial(
        evaluate_quality,
        *models,
        texts=texts or TEXTS,
        lengths=parse_lengths(lengths),
        max_tokens=max_tokens,
        tokenizer=load_tokenizer(source, "source"),
    )
    plain = measure().rows
    with eight_bit_latents(models[1]):
        rounded = measure().rows
    table = Recording("fp8-loss", json, measured={"model": Path(source).name, "converted": Path(converted).name})
    table.rows += [
        {"text": wide.text, "window": wide.seqlen, "tokens": wide.num_tokens}
        | {"ratio": wide.perplexity_ratio, "ratio, 8 bits": narrow.perplexity_ratio}
        | {"KL": wide.kl, "KL, 8 bits": narrow.kl}
        for wide, narrow in zip(plain, rounded, strict=True)
    ]
    table.write()
    return table.show("Perplexity over the source's, latents in float32 and in e4m3")


if __name__ == "__main__":
    sys.exit(command(loss, cpu=True))
