"""Greedy answers of an export by SGLang, without this package.

    python benchmarks/stock_sglang.py SETTINGS ANSWERS < prompts

SETTINGS is JSON: ``new_tokens`` and ``engine``, arguments of ``sglang.Engine``. Prompts are a JSON list of token ids;
the file ANSWERS gets SGLang's version, its attention backend and a list of such lists.
"""

import json
import sys
from pathlib import Path


def main(settings: str, answers: str) -> None:
    import sglang

    options = json.loads(settings)
    engine = sglang.Engine(skip_tokenizer_init=True, **options["engine"])
    sampling = {"temperature": 0, "max_new_tokens": options["new_tokens"], "ignore_eos": True}
    found = engine.generate(input_ids=json.load(sys.stdin), sampling_params=sampling)
    tokens = [each["output_ids"][-options["new_tokens"] :] for each in found]
    backend = engine.server_args.attention_backend
    Path(answers).write_text(json.dumps({"sglang": sglang.__version__, "backend": backend, "answers": tokens}))
    engine.shutdown()
    assert "mha2mla" not in sys.modules


if __name__ == "__main__":  # SGLang's processes import this file
    main(*sys.argv[1:])
