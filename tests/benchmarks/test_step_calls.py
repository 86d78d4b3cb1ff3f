"""A decode step stays a short way through the code."""

from benchmarks.step_calls import count_step


def test_step_calls_stay_few():
    calls = count_step()
    assert calls.entered[0][2].endswith("prepare_inputs_for_generation")
    names = {function for _, _, function, _ in calls.entered}
    assert "AttentionStep.run" in names  # or the step was not served
    # Fusing weights and looking into modules belongs to the prompt.
    assert names.isdisjoint({"fuse_weights", "FusedDecoder.prepare", "is_plain", "_is_own", "StepPlanner._allocate"})
    assert len(calls.entered) <= 250
