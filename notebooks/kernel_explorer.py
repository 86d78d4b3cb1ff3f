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
# # Kernel explorer
#
# Pick the shape of a decode call: bytes that it reads, products, the limit that a GPU's datasheet sets, which kernel is
# chosen and why, and what was measured at shapes on record. All of it is computed and needs no GPU, except the last
# cell, which times the call.
#
# With `ipywidgets` the shape has sliders; without, edit `SHAPE` below and run the cells again.

# %%
import json
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")

import torch

import mha2mla
from mha2mla.environment import describe_environment
from mha2mla.eval import attention_latency, print_table
from mha2mla.eval.plotting import Curve, Panel, Picture
from mha2mla.eval.report import print_values
from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.mla_decode.selection import DecodeShape, refusal, select_kernel
from mha2mla.pipeline.sizing import GPUS

RESULTS = Path(mha2mla.__file__).parents[1] / "benchmarks" / "results"  # of a clone
LAYOUTS = ["latent", "shared", "per-group"]  # ipywidgets takes a tuple for the ends of a slider
SHAPE = {
    "heads": 32,  # H, query heads
    "kv_heads": 8,  # of the source, head_dim 128
    "layout": "latent",  # per-group: one rotary key a kv head; shared: one; latent: computed from the latent
    "kv_lora_rank": 512,  # d_c, numbers of the latent
    "qk_rope_head_dim": 64,  # d_r, rotary numbers
    "batch": 64,
    "length": 8192,  # cached tokens of each sequence
    "gpu": "h200-141gb",
}


# %% [markdown]
# ## One call
#
# The limit is the longer of two times: reading the cache once, and the products of scores, outputs and rotary keys.
# Both rates are shares of the datasheet's that kernels have reached (`pipeline/sizing.py`). `mha2mla plan` adds the
# products of rotary keys, which kernels do not hide behind reading.


# %%
def geometry_of(heads: int, kv_heads: int, layout: str, kv_lora_rank: int, qk_rope_head_dim: int) -> MLAGeometry:
    return MLAGeometry(
        num_attention_heads=heads,
        num_rope_heads=kv_heads if layout == "per-group" else 1,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        qk_nope_head_dim=128 - min(qk_rope_head_dim, 128),
        v_head_dim=128,
        num_key_value_heads=kv_heads,
        rope_from_latent=layout == "latent",
    )


def limits(geometry: MLAGeometry, batch: int, length: int, gpu: str) -> dict[str, float]:
    """Bytes, FLOP and the least µs of a call over bfloat16 caches, converted and source."""
    tokens, device = batch * length, GPUS[gpu]
    bytes_, flop = 2 * tokens * geometry.cache_numel_per_token, tokens * geometry.decode_flops_per_token()
    keys = 2 * tokens * geometry.kv_lora_rank * geometry.qk_rope_head_dim if geometry.rope_from_latent else 0
    hidden = max(bytes_ / device.read_rate, (flop - keys) / device.product_rate)
    source_bytes = 2 * tokens * geometry.source_cache_numel_per_token
    source_flop = 4 * tokens * geometry.num_attention_heads * geometry.v_head_dim
    return {
        "cache read, MB": bytes_ / 1e6,
        "source's, MB": source_bytes / 1e6,
        "products, GFLOP": flop / 1e9,
        "source's, GFLOP": source_flop / 1e9,
        "reading, µs": bytes_ / device.read_rate * 1e6,
        "products, µs": flop / device.product_rate * 1e6,
        "limit, µs": max(bytes_ / device.read_rate, flop / device.product_rate) * 1e6,
        "as mha2mla plan predicts, µs": (hidden + keys / device.product_rate) * 1e6,
        "source's limit, µs": max(source_bytes / device.read_rate, source_flop / device.product_rate) * 1e6,
    }


def kernel_of(geometry: MLAGeometry, gpu: str) -> tuple[str, str]:
    """Chosen kernel with its reason, or why none serves."""
    shape, cache = DecodeShape.of(geometry, 64, "bfloat16"), {"has_rope_cache": geometry.has_rope_cache}
    if why := refusal(shape, **cache):
        return "none", why
    try:
        chosen = select_kernel(shape, GPUS[gpu].capability, **cache)
    except ValueError as error:
        return "none", str(error)
    return chosen.kernel, chosen.reason


def explore(**shape) -> None:
    """Prints what is known of a call before it runs."""
    batch, length, gpu = (shape.pop(name) for name in ("batch", "length", "gpu"))
    try:
        geometry = geometry_of(**shape)
    except ValueError as error:
        print(error)
        return
    kernel, reason = kernel_of(geometry, gpu)
    share = geometry.cache_numel_per_token / geometry.source_cache_numel_per_token
    found = {"geometry": str(geometry), "cache ÷ source's": share, **limits(geometry, batch, length, gpu)}
    print_values(found | {"kernel": kernel, "why": reason}, f"{batch} sequences of {length:,} tokens on {gpu}")


