"""Decode problems for tests: one generator of shapes and poisoned inputs, and the rule by which an output is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mha2mla.kernels.mla_decode.reference import mla_decode_reference
from mha2mla.kernels.mla_decode.selection import DecodeShape

UNUSED_PAGE = 2147480000  # what FlashMLA's tests put into table entries that nobody may read


@dataclass(frozen=True)
class Problem:
    """One decode call. ``lengths`` per sequence; ``starts`` None or per sequence; ``combined`` stores latent and rope
    keys as two views of one buffer; ``slack`` is extra unused width of the page table."""

    heads: int
    num_rope_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    lengths: tuple[int, ...]
    page_size: int = 64
    seqlen_q: int = 1
    starts: tuple[int, ...] | None = None
    causal: bool = True
    combined: bool = False
    slack: int = 1
    scale: float = 1.0  # of the queries: large values make scores of 1e5
    seed: int = 0

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

    @property
    def softmax_scale(self) -> float:
        return 0.09

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> dict:
        """Arguments of ``mla_decode`` by name. Whatever no query may see is NaN, unused table entries are poison."""
        make = torch.Generator(device="cpu").manual_seed(self.seed)
        batch, page = len(self.lengths), self.page_size
        pages = [-(-length // page) for length in self.lengths]
        max_pages = max(pages) + self.slack
        num_pages = sum(pages) + 3
        width, rope = self.kv_lora_rank, self.num_rope_heads * self.qk_rope_head_dim
        cache = torch.full((num_pages, page, width + rope), torch.nan)
        table = torch.full((batch, max_pages), UNUSED_PAGE, dtype=torch.int32)
        free = torch.randperm(num_pages, generator=make).tolist()
        for b, length in enumerate(self.lengths):
            start = self.starts[b] if self.starts else 0
            for i in range(pages[b]):
                table[b, i] = free.pop()
                lo, hi = max(start - i * page, 0), min(length - i * page, page)
                if hi > lo:
                    cache[table[b, i], lo:hi] = torch.randn(hi - lo, width + rope, generator=make)
        cache = cache.to(dtype)
        latent, k_pe = cache[..., :width], cache[..., width:]
        if not self.combined:
            latent, k_pe = latent.contiguous(), k_pe.contiguous()
        else:
            cache = cache.to(device)
            latent, k_pe = cache[..., :width], cache[..., width:]
        shape = (batch, self.seqlen_q, self.heads)
        return {
            "q_latent": (torch.randn(*shape, width, generator=make) * self.scale).to(device, dtype),
            "q_pe": (torch.randn(*shape, self.qk_rope_head_dim, generator=make) * self.scale).to(device, dtype),
            "latent_cache": latent.to(device),
            "rope_cache": k_pe.unflatten(-1, (self.num_rope_heads, self.qk_rope_head_dim)).to(device),
            "block_table": table.to(device),
            "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32, device=device),
            "cache_starts": None
            if self.starts is None
            else torch.tensor(self.starts, dtype=torch.int32, device=device),
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
        }


def exact(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64 on the same (rounded) inputs."""
    return mla_decode_reference(**_cast(inputs, torch.float64))


