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
# # Source against converted: steps, tokens and attention
#
# Pictures of what a conversion gains, by batch and length: first the decode step and the tokens per second, then the
# attention op alone. The source is grey, the converted model blue. Every time belongs to a call that passed a check
# against float64, or a line below the table says that it was not checked.
#
# 1. **On record**: a model of Llama-2-7B's shape with random weights on one H200. Read from the files of
#    `benchmarks/results`; needs no GPU.
# 2. **Here**: a small model, converted and timed on this machine. Needs a GPU to say anything about speed: on a CPU the
#    kernels do not run, plain PyTorch does, and the pictures say so.
#
# The next cell holds all choices. Set `MHA2MLA_NOTEBOOK_MODEL` to a folder or hub id, or to `smollm2` for the demo's
# model; without it the model is a tiny Llama with random weights.

# %%
import json
import os
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars have no place in a saved notebook
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
warnings.filterwarnings("ignore", message="IProgress not found")

import torch
import transformers
from IPython.display import display

import mha2mla
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval import model_latency, plots, print_table, write_json
from mha2mla.testing.numeric_check import NOT_CHECKED
from mha2mla.trial_models import fetch_smollm2, tiny_checkpoint

transformers.utils.logging.disable_progress_bar()
MODEL = os.environ.get("MHA2MLA_NOTEBOOK_MODEL")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    import tilelang

    tilelang.set_log_level("WARNING")  # no line for each kernel that is compiled
BATCH_SIZES = [1, 16, 64] if DEVICE == "cuda" else [1, 4]
SEQLENS = [1024, 4096] if DEVICE == "cuda" else [64, 256]
CALIBRATED = 8192 if DEVICE == "cuda" else 512  # tokens of a sequence
RECIPE = {
    "preset": "minimal",
    "cache_ratio": 0.5,
    "calibration.lengths": CALIBRATED,
    "calibration.tokens": 4 * CALIBRATED,
}
RESULTS = Path(mha2mla.__file__).parents[1] / "benchmarks" / "results"  # of a clone
RATES = {"op": "attention", "step": "decode step", "e2e": "generate"}

# %% [markdown]
# ## On record: one H200
#
# The layout `per-group` with 512 + 16 elements per head group caches an eighth of the source's bytes. The weights are
# random, so nothing is known about loss.


# %%
def recorded(name: str) -> dict:
    """A file of rows; empty outside a clone."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}


def show(rows: list[dict], op: str) -> None:
    """Pictures of an op and the table of their numbers."""
    pictures, table = plots.latencies(rows, op)
    for picture in pictures:
        display(picture)
    unit = plots.OPS[op][1]
    print_table(
        table,
        columns={
            "batch": "batch",
            "seqlen": "tokens",
            "source": f"source, {unit}",
            "converted": "converted",
            "speed_up": "speed-up",
        },
    )
    unchecked = {(row["batch"], row["seqlen"]) for row in rows if row["op"] == op and row["status"] == NOT_CHECKED}
    if unchecked:
        print("not checked:", ", ".join(f"{batch} × {seqlen:,} tokens" for batch, seqlen in sorted(unchecked)))


files = [recorded(name) for name in ("h200-latency-e2e", "h200-latency-e2e-contexts")]
on_record = [row for file in files for row in file["rows"]]
for file in files:
    if file["rows"]:
        print(f"{file['random_weights']}, random weights → {file['geometry']}")
        print(describe_environment(file["environment"]))
show(on_record, "decode step")

# %% [markdown]
# `generate` makes 32 tokens after each prompt. The source's is transformers' own, without graph capture; the
# converted model's replays CUDA graphs.

# %%
show(on_record, "generate")
if picture := plots.largest_batches(on_record):
    display(picture)

# %% [markdown]
# The attention of one layer alone, as far as it is on record at this shape.

# %%
show(recorded("h200-llama-2-7b-decode")["rows"], "attention")

# %% [markdown]
# ## Here: convert and generate
#
# The destination is a normal Hugging Face folder. `convert` reads it back and compares it with the source.

# %%
workplace = tempfile.TemporaryDirectory(prefix="mha2mla-")  # removed when the kernel ends
folder = Path(workplace.name)
if MODEL is None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "hidden_size": 256}
    source = tiny_checkpoint(folder / "random-llama", **heads)
else:
    source = fetch_smollm2() if MODEL == "smollm2" else MODEL
report = mha2mla.convert(source, folder / "converted", RECIPE, device=DEVICE, progress=False)
print(str(report).replace(f"{folder}{os.sep}", ""))

# %%
for checkpoint in (source, folder / "converted"):
    model, tokenizer = mha2mla.load(checkpoint, device=DEVICE)
    prompt = tokenizer("The latent of an attention layer is", return_tensors="pt").to(DEVICE)
    made = model.generate(
        prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=24, do_sample=False
    )
    print(f"{Path(checkpoint).name}: {tokenizer.decode(made[0], skip_special_tokens=True)!r}")
del model

# %% [markdown]
# ## Here: measure (times need a GPU)
#
# Whole steps and `generate` first, the op last. On a GPU a step's time is that of its CUDA graph. The source's step and
# `generate` are transformers' own. Between two models in vLLM, a small one such as SmolLM2 gains memory, not speed
# (README).

# %%
environment = collect_environment()
print(describe_environment(environment))
if DEVICE == "cpu":
    print("No GPU: plain PyTorch runs instead of kernels. These times say nothing about a GPU's.")
levels, shapes = tuple(RATES), {"batch_sizes": BATCH_SIZES, "seqlens": SEQLENS}
rows = model_latency(
    source, folder / "converted", levels=levels, **shapes, new_tokens=16, device=DEVICE, min_run_time=0.05
)
for op in ("decode step", "generate", "attention"):
    show(rows, op)

# %% [markdown]
# The rows as JSON: `mha2mla report compare_latencies.json -o report.html` makes a page of them.

# %%
write_json(
    "compare_latencies.json",
    kind="latency",
    rows=rows,
    source=Path(source).name,
    converted="converted",
    environment=environment,
)
rows
