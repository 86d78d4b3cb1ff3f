"""longrope has two tables; the source takes one by the length of a window, a converted model has one for all."""

import json

import pytest

from mha2mla.conversion.calibration import windows
from tests.conversion import tiny

LONG = {"rope_longrope_table": "long"}
ORIGINAL = tiny.LONGROPE["original_max_position_embeddings"]
SHORT = {"preset": "minimal", "calibration_text": "builtin:prose", "calibration_tokens": 384, "calibration_lengths": 64}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    family, keys = tiny.CASES["llama-longrope"]
    return tiny.checkpoint(tmp_path_factory.mktemp("longrope") / "source", family, **keys)


def convert(source, destination, recipe, **keys):
    return tiny.convert(source, destination, tiny.Recipe(**recipe), **keys)


@pytest.mark.parametrize(("table", "length"), [("short", ORIGINAL), ("long", ORIGINAL + 1)])
@pytest.mark.parametrize("calibration_length", [48, 200])
def test_either_table_is_verified_where_the_source_uses_it(table, length, calibration_length, source, tmp_path):
    """The full-rank check failed by itself: it compared the long table with windows that the short one serves."""
    recipe = {**SHORT, "cache_ratio": 1.0, "rope_longrope_table": table, "calibration_lengths": calibration_length}
    report = convert(source, tmp_path / "out", recipe)
    assert report.parity.logits_relative_error <= 1e-4
    assert (report.evaluation_length <= ORIGINAL) == (table == "short")
    assert report.calibrated_length == (ORIGINAL if table == "short" else None)  # exact as far as the table reaches
    expected, actual = (tiny.logits(folder, tiny.some_tokens(2, length)) for folder in (source, tmp_path / "out"))
    assert tiny.relative(actual, expected) <= 1e-4


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"recipe": LONG}, "calibration.lengths is 64; expected at least 65"),
        ({"recipe": {"calibration_lengths": 65}}, "calibration.lengths is 65; expected at most 64"),
        ({"recipe": LONG, "calibration": 64}, "calibration has windows of 64 .* at least 65"),
        ({"calibration": 65}, "calibration has windows of 65 tokens; expected at most 64.* the short table"),
        ({"evaluation": 65}, "evaluation has windows of 65 tokens; expected at most 64"),
        ({"recipe": {**LONG, "cache_ratio": 1.0}, "evaluation": 9}, "evaluation has windows of 9 "),
    ],
)
def test_windows_that_the_source_serves_by_the_other_table_are_refused(keys, named, source, tmp_path):
    keys = {name: tiny.some_tokens(2, value) if isinstance(value, int) else value for name, value in keys.items()}
    recipe = {**SHORT, **keys.pop("recipe", {})}
    with pytest.raises(ValueError, match=named):
        convert(source, tmp_path / "out", recipe, **keys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("table", "length"), [("short", 64), ("long", 96)])
def test_a_lossy_conversion_is_calibrated_and_measured_by_its_own_table(table, length, source, tmp_path):
    recipe = {**SHORT, "rope_longrope_table": table, "calibration_lengths": length, "cache_ratio": 0.75}
    report = convert(source, tmp_path / "out", recipe)
    assert report.evaluation_length == report.calibrated_length == length and report.calibration_tokens == 384
    assert f"the {table} table" in report.rope_note
    recorded = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert recorded["evaluation_text"] == "builtin:prose"


def test_the_default_text_is_long_enough_for_the_long_table(tmp_path, monkeypatch):
    rope = {**tiny.LONGROPE, "original_max_position_embeddings": 2100}
    source = tiny.checkpoint(tmp_path / "source", "llama", rope_parameters=rope, max_position_embeddings=8400)
    texts = {"builtin:stdlib": "some words " * 200}  # 2 MB otherwise
    monkeypatch.setattr(windows, "load_text", lambda name, _: texts[name])
    report = convert(source, tmp_path / "out", {**SHORT, "rope_longrope_table": "long", "cache_ratio": 1.0})
    assert report.evaluation_text == "builtin:stdlib" and report.evaluation_length == 2101
    assert report.parity.logits_relative_error <= 1e-4
