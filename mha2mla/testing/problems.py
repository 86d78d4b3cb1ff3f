"""Decode problems: shapes, poisoned inputs, and the check of their outputs against float64.

Tests, benchmarks and ``mha2mla check kernels`` all draw from here; everything runs on the device of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.gqa_decode.api import GQA, plan_gqa_decode
from mha2mla.kernels.gqa_decode.selection import GQAShape
from mha2mla.kernels.mla_decode.api import (
    FP8,
    INT8_KEYS,
    LATENT,
    LATENT_CODES,
    LATENT_FP8,
    MLA,
    ROW_CODES,
    plan_mla_decode,
)
from mha2mla.kernels.mla_decode.codes_selection import bits_of
from mha2mla.kernels.mla_decode.quantization import dequantize_latent, quantize_keys, quantize_latent
from mha2mla.kernels.rope_append.api import LatentRope, kept_keys, rotary_keys
from mha2mla.kernels.row_codes.api import RowQuantizer
from mha2mla.kernels.split_kv.choice import TILE_TOKENS
from mha2mla.kernels.split_kv.op import PagedOp, compiled_shape
from mha2mla.kernels.split_kv.plan import DecodePlan
from mha2mla.kernels.split_kv.reference import Span, attended_span
from mha2mla.testing.numeric_check import Judgement, PlainAttention, plain_attention, verdict

UNUSED_PAGE = 2147480000  # in table entries that must not be read, as in FlashMLA's tests


@dataclass(frozen=True, kw_only=True)
class PagedProblem:
    """Fields shared by calls of all paged decode ops.

    A subclass has the sizes of its ``op`` as fields, then ``lengths``, cached tokens per sequence, the new ones
    included; and ``columns``, the static part of a call by the names of its sizes in the op's declaration.

    Attributes:
        page_size: tokens per page.
        seqlen_q: S_q, new tokens per sequence.
        starts: first visible token per sequence, or None.
        causal: whether new tokens are hidden from those before them.
        window, sinks: as in :func:`mha2mla.kernels.plan_mla_decode`.
        combined: the caches are two views of one buffer.
        slack: unused columns of the page table.
        scale: of the queries; large values make scores of 1e5.
        seed: of all numbers.
    """

    page_size: int = 64
    seqlen_q: int = 1
    starts: tuple[int, ...] | None = None
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    combined: bool = False
    slack: int = 1
    scale: float = 1.0
    seed: int = 0

    @property
    def visibility(self) -> dict[str, Any]:
        """The keyword arguments that a plan takes and a call does not: ``window`` and ``sinks``."""
        return {"window": self.window, "sinks": self.sinks}

    @property
    def capacity(self) -> int:
        """Tokens that a row of the page table holds."""
        longest = max((-(-length // self.page_size) for length in self.lengths), default=0)
        return (longest + self.slack) * self.page_size

    def shape(self, dtype: str = "bfloat16", seqlen_q: int | None = None) -> Any:
        """Shape to compile for; ``seqlen_q`` when the kernel has rows for more new tokens than the call brings."""
        sizes = self.columns | {"S_q": seqlen_q or self.seqlen_q}
        return self.op.shape(*[sizes[name] for name in self.op.static], dtype)

    def spans(self) -> list[Span]:
        """Tokens and tiles of each sequence that some query sees, from the planner's oracle."""
        starts = self.starts or (0,) * len(self.lengths)
        return [
            attended_span(length, start, self.capacity, self.seqlen_q, self.causal, self.window, self.sinks)
            for length, start in zip(self.lengths, starts, strict=True)
        ]

    def tokens_seen(self) -> int:
        """Cached tokens that some query sees, over all sequences: what a call has to read."""
        return sum(
            span.stop - span.low + max(0, span.sink_stop - span.start) if span.stop > span.start else 0
            for span in self.spans()
        )


