"""Times from a library."""

from mha2mla.kernel_testing.timing import time_callable


def test_timing_of_a_known_duration():
    import time

    timing = time_callable(lambda: time.sleep(0.004), "cpu", min_run_time=0.05)
    assert 4000 <= timing.p20 <= timing.p50 * (1 + 1e-12) <= timing.p80 * (1 + 2e-12) and timing.p50 < 40_000
    assert timing.graph is None
