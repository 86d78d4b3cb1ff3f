"""The loop stands above modeling, beside eval: it knows neither kernels nor what converts and measures."""

from pathlib import Path

import mha2mla.loop
from tests.modeling.test_imports import imported

FOLDER = Path(mha2mla.loop.__file__).parent


LEAVES = ("mha2mla.progress", "mha2mla.prompts")  # import nothing of ours; prompts are read before torch is there


def test_it_imports_modeling_and_leaves_alone():
    for path in FOLDER.glob("*.py"):
        ours = {name for name in imported(path) if name.startswith("mha2mla")}
        assert all(name.startswith(("mha2mla.loop", "mha2mla.modeling", *LEAVES)) for name in ours), path.name
    for leaf in LEAVES:
        path = FOLDER.parent / f"{leaf.rpartition('.')[2]}.py"
        assert not any(name.startswith("mha2mla") for name in imported(path)), path


def test_nothing_below_it_knows_of_it():
    for room in ("modeling", "kernels", "conversion", "eval", "pipeline"):
        for path in (FOLDER.parent / room).rglob("*.py"):
            assert not any(name.startswith("mha2mla.loop") for name in imported(path)), path
