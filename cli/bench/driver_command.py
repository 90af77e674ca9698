"""Runs ``holdfast bench URI --workload raw`` and ``--workload meta``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core.units import parse_size
from ...errors import UsageError
from ..commands import complain, write_text
from ..text import printable
from .workload import DEFAULT_SIZE

if TYPE_CHECKING:
    from ...bench.alone.result import DriverMeasurement

__all__ = [
    "DRIVER_WORKLOADS",
    "Output",
    "run_driver_workload",
    "runs_of",
    "say",
    "size_of",
    "status_of",
]

DRIVER_WORKLOADS = ("raw", "meta")
DEFAULT_RUNS = 5
OBJECT_NBYTES = 4096
"""Size of the objects of ``meta``."""


@dataclass(frozen=True)
class Output:
    """Destinations of a result: files, and whether stdout gets JSON instead of tables."""

    csv: str | None
    html: str | None
    json: bool

    def deliver(
        self,
        *,
        lines: Callable[[], str],
        page: Callable[[], str],
        document: Callable[[], str],
        print_tables: Callable[[], None],
    ) -> None:
        """Write and print the requested forms, and build no other. Raises UsageError if a file
        cannot be written."""
        if self.csv is not None:
            write_text(self.csv, lines())
        if self.html is not None:
            write_text(self.html, page())
        if self.json:
            print(document())
        else:
            print_tables()


def run_driver_workload(workload: str, uri: str, given: Mapping[str, Any], output: Output) -> int:
    """Measure the driver alone with the command-line arguments ``given``. Return the exit
    status."""
    if workload == "raw":
        found = _raw(uri, given)
    else:
        found = _meta(uri, given)
    return _end(found, output)


def _raw(uri: str, given: Mapping[str, Any]) -> DriverMeasurement:
    from ...bench.alone.plan import RawPlan, check_raw

    plan = RawPlan(
        uri,
        size_of("--size", given["size"] or DEFAULT_SIZE),
        runs_of(given),
        part_sizes=_list("--part-sizes", given["part_sizes"], size_of),
        concurrencies=_list("--concurrencies", given["concurrencies"], _number),
    )
    points = check_raw(plan)  # before importing torch, which takes seconds

    from ...bench.alone.raw import measured_raw

    return measured_raw(plan, points, say)


def _meta(uri: str, given: Mapping[str, Any]) -> DriverMeasurement:
    from ...bench.alone.plan import MetaPlan, check_meta

    plan = MetaPlan(uri, OBJECT_NBYTES, runs_of(given), objects=given["objects"])
    check_meta(plan)

    from ...bench.alone.meta import measured_meta

    return measured_meta(plan, say)


def _end(found: DriverMeasurement, output: Output) -> int:
    from ...bench.alone.result import encoded
    from .driver_page import driver_page
    from .driver_tables import driver_csv, print_driver

    output.deliver(
        lines=lambda: driver_csv(found),
        page=lambda: driver_page(found),
        document=lambda: encoded(found),
        print_tables=lambda: print_driver(found),
    )
    return status_of(found.invalid, output)


def status_of(invalid: Mapping[str, Sequence[str]], output: Output) -> int:
    """Return the exit status of a result. With JSON on stdout, say on stderr why it is INVALID; the
    tables say so themselves."""
    if output.json:
        for name, reasons in invalid.items():
            complain(f"INVALID: {name}: {'; '.join(reasons)}")
    return int(bool(invalid))


def runs_of(given: Mapping[str, Any]) -> int:
    """Return the number of rounds."""
    return DEFAULT_RUNS if given["runs"] is None else int(given["runs"])


def size_of(argument: str, text: str) -> int:
    """Parse a size and return it in bytes. Raises UsageError, which names ``argument``."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(
            f"{argument} {text!r} is not a size: {error}", advice="Give one such as 4MiB."
        ) from error


def _number(argument: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{argument} {text!r} is not a number", advice="Give one such as 8.")
    return int(text)


def _list(argument: str, text: str | None, parse: Callable[[str, str], int]) -> list[int] | None:
    if text is None:
        return None
    return [parse(argument, each.strip()) for each in text.split(",")]


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    print(printable(line), file=sys.stderr, flush=True)
