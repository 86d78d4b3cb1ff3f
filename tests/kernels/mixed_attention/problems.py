"""Batches of mixed query lengths for both ops, with NaN wherever no query may look, and what they give exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mha2mla.kernels import LatentRope, kept_keys, mla_attention, plan_gqa_attention, plan_mla_attention, rotary_keys
from mha2mla.kernels.mla_decode.quantization import quantize_keys
from mha2mla.modeling.batch import SequenceBatch
from mha2mla.testing.numeric_check import PlainAttention, errors

SCALE = 0.3


@dataclass(frozen=True)
class Widths:
    heads: int
    kv_heads: int
    rope_heads: int
    latent: int
    rope: int
    nope: int
    value: int
    page: int = 16
    from_latent: bool = False  # nothing rotary is cached
    key_codes: bool = False  # int8 keys are


WIDTHS = {
    "per group": Widths(6, 2, 2, 16, 8, 8, 16),
    "shared": Widths(4, 4, 1, 24, 8, 16, 8),
    "odd groups": Widths(6, 2, 3, 16, 8, 8, 8),
    "no nope": Widths(4, 2, 2, 32, 16, 0, 16),
    "from the latent": Widths(4, 2, 1, 24, 8, 16, 8, from_latent=True),
    "no nope from the latent": Widths(6, 2, 1, 16, 24, 0, 16, from_latent=True),
    "int8 keys": Widths(4, 2, 1, 24, 16, 16, 8, key_codes=True),
}
# new and cached tokens: decodes, a draft, an empty one, a short query over a long context, chunks, a fresh prompt
LENGTHS = ([1, 0, 1, 3, 12, 1, 40, 25, 8], [5, 4, 37, 16, 50, 0, 33, 0, 20])


def widths_on_gpu() -> list[Widths]:
    return [
        Widths(32, 32, 32, 512, 16, 112, 128, 64),
        Widths(9, 3, 3, 192, 16, 48, 64, 64),
        Widths(32, 32, 1, 512, 64, 64, 128, 64),
        Widths(32, 8, 1, 512, 64, 64, 128, 64, from_latent=True),
        Widths(32, 8, 1, 512, 64, 64, 128, 64, key_codes=True),
    ]


@dataclass(frozen=True)
class Problem:
    widths: Widths
    batch: SequenceBatch
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    latent_cache: torch.Tensor
    rope_cache: torch.Tensor | None
    k_up: torch.Tensor | None
    v_up: torch.Tensor
    rope: LatentRope | None = None
    rope_scale: torch.Tensor | None = None

    @classmethod
    def make(
        cls, widths, lengths=LENGTHS, dtype=torch.float32, device="cpu", combined=False, starts=None, rows=None,
        tokens=0,
    ):  # fmt: skip
        """Everything that no query may look at is NaN. ``rows`` that the batch is padded to; ``tokens`` that pad the
        queries, behind them."""
        page = widths.page
        counts = [-(-(new + old) // page) for new, old in zip(*lengths, strict=True)]
        shuffled = iter(torch.randperm(sum(counts) + 3).tolist())
        pages = [[next(shuffled) for _ in range(count)] for count in counts]
        batch = SequenceBatch.build(
            *lengths, pages, page, num_pages=sum(counts) + 3, cache_starts=starts, device=device, num_sequences=rows
        )

        def normal(*shape, scale=1.0):
            return (torch.randn(*shape) * scale).to(device, dtype)

        rows = normal(sum(counts) + 3, page, widths.latent + widths.rope_heads * widths.rope)
        used = torch.zeros(rows.shape[:2], dtype=torch.bool)
        for index, mine in enumerate(pages):
            for t in range(0 if starts is None else starts[index], lengths[0][index] + lengths[1][index]):
                used[mine[t // page], t % page] = True
        rows[~used] = torch.nan
        latent, rope = rows.split((widths.latent, widths.rope_heads * widths.rope), -1)
        rope = rope.unflatten(-1, (widths.rope_heads, widths.rope))
        if not combined:
            latent, rope = latent.contiguous(), rope.contiguous()
        tokens += batch.num_tokens
        k_up = normal(widths.kv_heads, widths.nope, widths.latent, scale=widths.latent**-0.5) if widths.nope else None
        made = scale = None
        if widths.from_latent or widths.key_codes:
            weight = normal(widths.rope, widths.latent, scale=widths.latent**-0.5)
            inv_freq = (10.0 ** -torch.rand(widths.rope // 2)).to(device)
            made = LatentRope(weight, normal(widths.rope), inv_freq, 1.3)
            rope, scale = quantize_keys(rope) if widths.key_codes else (None, None)
        return cls(
            widths, batch, normal(tokens, widths.heads, widths.nope), normal(tokens, widths.heads, widths.rope), latent,
            rope, k_up, normal(widths.kv_heads, widths.value, widths.latent, scale=widths.latent**-0.5), made,
            None if scale is None else scale[..., 0].contiguous(),
        )  # fmt: skip

    def plan(self, **options):
        w, b = self.widths, self.batch
        return plan_mla_attention(
            self.latent_cache, self.rope_cache, b.block_table, b.cache_seqlens, b.lengths, num_attention_heads=w.heads,
            num_key_value_heads=w.kv_heads, qk_nope_head_dim=w.nope, v_head_dim=w.value, cache_starts=b.cache_starts,
            **({"qk_rope_head_dim": w.rope} if w.from_latent else {}), **options,
        )  # fmt: skip

    def run(self, plan=None, backend=None, out=None, **options):
        plan = self.plan(backend=backend, **options) if plan is None else plan
        return mla_attention(
            self.q_nope, self.q_pe, self.latent_cache, self.rope_cache, self.k_up, self.v_up, plan,
            softmax_scale=SCALE, backend=backend, rope=self.rope, rope_scale=self.rope_scale, out=out,
        )  # fmt: skip

    def keys(self):
        """``rope_cache`` as it would be: rotary keys at their places in their sequences."""
        if self.rope is None:
            return self.rope_cache
        places = torch.zeros(self.latent_cache.shape[:2], dtype=torch.int64, device=self.latent_cache.device)
        for pages in self.batch.block_table.tolist():
            for index, page in enumerate(page for page in pages if page >= 0):
                places[page] = torch.arange(self.widths.page) + index * self.widths.page
        if self.rope_scale is not None:
            return kept_keys(self.rope_cache[:, :, 0], self.rope_scale, self.rope, places, torch.float64)[:, :, None]
        return rotary_keys(self.latent_cache.double(), self.rope, places)[:, :, None]

    def exact(self, window=None, sinks=0):
        """The expanded form in float64; whatever the sequence does not see is zero there, since 0 · NaN is NaN."""
        q_nope, q_pe, latent_cache, rope_cache, k_up, v_up = map(
            cleaned, (self.q_nope, self.q_pe, self.latent_cache, self.keys(), self.k_up, self.v_up)
        )
        keys, values = [], []
        for table, length in zip(self.batch.block_table, self.batch.cache_seqlens.tolist(), strict=True):
            latent, k_pe = (rows_of(cache, table, length) for cache in (latent_cache, rope_cache))
            k_nope, value = (None if w is None else torch.einsum("td,hwd->thw", latent, w) for w in (k_up, v_up))
            keys.append((k_pe,) if k_nope is None else (k_nope, k_pe))
            values.append(value)
        queries = (q_pe,) if k_up is None else (q_nope, q_pe)
        return attend_sequences(queries, keys, values, self.batch.lengths.tolist(), window, sinks)


def cleaned(x):
    return None if x is None else x.nan_to_num(0.0).double()


def rows_of(cache, block_table, length):
    """The first ``length`` tokens of a sequence with pages ``block_table`` [max_pages]: [length, ...]."""
    token = torch.arange(length, device=cache.device)
    return cache[block_table.long()[token // cache.shape[1]], token % cache.shape[1]]


def attend_sequences(queries, keys, values, lengths, window=None, sinks=0):
    """Causal attention of queries, parts [N, H, d_i] one sequence behind the other, over each sequence's keys, parts
    [T, G_i, d_i], and values [T, G, d_v]; ``lengths`` as of a batch. Queries behind the last sequence give zeros."""
    outs, begin = [], 0
    for length, _, start, key, value in zip(*lengths, keys, values, strict=True):
        token = torch.arange(len(value), device=value.device)
        last = len(value) - length + torch.arange(length, device=value.device)[:, None]  # a query's own position
        seen = (token <= last) & (token >= start)
        if window is not None:
            seen = seen & ((token > last - window) | (token < start + sinks))
        mine = tuple(query[begin : begin + length] for query in queries)
        outs.append(PlainAttention(mine, key, value, seen, SCALE).attend())
        begin += length
    rest = queries[0].new_zeros(len(queries[0]) - begin, queries[0].shape[1], values[0].shape[-1] if values else 0)
    return torch.cat([*outs, rest])


def layout_of(plan):
    return plan.parts.layout


def error(value, expected):
    return errors(value, expected.double())[0]


def gqa_problem(dtype=torch.float32, device="cpu", heads=6, kv_heads=2, width=16, value=8, page=16, lengths=LENGTHS):
    widths = Widths(heads, 1, kv_heads, kv_heads * value, width, 0, value, page)
    problem = Problem.make(widths, lengths, dtype, device)
    values = problem.latent_cache.unflatten(-1, (kv_heads, value)).contiguous()
    return problem.batch, problem.q_pe, problem.rope_cache, values


def gqa_plan(batch, keys, values, heads=6, **options):
    return plan_gqa_attention(
        keys, values, batch.block_table, batch.cache_seqlens, batch.lengths, num_attention_heads=heads, **options
    )


def gqa_exact(batch, query, keys, values, window=None, sinks=0):
    key_cache, value_cache = cleaned(keys), cleaned(values)
    rows = list(zip(batch.block_table, batch.cache_seqlens.tolist(), strict=True))
    keys, values = [(rows_of(key_cache, *row),) for row in rows], [rows_of(value_cache, *row) for row in rows]
    return attend_sequences((query.double(),), keys, values, batch.lengths.tolist(), window, sinks)
