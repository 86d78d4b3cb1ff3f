"""One page about a conversion, as HTML or Markdown, from the JSON that this package's verbs wrote."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from mha2mla.checkpoints import CheckpointError, damage_named, read_object, regular_file
from mha2mla.conversion.card import RECORD_FILE
from mha2mla.environment import describe_environment
from mha2mla.eval import generation, plots, probes, quality, tasks
from mha2mla.eval.measurement import NOT_CHECKED, LatencyRows
from mha2mla.eval.op_latency import PRESET_COLUMNS
from mha2mla.eval.plotting import Picture, check_installed, dark_style
from mha2mla.eval.report import VALUE_COLUMNS, filled, format_value, markdown_table, markdown_text, value_rows
from mha2mla.files import MARKDOWN_HEAD, OutputPath, page, write_output

KINDS = ("conversion", "quality", "latency", "generate", "tasks")
BESIDE = (RECORD_FILE, "quality.json", "latency.json", "tasks.json", "generate.json", "answers.jsonl")  # in a folder
MOST_ANSWERS = 20  # prompts shown
# Keys of a record that say where its figures come from.
PROVENANCE = ("source_name", "model_type", "num_layers", "geometry", "preset", "calibration_tokens")
PROVENANCE += ("calibrated_length", "evaluation_text", "parity", "decode_backend", "seconds", "device")
PROVENANCE += ("mha2mla_version", "weights_sha256")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Block:
    """Part of a section: a picture with its table, a table alone, or text to copy.

    Attributes:
        columns: key → heading of the table.
        folded: an HTML page shows the table on demand.
    """

    headline: str
    rows: Sequence[Row] = ()
    columns: Mapping[str, str] | None = None
    picture: Picture | None = None
    folded: bool = False
    code: str = ""

    @property
    def headings(self) -> dict[str, str]:
        """Headings of the columns that have a value somewhere."""
        return filled(self.columns or {key: key.replace("_", " ") for row in self.rows for key in row}, self.rows)

    @property
    def numeric(self) -> set[str]:
        return {key for key in self.headings if any(isinstance(row.get(key), int | float) for row in self.rows)}

    @cached_property
    def svg(self) -> str:
        return "" if self.picture is None else self.picture.svg(headline=False)


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())


class Evidence:
    """Reports by kind, answers by prompt and model, and the files that they were read from.

    Raises:
        FileNotFoundError: a path that is not there.
        ValueError: a file is none of ``KINDS`` and no answers file, or a folder holds none.
    """

    def __init__(self, inputs: Sequence[OutputPath]) -> None:
        self.reports: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        self.answers: dict[str, dict[str, str]] = {}  # prompt → model → answer
        self.sampling: dict[str, dict[str, Any]] = {}  # by model whose answers are here
        self.files: list[dict[str, Any]] = []
        digests: set[str] = set()
        for path in (file for each in inputs for file in _files(Path(each).expanduser())):
            read = self._read_answers if path.suffix == ".jsonl" else self._read_report
            digest = hashlib.sha256(regular_file(path.parent, path.name).read_bytes()).hexdigest()
            if digest not in digests:  # convert --json writes a copy of conversion.json
                digests.add(digest)
                self.files.append({"file": path.name, **read(path), "sha256": digest[:12]})

    def _read_report(self, path: Path) -> dict[str, Any]:
        found = read_object(path)
        kind, rows = found.get("kind"), found.get("rows")
        if kind not in KINDS or not isinstance(rows, list):
            raise CheckpointError(
                f"{path} is of kind {kind!r:.80}; expected one of {', '.join(KINDS)}, as convert, eval"
                " and generate write them"
            )
        if kind == "conversion" and not (rows and "layer" in rows[0]):
            raise CheckpointError(f"{path} has no rows of layers; expected what convert --json writes")
        if healed := found.get("healing", {}).get("name"):
            found["converted_name"], found["name"] = found["name"], healed
        self.reports[kind].append(found)
        environments = (found.get("environment"), found.get("healing", {}).get("environment"))
        places = dict.fromkeys(describe_environment(each) for each in environments if each)
        return {"kind": kind, "measured_on": "; healing: ".join(places) or None}

    def _read_answers(self, path: Path) -> dict[str, Any]:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            row = json.loads(line)
            prefixes = [key.removesuffix("answer") for key in row if key.endswith("answer")]
            prefixes = [prefix for prefix in prefixes if prefix + "model" in row]
            if not prefixes:
                raise CheckpointError(f"{path} line {number} has no answer; expected what generate --output writes")
            prompt = row.get("prompt")  # which may be empty
            if prompt is None:
                prompt = "\n".join(f"{each['role']}: {each['content']}" for each in row["messages"])
            for prefix in prefixes:
                model = str(row[prefix + "model"])
                self.answers.setdefault(prompt, {})[model] = str(row[prefix + "answer"])
                self.sampling.setdefault(model, row.get(prefix + "sampling") or {})
        return {"kind": "answers"}

    @property
    def source(self) -> str:
        named = ("source_name", "source", "random_weights", "preset")
        names = (report.get(key) for reports in self.reports.values() for report in reports for key in named)
        return Path(str(next(filter(None, names), "source"))).name

    def name(self, report: Row) -> str:
        """Name of the conversion of a report: its path where reports of this kind have others of the same name."""
        name, path = plots.model_name(report), report.get("converted")
        alike = (each.get("converted") for each in self.reports[report["kind"]] if plots.model_name(each) == name)
        return name if path is None or {*alike} == {path} else str(path)

    @property
    def shares(self) -> dict[str, float]:
        """Conversion → cache over the source's, as convert recorded it."""
        return {report["name"]: report["cache_ratio"] for report in self.reports["conversion"]}

    @property
    def losses(self) -> dict[str, list[Row]]:
        """Conversion → rows of eval quality."""
        found: dict[str, list[Row]] = {}
        for report in self.reports["quality"]:
            for row in report["rows"]:
                collected = None if report.get("converted") else row.get("cache_ratio")  # several conversions
                name = self.name(report) if collected is None else f"cache {collected:g}"
                found.setdefault(name, []).append(row)
        return found


