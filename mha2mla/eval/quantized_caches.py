"""Models over quantised caches, in one forward pass that is right token by token.

Source (:class:`QuantizedKV`): each query sees the cache as it would be when its token is decoded: older tokens as codes
give them back, the newest ones in 16 bits. Codes of a token or of a group of tokens never change, so one pass over a
window computes both forms of every key and value and lets each query choose.

Converted model (:class:`QuantizedLatent`, :class:`KeptKeys`): a row is quantised by itself when it is appended, and
attention reads the codes of its own call's tokens too, so a forward pass over a window reads what decoding token by
token reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mha2mla.conversion.latent.basis import BasisRule, LatentBasis, LatentStatistics, LatentTap
from mha2mla.conversion.predictions import Metric, Predictions, kl_divergence, run_without_cache
from mha2mla.kernels import RowQuantizer
from mha2mla.modeling import LatentCache
from mha2mla.modeling.config import cache_bytes, cached_tokens

QUANTIZED_KV = "mha2mla_quantized_kv"  # attn_implementation
_QUERIES_AT_ONCE = 512
_GROUPINGS = ("channel", "token")


class ComparedCache:
    """A model with its own cache, run over windows of a text: of 16 bits, or of the checkpoint's codes.

    Args:
        name: of the cache, as in :class:`~mha2mla.eval.quality.QualityRow`; None: by its bits.

    Attributes:
        to_first: further metrics, which compare it with the first one of the caches in the source's place.
    """

    to_first: ClassVar[Sequence[Metric]] = ()

    def __init__(self, model: nn.Module, name: str | None = None) -> None:
        bits = getattr(model.config, "latent_bits", 16)
        by_layer = sorted(set(bits)) if isinstance(bits, list) else [bits]
        self.model, self.config = model, model.config
        if hasattr(self.config, "with_options"):  # a pass without a cache computes keys
            self.config = self.config.with_options(rotary_key_cache="none")
        self.name = name or f"{', '.join(map(str, by_layer))} bits"

    def run(self, module: nn.Module, ids: Tensor) -> Any:
        """Output of ``module``, the model or its base model, over windows of ids [B, L] without padding."""
        return run_without_cache(module, ids)

    def share(self, length: int) -> float:
        """Bytes of the cache at the end of a window relative to the source's in 16 bits; called after :meth:`run`."""
        if not hasattr(self.config, "source_cache_bytes_per_token"):
            return 1.0  # not converted
        return cache_bytes(self.config, length, 2) / cache_bytes(self.config.build_source_config(), length, 2)