def torch_at(inputs: dict, dtype: torch.dtype) -> torch.Tensor:
    """The same formula in plain torch, every intermediate held in ``dtype``: what "twice torch's error" refers to."""
    q_latent, q_pe = inputs["q_latent"].to(dtype), inputs["q_pe"].to(dtype)
    latent_cache, rope_cache = inputs["latent_cache"].to(dtype), inputs["rope_cache"].to(dtype)
    page, heads, seqlen_q = latent_cache.shape[1], q_latent.shape[2], q_latent.shape[1]
    outs = []
    for b, length in enumerate(inputs["cache_seqlens"].tolist()):
        start = 0 if inputs["cache_starts"] is None else int(inputs["cache_starts"][b])
        pages = inputs["block_table"][b, : -(-length // page)].long()
        latent = latent_cache[pages].flatten(0, 1)[:length]
        k_pe = rope_cache[pages].flatten(0, 1)[:length].repeat_interleave(heads // rope_cache.shape[2], 1)
        token = torch.arange(length, device=latent.device)
        limit = (
            length - torch.arange(seqlen_q - 1, -1, -1, device=latent.device)
            if inputs["causal"]
            else torch.full((seqlen_q,), length, device=latent.device)
        )
        visible = (token >= start) & (token < limit[:, None])  # [S_q, t]
        latent = torch.where((token >= start)[:, None], latent, 0)
        k_pe = torch.where((token >= start)[:, None, None], k_pe, 0)
        score = torch.einsum("shd,td->hst", q_latent[b], latent) + torch.einsum("shd,thd->hst", q_pe[b], k_pe)
        score = (score * inputs["softmax_scale"]).masked_fill(~visible, -torch.inf)
        weight = torch.softmax(score, -1).nan_to_num(0)  # rows that see nothing
        outs.append(torch.einsum("hst,td->shd", weight, latent))
    return torch.stack(outs)


def _cast(inputs: dict, dtype: torch.dtype) -> dict:
    data = ("q_latent", "q_pe", "latent_cache", "rope_cache")
    return {name: value.to(dtype) if name in data else value for name, value in inputs.items()}


def errors(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Frobenius-relative and largest absolute error against float64."""
    difference = (out.double() - expected).abs()
    return float(difference.norm() / expected.norm().clamp(min=1e-300)), float(difference.max()) if out.numel() else 0.0


def assert_right(inputs: dict, out: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Error against float64 at most twice that of torch at ``dtype``; empty rows exactly 0 and -inf."""
    expected, expected_lse = exact(inputs)
    assert not torch.isnan(out).any(), "NaN reached the output"
    relative, largest = errors(out, expected)
    torch_relative, torch_largest = errors(torch_at(inputs, dtype), expected)
    ulp = torch.finfo(dtype).eps
    assert relative <= 2 * torch_relative + ulp / 2, (relative, torch_relative)
    assert largest <= 2 * torch_largest + ulp * float(expected.abs().max()), (largest, torch_largest)
    empty = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), "lse is -inf at the wrong rows"
    if not bool(empty.all()):
        seen = ~empty
        # scores are sums of float32 products: the rounding of one score bounds that of the log-sum-exp
        bound = 64 * torch.finfo(torch.float32).eps * float(expected_lse[seen].abs().max().clamp(min=1))
        assert float((lse[seen].double() - expected_lse[seen]).abs().max()) <= bound
    assert float(out.transpose(1, 2)[empty].abs().sum()) == 0, "a row that sees no token must be zero"
    return relative, torch_relative


def run_kernels(split, merge, inputs: dict, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A compiled split kernel and combine on one problem, every output and all workspace poisoned with NaN before."""
    q, lengths, starts = inputs["q_latent"], inputs["cache_seqlens"], inputs["cache_starts"]
    batch, seqlen_q, heads, d_c = q.shape
    floats = {"dtype": torch.float32, "device": q.device}
    partial_out = torch.full((batch, num_splits, seqlen_q, heads, d_c), torch.nan, **floats)
    partial_lse = torch.full((batch, num_splits, seqlen_q, heads), torch.nan, **floats)
    out, lse = torch.full_like(q, torch.nan), torch.full((batch, heads, seqlen_q), torch.nan, **floats)
    split(
        q,
        inputs["q_pe"],
        inputs["latent_cache"],
        inputs["rope_cache"].flatten(2),
        inputs["block_table"],
        lengths,
        lengths if starts is None else starts,
        partial_out,
        partial_lse,
        inputs["softmax_scale"],
        int(inputs["causal"]),
        int(starts is not None),
    )
    merge(partial_out, partial_lse, out, lse)
    return out, lse
