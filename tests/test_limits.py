"""docs/limits.md says what the code enforces, and names every limit that it has."""

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mha2mla.conversion import target
from mha2mla.conversion.families import ADAPTERS
from mha2mla.conversion.recipe import Recipe
from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import decodes_codes
from mha2mla.kernels.attention_varlen import api as varlen
from mha2mla.kernels.mla_decode import selection
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from tests.conversion import tiny

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*) \| `(mha2mla[\w.]+)\.([A-Z_0-9]+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("row", "module", "name"), ROWS, ids=[name for _, _, name in ROWS])
def test_the_page_has_the_codes_number(row, module, name):
    value = getattr(importlib.import_module(module), name)
    for each in value if isinstance(value, tuple) else (value,):
        shown = str(each / 10) if name == "HOPPER" else str(each)
        assert re.search(rf"(?<![\d.]){re.escape(shown)}(?![\d.])", row.rpartition("|")[2]), (row, value)


def test_the_page_names_every_limit_of_the_kernels():
    written = {name for _, _, name in ROWS}
    found = {
        name
        for path in (ROOT / "mha2mla" / "kernels").rglob("*.py")
        for name in re.findall(r"^(MAX_[A-Z_]+) = ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found and found <= written, f"not in docs/limits.md: {sorted(found - written)}"


def test_conversion_aims_at_what_kernels_take():
    """It knows nothing of kernels, and so has their widths by numbers of its own."""
    assert target.WIDEST_LATENT == selection.MAX_LATENT
    assert target.WIDEST_ROTARY == selection.MAX_ROPE_ALONE
    assert target.FUSED_WIDTH == varlen.MAX_WIDTH
    widths = (target.WIDEST_CODES_OF_WIDE_ROTARY, target.WIDEST_ROTARY)
    codes = MLAGeometry(32, 1, *widths, rope_from_latent=True, latent_bits=4)
    wider = replace(codes, kv_lora_rank=codes.kv_lora_rank + 32)
    narrow = replace(wider, qk_rope_head_dim=target.NARROW_ROTARY)
    found = [decodes_codes(each, 64, torch.bfloat16, "cuda") for each in (codes, wider, narrow)]
    assert found == [True, False, True]


# Key-value heads, their width, cache ratio, 8-bit latents → what has kernels in latent, shared and per-group: Decode,
# Batches.
LAYOUT_KERNELS = {
    (4, 128, 0.5, False): ("DB", "DB", "DB"),
    (8, 64, 0.5, False): ("DB", "DB", "DB"),
    (8, 128, 0.5, False): ("DB", "DB", "DB"),
    (8, 128, 0.25, False): ("DB", "DB", "DB"),
    (32, 128, 0.125, False): ("DB", "DB", "DB"),
    (32, 128, 0.25, False): ("", "", ""),
    (1, 256, 0.5, False): ("D", "D", "DB"),
    (8, 128, 1.0, False): ("", "", "DB"),
    (4, 128, 0.3125, True): ("DB", "DB", "DB"),
}


@pytest.mark.parametrize("source", LAYOUT_KERNELS, ids=str)
@pytest.mark.parametrize(("place", "layout"), list(enumerate(("latent", "shared", "per-group"))))
def test_the_page_says_which_layout_has_kernels(source, place, layout):
    kv_heads, head_dim, ratio, eight_bits = source
    keys = {"hidden_size": 1024, "num_attention_heads": 32, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    spec, expected = ADAPTERS["llama"].specify(tiny.config("llama", **keys)), LAYOUT_KERNELS[source][place]
    recipe = Recipe.from_preset("minimal", layout=layout, cache_ratio=ratio)
    geometry = recipe.geometry(spec)
    asked = (None, geometry, 64, torch.bfloat16, torch.device("cuda"))
    if eight_bits:
        asked = ("mla_fp8", *asked[1:])
    decode, batches = (ATTENTION_BACKENDS.find(*asked, long_queries=long)[0] for long in (False, True))
    found = "".join(way for way, each in (("D", decode), ("B", batches)) if each is not None and each.compiled)
    assert found == expected
