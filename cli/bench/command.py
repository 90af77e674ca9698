"""Runs ``holdfast bench``: measures, or holds two results against each other."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ...core.units import parse_duration, parse_size
from ...drivers.uri import parse
from ...errors import HoldfastError, UsageError
from ..commands import complain, write_text
from ..progress import last_line
from .driver_command import DRIVER_WORKLOADS, Output, run_driver_workload
from .tuning_command import run_tuning

if TYPE_CHECKING:
    from ...bench.measured.plan import Plan
    from ...bench.measured.result import Measurement

__all__ = ["run"]

COMPARE = "compare"


def run(
    targets: Sequence[str],
    *,
    slower: str,
    csv: str | None,
    html: str | None,
    json_output: bool,
    **asked: Any,
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
    output = Output(csv, html, json_output)
    if asked["tune"] or asked["forget"]:
        return run_tuning(targets[0], asked, output)
    if asked["workload"] in DRIVER_WORKLOADS:
        return run_driver_workload(asked["workload"], targets[0], asked, output)
    found = _measured(targets[0], **asked)
    if found is None:
        return 0
    return _say_what_was_found(found, csv=csv, html=html, json_output=json_output)


def _measured(
    uri: str,
    *,
    size: str,
    runs: int,
    warm_ups: int,
    time_limit: str | None,
    ranks: int,
    compression: Literal["lz4"] | None,
    peer: str,
    driver_alone: bool,
) -> Measurement | None:
    """None on ranks other than 0."""
    from ...bench.measured.plan import Plan, check
    from ...bench.measured.ranks import job_of

    plan = Plan(
        uri=uri,
        nbytes=_size(size),
        runs=runs,
        warm_ups=warm_ups,
        limit_s=_seconds(time_limit),
        compression=compression,
        peers=peer,
        driver_alone=driver_alone,
    )
    _, world = job_of()
    if world > 1 and ranks > 1:
        raise UsageError(
            f"--ranks {ranks} in a job that has {world} ranks", advice="Leave --ranks out."
        )
    if world > 1:
        return _measured_by_job(plan)
    check(plan, ranks)  # before torch is imported, which takes seconds
    if ranks > 1:
        from ...bench.measured.launch import launched

        with last_line() as say:
            return launched(plan, ranks, say)

    from ...bench.measured.run import measured

    with last_line() as say:
        return measured(plan, say)


def _measured_by_job(plan: Plan) -> Measurement | None:
    from ...bench.measured.plan import check
    from ...bench.measured.ranks import joined
    from ...bench.measured.run import measured

    with joined() as ranks, _interrupted_by_sigterm(), last_line() as say:
        place = parse(ranks.agree(str(plan.new_place())))
        error = None
        try:
            if ranks.rank == 0:
                check(plan, ranks.world)
        except HoldfastError as caught:
            error = caught
        ranks.all_or_none(error)
        found = measured(plan, say, ranks, place)
    if ranks.rank:
        return None
    return found


def _say_what_was_found(
    found: Measurement, *, csv: str | None, html: str | None, json_output: bool
) -> int:
    from ...bench.measured.result import encoded
    from .page import measurement_page
    from .tables import csv_text, print_measurement

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
    from .results import read_measurement
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


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_duration(text, needs_unit=True)
    except ValueError as error:
        raise UsageError(f"--time-limit is no time: {error}", advice="Such as 90s.") from error


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Launchers end ranks by SIGTERM: it is a Ctrl-C, then, after which nothing is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _part(text: str) -> float:
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise UsageError(f"--slower {text!r} is no part", advice="Such as 5%.")
    return part
