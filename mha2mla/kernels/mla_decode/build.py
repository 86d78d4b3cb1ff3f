"""From a kernel choice to a TileLang function: what knows every kernel file over a 16-bit cache."""

from __future__ import annotations

from dataclasses import replace

from mha2mla.kernels.machine import Machine
from mha2mla.kernels.mla_decode.heads_on_m import make_heads_on_m
from mha2mla.kernels.mla_decode.latent_cluster import make_latent_cluster
from mha2mla.kernels.mla_decode.latent_portable import make_latent_portable
from mha2mla.kernels.mla_decode.latent_selection import LatentChoice
from mha2mla.kernels.mla_decode.latent_ws import make_latent_ws
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.mla_decode.swap_ab import make_swap_ab
from mha2mla.kernels.mla_decode.swap_ab_cluster import make_swap_ab_cluster
from mha2mla.kernels.mla_decode.swap_ab_ws import make_swap_ab_ws
from mha2mla.kernels.split_kv.choice import KernelChoice


def make_split(shape: DecodeShape, choice: KernelChoice, *, dtype: str | None = None, on_cpu: bool = False):
    """The TileLang function of ``choice`` (not compiled); ``dtype`` overrides the shape's, for the CPU target."""
    if choice.kernel == "swap_ab_ws":
        return make_swap_ab_ws(shape, choice)
    if choice.kernel == "swap_ab_cluster":
        return make_swap_ab_cluster(shape, choice)
    if choice.kernel == "heads_on_m":
        return make_heads_on_m(shape, choice)
    return make_swap_ab(replace(shape, dtype=dtype or shape.dtype), choice, Machine(on_cpu))


def make_latent_split(shape: DecodeShape, choice: LatentChoice, *, dtype: str | None = None, on_cpu: bool = False):
    """As :func:`make_split`, over a cache of the latent alone."""
    if choice.kernel == "latent_ws":
        return make_latent_ws(shape, choice)
    if choice.kernel == "latent_cluster":
        return make_latent_cluster(shape, choice)
    return make_latent_portable(replace(shape, dtype=dtype or shape.dtype), choice, Machine(on_cpu))
