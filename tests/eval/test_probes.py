"""Probes: what they ask can be answered from the context, and from nothing else."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from mha2mla.eval import probes
from mha2mla.eval.probes import QUESTIONS, REPEATED, WORDS, ProbeSettings, Writer, run_probes
from mha2mla.trial_models import tiny_checkpoint
from tests.conversion import tiny

# A letter is a token here: contexts are short.
SETTINGS = ProbeSettings(lengths=(900,), gaps=(128, 256), items=4, text="builtin:prose")


class Copyist(torch.nn.Module):
    """Predicts what followed the last occurrence of the longest context that ends here: perfect recall, and no more.

    Args:
        config: of a model with this vocabulary.
        reach: tokens back that it sees.
    """

    def __init__(self, config, reach=10**9):
        super().__init__()
        self.config, self.reach, self.base_model, self.device = config, reach, self, torch.device("cpu")

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, use_cache=False):
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, ids in enumerate(input_ids.numpy()):
            shared = np.zeros(len(ids) + 1, dtype=np.int64)  # [j + 1]: how much of what ends at j also ends at i
            for i, token in enumerate(ids):
                shared[1:] = np.where(ids == token, shared[:-1] + 1, 0)
                first = max(0, i - self.reach)
                before = shared[1 + first : 1 + i]
                if before.size and before.max() > 0:
                    last = first + before.size - 1 - before[::-1].argmax()
                    logits[row, i, ids[last + 1]] = 10.0
        return CausalLMOutput(logits=logits)


@pytest.fixture(scope="module")
def config(tiny_source):
    return AutoModelForCausalLM.from_pretrained(tiny_source).config


def test_perfect_recall_answers_what_is_stated_and_a_short_memory_does_not(tokenizer, config):
    rows, skipped = run_probes(
        Copyist(config), Copyist(config, reach=60), tokenizer, SETTINGS, longest=1000, progress=False
    )
    assert not skipped
    found = {(row.probe, row.length): row for row in rows}
    assert set(found) == {(name, 900) for name in QUESTIONS} | {(REPEATED, 128), (REPEATED, 256)}
    for name in ("one key", "several keys"):
        row = found[name, 900]
        assert row.source == 1.0 and row.counts and row.retained < 0.5, name
        assert row.nll_source < 0.1 < row.nll_converted
        assert row.source_by_depth == (1.0, 1.0, 1.0)
    for gap in (128, 256):
        row = found[REPEATED, gap]
        assert row.counts and row.source > 1 and abs(row.retained) < 0.2
        assert row.nll_source is None and row.source_by_depth == ()
    # Copying does not add.
    assert not found["arithmetic", 900].counts and found["arithmetic", 900].retained is None


def test_a_source_that_guesses_counts_for_nothing(tokenizer, config):
    rows, _ = run_probes(Copyist(config, 1), Copyist(config), tokenizer, SETTINGS, progress=False)
    assert not any(row.counts for row in rows) and {row.retained for row in rows} == {None}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_as_long_as_asked_and_its_answer_stands_where_it_says(tokenizer, name):
    writer = Writer(tokenizer, SETTINGS.text)
    question = QUESTIONS[name](writer, random.Random(0), 900, 0.3)
    assert len(question.ids) == 900
    assert len(set(question.candidates)) == len(question.candidates)
    if name == "arithmetic":
        *_, asked = tokenizer.decode(question.ids).split("\n")
        first, second = (int(part) for part in asked.removesuffix(" = ").split(" + "))
        right = str(first + second)
    else:
        # What the answer is called stands in the context once, about as deep as said.
        letter = tokenizer.decode([question.candidates[question.answer]])
        (right,) = (word for word in WORDS if word[0] == letter)
        text = tokenizer.decode(question.ids)
        places = [place for place in range(len(text)) if text.startswith(f"is {right}.", place)]
        assert len(places) == 1 and abs(places[0] / len(text) - question.depth) < 0.2
    assert tokenizer.decode([question.candidates[question.answer]]) == right[0]


@pytest.fixture(scope="module")
def sums(tokenizer) -> list[tuple[list[str], str, str]]:
    """Of many questions the lines of solved sums, the sum that is asked, and its answer."""
    writer, found = Writer(tokenizer, SETTINGS.text), []
    for seed in range(400):
        question = QUESTIONS["arithmetic"](writer, random.Random(seed), 200, 0.5)
        *solved, asked = tokenizer.decode(question.ids).split("\n")[-9:]
        answer = tokenizer.decode([question.candidates[question.answer]])
        found.append((solved, asked.removesuffix(" = "), answer))
    return found


def test_no_solved_sum_is_the_asked_one_turned_round(sums):
    for solved, asked, answer in sums:
        turned = " + ".join(reversed(asked.split(" + ")))
        assert " + " in solved[0]
        assert f"{asked} = {answer}" not in solved and f"{turned} = {answer}" not in solved


def test_no_answer_of_sums_is_likelier_than_chance(sums):
    counts = [[answer for *_, answer in sums].count(str(digit)) for digit in range(2, 10)]
    assert sum(counts) == 400 and max(counts) < 400 / 8 + 4 * (400 / 8 * 7 / 8) ** 0.5


def test_every_context_begins_as_the_tokenizer_begins_a_text():
    """Models trained with a start token lean on it."""
    writer = Writer(tiny.tokenizer(), SETTINGS.text)
    asked = [ask(writer, random.Random(0), 900, 0.3).ids for ask in QUESTIONS.values()]
    contexts = probes._repetitions(128, writer, random.Random(0), 2)
    assert {parts.shape for parts in contexts} == {(2, 32 + 128 + 64)}
    assert {ids[0] for ids in (*asked, *(row.tolist() for parts in contexts for row in parts))} == {0}


def test_probes_are_drawn_alike_whatever_else_is_asked(tiny_source, tokenizer):
    models = [AutoModelForCausalLM.from_pretrained(tiny_source) for _ in range(2)]
    arguments = {"tokenizer": tokenizer, "progress": False}
    few, _ = run_probes(*models, settings=replace(SETTINGS, items=2), **arguments)
    more = ProbeSettings(lengths=(1000, 900), gaps=(256,), items=2, text="builtin:prose")
    rows, _ = run_probes(*models, settings=more, **arguments)
    same = {(row.probe, row.length) for row in few} & {(row.probe, row.length) for row in rows}
    assert len(same) == 5
    assert {row for row in few if (row.probe, row.length) in same} <= set(rows)
    other = ProbeSettings(lengths=(900,), gaps=(), items=2, text="builtin:prose", seed=1)
    others, _ = run_probes(*models, settings=other, **arguments)
    assert {row.nll_source for row in others}.isdisjoint({row.nll_source for row in few})
    assert all(row.source == row.converted and row.nll_source == row.nll_converted for row in rows)


def test_what_does_not_fit_is_named(tiny_source, tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_source)
    (tmp_path / "short").write_text("a few words " * 25)
    settings = ProbeSettings(lengths=(100, 600, 5000), gaps=(128, 512, 4096), items=1, text=str(tmp_path / "short"))
    rows, skipped = run_probes(model, model, tokenizer, settings, longest=4096, progress=False)
    measured = {(row.probe, row.length) for row in rows}
    # In 600 tokens several keys leave room for little running text, and one key for more than there is.
    assert measured >= {("one key", 100), ("several keys", 600), (REPEATED, 128)}
    assert measured.isdisjoint({("several keys", 100), ("one key", 600), (REPEATED, 512)})
    assert len(measured) + len(skipped) == len(QUESTIONS) * 2 + 3 + 1
    assert "probes of 5000 tokens: the models take at most 4096" in skipped
    assert "a span repeated after 4096 tokens: the models take at most 4096" in skipped
    assert any(reason.startswith("several keys in 100 tokens: facts and question take ") for reason in skipped)
    assert any(reason.startswith(f"{REPEATED} after 512 tokens: text ") for reason in skipped)


def test_a_tokenizer_that_cannot_tell_the_answers_apart_is_named(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    writer = Writer(tokenizer, SETTINGS.text)
    with pytest.raises(ValueError, match="does not tell apple, apricot, banana apart"):
        writer.question(random.Random(0), 200, [], "Fruit:", ["apple", "apricot", "banana"], 0, None)


def test_words_that_a_tokenizer_does_not_know_are_named(tiny_source, tmp_path):
    """A tokenizer of words makes one token of all that it does not know."""
    known = ["<unk>", "the", "secret", "word", "of", "is", "."]
    words = Tokenizer(WordLevel(vocab={word: place for place, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    model, settings = AutoModelForCausalLM.from_pretrained(tiny_source), replace(SETTINGS, lengths=(100,), gaps=())
    rows, skipped = run_probes(model, model, tokenizer, settings, progress=False)
    assert not rows and len(skipped) == len(QUESTIONS)
    assert all("the tokenizer does not tell" in reason for reason in skipped)


def test_chance_is_binomial():
    assert probes._by_chance(0, 20, 0.125) == pytest.approx(1)
    assert probes._by_chance(20, 20, 0.125) == pytest.approx(0.125**20)
    assert probes._by_chance(2, 3, 0.5) == pytest.approx(0.5)
    assert math.isclose(probes._by_chance(1, 4, 0.25), 1 - 0.75**4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"items": 0}, "items is 0; expected at least 1"), ({"gaps": (32,)}, "gaps has 32; expected at least the 64")],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProbeSettings(**arguments)
