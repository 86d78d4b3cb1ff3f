"""Several questions about one long document, which runs through the model once: its pages are shared.

python examples/long_document_chat.py [CONVERTED]    # a converted folder; default: a tiny random Llama, converted
"""

import sys
import tempfile

import mha2mla
from mha2mla.conversion.calibration.texts import load_text
from mha2mla.loop import Loop, Sampling
from mha2mla.loop.answering import stop_tokens
from mha2mla.trial_models import tiny_checkpoint

QUESTIONS = ("What is this text about?", "Who is it for?", "Name one thing that it says.")


def converted(work: str) -> str:
    keys = {"preset": "minimal", "calibration": {"tokens": 2048, "lengths": 1024}, "evaluation_tokens": 256}
    mha2mla.convert(tiny_checkpoint(f"{work}/source"), f"{work}/mla", progress=False, **keys)
    return f"{work}/mla"


def main(folder: str) -> None:
    model, tokenizer = mha2mla.load(folder)
    most = model.config.calibrated_length or 1024  # beyond it the model may be much worse than its source
    document = tokenizer(load_text("builtin:prose")).input_ids[: most - 200]
    loop = Loop(model, num_pages=-(-2 * most // 64), max_sequences=1)
    print(f"document of {len(document)} tokens; the cache holds {loop.cache_bytes_per_token:,.0f} bytes a token")
    before = 0
    for question in QUESTIONS:
        prompt = [*document, *tokenizer(f"\n\nQuestion: {question}\nAnswer:", add_special_tokens=False).input_ids]
        request = loop.add(prompt, Sampling(max_new_tokens=24, stop_tokens=stop_tokens(model, tokenizer)))
        loop.run()
        run = loop.progress.prompt_tokens - before
        print(f"{question} {tokenizer.decode(request.answer, skip_special_tokens=True)!r} ({run} prompt tokens run)")
        # Full pages of the document are shared; what follows the last one is run again.
        assert run == len(prompt) if before == 0 else run < len(prompt) - len(document) + 2 * 64
        before += run


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        main(sys.argv[1] if len(sys.argv) > 1 else converted(work))
