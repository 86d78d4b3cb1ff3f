"""The verb of the command line that checks kernels; as :mod:`mha2mla.verbs`."""

from __future__ import annotations

from mha2mla.files import report_file
from mha2mla.verbs import Device, show


def check_kernels(
    count: int = 200,
    seed: int = 0,
    device: Device = None,
    calls: int = 4,
    timeout: float = 60.0,
    budget: float | None = None,
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
        json: also write all rows to this file.

    Example:
        mha2mla check kernels --count 200 --budget 600 --json kernel-check.json
    """
    record = report_file(json, "kernel-check")
    from mha2mla.eval.report import print_table
    from mha2mla.testing import kernel_check

    rows = kernel_check.check_kernels(count, seed, device, calls=calls, timeout=timeout, budget=budget)
    wrong, checked = kernel_check.not_right(rows), [row for row in rows if "error" in row]
    title = f"{count} random geometries, {len(rows)} calls, {len(wrong)} not right (seed {seed})"
    summary = kernel_check.summarize(rows)
    show(summary, kernel_check.COLUMNS, title=title, kind="kernel-check", json=record, all_rows=rows, seed=seed)
    if wrong:
        shown = ("H", "G", "d_c", "d_r", "page", "S_q", "dtype", "kernel", "batch", "window", "num_ctas", "status")
        print_table(wrong[:20], title="not right", columns=shown)
    return int(bool(wrong) or not checked)
