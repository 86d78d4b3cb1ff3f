"""What a conversion cost: perplexity of source and converted by window length and by position in the window."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from mha2mla.eval.generation import GenerationRow, GenerationSettings, compare_generation
from mha2mla.eval.loading import load_model, load_tokenizer
from mha2mla.eval.probes import ProbeRow, ProbeSettings, run_probes
from mha2mla.eval.report import html_table
from mha2mla.predictions import Predictor, compare_predictions, perplexity, windows_at_once
from mha2mla.progress import progress_bar
from mha2mla.texts import load_text, plain_tokens, token_windows

TEXTS = ("builtin:stdlib", "builtin:licences", "builtin:opticks")  # of three kinds, and no preset calibrates on them
LENGTHS: tuple[int | None, ...] = (512, 2048, None)
MAX_TOKENS = 3 * 8192
POSITION_PARTS = 8

COLUMNS = {
    "text": "text",
    "seqlen": "window",
    "perplexity_source": "perplexity source",
    "perplexity_converted": "converted",
    "perplexity_ratio": "ratio",
    "kl": "KL (nats)",
    "top1_agreement": "top-1 agreement",
    "num_tokens": "tokens",
}
POSITION_COLUMNS = {
    "text": "text",
    "seqlen": "window",
    "first": "from token",
    "stop": "to",
    **COLUMNS,
    "excess_over_mean": "excess ÷ window's",
}


@dataclass(frozen=True)
class QualityRow:
    """Source against converted on the same tokens of one text, in windows of one length.

    Attributes:
        text: its name; text_sha256: first 12 digits of the hash of its content (builtin texts are those of the
            installed packages).
        seqlen: tokens of a window; num_windows: how many were read.
        first, stop: the tokens first … stop−1 of every window are scored. The very first token of a window has no
            context and is never scored.
        num_tokens: tokens scored, all windows together.
        perplexity_source, perplexity_converted: exp of the mean negative log-likelihood per scored token.
        kl: mean of KL(source ‖ converted), in nats.
        top1_agreement: share of scored tokens where both put the same token first.
        excess_over_mean: for a part of the window, its excess (ratio − 1) over the whole window's; None where the
            whole window has none.
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
    top1_agreement: float
    excess_over_mean: float | None = None

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the converted model over the source's; 1 means nothing was lost."""
        return self.perplexity_converted / self.perplexity_source

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"perplexity_ratio": self.perplexity_ratio}