def _files(path: Path) -> Iterator[Path]:
    """The file, or what a checkpoint folder has beside its weights."""
    if not path.is_dir():
        yield path
        return
    found = [path / name for name in BESIDE if (path / name).is_file()]
    if not found:
        raise CheckpointError(f"{path} has none of {', '.join(BESIDE)}; expected the folder of a converted checkpoint")
    yield from found


def write_page(inputs: Sequence[OutputPath], output: OutputPath) -> Path:
    """Writes the page about what ``inputs`` hold.

    Args:
        inputs: folders of converted checkpoints, JSON files of ``convert``, ``eval`` and ``generate``, and its answers
            (``.jsonl``).
        output: ``.html``: one file without links to others, light or dark as the reader has it; ``.md``: its tables.

    Returns:
        The path written.

    Raises:
        ImportError: an HTML page is asked for, and matplotlib is not installed.
        FileNotFoundError, ValueError: an input is missing, damaged or of another kind, or ``output`` is.
    """
    kind, is_html = page(output), Path(output).suffix.lower() == ".html"
    if is_html:
        check_installed()
    with damage_named(f"{', '.join(map(str, inputs))} cannot be reported"):
        evidence = Evidence(inputs)
        sections = [section for section in _sections(evidence, inputs, output) if section.blocks]
        timed = [evidence.name(report) for report in evidence.reports["latency"] if not report.get("preset")]
        names = list(dict.fromkeys([*evidence.shares, *evidence.losses] or timed))
        title = f"{evidence.source} → {', '.join(names) or 'converted'}"
        facts = _facts(evidence, names)
        text = _html(title, facts, sections) if is_html else _markdown(title, facts, sections)
    text = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\ufffd", text)  # a random model's answers hold them
    return write_output(output, kind, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="replace"))


