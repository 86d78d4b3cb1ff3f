"""Steps from raw projections: token by token they equal attention over whole rotated sequences; refusals; kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha2mla.kernels import (
    LatentRope,
    dequantize_latent,
    gqa_step,
    mla_step,
    plan_gqa_attention,
    plan_gqa_decode,
    plan_mla_attention,
    plan_mla_decode,
    rope_rotate,
    rotary_keys,
)
from mha2mla.modeling.batch import SequenceBatch
from tests.kernels.oracles import gqa_step_reference, mla_step_reference

SCALE, FACTOR = 0.3, 1.3
LENGTHS = (37, 5, 64, 20)  # tokens of each sequence in the end
SHAPES = {"per group": (6, 2, 3), "shared": (4, 4, 1), "no nope": (4, 2, 2), "latent": (4, 2, 1)}  # H, h_kv, G
PAGE, D_C, D_R, D_V = 16, 24, 8, 16


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@dataclass
class Layer:
    """Projections of whole sequences [B, T, ...], weights, and an empty paged cache, poisoned, on shuffled pages."""

    tokens: dict[str, Tensor]
    weights: dict[str, Any]
    cache: dict[str, Tensor]
    table: Tensor

    @classmethod
    def make(cls, kind: str, dtype=torch.float64, device="cpu", widths=(D_C, D_R, D_V, 8, PAGE), heads=None):
        d_c, d_r, d_v, d_n, page = widths
        d_n = 0 if kind == "no nope" else d_n
        count, kv_heads, groups = SHAPES[kind] if heads is None else heads
        batch, longest = len(LENGTHS), max(LENGTHS)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape) * scale).to(device, dtype)

        tokens = {name: normal(batch, longest, *shape) for name, shape in {
            "q_nope": (count, d_n), "q_pe": (count, d_r), "latent": (d_c,), "k_pe": (groups, d_r)
        }.items()}  # fmt: skip
        max_pages = -(-longest // page)
        pages = batch * max_pages + 2
        cache = {"latent_cache": (d_c,), "rope_cache": (groups, d_r)}
        cache = {
            name: torch.full((pages, page, *s), torch.nan, device=device, dtype=dtype) for name, s in cache.items()
        }
        weights = {
            "k_up": normal(kv_heads, d_n, d_c, scale=d_c**-0.5) if d_n else None,
            "v_up": normal(kv_heads, d_v, d_c, scale=d_c**-0.5),
            "inv_freq": (10.0 ** -torch.rand(groups, d_r // 2)).to(device),
        }
        if kind == "latent":
            turn = weights["inv_freq"][0]
            weights["rope"] = LatentRope(normal(d_r, d_c, scale=d_c**-0.5), normal(d_r), turn, FACTOR)
            tokens["k_pe"] = cache["rope_cache"] = weights["inv_freq"] = None
        table = torch.randperm(pages)[: batch * max_pages].view(batch, max_pages).int().to(device)
        return cls(tokens, weights, cache, table)

    def take(self, starts: list[int], count: int) -> list[Tensor | None]:
        """The ``count`` tokens of each sequence from ``starts`` on, as the step takes them."""
        names = ("q_nope", "q_pe", "latent", "k_pe")
        return [
            None
            if (x := self.tokens[name]) is None
            else torch.stack([x[b, s : s + count] for b, s in enumerate(starts)])
            for name in names
        ]

    def step(self, starts: list[int], count: int, **options) -> Tensor:
        seqlens = torch.tensor([s + count for s in starts], dtype=torch.int32, device=self.table.device)
        k_up, v_up, inv_freq = (self.weights[name] for name in ("k_up", "v_up", "inv_freq"))
        plan = None
        if "window" in options:
            plan = plan_mla_decode(
                self.latents().expand(len(starts), count, self.tokens["q_pe"].shape[2], -1),
                self.cache["latent_cache"] if self.cache["rope_cache"] is None else self.cache["rope_cache"],
                self.table, seqlens, qk_rope_head_dim=self.tokens["q_pe"].shape[3], window=options.pop("window"),
                sinks=options.pop("sinks"), cache_starts=options.get("cache_starts"),
            )  # fmt: skip
        if "rope" not in self.weights:
            options["attention_scaling"] = FACTOR
        return mla_step(
            *self.take(starts, count), *self.cache.values(), k_up, v_up, inv_freq, self.table, seqlens,
            softmax_scale=SCALE, rope=self.weights.get("rope"), plan=plan, **options,
        )  # fmt: skip

    def latents(self) -> Tensor:
        return self.tokens["latent"].new_empty(1, 1, 1, self.tokens["latent"].shape[-1])

    def dense(self, b: int, window: int | None = None, sinks: int = 0, start: int = 0) -> Tensor:
        """Attention of a whole sequence over itself, in float64: [T, H, d_v]."""
        q_nope, q_pe, latent = (self.tokens[name][b].double() for name in ("q_nope", "q_pe", "latent"))
        place = torch.arange(len(latent), device=latent.device, dtype=torch.int32)
        count = q_pe.shape[1]
        if "rope" in self.weights:
            rope = self.weights["rope"]
            wide = LatentRope(rope.weight.double(), rope.bias.double(), rope.inv_freq, rope.scaling)
            k_pe, inv_freq = rotary_keys(latent, wide, place)[:, None], rope.inv_freq[None]
        else:
            inv_freq = self.weights["inv_freq"]
            k_pe = rope_rotate(self.tokens["k_pe"][b].double(), place, inv_freq, attention_scaling=FACTOR)
        q_pe = rope_rotate(q_pe, place, inv_freq, attention_scaling=FACTOR)
        k_up, v_up = (None if w is None else w.double() for w in (self.weights["k_up"], self.weights["v_up"]))
        score = torch.einsum("qhd,thd->hqt", q_pe, k_pe.repeat_interleave(count // k_pe.shape[1], 1))
        if k_up is not None:
            keys = torch.einsum("kdc,tc->tkd", k_up, latent).repeat_interleave(count // len(k_up), 1)
            score = score + torch.einsum("qhd,thd->hqt", q_nope, keys)
        behind = place[:, None] - place
        seen = (behind >= 0) & (place >= start)
        if window is not None:
            seen = seen & ((behind < window) | (place < start + sinks))
        weight = (score * SCALE).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        values = torch.einsum("kdc,tc->tkd", v_up, latent).repeat_interleave(count // len(v_up), 1)
        return torch.einsum("hqt,thd->qhd", weight, values)


def rows(dense: list[Tensor], starts: list[int], count: int) -> Tensor:
    return torch.stack([out[s : s + count] for out, s in zip(dense, starts, strict=True)])


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("kind", SHAPES)
@torch.no_grad()
def test_steps_equal_whole_sequences(kind, count):
    """Each step writes what later ones read; window and sinks by a plan; left padding."""
    layer = Layer.make(kind)
    dense = [layer.dense(b) for b in range(len(LENGTHS))]
    for first in range(0, max(LENGTHS) - count + 1, count):
        starts = [min(first, length - count) if length >= count else 0 for length in LENGTHS]
        found = layer.step(starts, count)
        assert error(found, rows(dense, starts, count)) < 1e-12
    limits, padding = {"window": 9, "sinks": 2}, [0, 1, 7, 3]
    dense = [layer.dense(b, **limits, start=start) for b, start in enumerate(padding)]
    starts = [length - count for length in LENGTHS] if count <= 5 else starts
    found = layer.step(starts, count, cache_starts=torch.tensor(padding, dtype=torch.int32), **limits)
    assert error(found, rows(dense, starts, count)) < 1e-12


@pytest.mark.parametrize("kind", ["per group", "no nope"])
def test_the_reference_writes_and_says_the_same(kind):
    layer = Layer.make(kind)
    other = replace(layer, cache={name: tensor.clone() for name, tensor in layer.cache.items()})
    for first in (0, 2, 4, 6):
        found = layer.step([first] * 4, 2)
        k_up, v_up, inv_freq = (other.weights[name] for name in ("k_up", "v_up", "inv_freq"))
        expected = mla_step_reference(
            *other.take([first] * 4, 2), *other.cache.values(), k_up, v_up, inv_freq, other.table, [first + 2] * 4,
            softmax_scale=SCALE, attention_scaling=FACTOR,
        )  # fmt: skip
        assert error(found, expected) < 1e-12
    for name, mine in layer.cache.items():
        assert torch.equal(mine.isnan(), other.cache[name].isnan())
        assert torch.allclose(mine.nan_to_num(0.0), other.cache[name].nan_to_num(0.0), rtol=0, atol=1e-14)


def test_rows_of_padding_write_nothing_and_positions_may_be_given():
    layer = Layer.make("shared")
    before = {name: tensor.clone() for name, tensor in layer.cache.items()}
    given, empty = layer.take([0] * 4, 2), torch.zeros(4, dtype=torch.int32)
    k_up, v_up, inv_freq = (layer.weights[name] for name in ("k_up", "v_up", "inv_freq"))
    caches, options = layer.cache.values(), {"softmax_scale": SCALE}
    out = mla_step(*given, *caches, k_up, v_up, inv_freq, layer.table, empty, **options)
    assert not out.any()
    assert all(torch.equal(mine.isnan(), before[name].isnan()) for name, mine in layer.cache.items())
    # Scores depend on distances: other positions of all tokens alike change nothing.
    seqlens, found = empty + 2, []
    for shift in (0, 7):
        positions = (torch.arange(2, dtype=torch.int32) + shift).expand(4, 2)
        found.append(
            mla_step(*given, *caches, k_up, v_up, inv_freq, layer.table, seqlens, positions=positions, **options)
        )
    assert error(*found) < 1e-6  # frequencies are float32


@pytest.mark.parametrize("kind", ["per group", "latent"])
def test_ragged_batches(kind):
    """Prompts, chunks and single tokens in one call, by the plan of a ragged batch."""
    layer = Layer.make(kind)
    dense = [layer.dense(b, window=25, sinks=3) for b in range(4)]
    done = [0, 0, 0, 0]
    k_up, v_up, inv_freq = (layer.weights[name] for name in ("k_up", "v_up", "inv_freq"))
    scaling = {} if "rope" in layer.weights else {"attention_scaling": FACTOR}
    for new in ([20, 1, 30, 0], [1, 3, 30, 12], [16, 1, 4, 8]):
        batch = SequenceBatch.build(new, done, layer.table.tolist(), PAGE)
        plan = plan_mla_attention(
            *layer.cache.values(), batch.block_table, batch.cache_seqlens, batch.lengths,
            num_attention_heads=layer.tokens["q_pe"].shape[2], num_key_value_heads=v_up.shape[0],
            qk_nope_head_dim=8, v_head_dim=D_V, window=25, sinks=3,
            qk_rope_head_dim=D_R if kind == "latent" else None,
        )  # fmt: skip
        flat = [
            None if x is None else batch.flatten([x[b, done[b] : done[b] + new[b]] for b in range(4)])
            for x in (layer.tokens[name] for name in ("q_nope", "q_pe", "latent", "k_pe"))
        ]
        out = mla_step(
            *flat, *layer.cache.values(), k_up, v_up, inv_freq, None, None, softmax_scale=SCALE, plan=plan,
            positions=batch.positions, slots=batch.slots, rope=layer.weights.get("rope"), **scaling,
        )  # fmt: skip
        for b, mine in enumerate(batch.unflatten(out)):
            assert not new[b] or error(mine, dense[b][done[b] : done[b] + new[b]]) < 1e-12
            done[b] += new[b]


def test_latents_of_eight_bits():
    """As over the latents that were stored; new ones are quantised where they are written."""
    layer = Layer.make("per group", torch.float32, widths=(32, 8, 16, 8, PAGE))
    scale = torch.full(layer.cache["latent_cache"].shape[:2], torch.nan)
    codes = torch.zeros(layer.cache["latent_cache"].shape).to(torch.float8_e4m3fn)
    plain, layer.cache["latent_cache"] = layer.cache["latent_cache"], codes
    found = [layer.step([first] * 4, 4, latent_scale=scale) for first in (0, 4)][-1]
    stored = dequantize_latent(codes, scale)
    layer.cache["latent_cache"] = plain.copy_(stored)
    layer.tokens["latent"] = torch.stack([
        torch.stack([stored[layer.table[b, t // PAGE], t % PAGE] for t in range(8)]) for b in range(4)
    ])  # fmt: skip
    assert error(found, layer.step([4] * 4, 4)) < 1e-6


def gqa_layer(dtype=torch.float64, device="cpu", heads=6, kv_heads=2, d_k=16, d_v=8, page=PAGE) -> dict[str, Tensor]:
    batch, longest = len(LENGTHS), max(LENGTHS)
    max_pages = -(-longest // page)
    shapes = {"query": (heads, d_k), "key": (kv_heads, d_k), "value": (kv_heads, d_v)}
    made = {name: torch.randn(batch, longest, *shape).to(device, dtype) for name, shape in shapes.items()}
    for name, width in (("key_cache", d_k), ("value_cache", d_v)):
        pages = (batch * max_pages, page, kv_heads, width)
        made[name] = torch.full(pages, torch.nan, device=device, dtype=dtype)
    made["inv_freq"] = (10.0 ** -torch.rand(1, d_k // 2)).to(device)
    made["table"] = torch.randperm(batch * max_pages).view(batch, max_pages).int().to(device)
    return made


def test_gqa_steps_equal_whole_sequences():
    layer = gqa_layer()
    caches = [layer[name] for name in ("key_cache", "value_cache")]
    other = [cache.clone() for cache in caches]
    for first in range(0, 60, 4):
        seqlens = torch.full((4,), first + 4, dtype=torch.int32)
        mine = [layer[name][:, first : first + 4] for name in ("query", "key", "value")]
        plan = plan_gqa_decode(mine[0], caches[0], layer["table"], seqlens, v_head_dim=8, window=11, sinks=2)
        found = gqa_step(
            *mine, *caches, layer["inv_freq"], layer["table"], seqlens, softmax_scale=SCALE, plan=plan,
            attention_scaling=FACTOR,
        )  # fmt: skip
        expected = gqa_step_reference(
            *mine, *other, layer["inv_freq"], layer["table"], seqlens.tolist(), softmax_scale=SCALE, window=11, sinks=2,
            attention_scaling=FACTOR,
        )  # fmt: skip
        assert error(found, expected) < 1e-12
    place = torch.arange(60, dtype=torch.int32)
    for b in range(4):
        query, key = (
            rope_rotate(layer[name][b, :60], place, layer["inv_freq"], attention_scaling=FACTOR)
            for name in ("query", "key")
        )
        behind = place[:, None] - place
        seen = (behind >= 0) & ((behind < 11) | (place < 2))
        score = torch.einsum("qhd,thd->hqt", query, key.repeat_interleave(3, 1)) * SCALE
        weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
        dense = torch.einsum("hqt,thd->qhd", weight, layer["value"][b, :60].repeat_interleave(3, 1))
        assert error(found[b], dense[-4:]) < 1e-12


def test_gqa_ragged_batches():
    layer, done = gqa_layer(), [0, 0, 0, 0]
    caches = [layer[name] for name in ("key_cache", "value_cache")]
    whole = [layer[name][:, :40] for name in ("query", "key", "value")]
    other = [torch.full_like(cache, torch.nan) for cache in caches]
    expected = gqa_step_reference(*whole, *other, layer["inv_freq"], layer["table"], [40] * 4, softmax_scale=SCALE)
    for new in ([20, 1, 30, 0], [1, 3, 10, 12], [19, 1, 0, 8]):
        batch = SequenceBatch.build(new, done, layer["table"].tolist(), PAGE)
        plan = plan_gqa_attention(*caches, batch.block_table, batch.cache_seqlens, batch.lengths, num_attention_heads=6)
        flat = [
            batch.flatten([layer[name][b, done[b] : done[b] + new[b]] for b in range(4)])
            for name in ("query", "key", "value")
        ]
        out = gqa_step(
            *flat, *caches, layer["inv_freq"], None, None, softmax_scale=SCALE, plan=plan, positions=batch.positions,
            slots=batch.slots,
        )  # fmt: skip
        for b, mine in enumerate(batch.unflatten(out)):
            assert not new[b] or error(mine, expected[b, done[b] : done[b] + new[b]]) < 1e-12
            done[b] += new[b]


def test_refusals_name_the_argument():
    layer = Layer.make("per group")
    seqlens = torch.full((4,), 2, dtype=torch.int32)
    k_up, v_up, inv_freq = (layer.weights[name] for name in ("k_up", "v_up", "inv_freq"))
    given = [*layer.take([0] * 4, 2), *layer.cache.values(), k_up, v_up]
    rope = Layer.make("latent").weights["rope"]
    batch = SequenceBatch.build([1] * 4, [0] * 4, layer.table.tolist(), PAGE)
    plan = plan_mla_attention(
        *layer.cache.values(), batch.block_table, batch.cache_seqlens, batch.lengths, num_attention_heads=6,
        num_key_value_heads=2, qk_nope_head_dim=8, v_head_dim=D_V,
    )  # fmt: skip
    for arguments, options, message in (
        ((None, layer.table, seqlens), {}, "inv_freq and rope: neither given"),
        ((inv_freq, layer.table, seqlens), {"rope": rope}, "inv_freq and rope: both given"),
        ((None, layer.table, seqlens), {"rope": rope, "interleaved": True}, "interleaved is True; expected False with"),
        ((inv_freq, None, seqlens), {}, "block_table or cache_seqlens is None; expected tensors, or the plan"),
        (
            (inv_freq, layer.table, None),
            {"plan": plan},
            "block_table is given; expected None with the plan of a ragged",
        ),
        ((inv_freq, None, None), {"plan": plan}, r"positions is None; expected int32 \[N\] with the plan of a ragged"),
    ):
        with pytest.raises(ValueError, match=message):
            mla_step(*given, *arguments, softmax_scale=SCALE, **options)
    long = [*layer.take([0] * 4, 5), *layer.cache.values(), k_up, v_up]
    long[:4] = [x.repeat_interleave(2, 1) for x in long[:4]]
    with pytest.raises(
        ValueError, match=r"the query's shape is \(4, 10, 6, 8\); expected \[B, S_q, H, width\] with at"
    ):
        mla_step(*long, inv_freq, layer.table, seqlens, softmax_scale=SCALE)


def test_it_breaks_no_compiled_graph():
    eager = Layer.make("per group", torch.float32)
    traced = replace(eager, cache={name: tensor.clone() for name, tensor in eager.cache.items()})
    compiled = torch.compile(lambda: traced.step([0] * 4, 2), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), eager.step([0] * 4, 2))


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["per group", "latent"])
@torch.no_grad()
def test_kernels_are_as_right_as_torch(kind):
    """Beside the reference, which rounds what it caches as the kernels do."""
    widths, heads = ((512, 64, 128, 64, 64), (32, 8, 1)) if kind == "latent" else ((512, 16, 128, 112, 64), (32, 8, 8))
    layer = Layer.make(kind, torch.bfloat16, "cuda", widths, heads)
    other = replace(layer, cache={name: None if x is None else x.clone() for name, x in layer.cache.items()})
    dense = [layer.dense(b) for b in range(4)]
    for first, count in [*((first, 2) for first in range(0, 40, 2)), (40, 1)]:
        found = layer.step([first] * 4, count, backend="tilelang")
        torch_out = other.step([first] * 4, count, backend="reference")
        expected = rows(dense, [first] * 4, count)
        assert error(found, expected) < 2 * error(torch_out, expected)
