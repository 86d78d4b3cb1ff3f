"""Statistics of one source layer on calibration text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mha2mla.conversion.families import AttentionWeights, SourceSpec, visible
from mha2mla.modeling.modeling_mha2mla import apply_rope

_MAP_ELEMENTS = 1 << 24  # elements of the attention maps that exist at a time
_ATTENDED_STRIDE = 8  # averages of neighbouring queries are alike: an eighth of them costs an eighth
_FEWEST_SAMPLED = 4  # windows of a length, where there are so many: one long window is not what long windows are like
PAIRS = 1 << 22  # of a sample, unless said otherwise
_QUERIES = 1024  # tokens of a window whose attention is looked at, as many of a long window
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class AttentionSample:
    """A few windows of a layer's inputs, for fits that need more than moments.

    Attributes:
        hidden: normed inputs of the attention, [length, hidden] for each window, which starts at position 0; windows of
            all lengths take turns.
        window: sliding window of the layer, or None.
        pairs: of a query and a key, at most, that a head's fits look at: of queries in all windows of a length, whose
            scores are kept; of the output in each window.
    """

    hidden: tuple[torch.Tensor, ...]
    window: int | None
    pairs: int = PAIRS


@dataclass(frozen=True)
class LayerStatistics:
    """Calibration statistics for the conversion of one layer, float64 / complex128.

    u is the encoder's input: the normed hidden state x, or under q/k-norm [normed keys of all kv heads | x].
    q and k are taken before RoPE, after biases and norms; z_j = k_j + i k_{j + d/2} is a rotary pair.

    Attributes:
        mean: [E] E[u].
        covariance: [E, E] of u, centred.
        query_second_moment: [H, d, d] E[q q^T].
        key_covariance: [d // 2, h_kv, h_kv] Hermitian E[z z^H] over kv heads per frequency; not centred, since a
            rotated key's mean does not drop out of softmax.
        mean_phase: [H, d // 2] g = E exp(iθΔ), Δ = query position − key position, weighted by attention without the
            sink column (the first token of a window); None when it was not asked for.
        attended_mean: [H, E] E[Σ_t p_t u_t], what a head's attention makes of the inputs, over queries; None when it
            was not asked for.
        attended_covariance: [E, E] of the same averages, each head centred by itself, mean over heads; None likewise.
        attention_covariance: [E, E] E Σ_t p_t (u_t − ū)(u_t − ū)^T, ū = Σ_t p_t u_t: the covariance of the inputs
            under one query's attention, mean over queries and heads. Softmax sees a key error only as it differs
            among the tokens that a query attends to. None likewise.
        distances: [H, longest window] share of the attention that goes so many tokens back, without the sink column;
            a head that never looks past the sink has all of it at distance 0. None when it was not asked for.
        sample: some of the inputs themselves; None when it was not asked for.
    """

    mean: torch.Tensor
    covariance: torch.Tensor
    query_second_moment: torch.Tensor
    key_covariance: torch.Tensor
    mean_phase: torch.Tensor | None
    attended_mean: torch.Tensor | None = None
    attended_covariance: torch.Tensor | None = None
    attention_covariance: torch.Tensor | None = None
    distances: torch.Tensor | None = None
    sample: AttentionSample | None = None


class StatisticsCollector:
    """Accumulates ``LayerStatistics`` from a layer's normed inputs, batch by batch.

    Args:
        weights: this layer's; their dtype, float32 or float64, is what the statistics are computed in.
        window: sliding window of this layer, or None.
        phases: whether to measure attention-weighted phases.
        attended: whether to measure attention-weighted averages of the inputs (of every eighth query).
        distances: whether to measure how far attention looks (likewise).
        sample_tokens: keep so many tokens of the inputs, at every length of windows, in whole windows spread over what
            is added.
        pairs: of that sample (:class:`AttentionSample`).
    """

    def __init__(
        self,
        spec: SourceSpec,
        weights: AttentionWeights,
        *,
        window: int | None,
        phases: bool = False,
        attended: bool = False,
        distances: bool = False,
        sample_tokens: int = 0,
        pairs: int = PAIRS,
    ) -> None:
        self.spec, self.weights, self.window, self.phases, self.attended = spec, weights, window, phases, attended
        self.distances, self.sample_tokens, self.pairs = distances, sample_tokens, pairs
        self._samples: dict[int, _Sample] = {}
        self._attention_windows = 0
        device = weights.q_weight.device
        heads, kv_heads, d, half = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.head_dim // 2
        size = spec.hidden_size + (kv_heads * d if spec.qk_norm else 0)  # of u

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.tokens = 0
        self._sum = zeros(size)
        self._outer = zeros(size, size)
        self._query = zeros(heads, d, d)
        self._key = zeros(half, kv_heads, kv_heads, dtype=torch.complex128)
        self._phase = zeros(heads, half, dtype=torch.complex128)
        self._mass = zeros(heads)
        self._distance = zeros(heads, 1)
        self._attended_queries = 0.0
        self._shift: torch.Tensor | None = None  # [E], near the inputs' mean: float32 sums of squares cancel less
        self._attended_sum = zeros(heads, size)
        self._attended_outer = zeros(size, size)
        self._attention_outer = zeros(size, size)

    def add(self, hidden: torch.Tensor) -> None:
        """Takes normed inputs of the attention, [windows, length, hidden]; a window starts at position 0."""
        spec = self.spec
        hidden = hidden.to(self.weights.q_weight.dtype)
        if self.sample_tokens:
            sample = self._samples.setdefault(hidden.shape[1], _Sample(self.sample_tokens))
            for window in hidden:
                sample.add(window)
        half = spec.head_dim // 2
        query, key = spec.heads(hidden, self.weights, "q"), spec.heads(hidden, self.weights, "k")
        features = torch.cat([key.flatten(2), hidden], -1) if spec.qk_norm else hidden
        flat = features.flatten(0, 1).double()
        self.tokens += flat.shape[0]
        self._sum += flat.sum(0)
        self._outer += flat.T @ flat
        rows = query.flatten(0, 1).transpose(0, 1).double()  # [H, tokens, d]
        self._query += rows.mT @ rows
        real, imag = key.double().flatten(0, 1).permute(2, 1, 0).split(half)  # [half, h_kv, tokens]
        pairs = torch.complex(real, imag)
        self._key += pairs @ pairs.mH
        if self.phases or self.attended or self.distances:
            if self._shift is None:
                self._shift = features.mean((0, 1))
            self._add_attention(query.transpose(1, 2), key.transpose(1, 2), features - self._shift)

    def finish(self) -> LayerStatistics:
        mean = self._sum / self.tokens
        covariance = self._outer / self.tokens - torch.outer(mean, mean)
        phase = None
        if self.phases:  # a head that never looks past the sink has no distances: treat its pairs as un-turned
            mass = self._mass[:, None]
            phase = torch.where(mass > 0, self._phase / mass.clamp_min(1e-30), torch.ones_like(self._phase))
        attended_mean = attended_covariance = attention_covariance = None
        if self.attended:
            attended_mean = self._attended_sum / self._attended_queries
            averages = self._attended_queries * self.spec.num_attention_heads
            pooled = self._attended_outer / averages
            attention_covariance = self._attention_outer / averages - pooled
            attention_covariance = (attention_covariance + attention_covariance.T) / 2
            attended_covariance = pooled - attended_mean.T @ attended_mean / self.spec.num_attention_heads
            attended_covariance = (attended_covariance + attended_covariance.T) / 2
            # Weights sum to one, so the covariances do not see the shift and the means are off by exactly it.
            attended_mean = attended_mean + self._shift.double()
        # Each length at its own pace, so that any part of the sample is mixed.
        placed = [
            (index / len(sample.kept), length, window)
            for length, sample in self._samples.items()
            for index, window in enumerate(sample.kept)
        ]
        windows = tuple(window for _, _, window in sorted(placed, key=lambda each: each[:2]))
        distances = None
        if self.distances:  # all at distance 0 where there is nothing
            distances = self._distance.clone()
            distances[:, 0] += distances.sum(-1) == 0
            distances /= distances.sum(-1, keepdim=True)
        return LayerStatistics(
            mean=mean,
            covariance=(covariance + covariance.T) / 2,
            query_second_moment=self._query / self.tokens,
            key_covariance=self._key / self.tokens,
            mean_phase=phase,
            attended_mean=attended_mean,
            attended_covariance=attended_covariance,
            attention_covariance=attention_covariance,
            distances=distances,
            sample=AttentionSample(windows, self.window, self.pairs) if windows else None,
        )

    def _add_attention(self, query: torch.Tensor, key: torch.Tensor, features: torch.Tensor) -> None:
        """query [windows, H, length, d], key [windows, h_kv, length, d], features [windows, length, E]."""
        spec, length = self.spec, query.shape[2]
        position = torch.arange(length, device=query.device, dtype=torch.float64)
        angle = position[:, None] * spec.inv_freq.to(query.device, torch.float64)  # [length, half]
        cos, sin = angle.cos().to(query.dtype), angle.sin().to(query.dtype)
        turns = torch.cat([cos, sin], -1)
        query = apply_rope(query, cos, sin) * (spec.pair_factors.repeat(2) ** 2 * spec.softmax_scale).to(query)
        key = apply_rope(key, cos, sin).repeat_interleave(spec.group_size, 1)
        # Queries of a long window stand for their neighbours; windows begin at different ones (see fit/closed_form.py).
        stride = max(1, length // _QUERIES)
        first = int(self._attention_windows * GOLDEN % 1 * stride)
        self._attention_windows += query.shape[0]
        attended = max(1, _ATTENDED_STRIDE // stride)
        step = max(1, min(length, _MAP_ELEMENTS // (query.shape[0] * query.shape[1] * length))) * stride
        for start in range(first, length, step):
            rows = slice(start, min(start + step, length), stride)
            seen = rows.stop  # keys after the last query of this block are masked for all of them
            scores = query[:, :, rows] @ key[:, :, :seen].mT
            hidden = ~visible(position[rows], position[:seen], self.window)
            weight = torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1)
            share = stride * attended / _ATTENDED_STRIDE
            if self.attended:
                self._add_attended(weight[:, :, ::attended], features[:, :seen], share)
            if self.distances:
                self._add_distances(weight[:, :, ::attended].sum(0), range(seen)[rows][::attended], share)
            if self.phases:
                self._add_phases(weight, turns[:seen], cos[rows], sin[rows], float(stride))

    def _add_attended(self, weight: torch.Tensor, features: torch.Tensor, share: float) -> None:
        """weight [windows, H, queries, keys], features [windows, keys, E], ``share``: how much a query counts.

        Second moments are float64 products: directions that text hardly varies in have a millionth of the largest
        energy, and errors of float32 (of TF32 all the more) would be larger than what they are errors of.
        """
        windows, heads, queries, _ = weight.shape
        averages = (weight.flatten(1, 2) @ features).view(windows, heads, queries, -1)
        self._attended_queries += windows * queries * share
        self._attended_sum += averages.sum(2).double().sum(0) * share
        flat = averages.flatten(0, 2).double()
        self._attended_outer += flat.T @ flat * share
        mass = weight.sum((1, 2)).flatten()[:, None] * share  # attention that each token received
        flat = features.flatten(0, 1).double()
        self._attention_outer += (flat * mass).T @ flat

    def _add_distances(self, weight: torch.Tensor, queries: range, share: float) -> None:
        """weight [H, queries, keys], summed over windows, of ``queries`` at these positions; counts ``share`` each."""
        missing = weight.shape[2] - self._distance.shape[1]
        if missing > 0:
            self._distance = torch.nn.functional.pad(self._distance, (0, missing))
        nearest_first = weight[..., 1:].flip(-1).double() * share
        for index, query in enumerate(queries):
            self._distance[:, :query] += nearest_first[:, index, nearest_first.shape[-1] - query :]

    def _add_phases(
        self, weight: torch.Tensor, turns: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, share: float
    ) -> None:
        """weight [windows, H, queries, keys], turns [keys, 2 half] as (cos | sin), cos and sin [queries, half]."""
        weight[..., 0] = 0  # the sink: attended for its lack of content, at any distance
        # Σ_t p exp(iθ(s − t)) = exp(iθs) (Σ_t p cos θt − i Σ_t p sin θt), summed over queries s and windows
        real, imag = (weight @ turns).chunk(2, -1)
        turned = (cos * real + sin * imag, sin * real - cos * imag)
        self._phase += torch.complex(*(part.sum(2).double().sum(0) for part in turned)) * share
        self._mass += weight.sum(-1).double().sum((0, 2)) * share


class _Sample:
    """Windows of one length: every one until there are too many, then every second one, every fourth, …"""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.kept, self.stride, self.seen = tokens, [], 1, 0

    def add(self, window: torch.Tensor) -> None:
        """Takes [length, hidden]."""
        if self.seen % self.stride == 0:
            self.kept.append(window.clone())
            if len(self.kept) > max(self.tokens // len(window), _FEWEST_SAMPLED):
                self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.seen += 1
