"""Text that the source model writes: reproducible, of the right shape, document after document."""

import random
from collections import Counter

import pytest
import torch

from mha2mla.conversion.calibration import generated_text
from mha2mla.conversion.calibration.generated_text import _cut, generate_windows, write_windows
from mha2mla.conversion.calibration.texts import DIVERSE, GENERATED, OwnText, prompts
from tests.conversion import tiny
from tests.ops import Calls


def written(model, tokenizer, length, count, name=GENERATED, **keys):
    (windows,) = generate_windows(model, tokenizer, [OwnText(name, length, count)], **keys)
    return windows


def test_generated_windows_are_reproducible_and_begin_as_documents_do_or_within_one():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    windows = written(model, tokenizer, 48, 96, seed=3)
    assert windows.shape == (96, 48) and windows.dtype == torch.int64 and not windows.is_cuda
    assert torch.equal(windows, written(model, tokenizer, 48, 96, seed=3))
    assert not torch.equal(windows, written(model, tokenizer, 48, 96, seed=4))
    assert (windows[:, 0] == tokenizer.bos_token_id).all()
    openings = [opening.split("{}")[0] for opening in prompts()[1]]
    texts = tokenizer.batch_decode(windows[:, 1:])
    prompted = sum(any(text.startswith(opening[:20]) for opening in openings) for text in texts)
    # Half are cut, and two thirds of the others begin with a prompt: 32 on average, 18 to 46 in all but 1 of 300 draws.
    assert 18 <= prompted <= 46


def test_a_cut_window_is_what_was_written_from_a_later_token_on():
    written, first = torch.arange(100, 100 + 32 + 64), torch.tensor([7])
    draw = random.Random(0)
    windows = [_cut(written, 32, first, draw).tolist() for _ in range(200)]
    whole = written[:32].tolist()
    cut = [window for window in windows if window != whole]
    assert 70 <= len(cut) <= 130
    assert all(window[0] == 7 and window[1:] == list(range(window[1], window[1] + 31)) for window in cut)
    assert {window[1] for window in cut} <= set(range(101, 165)) and len({window[1] for window in cut}) > 30


def always_ends(model, end):
    """A model whose end token has the largest logit wherever it stands."""
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[end] = 1e4 * model.model.norm.weight.sign()
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.lm_head.weight[end, 1:] = 0
    return model


def test_a_token_is_drawn_without_checks_on_the_host():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    counts = []
    for length in (48, 64):
        with Calls() as calls:
            written(model, tokenizer, length, 4, seed=0)
        counts.append(Counter(name.partition("::")[2].partition(".")[0] for name in calls.names))
    long, longer = counts
    assert longer["exponential_"] - long["exponential_"] == 16, "one draw a token"
    assert "multinomial" not in longer
    waits = [each["_local_scalar_dense"] + each["item"] for each in counts]
    assert waits[0] == waits[1], "no token waits for a number"


def test_samples_have_the_models_probabilities():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf]).expand(40_000, 5).bfloat16()
    found = generated_text.sample(logits, torch.Generator().manual_seed(1), torch.empty(logits.shape)).indices
    expected = logits[0].float().softmax(-1)
    shares = found.bincount(minlength=5) / len(found)
    assert ((shares - expected).abs() <= 4 * (expected * (1 - expected) / len(found)).sqrt()).all()


def test_logits_that_are_nan_are_refused():
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are NaN in 64 of 64 rows"):
        written(model, tiny.tokenizer(), 32, 64, seed=0)


def test_after_the_end_of_a_document_comes_the_next_prompt():
    tokenizer = tiny.tokenizer()
    windows = written(always_ends(tiny.model(), tokenizer.eos_token_id), tokenizer, 200, 4, seed=0)
    ended = windows == tokenizer.eos_token_id
    assert ended.any()
    after = windows[:, 1:][ended[:, :-1]]
    assert (after == tokenizer.bos_token_id).all()


