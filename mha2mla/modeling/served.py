"""Backends chosen for the layers of a config on a device, with the reasons.

The caches of a model, ``attention_report``, the converter, its model card and ``inspect`` all ask here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import absorbs_up_to, decodes_codes, is_absorbed
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants, refused


def find_over_cache(
    name: str | None, geometry: MLAGeometry, page_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionBackend | None, str]:
    """Backend of a layer over a LatentCache, and the refusals before it; None: the one called ``name`` refuses.

    With no name given the attention implementation serves what no kernel does on a GPU, where plain torch is slow.
    """
    backend, why = ATTENTION_BACKENDS.find(name, geometry, page_size, dtype, device, long_queries=False)
    if name is None and (backend is None or (device.type == "cuda" and not backend.compiled)):
        return ATTENTION_BACKENDS.get("mla_expanded"), why
    return backend, why


@torch.compiler.assume_constant_result
def name_over_cache(
    name: str | None, geometry_values: dict[str, int | bool], page_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[str, bool]:
    """Name of the backend of :func:`find_over_cache`, and whether it serves queries of any length.

    Dynamo takes the answer and does not trace how it was found. Arguments and answer are constants for that reason: a
    geometry that is made while a graph is traced has no attributes outside the trace.

    Args:
        geometry_values: :meth:`MLAGeometry.to_dict` of the layer.

    Raises:
        ValueError: it refuses the layer, with the reason.
    """
    geometry = MLAGeometry(**geometry_values)
    backend, why = find_over_cache(name, geometry, page_size, dtype, device)
    if backend is None:
        raise ValueError(f"{refused(name, geometry)}: {why}")
    return backend.name, backend.refusal(geometry, page_size, dtype, device) is None


@dataclass(frozen=True)
class LayerAttention:
    """Backend chosen for a layer, with the reason.

    Attributes:
        form, backend, reason: of ``generate`` and ``forward`` over a LatentCache: "absorbed" or "expanded"; the name of
            a backend, or the attention implementation; what those refuse that come before it, empty if nothing.
        batch_backend: of ``forward_batch`` over a PagedCache; None: the backend that the config names refuses.
        batch_reason: what those refuse that come before it, or what it refuses itself; empty if nothing.
        sliding_window: tokens up to itself that a query sees, by the source's window or the user's; None: all.
        compiled: decode runs a kernel that was written for it, in both ways of calling the model.
        decodes_codes: a decode step reads the latent's integer codes, and not a copy of its pages in 16 bits.
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
    compiled: bool
    decodes_codes: bool

    @property
    def why(self) -> str:
        """Reason why no kernel serves; empty where one does."""
        return self.reason or self.batch_reason

    def __str__(self) -> str:
        batches = "refused" if self.batch_backend is None else self.batch_backend.name
        copy = "" if self.decodes_codes else "a copy of "
        codes = f"; decode reads {copy}codes of {self.geometry.latent_bits} bits" if self.geometry.has_codes else ""
        return f"{self.form}, {self.backend}; batches: {batches}{codes}"


