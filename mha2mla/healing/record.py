"""Results of a healing: weights, record, model card, report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mha2mla.checkpoints import CONFIG_FILE, CheckpointError, read_json
from mha2mla.conversion.calibration.texts import DIVERSE, GENERATED
from mha2mla.conversion.card import CARD_FILE, PLOT_FILE, RECORD_FILE
from mha2mla.conversion.destination import ShardedWriter
from mha2mla.conversion.source.files import FileIdentity, copy_files
from mha2mla.conversion.source.opening import OpenedFolder
from mha2mla.eval.report import write_json
from mha2mla.healing.rate import said_of
from mha2mla.healing.settings import Settings
from mha2mla.healing.training import Trained
from mha2mla.modeling.config import CODE_FILES
from mha2mla.modeling.stored_tensors import FREQUENCIES
from mha2mla.terminal import progress_bar

OWN_WINDOWS = "token windows of the caller"  # name of a text that the caller tokenised
_FLOAT32 = (FREQUENCIES, ".latent_centers")  # as convert writes them in every dtype
_UNTRAINED = ", without training."  # of the card that a conversion writes
_CARD = """
## Healing

The numbers above are those from before this training. Then {what} were trained for \
{trained[seconds]:.0f} s on {trained[tokens]:,} tokens ({trained[passes]:.2f} passes over {text[unique_tokens]:,} of \
`{text[name]}`) with the source's full logits as target (KL, temperature 1), by `mha2mla heal`. Held-out windows of \
that text: KL {trained[held_out_before]:.4g} before, {trained[held_out_kept]:.4g} with the weights that are kept, \
{kept}. {text[distinct_4grams]:.0%} of its runs of four tokens are distinct, and the source's \
perplexity of the held-out windows is {text[perplexity_source]:.4g}.

| text | window | tokens | source | converted | healed | KL before | KL after |
|---|---|---|---|---|---|---|---|
{rows}

