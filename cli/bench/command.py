"""Runs ``holdfast bench``: measures, or holds two results against each other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..commands import complain, write_text
from ..text import printable
from .simulation import check_alone, run_dry, run_simulation
from .workload import chosen_content, chosen_workload, planned_nbytes

if TYPE_CHECKING:
    from ...bench.measured.plan import Plan

__all__ = ["run"]

COMPARE = "compare"


def run(
    targets: Sequence[str],
    *,
    runs: int,
    slower: str,
    csv: str | None,
    html: str | None,
    json_output: bool,
    **asked: Any,
) -> int:
    """Measure, simulate, or compare; the exit status. ``asked``: what is saved, and what is said of
    it without measuring (:mod:`.workload`, :mod:`.simulation`)."""
    if targets[0] == COMPARE:
        return _compare(targets[1:], slower, json_output=json_output)
    if len(targets) > 1:
        raise UsageError(
            f"{len(targets)} storages cannot be measured at a time",
            advice="Measure one after the other, and hold the results against each other: "
            "holdfast bench compare A.json B.json.",
        )
    check_alone(asked)
    content = chosen_content(asked)
    workload = chosen_workload(asked)
    if asked["simulate"]:
        return run_simulation(targets[0], workload, asked, json_output=json_output)

    from ...bench.measured.plan import Plan

    plan = Plan(targets[0], planned_nbytes(workload), runs, workload, content)
    if asked["dry_run"]:
        return run_dry(plan, asked, json_output=json_output)
    return _measure(plan, csv=csv, html=html, json_output=json_output)


def _measure(plan: Plan, *, csv: str | None, html: str | None, json_output: bool) -> int:
    from ...bench.measured.plan import check

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
    from ...bench.measured.comparison import compare
    from ...bench.measured.result import Measurement, decoded
    from .tables import print_comparison, print_comparison_json

    if len(files) != 2:
        raise UsageError(
            f"{COMPARE} takes two results, not {len(files)}",
            advice=f"holdfast bench {COMPARE} A.json B.json",
        )
    part = _part(slower)

    def read(path: str) -> Measurement:
        try:
            with open(path, encoding="utf-8") as file:
                return decoded(file.read(), path)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error

    a, b = map(read, files)
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
