"""docs/limits.md says what the code enforces, and names every limit that it has."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*) \| `(mha2mla[\w.]+)\.([A-Z_0-9]+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("row", "module", "name"), ROWS, ids=[name for _, _, name in ROWS])
def test_the_page_has_the_codes_number(row, module, name):
    value = getattr(importlib.import_module(module), name)
    for each in value if isinstance(value, tuple) else (value,):
        shown = str(each / 10) if name == "CAPABILITY" else str(each)
        assert re.search(rf"(?<![\d.]){re.escape(shown)}(?![\d.])", row.rpartition("|")[2]), (row, value)


def test_the_page_names_every_limit_of_the_kernels():
    written = {name for _, _, name in ROWS}
    found = {
        name
        for path in (ROOT / "mha2mla" / "kernels").rglob("*.py")
        for name in re.findall(r"^(MAX_[A-Z_]+) = ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found and found <= written, f"not in docs/limits.md: {sorted(found - written)}"
