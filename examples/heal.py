"""Converts a checkpoint to a quarter of its KV cache, then trains the result towards its source.

python examples/heal.py                 # a tiny random Llama, in a folder that is removed
python examples/heal.py SOURCE FOLDER   # a Hugging Face folder or hub id, and where results go
"""

import sys
import tempfile

import mha2mla
from mha2mla.trial_models import tiny_checkpoint


def main(source: str | None, work: str) -> None:
    # A real model needs none of these keys: it trains for 15 minutes on text that it writes itself.
    short = {"preset": "minimal", "calibration": {"tokens": 512, "lengths": 64}, "evaluation_tokens": 256}
    training = {"tokens": 6400, "batch_tokens": 128, "length": 32, "long_length": 32}
    if source:
        short, training = {}, {"minutes": 15}
    else:
        source, training["text"] = tiny_checkpoint(f"{work}/source"), "builtin:prose"
    mha2mla.convert(source, f"{work}/mla", cache_ratio=0.25, **short)

    report = mha2mla.heal(source, f"{work}/mla", f"{work}/healed", **training)
    print(report)  # loss before and after, on what was held out and on the conversion's own texts
    assert report.trained.held_out_best < report.trained.held_out_before
    model, tokenizer = mha2mla.load(f"{work}/healed")
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
