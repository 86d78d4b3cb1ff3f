"""Attention of transformers' own models by the ops here: ``attn_implementation="mha2mla"``.

Registered by transformers' public interfaces for attention and for masks, so every family that uses these has it, in
``generate`` too: new tokens alone, and more than eight over a cache, by ``attention_varlen``; up to eight over a cache
by ``gqa_decode``, over the cache's own memory where it can be seen as pages (:func:`pages_of`), else over a copy. In a
ragged batch (:class:`PagedSource`) a layer's keys and values go to a :class:`~mha2mla.modeling.PagedCache`.

A mask is where each sequence's visible tokens begin and end among those of a layer's cache, [B, 1, 1, 2] int32: four
dimensions, by which transformers passes on what is prepared already. Windows are told to each layer by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from mha2mla.kernels import (
    MAX_DECODE_QUERY_LENGTH,
    attention_varlen,
    causal_attention,
    explain_attention_varlen,
    explain_causal_attention,
    explain_gqa_decode,
    gqa_decode,
    plan_gqa_decode,
)
from mha2mla.modeling.attention import refuse_gradients
from mha2mla.modeling.batch import SequenceBatch
from mha2mla.modeling.cache import are_side_by_side, visible_tokens
from mha2mla.modeling.captured import has_host_rope
from mha2mla.modeling.decoder import FusedDecoder, run_source_model
from mha2mla.modeling.model import MHA2MLAForCausalLM
from mha2mla.modeling.modeling_mha2mla import host_may_look
from mha2mla.modeling.paged_cache import BatchModel
from mha2mla.modeling.registry import AttentionConstants, GQAGeometry
from mha2mla.modeling.step import AttentionStep
from mha2mla.modeling.tensor_parallel import ranks_of

NAME = "mha2mla"
_PAGES = (64, 32, 16)  # tokens a page, the best first
_HOLES = "attention_mask hides tokens between visible ones; expected padding in front or behind, or attn_implementation"
_NO_GRADIENTS = f"attn_implementation {NAME!r} keeps no gradients; expected 'sdpa' or 'eager' for training"


def visible_spans(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """A mask for transformers: [B, 1, 1, 2] int32, the first visible token of each sequence among the
    ``kv_length`` that layers will be given, and the end of the new ones; None: all are visible, to the last one.

    Args:
        q_offset, kv_offset: tokens before the new ones, and before those that layers will be given.
        attention_mask: [B, T] bool, padding; others as transformers' mask functions have them.

    Raises:
        ValueError: a mask that is more than causal, with padding and a window: packed sequences, chunks, holes.
            (Where the host may not look, a hole is asserted by the device.)
    """
    chunks = getattr(config, "attention_chunk_size", None)
    if use_vmap or chunks is not None or (not allow_is_causal_skip and q_length > 1):
        what = f"attention_chunk_size={chunks}" if chunks is not None else "packed sequences, or a mask function"
        raise ValueError(
            f"attn_implementation is {NAME!r} and the mask has {what}; expected padding and windows at most"
        )
    stop = q_offset + q_length - kv_offset
    if attention_mask is None:
        if not isinstance(stop, Tensor) and stop == kv_length:
            return None
        starts = torch.zeros(batch_size, dtype=torch.int32, device=device)
    else:
        shown = visible_tokens(attention_mask, q_offset + q_length)
        if not host_may_look(attention_mask, q_length):
            torch._assert_async(are_side_by_side(shown), f"{_HOLES} 'sdpa'")
        elif not are_side_by_side(shown):
            raise ValueError(f"{_HOLES} 'sdpa'")
        starts = (shown.starts - kv_offset).clamp_min(0).to(torch.int32).expand(batch_size)
    stops = torch.as_tensor(stop, dtype=torch.int32, device=starts.device).expand_as(starts)
    return torch.stack((starts, stops), dim=-1)[:, None, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    mla_step: AttentionStep | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it, causal from the last visible key on.

    bfloat16 and float16 on CUDA run kernels, within the ops' limits; everything else plain torch.

    Args:
        module: the layer; its ``layer_idx`` counts with ``mla_step``.
        query: [B, H, S, d_k], rotated. key: [B, h_kv, T, d_k], rotated. value: [B, h_kv, T, d_v].
        attention_mask: of :func:`visible_spans`.
        scaling: on the scores; default d_k ** -0.5.
        sliding_window: each query sees the last so many tokens up to itself; None: by the layer's config.
        mla_step: of a ragged batch, whose N new tokens come as one sequence; their keys and values go to its cache.

    Returns:
        [B, S, H, d_v], and None: no weights are made. A backward pass through it raises ValueError.

    Raises:
        ValueError: what is not served, by name: dropout, soft-capping, sinks, attention weights, bidirectional
            attention, other masks.

    Warns:
        UserWarning: on CUDA plain torch attends, with the reason.
    """
    _refuse(module, dropout, is_causal, query.shape[2], others)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is None:  # some families leave it to the mask
        sliding_window = layer_window(module, getattr(module, "layer_idx", None))
    differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    with torch.no_grad():
        if mla_step is not None:
            out = _over_pages(module.layer_idx, query, key, value, scaling, sliding_window, mla_step)
        else:
            if query.is_cuda and not torch.compiler.is_compiling():
                heads = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
                warn_where_no_kernel_serves(*heads, query.dtype, query.device)
            starts, stops = _spans(attention_mask, query, key)
            decodes = query.shape[2] <= MAX_DECODE_QUERY_LENGTH and query.shape[2] < key.shape[2]
            call = _decode if decodes else _prefill
            out = call(query, key, value, starts, stops, scaling, sliding_window)
    return (refuse_gradients(out, _NO_GRADIENTS) if differentiable else out), None