class AttentionReport(list[LayerAttention]):
    """Choices for the layers of a model; printed as a table, with neighbours that are alike in one row."""

    def __str__(self) -> str:
        rows = [("layers", "generate", "batches", "window", "latent", "why no kernel")]
        for alike, group in groupby(self, lambda layer: replace(layer, layer_idx=0)):
            first, *others = (str(layer.layer_idx) for layer in group)
            batches = "refused" if alike.batch_backend is None else alike.batch_backend.name
            window = "all" if alike.sliding_window is None else str(alike.sliding_window)
            layers, way = "–".join([first, *others[-1:]]), f"{alike.form}, {alike.backend}"
            bits = f" in {alike.geometry.latent_bits} bits" if alike.geometry.has_codes else ""
            rows.append((layers, way, batches, window, f"{alike.geometry.kv_lora_rank}{bits}", alike.why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    __repr__ = __str__


def what_serves(
    config: MHA2MLAConfig,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    query_length: int = 1,
    page_size: int = PAGE_SIZE,
) -> tuple[LayerAttention, ...]:
    """Backends that will serve the layers of a model with this config.

    Args:
        config: its ``attention_backend`` and attention implementation count.
        device: of the model. A CUDA device that this machine lacks is taken to be a Hopper.
        query_length: new tokens per sequence, over a cache that holds more than these.
    """
    device, name = torch.device(device), config.attention_backend
    expanded = config._attn_implementation or "sdpa"
    served = {}
    geometries = [constants.geometry for constants in config.attention_constants()]
    for geometry in geometries:
        if geometry in served:
            continue
        where = (page_size, dtype, device)
        backend, reason = find_over_cache(name, geometry, *where)
        batches, batch_reason = ATTENTION_BACKENDS.find(name, geometry, *where)
        short = absorbs_up_to(geometry)
        if backend is None or backend.attend is None:
            form = ("expanded", expanded, reason)
        elif is_absorbed(query_length, query_length, short):
            form = ("absorbed", backend.name, reason)
        elif (name is not None or config.attention_window is not None) and batches is not None:
            form = ("expanded", backend.name, reason)
        else:
            form = ("expanded", expanded, f"{query_length} new tokens; the absorbed form costs less for up to {short}")
        compiled = all(each is not None and each.compiled for each in (backend, batches))
        served[geometry] = (*form, batches, batch_reason, device, compiled, decodes_codes(geometry, *where))
    return tuple(
        LayerAttention(index, geometry, config.layer_attention_window(index)[0], *served[geometry])
        for index, geometry in enumerate(geometries)
    )


def widest_served(geometry: MLAGeometry, device: torch.device) -> int | None:
    """The largest ``kv_lora_rank`` up to a layer's own with which, all else being the same, kernels would serve it in
    bfloat16 in both ways of calling the model; None: its latent is not what they refuse."""
    where = (PAGE_SIZE, torch.bfloat16, device)
    served, refused_from = 0, geometry.kv_lora_rank // 8 + 1  # in eights
    while refused_from - served > 1:
        width = (served + refused_from) // 2
        layer = replace(geometry, kv_lora_rank=8 * width)
        found = find_over_cache(None, layer, *where)[0], ATTENTION_BACKENDS.find(None, layer, *where)[0]
        if all(backend is not None and backend.compiled for backend in found):
            served = width
        else:
            refused_from = width
    return 8 * served or None


def batch_backends(
    name: str | None,
    layers: Sequence[AttentionConstants],
    device: torch.device | str,
    dtype: torch.dtype,
    page_size: int,
) -> list[AttentionBackend]:
    """The backend of every layer's batches: the one called ``name``, or for None the best.

    Raises:
        ValueError: there is no backend of that name, or it refuses a layer, with the reason.

    Warns:
        UserWarning: on CUDA plain torch serves a layer, without having been named, with the reason.
    """
    geometries, device = [layer.geometry for layer in layers], torch.device(device)
    found = {each: ATTENTION_BACKENDS.find(name, each, page_size, dtype, device) for each in dict.fromkeys(geometries)}
    for index, geometry in enumerate(geometries):
        if found[geometry][0] is None:
            raise ValueError(f"layer {index}: {refused(name, geometry)}: {found[geometry][1]}")
    slow = [found[geometry] for geometry in geometries if found[geometry][1] and device.type == "cuda"]
    if slow:
        backend, why = slow[0]
        warnings.warn(
            f"{len(slow)} of {len(layers)} layers attend in plain torch, slowly ({backend.name}): {why}."
            f" attention_backend={backend.name!r} asks for that by name",
            stacklevel=3,
        )
    return [found[geometry][0] for geometry in geometries]


def describe(layers: Iterable[LayerAttention]) -> str:
    """One line: what serves the layers, how many of them where they differ, and why it is no kernel."""
    ways: dict[str, list[LayerAttention]] = {}
    for layer in layers:
        ways.setdefault(str(layer) + (f" ({layer.why})" if layer.why else ""), []).append(layer)
    several = len(ways) > 1
    return " | ".join(f"{len(group)} layers: {way}" if several else way for way, group in ways.items())
