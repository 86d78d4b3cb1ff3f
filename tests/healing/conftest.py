"""What tests of healing share."""

import pytest

from tests.conversion import tiny

LATENT = {"layout": "latent", "cache_ratio": 0.25, **tiny.SHORT}


@pytest.fixture(scope="session")
def folders(tmp_path_factory, source):
    """A source and a conversion of it."""
    folder = tmp_path_factory.mktemp("pair") / "converted"
    tiny.convert(source, folder, LATENT, evaluation="builtin:prose")
    return source, folder
