import pytest

import mha2mla
from mha2mla.pipeline import ParityError
from tests.conversion import tiny


def test_directions_that_few_tokens_leave_open_do_no_harm_on_other_text(tmp_path):
    """32 tokens for a width of 48: without shrinkage the rest is noise, multiplied by what inverts it."""
    source = tiny.checkpoint(tmp_path / "source")

    def convert(shrinkage):
        recipe = mha2mla.Recipe(
            preset="minimal", shrinkage=shrinkage, refit_queries=False, calibration_tokens=32, calibration_length=32
        )
        return mha2mla.convert(
            source, tmp_path / str(shrinkage), recipe, evaluation=tiny.some_tokens(4, 32), device="cpu", progress=False
        )

    with pytest.raises(ParityError, match="nats a token from the source's"):
        convert(0.0)
    assert max(layer.output_error for layer in convert(0.003).parity.layers) < 2
