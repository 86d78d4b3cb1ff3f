"""The verbs of the command line that check and tune kernels; as :mod:`mha2mla.verbs`."""

from __future__ import annotations

from functools import partial
from typing import Literal

from mha2mla.verbs import Device, save, show


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
    from mha2mla.environment import collect_environment, describe_environment
    from mha2mla.eval.report import print_table
    from mha2mla.kernel_testing import check as checking
    from mha2mla.kernel_testing import check_rows

    environment = collect_environment()
    settings = {"count": count, "seed": seed, "calls": calls, "device": device or "cuda"}
    known = [] if resume is None else check_rows.read_known(resume, settings, environment)
    write = partial(save, json, check_rows.KIND, environment=environment, **settings)
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


def tune(
    geometry: list[str] | None = None,
    batch: int | list[int] = 64,
    seqlen: int | None = None,
    page_size: int = 64,
    dtype: Literal["bfloat16", "float16"] = "bfloat16",
    candidates: int = 6,
    table: str | None = None,
    device: Device = None,
    timeout: float = 60.0,
    json: str | None = None,
) -> int:
    """Times the decode kernels that may serve a geometry on this GPU, and writes the fastest into a tuning table.

    A configuration is timed only after the same inputs passed a check against float64. Processes started afterwards use
    the table. Exit code 1 if a geometry got no row.

    Args:
        geometry: H,G,d_c,d_r or H,G,d_c,d_r,S_q, such as 32,8,512,16; may be given several times. Default: a list of
            geometries that converted models have, and DeepSeek's.
        batch: sequences per call; several, such as 8,64, get a row each.
        seqlen: cached tokens of each; default as many as make the cache about 280 MB, 67 MB below 16 sequences.
        page_size: tokens per page.
        dtype: of queries and caches.
        candidates: configurations to time per geometry; never fewer than there are kinds of them.
        table: file to write; default tuning.json in the cache folder, which is looked at before the package's.
        device: cuda or cuda:1; default CUDA.
        timeout: seconds after which a configuration counts as hung.
        json: also write a row per configuration to this file.

    Example:
        mha2mla tune --geometry 32,8,512,16 32,1,512,64 --batch 8,64
    """
    from mha2mla.eval.report import print_table
    from mha2mla.kernel_testing import trials
    from mha2mla.kernel_testing import tune as tuner

    rows = tuner.tune(
        None if geometry is None else [trials.parse_geometry(text) for text in geometry],
        batches=[batch] if isinstance(batch, int) else batch,
        seqlen=seqlen,
        page_size=page_size,
        dtype=dtype,
        candidates=candidates,
        table=table,
        device=device,
        timeout=timeout,
    )
    summary = tuner.summarize(rows)
    title = f"fastest decode kernel of each shape, {dtype}, µs with cold L2"
    show(summary, tuner.COLUMNS, title=title, kind="tuning", json=json, all_rows=rows)
    wrong = [row for row in rows if row["status"] != "ok"]
    if wrong:
        shown = ("H", "G", "d_c", "d_r", "page", "S_q", "kernel", "rows", "num_stages", "rope_stages", "status")
        print_table(wrong[:20], title="not right", columns=shown)
    return int(any(row["status"].startswith("no row") for row in summary))
