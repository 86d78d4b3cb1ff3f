"""What every test gets: a seed of its own, one thread, and a skip by name where there is no GPU."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import zlib

import pytest
import torch

# Several test processes share the cores; and some tests fork, whose children would wait for ever for threads of OpenMP.
torch.set_num_threads(1)
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # of processes they start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What was there before a module's tests, such as torch and transformers, is no garbage: not looked at again by
    collections, of which a test of healing has four."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch from the test's id: the same numbers whatever runs before it, other numbers in other tests."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    return value


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes are forked: one that is spawned takes seconds to import torch."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


@pytest.fixture
def fresh_dynamo():
    """Nothing that other tests compiled, and nothing left for them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory):
    """Folder of a random two-layer Llama (4 query heads, 2 kv heads of width 16) with a byte-level tokenizer."""
    from mha2mla.trial_models import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "source")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory):
    """Folder of a random two-layer Llama whose attention looks at content; tests that change it copy it."""
    from tests.conversion import tiny

    return tiny.checkpoint(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory):
    """Folder of a case of ``tiny.CASES``, made once; tests that change it copy it."""
    from tests.conversion import tiny

    @functools.cache
    def folder(case: str, **keys):
        family, own = tiny.CASES[case]
        return tiny.checkpoint(tmp_path_factory.mktemp("case") / "source", family, **own, **keys)

    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_source):
    """Tokenizer of ``tiny_source``: a letter is a token."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_source)


@pytest.fixture(scope="session")
def tiny_converted(tiny_source, tmp_path_factory: pytest.TempPathFactory):
    """The same model converted to half its cache, per-group ``k_pe``."""
    import mha2mla

    destination = tmp_path_factory.mktemp("tiny") / "converted"
    recipe = {"preset": "minimal", "layout": "per-group", "calibration.tokens": 256, "calibration.lengths": 64}
    mha2mla.convert(str(tiny_source), destination, recipe, device="cpu", progress=False)
    return destination
