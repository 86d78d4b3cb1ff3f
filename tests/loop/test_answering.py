"""The verbs generate and chat: answers are those of transformers, and what was written is not asked again."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mha2mla
from mha2mla.eval.loading import kernels_dtype, load_model
from mha2mla.loop import Loop, Sampling
from mha2mla.loop.answering import Conversation, answer_all, loop_for, served, token_ids
from mha2mla.prompts import Answers, checkpoint_digest, read_prompts
from tests.commands import ROOT, run
from tests.conversion import tiny

PROMPTS = ["Keys and values", "Keys and queries, and more", "Light"]
MADE_BY = {"model": "m", "sampling": {}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(folder: Path, prompt: str, new_tokens: int) -> str:
    model, tokenizer = mha2mla.load(folder, device="cpu")
    ids = torch.tensor([tokenizer(prompt).input_ids])
    out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text, "id": number, "label": "x"}) for number, text in enumerate(PROMPTS)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("which", ["tiny_converted", "tiny_source"])
def test_a_file_is_answered_and_gone_on_with(which, prompts, tmp_path, request, capsys):
    folder = request.getfixturevalue(which)
    output, report = tmp_path / "out" / "answers.jsonl", tmp_path / "report.json"
    keys = ("--output", output, "--max-new-tokens", 6, "--device", "cpu", "--max-length", 200)
    assert run("generate", folder, "--file", prompts, *keys, "--json", report) == 0
    assert "3 answers, 0 of an earlier run: 18 tokens" in capsys.readouterr().out
    found = rows(output)
    assert {row["id"]: row["answer"] for row in found} == {
        number: expected(folder, text, 6) for number, text in enumerate(PROMPTS)
    }
    assert all(row["label"] == "x" and row["new_tokens"] == 6 and row["finished"] == "length" for row in found)
    measured = json.loads(report.read_text())["rows"][0]
    assert measured["new_tokens"] == 18 and measured["tokens_per_second"] > 0 < measured["cache_bytes_per_token"]

    output.write_text("\n".join(output.read_text().splitlines()[:2]) + '\n{"prompt": "Li')  # killed while it wrote
    assert run("generate", folder, "--file", prompts, *keys) == 0
    assert "1 answer, 2 of an earlier run" in capsys.readouterr().out
    assert sorted(row["answer"] for row in rows(output)) == sorted(row["answer"] for row in found)
    assert run("generate", folder, "--file", prompts, *keys) == 0
    assert "all 3 prompts have answers" in capsys.readouterr().out

    made_by = {"dtype": None, "device": "cpu", "max_length": 200, "weights": checkpoint_digest(str(folder))}
    assert made_by.items() <= found[0].items()
    for other in (("--seed", 5), ("--max-length", 150), ("--dtype", "float32")):
        assert run("generate", folder, "--file", prompts, *keys, *other) == 2
        assert "has answers of" in capsys.readouterr().err
    assert run("generate", folder, "--prompt", "Light", *keys, "--seed", 5, "--overwrite") == 0
    assert [row["prompt"] for row in rows(output)] == ["Light"]


def test_generate_keeps_rotary_keys_by_a_flag(tiny_converted, prompts, tmp_path, capsys):
    folder, report = tmp_path / "latent", tmp_path / "report.json"
    tiny.convert(tiny_converted, folder, {"layout": "latent"})
    command = ("--file", prompts, "--max-new-tokens", 6, "--device", "cpu", "--max-length", 200, "--json", report)
    found = {}
    for mode in ("none", "bfloat16"):
        output = tmp_path / f"{mode}.jsonl"
        assert run("generate", folder, *command, "--output", output, "--rotary-key-cache", mode) == 0
        size = json.loads(report.read_text())["rows"][0]["cache_bytes_per_token"]
        found[mode] = size, sorted(row["answer"] for row in rows(output))
    geometry = mha2mla.load(folder, device="cpu")[0].config.layer_geometry(0)
    assert found["bfloat16"] == (found["none"][0] + 2 * 4 * geometry.qk_rope_head_dim, found["none"][1])
    assert run("generate", tiny_converted, *command, "--rotary-key-cache", "bfloat16") == 2
    assert "rotary_key_cache is 'bfloat16'; expected one of ('none', 'auto')" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["tiny_converted", "tiny_source"])
def test_float32_is_loaded_as_what_kernels_take(which, request):
    folder = request.getfixturevalue(which)
    assert kernels_dtype(str(folder), torch.device("cuda")) == torch.bfloat16
    assert kernels_dtype(str(folder), torch.device("cpu")) is None


def test_lines_end_where_json_lines_end(tmp_path):
    """And not at characters that str.splitlines takes for ends."""
    text = "a\u2028b\u2029c\x85d"
    path, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\r\n\r\n")
    tasks = read_prompts(path)
    assert tasks == [{"prompt": text}]
    answers = Answers(output, MADE_BY)
    answers.write(tasks[0], answer=text, finished="stop")
    answers.close()
    assert Answers(output, MADE_BY).remaining([*tasks, {"prompt": "b"}]) == [(1, {"prompt": "b"})]
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="has no prompts; expected one in a line"):
        read_prompts(path)


def test_prompts_on_the_command_line(tiny_converted, capsys):
    options = ("--max-new-tokens", 5, "--device", "cpu", "--max-length", 100)
    assert run("generate", tiny_converted, "--prompt", *PROMPTS[:2], *options) == 0
    out = capsys.readouterr().out
    assert all(text + expected(tiny_converted, text, 5) in out for text in PROMPTS[:2])
    assert run("generate", tiny_converted, *options) == 2
    assert "--prompt and --file are not given" in capsys.readouterr().err
    assert run("generate", tiny_converted, "--prompt", "x" * 300, *options) == 2
    assert "prompt 1: prompt and answer have up to" in capsys.readouterr().err


def test_generate_reserves_pages_for_its_prompts(tiny_converted, tmp_path):
    record = tmp_path / "record.json"
    assert run("generate", tiny_converted, "--prompt", "a" * 16, "--max-new-tokens", 4, "--json", record) == 0
    (row,) = json.loads(record.read_text())["rows"]
    assert row["cache_bytes"] == 64 * row["cache_bytes_per_token"]
    loop = loop_for(load_model(tiny_converted, "", device="cpu"), [59, 60, 295], 4, 2)  # answers of 4 and a step ahead
    assert loop.cache.nbytes == 64 * (5 + 2) * loop.cache_bytes_per_token


def test_chat_takes_commands(tiny_converted, capsys, monkeypatch):
    said = []
    monkeypatch.setattr(Conversation, "say", lambda self, text: said.append(text) or iter(()))
    cleared = []
    monkeypatch.setattr(Conversation, "clear", lambda self: cleared.append(self))
    lines = iter(["/help", "hello", "/nwe", "/new", "/etc/hosts is what?", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert run("chat", tiny_converted, "--device", "cpu") == 0
    assert said == ["hello", "/etc/hosts is what?"] and len(cleared) == 1
    shown = capsys.readouterr()
    assert shown.out.count("/exit or an empty line ends") == 3  # at the start, /help, a mistyped one
    assert f"{tiny_converted} has no chat template: it continues what you type" in shown.err


def test_an_interrupt_keeps_what_is_finished(tiny_converted, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} keys"}) + "\n" for number in range(4000)))
    command = [sys.executable, "-m", "mha2mla", "generate", str(tiny_converted), "--file", str(prompts)]
    command += ["--output", str(output), "--max-new-tokens", "8", "--max-sequences", "4", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    while process.poll() is None and not (output.exists() and output.read_text().count("\n") > 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 130 and "Traceback" not in said
    assert 3 < len(rows(output)) < 4000


def test_lines_that_are_no_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    for text, what in (("{", "is no JSON"), ('{"text": 1}', "expected an object"), ('{"prompt": 1}', "expected")):
        path.write_text('{"prompt": "a"}\n\n' + text + "\n")
        with pytest.raises(ValueError, match=f"line 3 .*{what}"):
            read_prompts(path)
    path.write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(ValueError, match=r"prompts\.jsonl is not UTF-8"):
        read_prompts(path)


def test_equal_prompts_each_get_an_answer(tmp_path):
    answers = Answers(tmp_path / "out", MADE_BY)
    task = {"prompt": "a"}
    answers.write(task, answer="b", finished="stop")
    answers.close()
    assert Answers(tmp_path / "out", MADE_BY).remaining([task, task, {"prompt": "c"}]) == [
        (1, task), (2, {"prompt": "c"}),
    ]  # fmt: skip


def test_every_prompt_has_a_seed_of_its_own(tiny_converted, tmp_path):
    """The n-th task the n-th, also where an earlier run answered some."""
    model, tokenizer = mha2mla.load(tiny_converted, device="cpu")
    tasks, sampling = [{"prompt": "Light"}] * 4, Sampling(8, temperature=1.5, seed=7)
    model, ids = served(model), tokenizer("Light").input_ids
    expected = []
    for number in range(4):
        loop = Loop(model, max_length=100)
        request = loop.add(ids, replace(sampling, seed=7 + number))
        loop.run()
        text = tokenizer.decode(request.answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        expected.append(text)
    assert len(set(expected)) == 4
    for count, begin in ((3, 0), (4, 3)):
        answers = Answers(tmp_path / "answers.jsonl", {"model": "m", "sampling": {}})
        given = answer_all(Loop(model, max_length=100), tokenizer, tasks[:count], answers, sampling)
        assert sorted(text for _, text in given) == sorted(expected[begin:count])
        answers.close()


def test_messages_need_a_template(tiny_converted):
    _, tokenizer = mha2mla.load(tiny_converted, device="cpu")
    messages = [{"role": "user", "content": "Light"}]
    with pytest.raises(ValueError, match="no chat template"):
        token_ids(tokenizer, {"messages": messages}, False)
    tokenizer.chat_template = TEMPLATE
    asked = tokenizer("<u>Light<a>", add_special_tokens=False).input_ids
    assert (
        token_ids(tokenizer, {"messages": messages}, False) == token_ids(tokenizer, {"prompt": "Light"}, True) == asked
    )


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ({"prompt": "a \udcff"}, "the tokenizer does not take prompt 'a .udcff'"),
        ({"messages": [{"role": "system", "content": "a"}]}, "the chat template does not take messages .*: no system"),
        ({"messages": [3]}, r"the chat template does not take messages \[3\]"),
        ({"messages": []}, r"the chat template does not take messages \[\]"),
    ],
)
def test_what_a_tokenizer_or_its_template_refuses_is_named(task, named, tiny_converted):
    _, tokenizer = mha2mla.load(tiny_converted, device="cpu")
    refuse = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refuse + TEMPLATE
    with pytest.raises(ValueError, match=named):
        token_ids(tokenizer, task, False)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_conversation_goes_on_over_what_it_cached(tiny_converted, template):
    model, tokenizer = mha2mla.load(tiny_converted, device="cpu")
    tokenizer.chat_template = template
    talk = Conversation(model, tokenizer, Sampling(9), max_length=300, page_size=8)
    first = "".join(talk.say("Keys and values are cached"))
    requests, add = [], talk._loop.add
    talk._loop.add = lambda *given: requests.append(add(*given)) or requests[-1]
    second = "".join(talk.say(" and again"))
    texts = ["Keys and values are cached", first, " and again"]
    whole = (
        "".join(f"<{role}>{text}" for role, text in zip("uau", texts, strict=True)) + "<a>"
        if template
        else "".join(texts)
    )
    loop = Loop(served(model), max_length=300, num_pages=64)
    alone = loop.add(tokenizer(whole, add_special_tokens=template is None).input_ids, Sampling(9))
    loop.run()
    assert second == tokenizer.decode(alone.answer, skip_special_tokens=True)
    assert requests[0].shared_tokens >= 16
    assert talk.last.new_tokens == len(alone.answer) and 0 < talk.last.first_seconds <= talk.last.seconds
    assert talk.last.cache_bytes == len(alone.tokens) * model.config.cache_bytes_per_token(4)


def test_an_abandoned_answer_leaves_the_next_one_alone(tiny_converted):
    model, tokenizer = mha2mla.load(tiny_converted, device="cpu")
    answers, steps = [], []
    for begins in (False, True):
        talk = Conversation(model, tokenizer, Sampling(9), max_length=300, page_size=8)
        if begins:
            pieces = talk.say("Keys and values are cached")
            next(pieces)
            pieces.close()
        before = talk._loop.progress.steps
        answers.append("".join(talk.say("Light")))
        steps.append(talk._loop.progress.steps - before)
        assert talk.last.new_tokens == 9
    assert answers[0] == answers[1] and steps[0] == steps[1]


def test_two_models_answer_one_after_another(tiny_converted, tiny_source, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Keys\n/new\nLight\n"))
    options = ("--max-new-tokens", 4, "--max-length", 100, "--device", "cpu")
    assert run("chat", tiny_converted, "--beside", tiny_source, *options) == 0
    out = capsys.readouterr().out
    for folder in (tiny_converted, tiny_source):
        assert out.count(f"{folder}:") == 2 and expected(folder, "Light", 4) in out
    assert out.count("bytes cached]") == 4


def test_a_source_with_tables_by_length_is_refused(tmp_path, tiny_converted, capsys):
    family, keys = tiny.CASES["llama-longrope"]
    folder = tiny.checkpoint(tmp_path / "source", family, **keys)
    for command in (("generate", folder, "--prompt", "a"), ("chat", tiny_converted, "--beside", folder)):
        assert run(*command, "--max-length", 100, "--device", "cpu") == 2
        assert "rope_type 'longrope' or 'dynamic'" in capsys.readouterr().err