@dataclass(frozen=True)
class Problem(PagedProblem):
    """One decode call over latents and rotary keys; ``combined``: views of one buffer [P, page, d_c + G*d_r].

    Attributes: ``heads``, ``num_rope_heads``, ``kv_lora_rank``, ``qk_rope_head_dim``: H, G, d_c, d_r.
        codes: latents are e4m3 numbers with a scale a token, both NaN where no query looks (and no view then).
    """

    heads: int
    num_rope_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    lengths: tuple[int, ...]
    codes: bool = field(default=False, kw_only=True)

    softmax_scale = 0.09

    @property
    def op(self) -> PagedOp:
        return FP8 if self.codes else MLA

    @property
    def geometry(self) -> MLAGeometry:
        return MLAGeometry(self.heads, self.num_rope_heads, self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def columns(self) -> dict[str, int]:
        widths = {"d_c": self.kv_lora_rank, "d_r": self.qk_rope_head_dim}
        sizes = {"H": self.heads, "G": self.num_rope_heads} | widths | {"page": self.page_size, "S_q": self.seqlen_q}
        return sizes | ({"bits": 8} if self.codes else {})

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes of cache that a call has to read, once."""
        saved = self.kv_lora_rank * (itemsize - 1) - 4 if self.codes else 0
        return self.tokens_seen() * (self.geometry.cache_bytes_per_token(itemsize) - saved)

    def flops(self) -> int:
        """Multiplications and additions of the call, every new token taken to see all that the last one sees."""
        return self.tokens_seen() * self.seqlen_q * self.geometry.decode_flops_per_token()

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Arguments of ``mla_decode`` by name, drawn on ``device`` from the seed.

        What no query may see is poison: tokens are NaN, and page-table entries are UNUSED_PAGE behind a sequence's
        length and for pages that lie outside every ``TILE_TOKENS``-token tile with a token that some query sees.
        """
        device = torch.device(device)
        make = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, device=device, dtype=dtype)

        batch, page, capacity = len(self.lengths), self.page_size, self.capacity
        max_pages = capacity // page
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        starts = None if self.starts is None else torch.tensor(self.starts, dtype=torch.int32, device=device)
        seen = self._seen(capacity, device)  # [B, capacity]
        in_use = torch.arange(max_pages, device=device) * page < lengths[:, None]  # [B, max_pages]
        num_pages = int(in_use.sum()) + 3
        table = torch.full((batch, max_pages), UNUSED_PAGE, dtype=torch.int32, device=device)
        order = torch.randperm(num_pages, generator=make, device=device)
        table[in_use] = order[: num_pages - 3].int()

        hidden = torch.ones(num_pages, page, dtype=torch.bool, device=device)
        hidden[table[in_use].long()] = ~seen.view(batch, max_pages, page)[in_use]
        width, rope = self.kv_lora_rank, self.num_rope_heads * self.qk_rope_head_dim
        if self.combined:
            buffers = (normal(num_pages, page, width + rope),)
            latent, k_pe = buffers[0][..., :width], buffers[0][..., width:]
        else:
            buffers = latent, k_pe = normal(num_pages, page, width), normal(num_pages, page, rope)
        for buffer in buffers:
            buffer.masked_fill_(hidden[..., None], torch.nan)

        tile = max(page, TILE_TOKENS)  # a kernel looks up the whole tile, so pages of less than a tile stay valid in it
        padded = torch.nn.functional.pad(seen, (0, -capacity % tile))
        read = padded.view(batch, -1, tile).any(2).repeat_interleave(tile // page, 1)[:, :max_pages]
        table.masked_fill_(~read, UNUSED_PAGE)
        shape = (batch, self.seqlen_q, self.heads)
        latent, scale = quantize_latent(latent) if self.codes else (latent, None)
        return {
            "q_latent": normal(*shape, width) * self.scale,
            "q_pe": normal(*shape, self.qk_rope_head_dim) * self.scale,
            "latent_cache": latent,
            "rope_cache": k_pe.unflatten(-1, (self.num_rope_heads, self.qk_rope_head_dim)),
            "block_table": table,
            "cache_seqlens": lengths,
            "cache_starts": starts,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            **({} if scale is None else {"latent_scale": scale}),
        }

    def _seen(self, capacity: int, device: torch.device) -> Tensor:
        """[B, capacity] bool: some query sees the token."""
        spans = self.spans()
        start, stop, low, sink_stop = (
            torch.tensor([getattr(span, name) for span in spans], dtype=torch.int64, device=device)[:, None]
            for name in ("start", "stop", "low", "sink_stop")
        )
        token = torch.arange(capacity, device=device)
        return (token >= start) & (token < stop) & ((token >= low) | (token < sink_stop))

    def plan(self, inputs: dict[str, Any], backend: str | None = None) -> DecodePlan:
        """The plan for these inputs, with the problem's window and sinks."""
        keys = inputs["latent_cache"] if inputs["rope_cache"] is None else inputs["rope_cache"]
        return plan_mla_decode(
            inputs["q_latent"], keys, inputs["block_table"], inputs["cache_seqlens"],
            qk_rope_head_dim=self.qk_rope_head_dim, cache_starts=inputs["cache_starts"], causal=self.causal,
            backend=backend, latent_dtype=inputs["latent_cache"].dtype, row_bytes=self.columns.get("row"),
            **self.visibility,
        )  # fmt: skip


@dataclass(frozen=True)
class LatentProblem(Problem):
    """One decode call; what :class:`Problem` says, for ``num_rope_heads`` 1 and ``combined``: latents are a view.

    Attributes:
        scaling: of :class:`LatentRope`.
        first_position: rotary position of a sequence's first token; pages get offsets where it is not 0.
        shuffled: each page gets an offset of its own, up to 2**17.
    """

    scaling: float = 1.0
    first_position: int = 0
    shuffled: bool = False

    @property
    def op(self) -> PagedOp:
        return LATENT_FP8 if self.codes else LATENT

    @property
    def geometry(self) -> MLAGeometry:
        return replace(super().geometry, rope_from_latent=True)

    def flops(self) -> int:
        """FLOP of :class:`Problem`, and of one rotary key a token, however many queries read it."""
        read = super().geometry.decode_flops_per_token() * self.seqlen_q
        return self.tokens_seen() * (read + 2 * self.kv_lora_rank * self.qk_rope_head_dim)

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Same as :meth:`Problem.inputs`, with ``rope`` and without ``rope_cache``. The slowest pair does not turn."""
        made = super().inputs(dtype, device)
        make = torch.Generator(device).manual_seed(self.seed + 1)
        width, pairs = self.qk_rope_head_dim, self.qk_rope_head_dim // 2
        normal = {"generator": make, "device": device, "dtype": dtype}
        inv_freq = 1e4 ** -(torch.arange(pairs, device=device, dtype=torch.float64) / pairs)
        if pairs > 1:
            inv_freq[-1] = 0
        offsets = None
        if self.shuffled:
            offsets = torch.randint(0, 2**17, made["block_table"].shape, generator=make, device=device)
        elif self.first_position:
            offsets = torch.full(made["block_table"].shape, self.first_position, device=device)
        rope = LatentRope(
            torch.randn(width, self.kv_lora_rank, **normal) * self.kv_lora_rank**-0.5,
            torch.randn(width, **normal),
            inv_freq.float(),
            self.scaling,
            None if offsets is None else offsets.int(),
        )
        return made | {"rope_cache": None, "rope": rope}


@dataclass(frozen=True)
class KeyCodesProblem(LatentProblem):
    """One decode call over 16-bit latents and int8 rotary keys; ``bias``: how large entries of b_KR are."""

    bias: float = 10.0

    op = INT8_KEYS
    flops = Problem.flops

    @property
    def geometry(self) -> MLAGeometry:
        return super().geometry.with_key_codes

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
        made, rope = Problem.inputs(self, dtype, device), super().inputs(dtype, device)["rope"]
        codes, scale = quantize_keys(made["rope_cache"])
        rope = replace(rope, bias=self.bias * rope.bias)
        return made | {"rope_cache": codes, "rope_scale": scale[:, :, 0].contiguous(), "rope": rope}


@dataclass(frozen=True)
class RowCodesProblem(Problem):
    """One decode call over integer codes of ``bits`` bits and rotary keys; every third is near the second center."""

    bits: int = 4

    op = ROW_CODES

    @property
    def geometry(self) -> MLAGeometry:
        return replace(super().geometry, latent_bits=self.bits)

    @property
    def quantizer(self) -> RowQuantizer:
        return RowQuantizer(self.bits)

    @property
    def columns(self) -> dict[str, int]:
        return super().columns | {"row": self.quantizer.bytes_per_row(self.kv_lora_rank)}

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
        made = super().inputs(dtype, device)
        make = torch.Generator(device).manual_seed(self.seed + 2)
        centers = torch.randn(2, self.kv_lora_rank, generator=make, device=device).mul(2).to(dtype)
        latent = made["latent_cache"]
        second = torch.arange(latent.shape[0] * latent.shape[1], device=device).view(latent.shape[:2]) % 3 == 0
        made["latent_cache"] = self.quantizer.encode(latent + centers[second.long()], centers)
        return made | {"centers": centers}


@dataclass(frozen=True)
class LatentCodesProblem(RowCodesProblem, LatentProblem):
    """One decode call over integer codes alone, from which rotary keys are computed."""

    op = LATENT_CODES


@dataclass(frozen=True)
class GQAProblem(PagedProblem):
    """One GQA decode call; ``combined``: keys and values are two views of one buffer [P, page, G*d_v + G*d_qk].

    Attributes: ``heads``, ``num_kv_heads``, ``qk_head_dim``, ``v_head_dim``: H, G, d_qk, d_v.
    """

    heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    lengths: tuple[int, ...]

    op = GQA

    @property
    def storage(self) -> Problem:
        """An MLA problem whose latents are all heads' values, and whose rotary keys are the keys."""
        shared = {field.name: getattr(self, field.name) for field in fields(PagedProblem)}
        width = self.num_kv_heads * self.v_head_dim
        return Problem(self.heads, self.num_kv_heads, width, self.qk_head_dim, self.lengths, **shared)

    @property
    def columns(self) -> dict[str, int]:
        widths = {"d_qk": self.qk_head_dim, "d_v": self.v_head_dim}
        return {"H": self.heads, "G": self.num_kv_heads} | widths | {"page": self.page_size, "S_q": self.seqlen_q}

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5

    def shape(self, dtype: str = "bfloat16", seqlen_q: int | None = None) -> GQAShape:
        """Shape that is compiled for it."""
        return compiled_shape(super().shape(dtype, seqlen_q))

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes of keys and values that a call has to read, once."""
        return self.tokens_seen() * self.num_kv_heads * (self.qk_head_dim + self.v_head_dim) * itemsize

    def flops(self) -> int:
        """Same as :meth:`Problem.flops`."""
        return 2 * self.tokens_seen() * self.seqlen_q * self.heads * (self.qk_head_dim + self.v_head_dim)

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Arguments of ``gqa_decode`` by name, poisoned wherever no kernel may read, as :meth:`Problem.inputs` says."""
        made = self.storage.inputs(dtype, device)
        return {
            "q": made["q_pe"],
            "k_cache": made["rope_cache"],
            "v_cache": made["latent_cache"].unflatten(-1, (self.num_kv_heads, self.v_head_dim)),
            "block_table": made["block_table"],
            "cache_seqlens": made["cache_seqlens"],
            "cache_starts": made["cache_starts"],
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
        }

    def plan(self, inputs: dict[str, Any], backend: str | None = None) -> DecodePlan:
        """The plan for these inputs, with the problem's window and sinks."""
        return plan_gqa_decode(
            inputs["q"], inputs["k_cache"], inputs["block_table"], inputs["cache_seqlens"], v_head_dim=self.v_head_dim,
            cache_starts=inputs["cache_starts"], causal=self.causal, backend=backend, **self.visibility,
        )  # fmt: skip


def _op_of(inputs: dict[str, Any]) -> tuple[PagedOp, tuple[str, ...], tuple[str, ...]]:
    """The op of a call :func:`with_keys`, and the names of its queries and caches in the order of their parts."""
    op = GQA if "k_cache" in inputs else MLA
    queries, caches = ([a.name for a in op.arguments if a.names[0] == first] for first in ("B", "P"))
    return op, tuple(queries), tuple(caches)


def with_keys(inputs: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The same call over a cache that holds rotary keys, in ``dtype``, if it is one over the latent alone or int8 keys.

    Codes are dequantised, integer ones to ``dtype``. Each page has to belong to one sequence, as
    :meth:`Problem.inputs` makes them.
    """
    if inputs.get("centers") is not None:
        width, centers = inputs["q_latent"].shape[-1], inputs["centers"]
        quantizer = RowQuantizer(bits_of(width, inputs["latent_cache"].shape[-1]))
        latent = quantizer.decode(inputs["latent_cache"], width, dtype, centers)
        inputs = {name: value for name, value in inputs.items() if name != "centers"} | {"latent_cache": latent}
    if inputs.get("latent_scale") is not None:  # in float64: no 16-bit type holds products of e4m3 codes
        latent = dequantize_latent(inputs["latent_cache"], inputs["latent_scale"], torch.float64)
        inputs = {name: value for name, value in inputs.items() if name != "latent_scale"} | {"latent_cache": latent}
    rope: LatentRope | None = inputs.get("rope")
    if rope is None:
        return inputs
    latent, table = inputs["latent_cache"], inputs["block_table"]
    place = torch.arange(table.shape[1], device=table.device) * latent.shape[1]
    place = place.expand(table.shape) if rope.page_offsets is None else place + rope.page_offsets
    within = torch.arange(table.shape[1], device=table.device) * latent.shape[1] < inputs["cache_seqlens"][:, None]
    held = within & (table >= 0) & (table < latent.shape[0])  # entries behind a length may name any page
    first = torch.zeros(latent.shape[0], dtype=torch.long, device=table.device)
    first[table[held].long()] = place[held].long()
    positions = first[:, None] + torch.arange(latent.shape[1], device=table.device)
    scale = inputs.get("rope_scale")
    if scale is None:
        keys = rotary_keys(latent.to(dtype), rope, positions)
    else:
        keys = kept_keys(inputs["rope_cache"][:, :, 0], scale, rope, positions, dtype)
    others = {name: value for name, value in inputs.items() if name not in ("rope", "rope_scale")}
    return others | {"rope_cache": keys[:, :, None]}


def exact(inputs: dict[str, Any], window: int | None = None, sinks: int = 0) -> tuple[Tensor, Tensor]:
    """out [B, S_q, H, d] and lse [B, H, S_q] in float64 on the same (rounded) inputs; ``window``, ``sinks``: the
    plan's."""
    found = [
        (wide.attend(), wide.lse())
        for wide in (sequence.to(torch.float64) for sequence in sequences(inputs, window, sinks))
    ]
    return tuple(map(torch.stack, zip(*found, strict=True))) if found else _nothing(inputs)


def _nothing(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The out and lse of no sequence."""
    op, (query, *_), caches = _op_of(inputs)
    _, seqlen_q, heads, _ = inputs[query].shape
    width = inputs[caches[1] if op is GQA else caches[0]].shape[-1]
    wide = {"dtype": torch.float64, "device": inputs[query].device}
    return torch.empty(0, seqlen_q, heads, width, **wide), torch.empty(0, heads, seqlen_q, **wide)


def sequences(inputs: dict[str, Any], window: int | None = None, sinks: int = 0) -> Iterator[PlainAttention]:
    """The sequences of a call one by one, without pages; tokens that no query sees are 0."""
    inputs = with_keys(inputs)
    op, names, caches = _op_of(inputs)
    num_pages, page = inputs[caches[0]].shape[:2]
    seqlen_q, device = inputs[names[0]].shape[1], inputs["block_table"].device
    back = torch.arange(seqlen_q - 1, -1, -1, device=device) * bool(inputs["causal"])
    for b, length in enumerate(inputs["cache_seqlens"].tolist()):
        start = 0 if inputs["cache_starts"] is None else int(inputs["cache_starts"][b])
        pages = inputs["block_table"][b, : -(-length // page)].long()
        pages = torch.where(pages < num_pages, pages, 0)
        token, limit = torch.arange(length, device=device), (length - back)[:, None]
        visible = (token >= start) & (token < limit)
        if window is not None:
            visible &= (token >= limit - window) | (token < start + sinks)
        cached = []
        for name in caches:
            rows = inputs[name][pages].flatten(0, 1)[:length]
            rows = rows.unflatten(1, (1, -1)) if rows.dim() == 2 else rows  # [length, G, d]
            cached.append(torch.where(visible.any(0)[:, None, None], rows, 0))
        keys, values = (cached[:1], cached[1]) if op is GQA else (cached, cached[0])
        queries = tuple(inputs[name][b] for name in names)
        yield PlainAttention(queries, tuple(keys), values, visible, inputs["softmax_scale"])


def judge(
    inputs: dict[str, Any], out: Tensor, lse: Tensor | None, window: int | None = None, sinks: int = 0
) -> Judgement:
    """Compares an output of a decode op with float64, and plain torch at the queries' dtype with float64.

    Args:
        inputs: as :meth:`Problem.inputs` or :meth:`GQAProblem.inputs` makes them.
        out: [B, S_q, H, d]. lse: [B, H, S_q], or None where an implementation has none.
        window, sinks: of the plan.
    """
    return verdict(out, lse, *expected(inputs, window, sinks))


def expected(
    inputs: dict[str, Any], window: int | None = None, sinks: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Arguments of :func:`verdict` behind out and lse, by its names: expected, expected_lse, torch_out, rounding,
    torch_lse and lse_rounding."""
    query = inputs[_op_of(inputs)[1][0]]
    held = with_keys(inputs)
    if not query.shape[0]:
        out, lse = _nothing(held)
        return out, lse, out.to(query.dtype), None, None, None
    rows = query.shape[:2]
    out, lse, torch_out, rounding = plain_attention(sequences(held, window, sinks), query.dtype)
    judged = [None if x is None else x.unflatten(0, rows) for x in (out, torch_out, rounding)]
    torch_lse = lse_rounding = None
    rounded = [part for part, name in enumerate(("centers", "rope")) if inputs.get(name) is not None]  # of the keys
    if rounded:
        torch_lse = exact(with_keys(inputs, query.dtype), window, sinks)[1]
        wide = (sequence.to(torch.float64) for sequence in sequences(held, window, sinks))
        roundings = [[sequence.lse_rounding(part, query.dtype) for part in rounded] for sequence in wide]
        lse_rounding = torch.stack([sum(each.square() for each in parts).sqrt() for parts in roundings])
    return judged[0], lse.unflatten(1, rows).transpose(0, 1), *judged[1:], torch_lse, lse_rounding
