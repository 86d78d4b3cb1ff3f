"""What will serve the layers of a config on a device, and why: the one answer to that question.

``attention_report``, ``paged_cache``, the converter, its model card and ``inspect`` all ask here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.backends import ATTENTION_BACKENDS, AttentionBackend, AttentionRegistry
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.forms import choose_form
from mha2mla.modeling.latent_layer import PAGE_SIZE


@dataclass(frozen=True)
class LayerAttention:
    """What serves layer ``layer_idx``, and why.

    Attributes:
        form, backend, reason: of ``generate`` and ``forward`` over a LatentCache: "absorbed" or "expanded"; "tilelang",
            "reference" or the attention implementation; in words.
        batch_backend: of ``forward_batch`` over a PagedCache; None: the backend that the config names refuses.
        batch_reason: what those refuse that come before it, or what it refuses itself; empty if nothing.
        device: that was asked for.
    """

    layer_idx: int
    geometry: MLAGeometry
    sliding_window: int | None
    form: str
    backend: str
    reason: str
    batch_backend: AttentionBackend | None
    batch_reason: str
    device: torch.device

    @property
    def compiled(self) -> bool:
        """Whether decode runs a kernel that was written for it, in both ways of calling the model."""
        return self.backend == "tilelang" and self.batch_backend is not None and not self.batch_reason

    @property
    def why(self) -> str:
        """What no kernel serves, in words; empty if nothing."""
        if self.backend == "tilelang":
            return self.batch_reason
        return self.reason

    def __str__(self) -> str:
        batches = "refused" if self.batch_backend is None else self.batch_backend.name
        return f"{self.form}, {self.backend}; batches: {batches}"


def what_serves(
    config: MHA2MLAConfig,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    query_length: int = 1,
    page_size: int = PAGE_SIZE,
    registry: AttentionRegistry = ATTENTION_BACKENDS,
) -> tuple[LayerAttention, ...]:
    """What will serve every layer of a model with this config.

    Args:
        config: its ``mla_form``, ``decode_backend``, ``attention_backend`` and attention implementation count.
        device: of the model. A CUDA device that this machine lacks is taken to be a Hopper.
        dtype: of the model.
        query_length: new tokens per sequence.
        page_size: tokens per page of the cache.
        registry: of the backends for batches.
    """
    device = torch.device(device)
    served = {}
    for index in range(config.num_hidden_layers):
        geometry = config.layer_geometry(index)
        if geometry not in served:
            form = choose_form(
                geometry.num_attention_heads,
                geometry.num_rope_heads,
                geometry.kv_lora_rank,
                geometry.qk_rope_head_dim,
                mla_form=config.mla_form,
                decode_backend=config.decode_backend,
                attn_implementation=config._attn_implementation or "sdpa",
                query_length=query_length,
                page_size=page_size,
                dtype=dtype,
                device=device,
            )
            batches = registry.find(config.attention_backend, geometry, page_size, dtype, device)
            served[geometry] = (*vars(form).values(), *batches, device)
    geometries = map(config.layer_geometry, range(config.num_hidden_layers))
    return tuple(
        LayerAttention(index, geometry, config.layer_sliding_window(index), *served[geometry])
        for index, geometry in enumerate(geometries)
    )


def batch_backends(
    config: MHA2MLAConfig, device: torch.device | str, dtype: torch.dtype, page_size: int
) -> list[AttentionBackend]:
    """The backend of every layer's batches.

    Raises:
        ValueError: ``config.attention_backend`` is no backend's name, or it refuses a layer, with the reason.

    Warns:
        UserWarning: on CUDA plain torch serves a layer, which nobody asked for by name, with the reason.
    """
    layers = what_serves(config, device, dtype, page_size=page_size)
    for layer in layers:
        if layer.batch_backend is None:
            raise ValueError(
                f"layer {layer.layer_idx}: attention backend {config.attention_backend!r} refuses: {layer.batch_reason}"
            )
    slow = [layer for layer in layers if layer.batch_reason and layer.device.type == "cuda"]
    if slow:
        warnings.warn(
            f"{len(slow)} of {len(layers)} layers attend in plain torch, slowly ({slow[0].batch_backend.name}):"
            f" {slow[0].batch_reason}. config.attention_backend={slow[0].batch_backend.name!r} asks for that by name",
            stacklevel=3,
        )
    return [layer.batch_backend for layer in layers]


def describe(layers: Iterable[LayerAttention]) -> str:
    """One line: what serves the layers, how many of them where they differ, and why it is no kernel."""
    ways: dict[str, list[LayerAttention]] = {}
    for layer in layers:
        ways.setdefault(str(layer) + (f" ({layer.why})" if layer.why else ""), []).append(layer)
    several = len(ways) > 1
    return " | ".join(f"{len(group)} layers: {way}" if several else way for way, group in ways.items())
