"""Rows of ``mha2mla check kernels``: what they say, the file that holds them, and their summary."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mha2mla.kernel_testing.cases import Case
from mha2mla.kernel_testing.judgement import NOT_CHECKED

SIZES = ("≤ 16", "≤ 32", "≤ 64", "≤ 128", "> 128")
KIND = "kernel-check"  # of the JSON file
COLUMNS = {
    "kernel": "kernel",
    "rows": "H·S_q",
    "rope_heads": "G",
    "geometries": "geometries",
    "calls": "calls",
    "error": "worst error",
    "torch_error": "torch there",
    "ratio": "worst ratio",
    "lse_error": "lse",
    "wrong": "wrong",
    "hung": "hung",
    "unchecked": "not checked",
    "status": "status",
}


def is_broken(status: str) -> bool:
    """Whether a call failed in a way that its geometry's other calls are skipped after."""
    return status != "ok" and not status.startswith(("wrong", NOT_CHECKED))


def not_checked(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that time did not suffice for."""
    return [row for row in rows if row["status"].startswith(NOT_CHECKED)]


def not_right(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that were checked and are not right."""
    return [row for row in rows if row["status"] != "ok" and not row["status"].startswith(NOT_CHECKED)]


def whole_geometries(rows: Sequence[Mapping[str, Any]]) -> str:
    """In words, which of a seed's geometries were checked with all their calls: "geometries 0-57, 59 were checked"."""
    left = {row["group"] for row in not_checked(rows)}
    whole = sorted({row["group"] for row in rows} - left)
    runs: list[list[int]] = []
    for group in whole:
        if runs and runs[-1][1] == group - 1:
            runs[-1][1] = group
        else:
            runs.append([group, group])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"geometries {text} were checked" if whole else "no geometry was checked with all its calls"


def read_known(
    path: str | os.PathLike[str], settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows of a file that ``mha2mla check kernels --json`` wrote, to go on from.

    Args:
        path: the file.
        settings: ``seed``, ``calls`` and ``device`` of this run.
        environment: of this run, as :func:`mha2mla.environment.collect_environment` gives it.

    Raises:
        ValueError: it is no such file, or is about other calls, another GPU, other software or another commit: what
            was right there may be wrong here.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not what `mha2mla check kernels --json` writes: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(f"{path} is not what `mha2mla check kernels --json` writes")
    here = {name: settings[name] for name in ("seed", "calls", "device")}
    here |= {name: environment[name] for name in ("gpu", "torch", "tilelang", "commit")}
    there = {name: (content if name in settings else content["environment"]).get(name) for name in here}
    differs = [f"{name} {there[name]!r}; expected {here[name]!r}" for name in here if there[name] != here[name]]
    if differs:
        raise ValueError(f"{path} is of {' and '.join(differs)}")
    return content["rows"]


def match_known(cases: Sequence[Case], known: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows with a verdict, by the number of the case that they are of.

    Raises:
        ValueError: a row is of a call that is not drawn now.
    """
    place = {(case.group, case.call): number for number, case in enumerate(cases)}
    found = {}
    for row in known:
        number = place.get((row["group"], row["call"]))
        if number is None:
            continue  # of a longer run
        case = cases[number]
        mine = case.problem.columns | {"dtype": case.dtype, "seed": case.problem.seed}
        other = {name: row.get(name) for name in mine}
        if other != mine:
            raise ValueError(
                f"the known row of geometry {case.group}, call {case.call} is {other}; expected {mine}: other seed, "
                f"calls or version"
            )
        if not row["status"].startswith(NOT_CHECKED):
            found[number] = dict(row)
    return found


def case_row(case: Case, device: torch.device | None) -> dict[str, Any]:
    """What a case is; the kernel is named where there is a GPU to choose one for."""
    problem = case.problem
    row = {
        "group": case.group,
        "call": case.call,
        **problem.columns,
        "dtype": case.dtype,
        "kernel": "reference",
        "batch": len(problem.lengths),
        "longest": max(problem.lengths, default=0),
        "tokens": sum(problem.lengths),
        "starts": problem.starts is not None,
        "causal": problem.causal,
        "window": problem.window,
        "sinks": problem.sinks,
        "combined": problem.combined,
        "scale": problem.scale,
        "seed": problem.seed,
    }
    if device is not None:
        choice = case.choice(device)
        row |= {"kernel": choice.kernel, "reason": choice.reason}
    return row


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per kernel, number of query rows and kind of rope heads, for :data:`COLUMNS`."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        query_rows = row["H"] * row["S_q"]
        size = next(
            (size for size, limit in zip(SIZES, (16, 32, 64, 128), strict=False) if query_rows <= limit), SIZES[-1]
        )
        kind = "1" if row["G"] == 1 else "H" if row["G"] == row["H"] else "1 < G < H"
        groups.setdefault((row["kernel"], size, kind), []).append(row)
    table = []
    for (kernel, size, kind), mine in sorted(groups.items(), key=lambda item: (item[0][0], SIZES.index(item[0][1]))):
        measured = [row for row in mine if "error" in row]
        worst = max(measured, key=lambda row: row["error"], default={})
        unchecked, failed = not_checked(mine), [row["status"] for row in not_right(mine)]
        table.append(
            {
                "kernel": kernel,
                "rows": size,
                "rope_heads": kind,
                "geometries": len({row["group"] for row in mine}),
                "calls": len(mine),
                "error": worst.get("error"),
                "torch_error": worst.get("torch_error"),
                "ratio": max((row["error"] / max(row["torch_error"], 1e-12) for row in measured), default=None),
                "lse_error": max((row["lse_error"] for row in measured), default=None),
                "wrong": sum(not status.startswith("hung") for status in failed),
                "hung": sum(status.startswith("hung") for status in failed),
                "unchecked": len(unchecked),
                "status": failed[0] if failed else "ok" if measured else unchecked[0]["status"],
            }
        )
    return table