Settings and curve: `healing` in `{record}`.
"""
_WHAT = {"attention": "attention's weights", "lora": "adapters of attention's projections", "all": "all weights"}


@dataclass(frozen=True, repr=False)
class HealingReport:
    """Result of ``heal``.

    Attributes:
        destination: folder.
        settings: of the run.
        first_steps: by which the rate was chosen: rates and held-out KL after one step; none where it was given.
        trained: what the training did, with its curve.
        text: name, unique tokens, tokens by window length, share of different 4-grams, the source's perplexity of it,
            seconds that writing or reading it took.
        rows: for each text of the conversion's record: window, tokens, perplexity of source, converted and healed
            model, their ratios and KL to the source; both measured by this run, the healed one read back from disk.
        trained_parameters, parameters: of the student.
        shared_parameters: of it that are the source's own memory.
        flop_share: of the GPU's datasheet, products of weights alone; None where either is unknown.
        peak_gpu_bytes: of tensors; None on a CPU.
        cache_ratio: bytes of the cache relative to the source's.
        seconds: of this run, without those of one that it goes on from.
    """

    destination: str
    settings: Settings
    first_steps: tuple[dict[str, float], ...]
    trained: Trained
    text: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    trained_parameters: int
    parameters: int
    shared_parameters: int
    flop_share: float | None
    peak_gpu_bytes: int | None
    cache_ratio: float
    device: str
    seconds: float
    weights_sha256: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "settings": asdict(self.settings), "trained": asdict(self.trained)}

    def lines(self) -> dict[str, str]:
        """Summary: perplexity before and after, held-out loss, what was trained on what, speed, destination."""
        trained, text = self.trained, self.text
        logged = [(row["kl"], row["step"]) for row in trained.curve if "kl" in row]
        (largest, at), usual = max(logged), median(kl for kl, _ in logged)  # one that stands out is worth a look
        by_window = ", ".join(
            f"{share:.0%} in windows of {length:,}" for length, share in text["distinct_4grams_by_window"].items()
        )
        why = f", {said_of(self.first_steps)}" if self.first_steps else ""
        limit = "" if self.flop_share is None else f", {self.flop_share:.1%} of the GPU's FLOP/s"
        worse = [
            f"KL {row['kl_before']:.3g} -> {row['kl_after']:.3g} on {row['text']} in windows of {row['length']:,}"
            for row in self.rows
            if row["kl_after"] > row["kl_before"]
        ]
        better = f"a rate below {self.settings.rate:.3g}" + ", or attention alone" * (self.settings.train == "all")
        real = "real text of many kinds for half of it or more, --text generated-diverse+documents.txt"
        return {
            "perplexity": "; ".join(
                f"{row['ratio_before']:.4f} -> {row['ratio_after']:.4f} x the source's on {row['text']} in windows of"
                f" {row['length']:,} tokens"
                for row in self.rows
            ),
            "held-out KL": f"{trained.held_out_before:.4g} -> {trained.held_out_last:.4g}, best"
            f" {trained.held_out_best:.4g} after step {trained.best_step}; weights kept: {trained.kept}, with"
            f" {trained.held_out_kept:.4g}",
            "training KL": f"median {usual:.4g}, largest {largest:.4g} at step {at}",
            **({"worse": "; ".join(worse)} if worse else {}),
            **({"try": better} if trained.best_step == 0 or worse else {}),
            "rate": f"{self.settings.rate:.3g}, optimizer {self.settings.optimizer}{why}",
            "trained": f"{_WHAT[self.settings.train]}, {self.trained_parameters:,} of {self.parameters:,} parameters;"
            f" {trained.tokens:,} tokens in {trained.steps:,} steps, {trained.passes:.2f} passes over"
            f" {text['unique_tokens']:,} of {text['name']}",
            "text": f"{text['unique_tokens']:,} tokens, {text['distinct_4grams']:.0%} of its runs of four tokens"
            f" distinct ({by_window}), the source's perplexity {text['perplexity_source']:.4g}",
            "speed": f"{trained.tokens_per_second:,.0f} tokens/s{limit}; text {text['seconds']:.0f} s, training"
            f" {trained.seconds:.0f} s, this run {self.seconds:.0f} s",
            "cache": f"{self.cache_ratio:.4f} of the source's, as before",
            "written to": self.destination,
            "load with": f'model, tokenizer = mha2mla.load("{self.destination}")',
            **({"less loss": real} if text["name"] in (DIVERSE, GENERATED) else {}),
        }

    def __str__(self) -> str:
        return "\n".join(f"{name + ':':<12} {text}" for name, text in self.lines().items())

    __repr__ = __str__


def check_pair(source: OpenedFolder, converted: OpenedFolder, files: Mapping[str, FileIdentity]) -> dict[str, Any]:
    """The record of a conversion, once it is one of this source.

    Args:
        files: identity of the source's config and weights.

    Raises:
        CheckpointError: there is no record; it names other files of a source; or, of a record without their digests, a
            tensor outside attention is not the source's.
    """
    if not (converted.folder / RECORD_FILE).is_file():
        raise CheckpointError(f"converted {str(converted.folder)!r} has no {RECORD_FILE}; expected what convert wrote")
    record = read_json(converted.folder, RECORD_FILE)
    made_of, ours = record.get("source_sha256"), {name: each.sha256 for name, each in files.items()}
    wrong = f"converted {str(converted.folder)!r} is no conversion of source {str(source.folder)!r}"
    if made_of:
        for name in sorted(made_of.keys() | ours):
            if made_of.get(name) != ours.get(name):
                raise CheckpointError(f"{wrong}: {name} is not the file that its {RECORD_FILE} names")
        return record
    theirs = source.reader.headers()
    for name in sorted(converted.reader.names()):
        if ".self_attn." in name:
            continue
        tensor = converted.reader.tensor(name)
        if name not in theirs or not torch.equal(source.reader.tensor(name).to(tensor.dtype), tensor):
            raise CheckpointError(f"{wrong}: {name} differs")
    return record


def write_healed(
    converted: OpenedFolder, trained: Mapping[str, Tensor], folder: Path, dtype: torch.dtype | None, *, progress: bool
) -> ShardedWriter:
    """A converted checkpoint with ``trained`` weights in the place of its own; every other file and tensor is copied.

    Args:
        trained: by the checkpoint's names.
        dtype: of the written tensors; None: each its own. Frequencies and the centers of codes stay float32.

    Raises:
        CheckpointError: a trained tensor is none of the checkpoint's.
        ValueError: a value is NaN or infinite.
    """
    reader, writer = converted.reader, ShardedWriter(folder)
    if unknown := sorted(trained.keys() - reader.names()):
        raise CheckpointError(f"tensor {unknown[0]} was trained and is none of {converted.folder}")
    for name in progress_bar(sorted(reader.names()), desc="write", unit="tensor", show=progress):
        tensor = reader.tensor(name)
        made = trained[name].to(device="cpu", dtype=tensor.dtype) if name in trained and dtype is None else tensor
        if dtype is not None and tensor.is_floating_point() and not name.endswith(_FLOAT32):
            made = trained.get(name, tensor).to(device="cpu", dtype=dtype)
        writer.add(name, made)
    writer.finish()
    others = [name for name in (*CODE_FILES, PLOT_FILE) if (converted.folder / name).is_file()]
    copy_files(converted.folder, [CONFIG_FILE, *converted.companions, *others], folder)
    if dtype is not None:
        values = read_json(folder, CONFIG_FILE) | {"dtype": str(dtype).removeprefix("torch.")}
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return writer


def write_record(
    converted: OpenedFolder,
    record: Mapping[str, Any],
    report: HealingReport,
    environment: Mapping[str, Any],
    folder: Path,
) -> None:
    """conversion.json and card of the conversion, whose figures stay as they are, with the healing's beside them; of
    what was healed before also that healing's."""
    fields = {name: value for name, value in record.items() if name not in ("schema", "kind", "rows")}
    healing = {key: value for key, value in report.to_dict().items() if key not in ("destination", "weights_sha256")}
    name = Path(report.destination).resolve().name
    healing |= {"name": name, "flags": _flags(report), "earlier": record.get("healing")}
    fields |= {"weights_sha256": report.weights_sha256, "healing": {**healing, "environment": dict(environment)}}
    write_json(folder / RECORD_FILE, kind="conversion", rows=record["rows"], **fields)
    card = converted.folder / CARD_FILE
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {name}\n"
    for line in ("# {}\n", 'mha2mla.load("{}")'):
        text = text.replace(line.format(record.get("healing", record).get("name")), line.format(name), 1)
    values = report.to_dict() | {"what": _WHAT[report.settings.train], "record": RECORD_FILE}
    values["kept"] = report.trained.kept
    values["rows"] = "\n".join(
        f"| `{row['text']}` | {row['length']:,} | {row['tokens']:,} | {row['perplexity_source']:.4f} |"
        f" {row['perplexity_before']:.4f} ({row['ratio_before']:.4f} ×) | {row['perplexity_after']:.4f}"
        f" ({row['ratio_after']:.4f} ×) | {row['kl_before']:.3g} | {row['kl_after']:.3g} |"
        for row in report.rows
    )
    text = text.replace(_UNTRAINED, ", and then healed by training (last section).", 1)
    (folder / CARD_FILE).write_text(text + _CARD.format_map(values), encoding="utf-8")


def _flags(report: HealingReport) -> list[str]:
    """Flags of ``mha2mla heal`` that name the run's preset, text and settings; none for the caller's own windows."""
    if report.text["name"] == OWN_WINDOWS:
        return []
    settings, tokens = vars(report.settings), report.settings.tokens
    unsaid = vars(Settings.of(report.settings.preset, tokens=tokens)) | {"tokens": None}  # beside tokens no minutes
    given = {name: value for name, value in settings.items() if value not in (None, unsaid[name])}
    words = {"preset": report.settings.preset, "text": report.text["name"], **given}
    return [word for name, value in words.items() for word in ("--" + name.replace("_", "-"), str(value))]
