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
# # MHA against MLA: decode latency, speed-up and cache
#
# Converts a checkpoint, generates with source and converted model, and plots what a decode step costs over batch size
# and length. Every time shown was measured after the same inputs passed a check against float64.
#
# The next cell holds all the choices. As it stands it takes about a minute on a laptop: a small Llama of random
# weights, so its text is noise and only its shapes are real. Set the variable `MHA2MLA_NOTEBOOK_MODEL` (or `MODEL`
# below) to a folder or hub id for a real one, or to `smollm2` for the model of the demo. The figure is saved as
# `compare_latencies.pdf` in the current folder, its numbers as `compare_latencies.csv`.
#
# The outputs that are saved here took two minutes (`smollm2`, commit `9f466d2`) on an H200 whose host other jobs used:
# where a band is wide, it was busy.

# %%
import os
import tempfile
import warnings
from pathlib import Path

# Progress bars, and the complaint that ipywidgets could draw nicer ones, have no place in a saved notebook.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
warnings.filterwarnings("ignore", message="IProgress not found")

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.ticker import LogLocator
from transformers import AutoModelForCausalLM, AutoTokenizer

import mha2mla
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval import attention_latency, decode_step_latency
from mha2mla.trial_models import fetch_smollm2, tiny_checkpoint

MODEL = os.environ.get("MHA2MLA_NOTEBOOK_MODEL")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
BATCH_SIZES = [1, 16, 64] if DEVICE == "cuda" else [1, 4]
SEQLENS = [1024, 4096, 8192] if DEVICE == "cuda" else [64, 256, 1024]
RECIPE = {"preset": "quick", "cache_ratio": 0.5}  # "preset": "latent" loses less, and fits for ten minutes on a GPU
SAVED = Path("compare_latencies")

workplace = tempfile.TemporaryDirectory(prefix="mha2mla-")  # removed when the kernel ends
folder = Path(workplace.name)
if MODEL is None:
    source = tiny_checkpoint(
        folder / "random-llama", num_attention_heads=8, num_key_value_heads=8, head_dim=32, hidden_size=256
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
print(str(report).replace(f"{folder}{os.sep}", ""))

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
# whole decode step. `us` is what is plotted: of the op the median `us_p50`, of the step on a GPU its time in a CUDA
# graph, which is how `generate` replays it. A missing baseline is a row that says why.

# %%
config = models["MLA (converted)"].config
geometry = config.layer_geometry(0)
attention = pd.DataFrame(
    attention_latency(
        geometry,
        batch_sizes=BATCH_SIZES,
        seqlens=SEQLENS,
        dtype=DTYPE,
        device=DEVICE,
        softmax_scale=config.softmax_scale,
        min_run_time=0.1,
    )
)
step = pd.DataFrame(decode_step_latency(models, batch_sizes=BATCH_SIZES, seqlens=SEQLENS, min_run_time=0.2))
attention["us"], step["us"] = attention["us_p50"], step["us_p50"]
if DEVICE == "cuda":
    step["us"] = step["us_graph"].fillna(step["us_p50"])
rows = pd.concat([attention, step], ignore_index=True)
rows.to_csv(SAVED.with_suffix(".csv"), index=False)
environment = describe_environment(collect_environment())
print(environment)
if DEVICE == "cpu":
    print("On a CPU the op is the plain torch reference, no kernel: its times say nothing of a GPU's.")
columns = ["op", "implementation", "batch", "seqlen", "cache_bytes", "us_p20", "us_p50", "us_p80", "us"]
shown = rows[[*columns, "error", "status"]]
shown.style.format(precision=1, thousands=",", na_rep="").format("{:.1e}", subset="error", na_rep="")

# %% [markdown]
# ## Plot
#
# A colour per implementation, a line style per batch size. Bands around medians reach from p20 to p80. A speed-up
# is the source's time over ours; of the attention op, the fastest of the source's over ours.

# %%
STYLES = dict(zip(BATCH_SIZES, ["-", "--", ":", "-."], strict=False))
OURS = ("mla_decode", "MLA (converted)")  # prefix of our implementations' names


def over_lengths(axes, title: str, ylabel: str) -> None:
    """Ticks where something was measured, and nowhere else."""
    axes.set(xscale="log", yscale="log", xlabel="cached tokens", ylabel=ylabel, title=title)
    axes.set_xticks(SEQLENS, labels=[f"{seqlen:,}" for seqlen in SEQLENS])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def plot_times(table: pd.DataFrame, axes, title: str) -> None:
    """Time over length, in ms where it is one or more."""
    timed = table[table["status"] == "ok"]
    unit, scale = ("ms", 1e3) if timed["us"].max() >= 1e3 else ("µs", 1)
    for index, (name, ours) in enumerate(timed.groupby("implementation", sort=False)):
        for batch, part in ours.sort_values("seqlen").groupby("batch"):
            p20, us, p80 = (part[column] / scale for column in ("us_p20", "us", "us_p80"))
            label = f"{name}, batch {batch}"
            axes.plot(part["seqlen"], us, STYLES[batch], marker="o", color=f"C{index}", label=label)
            if part["us"].equals(part["us_p50"]):
                axes.fill_between(part["seqlen"], p20, p80, color=f"C{index}", alpha=0.15, linewidth=0)
    over_lengths(axes, title, unit)


def speed_up(table: pd.DataFrame) -> pd.Series:
    """(batch, cached tokens) → the fastest of the source's over ours."""
    timed = table[table["status"] == "ok"]
    ours = timed["implementation"].str.startswith(OURS)
    fastest = [part.groupby(["batch", "seqlen"])["us"].min() for part in (timed[~ours], timed[ours])]
    return fastest[0] / fastest[1]


figure, axes = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
(op_times, step_times), (speed_ups, cached) = axes
plot_times(attention, op_times, "attention op of a layer")
how = ", in a CUDA graph" if DEVICE == "cuda" else ""
plot_times(step, step_times, f"decode step of {config.num_hidden_layers} layers{how}")
for index, (name, table) in enumerate({"attention op": attention, "decode step": step}.items()):
    for batch, part in speed_up(table).groupby("batch"):
        part = part.droplevel("batch")
        label = f"speed-up of the {name}, batch {batch}"
        speed_ups.plot(part.index, part, STYLES[batch], marker="s", color=f"C{index + 5}", label=label)
speed_ups.axhline(1, color="black", linewidth=0.8)
over_lengths(speed_ups, "speed-up", "source's time ÷ ours")
sizes = step.groupby(["implementation", "seqlen"], sort=False)["cache_bytes"].min().unstack(0) / 2**20
for name, part in sizes.items():
    cached.plot(part.index, part, marker="o", color=f"C{list(sizes).index(name)}", label=f"cache, {name}")
over_lengths(cached, f"cache of {BATCH_SIZES[0]} sequence(s), all layers", "MiB")
figure.suptitle(f"{Path(source).name}: {geometry}, {str(DTYPE).removeprefix('torch.')}")
figure.legend(loc="outside lower center", ncols=3, fontsize="small", title=environment, title_fontsize="x-small")
figure.savefig(SAVED.with_suffix(".pdf"))
plt.show()
