"""Greedy answers of exports by transformers' DeepSeek-V3 classes, without this package.

    python -I benchmarks/stock_transformers.py NEW_TOKENS FOLDER_FOR_TRANSFORMERS FOLDER_FOR_ENGINES < prompts > answers

Prompts are a JSON list of token ids, answers a list of such lists, one a folder. The folder for engines runs as in vLLM
and SGLang: without the biases, and with the config's eps in the norm of the latent.
"""

import itertools
import json
import sys

import torch
from transformers import AutoConfig, DeepseekV3ForCausalLM


@torch.no_grad()
def answers(folder: str, is_for_engines: bool, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    config = AutoConfig.from_pretrained(folder)
    config.attention_bias = not is_for_engines
    model = DeepseekV3ForCausalLM.from_pretrained(folder, config=config).eval()
    model.generation_config.eos_token_id = None
    if is_for_engines:
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.variance_epsilon = config.rms_norm_eps
    found = []
    for _, batch in itertools.groupby(prompts, len):  # no padding
        ids = torch.tensor([*batch])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
        found += out[:, ids.shape[1] :].tolist()
    return found


if __name__ == "__main__":
    new_tokens, *folders = sys.argv[1:]
    prompts = json.load(sys.stdin)
    json.dump(
        [answers(folder, bool(index), prompts, int(new_tokens)) for index, folder in enumerate(folders)], sys.stdout
    )
    assert "mha2mla" not in sys.modules
