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
# # Convert and look inside
#
# What a conversion to Multi-head Latent Attention keeps and what it drops: spectra of keys and values, the rotary
# pairs, and the loss by rank, length and bits. Everything here runs on a CPU.
#
# The next cell holds all choices. Set `MHA2MLA_NOTEBOOK_MODEL` to a folder or hub id, or to `smollm2` for the demo's
# model; without it the model is a tiny Llama with random weights: the pictures then have their shapes and say nothing.

# %%
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars have no place in a saved notebook
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
warnings.filterwarnings("ignore", message="IProgress not found")

import torch
import transformers

import mha2mla
from mha2mla.conversion.latent.rules import LatentProblem, WhitenedJoint
from mha2mla.conversion.rope import RopeProblem, Rotation, SharedComponents
from mha2mla.eval import evaluate_quality, plots, print_table
from mha2mla.eval.plotting import Curve, Panel, Picture
from mha2mla.eval.quantized_caches import KVCodes, LatentCodes
from mha2mla.trial_models import fetch_smollm2, tiny_checkpoint

transformers.utils.logging.disable_progress_bar()
MODEL = os.environ.get("MHA2MLA_NOTEBOOK_MODEL")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATIOS = [0.75, 0.5, 0.3125]  # of the source's cache
LENGTHS = [32, 64] if MODEL is None else [128, 512, 1024]
TOKENS = 128 if MODEL is None else 2048  # of each text
TEXTS = ["builtin:opticks", "builtin:stdlib"]
CALIBRATED, WINDOW = (1024, 256) if MODEL is None else (4096, 1024)  # tokens
CALIBRATION = {"calibration.tokens": CALIBRATED, "calibration.lengths": WINDOW}

workplace = tempfile.TemporaryDirectory(prefix="mha2mla-")  # removed when the kernel ends
folder = Path(workplace.name)
if MODEL is None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 256}
    source = tiny_checkpoint(folder / "random-llama", **heads)
else:
    source = fetch_smollm2() if MODEL == "smollm2" else Path(MODEL)


# %% [markdown]
# ## Rules that watch
#
# A recipe takes objects of one's own in place of names. These two are the rules of the preset, and keep what they see.
# `SPECTRA` gets, for each layer, the energies of the principal components of all keys and values on the calibration
# text. `PAIRS` gets what each rotary pair would lose if it was not rotated any more.

# %%
SPECTRA: list[torch.Tensor] = []
PAIRS: list[tuple[torch.Tensor, torch.Tensor]] = []  # wavelengths in tokens, scores


