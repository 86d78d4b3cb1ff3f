"""Text that the source model writes: reproducible, of the right shape, document after document."""

import torch

from mha2mla.conversion.generated import generate_windows, generator_of
from mha2mla.texts import prompts
from tests.conversion import tiny


def test_generated_windows_are_reproducible_and_begin_with_prompts():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    windows = generate_windows(model, tokenizer, 64, 5, seed=3)
    assert windows.shape == (5, 64) and windows.dtype == torch.int64 and not windows.is_cuda
    assert torch.equal(windows, generate_windows(model, tokenizer, 64, 5, seed=3))
    assert not torch.equal(windows, generate_windows(model, tokenizer, 64, 5, seed=4))
    assert (windows[:, 0] == tokenizer.bos_token_id).all()
    openings = [opening.split("{}")[0] for opening in prompts()[1]]
    texts = tokenizer.batch_decode(windows[:, 1:])
    assert all(any(text.startswith(opening[:20]) for opening in openings) for text in texts)


def test_after_the_end_of_a_document_comes_the_next_prompt():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    with torch.no_grad():  # a model that always ends: its end token has the largest logit wherever it stands
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eos_token_id] = 1e4 * model.model.norm.weight.sign()
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.lm_head.weight[tokenizer.eos_token_id, 1:] = 0
    windows = generate_windows(model, tokenizer, 200, 4, seed=0)
    ended = windows == tokenizer.eos_token_id
    assert ended.any()
    after = windows[:, 1:][ended[:, :-1]]
    assert (after == tokenizer.bos_token_id).all()


def test_a_folder_writes_as_its_model_does(tmp_path):
    folder = tiny.checkpoint(tmp_path / "tiny")
    tokenizer = tiny.loaded_tokenizer(folder)
    generate = generator_of(folder, tokenizer, 32, seed=1, device=torch.device("cpu"))
    assert torch.equal(generate(3), generate_windows(tiny.model(), tokenizer, 32, 3, seed=1))
