"""Last stage: what the conversion did and measured, as a report, a record, and a model card with a picture."""

from __future__ import annotations

import math
import resource
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from mha2mla.conversion.card import CARD_FILE, PLOT_FILE, RECORD_FILE, card_metadata, model_card
from mha2mla.conversion.destination import ShardedWriter
from mha2mla.conversion.families import SourceSpec
from mha2mla.conversion.parity import ParityReport
from mha2mla.conversion.source.files import companions, identify
from mha2mla.conversion.source.opening import OpenedFolder
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.environment import collect_environment, describe_environment, installed_version
from mha2mla.eval.plots import LAYER_COLUMNS, loss_by_layer
from mha2mla.eval.report import VALUE_COLUMNS, filled, html_table, markdown_table, value_rows, write_json
from mha2mla.geometry import MLAGeometry, kept_keys_share
from mha2mla.modeling import LayerAttention, MHA2MLAConfig, what_serves
from mha2mla.modeling.config import CODE_FILES, cache_bytes, cached_tokens
from mha2mla.modeling.served import describe, widest_served
from mha2mla.modeling.stored_tensors import num_parameters
from mha2mla.pipeline.check import Arguments, HeldOut
from mha2mla.pipeline.sizing import DEFAULT_GPU, GPUS, footprint, steps_by_rotary_width

