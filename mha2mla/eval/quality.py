"""Quality of a conversion: metrics of source and converted model by window length and by position in the window."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from numbers import Integral
from typing import Any

import torch
from tqdm import tqdm

from mha2mla.conversion.calibration.texts import load_text, plain_tokens, token_windows
from mha2mla.conversion.latent.basis import LatentBasis, latent_statistics
from mha2mla.conversion.predictions import (
    QUALITY_METRICS,
    Metric,
    Predictor,
    compare_predictions,
    join_windows,
    windows_at_once,
)
from mha2mla.eval.generation import GenerationRow, GenerationSettings, compare_generation
from mha2mla.eval.loading import load_model, load_tokenizer
from mha2mla.eval.probes import ProbeRow, ProbeSettings, run_probes
from mha2mla.eval.quantized_caches import (
    ComparedCache,
    FromComputed,
    KeptKeys,
    KVCodes,
    LatentCodes,
    QuantizedKV,
    QuantizedLatent,
    RotaryKeys,
)
from mha2mla.eval.report import html_table
from mha2mla.modeling.config import rotary_key_bits
from mha2mla.modeling.configuration_mha2mla import ROTARY_KEY_CACHES
from mha2mla.terminal import progress_bar

TEXTS = ("builtin:stdlib", "builtin:licences", "builtin:opticks")  # three kinds; no preset calibrates on them
LENGTHS: tuple[int | None, ...] = (512, 2048, None)
MAX_TOKENS = 3 * 8192
POSITION_PARTS = 8
LEAST_EXCESS = 1e-4  # of a window's ratio over 1; below it, its parts differ by rounding
BASIS_TEXT, BASIS_LENGTH, BASIS_TOKENS = "builtin:pydoc", 1024, 4096  # that bases of latents are computed from

COLUMNS = {
    "text": "text",
    "seqlen": "window",
    "cache": "cache",
    "cache_share": "bytes",
    "perplexity_source": "perplexity source",
    "perplexity_converted": "converted",
    "perplexity_ratio": "ratio",
    "kl": "KL (nats)",
    "kl_stderr": "±",
    "top1_agreement": "top-1 agreement",
    "num_tokens": "tokens",
}
POSITION_COLUMNS = {
    "text": "text",
    "seqlen": "window",
    "first": "from token",
    "stop": "to",
    **COLUMNS,
    "excess_over_mean": "excess ÷ mean",
}
NOTE = (
    "bytes: of the cache, relative to the source's in 16 bits; ratio: perplexity relative to the source model"
    " (1.00 = no loss); ±: standard error of KL"
)
POSITION_NOTE = "excess ÷ mean: ratio - 1 of a part, divided by that of the whole window"


@dataclass(frozen=True)
class QualityRow:
    """Source and converted model, or either with a quantised cache, on the same tokens of one text in equal windows.

    Attributes:
        text: its name; text_sha256: first 12 digits of the hash of its content (builtin texts are those of the
            installed packages).
        seqlen: tokens of a window; num_windows: how many were read.
        first, stop: the tokens first … stop−1 of every window are scored. The very first token of a window has no
            context and is never scored.
        num_tokens: tokens scored, all windows together.
        perplexity_source, perplexity_converted: exp of the mean negative log-likelihood per scored token.
        kl: mean of KL(source ‖ converted), in nats; kl_stderr: its standard error, over stretches of at most 512
            tokens; None where there is only one.
        top1_agreement: share of scored tokens where both put the same token first.
        metrics: columns of further metrics (``metrics`` of :func:`evaluate_quality`), by name.
        excess_over_mean: for a part of the window, its excess (ratio − 1) over the whole window's; None where the
            whole window's is within :data:`LEAST_EXCESS` of 0.
        cache: its name, such as "source, KV 4 bits, keys by channel"; cache_share: its bytes at the end of a window
            relative to the source's in 16 bits.
    """

    text: str
    text_sha256: str
    seqlen: int
    num_windows: int
    first: int
    stop: int
    num_tokens: int
    perplexity_source: float
    perplexity_converted: float
    kl: float
    kl_stderr: float | None
    top1_agreement: float
    cache: str
    cache_share: float
    metrics: Mapping[str, float | None]
    excess_over_mean: float | None = None

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity relative to the source model (1.00 = no loss)."""
        return self.perplexity_converted / self.perplexity_source

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; further metrics stand among the fields."""
        fields = asdict(self) | {"perplexity_ratio": self.perplexity_ratio}
        return fields | fields.pop("metrics")


@dataclass(frozen=True, repr=False)
class QualityReport:
    """Result of :func:`evaluate_quality`.

    Attributes:
        rows: per text and window length, whole windows.
        by_position: per text, the eighths of the longest windows that it fills.
        probes, generation: their rows, where requested.
        skipped: why something requested has no row; one sentence each.
        dtype, device: of the models.
        columns: key of a row → heading.
    """

    rows: tuple[QualityRow, ...]
    by_position: tuple[QualityRow, ...]
    probes: tuple[ProbeRow, ...]
    generation: tuple[GenerationRow, ...]
    skipped: tuple[str, ...]
    dtype: str
    device: str
    columns: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without ``columns``."""
        rows = ("rows", "by_position", "probes", "generation")
        found = {**vars(self), **{name: [row.to_dict() for row in getattr(self, name)] for name in rows}}
        del found["columns"]
        return found

    def __str__(self) -> str:
        rows = [
            f"{row.text} in windows of {row.seqlen:,}, {row.cache}: {row.perplexity_ratio:.4f} x the source's"
            f" perplexity, KL {row.kl:.3g}, top-1 agreement {row.top1_agreement:.4f}"
            for row in self.rows
        ]
        return "\n".join([*rows, *(f"not measured: {reason}" for reason in self.skipped)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table([row.to_dict() for row in self.rows], self.columns, title=f"{self.dtype} on {self.device}")


def evaluate_quality(
    source: Any,
    converted: Any,
    *,
    texts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = TEXTS,
    lengths: Sequence[int | None] = LENGTHS,
    max_tokens: int = MAX_TOKENS,
    metrics: Sequence[Metric] = (),
    caches: Sequence[KVCodes | LatentCodes | RotaryKeys] = (),
    probes: bool | int | ProbeSettings = False,
    generation: bool | GenerationSettings = False,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = torch.float32,
    progress: bool = True,
) -> QualityReport:
    """Compares the predictions of both models over texts, in windows of several lengths.

    A text is cut into consecutive windows which do not overlap and do not see one another; every length reads the same
    first tokens of it, and all tokens of a window but the first are scored. Logits exist for a slice of the positions
    at a time (``conversion.predictions``), so that memory is what the models' hidden states and attention take.

    Args:
        source, converted: folder, hub id, or a loaded causal language model (used as it is: ``dtype`` and ``device``
            are then the model's own).
        texts: names or paths for :func:`~mha2mla.conversion.calibration.texts.load_text`; choose ones that conversion
            was not calibrated on.
        lengths: tokens of a window, at least 2; None stands for the most that both models take. What a model does not
            take, or a text does not fill, is left out and named in ``skipped``.
        max_tokens: tokens of each text to read at most, rounded down to whole windows, but to no less than one.
        metrics: further metrics, measured beside perplexity, KL and agreement; their columns stand in every row.
        caches: also compare the source over a quantised KV cache (``KVCodes``), and the converted model over quantised
            latents (``LatentCodes``), whose basis is computed from :data:`BASIS_TEXT`, and over kept rotary keys
            (``RotaryKeys``), whose rows also have the divergence from computed keys; of those that its config keeps,
            always.
        probes: also ask what needs far context (:mod:`mha2mla.eval.probes`); True takes the window lengths that were
            measured, and the last text; a number asks so many questions of each probe. ``caches`` are asked too.
        generation: also compare greedy continuations (:mod:`mha2mla.eval.generation`); True takes the last text.
        tokenizer: needed when ``source`` is a loaded model; otherwise the source folder's.
        device: where to compute; default CUDA when there is one.
        dtype: what folders are loaded as. float32 compares the conversions, not the rounding.

    Raises:
        FileNotFoundError: a folder that is not there.
        TypeError: an entry of ``metrics`` is no :class:`~mha2mla.conversion.predictions.Metric`.
        ValueError: a metric's column exists already, or it returns other values than its base class asks for; source
            and converted do not share one vocabulary or cut the text into different tokens; a bad length or
            ``max_tokens``; no text fills a window of any length; latents are to be quantised of a model that has none,
            or in a basis computed from one of ``texts``.
    """
    texts = [texts] if isinstance(texts, str | os.PathLike) else texts
    _check_amounts(texts, lengths, max_tokens)
    texts = [str(name) for name in texts]  # as rows and their JSON have them
    columns = _with_metrics(metrics, caches)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(source, "source")
    contents = {name: load_text(name) for name in texts}
    _check_same_tokens(tokenizer, converted, [content[:20_000] for content in contents.values()])
    source = load_model(source, "source", device=device, dtype=dtype)
    converted = load_model(converted, "converted", device=device, dtype=dtype)
    if hasattr(converted.config, "with_options") and rotary_key_bits(converted.config):
        caches = list(dict.fromkeys([*caches, RotaryKeys(converted.config.rotary_key_cache)]))
        columns |= FromComputed.columns
    if (size := converted.config.vocab_size) != (expected := source.config.vocab_size):
        raise ValueError(f"converted has vocab_size {size}; expected the source's {expected}")

    longest = longest_window(source, converted)
    windows, skipped = _all_windows(tokenizer, contents, lengths, longest, max_tokens)
    if not windows:
        raise ValueError(f"lengths is {list(lengths)}: nothing can be measured; {'; '.join(skipped)}")
    if isinstance(probes, int) and probes is not False:
        items = {} if probes is True else {"items": probes}
        probes = ProbeSettings(lengths=tuple(sorted({length for _, length in windows})), text=texts[-1], **items)
    if generation is True:
        generation = GenerationSettings(text=texts[-1])
    calibration = basis_tokens(tokenizer, longest) if _codes_latents(caches, texts, converted) else None
    compared = [partial(ComparedCache, converted), *quantized_caches(source, converted, caches, calibration)]
    rows, by_position = _compare_windows(source, compared, metrics, contents, windows, progress)
    models, options = (source, converted, tokenizer), {"longest": longest, "progress": progress}
    asked, unasked = run_probes(*models, probes, caches=compared[1:], **options) if probes else ([], [])
    continued, not_continued = compare_generation(*models, generation, **options) if generation else ([], [])
    return QualityReport(
        tuple(rows), tuple(by_position), tuple(asked), tuple(continued), (*skipped, *unasked, *not_continued),
        str(converted.dtype).removeprefix("torch."), str(converted.device), columns,
    )  # fmt: skip


def _check_amounts(texts: Sequence[Any], lengths: Sequence[int | None], max_tokens: int) -> None:
    for name, values in (("texts", texts), ("lengths", lengths)):
        if not isinstance(values, Sequence):
            raise ValueError(f"{name} is {values!r:.80}; expected a list")
    if not texts:
        raise ValueError("texts is empty; expected the name of at least one text")
    if not lengths:
        raise ValueError("lengths is empty; expected at least one window length, or None for the longest")
    for length in lengths:
        if length is not None and (not isinstance(length, Integral) or length < 2):
            raise ValueError(f"lengths has {length!r}; expected at least 2 (the first token of a window is not scored)")
    if max_tokens < 2:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 2, the shortest window")


def _with_metrics(metrics: Sequence[Metric], caches: Sequence[Any] = ()) -> dict[str, str]:
    """:data:`COLUMNS` and those of the metrics."""
    columns = dict(COLUMNS)
    if any(isinstance(cache, RotaryKeys) for cache in caches):
        columns |= FromComputed.columns
    taken = columns.keys() | {field.name for field in fields(QualityRow)}
    for metric in metrics:
        if not isinstance(metric, Metric):
            raise TypeError(f"metrics has {metric!r}; expected instances of mha2mla.eval.Metric")
        if twice := taken & metric.columns.keys():
            raise ValueError(f"{type(metric).__name__} has column {min(twice)!r}, which exists; expected another name")
        columns |= metric.columns
        taken |= metric.columns.keys()
    return columns


def basis_tokens(tokenizer: Any, longest: int | None = None) -> torch.Tensor:
    """int64 [windows, length] of :data:`BASIS_TEXT`, no longer than ``longest``."""
    length = min(BASIS_LENGTH, longest or BASIS_LENGTH)
    return token_windows(tokenizer, load_text(BASIS_TEXT), length, BASIS_TOKENS // length, seed=0)


def quantized_caches(
    source: torch.nn.Module,
    converted: torch.nn.Module,
    caches: Sequence[KVCodes | LatentCodes | RotaryKeys],
    calibration: torch.Tensor | None,
) -> list[Callable[[], ComparedCache]]:
    """Constructors for :func:`compare_caches`, one for each of ``caches``.

    Args:
        calibration: int64 [windows, length], from which bases of latents are computed; None where none are coded.
    """
    statistics = None if calibration is None else latent_statistics(converted, calibration)
    found: list[Callable[[], ComparedCache]] = []
    bases: dict[LatentCodes, Sequence[LatentBasis]] = {}  # the same for all bits
    for codes in caches:
        if isinstance(codes, KVCodes):
            found.append(partial(QuantizedKV, source, codes))
        elif isinstance(codes, RotaryKeys):
            found.append(partial(KeptKeys, converted, codes))
        else:
            basis = replace(codes, bits=8, sinks=True)
            if basis not in bases:
                bases[basis] = codes.bases(statistics)
            found.append(partial(QuantizedLatent, converted, codes, bases[basis]))
    return found


def _codes_latents(
    caches: Sequence[KVCodes | LatentCodes | RotaryKeys], texts: Sequence[str], converted: torch.nn.Module
) -> bool:
    if not any(isinstance(codes, LatentCodes) for codes in caches):
        return False
    if BASIS_TEXT in texts:
        raise ValueError(f"texts has {BASIS_TEXT!r}, from which bases are computed; expected other texts")
    if not hasattr(converted.config, "kv_lora_rank"):
        raise ValueError(f"converted has model_type {converted.config.model_type!r}; expected latents to quantise")
    if converted.config.latent_bits != 16:
        raise ValueError(f"converted has latent_bits {converted.config.latent_bits}; expected 16 to quantise latents")
    return True


def _compare_windows(
    source: torch.nn.Module,
    caches: Sequence[Callable[[], ComparedCache]],
    metrics: Sequence[Metric],
    contents: dict[str, str],
    windows: dict[tuple[str, int], torch.Tensor],
    progress: bool,
) -> tuple[list[QualityRow], list[QualityRow]]:
    """A row per text, length and cache, and the parts of each text's longest windows with the first cache."""
    rows: list[QualityRow] = []
    by_position: list[QualityRow] = []
    predictor = Predictor(source)
    total = sum(part.numel() for part in windows.values())
    with progress_bar(total=total, desc="quality", unit="token", unit_scale=True, show=progress) as bar:
        for (name, length), part in windows.items():
            digest = hashlib.sha256(contents[name].encode()).hexdigest()[:12]
            found = compare_caches(predictor, caches, name, digest, part, metrics, bar)
            rows += [measured.row() for measured in found]
            if length == max(other for text, other in windows if text == name):
                by_position += [found[0].row(first, stop, rows[-len(found)]) for first, stop in _parts(length)]
    return rows, by_position


def compare_caches(
    source: Predictor,
    caches: Sequence[Callable[[], ComparedCache]],
    text: str,
    digest: str,
    windows: torch.Tensor,
    metrics: Sequence[Metric] = (),
    bar: tqdm | None = None,
) -> list[Measured]:
    """Compares the source with each of ``caches`` over windows int64 [N, length] of one text; ``source`` runs once."""
    length = windows.shape[1]
    compared = [make() for make in caches]
    predictors = [Predictor(each.model, each.run) for each in compared]
    metrics = (*QUALITY_METRICS, *metrics)
    found: list[list[Any]] = [[] for _ in compared]
    for ids in windows.split(windows_at_once(length)):
        expected, targets, first = source.next_tokens(ids), ids[:, 1:].flatten(), None
        for each, predictor, parts in zip(compared, predictors, found, strict=True):
            logits = predictor.next_tokens(ids)
            parts.append(compare_predictions(expected, logits, targets, metrics))
            if each.to_first:
                parts[-1] += compare_predictions(first, logits, targets, each.to_first)
            first = first or logits
        if bar is not None:
            bar.update(ids.numel())
    joined = (join_windows(parts, len(windows)) for parts in found)
    return [
        Measured(
            text, digest, each.name, each.share(length), list(zip((*metrics, *each.to_first), values, strict=True))
        )
        for each, values in zip(compared, joined, strict=True)
    ]


def parse_lengths(text: str) -> tuple[int | None, ...]:
    """Window lengths from a text such as ``512,2048,longest``, for :func:`evaluate_quality`.

    Raises:
        ValueError: a part is neither a number nor "longest".
    """
    parts = [part.strip() for part in text.strip("[]").split(",")]
    if wrong := [part for part in parts if part != "longest" and not part.isdecimal()]:
        raise ValueError(f"lengths has {wrong[0]!r}; expected whole numbers or 'longest', joined by commas")
    return tuple(None if part == "longest" else int(part) for part in parts)


def parse_caches(
    kv_bits: str, latent_bits: str, rotary_key_caches: str = ""
) -> list[KVCodes | LatentCodes | RotaryKeys]:
    """``caches`` of :func:`evaluate_quality` from bits such as ``8,4,3``: of keys both ways, and of latents; and from
    names of kept rotary keys such as ``bfloat16,int8``.

    Raises:
        ValueError: a part is no number of bits from 1 to 8, or no ``rotary_key_cache``.
    """
    found: list[KVCodes | LatentCodes | RotaryKeys] = []
    for name, text in (("kv_bits", kv_bits), ("latent_bits", latent_bits)):
        for part in filter(None, (part.strip() for part in text.strip("[]").split(","))):
            if not part.isdecimal() or not 1 <= int(part) <= 8:
                raise ValueError(f"{name} has {part!r}; expected whole numbers from 1 to 8, joined by commas")
            if name == "kv_bits":
                found += [KVCodes(int(part), "channel"), KVCodes(int(part), "token")]
            else:
                found.append(LatentCodes(int(part)))
    for mode in filter(None, (part.strip() for part in rotary_key_caches.strip("[]").split(","))):
        if mode not in ROTARY_KEY_CACHES:
            raise ValueError(f"rotary_key_cache has {mode!r}; expected some of {', '.join(ROTARY_KEY_CACHES)}")
        found.append(RotaryKeys(mode))
    return found


def longest_window(*models: torch.nn.Module) -> int | None:
    """Tokens of the longest window that all models take, by their configs; None where no config says."""
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models]
    return min((limit for limit in limits if limit is not None), default=None)


def _all_windows(
    tokenizer: Any, contents: dict[str, str], lengths: Sequence[int | None], longest: int | None, max_tokens: int
) -> tuple[dict[tuple[str, int], torch.Tensor], list[str]]:
    """(text, length) -> its windows int64 [windows, length], and why others are missing."""
    if longest is None and None in lengths:
        raise ValueError("lengths has None, and neither model's config has max_position_embeddings; expected numbers")
    windows: dict[tuple[str, int], torch.Tensor] = {}
    skipped: list[str] = []
    numbers = sorted({longest if length is None else length for length in lengths})
    too_long = [length for length in numbers if longest is not None and length > longest]
    skipped += [f"windows of {length}: the models take at most {longest} tokens" for length in too_long]
    for name, length in product(contents, [length for length in numbers if length not in too_long]):
        try:
            windows[name, length] = token_windows(tokenizer, contents[name], length, max(1, max_tokens // length))
        except ValueError as error:  # the text is too short
            skipped.append(f"{name} in windows of {length}: {error}")
    return windows, skipped


def _parts(length: int) -> Iterator[tuple[int, int]]:
    """Eighths of a window, as the first token of each and the one after its last; short windows have fewer parts."""
    parts = min(POSITION_PARTS, length // 2)
    for part in range(parts):
        yield part * length // parts, (part + 1) * length // parts


@dataclass(frozen=True)
class Measured:
    """Metrics of a model and its cache, over all windows of one length of a text.

    Attributes:
        name, share: of the cache.
        values: each metric with key → float64 [windows, length − 1] on the CPU.
    """

    text: str
    digest: str
    name: str
    share: float
    values: list[tuple[Metric, dict[str, torch.Tensor]]]

    def row(self, first: int = 0, stop: int | None = None, whole: QualityRow | None = None) -> QualityRow:
        """Tokens ``first`` … ``stop − 1`` of the windows; token t is what position t − 1 predicts."""
        found: dict[str, float | None] = {}
        windows, positions = next(iter(self.values[0][1].values())).shape
        stop = stop or positions + 1
        for metric, values in self.values:
            reduced = metric.reduce({key: value[:, max(0, first - 1) : stop - 1] for key, value in values.items()})
            if reduced.keys() != metric.columns.keys():
                raise ValueError(
                    f"{type(metric).__name__}.reduce gave {sorted(reduced)}; expected its columns"
                    f" {sorted(metric.columns)}"
                )
            found |= reduced
        own = {key: found.pop(key) for metric in QUALITY_METRICS for key in metric.columns}
        excess = None
        if whole is not None and abs(whole.perplexity_ratio - 1) >= LEAST_EXCESS:
            ratio = own["perplexity_converted"] / own["perplexity_source"]
            excess = (ratio - 1) / (whole.perplexity_ratio - 1)
        return QualityRow(
            text=self.text,
            text_sha256=self.digest,
            seqlen=positions + 1,
            num_windows=windows,
            first=first,
            stop=stop,
            num_tokens=windows * (stop - max(1, first)),
            cache=self.name,
            cache_share=self.share,
            metrics=found,
            excess_over_mean=excess,
            **own,
        )


def _check_same_tokens(tokenizer: Any, converted: Any, samples: Sequence[str]) -> None:
    """A converted folder brings its own tokenizer: perplexities are comparable only if it cuts the text alike."""
    if isinstance(converted, torch.nn.Module):
        return
    theirs = load_tokenizer(converted, "converted")
    if theirs.get_vocab() != tokenizer.get_vocab():
        found = f"a tokenizer of {len(theirs)} tokens whose vocabulary is not the source's ({len(tokenizer)} tokens)"
        raise ValueError(f"converted has {found}; expected the same tokenizer")
    if any(plain_tokens(tokenizer, sample) != plain_tokens(theirs, sample) for sample in samples):
        found = "a tokenizer that cuts the text into other tokens than the source's"
        raise ValueError(f"converted has {found}; expected the same")
