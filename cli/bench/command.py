"""``holdfast bench``: picks the task that the arguments select, and measures checkpoints or a
driver alone.

``asked`` maps the names of arguments to their parsed values, None for those not given. Invalid
values and combinations are refused before any I/O, and before torch is imported, which takes
seconds.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import HoldfastError, UsageError
from ..commands import complain, write_text
from ..progress import last_line
from .choices import chosen_workload, plan_of, read_measurement, runs_of, size_of
from .simulation import run_simulation
from .tuning import run_tuning

if TYPE_CHECKING:
    from ...bench.measured.plan import Plan
    from ...bench.measured.result import Measurement


COMPARE = "compare"
RAW = "raw"
"""Workload of a driver alone."""
_RANK = "holdfast.cli.bench.rank"


def run(targets: Sequence[str], **asked: Any) -> int:
    """Measure, tune, simulate or compare, and return the exit status."""
    with _interrupted_by_signals():
        return _run(targets, asked)


def _run(targets: Sequence[str], asked: Mapping[str, Any]) -> int:
    if targets[0] == COMPARE:
        return _compare(targets[1:], asked["slower"], json_output=asked["json_output"])
    if len(targets) > 1:
        raise UsageError(
            f"only one storage can be measured at a time, not {len(targets)}",
            advice="Measure them one after the other, and compare the results: "
            "holdfast bench compare A.json B.json.",
        )
    uri = targets[0]
    tuning = asked["tune"] or asked["forget"]
    if asked["ranks"] is not None and (tuning or asked["workload"] == RAW):
        raise UsageError(
            "--tune, --forget and --workload raw use one process",
            advice="Leave --ranks out.",
        )
    if tuning:
        return run_tuning(uri, asked)
    if asked["workload"] == RAW:
        return _deliver(_driver_alone(uri, asked), asked)
    if asked["simulate"]:
        return run_simulation(uri, chosen_workload(asked), asked)
    found = _checkpoints(uri, asked)
    return 0 if found is None else _deliver(found, asked)


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Treat the signals of launchers, schedulers and closed terminals as a Ctrl-C, so that the
    measurement deletes its folder."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # nohup has SIGHUP ignored; leave it so.
    taken = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for signum in taken:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_DFL)


def _deliver(found: Measurement, asked: Mapping[str, Any]) -> int:
    """Write and print the requested forms of a result, and return the exit status: 1 if it is
    INVALID. With JSON on stdout, stderr says why; the tables say so themselves."""
    from ...bench.measured.result import encoded
    from .page import measurement_page
    from .tables import invalid_lines, print_measurement

    if asked["html"] is not None:
        write_text(asked["html"], measurement_page(found))
    if asked["json_output"]:
        print(encoded(found))
        for line in invalid_lines(found):
            complain(line)
    else:
        print_measurement(found)
    return int(bool(found.invalid))


def _checkpoints(uri: str, asked: Mapping[str, Any]) -> Measurement | None:
    """Measure with this process, several of this host, or the job that a launcher has started.
    Return None on ranks other than 0."""
    from ...bench.measured.plan import check
    from ...bench.measured.ranks import job_of

    _, world = job_of()
    ranks = 1 if asked["ranks"] is None else asked["ranks"]
    if world > 1 and asked["ranks"] is not None:
        raise UsageError(
            f"--ranks {ranks} in a job that has {world} ranks", advice="Leave --ranks out."
        )
    if world > 1:
        return _by_a_job(plan_of(uri, asked, world))
    if ranks < 1:
        raise UsageError(f"{ranks} ranks cannot measure", advice="Give 1 or more.")
    plan = plan_of(uri, asked, ranks)
    check(plan, ranks)
    with last_line() as say:
        if ranks > 1:
            from ...bench.measured.launch import launched

            order = {"uri": uri, "asked": dict(asked)}
            return launched(_RANK, order, plan.new_place(), ranks, say)

        from ...bench.measured.run import measured

        return measured(plan, say)


def _by_a_job(plan: Plan) -> Measurement | None:
    from ...bench.measured.plan import check
    from ...bench.measured.ranks import joined
    from ...bench.measured.run import measured
    from ...drivers.uri import parse

    with joined() as ranks, last_line() as say:
        place = parse(ranks.agree(str(plan.new_place())))
        error = None
        try:
            if ranks.rank == 0:
                check(plan, ranks.world, len(ranks.host_ranks))
        except HoldfastError as caught:
            error = caught
        ranks.all_or_none(error)
        found = measured(plan, say, ranks, place)
    return None if ranks.rank else found


def _driver_alone(uri: str, asked: Mapping[str, Any]) -> Measurement:
    from ...bench.alone.plan import RawPlan, check_raw

    plan = RawPlan(
        uri,
        size_of(asked),
        runs_of(asked),
        part_sizes=asked["part_sizes"],
        concurrencies=asked["concurrencies"],
    )
    points = check_raw(plan)

    from ...bench.alone.run import measured_raw

    with last_line() as say:
        return measured_raw(plan, points, say)


def _compare(files: Sequence[str], slower: float, *, json_output: bool) -> int:
    """Compare two results and print the comparison. Return 1 if the second is slower by more than
    ``slower``."""
    from ...bench.measured.result import compare
    from .tables import print_comparison

    if len(files) != 2:
        raise UsageError(
            f"{COMPARE} takes two results, not {len(files)}",
            advice=f"holdfast bench {COMPARE} A.json B.json",
        )
    a, b = map(read_measurement, files)
    measured = [RAW if each.config.get("workload") == RAW else "checkpoints" for each in (a, b)]
    if measured[0] != measured[1]:
        raise UsageError(
            f"{files[0]} measures {measured[0]}, {files[1]} measures {measured[1]}",
            advice="Only results of the same workload can be compared.",
        )
    found = compare(a, b)
    for path, measurement in zip(files, (a, b), strict=True):
        if measurement.invalid:
            complain(f"{path} is marked as invalid: do not rely on its figures")
    if a.config_hash != b.config_hash:
        complain("the two results differ in storage or settings")
    print_comparison(found, slower, json_output=json_output)
    return int(any(each.is_slower(slower) for each in found))