@lru_cache
def warn_where_no_kernel_serves(
    heads: int, kv_heads: int, width: int, v_width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Warns once if plain torch attends a shape on a GPU, with the reason."""
    why = explain_gqa_decode(heads, kv_heads, width, v_width, _PAGES[0], dtype, device)
    why = why or explain_attention_varlen((width,), v_width, dtype, device)
    if why is not None:
        warnings.warn(f"attn_implementation {NAME!r} attends in plain torch, slowly: {why}", stacklevel=3)


def layer_window(attention: nn.Module, layer_idx: int | None) -> int | None:
    """Tokens that a query sees in a layer of transformers' decoders, by its config; None: all."""
    config = getattr(attention, "config", None)
    types = getattr(config, "layer_types", None)
    # A key that the family does not know is kept by configs too, and means nothing.
    slides = hasattr(type(config), "sliding_window") if types is None else types[layer_idx] == "sliding_attention"
    return config.sliding_window if slides else None


def _refuse(module: nn.Module, dropout: float, is_causal: bool | None, new_tokens: int, others: dict[str, Any]) -> None:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    asked = {
        "dropout": dropout or None,
        "is_causal": None if causal or new_tokens == 1 else False,
        **{name: others.get(name) for name in ("softcap", "s_aux", "position_bias", "cache", "head_mask")},
        "output_attentions": others.get("output_attentions") or None,
    }
    for name, given in asked.items():
        if given is not None:
            shown = given if isinstance(given, (bool, int, float)) else "given"
            raise ValueError(f"{name} is {shown} and attn_implementation {NAME!r}; it serves none: expected 'eager'")


def _spans(attention_mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor]:
    """First visible token [B] and end [B] of each sequence."""
    if attention_mask is None:
        batch, _, tokens, _ = key.shape
        return None, torch.full((batch,), tokens, dtype=torch.int32, device=key.device)
    if attention_mask.shape != (query.shape[0], 1, 1, 2) or attention_mask.dtype != torch.int32:
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} {tuple(attention_mask.shape)} and attn_implementation {NAME!r};"
            " expected [B, T], ones and padding, or None"
        )
    starts, stops = attention_mask[:, 0, 0].to(key.device).T.contiguous()
    return starts, stops


