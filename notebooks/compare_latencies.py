# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # MHA against MLA: cache bytes and decode latency
#
# Converts a checkpoint, generates with source and converted model, and plots what a decode step costs over batch size
# and length. Every time shown was measured after the same inputs passed a check against float64.
#
# The next cell holds all the choices. As it stands it takes about a minute on a laptop: a small Llama of random
# weights, so its text is noise and only its shapes are real. Set the variable `MHA2MLA_NOTEBOOK_MODEL` (or `MODEL`
# below) to a folder or hub id for a real one, or to `smollm2` for the model of the demo.

# %%
import os
import tempfile
import warnings
from pathlib import Path

# Progress bars, and the complaint that ipywidgets could draw nicer ones, have no place in a saved notebook.
os.environ.setdefault("TQDM_DISABLE", "1")
warnings.filterwarnings("ignore", message="IProgress not found")

import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mha2mla
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval import attention_latency, decode_step_latency
from mha2mla.trial_models import fetch_smollm2, tiny_checkpoint

MODEL = os.environ.get("MHA2MLA_NOTEBOOK_MODEL")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
BATCH_SIZES = [1, 16, 64] if DEVICE == "cuda" else [1, 4]
SEQLENS = [1024, 4096, 16384] if DEVICE == "cuda" else [64, 256, 1024]
RECIPE = {"cache_ratio": 0.5}  # by the best preset for DEVICE; "preset": "quick" beside it takes minutes anywhere

workplace = tempfile.TemporaryDirectory(prefix="mha2mla-")  # removed when the kernel ends
folder = Path(workplace.name)
if MODEL is None:
    source = tiny_checkpoint(
        folder / "source", num_attention_heads=8, num_key_value_heads=8, head_dim=32, hidden_size=256
    )
elif MODEL == "smollm2":
    source = fetch_smollm2()
else:
    source = MODEL

# %% [markdown]
# ## Convert
#
# The destination is a normal Hugging Face folder. `convert` reads it back and compares it with the source before the
# folder gets its name.

# %%
report = mha2mla.convert(source, folder / "converted", RECIPE, device=DEVICE, progress=False)
print(report)

# %% [markdown]
# ## Generate
#
# `import mha2mla` has registered the model class, so the auto classes load it like any other.

# %%
tokenizer = AutoTokenizer.from_pretrained(folder / "converted")
models = {
    "MHA/GQA (source)": AutoModelForCausalLM.from_pretrained(source, dtype=DTYPE).to(DEVICE).eval(),
    "MLA (converted)": AutoModelForCausalLM.from_pretrained(folder / "converted", dtype=DTYPE).to(DEVICE).eval(),
}
prompt = tokenizer("The latent of an attention layer is", return_tensors="pt").to(DEVICE)
for name, model in models.items():
    made = model.generate(
        prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=24, do_sample=False
    )
    print(f"{name}: {tokenizer.decode(made[0], skip_special_tokens=True)!r}")

# %% [markdown]
# ## Measure
#
# Once the attention op alone (the source's through torch's SDPA, the converted one's through `mla_decode`), once the
# whole decode step. `us_p50` is a median; a missing baseline is a row that says why.

# %%
config = models["MLA (converted)"].config
attention = pd.DataFrame(
    attention_latency(
        config.layer_geometry(0),
        batch_sizes=BATCH_SIZES,
        seqlens=SEQLENS,
        dtype=DTYPE,
        device=DEVICE,
        softmax_scale=config.softmax_scale,
        min_run_time=0.1,
    )
)
step = pd.DataFrame(decode_step_latency(models, batch_sizes=BATCH_SIZES, seqlens=SEQLENS, min_run_time=0.2))
columns = ["op", "implementation", "batch", "seqlen", "cache_bytes", "us_p20", "us_p50", "us_p80", "error", "status"]
shown = pd.concat([attention, step], ignore_index=True)[columns]
shown.style.format(precision=1, thousands=",", na_rep="").format("{:.1e}", subset="error", na_rep="")

# %% [markdown]
# ## Plot


# %%
def plot(table: pd.DataFrame, axes, title: str) -> None:
    """Median time over length; a colour per implementation, a line style per batch size."""
    timed = table[table["status"] == "ok"]
    styles = dict(zip(BATCH_SIZES, ["-", "--", ":", "-."], strict=False))
    colours = {name: f"C{index}" for index, name in enumerate(timed["implementation"].unique())}
    for (name, batch), part in timed.groupby(["implementation", "batch"], sort=False):
        part = part.sort_values("seqlen")
        axes.plot(
            part["seqlen"],
            part["us_p50"],
            styles[batch],
            marker="o",
            color=colours[name],
            label=f"{name}, batch {batch}",
        )
        axes.fill_between(part["seqlen"], part["us_p20"], part["us_p80"], color=colours[name], alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="cached tokens", ylabel="µs (median, band: p20 to p80)", title=title)
    axes.legend(fontsize="small")


figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
plot(attention, left, "attention op")
plot(step, middle, "whole decode step")
cached = step.groupby(["implementation", "seqlen"], sort=False)["cache_bytes"].min().unstack(0) / 2**20
cached.plot.bar(ax=right, rot=0, xlabel="cached tokens", ylabel="MiB", title=f"cache of {BATCH_SIZES[0]} sequence(s)")
right.get_legend().set_title(None)
figure.text(0.5, -0.04, describe_environment(collect_environment()), ha="center", fontsize="x-small")
plt.show()