NOTED_STEP = (16, 8192)  # sequences, tokens of each
_BY_LAYER = {"ranks": "kv_lora_rank", "bits": "latent_bits"}


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True, repr=False)
class ConversionReport:
    """Result of ``convert``.

    Attributes:
        name: last part of the destination.
        source, destination: folders.
        source_name: what the caller called the source, a hub id or a folder's last part.
        geometry: of every layer; but for the rank and bits, where ``layers`` says so.
        cache_numel_per_token, source_cache_numel_per_token: elements cached per token, all layers.
        cache_bytes_per_token: bytes of these in a cache of 16 bits; latents that are codes with their scales.
        kept: ``cache_ratio`` with rotary keys kept (``rotary_key_cache``), and at the source's whole context where it
            has sliding windows, in words.
        recipe: every key of it.
        searches: what the conversion chose by itself, and what each choice would have lost.
        preset: which one, why, and the keys that were changed from it.
        better: what would lose less, for people.
        calibration_tokens: 0 when the recipe needs none.
        calibrated_length: of the longest sequence that the conversion was made for; None where nothing bounds it.
        parity: source against the checkpoint read back from disk.
        long_evaluation_text, long_evaluation_length, long_parity: the same in one window of the longest length that was
            calibrated; None where that is no longer, or the caller gave token windows.
        layers: a row per layer: what ``parity`` says of it, the losses of its conversion, its seconds, and in
            ``fallback`` what stands in for a fit that failed, and why.
        decode_backend: what will serve decoding on CUDA, by layers where they differ, and why it is no kernel.
        resumed_layers: how many of the layers an interrupted run had left.
        step_note: predicted decode step by rotary width, where rotary keys are computed from the latent.
        prompt_note: what a prompt costs more than in the source; empty where it is less than a twentieth.
        seconds: of the phases of this run (``prepare`` has the calibration text and the searches), and in total.
        peak_rss_bytes: largest resident memory of this process so far.
        parameters, source_parameters: of the two models; tied ones count once.
        weight_bytes, source_weight_bytes: of their stored tensors.
        weights_sha256: file name -> digest of each written file of weights, which ``mha2mla inspect --verify`` checks.
        source_sha256: the same of the source's config and files of weights.
    """

    name: str
    source: str
    source_name: str
    destination: str
    model_type: str
    num_layers: int
    geometry: MLAGeometry
    cache_numel_per_token: int
    cache_bytes_per_token: int
    source_cache_numel_per_token: int
    kept: str
    recipe: dict[str, Any]
    preset: str
    better: str
    calibrated_length: int | None
    evaluation_text: str
    evaluation_length: int
    compute_dtype: str
    weights_dtype: str
    device: str
    parity: ParityReport
    layers: tuple[dict[str, Any], ...]
    decode_backend: str
    seconds: dict[str, float]
    parameters: int
    source_parameters: int
    weight_bytes: int
    source_weight_bytes: int
    weights_sha256: dict[str, str]
    source_sha256: dict[str, str] = field(default_factory=dict)
    searches: dict[str, Any] = field(default_factory=dict)
    calibration_tokens: int = 0
    long_evaluation_text: str = ""
    long_evaluation_length: int | None = None
    long_parity: ParityReport | None = None
    rope_note: str = ""
    step_note: str = ""
    prompt_note: str = ""
    resumed_layers: int = 0
    peak_rss_bytes: int = field(default_factory=_peak_rss_bytes)
    mha2mla_version: str = field(default_factory=lambda: installed_version() or "(not installed)")

    @property
    def cache_ratio(self) -> float:
        """Bytes cached per token relative to the source's cache of 16 bits."""
        return self.cache_bytes_per_token / (2 * self.source_cache_numel_per_token)

    @property
    def weight_growth(self) -> float:
        """Parameters relative to the source's (1.00 = as many)."""
        return self.parameters / self.source_parameters

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; errors by layer are in ``layers`` only."""
        parity, long_parity = (
            each and {key: value for key, value in each.to_dict().items() if key != "layers"}
            for each in (self.parity, self.long_parity)
        )
        values = {**vars(self), "geometry": self.geometry.to_dict(), "layers": list(self.layers)}
        values |= {"parity": parity, "long_parity": long_parity}
        return {**values, "cache_ratio": self.cache_ratio, "weight_growth": self.weight_growth}

    def lines(self) -> dict[str, str]:
        """Summary at the end: perplexity, cache, weights, destination, how to load it, what loses less."""
        parity, long_parity = self.parity, self.long_parity
        ratio = f"{parity.perplexity_ratio:.4f} x the source's in windows of {self.evaluation_length:,} tokens"
        if long_parity is not None:
            ratio += f", {long_parity.perplexity_ratio:.4f} x in one of {self.long_evaluation_length:,}"
        cached, before = self.cache_bytes_per_token, 2 * self.source_cache_numel_per_token
        kept = f" ({self.kept})" if self.kept else ""
        found = {name: {row[key] for row in self.layers} for name, key in _BY_LAYER.items()}
        ranges = [f"{name} {min(each)} to {max(each)}" for name, each in found.items() if len(each) > 1]
        by_layer = f" with {' and '.join(ranges)} by layer" if ranges else ""
        fallbacks = [f"layer {row['layer']}: {row['fallback']}" for row in self.layers if row.get("fallback")]
        return {
            "perplexity": f"{ratio}; KL {parity.kl:.3g}, top-1 agreement {parity.top1_agreement:.4f}",
            "cache": f"{self.cache_ratio:.4f} of the source's{kept}, {cached:,} bytes of {before:,} per token in"
            f" bfloat16 ({self.geometry}{by_layer})",
            "decode": self.decode_backend,
            "weights": f"{self.weight_growth:.4f} x the source's parameters, {self.parameters:,} after"
            f" {self.source_parameters:,}; {self.weight_bytes:,} bytes after {self.source_weight_bytes:,}",
            "written to": f"{self.destination} in {self.seconds['total']:.0f} s, peak memory"
            f" {self.peak_rss_bytes / 2**30:.2f} GiB, by preset {self.preset}",
            **({"decode step": self.step_note} if self.step_note else {}),
            **({"prompts": self.prompt_note} if self.prompt_note else {}),
            **({"not fitted": ". ".join(fallbacks)} if fallbacks else {}),
            "load with": f'model, tokenizer = mha2mla.load("{self.destination}")',
            "less loss": self.better,
        }

    def __str__(self) -> str:
        return "\n".join(f"{name + ':':<11} {text}" for name, text in self.lines().items())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(value_rows(self.lines()), VALUE_COLUMNS, title=self.name)


def make_report(
    arguments: Arguments,
    opened: OpenedFolder,
    source: StreamedModel,
    config: MHA2MLAConfig,
    serving: Sequence[LayerAttention],
    held_out: Sequence[HeldOut],
    parities: Sequence[ParityReport],
    written: ShardedWriter,
    *,
    records: Sequence[Mapping[str, Any]] = (),
    **others: Any,
) -> ConversionReport:
    """The report of what was written and compared.

    Args:
        config: of what was made of ``source``.
        held_out, parities: the texts that it was compared on, in short windows and in a long one, and what was found.
    """
    geometries = [layer.geometry for layer in serving]
    (text, parity), (long_text, long_parity) = (*zip(held_out, parities, strict=True), (None, None))[:2]
    kept = kept_keys_share(geometries, 2 * others["source_cache_numel_per_token"])
    notes = (kept, _note_on_windows(source.config, config))
    return ConversionReport(
        name=Path(arguments.destination).resolve().name,
        source=str(opened.folder),
        source_name=arguments.source_name(opened.folder),
        destination=str(Path(arguments.destination)),
        model_type=opened.config.model_type,
        num_layers=len(geometries),
        cache_numel_per_token=sum(each.cache_numel_per_token for each in geometries),
        cache_bytes_per_token=sum(each.cache_bytes_per_token(2) for each in geometries),
        recipe=config.recipe,
        calibrated_length=config.calibrated_length,
        device=str(source.device),
        kept="; ".join(filter(None, notes)),
        evaluation_text=text.text,
        evaluation_length=text.tokens.shape[1],
        compute_dtype=str(arguments.compute_dtype).removeprefix("torch."),
        weights_dtype=str(arguments.written_dtype(opened)).removeprefix("torch."),
        parity=parity,
        long_evaluation_text="" if long_text is None else long_text.text,
        long_evaluation_length=None if long_text is None else long_text.tokens.shape[1],
        long_parity=long_parity,
        layers=tuple(
            {**vars(row), "kv_lora_rank": geometry.kv_lora_rank, "latent_bits": geometry.latent_bits, **record}
            for row, geometry, record in zip(parity.layers, geometries, records or [{}] * len(serving), strict=True)
        ),
        decode_backend=f"on CUDA {describe(serving)}",
        parameters=num_parameters(config),
        source_parameters=num_parameters(source.config),
        weight_bytes=written.total_bytes,
        source_weight_bytes=sum(source.source.header(name).nbytes for name in source.expected_names()),
        weights_sha256=written.sha256,
        **others,
    )


def _note_on_windows(source: PreTrainedConfig, config: MHA2MLAConfig) -> str:
    """Share of the source's cache at its whole context, where sliding windows drop tokens that the converted model's
    caches keep; empty where they drop none."""
    length = source.max_position_embeddings
    if min(cached_tokens(source, length)) >= length - 1:
        return ""
    share = cache_bytes(config, length, 2) / cache_bytes(source, length, 2)
    return f"{share:.4f} at {length:,} tokens, where the source's sliding windows drop all but the newest"


def note_on_steps(config: MHA2MLAConfig, geometry: MLAGeometry, spec: SourceSpec) -> str:
    """Predicted decode steps of both rotary widths that a conversion may have; empty where there is no choice, and for
    codes, over which times are not modelled."""
    if any(config.layer_geometry(layer).has_codes for layer in range(config.num_hidden_layers)):
        return ""
    gpu, (batch, context) = GPUS[DEFAULT_GPU], NOTED_STEP
    model = footprint(config, geometry, spec)
    steps = steps_by_rotary_width(model, geometry, spec, gpu, batch, context)
    said = [f"{1e3 * step:.3g} ms with d_r {width}" for width, step in steps.items()]
    return f"{', '.join(said)}, computed, {batch} x {context:,} tokens, predicted for {gpu.name}" if said else ""


def note_on_prompts(source: PreTrainedConfig, config: MHA2MLAConfig, geometry: MLAGeometry, spec: SourceSpec) -> str:
    """Products of a long prompt beside the source's, whose keys are narrower; empty where they are less than a
    twentieth more."""
    length = min(NOTED_STEP[1], source.max_position_embeddings)
    before, after = footprint(source, None, spec), footprint(config, geometry, spec)
    ratio = after.prompt_flops(length) / before.prompt_flops(length)
    return f"{ratio:.2f} x the source's FLOP for one of {length:,} tokens" if ratio >= 1.05 else ""


def write_report(arguments: Arguments, device: torch.device, folder: Path, report: ConversionReport, made: str) -> None:
    """conversion.json, the model card, which says what was ``made`` of the source, and its plot where matplotlib is
    installed."""
    environment = collect_environment(device.index or 0)
    values = {**report.to_dict(), "source": report.source_name, "destination": report.name}
    fields = {key: value for key, value in values.items() if key != "layers"}
    fields["code_sha256"] = {name: each.sha256 for name, each in identify(folder, CODE_FILES).items()}
    fields["companions"] = companions(folder)
    write_json(folder / RECORD_FILE, kind="conversion", rows=values["layers"], environment=environment, **fields)
    plot: str | None = PLOT_FILE
    try:
        loss_by_layer(values["layers"]).save(folder / PLOT_FILE)
    except ImportError as error:
        plot = None
        arguments.say(f"the model card has no plot: {error}")
    # Others, such as ranks and seconds, follow under their own names.
    keys = dict.fromkeys(["layer", *LAYER_COLUMNS, *(key for row in report.layers for key in row)])
    card = model_card(
        values,
        made=made,
        metadata=card_metadata(Path(report.source), report.source_name),
        plot=plot,
        layers=markdown_table(report.layers, filled({key: LAYER_COLUMNS.get(key, key) for key in keys}, report.layers)),
        geometry=markdown_table([values["geometry"]]),
        environment=describe_environment(environment),
    )
    (folder / CARD_FILE).write_text(card, encoding="utf-8")


def serving_on_cuda(config: MHA2MLAConfig, written: torch.dtype, device: torch.device) -> tuple[LayerAttention, ...]:
    """Backends of the layers on CUDA in the 16 bits that kernels take; warns of geometries without a kernel."""
    half = written if written in (torch.bfloat16, torch.float16) else torch.bfloat16
    layers = what_serves(config, device if device.type == "cuda" else "cuda", half)
    warn_of_slow_layers(layers)
    return layers


def warn_of_slow_layers(layers: Sequence[LayerAttention]) -> None:
    """Warns of geometries that no kernel will serve, with the cache ratio that would be served."""
    slow = [layer for layer in layers if not layer.compiled]
    if slow:
        ratio = served_cache_ratio(layers)
        smaller = "kv_lora_rank and qk_rope_head_dim may" if ratio is None else f"a cache_ratio up to {ratio:.2f} would"
        warnings.warn(
            f"no kernel will serve {len(slow)} of {len(layers)} converted layers on a GPU ({slow[0]}): {slow[0].why};"
            f" {smaller} give a geometry that one serves, and another layout may (docs/limits.md)",
            stacklevel=5,
        )


def served_cache_ratio(layers: Sequence[LayerAttention]) -> float | None:
    """The cache ratio, in whole percents, up to which every latent would be one that kernels serve, were latents and
    rotary keys smaller in proportion; None where narrower latents would change nothing."""
    share = 1.0
    for layer in layers:
        if not layer.compiled:
            width = widest_served(layer.geometry, layer.device)
            if width is None:
                return None
            share = min(share, width / layer.geometry.kv_lora_rank)
    cached = sum(layer.geometry.cache_bytes_per_token(2) for layer in layers)
    before = sum(2 * layer.geometry.source_cache_numel_per_token for layer in layers)
    return math.floor(100 * share * cached / before) / 100 or None
