"""Text that a source wrote serves its other conversions, and no others."""

import pytest
import torch
from safetensors.torch import load_file

from mha2mla.conversion import resume
from mha2mla.conversion.calibration import windows
from tests.conversion import tiny
from tests.conversion.tiny import convert
from tests.folders import WEIGHTS, flip_bit

RECIPE = {"calibration.text": "generated", "calibration.tokens": 256, "calibration.lengths": 64}


@pytest.fixture
def writings(tmp_path, monkeypatch):
    """Seeds of the texts that sources write, into a cache folder of this test's own."""
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "cache"))
    seeds, usual = [], windows.write_windows

    def counted(folder, tokenizer, wanted, *, seed, **keys):
        seeds.extend([seed] * bool(wanted))
        return usual(folder, tokenizer, wanted, seed=seed, **keys)

    monkeypatch.setattr(windows, "write_windows", counted)
    return seeds


def test_another_ratio_takes_the_text_of_the_first(source, tmp_path, writings):
    for ratio in (0.5, 0.25, 0.125):
        report = convert(source, tmp_path / f"{ratio}", {**RECIPE, "cache_ratio": ratio})
        assert report.calibration_tokens == 256
    assert writings == [0]
    convert(source, tmp_path / "seed", {**RECIPE, "calibration.seed": 1})
    convert(source, tmp_path / "tokens", {**RECIPE, "calibration.tokens": 512})
    convert(tiny.checkpoint(tmp_path / "other", seed=5), tmp_path / "of another", RECIPE)
    assert writings == [0, 1, 0, 0]


def test_text_outlives_code_that_does_not_write_it(source, tmp_path, writings, monkeypatch):
    for number, part in enumerate((None, "_CODE", "_TEXT_CODE")):
        if part is not None:
            monkeypatch.setattr(resume, part, ("geometry.py",))
        convert(source, tmp_path / str(number), RECIPE)
    assert writings == [0, 0]


def test_a_text_that_nobody_writes_is_not_kept(source, tmp_path, writings):
    convert(source, tmp_path / "out", {**RECIPE, "calibration.text": "builtin:pydoc"})
    assert not (tmp_path / "cache").exists()


def test_a_damaged_or_unwritable_text_is_written_anew(source, tmp_path, writings, capsys):
    convert(source, tmp_path / "first", RECIPE)
    (kept,) = (tmp_path / "cache" / "texts").iterdir()
    windows = load_file(kept)["windows"].clone()
    flip_bit(kept)
    convert(source, tmp_path / "second", RECIPE)
    assert writings == [0, 0] and torch.equal(load_file(kept)["windows"], windows)
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.write_text("a file")
    convert(source, tmp_path / "third", RECIPE, progress=True)
    assert "calibration text is not kept for other conversions" in capsys.readouterr().err


def test_kept_windows_give_the_same_weights(source, tmp_path, writings):
    for name in ("wrote", "read"):
        convert(source, tmp_path / name, {**RECIPE, "calibration.lengths": [16, 64]})
    assert len(writings) == 1  # all lengths at once
    assert (tmp_path / "wrote" / WEIGHTS).read_bytes() == (tmp_path / "read" / WEIGHTS).read_bytes()