def _facts(evidence: Evidence, names: Sequence[str]) -> list[tuple[str, str]]:
    """Figures for the head of the page, and what they are.

    Args:
        names: conversions that the page is about.
    """
    found, records = [], evidence.reports["conversion"]
    for record in records:
        whose = f" of {record['name']}" if len(records) > 1 else ""
        before = 2 * record["source_cache_numel_per_token"]
        cached = record.get("cache_bytes_per_token", 2 * record["cache_numel_per_token"])  # older records have none
        size = f"{cached:,} of {before:,} bytes a token, bfloat16"
        found.append((f"{record['cache_ratio']:.3g} ×", f"KV cache{whose}: {size}"))
        found.append((f"{record['weight_growth']:.3g} ×", f"parameters{whose}: {record['parameters']:,}"))
        rows = record.get("healing", {}).get("rows", ())
        if worst := max(rows, key=lambda row: row["ratio_after"], default=None):
            where = f"windows of {worst['length']:,} tokens of {worst['text']}"
            before = f"{worst['ratio_before']:.3f} before healing"
            found.append((f"{worst['ratio_after']:.3f} ×", f"perplexity of {record['name']}, {where}; {before}"))
    for name, rows in evidence.losses.items():
        losses = plots.worst_losses(plots.own_rows(rows))
        for length in dict.fromkeys(list(losses)[:1] + list(losses)[-1:]):
            found.append((f"{losses[length]:.3f} ×", f"perplexity of {name}, windows of {length:,} tokens, worst text"))
    for report in evidence.reports["latency"]:
        for op, named in (("decode step", "a decode step"), ("generate", "generation")):
            ups = [line for line in plots.latencies(report["rows"], op)[1] if "speed_up" in line]
            if ups:
                last = max(ups, key=lambda line: (line["batch"] * line["seqlen"], line["batch"]))
                shape = f"batch {last['batch']:,}, {last['seqlen']:,} tokens"
                if model := report.get("random_weights"):
                    shape += f", {model} with random weights"
                elif (name := evidence.name(report)) not in names or len(names) > 1:
                    named += f" of {name}"
                found.append((f"{last['speed_up']:.3g} ×", f"speed of {named}, {shape}"))
    return found


def _sections(evidence: Evidence, inputs: Sequence[OutputPath], output: OutputPath) -> Iterator[Section]:
    text = "Perplexity relative to the source model: 1.00 = no loss. Rows of one text read the same tokens."
    yield Section("Loss by length and text", text, list(_loss_blocks(evidence)))
    yield Section("Loss by position", "Parts of the longest windows of each text.", list(_position_blocks(evidence)))
    text = "Bytes at the end of a window, relative to the source's 16-bit cache."
    yield Section("Loss at equal bytes", text, list(_byte_blocks(evidence)))
    text = "Retrieval, variable tracking, arithmetic, a span that occurs again; greedy continuations."
    yield Section("Far context and continuations", text, list(_probe_blocks(evidence)))
    text = (
        "Every time belongs to a call that passed its check against float64, or its row says that it was not checked."
    )
    yield Section("Latency and speed-up", text, list(_latency_blocks(evidence)))
    text = "Training towards the source's predictions. The record's other losses, by layer too, are from before it."
    yield Section("Healing", text, list(_healing_blocks(evidence)))
    text = "Relative errors, on the held-out text of the conversion."
    yield Section("Loss by layer", text, list(_layer_blocks(evidence)))
    yield Section("Tasks", "Scores of lm-eval.", [
        Block("Scores beside the source's", report["rows"], tasks.COLUMNS) for report in evidence.reports["tasks"]
    ])  # fmt: skip
    yield Section("Sample answers", "The same prompts, as the models answered them.", list(_answer_blocks(evidence)))
    yield Section("Provenance", "What was read, and where it was measured.", list(_provenance_blocks(evidence)))
    text = "As far as the files say: options that they do not record have their defaults."
    yield Section("Commands", text, list(_commands(evidence, inputs, output)))


def _loss_blocks(evidence: Evidence) -> Iterator[Block]:
    own = {name: plots.own_rows(rows) for name, rows in evidence.losses.items()}
    rows = [{"conversion": name, **row} for name, each in own.items() for row in each]
    named = {"conversion": "conversion"} if len(own) > 1 else {}
    columns = {"text": "text", "seqlen": "window", "perplexity_ratio": "ratio", "kl": "KL (nats)"}
    yield from _pictured(plots.loss_by_length(own), rows, named | columns | {"top1_agreement": "top-1"})
    if rows:
        yield Block("All columns", rows, named | quality.COLUMNS, folded=True)
    for report in evidence.reports["quality"]:
        if report.get("skipped"):
            yield Block("Not measured", [{"reason": reason} for reason in report["skipped"]], folded=True)


