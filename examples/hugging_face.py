"""A converted checkpoint in transformers: generate, torch.compile, right padding, LoRA, and without this package.

python examples/hugging_face.py [SOURCE]    # a Hugging Face folder; default: a tiny random Llama
"""

import importlib.util
import os
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mha2mla
from mha2mla.trial_models import tiny_checkpoint

REMOTE = """import sys; from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype="float32")
prompt = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)("A latent cache", return_tensors="pt")
print(type(model).__module__, model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist(), sep="|")"""


def main(source: str | None, work: str) -> None:
    folder, noise = f"{work}/mla", {"preset": "minimal", "calibration": {"tokens": 256, "lengths": 64}}
    mha2mla.convert(source or tiny_checkpoint(f"{work}/source"), folder, **({} if source else noise))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer("A latent cache", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist()

    with torch.no_grad():
        compiled, expected = torch.compile(model)(**prompt), model(**prompt)
    torch.testing.assert_close(compiled.logits, expected.logits, rtol=1e-4, atol=1e-4)

    # Training batches may be padded on the right; generate wants tokenizer.padding_side = "left".
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.pad_token or tokenizer.eos_token, "right"
    batch = tokenizer(["A latent cache", "Keys"], return_tensors="pt", padding=True)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    alone = model(**tokenizer("Keys", return_tensors="pt")).logits[0]
    torch.testing.assert_close(model(**batch).logits[1, : len(alone)], alone, rtol=1e-4, atol=1e-4)

    command = [sys.executable, "-c", REMOTE, folder]
    ran = subprocess.run(command, env={**os.environ, "HF_MODULES_CACHE": work}, stdout=-1, text=True, check=True)
    module, tokens = ran.stdout.splitlines()[-1].split("|")
    assert module.startswith("transformers_modules.") and tokens == str(answer)

    if importlib.util.find_spec("peft"):
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        adapted(**batch).loss.backward()
        adapted.merge_and_unload()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        main(*(sys.argv[1:] or [None]), work)
