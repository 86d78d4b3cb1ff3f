"""Formulas of ``mha2mla plan``: memory and step time of a model on a GPU, decode kernel, cost of a conversion.

Times are bounds by bytes and products; docs/notes/sizing.md says how far measured points lie from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mha2mla.checkpoints import did_you_mean
from mha2mla.conversion.families import SourceSpec
from mha2mla.geometry import MLAGeometry, code_bytes
from mha2mla.kernels.mixed_attention.layout import form_costs
from mha2mla.kernels.mla_decode import codes_selection
from mha2mla.kernels.mla_decode.selection import DecodeShape, refusal, select_kernel
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.config import expert_share, touched_experts
from mha2mla.modeling.tensor_parallel import HeadShard

ITEMSIZE = 2  # bytes: weights and caches are bfloat16
MEMORY_SHARE = 0.9  # for weights and cache, as eval latency takes
READ_SHARE = 4.28 / 4.8  # share of the datasheet's rate read by attention kernels on an H200 (docs/notes/step.md)
PRODUCT_SHARE = 800 / 989  # share of the datasheet's dense bfloat16 rate, on a Hopper
NOT_MEASURED = "not measured"
# 23 steps of random 7B and 8B models in CUDA graphs on one H200, over what step_seconds predicts: least and most
# (benchmarks/results/h200-step.json and h200-step-second.json).
MEASURED_OVER_PREDICTED = (1.07, 1.35)
# Decode kernels that make rotary keys, but for latent_portable (h200-latent-table.json, h200-latent-wide.json).
ATTENTION_OVER_PREDICTED = (0.96, 1.90)
# Attention over codes of 4 bits with computed keys, over the same prediction of 16 bits (h200-codes-decode.json).
CODES_OVER_PREDICTED = (1.32, 2.52)


@dataclass(frozen=True)
class GPU:
    """One GPU by its datasheet: ``memory`` bytes, ``bandwidth`` bytes/s, ``products`` dense bfloat16 FLOP/s."""

    name: str
    memory: int
    bandwidth: float
    products: float
    capability: int

    @property
    def read_rate(self) -> float:
        return self.bandwidth * READ_SHARE

    @property
    def product_rate(self) -> float:
        return self.products * PRODUCT_SHARE


# Memory in MiB as nvidia-smi says it, TB/s, TFLOP/s, compute capability.
_DATASHEETS = {
    "h200-141gb": (143771, 4.8, 989, 90),
    "h100-80gb": (81559, 3.35, 989, 90),
    "h100-pcie-80gb": (81559, 2.0, 756, 90),
    "a100-80gb": (81920, 2.039, 312, 80),
    "a100-40gb": (40960, 1.555, 312, 80),
    "l40s-48gb": (46068, 0.864, 362, 89),
    "rtx-4090-24gb": (24564, 1.008, 165, 89),
}
GPUS: Mapping[str, GPU] = MappingProxyType(
    {
        name: GPU(name, memory << 20, bandwidth * 1e12, products * 1e12, capability)
        for name, (memory, bandwidth, products, capability) in _DATASHEETS.items()
    }
)
DEFAULT_GPU = "h200-141gb"
ROTARY_WIDTHS = (64, 128)  # d_r that conversions to the layout latent choose between

# Perplexity relative to the source model (docs/quality.md): text and windows, and figures by preset, layout and ratio.
MEASURED_LOSSES: Mapping[str, tuple[str, Mapping[tuple[str, str], Mapping[float, str]]]] = MappingProxyType(
    {
        "SmolLM2-135M-Instruct": (
            "worst text, 512 / 8192",
            {
                ("latent", "latent"): {0.5: "1.028 / 1.040", 0.3125: "1.121 / 1.146", 0.1875: "1.388 / 1.457"},
                ("shared", "shared"): {0.5: "1.059 / 1.081", 0.3125: "1.226 / 1.280", 0.1875: "1.671 / 1.835"},
                ("per-group", "per-group"): {0.5: "1.091 / 1.122", 0.3125: "1.339 / 1.467"},
                ("quick", "latent"): {0.5: "1.075 / 1.088"},
                ("quick", "shared"): {0.5: "1.242 / 1.302"},
            },
        ),
        "Qwen2.5-Coder-0.5B-Instruct": (
            "worst text, 512 / 8192",
            {("latent", "latent"): {0.5: "1.247 / 1.298", 0.3125: "1.867 / 1.866", 0.1875: "2.984 / 2.724"}},
        ),
    }
)
# The same of ranks and bits by layer in the layout latent, preset quick, by model (h200-row-codes.json).
AUTO_LOSSES: Mapping[str, Mapping[float, str]] = MappingProxyType(
    {
        "SmolLM2-135M-Instruct": {
            0.5: "1.001 / 1.004", 0.3125: "1.005 / 1.006", 0.25: "1.007 / 1.007", 0.1875: "1.010 / 1.014",
            0.16: "1.018 / 1.025", 0.125: "1.040 / 1.051", 0.0625: "1.235 / 1.302",
        },
        "Qwen2.5-Coder-0.5B-Instruct": {
            0.5: "1.001 / 1.001", 0.3125: "1.009 / 1.017", 0.25: "1.005 / 1.016", 0.1875: "1.037 / 1.056",
            0.16: "1.048 / 1.067", 0.125: "1.142 / 1.153", 0.0625: "2.038 / 2.009",
        },
    }
)  # fmt: skip
# The same of gradient steps and healing, in 16 bits on real text (docs/healing.md), by model, latent.bits and ratio.
HEALED_LOSSES: Mapping[str, Mapping[tuple[int | str, float], str]] = MappingProxyType(
    {
        "SmolLM2-135M-Instruct": {
            (16, 0.5): "1.006 / 1.017", (16, 0.3125): "1.031 / 1.046", (16, 0.1875): "1.101 / 1.115",
            ("auto", 0.125): "1.016 / 1.031", ("auto", 0.0625): "1.086 / 1.125",
        },
        "Qwen2.5-Coder-0.5B-Instruct": {("auto", 0.125): "1.066 / 1.080"},
    }
)  # fmt: skip

# Bits of an element that "auto" chose by cache_ratio, the mean over layers and over those two models.
_MEAN_BITS = ((0.0625, 2.1), (0.125, 3.1), (0.16, 3.5), (0.1875, 3.9), (0.25, 4.4), (0.3125, 5.48), (0.5, 8.0))


def mean_bits(cache_ratio: float) -> float:
    """Bits of an element that "auto" may be expected to choose, between the shares on record by straight lines."""
    for (below, low), (above, high) in pairwise(_MEAN_BITS):
        if cache_ratio < above:
            return low + (high - low) * max(0.0, (cache_ratio - below) / (above - below))
    return _MEAN_BITS[-1][1]


@dataclass(frozen=True)
class ConversionPoint:
    """A measured conversion on one H200: parameters of a layer, seconds by layer, peak GiB of the GPU and the host."""

    layer_parameters: float
    seconds: float
    gpu_gib: float | None = None
    host_gib: float | None = None


# The smallest and the largest model that were timed, without gradient steps and with 2200 a layer: docs/quality.md
# (SmolLM2-135M, text written included), docs/notes/resume-and-scale.md (shapes of Llama-2-7B and Llama-3-8B, without).
CONVERSIONS: Mapping[bool, tuple[ConversionPoint, ConversionPoint]] = MappingProxyType(
    {
        False: (ConversionPoint(3.54e6, 30.3 / 30), ConversionPoint(202.4e6, 264.6 / 32, 5.2, 4.4)),
        True: (ConversionPoint(3.54e6, 567.4 / 30), ConversionPoint(218.1e6, 5754.4 / 32, 63.2, 8.4)),
    }
)


@dataclass(frozen=True)
class Footprint:
    """Bytes and products of a model on each GPU of a tensor-parallel group.

    Attributes:
        parameters: of the whole model. layer_parameters: mean of its layers.
        weights: bytes held. read: of them by a step, without routed experts. experts: bytes of routed experts.
        expert_share: of the routed experts that a token goes to.
        token_bytes: cache of a token and layer.
        attention: FLOP of a query token per cached token and layer. keys: FLOP per cached token and layer that make its
            rotary key. pair: FLOP of a prompt's token per token that it sees and layer.
        windows: of each layer, visible tokens; None: all. keeps_all: the cache keeps tokens outside of the window.
    """

    parameters: int
    layer_parameters: float
    weights: int
    read: int
    experts: int
    expert_share: float
    token_bytes: int
    attention: int
    keys: int
    pair: int
    windows: tuple[int | None, ...]
    keeps_all: bool

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes in all layers, while every layer keeps all tokens."""
        return self.token_bytes * len(self.windows)

    def cache_bytes(self, context: int) -> int:
        """Cache of one sequence in whole pages."""
        tokens = -(-context // PAGE_SIZE) * PAGE_SIZE
        return self.token_bytes * (tokens * len(self.windows) if self.keeps_all else self._visible(tokens))

    def _visible(self, context: int) -> int:
        return sum(context if window is None else min(context, window) for window in self.windows)

    def step_seconds(self, gpu: GPU, batch: int, context: int) -> float:
        """Time of a decode step that only reads and multiplies: no gaps, no norms, no communication.

        Weights are read once, or multiplied where that takes longer.
        """
        touched = touched_experts(self.expert_share, batch)
        products = (self.read + self.expert_share * self.experts) / ITEMSIZE * 2 * batch
        weights = max((self.read + touched * self.experts) / gpu.read_rate, products / gpu.product_rate)
        return weights + self.attention_seconds(gpu, batch, context)

    def attention_seconds(self, gpu: GPU, batch: int, context: int) -> float:
        """The part of a step over the cache: reading it, or products of queries where they take longer.

        Products that make rotary keys from the latent are added: kernels do not hide them behind reading.
        """
        tokens = batch * self._visible(context)
        reading = max(tokens * self.token_bytes / gpu.read_rate, tokens * self.attention / gpu.product_rate)
        return reading + tokens * self.keys / gpu.product_rate

    def prompt_flops(self, length: int) -> float:
        """FLOP of the layers for a prompt: of weights, of which routed experts in part, and of attention."""
        idle = (1 - self.expert_share) * self.experts / ITEMSIZE
        weights = 2 * length * (self.layer_parameters * len(self.windows) - idle)
        seen = [length if window is None else min(length, window) for window in self.windows]
        return weights + self.pair * sum(most * length - most * (most - 1) / 2 for most in seen)

    def room(self, gpu: GPU) -> float:
        return MEMORY_SHARE * gpu.memory - self.weights

    def largest_batch(self, gpu: GPU, context: int) -> int:
        """Sequences of ``context`` tokens that fit; 0 where not one does."""
        return max(0, int(self.room(gpu) // self.cache_bytes(context)))

    def largest_context(self, gpu: GPU) -> int:
        """Tokens of one sequence that fit, in whole pages, were there no window."""
        return max(0, int(self.room(gpu) // (self.cache_bytes_per_token * PAGE_SIZE))) * PAGE_SIZE


def footprint(config: PreTrainedConfig, geometry: MLAGeometry | None, spec: SourceSpec, tp: int = 1) -> Footprint:
    """Numbers that a model of ``config`` holds and reads on each of ``tp`` GPUs, in bfloat16.

    Args:
        config: of the source, or of what it is converted to.
        geometry: of a converted layer on one GPU; None: the source's.
        tp: ranks that split heads and weights. Embeddings, norms and latents, with what encodes them, are replicated.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: ITEMSIZE * parameter.numel() for name, parameter in model.named_parameters()}
    embeddings = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embeddings
    looked_up = ITEMSIZE * embeddings.numel()
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    dense = ITEMSIZE * sum(
        _rank_numel(name, parameter, config, geometry is not None, spec, tp)
        for name, parameter in model.named_parameters()
        if ".experts." not in name and parameter is not embeddings
    )
    if geometry is None:
        token = ITEMSIZE * 2 * -(-spec.num_key_value_heads // tp) * spec.head_dim
        attention, keys = 4 * spec.num_attention_heads // tp * spec.head_dim, 0
        pair = attention
    else:
        token = geometry.cache_bytes_per_token(ITEMSIZE)
        keys = 0 if geometry.has_rope_cache else 2 * geometry.kv_lora_rank * geometry.qk_rope_head_dim
        attention = geometry.decode_flops_per_token() - keys
        pair = form_costs(geometry)["expanded"].pair
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    return Footprint(
        parameters=sum(sizes.values()) // ITEMSIZE,
        layer_parameters=layers / ITEMSIZE / spec.num_layers,
        weights=looked_up + dense + experts // tp,
        read=dense + (looked_up if tied else 0),
        experts=experts // tp,
        expert_share=expert_share(config) if experts else 0.0,
        token_bytes=token,
        attention=attention,
        keys=keys,
        pair=pair,
        windows=spec.sliding_windows,
        keeps_all=geometry is not None,
    )


def _rank_numel(
    name: str, parameter: Tensor, config: PreTrainedConfig, is_converted: bool, spec: SourceSpec, tp: int
) -> int:
    """Elements of a parameter on each of ``tp`` ranks."""
    attention, numel = name.partition(".self_attn.")[2], parameter.numel()
    if is_converted and attention and not attention.startswith(("q_proj.", "o_proj.")):
        layer = int(name.partition(".layers.")[2].partition(".")[0])
        return HeadShard.of(config.layer_geometry(layer), 0, tp).part(attention, parameter).numel()
    if "norm." in name:
        return numel
    if attention.startswith(("k_proj.", "v_proj.")):  # a rank has one head at least
        return numel // spec.num_key_value_heads * -(-spec.num_key_value_heads // tp)
    return numel // tp


def steps_by_rotary_width(
    model: Footprint, geometry: MLAGeometry, spec: SourceSpec, gpu: GPU, batch: int, context: int
) -> dict[int, float]:
    """Seconds of a decode step by rotary width: the geometry's own, and those of :data:`ROTARY_WIDTHS`.

    Computed rotary keys cost d_r d_c products for each cached token. Weights, of which d_r changes little, stay the
    model's. {} where keys are cached, or the source has no width to choose.
    """
    widths = {geometry.qk_rope_head_dim, *ROTARY_WIDTHS} if not geometry.has_rope_cache else set()
    found = {}
    for width in sorted(width for width in widths if width <= spec.num_key_value_heads * spec.head_dim):
        other = replace(geometry, qk_rope_head_dim=width)
        keys = 2 * other.kv_lora_rank * width
        layers = replace(model, attention=other.decode_flops_per_token() - keys, keys=keys)
        found[width] = layers.step_seconds(gpu, batch, context)
    return found if len(found) > 1 else {}


def decode_kernel(geometry: MLAGeometry, capability: int, *, codes: bool = False) -> tuple[str | None, str | None]:
    """Kernel that decodes a layer on a GPU of this compute capability (90: Hopper), or None and the limit exceeded.

    Where none reads the integer codes of ``geometry``, it is the kernel over a copy of them in 16 bits.

    Args:
        codes: the latent is cached in 8 bits (e4m3).
    """
    shape, cache = DecodeShape.of(geometry, PAGE_SIZE, "bfloat16"), {"has_rope_cache": geometry.has_rope_cache}
    if geometry.has_codes:
        row = code_bytes(geometry.kv_lora_rank, geometry.latent_bits)
        coded = codes_selection.CodedShape(*astuple(shape), row)
        with suppress(ValueError):  # no kernel fits
            if not codes_selection.refusal(coded, **cache):
                return codes_selection.select_kernel(coded, capability, **cache).kernel, None
    if why := refusal(shape, codes=codes, **cache):
        return None, why
    try:
        return select_kernel(shape, capability, codes=codes, **cache).kernel, None
    except ValueError as error:
        return None, str(error)


def conversion_cost(layer_parameters: float, layers: int, *, fitted: bool) -> dict[str, float]:
    """Minutes and peak memory (GiB) of a conversion on one H200.

    Times lie on the line through the two measured points. Memory is the larger point's, scaled by parameters of a
    layer where the layer is larger.

    Args:
        fitted: with the gradient steps of the preset.
    """
    small, large = CONVERSIONS[fitted]
    slope = (large.seconds - small.seconds) / (large.layer_parameters - small.layer_parameters)
    scale = max(1.0, layer_parameters / large.layer_parameters)
    return {
        "minutes": layers / 60 * (small.seconds + slope * (layer_parameters - small.layer_parameters)),
        "gpu_gib": large.gpu_gib * scale,
        "host_gib": large.host_gib * scale,
    }


def find_gpu(name: str | None) -> tuple[GPU, str]:
    """GPU by name, or this machine's first one, and a note on how it was chosen.

    Raises:
        ValueError: the name is unknown, or this machine's GPU is.
    """
    if name is not None:
        if name not in GPUS:
            raise ValueError(f"gpu is {name!r:.80}; expected one of {', '.join(GPUS)}{did_you_mean(name, GPUS)}")
        return GPUS[name], "as named"
    if not torch.cuda.is_available():
        return GPUS[DEFAULT_GPU], "this machine has no GPU; --gpu names another"
    found = torch.cuda.get_device_properties(0)
    gpu = recognize_gpu(found.name, found.total_memory)
    if gpu is None:
        raise ValueError(f"gpu is not given and this machine's is {found.name!r}; expected one of {', '.join(GPUS)}")
    return gpu, f"this machine's {found.name}"


def recognize_gpu(name: str, memory: int) -> GPU | None:
    """GPU that a driver's ``name`` and bytes of ``memory`` mean; None: not in :data:`GPUS`."""
    words = name.lower().replace("-", " ").split()
    matching = [
        gpu
        for gpu in GPUS.values()
        if set(gpu.name.split("-")[:-1]) <= set(words) and abs(memory - gpu.memory) < gpu.memory / 8
    ]
    return max(matching, key=lambda gpu: gpu.name.count("-"), default=None)