@dataclass(frozen=True)
class KVCodes:
    """KV cache of integer codes, as in KIVI (arXiv 2402.02750).

    Args:
        bits: of a code of a key or a value.
        keys: ``"channel"``: keys before RoPE, in groups of ``group`` tokens of one channel; ``"token"``: keys after
            RoPE, in groups of ``group`` channels of one token and head, as values always are.
        group: elements that share a scale and an offset, 16 bits each.
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
        RowQuantizer(self.bits)  # refuses bits that no code has
        if self.group < 2:
            raise ValueError(f"group is {self.group}; expected at least 2")

    @property
    def name(self) -> str:
        return f"source, KV {self.bits} bits, keys by {self.keys}"

    def coded_tokens(self, length: Any) -> Any:
        """Number of the first tokens of a cache of ``length`` (an int or a tensor) that are codes."""
        step = self.group if self.keys == "channel" else 1
        older = length - self.residual
        older = older.clamp(min=0) if isinstance(older, Tensor) else max(older, 0)
        return older // step * step

    def share(self, length: int, head_dim: int, held: Sequence[int] | None = None) -> float:
        """Bytes of a cache of ``length`` tokens (codes, scales, offsets, newest tokens) relative to one in 16 bits.

        Args:
            held: newest tokens that each layer keeps of them; None: all.
        """
        values = self.bits_per_element(head_dim)
        keys = self.bits_per_element(self.group) if self.keys == "channel" else values
        held = held or [length]
        coded = sum(max(0, self.coded_tokens(length) - (length - kept)) for kept in held)
        return (coded * (keys + values) / 32 + sum(held) - coded) / sum(held)

    def bits_per_element(self, width: int) -> float:
        """Bits per element of a row of ``width``: padded codes, and a scale and an offset of 16 bits per group."""
        groups = -(-width // self.group)
        return groups * (self.group * self.bits + 32) / width

    def round(self, rows: Tensor) -> Tensor:
        """Rows [..., width] as asymmetric codes of groups, from their minimum to their maximum, give them back."""
        width, levels = rows.shape[-1], 2**self.bits - 1
        padding = rows[..., -1:].expand(*rows.shape[:-1], -width % self.group)
        groups = torch.cat((rows, padding), -1).float().unflatten(-1, (-1, self.group))
        least, most = groups.aminmax(dim=-1, keepdim=True)
        offset = least.half().float()
        scale = ((most - offset) / levels).clamp(min=0).half().float()
        codes = torch.where(scale > 0, (groups - offset) / scale, 0.0).round().clamp(0, levels)
        return (codes * scale + offset).flatten(-2)[..., :width].to(rows.dtype)


class QuantizedKV(ComparedCache):
    """A source model whose attention reads a cache of codes.

    Args:
        model: causal language model of transformers whose attention is dispatched by ``AttentionInterface``.
    """

    def __init__(self, model: nn.Module, codes: KVCodes) -> None:
        super().__init__(model, codes.name)
        self.codes = codes
        self._cos_sin: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def share(self, length: int) -> float:
        config = self.model.config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return self.codes.share(length, head_dim, cached_tokens(self.model.config, length))

    def run(self, module: nn.Module, ids: Tensor) -> Any:
        """Output over the codes.

        Raises:
            ValueError: the family's attention cannot be served (see :meth:`attend`).
        """
        with self._attending():
            return module(input_ids=ids, use_cache=False, quantized_kv=self)

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """While open, the model's attention calls :meth:`attend`; each layer's cos and sin are kept for it."""
        usual = self.model.config._attn_implementation
        with ExitStack() as stack:
            if self.codes.keys == "channel":
                for layer in self.model.base_model.layers:
                    handle = layer.self_attn.register_forward_pre_hook(self._keep_cos_sin, with_kwargs=True)
                    stack.callback(handle.remove)
            stack.callback(self._cos_sin.clear)
            self.model.set_attn_implementation(QUANTIZED_KV)
            stack.callback(self.model.set_attn_implementation, usual)
            yield

    def _keep_cos_sin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(module, "use_rope", True):  # SmolLM3 rotates the keys of some layers
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
        value_error = value - coded_value  # added for the tokens that a query sees in 16 bits
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
        """Keys and values dequantised from their codes; by channel, keys of whole groups of tokens only."""
        if self.codes.keys == "token":
            return self.codes.round(key), self.codes.round(value)
        whole = key.shape[2] // self.codes.group * self.codes.group
        if whole == 0:
            return key, self.codes.round(value)
        if module not in self._cos_sin:
            return torch.cat((self.codes.round(key[:, :, :whole].mT).mT, key[:, :, whole:]), 2), self.codes.round(value)
        cos, sin = self._cos_sin[module]
        squares = cos.square() + sin.square()  # square of the factor of YaRN and longrope
        plain = _rotate(module, key, cos / squares, -sin / squares)[:, :, :whole]
        plain = torch.cat((self.codes.round(plain.mT).mT, key[:, :, whole:]), 2)
        return _rotate(module, plain, cos, sin), self.codes.round(value)


def _by_kv_head(x: Tensor, of_kv_heads: Tensor) -> Tensor:
    """x [B, h_kv, n, S, a] times [B, h_kv, a, b], without repeating the latter for the n heads."""
    return (x.flatten(2, 3) @ of_kv_heads).unflatten(2, x.shape[2:4])


def _rotate(module: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, L, d_h] rotated by the family's own RoPE; dims that it leaves alone stay.

    Raises:
        ValueError: its module has no ``apply_rotary_pos_emb``.
    """
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise ValueError(f"model has {type(module).__name__}, without apply_rotary_pos_emb; expected keys='token'")
    rotary, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    return torch.cat((apply(rotary, rotary, cos, sin)[1], rest), -1)


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
    """The ``attn_implementation`` of this name; only :meth:`QuantizedKV.run` sets it."""
    if quantized_kv is None or s_aux is not None:
        what = "attention sinks" if s_aux is not None else "layers that keep keyword arguments from attention"
        raise ValueError(f"model has {what}, which no quantised KV cache is measured for; expected a Llama-like model")
    return quantized_kv.attend(module, query, key, value, attention_mask, scaling, softcap), None


