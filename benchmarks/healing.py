"""Healing of conversions: what is trained × rates × tokens × ratios, beside controls that a user would ask for.

    python benchmarks/healing.py study --work /tmp/heal --minutes 8 --json /tmp/log/healing.json
    python benchmarks/healing.py study --work /tmp/heal --arms 0.1875:all:1e-4:20e6 0.125x3:best:best:5e6
    python benchmarks/healing.py speed llama-3-8b --json healing-speed.json
    python benchmarks/healing.py first-step path/to/llama path/to/llama-mla --train all

An arm is RATIO[xBITS]:TRAIN:RATE:TOKENS[:own][:full]: a conversion in layout latent, whose latents have 16 bits or as
many as it says ("auto": rank and bits by layer); what of it is trained, at which rate, on how many tokens. ``best`` for
both stands for those of the finished arms of that conversion (else of any) that ended with the smallest loss on
held-out windows. With ``own`` the conversion has written a tenth of the text, with ``full`` it is also compared by
probes and by what it writes. All arms train on one text that the source writes, keep their last weights, and are read
back and compared with the source in float32 on texts that none of them saw.

The first row is the text, the next ones are the conversion of the first arm and the source over quantised KV caches.
An arm is not begun when it would not end within ``minutes``, by the speed of those before; a row that fails says why,
and the others go on. Conversions that lie in ``work``, the source's rows there, and text in the cache folder are not
made again. The file is written after every row, and ``work/curve.json`` has the curve of the arm that runs.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mha2mla
from benchmarks.recording import Recording, command
from mha2mla.checkpoints import read_json
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.calibration.generated_text import generate_windows
from mha2mla.conversion.calibration.texts import GENERATED, OwnText
from mha2mla.conversion.resume import WorkFolder
from mha2mla.conversion.source.opening import Source, open_source
from mha2mla.environment import compute_device
from mha2mla.eval.generation import GenerationSettings
from mha2mla.eval.loading import load_model, load_tokenizer
from mha2mla.eval.probes import SPAN, ProbeSettings
from mha2mla.eval.quality import TEXTS, evaluate_quality
from mha2mla.eval.quantized_caches import KVCodes
from mha2mla.files import atomic_write
from mha2mla.healing.distillation import Distillation
from mha2mla.healing.memory import fit_memory
from mha2mla.healing.rate import RATES, first_steps, measured_rate, said_of
from mha2mla.healing.run import device_use
from mha2mla.healing.settings import DEFAULT_TEXT, PRESETS, Optimizer, Settings, Trained
from mha2mla.healing.student import ATTENTION, load_models, prepare_models
from mha2mla.healing.text import describe_text, hold_out, source_perplexity, training_text
from mha2mla.healing.training import train as train_models
from mha2mla.trial_models import ShapeName, fetch_smollm2, random_pair

# The most telling ones first: what to train and at which rate, the control, ranks with bits, more tokens.
ARMS = (
    *("0.1875:attention:1e-4:2e6", "0.1875:all:1e-4:2e6", "0.1875:attention:3e-4:2e6", "0.1875:all:3e-4:2e6"),
    *("1.0:attention:1e-4:2e6", "0.156x4:best:best:2e6", "0.125x3:best:best:2e6", "0.1875:best:best:10e6"),
    *("0.1875:attention:3e-5:2e6", "0.1875:all:3e-5:2e6", "0.1875:lora:3e-4:2e6", "0.1875:best:best:20e6"),
)
COLUMNS = ("name", "bytes", "train", "rate", "tokens", "seconds", "tokens_per_second", "flop_share", "kl_held_out")
_BITS = 16
OWN_SHARE = 0.1
RANDOM_BLOCKS = 20  # of random tokens, used again and again


@dataclass(frozen=True)
class Arm:
    """One training, of :data:`ARMS`' form."""

    name: str
    conversion: str
    train: str
    rate: str
    tokens: int
    own: bool = False
    full: bool = False

    @classmethod
    def of(cls, text: str) -> Arm:
        """Raises ValueError where ``text`` has another form."""
        try:
            conversion, train, rate, tokens, *more = text.split(":")
            ratio, _, bits = conversion.partition("x")
            float(ratio), bits == "auto" or int(bits or _BITS), rate == "best" or float(rate)
            if set(more) <= {"own", "full"}:
                return cls(text, conversion, train, rate, int(float(tokens)), "own" in more, "full" in more)
        except ValueError:
            pass
        raise ValueError(f"arms has {text!r}; expected RATIO[xBITS]:TRAIN:RATE:TOKENS[:own][:full]")

    def resolve(self, losses: dict[Arm, float]) -> Arm:
        """This arm with ``best`` replaced, given the losses of finished ones."""
        same = {arm: loss for arm, loss in losses.items() if arm.conversion == self.conversion} or losses
        found = min(same, key=same.get) if same else Arm("", "", "attention", "1e-4", 0)
        train = found.train if self.train == "best" else self.train
        rate = found.rate if self.rate == "best" else self.rate
        name = self.name if (train, rate) == (self.train, self.rate) else f"{self.name} ({train} {rate})"
        return replace(self, name=name, train=train, rate=rate)