@dataclass(frozen=True)
class WatchedRank(WhitenedJoint):
    def factors(self, problem: LatentProblem, rank: int, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
        target = torch.cat([problem.keys.flatten(0, 1), problem.value.flatten(0, 1)])
        SPECTRA.append(torch.linalg.eigvalsh(target @ problem.covariance @ target.T).flip(0).clamp_min(0).cpu())
        return super().factors(problem, rank, centered=centered)


@dataclass(frozen=True)
class WatchedPairs(Rotation):
    def components(self, problem: RopeProblem) -> SharedComponents:
        PAIRS.append((2 * math.pi / problem.spec.inv_freq.cpu(), self.scores(problem).mean(1)))
        return super().components(problem)


reports = {}
for ratio in RATIOS:
    SPECTRA.clear(), PAIRS.clear()  # the last conversion's stay
    rules = {"low_rank": WatchedRank(), "rope": WatchedPairs()}
    recipe = mha2mla.Recipe(preset="minimal", cache_ratio=ratio, **rules, **CALIBRATION)
    reports[ratio] = mha2mla.convert(source, folder / f"mla-{ratio}", recipe, device=DEVICE, progress=False)
print(str(reports[0.5]).replace(f"{folder}{os.sep}", ""))

# %% [markdown]
# ## Spectra
#
# Share of the energy of keys and values that the first components leave out, in three layers. The point marks the rank
# of the smallest cache. What a rule keeps is better than this says: it weighs errors by the queries that see them.

# %%
LAYERS = sorted({0, len(SPECTRA) // 2, len(SPECTRA) - 1})
rank, panels, rows = reports[RATIOS[-1]].geometry.kv_lora_rank, [], []
for layer in LAYERS:
    left = 1 - SPECTRA[layer].cumsum(0) / SPECTRA[layer].sum()
    curve = [(place + 1, share) for place, share in enumerate(left.tolist()) if share > 1e-5]
    curves = [
        Curve("left out", curve),
        Curve(f"rank {rank}", [point for point in curve if point[0] == rank], "ours", "points"),
    ]
    panels.append(Panel(f"layer {layer}", "components", "share of the energy", curves))
    rows.append(
        {
            "layer": layer,
            "left out": float(left[rank - 1]),
            "components for 99 %": int((left > 0.01).sum()) + 1,
            "of": len(left),
        }
    )
print_table(rows)
worst = max(row["left out"] for row in rows)
Picture(f"{rank} components of keys and values leave out {100 * worst:.2g} % of their energy at most", panels)

# %% [markdown]
# ## Rotary pairs
#
# What each pair would lose un-rotated: the energy of its queries and keys times the variance of its turn over the
# distances that attention looks back. Short wavelengths turn a lot; long ones hardly turn and can go into the latent
# without a rotation.

# %%
panels = []
for layer in LAYERS:
    wavelengths, scores = PAIRS[layer]
    shares = (scores / scores.sum()).tolist()
    panels.append(
        Panel(
            f"layer {layer}",
            "wavelength (tokens)",
            "share of the loss",
            [Curve("a pair", list(zip(wavelengths.tolist(), shares, strict=True)))],
            ("log2", "linear"),
        )
    )
weighed = sorted(
    (float(wavelength), float(score))
    for lengths, scores in PAIRS
    for wavelength, score in zip(lengths, scores / scores.sum(), strict=True)
)
seen, total, bound = 0.0, sum(score for _, score in weighed), weighed[-1][0]
for wavelength, score in weighed:
    seen += score
    if seen >= 0.9 * total:
        bound = wavelength
        break
Picture(f"Nine tenths of the loss are in pairs of wavelengths up to {bound:,.0f} tokens", panels)

# %% [markdown]
# ## Loss by length and rank
#
# Perplexity relative to the source model, on texts that the conversion did not see. With the caches of the cell below
# in the same pass.

# %%
CACHES = {0.5: [KVCodes(4), LatentCodes(8), LatentCodes(4)]}
quality = {
    ratio: evaluate_quality(
        source, folder / f"mla-{ratio}", texts=TEXTS, lengths=LENGTHS, max_tokens=TOKENS, caches=CACHES.get(ratio, ()),
        device=DEVICE, progress=False,
    )
    for ratio in RATIOS
}  # fmt: skip
losses = {f"{ratio:g} of the cache": [row.to_dict() for row in found.rows] for ratio, found in quality.items()}
own = {name: [row for row in rows if row["cache"] == plots.UNQUANTISED] for name, rows in losses.items()}
print_table(
    [row | {"conversion": name} for name, rows in own.items() for row in rows],
    columns=("conversion", "text", "seqlen", "perplexity_ratio", "kl", "top1_agreement"),
)
(picture,) = plots.loss_by_length(own)
picture

# %%
ranks = {name: reports[ratio].geometry.kv_lora_rank for name, ratio in zip(own, RATIOS, strict=True)}
panels = []
for length in LENGTHS:
    worst = {ranks[name]: plots.worst_losses(rows)[length] for name, rows in own.items()}
    source_line = Curve("source", [(min(worst), 1.0), (max(worst), 1.0)], "source")
    panels.append(
        Panel(
            f"windows of {length:,}",
            "rank of the latent",
            plots.RATIO,
            [source_line, Curve("converted", list(worst.items()))],
            ("log2", "ratio"),
        )
    )
least, most = min(worst), max(worst)
said = f"rank {least}: {worst[least]:.3f}, rank {most}: {worst[most]:.3f}"
Picture(f"Perplexity ratio in windows of {LENGTHS[-1]:,} tokens, on the worst text: {said}", panels)

# %% [markdown]
# ## Loss by bits
#
# Half the cache in codes of 8 and 4 bits, beside the source over a KV cache of 4 bits. Codes are simulated.

# %%
half = [row.to_dict() for row in quality[0.5].rows]
print_table(half, columns=("text", "seqlen", "cache", "cache_share", "perplexity_ratio", "kl"))
(picture,) = plots.loss_by_bytes({"half": half}, {})
picture

# %% [markdown]
# ## Loss by layer
#
# Relative errors of the conversion to half the cache. `mha2mla report` makes a page of these pictures from the folder
# and the JSON files of `mha2mla eval`.

# %%
print_table(reports[0.5].layers, columns=("layer", "kv_lora_rank", "score_error", "output_error", "hidden_error"))
plots.loss_by_layer(reports[0.5].layers)