def _over_pages(
    layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, step: AttentionStep
) -> Tensor:
    """[1, N, H, d_v] of a ragged batch."""
    constants = step.layers[layer_idx].constants
    for name, given, planned in (
        ("sliding_window", window, constants.window),
        ("scaling", float(scaling), constants.softmax_scale),
    ):
        if given != planned:
            raise ValueError(f"{name} is {given} in layer {layer_idx}; expected {planned}, what its cache was made for")
    tensors = {name: x.transpose(1, 2)[0] for name, x in (("query", query), ("key", key), ("value", value))}
    # RoPE has been: frequencies of zero leave what they turn as it is.
    tensors["inv_freq"] = query.new_zeros(1, query.shape[-1] // 2, dtype=torch.float32)
    return step.run(layer_idx, tensors)[1][None]


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, stops: Tensor, scaling: float, window: int | None
) -> Tensor:
    """All sequences one behind the other. Tokens before the first visible one, and behind the last, are sequences of
    their own: their results are not read, and nothing is gathered, or counted on the host."""
    (batch, _, new_tokens, _), tokens = query.shape, key.shape[2]
    row = torch.arange(batch + 1, dtype=torch.int32, device=key.device)
    cu_seqlens = (row * new_tokens, row * tokens)
    if starts is not None:
        first = (starts - stops + new_tokens).clamp(0, new_tokens)  # the last new token is the last visible one
        queries, keys = (first, torch.full_like(first, new_tokens)), (starts, stops)
        cu_seqlens = [_bounds(begins, *inside) for begins, inside in zip(cu_seqlens, (queries, keys), strict=True)]
    out = attention_varlen(
        *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)),
        *cu_seqlens,
        new_tokens,
        softmax_scale=scaling,
        window=window,
    )
    return out.unflatten(0, (batch, new_tokens))


def _bounds(begins: Tensor, *inside: Tensor) -> Tensor:
    """[3 B + 1] int32 from where each row begins [B + 1], and two boundaries in it [B]."""
    rows = begins[:-1, None] + torch.stack((torch.zeros_like(inside[0]), *inside), dim=1)
    return torch.cat((rows.flatten(), begins[-1:]))


def _decode(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, stops: Tensor, scaling: float, window: int | None
) -> Tensor:
    paged = pages_of(key, value)
    if paged is None:  # a growing cache of transformers, which itself copies all of it in every step
        padded = [F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, -x.shape[2] % _PAGES[0])) for x in (key, value)]
        paged = pages_of(*(x.contiguous().transpose(1, 2) for x in padded))
    keys, values, block_table = paged
    query = query.transpose(1, 2)
    plan = None
    if window is not None:
        plan = plan_gqa_decode(
            query, keys, block_table, stops, v_head_dim=value.shape[-1], cache_starts=starts, window=window
        )
    return gqa_decode(query, keys, values, block_table, stops, softmax_scale=scaling, cache_starts=starts, plan=plan)


