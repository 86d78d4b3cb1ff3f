"""The loop stands above modeling, beside eval: it knows neither kernels nor what converts and measures."""

from pathlib import Path

import mha2mla.loop
from tests.modeling.test_imports import imported

FOLDER = Path(mha2mla.loop.__file__).parent


def test_it_imports_modeling_and_bars_alone():
    for path in FOLDER.glob("*.py"):
        ours = {name for name in imported(path) if name.startswith("mha2mla")}
        assert all(name.startswith(("mha2mla.loop", "mha2mla.modeling", "mha2mla.progress")) for name in ours), (
            path.name
        )


def test_nothing_below_it_knows_of_it():
    for room in ("modeling", "kernels", "conversion", "eval", "pipeline"):
        for path in (FOLDER.parent / room).rglob("*.py"):
            assert not any(name.startswith("mha2mla.loop") for name in imported(path)), path
