"""LoRA on a converted model: a few steps, save the adapter, load it again, merge it. Needs peft.

python examples/lora.py [CONVERTED]    # a converted folder; default: a tiny random Llama, converted
"""

import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import mha2mla
from mha2mla.trial_models import tiny_checkpoint

TEXT = "Keys and values are made from one latent, which is all that the cache holds."


def converted(work: str) -> str:
    keys = {"preset": "minimal", "calibration": {"tokens": 512, "lengths": 128}, "evaluation_tokens": 256}
    mha2mla.convert(tiny_checkpoint(f"{work}/source"), f"{work}/mla", progress=False, **keys)
    return f"{work}/mla"


def main(folder: str, work: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXT, return_tensors="pt")
    batch["labels"] = batch["input_ids"]
    # "all-linear" reaches the projections of attention and MLP; k_b_proj and v_b_proj are plain parameters.
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3)
    losses = []
    for _ in range(5):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("loss by step:", ", ".join(f"{loss:.3f}" for loss in losses))
    assert losses == sorted(losses, reverse=True)

    model.save_pretrained(f"{work}/adapter")
    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = PeftModel.from_pretrained(fresh, f"{work}/adapter").merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, model(**batch).logits, rtol=1e-3, atol=1e-3)
    print(tokenizer.decode(merged.generate(**tokenizer("Keys", return_tensors="pt"), max_new_tokens=20)[0]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else converted(folder), folder)