try:
    from ipywidgets import interact
except ImportError:
    print("ipywidgets is not installed: the shape of the cell above, without sliders")
    explore(**SHAPE)
else:
    powers = [2**power for power in range(11)]
    choices = {
        "heads": [8, 16, 32, 64, 128], "kv_heads": [1, 2, 4, 8, 16, 32], "layout": LAYOUTS,
        "kv_lora_rank": (32, 1024, 32), "qk_rope_head_dim": (8, 128, 8), "batch": powers,
        "length": [1024 * power for power in powers], "gpu": list(GPUS),
    }  # fmt: skip
    interact(explore, **choices)
    explore(**SHAPE)

# %% [markdown]
# ## Limit over length
#
# A small multiple for each batch. The converted call's limit is lower where it reads fewer bytes; with a rotary key
# that is computed from the latent, products may set it.

# %%
LENGTHS = [2**power for power in range(10, 18)]
geometry = geometry_of(*(SHAPE[name] for name in ("heads", "kv_heads", "layout", "kv_lora_rank", "qk_rope_head_dim")))
panels = []
for batch in (1, 8, 64):
    found = {length: limits(geometry, batch, length, SHAPE["gpu"]) for length in LENGTHS}
    curves = [
        Curve("source", [(length, each["source's limit, µs"]) for length, each in found.items()], "source"),
        Curve("converted", [(length, each["limit, µs"]) for length, each in found.items()]),
    ]
    panels.append(Panel(f"batch {batch}", "cached tokens", "least µs a call", curves))
each = limits(geometry, 8, 8192, SHAPE["gpu"])
ratio = each["source's limit, µs"] / each["limit, µs"]
Picture(f"Converted, the limit is {ratio:.2g} times lower than the source's ({SHAPE['gpu']})", panels)

# %% [markdown]
# ## Which kernel, by rank
#
# The chosen kernel at ranks of this layout, and what sets its limit.

# %%
rows = []
for rank in (64, 128, 256, 384, 512, 768, 1024, 1152):
    other = geometry_of(SHAPE["heads"], SHAPE["kv_heads"], SHAPE["layout"], rank, SHAPE["qk_rope_head_dim"])
    found = limits(other, SHAPE["batch"], SHAPE["length"], SHAPE["gpu"])
    sets = "products" if found["products, µs"] > found["reading, µs"] else "reading"
    kernel, why = kernel_of(other, SHAPE["gpu"])
    rows.append(
        {
            "d_c": rank,
            "cache read, MB": found["cache read, MB"],
            "limit, µs": found["limit, µs"],
            "set by": sets,
            "kernel": kernel,
            "why": why,
        }
    )
print_table(rows)

# %% [markdown]
# ## On record: one H200
#
# Times of checked calls beside the limit of their bytes and products. Read from `benchmarks/results`; needs no GPU.

# %%
points: dict[str, list[tuple[float, float]]] = {}
for name, layout in (("h200-decode-table", "rotary key cached"), ("h200-latent-table", "rotary key computed")):
    path = RESULTS / f"{name}.json"
    file = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
    if file["rows"]:
        print(describe_environment(file["environment"]))
    for row in file["rows"]:
        if row["status"] == "ok" and row["S_q"] == 1:
            points.setdefault(layout, []).append((row["MB"], row["us"]))
panels = []
for layout, found in points.items():
    span = [min(megabytes for megabytes, _ in found), max(megabytes for megabytes, _ in found)]
    reading = [(megabytes, megabytes * 1e6 / GPUS["h200-141gb"].read_rate * 1e6) for megabytes in span]
    curves = [Curve("reading alone", reading, "soft", "dashed"), Curve("measured", found, "ours", "points")]
    panels.append(Panel(layout, "MB of cache read", "µs a call", curves))
Picture(
    "Large calls come close to the time of reading; small ones and computed keys do not", panels, columns=2
) if panels else None

# %% [markdown]
# ## Measure it here (needs a GPU)
#
# The call of `SHAPE`, checked against float64, then timed beside the source's attention.

# %%
if torch.cuda.is_available():
    rows = attention_latency(geometry, batch_sizes=[SHAPE["batch"]], seqlens=[SHAPE["length"]], device="cuda")
    print_table(rows, columns=("implementation", "us_p50", "us_graph", "gb_per_s", "error", "status"))
else:
    print("No GPU here: this cell needs one.")