class WrittenRows(logging.Handler):
    """Seconds of each batch of rows that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[dict[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.parts.append(dict(zip(("rows", "length", "seconds", "capture_s"), record.args, strict=True)))
        print(record.getMessage(), flush=True)


def perplexities_of_own_text(
    source: torch.nn.Module, converted: torch.nn.Module, tokenizer: Any, length: int, count: int
) -> dict[str, float]:
    """The source's perplexity of what each model writes from the same prompts at temperature 1: a likelihood under the
    source's own context hides where a model leads itself."""
    found = {}
    for name, model in (("source", source), ("converted", converted)):
        (windows,) = generate_windows(model, tokenizer, [OwnText(GENERATED, length, count)], seed=0)
        found[f"perplexity_of_{name}s_text"] = source_perplexity(source, TokenBlocks.of(windows))
    return found


def blocks_of(opened: Source, text: str, settings: Settings, folder: Path, place: torch.device) -> TokenBlocks:
    """What :func:`mha2mla.heal` would train on, unfinished pieces of it in ``folder``."""
    digests = {name: each.sha256 for part in opened.identity() for name, each in part.items()}
    pieces = WorkFolder(folder / "pieces", {})
    return training_text(
        opened, text, settings, settings.text_tokens, place, digests=digests, work=pieces, progress=False
    )


