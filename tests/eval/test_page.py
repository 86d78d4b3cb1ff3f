"""The page about a conversion: what it shows of the files, alone and without a network."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch

import mha2mla
from mha2mla.eval.page import write_page
from mha2mla.eval.report import write_json
from mha2mla.eval.tasks import TaskRow
from mha2mla.trial_models import random_pair
from tests.commands import run

pytest.importorskip("matplotlib")
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Texts by tag, attributes, and elements that were not closed."""

    def __init__(self, path):
        super().__init__()
        self.open, self.links, self.texts, self.counts = [], [], {}, {}
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def _answers(path, model, answer, prompt="Say <b>|</b>"):
    line = {"prompt": prompt, "answer": answer, "finished": "stop", "model": model, "sampling": {"temperature": 0.0}}
    path.write_text(json.dumps(line) + "\n")
    return path


def _loss(**others):
    """A row as records had it before quantised caches, which are shown as well."""
    return {"text": "prose", "seqlen": 512, "perplexity_ratio": 1.25, "perplexity_source": 8.0, **others}


def _pair(converted):
    return {"source": "a", "converted": converted, "dtype": "float32"}


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_source, tiny_converted):
    """A file of each kind, as the verbs write them."""
    tmp_path = tmp_path_factory.mktemp("reports")
    quick = ("--device", "cpu", "--json")
    sizes = ("--text", "builtin:prose", "--lengths", "16,32", "--max-tokens", 64, "--kv-bits", "4")
    assert run("eval", "quality", tiny_source, tiny_converted, *sizes, *quick, tmp_path / "q.json") == 0
    sizes = ("--level", "op", "step", "e2e", "--batch-sizes", "1,2", "--seqlens", "8", "--min-run-time", "0.001")
    sizes += ("--new-tokens", 2)
    assert run("eval", "latency", tiny_source, tiny_converted, *sizes, *quick, tmp_path / "l.json") == 0
    rows = [{"tokens_per_second": 9.5, "answers": 1}]
    write_json(tmp_path / "g.json", kind="generate", rows=rows, model="source", sampling={}, environment=None)
    rows = [{"task": "arc", "metric": "acc", "source": 0.5, "converted": 0.4, "recovery": 0.8}]
    write_json(tmp_path / "t.json", kind="tasks", rows=rows, source="a", converted="b")
    answers = [_answers(tmp_path / "s.jsonl", "source", "yes\x04"), _answers(tmp_path / "c.jsonl", "converted", "no")]
    return [tiny_converted, *(tmp_path / f"{name}.json" for name in "qlgt"), *answers]


def test_page_shows_every_kind_of_measurement_and_asks_for_nothing(files, tmp_path):
    page = Page(write_page(files, tmp_path / "new" / "report.html"))
    assert page.texts["h2"] == [
        "Loss by length and text", "Loss by position", "Loss at equal bytes", "Latency and speed-up", "Loss by layer",
        "Tasks", "Sample answers", "Provenance", "Commands",
    ]  # fmt: skip
    assert page.open == [] and page.texts["h1"] == ["source → converted"]
    quality = json.loads(files[1].read_text())
    cells = page.texts["td"]
    for row in quality["rows"]:
        assert mha2mla.eval.report.format_value(row["perplexity_ratio"]) in cells
    assert {"KV 4 bits, keys by channel", "yes\ufffd", "no", "Say <b>|</b>"} <= set(cells)
    shown = "\n".join(page.texts["pre"])
    assert "mha2mla eval quality" in shown and "--kv-bits 4" in shown and "--batch-sizes 1,2 --seqlens 8" in shown
    beside = page.text.split('<div class="beside')[1:]
    assert page.counts["figure"] == len(beside) == 7
    assert all("<table" in part.partition("</section>")[0] for part in beside), "a plot without its table"
    assert all(link.startswith(("#", "data:,")) for link in page.links)
    assert "script" not in page.counts and "@import" not in page.text and "url(http" not in page.text
    assert "prefers-color-scheme: dark" in page.text


