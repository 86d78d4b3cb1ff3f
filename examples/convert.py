"""Converts a checkpoint to half its KV cache, reads the report, loads the result and answers with it.

python examples/convert.py                 # a tiny random Llama, in a folder that is removed
python examples/convert.py SOURCE FOLDER   # a Hugging Face folder or hub id, and where results go
"""

import sys
import tempfile

import mha2mla
from mha2mla.trial_models import tiny_checkpoint


def main(source: str | None, work: str) -> None:
    # A real model needs none of these keys: preset="auto" takes the best that the machine can run.
    short = {"preset": "minimal", "calibration": {"tokens": 512, "lengths": 64}, "evaluation_tokens": 256}
    folder, keys = f"{work}/mla", {} if source else short
    report = mha2mla.convert(source or tiny_checkpoint(f"{work}/source"), folder, cache_ratio=0.5, **keys)
    print(report)  # loss, cache, weights, time, and what would lose less
    assert report.cache_numel_per_token <= 0.5 * report.source_cache_numel_per_token
    assert report.parity.perplexity_ratio > 0

    model, tokenizer = mha2mla.load(folder)
    print(model.attention_report())  # what runs in each layer, and why no kernel does
    prompt = tokenizer("Heat flows from", return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            with tempfile.TemporaryDirectory() as folder:
                main(None, folder)
        case [source, folder]:
            main(source, folder)
        case _:
            sys.exit(__doc__)
