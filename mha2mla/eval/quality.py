"""What a conversion cost: perplexity of source and converted, and how far apart their predictions are."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from mha2mla.eval.loading import load_model, load_tokenizer

# Log-probabilities are taken in float32 over slices of at most this many logits (2**25 float32 = 128 MiB), so that a
# large vocabulary times a long window does not decide how much memory an evaluation takes.
_LOGITS_PER_SLICE = 2**25

COLUMNS = {
    "perplexity_source": "perplexity source",
    "perplexity_converted": "converted",
    "perplexity_ratio": "ratio",
    "kl": "KL (nats)",
    "top1_agreement": "top-1 agreement",
    "num_tokens": "tokens",
    "seqlen": "window",
    "text": "text",
    "dtype": "dtype",
    "device": "device",
}


@dataclass(frozen=True)
class QualityReport:
    """Source against converted on the same tokens.

    Attributes:
        perplexity_source, perplexity_converted: exp of the mean negative log-likelihood per scored token.
        kl: mean over scored positions of KL(source ‖ converted), in nats.
        top1_agreement: share of scored positions where both put the same token first.
        num_tokens: tokens scored. A window of ``seqlen`` tokens scores ``seqlen - 1``: its first has no context.
        num_windows, seqlen: windows read, and their length in tokens.
        text: name of the text; dtype, device: what the models computed in, and on.
    """

    perplexity_source: float
    perplexity_converted: float
    kl: float
    top1_agreement: float
    num_tokens: int
    num_windows: int
    seqlen: int
    text: str
    dtype: str
    device: str

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the converted model over the source's; 1 means nothing was lost."""
        return self.perplexity_converted / self.perplexity_source

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"perplexity_ratio": self.perplexity_ratio}


@torch.inference_mode()
def evaluate_quality(
    source: Any,
    converted: Any,
    *,
    text: str = "builtin:prose",
    seqlen: int = 512,
    max_tokens: int = 8192,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    progress: bool = True,
) -> QualityReport:
    """Reads a text with both models and compares what they predict.

    The text is cut into consecutive windows of ``seqlen`` tokens which do not overlap and do not see one another.

    Args:
        source, converted: folder, hub id, or a loaded causal language model (used as it is: ``dtype`` and ``device``
            are then the model's own).
        text: name or path for :func:`mha2mla.texts.load_text`. Choose one that conversion was not calibrated on.
        seqlen: window length in tokens, at least 2.
        max_tokens: tokens to read at most, rounded down to whole windows.
        tokenizer: needed when ``source`` is a loaded model; otherwise the source folder's.
        device: where to compute; default CUDA when there is one.
        dtype: what folders are loaded as. float32 compares the conversions, not the rounding.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: the two do not share one vocabulary or cut the text into different tokens; ``seqlen`` or
            ``max_tokens`` is too small; the text is shorter than one window.
    """
    from mha2mla.texts import load_text, token_windows

    if seqlen < 2:
        raise ValueError(f"seqlen is {seqlen}; expected at least 2 (the first token of a window is not scored)")
    if max_tokens < seqlen:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least one window of seqlen={seqlen} tokens")
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(source, "source")
    content = load_text(text)
    _check_same_tokens(tokenizer, converted, content[:20_000])
    source = load_model(source, "source", device=device, dtype=dtype)
    converted = load_model(converted, "converted", device=device, dtype=dtype)
    _check_same_vocabulary(source, converted)
    windows = token_windows(tokenizer, content, length=seqlen, count=max_tokens // seqlen)

    nll_source = nll_converted = divergence = 0.0
    agreeing = scored = 0
    for window in tqdm(windows, desc="quality", unit="window", disable=not progress):
        ids = window.reshape(1, -1)
        logits_source, logits_converted = (
            model(input_ids=ids.to(model.device), use_cache=False).logits[0, :-1] for model in (source, converted)
        )
        targets = ids[0, 1:].to(logits_source.device)
        step = max(1, _LOGITS_PER_SLICE // logits_source.shape[-1])
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            log_p = logits_source[part].float().log_softmax(-1)
            log_q = logits_converted[part].to(log_p.device).float().log_softmax(-1)
            target = targets[part, None]
            nll_source -= log_p.gather(-1, target).sum(dtype=torch.float64).item()
            nll_converted -= log_q.gather(-1, target).sum(dtype=torch.float64).item()
            divergence += (log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64).item()
            agreeing += (log_p.argmax(-1) == log_q.argmax(-1)).sum().item()
        scored += len(targets)
    return QualityReport(
        perplexity_source=_exp(nll_source / scored),
        perplexity_converted=_exp(nll_converted / scored),
        kl=divergence / scored,
        top1_agreement=agreeing / scored,
        num_tokens=scored,
        num_windows=len(windows),
        seqlen=seqlen,
        text=text,
        dtype=str(converted.dtype).removeprefix("torch."),
        device=str(converted.device),
    )


def _exp(mean_nll: float) -> float:
    """exp that says infinity instead of raising: a broken model has a perplexity too."""
    return math.exp(mean_nll) if mean_nll < 700 else math.inf if mean_nll == mean_nll else math.nan


def _check_same_vocabulary(source: torch.nn.Module, converted: torch.nn.Module) -> None:
    if source.config.vocab_size != converted.config.vocab_size:
        raise ValueError(
            f"converted has vocab_size {converted.config.vocab_size}; expected the source's {source.config.vocab_size}"
        )


def _check_same_tokens(tokenizer: Any, converted: Any, sample: str) -> None:
    """A converted folder brings its own tokenizer: perplexities are comparable only if it cuts the text alike."""
    if isinstance(converted, torch.nn.Module):
        return
    theirs = load_tokenizer(converted, "converted")
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"converted has a tokenizer of {len(theirs)} tokens whose vocabulary is not the source's "
            f"({len(tokenizer)} tokens); expected the same tokenizer"
        )
    ours, other = (t(sample, add_special_tokens=False, verbose=False)["input_ids"] for t in (tokenizer, theirs))
    if ours != other:
        raise ValueError(
            "converted has a tokenizer that cuts the text into other tokens than the source's; expected the same"
        )