def test_diverse_text_begins_in_every_way(monkeypatch):
    monkeypatch.setattr(generated_text, "_CUT_SHARE", 0.0)
    tokenizer = tiny.tokenizer()
    end = tokenizer.eos_token
    tokenizer.chat_template = f"USER {{{{ messages[0].content }}}}{end}\nANSWER"
    model = always_ends(tiny.model(), tokenizer.eos_token_id)
    windows = written(model, tokenizer, 48, 200, DIVERSE, seed=0)
    _, openings, _, documents = prompts()
    starts = [opening.split("{}")[0][:12] for opening in openings if opening[0] != "{"]
    texts = tokenizer.batch_decode(windows)
    begins = [text.removeprefix(tokenizer.bos_token).lstrip() for text in texts]
    kinds = {
        "topic": sum(text.startswith(tuple(starts)) for text in begins),
        "document": sum(text.startswith(tuple(each[:12] for each in documents)) for text in begins),
        "turn": sum(text.startswith((f"USER {end}", f"USER{end}")) for text in texts),
        "instruction": sum(text.startswith("USER ") and not text.startswith(f"USER {end}") for text in texts),
    }
    assert all(20 <= count <= 60 for count in kinds.values()), kinds  # 40 each on average
    turns = [text for text in texts if text.startswith((f"USER {end}", f"USER{end}"))]
    assert all(text.split(end)[1].strip().startswith("ANSWER") for text in turns), turns[0]


def test_openings_in_unknown_scripts_are_left_out():
    """A tokenizer of bytes has two or three tokens a letter of other scripts, one of English."""
    tokenizer = tiny.tokenizer()
    drawn = generated_text._documents(tokenizer, 264, frozenset(), random.Random(0), True)
    texts = {tokenizer.decode(next(drawn)[0], skip_special_tokens=True) for _ in range(2000)}
    assert "Shall I compare thee" in texts
    assert not any(text.startswith(("История", "这座", "この町")) for text in texts)


def test_tokens_that_the_model_lacks_begin_and_end_nothing():
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(1000)])
    tokenizer.eos_token = "<999>"
    model = tiny.model()
    assert int(written(model, tokenizer, 24, 40, DIVERSE, seed=0).max()) < model.config.vocab_size


def test_a_folder_writes_as_its_model_does(source):
    tokenizer, wanted = tiny.loaded_tokenizer(source), [OwnText(GENERATED, 32, 3), OwnText(DIVERSE, 48, 2)]
    made = write_windows(source, tokenizer, wanted, seed=1, device=torch.device("cpu"))
    expected = generate_windows(tiny.model(), tokenizer, wanted, seed=1)
    assert [part.shape for part in made] == [(3, 32), (2, 48)] and all(map(torch.equal, made, expected))
    assert write_windows(source / "absent", tokenizer, [], seed=1, device=torch.device("cpu")) == []


def test_rows_of_all_windows_are_written_side_by_side(monkeypatch):
    """A step of a model of 135M parameters takes 0.1 s on two cores, for 8 rows as for 16."""
    monkeypatch.setattr(generated_text, "_CUT_SHARE", 0.0)
    tokenizer, model, steps, write = tiny.tokenizer(), tiny.model(), [], generated_text._write

    def counted(model, ends, documents, length, *rest):
        steps.append((len(documents), length))
        return write(model, ends, documents, length, *rest)

    monkeypatch.setattr(generated_text, "_write", counted)
    wanted = [OwnText(GENERATED, 64, 3), OwnText(DIVERSE, 64, 2), OwnText(GENERATED, 160, 2), OwnText(DIVERSE, 8, 1)]
    short, diverse, long, shortest = generate_windows(model, tokenizer, wanted, seed=3, row=64)
    assert steps == [(11, 128), (1, 72)] and (len(short), len(diverse), len(long), len(shortest)) == (3, 2, 2, 1)
    starts = torch.cat([short, diverse, *(window[:128].view(2, 64) for window in long)])
    assert len(starts.unique(dim=0)) == 9, "each row is a text of its own"


def test_a_long_window_is_rows_behind_one_another(monkeypatch):
    monkeypatch.setattr(generated_text, "_CUT_SHARE", 0.0)
    tokenizer, model = tiny.tokenizer(), tiny.model()
    long = written(model, tokenizer, 40, 2, seed=3, row=16)
    rows = written(model, tokenizer, 16, 6, seed=3)
    assert long.shape == (2, 40)
    assert torch.equal(long[:, :32].reshape(4, 16), rows[[0, 1, 3, 4]]) and torch.equal(long[:, 32:], rows[[2, 5], :8])
