"""Measures of a checkout, on a made one."""

from benchmarks.house import measures


def test_measures_of_a_checkout(tmp_path):
    files = {
        "__init__.py": '"""Whether it counts."""\n',
        "low.py": "# of a reason\n# in two lines\nx = 1  # officially\n",
        "room/__init__.py": "",
        "room/one.py": "from mha2mla.low import x\n\n\ndef late():\n    from mha2mla.room import two\n",
        "room/two.py": "from . import one\n" + "\n" * 60,
    }
    for name, text in files.items():
        path = tmp_path / "mha2mla" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert measures(tmp_path) == {
        "mha2mla: lines · files": "70 · 5",
        "lines of docstrings": "1",
        "files under 60 lines": "4",
        "tests: lines · files": "0 · 0",
        "prose that opens with What/Which/Whether/Of/As/How": "2 of 3",
        "files that mention rope_from_latent": "0",
        "modules in import circles, when imported": "0 in 0",
        "modules in import circles, in functions and for type checkers too": "2 in 1",
        "rooms (files and folders of the package) · arrows": "2 · 1",
        "  mha2mla": "4",
        "  mha2mla/room": "66",
    }
