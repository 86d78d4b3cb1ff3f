"""Decode problems: one generator of shapes and poisoned inputs, and what their outputs are compared with.

Tests, benchmarks and ``mha2mla check kernels`` all draw from here; everything runs on the device of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernel_testing.judgement import Judgement, verdict
from mha2mla.kernels.mla_decode.plan import plan_mla_decode
from mha2mla.kernels.mla_decode.reference import mla_decode_reference
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.split_kv.plan import DecodePlan
from mha2mla.kernels.split_kv.schedule import TILE_TOKENS, Span, attended_span

UNUSED_PAGE = 2147480000  # what FlashMLA's tests put into table entries that nobody may read
CHUNK_TOKENS = 2**17  # tokens that the float64 reference takes at a time: its gathers hold 8 bytes a number
_DATA = ("q_latent", "q_pe", "latent_cache", "rope_cache")


@dataclass(frozen=True)
class Problem:
    """One decode call.

    Attributes:
        heads, num_rope_heads, kv_lora_rank, qk_rope_head_dim: H, G, d_c, d_r.
        lengths: cached tokens per sequence, the new ones included.
        page_size: tokens per page.
        seqlen_q: S_q, new tokens per sequence.
        starts: first visible token per sequence, or None.
        causal: whether new tokens are hidden from those before them.
        window, sinks: as in :func:`mha2mla.kernels.plan_mla_decode`.
        combined: latents and rope keys are two views of one buffer [P, page, d_c + G*d_r].
        slack: unused columns of the page table.
        scale: of the queries; large values make scores of 1e5.
        seed: of all numbers.
    """

    heads: int
    num_rope_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    lengths: tuple[int, ...]
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
    def softmax_scale(self) -> float:
        return 0.09

    @property
    def geometry(self) -> MLAGeometry:
        return MLAGeometry(self.heads, self.num_rope_heads, self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def columns(self) -> dict[str, int]:
        """The static part of a call, as columns of a table."""
        return {
            "H": self.heads,
            "G": self.num_rope_heads,
            "d_c": self.kv_lora_rank,
            "d_r": self.qk_rope_head_dim,
            "page": self.page_size,
            "S_q": self.seqlen_q,
        }

    @property
    def visibility(self) -> dict[str, Any]:
        """The keyword arguments that a plan takes and a call does not: ``window`` and ``sinks``."""
        return {"window": self.window, "sinks": self.sinks}

    @property
    def capacity(self) -> int:
        """Tokens that a row of the page table holds."""
        longest = max((-(-length // self.page_size) for length in self.lengths), default=0)
        return (longest + self.slack) * self.page_size

    def shape(self, dtype: str = "bfloat16", seqlen_q: int | None = None) -> DecodeShape:
        """What to compile for; ``seqlen_q`` when the kernel has rows for more new tokens than the call brings."""
        return DecodeShape(
            self.heads,
            self.num_rope_heads,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            self.page_size,
            seqlen_q or self.seqlen_q,
            dtype,
        )

    def spans(self) -> list[Span]:
        """Which tokens and tiles of each sequence some query sees, from the planner's oracle."""
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

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes of cache that a call has to read, once."""
        return self.tokens_seen() * self.geometry.cache_bytes_per_token(itemsize)

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
        return plan_mla_decode(
            inputs["q_latent"],
            inputs["rope_cache"],
            inputs["block_table"],
            inputs["cache_seqlens"],
            qk_rope_head_dim=self.qk_rope_head_dim,
            cache_starts=inputs["cache_starts"],
            causal=self.causal,
            backend=backend,
            **self.visibility,
        )


def exact(inputs: dict[str, Any], window: int | None = None, sinks: int = 0) -> tuple[Tensor, Tensor]:
    """The reference in float64 on the same (rounded) inputs, a few sequences at a time where they are long.

    Returns:
        out [B, S_q, H, d_c] and lse [B, H, S_q], float64.
    """
    batch, capacity = inputs["block_table"].shape[0], inputs["block_table"].shape[1] * inputs["latent_cache"].shape[1]
    step = max(1, CHUNK_TOKENS // max(1, capacity))
    if batch <= step:
        return mla_decode_reference(**_cast(inputs, torch.float64), window=window, sinks=sinks)
    parts = [exact(take(inputs, slice(b, b + step), _DATA), window, sinks) for b in range(0, batch, step)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def take(inputs: dict[str, Any], rows: slice, data: Sequence[str]) -> dict[str, Any]:
    """Some sequences of a call, with only their pages: the rest of a large cache need not be cast.

    Args:
        data: names of the queries and of the caches, which end in ``_cache``.
    """
    caches = [name for name in data if name.endswith("_cache")]
    table, num_pages = inputs["block_table"][rows], inputs[caches[0]].shape[0]
    valid = (table >= 0) & (table < num_pages)
    pages, renamed = torch.unique(table[valid], return_inverse=True)
    if not pages.numel():
        pages = torch.zeros(1, dtype=torch.long, device=table.device)  # the reference wants a page to point at
    small = torch.full_like(table, UNUSED_PAGE)
    small[valid] = renamed.int()
    taken = {name: inputs[name][rows] for name in ("cache_seqlens", *data) if name not in caches}
    taken |= {name: inputs[name][pages.long()] for name in caches}
    starts = inputs["cache_starts"]
    return inputs | taken | {"block_table": small, "cache_starts": None if starts is None else starts[rows]}


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: value.to(dtype) if name in _DATA else value for name, value in inputs.items()}


def torch_at(inputs: dict[str, Any], dtype: torch.dtype, window: int | None = None, sinks: int = 0) -> Tensor:
    """The same formula in plain torch, every intermediate held in ``dtype``: what "twice torch's error" refers to.

    Returns:
        out [B, S_q, H, d_c] in ``dtype``.
    """
    inputs = _cast(inputs, dtype)
    q_latent, q_pe, latent_cache, rope_cache = (inputs[name] for name in _DATA)
    num_pages, page, heads, seqlen_q = *latent_cache.shape[:2], q_latent.shape[2], q_latent.shape[1]
    outs = []
    for b, length in enumerate(inputs["cache_seqlens"].tolist()):
        pages, visible = pages_and_visible(inputs, b, length, num_pages, page, seqlen_q, window, sinks)
        used = visible.any(0)
        latent = torch.where(used[:, None], latent_cache[pages].flatten(0, 1)[:length], 0)
        k_pe = torch.where(used[:, None, None], rope_cache[pages].flatten(0, 1)[:length], 0)
        k_pe = k_pe.repeat_interleave(heads // rope_cache.shape[2], 1)
        score = torch.einsum("shd,td->hst", q_latent[b], latent) + torch.einsum("shd,thd->hst", q_pe[b], k_pe)
        score = (score * inputs["softmax_scale"]).masked_fill(~visible, -torch.inf)
        weight = torch.softmax(score, -1).nan_to_num(0)  # rows that see nothing
        outs.append(torch.einsum("hst,td->shd", weight, latent))
    return torch.stack(outs) if outs else torch.zeros_like(q_latent)


def pages_and_visible(
    inputs: dict[str, Any],
    b: int,
    length: int,
    num_pages: int,
    page: int,
    seqlen_q: int,
    window: int | None,
    sinks: int,
) -> tuple[Tensor, Tensor]:
    """Of sequence ``b``: its pages, with 0 for those that are none, and which tokens each query sees, [S_q, length]."""
    device = inputs["block_table"].device
    start = 0 if inputs["cache_starts"] is None else int(inputs["cache_starts"][b])
    pages = inputs["block_table"][b, : -(-length // page)].long()
    pages = torch.where(pages < num_pages, pages, 0)
    token = torch.arange(length, device=device)
    back = torch.arange(seqlen_q - 1, -1, -1, device=device) * bool(inputs["causal"])
    limit = (length - back)[:, None]
    visible = (token >= start) & (token < limit)
    if window is not None:
        visible &= (token >= limit - window) | (token < start + sinks)
    return pages, visible


def judge(
    inputs: dict[str, Any],
    out: Tensor,
    lse: Tensor | None,
    dtype: torch.dtype,
    window: int | None = None,
    sinks: int = 0,
) -> Judgement:
    """Compares an output of the decode op with float64, and plain torch at ``dtype`` with float64.

    What right means, :func:`mha2mla.kernel_testing.judgement.verdict` says.

    Args:
        inputs: as :meth:`Problem.inputs` makes them.
        out: [B, S_q, H, d_c]. lse: [B, H, S_q], or None where an implementation has none.
        dtype: of the inputs.
        window, sinks: of the plan.
    """
    return verdict(out, lse, *exact(inputs, window, sinks), torch_at(inputs, dtype, window, sinks))
