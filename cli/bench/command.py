"""Runs ``holdfast bench``: measures, or holds two results against each other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ...core.units import parse_size
from ...errors import UsageError
from ..commands import complain, write_text
from ..text import printable
from .driver_command import DRIVER_WORKLOADS, Output, run_driver_workload
from .tuning_command import run_tuning

__all__ = ["run"]

COMPARE = "compare"


def run(
    targets: Sequence[str],
    *,
    size: str,
    runs: int,
    slower: str,
    csv: str | None,
    html: str | None,
    json_output: bool,
    **others: Any,
) -> int:
    """Measure, or compare; the exit status. ``others``: the arguments of a driver alone and of
    tuning."""
    if targets[0] == COMPARE:
        return _compare(targets[1:], slower, json_output=json_output)
    if len(targets) > 1:
        raise UsageError(
            f"{len(targets)} storages cannot be measured at a time",
            advice="Measure one after the other, and hold the results against each other: "
            "holdfast bench compare A.json B.json.",
        )
    more = {"size": size, "runs": runs, **others}
    output = Output(csv, html, json_output)
    if others["tune"] or others["forget"]:
        return run_tuning(targets[0], more, output)
    if others["workload"] in DRIVER_WORKLOADS:
        return run_driver_workload(others["workload"], targets[0], more, output)
    return _measure(targets[0], size, runs, csv=csv, html=html, json_output=json_output)


def _measure(
    uri: str, size: str, runs: int, *, csv: str | None, html: str | None, json_output: bool
) -> int:
    from ...bench.measured.plan import Plan, check

    plan = Plan(uri, _size(size), runs)
    check(plan)  # before torch is imported, which takes seconds

    from ...bench.measured.result import encoded
    from ...bench.measured.run import measured
    from .page import measurement_page
    from .tables import csv_text, print_measurement

    found = measured(plan, _say)
    if csv is not None:
        write_text(csv, csv_text(found))
    if html is not None:
        write_text(html, measurement_page(found))
    if json_output:
        print(encoded(found))
    else:
        print_measurement(found)
    return int(bool(found.invalid))


def _compare(files: Sequence[str], slower: str, *, json_output: bool) -> int:
    from ...bench.alone import result as driver_result
    from ...bench.measured.comparison import compare
    from ...bench.measured.result import Measurement, decoded
    from .tables import print_comparison, print_comparison_json

    if len(files) != 2:
        raise UsageError(
            f"{COMPARE} takes two results, not {len(files)}",
            advice=f"holdfast bench {COMPARE} A.json B.json",
        )
    part = _part(slower)

    texts = list(map(_read, files))
    of_a, of_b = map(driver_result.workload_of, texts)
    if of_a != of_b:
        raise UsageError(
            f"{files[0]} is of {of_a or 'checkpoints'}, {files[1]} of {of_b or 'checkpoints'}",
            advice="Only results of the same workload can be held against each other.",
        )

    def decode(text: str, path: str) -> Measurement:
        if of_a in DRIVER_WORKLOADS:
            return driver_result.decoded(text, path).as_measurement()
        return decoded(text, path)

    a, b = map(decode, texts, files)
    found = compare(a, b)
    for path, measurement in zip(files, (a, b), strict=True):
        if measurement.invalid:
            complain(f"{path} is marked as invalid: its figures are not to be believed")
    if a.config_hash != b.config_hash:
        complain("the two are not of the same storage and size")
    if json_output:
        print_comparison_json(found, part)
    else:
        print_comparison(found, part)
    return int(any(each.is_slower(part) for each in found))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"--size {text!r} is no size: {error}", advice="Such as 4GiB.") from error


def _part(text: str) -> float:
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise UsageError(f"--slower {text!r} is no part", advice="Such as 5%.")
    return part


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