def test_an_answer_to_an_empty_prompt_is_shown(tmp_path):
    """``mha2mla generate`` answers it where the tokenizer has a start token."""
    answers = _answers(tmp_path / "answers.jsonl", "model", "out of nothing", prompt="")
    assert "| model |" in (text := write_page([answers], tmp_path / "report.md").read_text())
    assert "| out of nothing |" in text and "1 prompts" in text


def test_folder_brings_the_reports_beside_its_weights(tiny_source, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    write_json(folder / "quality.json", kind="quality", rows=[_loss()], **_pair("b"))
    (folder / "config.json").write_text("{}")
    text = write_page([folder, folder / "quality.json"], folder / "report.md").read_text()
    assert text.startswith("<!-- mha2mla report/1 -->\n\n# a → b\n") and text.count("| quality.json |") == 1


def test_a_healed_checkpoint_has_figures_of_both_kinds(tiny_source, tiny_converted, tmp_path):
    record = json.loads((tiny_converted / "conversion.json").read_text())
    row = {"text": "builtin:prose", "length": 128, "tokens": 254, "ratio_before": 1.75, "ratio_after": 1.125}
    curve = [{"tokens": 0, "held_out_kl": 0.5}, {"tokens": 64, "kl": 0.4}, {"tokens": 64, "held_out_kl": 0.25}]
    healing = {"name": "healed", "flags": ["--preset", "quick"], "rows": [row | {"kl_before": 0.5, "kl_after": 0.25}]}
    healing |= {"settings": {"train": "lora"}, "trained": {"seconds": 5.0, "tokens": 64, "curve": curve}}
    (tmp_path / "conversion.json").write_text(json.dumps(record | {"healing": healing}))
    page = Page(write_page([tmp_path], tmp_path / "report.html"))
    assert page.texts["h1"] == ["source → healed"] and page.texts["h2"][:2] == ["Healing", "Loss by layer"]
    assert "1.125 ×" in page.texts["dd"] and {"1.750", "1.125", "0.2500"} <= set(page.texts["td"])
    assert "KL on held-out windows of its text: 0.5 before, 0.25 at best" in page.texts["h3"]
    assert any(line.startswith("converted. Error by layer") for line in page.texts["h3"])
    shown = "\n".join(page.texts["pre"])
    assert f"mha2mla heal {record['source_name']} {record['destination']} healed --preset quick" in shown


def test_times_of_another_model_name_it(tmp_path):
    """A record of one model's losses beside one of a shape's times."""
    write_json(tmp_path / "q.json", kind="quality", rows=[_loss()], **_pair("b"))
    row = {"op": "generate", "batch": 1, "seqlen": 64, "status": "ok", "new_tokens": 2}
    rows = [
        {**row, "implementation": name, "tokens_per_s": speed, "largest_batch": 8 * int(speed)}
        for name, speed in (("source", 1.0), ("converted", 2.0))
    ]
    write_json(tmp_path / "l.json", kind="latency", rows=rows, random_weights="llama-2-7b", layers=2, geometry="H=2")
    page = Page(write_page([tmp_path / "q.json", tmp_path / "l.json"], tmp_path / "report.html"))
    assert page.texts["h1"] == ["a → b"]
    assert "speed of generation, batch 1, 64 tokens, llama-2-7b with random weights" in page.texts["dt"]
    assert page.counts["figure"] == 2, "one context makes no picture of the largest batches"
    assert {"8", "16"} <= set(page.texts["td"])


@pytest.mark.parametrize("layout", ["latent", "shared", "per-group"])
def test_command_of_random_weights_measures_the_same_geometry(layout, tmp_path):
    pair = random_pair("tiny", {"layout": layout, "cache_ratio": 0.5}, None, torch.device("cpu"), torch.float32)
    row = {"op": "generate", "batch": 1, "seqlen": 64, "status": "ok", "implementation": "converted"}
    fields = {"random_weights": "tiny", "layers": 2, "geometry": str(pair.geometry)}
    path = write_json(tmp_path / "l.json", kind="latency", rows=[row], **fields)
    (words,) = re.findall("--random-weights tiny (.*) --level", write_page([path], tmp_path / "report.md").read_text())
    options = dict(zip(words.split()[::2], words.split()[1::2], strict=True))
    target = {"layout": options["--layout"], "kv_lora_rank": int(options["--kv-lora-rank"])}
    target["qk_rope_head_dim"] = int(options["--qk-rope-head-dim"])
    again = random_pair("tiny", target, int(options["--layers"]), torch.device("cpu"), torch.float32)
    assert again.geometry == pair.geometry


@pytest.mark.parametrize(("measured", "named"), [("b", ""), ("c", " of c")])
def test_speed_of_another_conversion_names_it(measured, named, tmp_path):
    write_json(tmp_path / "q.json", kind="quality", rows=[_loss()], **_pair("b"))
    row = {"op": "generate", "batch": 1, "seqlen": 64, "status": "ok", "new_tokens": 2}
    rows = [{**row, "implementation": name, "tokens_per_s": 1.0} for name in ("source", "converted")]
    write_json(tmp_path / "l.json", kind="latency", rows=rows, source="a", converted=f"path/to/{measured}")
    page = Page(write_page([tmp_path / "q.json", tmp_path / "l.json"], tmp_path / "report.html"))
    assert f"speed of generation{named}, batch 1, 64 tokens" in page.texts["dt"]


@pytest.mark.parametrize("caches", [["16 bits"], ["16 bits", "source, KV 4 bits, keys by channel"]])
def test_probes_of_several_caches_name_them(caches, tmp_path):
    row = {"probe": "sums", "measure": "accuracy", "length": 64, "chance": 0.5, "source": 1.0}
    rows = [row | {"cache": cache, "converted": 0.75, "retained": 0.5} for cache in caches]
    fields = {"rows": [_loss()], "probes": rows, **_pair("b")}
    path = write_json(tmp_path / "q.json", kind="quality", **fields)
    page = Page(write_page([path], tmp_path / "report.html"))
    cells = page.texts["td"]
    assert cells.count("sums") == len(caches) and set(caches[1:]) <= set(cells)
    assert page.texts["th"].count("cache") == len(caches), "bytes have one, probes if there are several"


def test_conversions_of_one_name_are_told_apart_by_their_path(tmp_path):
    files = [
        write_json(tmp_path / f"{ratio}.json", kind="quality", rows=[_loss(perplexity_ratio=ratio)], **fields)
        for ratio, fields in ((1.25, _pair("new/b")), (1.75, _pair("old/b")))
    ]
    page = Page(write_page(files, tmp_path / "report.html"))
    assert page.texts["h1"] == ["a → new/b, old/b"] and page.texts["td"].count("1.250") == 3
    assert "perplexity of new/b, windows of 512 tokens, worst text" in page.texts["dt"]
    assert Page(write_page(files[:1], tmp_path / "report.html")).texts["h1"] == ["a → b"]


def test_bytes_of_several_conversions_name_them(tiny_converted, tmp_path):
    record = json.loads((tiny_converted / "conversion.json").read_text())
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "conversion.json").write_text(json.dumps(record | {"name": name}))
    text = write_page([tmp_path / "one", tmp_path / "two"], tmp_path / "report.md").read_text()
    assert all(f"{what} of {name}: " in text for what in ("KV cache", "parameters") for name in ("one", "two"))
    text = write_page([tmp_path / "one"], tmp_path / "report.md").read_text()
    assert "KV cache: " in text and "parameters: " in text


