import pytest

from mha2mla.conversion.latent import rules
from mha2mla.pipeline import ParityError
from tests.conversion import tiny


def test_directions_that_few_tokens_leave_open_do_no_harm_on_other_text(tmp_path, monkeypatch):
    """32 tokens for a width of 48: without shrinkage the rest is noise, multiplied by what inverts it."""
    source = tiny.checkpoint(tmp_path / "source")

    def convert(shrinkage):
        monkeypatch.setattr(rules, "SHRINKAGE", shrinkage)
        recipe = tiny.Recipe(fit_queries=False, calibration_tokens=32, calibration_lengths=32)
        return tiny.convert(source, tmp_path / str(shrinkage), recipe, evaluation=tiny.some_tokens(4, 32))

    with pytest.raises(ParityError, match="nats a token from the source's"):
        convert(0.0)
    assert max(layer.output_error for layer in convert(0.003).parity.layers) < 2
