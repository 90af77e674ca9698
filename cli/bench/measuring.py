"""``holdfast bench URI``: measures saves and loads of checkpoints.

The ranks are this process, several processes of this host, or a job that a launcher has started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.units import parse_duration
from ...errors import HoldfastError, UsageError
from ..progress import last_line
from .driver_command import Output, status_of
from .workload import chosen_content, chosen_workload, planned_nbytes, prices_of

if TYPE_CHECKING:
    from ...bench.measured.plan import Plan
    from ...bench.measured.result import Measurement

__all__ = ["plan_of", "run_measurement"]

_RANK = "holdfast.cli.bench.rank"


def run_measurement(uri: str, asked: Mapping[str, Any], output: Output) -> int:
    """Measure as the arguments ``asked`` say, and return the exit status."""
    from ...bench.measured.ranks import job_of

    _, world = job_of()
    ranks = 1 if asked["ranks"] is None else asked["ranks"]
    if world > 1 and asked["ranks"] is not None:
        raise UsageError(
            f"--ranks {ranks} in a job that has {world} ranks", advice="Leave --ranks out."
        )
    if world > 1:
        found = _by_a_job(plan_of(uri, asked, world))
    else:
        found = _by_this_host(uri, asked, ranks)
    if found is None:
        return 0
    return _say(found, output)


def plan_of(uri: str, asked: Mapping[str, Any], ranks: int) -> Plan:
    """Return the plan of a measurement with ``ranks`` ranks. Raises UsageError."""
    from ...bench.measured.plan import Plan
    from ...bench.workloads.mlperf import Mlperf
    from ...bench.workloads.mlperf_rules import RULES

    workload = chosen_workload(asked)
    runs = asked["runs"]
    if runs is None:
        runs = RULES.writes if isinstance(workload, Mlperf) else 5
    return Plan(
        uri=uri,
        nbytes=planned_nbytes(workload, ranks),
        runs=runs,
        workload=workload,
        content=chosen_content(asked),
        warm_ups=asked["warm_ups"],
        limit_s=_seconds(asked["time_limit"]),
        compression=asked["compression"],
        peers=asked["peer"],
        driver_alone=asked["driver_alone"],
        prices=prices_of(asked),
    )


def _by_this_host(uri: str, asked: Mapping[str, Any], ranks: int) -> Measurement:
    from ...bench.measured.plan import check

    if ranks < 1:
        raise UsageError(f"{ranks} ranks cannot measure", advice="Give 1 or more.")
    plan = plan_of(uri, asked, ranks)
    check(plan, ranks)  # before importing torch, which takes seconds
    with last_line() as say:
        if ranks > 1:
            from ...bench.measured.launch import launched

            order = {"uri": uri, "asked": dict(asked)}
            return launched(_RANK, order, plan.new_place(), ranks, say)

        from ...bench.measured.run import measured

        return measured(plan, say)


def _by_a_job(plan: Plan) -> Measurement | None:
    """Measure with the ranks of this job. Return None on ranks other than 0."""
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
    if ranks.rank:
        return None
    return found


def _say(found: Measurement, output: Output) -> int:
    from ...bench.measured.result import encoded
    from .page import measurement_page
    from .tables import csv_text, print_measurement

    output.deliver(
        lines=lambda: csv_text(found),
        page=lambda: measurement_page(found),
        document=lambda: encoded(found),
        print_tables=lambda: print_measurement(found),
    )
    return status_of(found.invalid, output)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_duration(text, needs_unit=True)
    except ValueError as error:
        raise UsageError(
            f"--time-limit is not a duration: {error}", advice="Give one such as 90s."
        ) from error