def _position_blocks(evidence: Evidence) -> Iterator[Block]:
    by_text: dict[str, dict[str, list[Row]]] = {}  # conversion → text → parts of its longest windows
    for report in evidence.reports["quality"]:
        parts = report.get("by_position") or ()
        for text in dict.fromkeys(row["text"] for row in parts):
            here, texts = [row for row in parts if row["text"] == text], by_text.setdefault(evidence.name(report), {})
            if text not in texts or here[-1]["stop"] >= texts[text][-1]["stop"]:
                texts[text] = here
    found = {name: [row for parts in texts.values() for row in parts] for name, texts in by_text.items()}
    rows = [{"conversion": name, **row} for name, each in found.items() for row in each]
    columns = {"conversion": "conversion"} if len(found) > 1 else {}
    columns |= {"text": "text", "first": "from token", "stop": "to", "perplexity_ratio": "ratio"}
    yield from _pictured(plots.loss_by_position(found), rows, columns)


def _byte_blocks(evidence: Evidence) -> Iterator[Block]:
    losses, shares = evidence.losses, evidence.shares
    found: dict[tuple[str, str], dict[str, Any]] = {}
    lengths: set[int] = set()
    for name, rows in losses.items():
        for cache in dict.fromkeys(row.get("cache", plots.UNQUANTISED) for row in rows):
            alike = [each for each in rows if each.get("cache", plots.UNQUANTISED) == cache]
            worst = plots.worst_losses(alike)
            lengths |= worst.keys()
            whose = "source" if cache.startswith("source") else name
            line = {"model": whose, "cache": cache.removeprefix("source, ")}
            line["share"] = max(alike, key=lambda row: row["seqlen"]).get("cache_share", shares.get(name))
            found[whose, cache] = line | {str(length): ratio for length, ratio in worst.items()}
    if not found:
        return
    source = {"model": "source", "cache": plots.UNQUANTISED, "share": 1.0} | {str(length): 1.0 for length in lengths}
    rows = sorted([source, *found.values()], key=lambda row: (row["share"] is None, row["share"] or 0, row["model"]))
    columns = {"model": "model", "cache": "cache", "share": f"bytes at {max(lengths):,}"}
    columns |= {str(length): f"at {length:,}" for length in sorted(lengths)}
    yield from _pictured(plots.loss_by_bytes(losses, shares), rows, columns)


def _probe_blocks(evidence: Evidence) -> Iterator[Block]:
    for report in evidence.reports["quality"]:
        rows = report.get("probes") or []
        cache = ("cache",) if len({row.get("cache") for row in rows}) > 1 else ()
        for picture in plots.probes(rows):
            part = [row for row in rows if (row["measure"] == "gain") == (picture.panels[0].y.startswith("gain"))]
            shown = ("probe", *cache, "length", "chance", "source", "converted", "retained")
            yield Block(picture.headline, part, {key: probes.COLUMNS[key] for key in shown}, picture)
        if report.get("generation"):
            headline = f"Greedy continuations of {evidence.name(report)} beside the source's"
            yield Block(headline, report["generation"], generation.COLUMNS)


def _latency_blocks(evidence: Evidence) -> Iterator[Block]:
    for report in evidence.reports["latency"]:
        rows = report["rows"]
        for op, (_, unit, _) in plots.OPS.items():
            pictures, table = plots.latencies(rows, op)
            columns = {"batch": "batch", "seqlen": "tokens", "source": f"source, {unit.split()[0].rstrip(',')}"}
            yield from _pictured(pictures, table, columns | {"converted": "converted", "speed_up": "speed-up"})
        if picture := plots.largest_batches(rows):
            x, source, converted = ("seqlen", *(dict(curve.points) for curve in picture.panels[0].curves))
            table = [
                {x: at, "source": source.get(at), "converted": converted.get(at)}
                for at in sorted({*source, *converted})
            ]
            columns = {x: "tokens of context", "source": "sequences, source", "converted": "converted"}
            yield Block(picture.headline, table, columns, picture if len(table) > 1 else None)
        # Rows of a preset have MLA's speed-up over each implementation, not their own.
        columns = PRESET_COLUMNS if report.get("preset") else LatencyRows(rows).columns()
        yield Block(f"All rows of {evidence.name(report)}", rows, columns, folded=True)
    runs = [{"model": report["model"], **row} for report in evidence.reports["generate"] for row in report["rows"]]
    if runs:
        yield Block("Runs of mha2mla generate", runs)


