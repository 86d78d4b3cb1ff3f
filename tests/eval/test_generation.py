"""Greedy continuations of source and converted."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from mha2mla.eval import generation
from mha2mla.eval.generation import GenerationSettings, compare_generation, is_loop

SETTINGS = GenerationSettings(prompt_lengths=(12,), new_tokens=64, prompts=2, text="builtin:prose")


def _greedy(model, prompt, count, ends):
    """By the model alone, without a cache."""
    ids = prompt.tolist()
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


def test_it_is_what_a_plain_loop_says(tiny_source, tiny_converted, tokenizer):
    source, converted = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_source, tiny_converted))
    rows, skipped = compare_generation(source, converted, tokenizer, SETTINGS, progress=False)
    (row,) = rows
    assert (row.prompt_tokens, row.num_prompts) == (12, 2) and not skipped
    text = tokenizer(generation.load_text("builtin:prose"), add_special_tokens=False, verbose=False)["input_ids"]
    prompts = generation._prompts(text, [], 12, SETTINGS)
    assert len({tuple(prompt.tolist()) for prompt in prompts}) == 2
    same = agreeing = total = 0
    for prompt in prompts:
        first, second = (_greedy(model, prompt, 64, {tokenizer.eos_token_id}) for model in (source, converted))
        same += next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        with torch.inference_mode():
            logits = converted(torch.cat([prompt, torch.tensor(first)])[None], use_cache=False).logits[0, 11:-1]
        agreeing += int((logits.argmax(-1) == torch.tensor(first)).sum())
        total += len(first)
    assert row.same_tokens == pytest.approx(same / 2) and row.agreement == pytest.approx(agreeing / total)
    assert row.same_tokens < 64 and row.identical < 1, "two models that differ ought to, or this test sees nothing"


def test_a_model_says_what_it_says(tiny_source, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_source)
    # A checkpoint may ask for other than greedy decoding: what is compared is greedy all the same.
    model.generation_config.update(do_sample=True, temperature=0.7, repetition_penalty=1.3)
    rows, _ = compare_generation(model, model, tokenizer, SETTINGS, progress=False)
    assert all((row.identical, row.agreement) == (1.0, 1.0) for row in rows)
    assert all(row.degenerate_source == row.degenerate_converted for row in rows)


def test_a_continuation_ends_where_the_model_ends_it(tiny_source, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_source)
    prompts = torch.arange(20, 26)[None]
    (said,) = generation._continuations(model, prompts, 64)
    model.generation_config.eos_token_id = [said[10], said[11]]
    (shorter,) = generation._continuations(model, prompts, 64)
    assert shorter == said[: said.index(said[10]) + 1]


@pytest.mark.parametrize("period", [1, 2, 9, 16])
def test_a_loop_is_a_loop(period):
    loop = [*range(100), *(place % period for place in range(64))]
    assert is_loop(loop)
    assert not is_loop(loop[:-1] + [999]) and not is_loop(loop[-63:])
    assert not is_loop([index % 17 for index in range(200)]) and not is_loop([])


def test_a_prompt_that_does_not_fit_is_named(tiny_source, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_source)
    settings = GenerationSettings(prompt_lengths=(4090,), new_tokens=64, prompts=1, text="builtin:prose")
    rows, skipped = compare_generation(model, model, tokenizer, settings, longest=4096, progress=False)
    assert not rows and skipped == ["continuations of 4090 tokens: the models take at most 4096"]


def test_a_prompt_longer_than_the_text_is_named(tiny_source, tokenizer, tmp_path):
    model, text = AutoModelForCausalLM.from_pretrained(tiny_source), tmp_path / "short"
    text.write_text("x" * 20)
    settings = GenerationSettings(prompt_lengths=(8, 21), new_tokens=64, prompts=1, text=str(text))
    rows, skipped = compare_generation(model, model, tokenizer, settings, progress=False)
    assert [row.prompt_tokens for row in rows] == [8]
    assert skipped == [f"continuations of 21 tokens: text {str(text)!r} has 20 tokens; expected at least 21"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"new_tokens": 63}, "new_tokens is 63; expected at least 64"),
        ({"prompts": 0}, "prompts is 0"),
        ({"prompt_lengths": (64, 0)}, "prompt_lengths has 0"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        GenerationSettings(**arguments)
