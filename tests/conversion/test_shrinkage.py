import mha2mla
from tests.conversion import tiny


def test_directions_that_few_tokens_leave_open_do_no_harm_on_other_text(tmp_path):
    """32 tokens for a width of 48: without shrinkage the rest is noise, multiplied by what inverts it."""
    source = tiny.checkpoint(tmp_path / "source")
    errors = {}
    for shrinkage in (0.0, 0.003):
        recipe = mha2mla.Recipe(
            preset="minimal", shrinkage=shrinkage, refit_queries=False, calibration_tokens=32, calibration_length=32
        )
        report = mha2mla.convert(
            source, tmp_path / str(shrinkage), recipe, evaluation=tiny.some_tokens(4, 32), device="cpu", progress=False
        )
        errors[shrinkage] = [layer.output_error for layer in report.parity.layers]
    assert max(errors[0.0]) > 20 and max(errors[0.003]) < 2, errors