def _healing_blocks(evidence: Evidence) -> Iterator[Block]:
    for record in evidence.reports["conversion"]:
        if healing := record.get("healing"):
            trained, what = healing["trained"], healing["settings"]["train"]
            headline = (
                f"{record['name']}: {what} trained for {trained['seconds']:,.0f} s on {trained['tokens']:,} tokens"
            )
            columns = {"text": "text", "length": "window", "tokens": "tokens", "ratio_before": "ratio before"}
            columns |= {"ratio_after": "after", "kl_before": "KL before (nats)", "kl_after": "after"}
            yield Block(headline, healing["rows"], columns)
            picture = plots.healing_curve(trained["curve"])
            curve = [row for row in trained["curve"] if "held_out_kl" in row]
            yield Block(picture.headline, curve, {"tokens": "tokens", "held_out_kl": "held-out KL (nats)"}, picture)


def _layer_blocks(evidence: Evidence) -> Iterator[Block]:
    for record in evidence.reports["conversion"]:
        picture = plots.loss_by_layer(record["rows"])
        columns = {"layer": "layer", "kv_lora_rank": "rank", "latent_bits": "bits"} | plots.LAYER_COLUMNS
        name = record.get("converted_name", record["name"])
        yield Block(f"{name}. {picture.headline}", record["rows"], columns, picture)


def _answer_blocks(evidence: Evidence) -> Iterator[Block]:
    if not evidence.answers:
        return
    models = dict.fromkeys(model for each in evidence.answers.values() for model in each)
    models = sorted(models, key=lambda model: Path(model).name != evidence.source)  # the source first
    rows = [{"prompt": prompt} | each for prompt, each in list(evidence.answers.items())[:MOST_ANSWERS]]
    some = f" of {len(evidence.answers)}" if len(rows) < len(evidence.answers) else ""
    both = [each for each in evidence.answers.values() if len(each) > 1]
    same = f", {sum(len(set(each.values())) == 1 for each in both)} of {len(both)} answered alike" if both else ""
    columns = {"prompt": "prompt"} | {model: Path(model).name for model in models}
    yield Block(f"{len(rows)}{some} prompts{same}", rows, columns)


def _provenance_blocks(evidence: Evidence) -> Iterator[Block]:
    yield Block("Files", evidence.files)
    for record in evidence.reports["conversion"]:
        rows = value_rows({key: record[key] for key in PROVENANCE if key in record})
        yield Block(f"Conversion {record['name']}", rows, VALUE_COLUMNS, folded=True)


def _commands(evidence: Evidence, inputs: Sequence[OutputPath], output: OutputPath) -> Iterator[Block]:
    for record in evidence.reports["conversion"]:
        recipe = yaml.safe_dump(record["recipe"], sort_keys=False)
        words = ["convert", record["source_name"], record["destination"], "--recipe", "recipe.yaml"]
        yield Block("Convert, with this recipe.yaml", code=f"{_line(*words)}\n\n# recipe.yaml\n{recipe}".rstrip())
        if flags := record.get("healing", {}).get("flags"):
            yield Block(
                "Heal", code=_line("heal", record["source_name"], record["destination"], record["name"], *flags)
            )
    for report in evidence.reports["quality"]:
        if report.get("converted"):
            yield Block("Measure what was lost", code=_quality_command(report))
    for report in evidence.reports["latency"]:
        yield Block("Measure what was gained", code=_latency_command(report))
    for model, sampling in evidence.sampling.items():
        options = [
            word for key, value in sampling.items() if key != "chat" for word in ("--" + key.replace("_", "-"), value)
        ]
        chat = ["--chat"] if sampling.get("chat") else []
        words = ["generate", model, "--file", "prompts.jsonl", "--output", "answers.jsonl", *options, *chat]
        yield Block(f"Answers of {Path(model).name}", code=_line(*words))
    yield Block("This page", code=_line("report", *map(str, inputs), "-o", str(output)))


