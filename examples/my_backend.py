"""A decode backend of one's own: absorbed attention over a paged latent cache, in plain torch.

python examples/my_backend.py [SOURCE]    # a Hugging Face folder; default: a tiny random Llama
"""

import sys
import tempfile
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

import mha2mla
from mha2mla.kernels import DecodePlan
from mha2mla.modeling import ATTENTION_BACKENDS
from mha2mla.trial_models import tiny_checkpoint

REFERENCE = ATTENTION_BACKENDS.get("mla_reference")  # its cache, its append, its prompts
calls = []


def attend(tensors, cache, batch, plan, constants):
    """[B * S, H, d_v] of queries [B * S, H, ·] over caches [pages, page, ·]; here S = 1, as when tokens are sampled."""
    if not isinstance(plan, DecodePlan) or plan.shape[1] != 1:
        return REFERENCE.attend(tensors, cache, batch, plan, constants)
    calls.append(plan.shape)
    latent = cache["latent_cache"][batch.block_table.long()].flatten(1, 2)  # [B, tokens, d_c]
    rotary = cache["rope_cache"][batch.block_table.long()].flatten(1, 2)  # [B, tokens, G, d_r]
    heads, k_up, v_up = tensors["q_pe"].shape[1], tensors["k_up"], tensors["v_up"]
    k_up, v_up = (each.repeat_interleave(heads // len(each), 0) for each in (k_up, v_up))  # [H, ·, d_c]
    rotary = rotary.repeat_interleave(heads // rotary.shape[2], 2)
    scores = torch.einsum("bhn,hnc,btc->bht", tensors["q_nope"], k_up, latent)
    scores = (scores + torch.einsum("bhr,bthr->bht", tensors["q_pe"], rotary)) * constants.softmax_scale
    token = torch.arange(latent.shape[1], device=latent.device)
    hidden = token >= batch.cache_seqlens[:, None]  # no sliding windows, no padding on the left
    weight = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bht,btc,hdc->bhd", weight, latent.nan_to_num(), v_up)


def main(source: str | None, work: str) -> None:
    folder, calibration = f"{work}/mla", {"text": "builtin:prose", "tokens": 512, "lengths": 64}
    keys = {"preset": "minimal", "layout": "shared", "calibration": calibration, "evaluation_tokens": 256}
    mha2mla.convert(source or tiny_checkpoint(f"{work}/source"), folder, progress=False, **keys)
    ATTENTION_BACKENDS.register(replace(REFERENCE, name="my_backend", attend=attend, automatic=False))
    prompt, found = torch.arange(2, 34).view(2, 16), []
    for name in ("mla_reference", "my_backend"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attention_backend=name)
        options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        found.append(torch.stack(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).logits))
    assert calls  # decode steps ran it
    torch.testing.assert_close(*found)
    print(f"{len(calls)} calls of my_backend; logits differ by {(found[0] - found[1]).abs().max():.1e}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else None, folder)