def test_positions_of_several_files_are_shown_together(tmp_path):
    """Of one text those of its longest windows."""
    files = []
    for name, text, length, ratio in (("x", "prose", 64, 2.25), ("y", "prose", 512, 1.25), ("z", "code", 64, 1.75)):
        parts = [
            _loss(text=text, seqlen=length, first=first, stop=first + length // 2, perplexity_ratio=ratio)
            for first in (0, length // 2)
        ]
        fields = {"rows": [_loss(text=text, seqlen=length)], "by_position": parts, **_pair("b")}
        files.append(write_json(tmp_path / f"{name}.json", kind="quality", **fields))
    for order in (files, files[::-1]):
        page = write_page(order, tmp_path / "report.md").read_text().partition("## Loss by position")[2]
        shown = [line for line in page.partition("## Loss at equal bytes")[0].splitlines() if line.startswith("| ")][2:]
        lines = ["| prose | 0 | 256 | 1.250 |", "| prose | 256 | 512 | 1.250 |", "| code | 0 | 32 | 1.750 |"]
        assert sorted(shown) == sorted([*lines, "| code | 32 | 64 | 1.750 |"])


def test_bytes_are_those_of_the_longest_window(tmp_path):
    """The newest tokens of a coded cache stay in 16 bits: its share falls with the length."""
    shares = {("prose", 512): 0.355, ("prose", 8192): 0.315, ("short", 512): 0.355}
    rows = [_loss(text=text, seqlen=size, cache="source, KV 4 bits", cache_share=share)
            for (text, size), share in shares.items()]  # fmt: skip
    path = write_json(tmp_path / "q.json", kind="quality", rows=rows, **_pair("b"))
    text = write_page([path], tmp_path / "report.md").read_text()
    assert "| model | cache | bytes at 8,192 | at 512 | at 8,192 |" in text
    assert "| source | KV 4 bits | 0.3150 | 1.250 | 1.250 |" in text


def test_command_measures_every_cache_again(tmp_path):
    caches = ["16 bits", "source, KV 4 bits, keys by token", "latent 8 bits, importance", "rotary keys int8"]
    rows = [_loss(cache=cache) for cache in [*caches, "rotary keys bfloat16"]]
    path = write_json(tmp_path / "q.json", kind="quality", rows=rows, **_pair("b"))
    options = "--kv-bits 4 --latent-bits 8 --rotary-key-cache int8,bfloat16 --dtype"
    assert options in write_page([path], tmp_path / "report.md").read_text()


def test_a_preset_says_whose_speed_up_it_has(tmp_path):
    flash = {"us_p50": 180.0, "us": 180.0, "speed_up": 1.8, "published_ms": 5.95, "implementation": "FlashAttention-2"}
    ours = {"us_p50": 100.0, "us": 100.0, "speed_up": 1.0, "published_ms": 3.52, "implementation": "mla_decode (x)"}
    rows = [{"op": "attention", "batch": 8, "seqlen": 2048, "status": "ok", **row} for row in (flash, ours)]
    path = write_json(tmp_path / "l.json", kind="latency", rows=rows, preset="llama-2-7b-decode")
    lines = write_page([path], tmp_path / "report.md").read_text().splitlines()
    table = lines[lines.index("**All rows of llama-2-7b-decode**") + 2 :]
    assert table[0] == "| batch | length | implementation | µs a layer | MLA's speed-up | published ms | status |"
    assert table[2] == "| 8 | 2,048 | FlashAttention-2 | 180.0 | 1.800 | 5.950 | ok |"


def test_a_recovery_above_one_is_told_from_a_gain(tmp_path):
    """A perplexity that doubles has a recovery of 2."""
    row = TaskRow("reading", "byte_perplexity", "none", False, 4, 4.0, 8.0, None, None).to_dict()
    path = write_json(tmp_path / "t.json", kind="tasks", rows=[row], **_pair("b"))
    lines = write_page([path], tmp_path / "report.md").read_text().splitlines()
    assert "| task | metric | filter | higher is better | samples | source | converted | recovery |" in lines
    assert "| reading | byte\\_perplexity | none | no | 4 | 4.000 | 8.000 | 2.000 |" in lines


def test_commands_have_the_amounts_dtype_and_check_of_their_rows(tmp_path):
    probe = {"probe": "one key", "measure": "accuracy", "length": 512, "chance": 0.125, "source": 1, "converted": 1}
    probes = [{**probe, "num_items": 70, "retained": 1.0}]
    quality = write_json(tmp_path / "q.json", kind="quality", rows=[_loss()], probes=probes, **_pair("b"))
    row = {"op": "prefill", "batch": 1, "seqlen": 64, "status": "not checked", "implementation": "converted"}
    latency = write_json(tmp_path / "l.json", kind="latency", rows=[{**row, "dtype": "bfloat16"}], **_pair("b"))
    text = write_page([quality, latency], tmp_path / "report.md").read_text()
    assert "--probes --probe-items 70 --dtype float32 --json quality.json" in text
    assert "--seqlens 64 --dtype bfloat16 --no-check --json latency.json" in text


def test_markdown_has_tables_and_shows_text_as_it_is(files, tmp_path):
    text = write_page(files, tmp_path / "report.md").read_text()
    assert "## Loss by length and text" in text and "<svg" not in text
    assert "| Say &lt;b&gt;\\|&lt;/b&gt; | yes\ufffd | no |" in text


def test_page_without_a_plot_needs_no_matplotlib(files, tmp_path, monkeypatch):
    monkeypatch.setattr(mha2mla.eval.plotting.importlib.util, "find_spec", lambda name: None)
    write_page(files, tmp_path / "report.md")
    with pytest.raises(ImportError, match="a plot needs matplotlib"):
        write_page(files, tmp_path / "report.html")


def test_a_checkpoint_of_codes_is_shown_by_its_own_rows_and_bytes(tiny_source, tmp_path):
    recipe = {"preset": "minimal", "cache_ratio": 0.5, "latent.ranks": [64, 32], "latent.bits": [4, 3]}
    recipe |= {"calibration.tokens": 256, "calibration.lengths": 64}
    report = mha2mla.convert(tiny_source, tmp_path / "coded", recipe, device="cpu", evaluation_tokens=64)
    sizes = ("--text", "builtin:prose", "--lengths", "16", "--max-tokens", 64, "--kv-bits", "4", "--device", "cpu")
    assert run("eval", "quality", tiny_source, tmp_path / "coded", *sizes, "--json", tmp_path / "q.json") == 0
    rows = json.loads((tmp_path / "q.json").read_text())["rows"]
    assert [row["cache"] for row in rows][:1] == ["3, 4 bits"] and rows[0]["cache_share"] == report.cache_ratio
    page = Page(write_page([tmp_path / "coded", tmp_path / "q.json"], tmp_path / "report.html"))
    assert f"KV cache: {report.cache_bytes_per_token} of 256 bytes a token, bfloat16" in page.texts["dt"]
    assert "perplexity of coded, windows of 16 tokens, worst text" in page.texts["dt"]
    assert {"3, 4 bits", f"{rows[0]['perplexity_ratio']:.3f} ×"} <= {*page.texts["td"], *page.texts["dd"]}


def test_rows_of_several_conversions_are_told_apart_by_their_cache(tmp_path):
    rows = [_loss(cache_ratio=0.5), _loss(cache_ratio=0.25, perplexity_ratio=1.75)]
    path = write_json(tmp_path / "q.json", kind="quality", rows=rows, source="a", dtype="float32")
    page = Page(write_page([path], tmp_path / "report.html"))
    assert page.texts["h1"] == ["a → cache 0.5, cache 0.25"] and {"cache 0.5", "cache 0.25"} <= set(page.texts["td"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": "environment", "rows": []}', "is of kind 'environment'; expected one of conversion, quality, "),
        ('{"kind": "conversion", "rows": [{"name": "0.5"}]}', "has no rows of layers"),
        ('{"kind": "quality", "rows": [{}]}', "cannot be reported: KeyError"),
        ("[1, 2]", "is not a JSON object"),
        ("notes", "is not JSON"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path, capsys):
    (tmp_path / "r.json").write_text(content)
    assert run("report", tmp_path / "r.json", "-o", tmp_path / "report.html") == 2
    assert message in capsys.readouterr().err and not (tmp_path / "report.html").exists()


def test_empty_folder_and_no_input_are_refused(tmp_path, capsys):
    assert run("report", tmp_path, "-o", tmp_path / "report.md") == 2
    assert "has none of conversion.json, quality.json" in capsys.readouterr().err
    assert run("report", "-o", tmp_path / "report.md") == 2
    assert "FOLDER|JSON is not given" in capsys.readouterr().err