def _quality_command(report: Row) -> str:
    rows = report["rows"]
    caches = " ".join(dict.fromkeys(row.get("cache", "") for row in rows))
    words = ["eval", "quality", report["source"], report["converted"]]
    words += ["--text", *dict.fromkeys(row["text"] for row in rows)]
    words += ["--lengths", ",".join(map(str, sorted({row["seqlen"] for row in rows})))]
    patterns = {"--kv-bits": r"KV (\d+) bits", "--latent-bits": r"latent (\d+) bits"}
    for option, pattern in (patterns | {"--rotary-key-cache": r"rotary keys (\w+)"}).items():
        if bits := list(dict.fromkeys(re.findall(pattern, caches))):
            words += [option, ",".join(bits)]
    words += [word for key in ("probes", "generation") if report.get(key) for word in (f"--{key}",)]
    if items := {row["num_items"] for row in report.get("probes") or () if row.get("num_items")}:
        words += ["--probe-items", max(items)]
    return _line(*words, "--dtype", report["dtype"], "--json", "quality.json")


def _latency_command(report: Row) -> str:
    rows = report["rows"]
    dtypes = dict.fromkeys(row["dtype"] for row in rows if row.get("dtype"))
    last = ["--dtype", *dtypes] if len(dtypes) == 1 else []
    last += ["--no-check"] * any(row.get("status", "").startswith(NOT_CHECKED) for row in rows)
    last += ["--json", "latency.json"]
    if report.get("preset"):
        return _line("eval", "latency", "--preset", report["preset"], *last)
    if report.get("random_weights"):
        words = ["--random-weights", report["random_weights"], "--layers", report["layers"]]
        for option, name in (("--kv-lora-rank", "d_c"), ("--qk-rope-head-dim", "d_r")):
            words += [option, *re.findall(rf"{name}=(\d+)", report["geometry"])[:1]]
        layout = "shared" if "G=1 " in report["geometry"] else "per-group"
        words += ["--layout", "latent" if "from the latent" in report["geometry"] else layout]
    else:
        words = [report["source"], report["converted"]]
    levels = {"attention": "op", "decode step": "step", "prefill": "prefill", "generate": "e2e"}
    words += ["--level", *(level for op, level in levels.items() if any(row["op"] == op for row in rows))]
    for option, key in (("--batch-sizes", "batch"), ("--seqlens", "seqlen")):
        words += [option, ",".join(map(str, sorted({row[key] for row in rows})))]
    if new := {row["new_tokens"] for row in rows if row.get("new_tokens")}:
        words += ["--new-tokens", max(new)]
    return _line("eval", "latency", *words, *last)


def _line(*words: Any) -> str:
    return shlex.join(["mha2mla", *map(str, words)])


def _pictured(pictures: Sequence[Picture], rows: Sequence[Row], columns: Mapping[str, str]) -> Iterator[Block]:
    """The table beside the first picture, the other pictures below."""
    for place, picture in enumerate(pictures):
        yield Block(picture.headline, () if place else rows, columns, picture)
    if rows and not pictures:
        yield Block("", rows, columns)


def _html(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = format_value
    source = (resources.files("mha2mla") / "data" / "report.html.jinja").read_text(encoding="utf-8")
    template = environment.from_string(source)
    return template.render(title=title, facts=facts, sections=sections, dark_style=dark_style())


def _markdown(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    parts = [MARKDOWN_HEAD, f"# {markdown_text(title)}"]
    parts.append("\n".join(f"* **{value}** {markdown_text(what)}" for value, what in facts))
    for section in sections:
        parts += [f"## {section.title}", section.text]
        for block in section.blocks:
            parts.append(f"**{markdown_text(block.headline)}**")
            if block.rows:
                parts.append(markdown_table(block.rows, block.headings))
            if block.code:
                parts.append(f"```\n{block.code}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"
