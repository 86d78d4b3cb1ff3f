"""A source model over quantised keys and values, in one forward pass that is right token by token.

Each query sees the cache as it would be when its token is decoded: older tokens as codes give them back, the newest
ones in 16 bits. Codes of a token or of a group of tokens never change, so one pass over a window computes both forms
of every key and value and lets each query choose.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mha2mla.eval.group_quantizer import GroupQuantizer

QUANTIZED_KV = "mha2mla_quantized_kv"  # attn_implementation
_QUERIES_AT_ONCE = 512
_GROUPINGS = ("channel", "token")


@dataclass(frozen=True)
class KVCodes:
    """A KV cache of integer codes, as KIVI (arXiv 2402.02750) has it.

    Args:
        bits: of a code of a key or a value.
        keys: ``"channel"``: keys before RoPE, in groups of ``group`` tokens of one channel; ``"token"``: keys after
            RoPE, in groups of ``group`` channels of one token and head, as values always are.
        group: numbers that share a scale and an offset, 16 bits each.
        residual: newest tokens that stay in 16 bits, at least; by channel up to ``group`` − 1 more, which wait for
            their group.

    Raises:
        ValueError: a value outside these.
    """

    bits: int
    keys: Literal["channel", "token"] = "channel"
    group: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        if self.keys not in _GROUPINGS:
            raise ValueError(f"keys is {self.keys!r}; expected one of {_GROUPINGS}")
        if self.residual < 0:
            raise ValueError(f"residual is {self.residual}; expected at least 0")
        GroupQuantizer(self.bits, self.group)

    @property
    def name(self) -> str:
        return f"source, KV {self.bits} bits, keys by {self.keys}"

    def coded_tokens(self, length: Any) -> Any:
        """How many of the first tokens of a cache of ``length`` (an int or a tensor of them) are codes."""
        step = self.group if self.keys == "channel" else 1
        older = length - self.residual
        older = older.clamp(min=0) if isinstance(older, Tensor) else max(older, 0)
        return older // step * step

    def share(self, length: int, head_dim: int) -> float:
        """Bytes of a cache of ``length`` tokens over those of one in 16 bits: codes, scales, offsets, newest tokens."""
        quantizer = GroupQuantizer(self.bits, self.group)
        values = quantizer.bits_per_row(head_dim) / head_dim
        keys = quantizer.bits_per_row(self.group) / self.group if self.keys == "channel" else values
        coded = self.coded_tokens(length)
        return (coded * (keys + values) / 32 + length - coded) / length


class QuantizedKV:
    """A source model whose attention reads a cache of codes.

    Args:
        model: causal language model of transformers whose attention is dispatched by ``AttentionInterface``.
        codes: of its cache.
    """

    def __init__(self, model: nn.Module, codes: KVCodes) -> None:
        self.model, self.codes = model, codes
        self._quantizer = GroupQuantizer(codes.bits, codes.group)
        self._cos_sin: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def name(self) -> str:
        return self.codes.name

    def share(self, length: int) -> float:
        """Bytes of a cache of ``length`` tokens over those of the source's in 16 bits."""
        config = self.model.config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return self.codes.share(length, head_dim)

    def run(self, module: nn.Module, ids: Tensor) -> Any:
        """``module``, the model or its base model, over windows of ids [B, L] without padding.

        Raises:
            ValueError: the family's attention cannot be served (see :meth:`attend`).
        """
        with self._attending():
            return module(input_ids=ids, use_cache=False, quantized_kv=self)

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """While open, the model's attention asks this object, which learns each layer's cos and sin."""
        usual = self.model.config._attn_implementation
        with ExitStack() as stack:
            if self.codes.keys == "channel":
                for layer in self.model.base_model.layers:
                    handle = layer.self_attn.register_forward_pre_hook(self._see_cos_sin, with_kwargs=True)
                    stack.callback(handle.remove)
            stack.callback(self._cos_sin.clear)
            self.model.set_attn_implementation(QUANTIZED_KV)
            stack.callback(self.model.set_attn_implementation, usual)
            yield

    def _see_cos_sin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._cos_sin[module] = kwargs["position_embeddings"]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """Attention of a whole window: [B, L, H, d_v].

        Args:
            module: the layer's attention.
            query: [B, H, L, d_h] after RoPE; key [B, h_kv, L, d_h] after RoPE; value [B, h_kv, L, d_v].
            mask: bool [B, 1, L, L], True where a query sees; None: all up to itself.

        Raises:
            ValueError: queries and keys are not of the same tokens; by channel, the family has no RoPE that its own
                function can undo.
        """
        batch, heads, length, _ = query.shape
        kv_heads = key.shape[1]
        if key.shape[2] != length:
            raise ValueError(f"key has {key.shape[2]} tokens; expected the {length} of the queries, a whole window")
        coded_key, coded_value = self._coded(module, key, value)
        value_error = value - coded_value  # which a query adds for the tokens that it sees in 16 bits
        query = query.unflatten(1, (kv_heads, -1))
        out = query.new_empty(batch, kv_heads, heads // kv_heads, length, value.shape[-1])
        for start in range(0, length, _QUERIES_AT_ONCE):
            stop = min(start + _QUERIES_AT_ONCE, length)
            first = self.codes.coded_tokens(start + 1)  # tokens before it are codes to all of these queries
            queries = query[:, :, :, start:stop]
            token = torch.arange(stop, device=query.device)
            length_seen = torch.arange(start + 1, stop + 1, device=query.device)[:, None]
            is_exact = token[first:] >= self.codes.coded_tokens(length_seen)
            scores = _by_kv_head(queries, coded_key[:, :, :stop].mT)
            exact = _by_kv_head(queries, key[:, :, first:stop].mT)
            scores[..., first:] = torch.where(is_exact, exact, scores[..., first:])
            scores = scores * scaling
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            seen = token < length_seen if mask is None else mask[:, :, None, start:stop, :stop]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            result = _by_kv_head(weights, coded_value[:, :, :stop])
            out[:, :, :, start:stop] = result + _by_kv_head(
                weights[..., first:] * is_exact, value_error[:, :, first:stop]
            )
        return out.flatten(1, 2).transpose(1, 2)

    def _coded(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as their codes give them back; by channel, keys of whole groups of tokens only."""
        if self.codes.keys == "token":
            return self._quantizer.round(key), self._quantizer.round(value)
        whole = key.shape[2] // self.codes.group * self.codes.group
        if whole == 0:
            return key, self._quantizer.round(value)
        cos, sin = self._cos_sin[module]
        squares = cos.square() + sin.square()  # of the factor of YaRN and longrope
        plain = _rotate(module, key, cos / squares, -sin / squares)[:, :, :whole]
        plain = torch.cat((self._quantizer.round(plain.mT).mT, key[:, :, whole:]), 2)
        return _rotate(module, plain, cos, sin), self._quantizer.round(value)


def _by_kv_head(x: Tensor, of_kv_heads: Tensor) -> Tensor:
    """x [B, h_kv, n, S, a] times [B, h_kv, a, b], without repeating the latter for the n heads."""
    return (x.flatten(2, 3) @ of_kv_heads).unflatten(2, x.shape[2:4])


def _rotate(module: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, L, d_h] turned by the family's own RoPE; dims that it leaves alone stay.

    Raises:
        ValueError: its module has no ``apply_rotary_pos_emb``.
    """
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise ValueError(f"model has {type(module).__name__}, without apply_rotary_pos_emb; expected keys='token'")
    turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    return torch.cat((apply(turned, turned, cos, sin)[1], rest), -1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    quantized_kv: QuantizedKV | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What ``attn_implementation`` of this name calls; only :meth:`QuantizedKV.run` sets it."""
    if quantized_kv is None or s_aux is not None:
        what = "attention sinks" if s_aux is not None else "layers that keep keyword arguments from attention"
        raise ValueError(f"model has {what}, which no quantised KV cache is measured for; expected a Llama-like model")
    return quantized_kv.attend(module, query, key, value, attention_mask, scaling, softcap), None


AttentionInterface.register(QUANTIZED_KV, _attention)
AttentionMaskInterface.register(QUANTIZED_KV, sdpa_mask)
