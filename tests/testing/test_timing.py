"""Times from a library."""

import time

from mha2mla.testing.timing import time_callable


def test_times_are_microseconds_of_a_call():
    began = time.perf_counter()
    timing = time_callable(lambda: time.sleep(0.004), "cpu", min_run_time=0.05)
    most = (time.perf_counter() - began) * 1e6  # of all calls together
    assert 4000 <= timing.p20 <= timing.p50 * (1 + 1e-12) <= timing.p80 * (1 + 2e-12) <= most
    assert timing.graph is None
