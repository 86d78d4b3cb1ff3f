"""A converted model in vLLM, in this process; `vllm serve FOLDER` serves it to OpenAI clients. Needs vLLM, a GPU.

python examples/serve_vllm.py [CONVERTED]    # a converted folder; default: a small random Llama, converted
"""

import sys
import tempfile

from vllm import LLM, SamplingParams

import mha2mla
from mha2mla.trial_models import tiny_checkpoint

PROMPTS = ["Heat flows from", "A latent is", "Two questions about the sea:"]


def converted(work: str) -> str:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    keys = {"preset": "minimal", "calibration": {"tokens": 512, "lengths": 64}, "evaluation_tokens": 256}
    mha2mla.convert(tiny_checkpoint(f"{work}/source", **shape), f"{work}/mla", progress=False, **keys)
    return f"{work}/mla"


def main(folder: str) -> None:
    # The plug-in is found by its entry point: nothing of this package is named here.
    llm = LLM(model=folder, dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.3)
    answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32))
    for answer in answers:
        print(answer.prompt, "…", answer.outputs[0].text)
    assert all(len(answer.outputs[0].token_ids) > 0 for answer in answers)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        main(sys.argv[1] if len(sys.argv) > 1 else converted(work))
