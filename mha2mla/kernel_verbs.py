"""The verb of the command line that checks kernels; as :mod:`mha2mla.verbs`."""

from __future__ import annotations

from functools import partial

from mha2mla.outputs import report_file
from mha2mla.verbs import Device, save


def check_kernels(
    count: int = 200,
    seed: int = 0,
    device: Device = None,
    calls: int = 4,
    timeout: float = 60.0,
    budget: float | None = None,
    resume: str | None = None,
    json: str | None = None,
) -> int:
    """The decode kernels against float64 on random geometries and random plans; exit code 1 if any is wrong.

    The exit code is also 1 where the budget ended before anything was checked.

    Args:
        count: geometries, each of them one compilation.
        seed: of everything drawn; the same seed checks the same calls.
        device: cuda or cuda:1, the default being CUDA; cpu checks the reference backend on smaller calls.
        calls: random calls and plans per geometry.
        timeout: seconds after which a launch counts as hung.
        budget: seconds for compiling and checking; calls that are not reached are rows "not checked: …".
        resume: file that an earlier run wrote; what it has a verdict on is not repeated.
        json: also write all rows to this file, while they come in and at the end.

    Example:
        mha2mla check kernels --count 200 --budget 600 --json kernel-check.json
    """
    record = report_file(json, "kernel-check")  # may be the file of --resume, whose rows go on into it
    from mha2mla.environment import collect_environment, describe_environment
    from mha2mla.eval.report import print_table
    from mha2mla.kernel_testing import check as checking
    from mha2mla.kernel_testing import check_rows

    environment = collect_environment()
    settings = {"count": count, "seed": seed, "calls": calls, "device": device or "cuda"}
    known = [] if resume is None else check_rows.read_known(resume, settings, environment)
    write = partial(save, record, check_rows.KIND, environment=environment, **settings)
    rows = checking.check_kernels(
        count, seed, device, calls=calls, timeout=timeout, budget=budget, known=known, save=write
    )
    write(rows)
    wrong, unchecked = check_rows.not_right(rows), check_rows.not_checked(rows)
    print_table(
        check_rows.summarize(rows),
        title=f"{count} random geometries, {len(rows)} calls, {len(wrong)} not right (seed {seed})",
        columns=check_rows.COLUMNS,
        caption=describe_environment(environment),
    )
    if wrong:
        shown = ("H", "G", "d_c", "d_r", "page", "S_q", "dtype", "kernel", "batch", "window", "num_ctas", "status")
        print_table(wrong[:20], title="not right", columns=shown)
    if unchecked:
        print(f"{len(unchecked)} calls {unchecked[0]['status']}; {check_rows.whole_geometries(rows)}")
    return int(bool(wrong) or len(unchecked) == len(rows))
