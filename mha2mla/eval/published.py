"""Decode attention at the shapes that a published wish for a kernel named, beside the times that it gave.

MHA2MLA's authors asked for a decode kernel of the shapes that their conversions have, and gave the latency of attention
in milliseconds, hardware not named: of MHA by FlashAttention-2, and of an MLA kernel fed with zero-padded heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from mha2mla.eval.op_latency import (
    AttentionInputs,
    Baseline,
    attention_latency,
    flash_attention,
    flash_attention_3_baseline,
    gqa_decode_baseline,
    sdpa_baseline,
)
from mha2mla.geometry import MLAGeometry


@dataclass(frozen=True)
class DecodePreset:
    """A shape with published times.

    Attributes:
        geometry: of a layer. layers: of the model.
        published: (batch, length) → ms of MHA by FlashAttention-2, and of the zero-padded MLA kernel.
    """

    geometry: MLAGeometry
    layers: int
    published: Mapping[tuple[int, int], tuple[float, float]]


PRESETS: Mapping[str, DecodePreset] = MappingProxyType(
    {
        "llama-2-7b-decode": DecodePreset(
            MLAGeometry(32, 32, 512, 16, 112, 128, 32),
            32,
            {(8, 2048): (5.95, 3.52), (8, 4096): (10.66, 6.08), (64, 2048): (43.74, 4.10)},
        )
    }
)


def sdpa_flash_baseline(inputs: AttentionInputs) -> Callable[[], Tensor] | str:
    """FlashAttention-2 as torch's scaled_dot_product_attention has it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = sdpa_baseline(inputs)

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend()

    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return call


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "FlashAttention-2": partial(flash_attention, package="flash_attn"),
        "SDPA flash": sdpa_flash_baseline,
        "FlashAttention-3": flash_attention_3_baseline,
        "gqa_decode": gqa_decode_baseline,
    }
)
COLUMNS = {
    "batch": "batch",
    "seqlen": "length",
    "implementation": "implementation",
    "us": "µs a layer",
    "layers_ms": "ms, all layers",
    "speed_up": "MLA's speed-up",
    "published_ms": "published ms",
    "status": "status",
}


def preset_latency(name: str, **options: Any) -> Iterator[dict[str, Any]]:
    """A preset's rows: every implementation at each of its shapes, a layer and all layers, one behind the other.

    Args:
        name: of the preset.
        options: ``dtype``, ``device``, ``min_run_time``, ``check`` of :func:`attention_latency`.

    Yields:
        Rows with the keys of :data:`COLUMNS` and those of :func:`attention_latency`. ``us`` is the device's time with a
        cold L2. ``speed_up`` is a row's time over that of ``mla_decode``; ``published_ms`` stands beside the
        implementations that the published figures are of, or of the same attention.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; expected one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    for (batch, seqlen), published in preset.published.items():
        measure = partial(attention_latency, preset.geometry, batch_sizes=(batch,), seqlens=(seqlen,))
        rows = measure(baselines=BASELINES, **options)
        ours = rows[-1].get("us_p50")
        for row in rows:
            us = row.get("us_p50")
            if us is not None:
                row |= {"us": us, "layers_ms": us * preset.layers / 1e3}
                row |= {"speed_up": us / ours} if ours is not None else {}
            if row["implementation"] in ("FlashAttention-2", "SDPA flash"):
                row["published_ms"] = published[0]
            elif row is rows[-1]:
                row["published_ms"] = published[1]
            yield row
