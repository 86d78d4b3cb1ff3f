"""lm-eval over a converted model and its source."""

import json
import math
import sys
from functools import partial

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mha2mla.cli.verbs import main
from mha2mla.eval import tasks
from mha2mla.eval.tasks import TaskRow, evaluate_tasks, register

lm_eval = pytest.importorskip("lm_eval")

DOCUMENTS = [
    {"question": f"{first} after {second} is", "choices": [" a", " b", " c"], "answer": (first + second) % 3}
    for first in range(3)
    for second in range(4)
]


@pytest.fixture
def folder(tmp_path):
    """A folder with a task of choices, one of perplexity and one that generates; their documents lie beside them."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "metadata": {"version": 1},
    }
    choices = {
        "task": "local_choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    reading = {
        "task": "local_reading",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} a or b or c",
        "metric_list": [{"metric": "byte_perplexity"}],
    }
    writing = {
        "task": "local_writing",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (choices, reading, writing):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**task, **source}))
    return folder


def _accuracy(checkpoint):
    """The same choice by the models' own losses."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    right = 0
    for document in DOCUMENTS:
        losses = []
        for choice in document["choices"]:
            ids = tokenizer(document["question"] + choice, return_tensors="pt")["input_ids"]
            asked = len(tokenizer(document["question"])["input_ids"])
            with torch.inference_mode():
                logs = model(ids).logits[0].log_softmax(-1)
            losses.append(-logs[asked - 1 : -1].gather(1, ids[0, asked:, None]).sum())
        right += int(torch.stack(losses).argmin()) == document["answer"]
    return right / len(DOCUMENTS)


def test_a_folder_of_tasks_is_run_on_both_models_without_a_network(tiny_source, tiny_converted, folder):
    rows = evaluate_tasks(tiny_source, tiny_converted, folder=folder, device="cpu")
    by_name = {(row.task, row.metric): row for row in rows}
    assert set(by_name) == {
        ("local_choices", "acc"),
        ("local_reading", "byte_perplexity"),
        ("local_writing", "exact_match"),
    }
    # Noise never spells an answer: a score of nothing has no recovery.
    writing = by_name["local_writing", "exact_match"]
    assert writing.recovery is None and writing.to_dict()["recovery"] is None
    accuracy = by_name["local_choices", "acc"]
    assert accuracy.num_samples == len(DOCUMENTS) and accuracy.higher_is_better is True
    assert (accuracy.source, accuracy.converted) == (_accuracy(tiny_source), _accuracy(tiny_converted))
    assert accuracy.recovery == accuracy.converted / accuracy.source and accuracy.stderr_source is not None
    reading = by_name["local_reading", "byte_perplexity"]
    assert reading.higher_is_better is False and reading.source != reading.converted
    assert all(math.isfinite(value) and value > 1 for value in (reading.source, reading.converted))


def test_lm_eval_itself_knows_the_model_once_it_is_registered(tiny_converted, folder):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    assert register() is register()
    found = simple_evaluate(
        "mha2mla",
        model_args={"pretrained": str(tiny_converted), "dtype": "float32", "device": "cpu"},
        tasks=["local_choices"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["results"]["local_choices"]["acc,none"] == _accuracy(tiny_converted)


def test_without_lm_eval_it_says_what_to_install(tiny_source, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    with pytest.raises(ImportError, match=r"tasks need lm-eval: pip install -e '\.\[eval\]' in the clone"):
        evaluate_tasks(tiny_source, tiny_source, folder=folder)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "tasks is empty and folder is None"),
        ({"folder": "no-such-folder"}, FileNotFoundError, "folder is 'no-such-folder'"),
        ({"tasks": ["local_choises"], "folder": "here"}, ValueError, "tasks has 'local_choises'"),
        ({"folder": "empty"}, ValueError, "in which lm-eval finds no task"),
    ],
)
def test_what_is_not_there_is_named(tiny_source, tmp_path, folder, monkeypatch, arguments, error, message):
    # An unknown name is looked for among lm-eval's own tasks as well, which takes half a minute to read.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    (tmp_path / "empty").mkdir()
    places = {"here": folder, "empty": tmp_path / "empty"}
    if "folder" in arguments:
        arguments = {**arguments, "folder": places.get(arguments["folder"], arguments["folder"])}
    with pytest.raises(error, match=message):
        evaluate_tasks(tiny_source, tiny_source, device="cpu", **arguments)


def test_the_verb_prints_and_writes_recovery(tiny_source, tiny_converted, monkeypatch, tmp_path, capsys):
    asked, pair = [], (str(tiny_source), str(tiny_converted))

    def evaluate(*arguments, **keywords):
        asked.append((arguments, keywords))
        return [TaskRow("local_choices", "acc", "none", True, 4, 0.5, 0.25, 0.1, None)]

    monkeypatch.setattr(tasks, "evaluate_tasks", evaluate)
    report = tmp_path / "tasks.json"
    flags = ["--task", "one", "two", "--folder", "here", "--limit", "4", "--dtype", "bfloat16"]
    assert main(["eval", "tasks", *pair, *flags, "--json", str(report)]) == 0
    (row,) = json.loads(report.read_text())["rows"]
    assert (row["task"], row["recovery"]) == ("local_choices", 0.5)
    assert "recovery" in capsys.readouterr().out
    ((arguments, keywords),) = asked
    assert arguments == (*pair, ["one", "two"])
    assert (keywords["folder"], keywords["limit"], keywords["dtype"]) == ("here", 4, torch.bfloat16)