def study(
    model: str | None = None,
    work: str = "healing",
    arms: list[str] | None = None,
    optimizer: Optimizer = "adamw",
    preset: str = "quick",
    text: str = DEFAULT_TEXT,
    text_tokens: int = 2_000_000,
    batch_tokens: int = 1 << 16,
    tokens_at_once: int = 1 << 15,
    length: int = 1024,
    long_length: int = 8192,
    long_share: float = 0.2,
    evaluations: int = 4,
    texts: list[str] | None = None,
    lengths: list[int] | None = None,
    max_tokens: int = 8192,
    prompts: int = 64,
    text_only: bool = False,
    minutes: float = 8.0,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """A row for the text, each conversion and each arm.

    Args:
        model: folder of a source; default SmolLM2-135M-Instruct.
        work: folder for conversions and healed models; conversions that lie there are not made again.
        arms: RATIO[xBITS]:TRAIN:RATE:TOKENS[:own][:full] each.
        optimizer: of all arms, as of ``mha2mla heal``; the rates of :data:`ARMS` are for AdamW.
        preset: of the conversions.
        text: to train on, as of ``mha2mla heal``.
        text_tokens: different ones of it.
        batch_tokens: of a step. tokens_at_once: of a pass.
        length, long_length: tokens of training windows. long_share: share of tokens in long ones.
        evaluations: of held-out windows, in each arm.
        texts: to compare on; default three builtin ones.
        lengths: of windows to compare in; default 512 and 8192.
        max_tokens: of each text and length.
        prompts: that a full comparison continues, and texts that the models write in it.
        text_only: end after the text's row.
        minutes: for all rows.
        device: cpu, cuda, …; default CUDA when there is one.
        json: file to write after every row.
    """
    began, place = time.perf_counter(), compute_device(device)
    chosen = [Arm.of(text) for text in arms or ARMS]
    source, folder = Path(model) if model else fetch_smollm2(), Path(work)
    compared = {"texts": texts or list(TEXTS), "lengths": lengths or [512, 8192], "max_tokens": max_tokens}
    settings = {
        "text_tokens": text_tokens, "batch_tokens": batch_tokens, "tokens_at_once": tokens_at_once,
        "length": length, "long_length": long_length, "long_share": long_share, "evaluations": evaluations,
        "optimizer": optimizer,
    }  # fmt: skip
    described = {"model": source.name, "preset": preset, "text": text, "compared": compared, "settings": settings}
    table = Recording("healing-study", json, **described)
    left_out: list[str] = []

    def attempt(name: str, make: Callable[[], None]) -> None:
        try:
            make()
        except Exception as error:
            table.add({"name": name, "status": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        if place.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def write_text() -> None:
        opened, started, written = open_source(source), time.perf_counter(), WrittenRows()
        folder.mkdir(parents=True, exist_ok=True)
        logger = logging.getLogger(generate_windows.__module__)
        logger.setLevel(logging.INFO)
        logger.addHandler(written)
        blocks = blocks_of(opened, text, Settings.of("standard", tokens=text_tokens, **settings), folder, place)
        logger.removeHandler(written)
        row = describe_text(blocks, opened.config.vocab_size)
        seconds = time.perf_counter() - started
        table.add(
            {
                "name": "text",
                "seconds": seconds,
                "tokens_per_second": row["unique_tokens"] / seconds,
                "parts": written.parts,
                **row,
            }
        )

    attempt("text", write_text)
    if text_only:
        return table.show("Text that the source wrote", ("name", "seconds", "tokens_per_second", "distinct_4grams"))
    original, tokenizer = load_model(source, "source", device=place, dtype=torch.float32), load_tokenizer(source, "")
    made: dict[str, Path] = {}

    def converted(name: str) -> Path:
        if name not in made:
            (ratio, _, bits), target = name.partition("x"), folder / f"{source.name}-{preset}-{name}"
            started = time.perf_counter()
            if not (target / "config.json").is_file():
                recipe = {"preset": preset, "layout": "latent", "cache_ratio": float(ratio)}
                recipe["latent.bits"] = bits if bits == "auto" else int(bits or 16)
                mha2mla.convert(source, target, recipe, evaluation_tokens=512, device=place, progress=False)
            made[name], seconds = target, time.perf_counter() - started
            file = folder / f"{source.name}-kv.json"  # rows of the source over quantised KV caches
            known = read_json(folder, file.name) if file.is_file() else {}
            kept = known["rows"] if known.get("compared") == compared else []
            caches = () if kept or len(made) > 1 else tuple(KVCodes(bits) for bits in (4, 3, 2))
            is_full = any(arm.full and arm.conversion == name for arm in chosen)
            compare(f"{name} converted", target, caches, is_full, seconds=seconds)
            if caches:
                text = dumps({"compared": compared, "rows": table.rows[-len(caches) :]})
                atomic_write(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
            elif len(made) == 1:
                for row in kept:
                    table.add(row)
        return made[name]

    def compare(name: str, checkpoint: Path, caches: tuple[KVCodes, ...], is_full: bool, **more: Any) -> None:
        how = {"tokenizer": tokenizer, "device": place, "progress": False, "caches": caches, **compared}
        model = load_model(checkpoint, "converted", device=place, dtype=torch.float32)
        if is_full:
            short = min(compared["lengths"])
            how |= {"probes": ProbeSettings(lengths=(short,), gaps=(max(short, SPAN),), text=compared["texts"][-1])}
            how |= {"generation": GenerationSettings((short // 8,), 64, prompts, text=compared["texts"][-1])}
            more |= perplexities_of_own_text(original, model, tokenizer, short, prompts)
        report = evaluate_quality(original, model, **how)
        for kind in ("probes", "generation"):
            more |= {kind: [row.to_dict() for row in getattr(report, kind)]} if is_full else {}
        found = report.rows
        for cache in dict.fromkeys(row.cache for row in found):
            rows = [row for row in found if row.cache == cache]
            numbers = {"bytes": rows[0].cache_share}
            for size in sorted({row.seqlen for row in rows}):
                same = [row for row in rows if row.seqlen == size]
                numbers |= {f"ratio {size:,}": max(row.perplexity_ratio for row in same)}
                numbers |= {f"KL {size:,}": sum(row.kl for row in same) / len(same)}
            first = cache == found[0].cache
            own = {"texts": [row.to_dict() for row in rows]}
            table.add({"name": name if first else cache, **numbers, **(more if first else {}), **own})

    losses: dict[Arm, float] = {}
    overhead, speed = 0.0, 0.0  # seconds of an arm beside its steps, tokens/s of the last arm

    def heal(arm: Arm) -> None:
        nonlocal overhead, speed
        conversion, started = converted(arm.conversion), time.perf_counter()
        report = mha2mla.heal(
            source, conversion, folder / "healed", preset="standard", tokens=arm.tokens, rate=float(arm.rate),
            train=arm.train, keep="last", overwrite=True, resume="never", log=folder / "curve.json", device=place,
            text=text, progress=False, own_share=OWN_SHARE if arm.own else 0.0, **settings,
        )  # fmt: skip
        trained = report.trained
        losses[arm], speed = trained.held_out_last, trained.tokens_per_second
        row = {"conversion": arm.conversion, "train": arm.train, "rate": float(arm.rate), "tokens": trained.tokens}
        row |= {"seconds": trained.seconds, "tokens_per_second": speed, "flop_share": report.flop_share}
        row |= {"kl_held_out": trained.held_out_last, "kl_held_out_before": trained.held_out_before}
        row |= {"healing": report.to_dict() | {"rows": list(report.rows)}}
        compare(arm.name, folder / "healed", (), arm.full, **row)
        overhead = time.perf_counter() - started - trained.tokens / speed

    for arm in chosen:
        arm = arm.resolve(losses)
        needed = overhead + (arm.tokens / speed if speed else 0.0)
        if time.perf_counter() - began + needed > 60 * minutes:
            left_out.append(arm.name)
        else:
            attempt(arm.name, lambda arm=arm: heal(arm))
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    shown = dict.fromkeys(key for row in table.rows for key in row if key.startswith("ratio "))
    title = "Perplexity ratio of the worst text by window; held-out KL of the training text"
    return table.show(title, (*COLUMNS[:2], *shown, *COLUMNS[2:], "status"))


def speed(
    shape: ShapeName,
    ratio: float = 0.5,
    bits: str | None = None,
    train: Trained = "attention",
    steps: int = 100,
    batch_tokens: int = 1 << 14,
    tokens_at_once: int = 1 << 13,
    long_share: float = 0.4,
    layers: int | None = None,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """Memory and tokens/s of training a shape with random weights on random tokens, the source beside it.

    Args:
        shape: of both models, as in ``mha2mla eval latency --random-weights``.
        ratio: cache_ratio of the conversion. bits: of its latents, as in ``latent.bits``; default 16.
        train: as in ``mha2mla heal``.
        steps: of the optimizer.
        batch_tokens: of a step. tokens_at_once: of a pass. long_share: of the tokens, in long windows.
        layers: of both; default the shape's.
        device: cpu, cuda, …; default CUDA when there is one.
        json: file to write.
    """
    place = compute_device(device)
    on_gpu = place.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    sizes = {"batch_tokens": batch_tokens, "tokens_at_once": tokens_at_once, "evaluations": 1, "keep": "last"}
    sizes |= {"rate": 1e-5, "long_share": long_share}
    if tokens_at_once < PRESETS["standard"]["long_length"]:
        sizes |= {"length": tokens_at_once // 2, "long_length": tokens_at_once}
    settings = Settings.of("standard", train=train, tokens=steps * batch_tokens, **sizes)
    table = Recording("healing-speed", json, shape=shape, settings=asdict(settings))
    target = {"layout": "latent", "cache_ratio": ratio} | ({"latent.bits": int(bits)} if bits else {})
    pair = random_pair(shape, target, layers, place, dtype)
    teacher, student = pair.source().requires_grad_(False), pair.converted()
    same = {name: each for name, each in teacher.state_dict().items() if ATTENTION not in name}
    student.load_state_dict(same, strict=False)
    models = prepare_models(teacher, student, place, settings)
    distillation = Distillation(models, torch.bfloat16 if on_gpu else None)
    if on_gpu:
        settings = fit_memory(settings, models, distillation)
    if on_gpu and not models.recomputes:
        distillation.compile_layers()
    longs = max(2, round(RANDOM_BLOCKS * settings.long_share))
    lengths = (settings.length,) * (RANDOM_BLOCKS - longs) + (settings.long_length,) * longs
    tokens = torch.randint(teacher.config.vocab_size, (RANDOM_BLOCKS, settings.long_length))
    blocks, held_out = hold_out(TokenBlocks(tokens, lengths))
    with TemporaryDirectory() as folder:
        done = train_models(distillation, blocks, held_out, settings, settings.tokens, Path(folder), progress=False)
    row = {"name": f"{shape}, {ratio} of the bytes, {bits or _BITS} bits", "train": train, "layers": pair.layers}
    row |= {"tokens": done.tokens, "tokens_per_second": done.tokens_per_second, "seconds": done.seconds}
    row |= {"recomputes": models.recomputes, "compiled": distillation.compiled, "pass_tokens": settings.pass_tokens}
    row |= device_use(models, place, done.tokens_per_second)
    table.add(row)
    shown = ("name", "train", "tokens", "tokens_per_second", "flop_share", "peak_gpu_bytes", "seconds")
    return table.show("Training of random weights on random tokens", shown)


def first_step(
    source: str,
    converted: str,
    text: str = DEFAULT_TEXT,
    train: Trained = "attention",
    optimizer: Optimizer = "orthogonal",
    tokens: int = 1 << 16,
    text_tokens: int = 8_000_000,
    length: int = 1024,
    long_length: int = 8192,
    long_share: float = 0.4,
    steps: list[float] | None = None,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """KL on held-out windows after an optimizer's first step by its rate, of AdamW rate * g / (abs(g) + 1e-8): how
    large a step a conversion takes.

    Args:
        source, converted: folders.
        text: as of ``mha2mla heal``.
        train: whose weights move. optimizer: as of ``mha2mla heal``.
        tokens: of the gradient, and to measure on, of these at most 32,768.
        text_tokens: different ones of the text.
        length, long_length: tokens of windows. long_share: share of tokens in long ones.
        steps: rates.
        device: cpu, cuda, …; default CUDA when there is one.
        json: file to write.
    """
    place = compute_device(device)
    windows = {"length": length, "long_length": long_length, "long_share": long_share}
    batch = {"tokens": tokens, "batch_tokens": tokens, "tokens_at_once": long_length}
    settings = Settings.of("standard", train=train, optimizer=optimizer, text_tokens=text_tokens, **batch, **windows)
    with TemporaryDirectory() as folder:
        blocks, held_out = hold_out(blocks_of(open_source(Path(source)), text, settings, Path(folder), place))
    models = load_models(Path(source), Path(converted), place, settings)
    distillation = Distillation(models, torch.bfloat16 if place.type == "cuda" else None)
    table = Recording("healing-first-step", json, source=source, converted=converted, settings=asdict(settings))
    rows = first_steps(
        distillation, blocks, held_out, settings, rates=sorted(steps or RATES, reverse=True), try_all=True
    )
    for row in rows:
        table.add({"train": train, **row, "change": row["held_out_kl"] - rows[0]["held_out_kl"]})
    print(f"rate: {measured_rate(rows):.3g}, {said_of(rows)}")
    return table.show("KL on held-out windows after one step", ("train", "rate", "held_out_kl", "change"))


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    sys.exit(command(study, speed, first_step, cpu=True))