def pages_of(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Keys and values [B, h_kv, T, d] seen as pages [P, page, h_kv, d] over their own memory, with a block table
    [B, T / page] int32; None where they do not lie so.

    A page is 64, 32 or 16 tokens; it fits if T, and the way from one sequence to the next, are multiples of it. (Where
    heads lie one behind the other, as in transformers' static caches, a page of all heads is a strided view.)
    """
    batch, _, tokens, _ = key.shape
    apart = [x.stride(0) / x.stride(2) if batch > 1 else 0 for x in (key, value)]  # in tokens
    if apart[0] != apart[1] or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    page = next((size for size in _PAGES if not (tokens % size or apart[0] % size)), None)
    if page is None:
        return None
    step, count = int(apart[0]) // page, tokens // page
    pages = [
        x.as_strided(
            ((batch - 1) * step + count, page, x.shape[1], x.shape[3]),
            (page * x.stride(2), x.stride(2), x.stride(1), 1),
        )
        for x in (key, value)
    ]
    row = torch.arange(count, dtype=torch.int32, device=key.device)
    return *pages, row + step * torch.arange(batch, dtype=torch.int32, device=key.device)[:, None]


def explain_window_attention(
    dtype: torch.dtype, device: torch.device, queries: int, keys: int, heads: int, d_qk: int, d_v: int
) -> str | None:
    """Why :func:`window_attention` has no kernels for so many queries and keys of H heads, or None."""
    if not 1 < queries == keys:
        return f"there are {queries} queries and {keys} keys; it takes as many, and more than one"
    return explain_causal_attention(queries, heads, (d_qk, d_v), dtype, device)


def window_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention of query and key [B, H, S, d_qk] and value [B, H, S, d_v]: [B, S, H, d_v], contiguous.

    Differentiable, for what trains through converted layers.

    Args:
        scaling: of the scores; None for d_qk ** -0.5.
    """
    operands = (x.transpose(1, 2) for x in (query, key, value))
    return causal_attention(*operands, softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling)


def register() -> None:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible_spans)


class PagedSource(BatchModel):
    """A causal language model of transformers, with ``paged_cache`` and ``forward_batch`` of a converted one.

    The model stays what it is, and computes all but attention by its own modules, rotary positions included, or by the
    fewer kernels of ``decoder.py`` where these are the same. Its layers hand queries, keys and values to a backend of
    ``GQAGeometry`` (``gqa_paged``, ``gqa_reference``).

    Args:
        model: loaded with ``attn_implementation="mha2mla"``, in eval mode.
        attention_backend: name of what serves all layers; None: the best one.

    Attributes:
        constants: per layer, what its attention is told.

    Raises:
        ValueError: another attention implementation; layers that are not the family's ordinary attention; RoPE whose
            table depends on a sequence's length (longrope, dynamic NTK).
    """

    def __init__(self, model: PreTrainedModel, attention_backend: str | None = None) -> None:
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"model has attn_implementation {model.config._attn_implementation!r}; expected {NAME!r}, by"
                " from_pretrained or model.set_attn_implementation"
            )
        layers = getattr(model.get_decoder(), "layers", ())
        if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
            raise ValueError(f"model is a {type(model).__name__}; expected one whose layers all have a self_attn")
        if has_host_rope(model.get_decoder().config):
            raise ValueError(
                "model has rope_type 'longrope' or 'dynamic': transformers takes one table for all sequences of a"
                " step, by the longest; expected a converted model, or generate() of transformers"
            )
        self.model, self.config, self._backend_name = model, model.config, attention_backend
        self._decoder: FusedDecoder | None = None
        self.constants = tuple(_constants(layer.self_attn, index) for index, layer in enumerate(layers))

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def _prepare_decoder(self) -> None:
        self._decoder = FusedDecoder.prepare_source(self.model)

    def _batch_layers(
        self, rotary_key_cache: str | None = None
    ) -> tuple[str | None, Sequence[AttentionConstants], torch.device]:
        if rotary_key_cache not in (None, "none", "auto"):
            raise ValueError(
                f"rotary_key_cache is {rotary_key_cache!r}; expected None for a source, whose keys are all cached"
            )
        return self._backend_name, self.constants, self.device

    def _batch_logits(self, batch: SequenceBatch, arguments: dict[str, Any], kept: Tensor | None) -> Tensor:
        hidden = run_source_model(self._decoder, arguments["input_ids"], arguments["mla_step"])
        if hidden is not None:
            return self.model.lm_head(hidden[0] if kept is None else hidden[0].index_select(0, kept))
        return self.model(**arguments, logits_to_keep=0 if kept is None else kept).logits[0]


def paged_model(model: PreTrainedModel) -> MHA2MLAForCausalLM | PagedSource:
    """A model with ``paged_cache`` and ``forward_batch``: itself if converted, a source as :class:`PagedSource`."""
    return model if isinstance(model, MHA2MLAForCausalLM) else PagedSource(model)


def _constants(attention: nn.Module, layer_idx: int) -> AttentionConstants:
    """Constants of a layer of transformers' decoders, whose configs and attention modules share these names;
    under tensor parallelism of a rank's heads."""
    config, width = attention.config, attention.head_dim
    ranks = ranks_of(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks or kv_heads % ranks:
        raise ValueError(f"tp_size is {ranks}; expected a divisor of {heads} query and {kv_heads} key-value heads")
    geometry = GQAGeometry(heads // ranks, kv_heads // ranks, width, width)
    return AttentionConstants(geometry, float(attention.scaling), window=layer_window(attention, layer_idx))
