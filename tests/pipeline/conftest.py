"""The checkpoint that most tests of the pipeline convert."""

import pytest

from tests.conversion import tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("source") / "tiny")
