"""Text of healing: shares of windows, what is held out, what is written once."""

import dataclasses
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from mha2mla.conversion import resume
from mha2mla.conversion.calibration import generated_text
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.calibration.generated_text import generate_windows
from mha2mla.conversion.calibration.texts import GENERATED, OwnText
from mha2mla.conversion.resume import WorkFolder
from mha2mla.conversion.source.opening import open_source, read_tokenizer
from mha2mla.healing import text
from mha2mla.healing.settings import Settings
from tests.conversion import tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(tiny.checkpoint(tmp_path_factory.mktemp("text") / "source", "llama"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "cache"))


SETTINGS = Settings.of("quick", tokens=1024, length=16, long_length=64, long_share=0.25)


def made(source, name, tmp_path, tokens=1024, settings=SETTINGS):
    work = WorkFolder(tmp_path / "work", {})
    options = {"digests": {}, "work": work, "progress": False}
    return text.training_text(source, name, settings, tokens, torch.device("cpu"), **options)


def test_the_source_writes_short_and_long_windows_once(source, tmp_path, monkeypatch):
    calls, write = [], text.generate_windows

    def counting(model, tokenizer, wanted, **keys):
        calls.extend((each.length, each.count, keys["row"]) for each in wanted)
        return write(model, tokenizer, wanted, **keys)

    monkeypatch.setattr(text, "generate_windows", counting)
    blocks = made(source, "generated", tmp_path)
    assert calls == [(64, 4, 64), (16, 48, 16)], "a long window of fewer tokens than a row is one continuation"
    assert blocks.lengths == (16,) * 12 + (64,) * 4 and blocks.tokens.shape == (16, 64)
    monkeypatch.setattr(resume, "_CODE", ("geometry.py",))  # code that does not write it has changed
    again = made(source, "generated", tmp_path)
    assert len(calls) == 2 and torch.equal(again.tokens, blocks.tokens) and again.lengths == blocks.lengths
    monkeypatch.setattr(resume, "_TEXT_CODE", ("geometry.py",))
    made(source, "generated", tmp_path)
    assert len(calls) == 4
    rows = made(source, "generated", tmp_path, settings=dataclasses.replace(SETTINGS, row=32))
    assert calls[4:] == [(64, 4, 32), (16, 48, 16)] and rows.lengths == blocks.lengths
    assert torch.equal(rows.tokens[:12], blocks.tokens[:12]), "short windows are as they were"


def test_long_windows_are_not_taken_for_short_ones_as_long(source, tmp_path, monkeypatch):
    """Short ones are put together of rows as calibration writes them."""
    monkeypatch.setattr(text, "ROW", 32)
    long, short = (dataclasses.replace(SETTINGS, length=length, long_share=1.0) for length in (16, 64))
    blocks = [made(source, "generated", tmp_path, settings=settings) for settings in (long, short)]
    assert blocks[0].lengths == blocks[1].lengths and not torch.equal(blocks[0].tokens, blocks[1].tokens)


def test_long_windows_of_short_rows_are_other_text(source, tmp_path):
    """Rows of one size, which are kept for an interrupted run by it, and by their seed."""
    blocks = made(source, "generated", tmp_path, settings=dataclasses.replace(SETTINGS, row=16))
    rows = blocks.tokens[:, :8].tolist()
    assert len({tuple(row) for row in rows}) == len(rows) == 16


def test_text_that_cannot_be_kept_is_said(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="the text is not kept for later runs of this source: .*file"):
        made(source, "generated", tmp_path)


def test_text_that_cannot_be_kept_is_written_once_in_a_run(source, tmp_path, monkeypatch):
    """A run that goes on takes up its rows."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "file"))
    calls, write = [], generated_text._write
    monkeypatch.setattr(generated_text, "_write", lambda *args: calls.append(args) or write(*args))
    with pytest.warns(UserWarning, match="the text is not kept"):
        blocks, again = (made(source, "generated", tmp_path) for _ in range(2))
    assert len(calls) == 2 and torch.equal(again.tokens, blocks.tokens)


def test_a_named_text_has_every_token_once(source, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(map(chr, range(0x100, 0x100 + 600))))  # every two bytes another character
    blocks = made(source, str(path), tmp_path, tokens=1 << 20)
    windows = [row for block, length in zip(blocks.tokens, blocks.lengths, strict=True) for row in block.split(length)]
    assert all(row[0] == 0 for row in windows), "the tokenizer's start token"
    assert 0.2 < blocks.lengths.count(64) / len(blocks) < 0.3
    pairs = [tuple(pair) for row in windows for pair in row[1:].unfold(0, 4, 4).tolist()]
    assert len(set(pairs)) == len(pairs)


def test_tokens_that_the_source_has_not_are_refused(source, tmp_path):
    """Of a tokenizer that someone has added to, and not to the model's embeddings."""
    shutil.copytree(source.folder, tmp_path / "source")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(10)])
    tokenizer.save_pretrained(tmp_path / "source")
    (tmp_path / "text.txt").write_text("keys <9> and values " * 100)
    with pytest.raises(ValueError, match="text has token 267; expected tokens from 0, below vocab_size=264"):
        made(open_source(tmp_path / "source"), str(tmp_path / "text.txt"), tmp_path)


def test_generated_and_named_text_share_the_tokens(source, tmp_path):
    blocks = made(source, "generated+builtin:prose", tmp_path)
    prose = made(source, "builtin:prose", tmp_path, tokens=512)
    rows = {tuple(row) for row in blocks.tokens.tolist()}
    assert sum(tuple(row) in rows for row in prose.tokens.tolist()) == len(prose) == len(blocks) / 2


