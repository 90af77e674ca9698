"""Runs ``holdfast bench``: picks the task that the arguments select."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import UsageError
from .compared import COMPARE, run_comparison
from .driver_command import DRIVER_WORKLOADS, Output, run_driver_workload
from .measuring import run_measurement
from .simulation import check_alone, run_dry, run_simulation
from .tuning_command import run_tuning
from .workload import chosen_workload

__all__ = ["run"]


def run(
    targets: Sequence[str],
    *,
    slower: str,
    csv: str | None,
    html: str | None,
    json_output: bool,
    **asked: Any,
) -> int:
    """Measure, tune, simulate or compare, and return the exit status. ``asked`` holds the other
    arguments by name."""
    with _interrupted_by_signals():
        return _run(targets, asked, slower, Output(csv, html, json_output))


def _run(targets: Sequence[str], asked: Mapping[str, Any], slower: str, output: Output) -> int:
    if targets[0] == COMPARE:
        return run_comparison(targets[1:], slower, json_output=output.json)
    if len(targets) > 1:
        raise UsageError(
            f"only one storage can be measured at a time, not {len(targets)}",
            advice="Measure them one after the other, and compare the results: "
            "holdfast bench compare A.json B.json.",
        )
    uri = targets[0]
    if asked["ranks"] is not None and _is_for_one(asked):
        raise UsageError(
            "--tune, --forget and the workloads of a driver use one process",
            advice="Leave --ranks out.",
        )
    if asked["tune"] or asked["forget"]:
        return run_tuning(uri, asked, output)
    check_alone(asked)
    if asked["workload"] in DRIVER_WORKLOADS:
        return run_driver_workload(asked["workload"], uri, asked, output)
    if asked["simulate"]:
        return run_simulation(uri, chosen_workload(asked), asked, json_output=output.json)
    if asked["dry_run"]:
        return run_dry(uri, asked, json_output=output.json)
    return run_measurement(uri, asked, output)


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


def _is_for_one(asked: Mapping[str, Any]) -> bool:
    return bool(asked["tune"] or asked["forget"] or asked["workload"] in DRIVER_WORKLOADS)