@dataclass(frozen=True, repr=False)
class QualityReport:
    """What :func:`evaluate_quality` measured.

    Attributes:
        rows: per text and window length, whole windows.
        by_position: per text, the eighths of the longest windows that it fills.
        probes, generation: what was asked for of them.
        skipped: why something that was asked for has no row; one sentence each.
        dtype, device: what the models computed in, and on.
    """

    rows: tuple[QualityRow, ...]
    by_position: tuple[QualityRow, ...]
    probes: tuple[ProbeRow, ...]
    generation: tuple[GenerationRow, ...]
    skipped: tuple[str, ...]
    dtype: str
    device: str

    def to_dict(self) -> dict[str, Any]:
        of_rows = ("rows", "by_position", "probes", "generation")
        return {**vars(self), **{name: [row.to_dict() for row in getattr(self, name)] for name in of_rows}}

    def __str__(self) -> str:
        rows = [
            f"{row.text} in windows of {row.seqlen:,}: {row.perplexity_ratio:.4f} x the source's perplexity,"
            f" KL {row.kl:.3g}, top-1 agreement {row.top1_agreement:.4f}"
            for row in self.rows
        ]
        return "\n".join([*rows, *(f"not measured: {reason}" for reason in self.skipped)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table([row.to_dict() for row in self.rows], COLUMNS, title=f"{self.dtype} on {self.device}")


def evaluate_quality(
    source: Any,
    converted: Any,
    *,
    texts: str | Sequence[str] = TEXTS,
    lengths: Sequence[int | None] = LENGTHS,
    max_tokens: int = MAX_TOKENS,
    probes: bool | ProbeSettings = False,
    generation: bool | GenerationSettings = False,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    progress: bool = True,
) -> QualityReport:
    """Reads texts with both models, in windows of several lengths, and compares what they predict.

    A text is cut into consecutive windows which do not overlap and do not see one another; every length reads the same
    first tokens of it, and all tokens of a window but the first are scored. Logits exist for a slice of the positions
    at a time (:mod:`mha2mla.predictions`), so that memory is what the models' hidden states and attention take.

    Args:
        source, converted: folder, hub id, or a loaded causal language model (used as it is: ``dtype`` and ``device``
            are then the model's own).
        texts: names or paths for :func:`mha2mla.texts.load_text`. Choose ones that conversion was not calibrated on.
        lengths: tokens of a window, at least 2; None stands for the most that both models take. What a model does not
            take, or a text does not fill, is left out and named in ``skipped``.
        max_tokens: tokens of each text to read at most, rounded down to whole windows, but to no less than one.
        probes: also ask what needs far context (:mod:`mha2mla.eval.probes`); True takes the window lengths that were
            measured, and the last text.
        generation: also compare greedy continuations (:mod:`mha2mla.eval.generation`); True takes the last text.
        tokenizer: needed when ``source`` is a loaded model; otherwise the source folder's.
        device: where to compute; default CUDA when there is one.
        dtype: what folders are loaded as. float32 compares the conversions, not the rounding.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: the two do not share one vocabulary or cut the text into different tokens; a bad length or
            ``max_tokens``; no text fills a window of any length.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    _check_amounts(texts, lengths, max_tokens)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(source, "source")
    contents = {name: load_text(name) for name in texts}
    _check_same_tokens(tokenizer, converted, [content[:20_000] for content in contents.values()])
    source = load_model(source, "source", device=device, dtype=dtype)
    converted = load_model(converted, "converted", device=device, dtype=dtype)
    sizes = [model.config.vocab_size for model in (source, converted)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"converted has vocab_size {sizes[1]}; expected the source's {sizes[0]}")

    longest = longest_window(source, converted)
    windows, skipped = _all_windows(tokenizer, contents, lengths, longest, max_tokens)
    if not windows:
        raise ValueError(f"lengths is {list(lengths)}: nothing can be measured; {'; '.join(skipped)}")
    rows, by_position = _compare_windows(source, converted, contents, windows, progress)
    settings = {"longest": longest, "progress": progress}
    asked: list[ProbeRow] = []
    if probes:
        if probes is True:
            probes = ProbeSettings(lengths=tuple(sorted({row.seqlen for row in rows})), text=texts[-1])
        asked, missing = run_probes(source, converted, tokenizer, probes, **settings)
        skipped += missing
    said: list[GenerationRow] = []
    if generation:
        generation = GenerationSettings(text=texts[-1]) if generation is True else generation
        said, missing = compare_generation(source, converted, tokenizer, generation, **settings)
        skipped += missing
    return QualityReport(
        rows=tuple(rows),
        by_position=tuple(by_position),
        probes=tuple(asked),
        generation=tuple(said),
        skipped=tuple(skipped),
        dtype=str(converted.dtype).removeprefix("torch."),
        device=str(converted.device),
    )


def _check_amounts(texts: Sequence[str], lengths: Sequence[int | None], max_tokens: int) -> None:
    if not texts:
        raise ValueError("texts is empty; expected the name of at least one text")
    if not lengths:
        raise ValueError("lengths is empty; expected at least one window length, or None for the longest")
    for length in lengths:
        if length is not None and length < 2:
            raise ValueError(f"lengths has {length}; expected at least 2 (the first token of a window is not scored)")
    if max_tokens < 2:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 2, the shortest window")


def _compare_windows(
    source: torch.nn.Module,
    converted: torch.nn.Module,
    contents: dict[str, str],
    windows: dict[tuple[str, int], torch.Tensor],
    progress: bool,
) -> tuple[list[QualityRow], list[QualityRow]]:
    """A row per text and length, and the parts of each text's longest windows."""
    rows: list[QualityRow] = []
    by_position: list[QualityRow] = []
    predictors = Predictor(source), Predictor(converted)
    total = sum(part.numel() for part in windows.values())
    with progress_bar(total=total, desc="quality", unit="token", unit_scale=True, show=progress) as bar:
        for (name, length), part in windows.items():
            sums = _sums_by_position(*predictors, part, bar)
            digest = hashlib.sha256(contents[name].encode()).hexdigest()[:12]
            whole = _row(name, digest, part, sums, 0, length)
            rows.append(whole)
            if length == max(other for text, other in windows if text == name):
                by_position += [_row(name, digest, part, sums, first, stop, whole) for first, stop in _parts(length)]
    return rows, by_position


def parse_lengths(text: str) -> tuple[int | None, ...]:
    """Window lengths from a text such as ``512,2048,longest``, for :func:`evaluate_quality`.

    Raises:
        ValueError: a part is neither a number nor "longest".
    """
    parts = [part.strip() for part in text.strip("[]").split(",")]
    if wrong := [part for part in parts if part != "longest" and not part.isdecimal()]:
        raise ValueError(f"lengths has {wrong[0]!r}; expected whole numbers or 'longest', joined by commas")
    return tuple(None if part == "longest" else int(part) for part in parts)


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
    windows, skipped = {}, []
    asked = sorted({longest if length is None else length for length in lengths})
    for length in asked:
        if longest is not None and length > longest:
            skipped.append(f"windows of {length}: the models take at most {longest} tokens")
    asked = [length for length in asked if longest is None or length <= longest]
    for name, content in contents.items():
        for length in asked:
            try:
                windows[name, length] = token_windows(tokenizer, content, length, max(1, max_tokens // length))
            except ValueError as error:  # the text is too short
                skipped.append(f"{name} in windows of {length}: {error}")
    return windows, skipped


def _sums_by_position(source: Predictor, converted: Predictor, windows: torch.Tensor, bar: tqdm) -> torch.Tensor:
    """float64 [4, length − 1] on the CPU: the fields of a Comparison, summed over windows."""
    length = windows.shape[1]
    sums = torch.zeros(4, length - 1, dtype=torch.float64)
    for ids in windows.split(windows_at_once(length)):
        compared = compare_predictions(source.next_tokens(ids), converted.next_tokens(ids), ids[:, 1:].flatten())
        fields = (compared.nll_source, compared.nll_converted, compared.kl, compared.agrees)
        sums += torch.stack([field.double().cpu() for field in fields]).view(4, len(ids), length - 1).sum(1)
        bar.update(ids.numel())
    return sums


def _parts(length: int) -> Iterator[tuple[int, int]]:
    """Eighths of a window, as the first token of each and the one after its last; short windows have fewer parts."""
    parts = min(POSITION_PARTS, length // 2)
    for part in range(parts):
        yield part * length // parts, (part + 1) * length // parts


def _row(
    name: str,
    digest: str,
    windows: torch.Tensor,
    sums: torch.Tensor,
    first: int,
    stop: int,
    whole: QualityRow | None = None,
) -> QualityRow:
    """Tokens ``first`` … ``stop − 1`` of the windows; token t is what position t − 1 predicts."""
    scored = sums[:, max(0, first - 1) : stop - 1]
    tokens = len(windows) * scored.shape[1]
    nll_source, nll_converted, kl, agreeing = (scored.sum(1) / tokens).tolist()
    perplexities = perplexity(nll_source), perplexity(nll_converted)
    excess = None
    if whole is not None and whole.perplexity_ratio != 1:
        excess = (perplexities[1] / perplexities[0] - 1) / (whole.perplexity_ratio - 1)
    return QualityRow(
        text=name,
        text_sha256=digest,
        seqlen=windows.shape[1],
        num_windows=len(windows),
        first=first,
        stop=stop,
        num_tokens=tokens,
        perplexity_source=perplexities[0],
        perplexity_converted=perplexities[1],
        kl=kl,
        top1_agreement=agreeing,
        excess_over_mean=excess,
    )


def _check_same_tokens(tokenizer: Any, converted: Any, samples: Sequence[str]) -> None:
    """A converted folder brings its own tokenizer: perplexities are comparable only if it cuts the text alike."""
    if isinstance(converted, torch.nn.Module):
        return
    theirs = load_tokenizer(converted, "converted")
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"converted has a tokenizer of {len(theirs)} tokens whose vocabulary is not the source's "
            f"({len(tokenizer)} tokens); expected the same tokenizer"
        )
    for sample in samples:
        if plain_tokens(tokenizer, sample) != plain_tokens(theirs, sample):
            raise ValueError(
                "converted has a tokenizer that cuts the text into other tokens than the source's; expected the same"
            )