@pytest.mark.parametrize("name", ["generated", "builtin:prose"])
def test_a_text_named_twice_is_read_once(name, source, tmp_path):
    """Held-out windows would be trained on."""
    blocks, twice = (made(source, names, tmp_path) for names in (name, f"{name}+{name}"))
    assert torch.equal(blocks.tokens, twice.tokens)


def test_a_text_named_three_times_has_three_shares(source, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(9000 * "¿")  # the source, of random weights, writes no such row
    ours = made(source, str(path), tmp_path).tokens[0, 1:].unique().tolist()
    blocks = made(source, "generated" + 3 * f"+{path}", tmp_path, tokens=40 * 64)
    assert sum(set(row) <= {0, *ours} for row in blocks.tokens.tolist()) == 30 and len(blocks) == 40


def test_more_texts_than_blocks(source, tmp_path):
    blocks = made(source, "generated+generated-diverse+builtin:prose", tmp_path, tokens=64)
    assert blocks.tokens.numel() == 128


def test_both_are_held_out(source, tmp_path):
    blocks = made(source, "generated+builtin:prose", tmp_path, tokens=100 * 64)
    prose = {tuple(row) for row in made(source, "builtin:prose", tmp_path, tokens=50 * 64).tokens.tolist()}
    _, held_out = text.hold_out(blocks)
    assert held_out.lengths == (16,) * 4 + (64,)
    assert [tuple(row) in prose for row in held_out.tokens[:4].tolist()] == [True, False] * 2


def test_a_small_part_is_trained_on():
    """Of twenty blocks beside one the last are held out, of the twenty."""
    small, large = torch.zeros(4, 16), torch.ones(80, 16)
    for parts in ([small, large], [large, small]):
        blocks = text._mixed(parts, 64).view(-1, 64)
        assert blocks[-5:].all() and blocks.mean(1).tolist().count(0.0) == 1


def test_the_converted_model_writes_a_share(source, tmp_path):
    """Of the short windows, the first; kept apart from the source's text, which stays what it was."""
    tiny.convert(source.folder, tmp_path / "converted", {"layout": "latent", "cache_ratio": 0.25, **tiny.SHORT})
    converted, tokenizer = tmp_path / "converted", read_tokenizer(str(source.folder), "source")
    blocks, keys = made(source, "generated", tmp_path), {"digests": {"a": "b"}, "progress": False}
    work = WorkFolder(tmp_path / "work", {})
    for share, count in ((0.125, 2), (1.0, 6)):
        settings = dataclasses.replace(SETTINGS, own_share=share)
        mixed = text.with_own_windows(blocks, converted, settings, torch.device("cpu"), work=work, **keys)
        assert mixed.lengths == blocks.lengths and torch.equal(mixed.tokens[count:], blocks.tokens[count:])
        windows = mixed.tokens[:count].view(-1, 16)
        model = AutoModelForCausalLM.from_pretrained(converted)
        wanted = [OwnText(GENERATED, 16, len(windows))]
        (written,) = generate_windows(model, tokenizer, wanted, seed=SETTINGS.seed + 1 + 16, row=512)
        assert torch.equal(windows, written)
    assert len(list((tmp_path / "cache" / "texts").iterdir())) == 3
    none = text.with_own_windows(blocks, converted, SETTINGS, torch.device("cpu"), work=work, **keys)
    assert torch.equal(none.tokens, blocks.tokens)


def test_held_out_blocks_are_no_others(source):
    blocks = TokenBlocks(torch.arange(60 * 8).view(60, 8), (4,) * 40 + (8,) * 20)
    train, held = text.hold_out(blocks)
    assert held.lengths == (4, 4, 8) and len(train) == 57
    assert sorted([*train.tokens.flatten().tolist(), *held.tokens.flatten().tolist()]) == list(range(480))
    with pytest.raises(ValueError, match="text has 2 blocks of 8 tokens; expected two of a length"):
        text.hold_out(TokenBlocks(torch.zeros(2, 8, dtype=torch.int64), (4, 8)))


@pytest.mark.parametrize(("share", "length"), [(0.25, 16), (0.5, 16), (0.8, 64), (1.0, 64)])
def test_two_blocks_have_windows_of_one_length(share, length, source, tmp_path):
    """So that some are held out."""
    settings = dataclasses.replace(SETTINGS, long_share=share)
    blocks = made(source, "builtin:prose", tmp_path, tokens=128, settings=settings)
    assert set(blocks.lengths) == {length} and blocks.tokens.numel() == 128
    assert all(len(part) for part in text.hold_out(blocks))


def test_description_counts_tokens_and_grams():
    blocks = TokenBlocks(torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4], [5] * 8]), (4, 8))
    found = text.describe_text(blocks, 152_064)
    assert (found["unique_tokens"], found["tokens_by_window"]) == (16, {4: 8, 8: 8})
    assert found["distinct_4grams"] == 5 / 10  # 1234 2341 3412 4123 and 5555
    assert found["distinct_4grams_by_window"] == {4: 4 / 5, 8: 1 / 5}


def test_perplexity_of_the_source(source):
    model = tiny.model("llama")
    blocks = TokenBlocks(tiny.some_tokens(2, 32), (32, 32))
    with torch.inference_mode():
        expected = model(blocks.tokens, labels=blocks.tokens).loss.exp().item()
    assert text.source_perplexity(model, blocks) == pytest.approx(expected, rel=1e-5)


def test_perplexity_compiles_no_layer(source):
    graphs = []
    model = AutoModelForCausalLM.from_pretrained(source.folder)
    for layer in model.model.layers:
        layer.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    blocks = TokenBlocks(torch.randint(3, 90, (4, 32)), (16, 16, 32, 32))
    text.source_perplexity(model, blocks)
    assert graphs == []