@dataclass(frozen=True)
class LatentCodes:
    """Latent cache of integer codes; rotary keys that a layout caches beside it stay in 16 bits.

    Args:
        bits: of a code.
        basis: to quantise in: a ``BasisRule``, or the name of one.
        sinks: rows are coded as differences from the nearer of two centers, of ordinary and of first tokens; False:
            from the first one.

    Raises:
        ValueError: a value outside these.
    """

    bits: int
    basis: str | BasisRule = "importance"
    sinks: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.basis, str) and self.basis not in BasisRule.names():
            raise ValueError(f"basis is {self.basis!r}; expected one of {BasisRule.names()}, or a BasisRule")
        self.quantizer()

    def quantizer(self) -> RowQuantizer:
        return RowQuantizer(self.bits)

    @property
    def name(self) -> str:
        return f"latent {self.bits} bits, {self.basis}"

    def bases(self, statistics: Sequence[LatentStatistics]) -> list[LatentBasis]:
        rule = BasisRule.find(self.basis)
        return [rule.basis(layer) for layer in statistics]


class QuantizedLatent(ComparedCache):
    """A converted model whose attention reads latents of codes."""

    def __init__(self, model: nn.Module, codes: LatentCodes, bases: Sequence[LatentBasis]) -> None:
        super().__init__(model, codes.name)
        self.codes, self.bases = codes, bases

    def cache(self) -> CodedLatents:
        """An empty cache, for any forward passes of one batch."""
        return CodedLatents(self)

    def run(self, module: nn.Module, ids: Tensor) -> Any:
        return module(input_ids=ids, use_cache=True, past_key_values=self.cache())

    def round(self, latent: Tensor, layer_idx: int) -> Tensor:
        """Latents [B, S, d_c] as the cache of a layer gives them back."""
        basis = self.bases[layer_idx]
        centers = basis.centers if self.codes.sinks else basis.centers[:1].expand(2, -1)
        rounded = self.codes.quantizer().round(basis.encode(latent), centers)
        return basis.decode(rounded).to(latent.dtype)

    def share(self, length: int) -> float:
        config, quantizer = self.model.config, self.codes.quantizer()
        geometries = [config.layer_geometry(layer) for layer in range(config.num_hidden_layers)]
        row = sum(quantizer.bytes_per_row(each.kv_lora_rank) + 2 * each.rope_width for each in geometries)
        return length * row / cache_bytes(config.build_source_config(), length, 2)


class FromComputed(Metric):
    """Mean of KL(computed keys ‖ kept keys) in nats."""

    columns: ClassVar = {"kl_computed": "KL to computed keys"}

    def measure(self, at: Predictions) -> Mapping[str, Tensor]:
        return {"kl_computed": kl_divergence(at.source_log_probs, at.converted_log_probs)}


@dataclass(frozen=True)
class RotaryKeys:
    """Rotary keys of layout ``latent`` as the package's cache keeps them: ``mode``, a ``rotary_key_cache``."""

    mode: str

    @property
    def name(self) -> str:
        return f"rotary keys {self.mode}"


class KeptKeys(ComparedCache):
    """A converted model whose attention reads latents and rotary keys that its cache keeps."""

    to_first: ClassVar = (FromComputed(),)

    def __init__(self, model: nn.Module, keys: RotaryKeys) -> None:
        super().__init__(model, keys.name)
        if not hasattr(model.config, "rotary_key_cache"):
            raise ValueError(f"converted has model_type {model.config.model_type!r}; expected layout latent")
        self.config = model.config.with_options(rotary_key_cache=keys.mode)

    def run(self, module: nn.Module, ids: Tensor) -> Any:
        return module(input_ids=ids, use_cache=True, past_key_values=LatentCache(self.config))


class CodedLatents(LatentTap):
    """The cache of :class:`QuantizedLatent`: holds dequantised latents."""

    def __init__(self, quantized: QuantizedLatent) -> None:
        config = quantized.model.config
        super().__init__(config.num_hidden_layers, config.has_rope_cache)
        self._quantized = quantized

    def seen(self, latent: Tensor, layer_idx: int) -> Tensor:
        return self._quantized.round(latent, layer_idx)


AttentionInterface.register(QUANTIZED_KV, _attention)
AttentionMaskInterface.register(QUANTIZED_KV, sdpa_mask)
