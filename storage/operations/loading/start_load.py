"""Runs a load: objects of the state are touched on the calling thread, the rest runs on the
engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from ....core.spans import recording, span
from ....drivers.contract import Driver
from ....drivers.registry import open_driver
from ...format.manifest import Manifest
from ...format.part import Part
from ...pipeline.image_reader import ImageReader
from ...protocol.current import read_manifest
from ...ranks.calls import Call
from ...ranks.process_group import current_rank, current_team
from ...ranks.team import Team
from ...runtime.engine import check_may_wait, run, start
from ...runtime.progress import ProgressReporter
from ...state.capture.lazy import fence
from ...state.flattening.flatten import flatten
from ..call_errors import announcing_errors, closing, printed_uri
from ..location import UriLike
from ..options import BUDGET_NBYTES, LoadOptions
from ..report import LoadReport
from ..rounds import Differences
from ..telemetry import Outcome, announce, log_loaded, log_safely, recorded_figures, recorder_of
from .load import LoadJob, finish, run_build, run_load


def load_state(
    uri: UriLike,
    into: object,
    options: LoadOptions,
    touched: set[str] | None = None,
    driver: Driver | None = None,
) -> object:
    """Load like :func:`~holdfast.load`; return the state.

    ``touched``: names that failed loads into the same state have begun to fill; this load adds its
    own. Raises MismatchError, in every mode and before anything is filled, if the checkpoint lacks
    any of them. ``driver``: the driver to read through, if it does not follow from ``uri``; it is
    closed.
    """
    began_s = time.perf_counter()
    check_may_wait()
    team: Team = Team()
    if into is not None:
        team = current_team(Call("load", printed_uri(uri)), options.deadline_s, saving=False)
    recorder = recorder_of(options.telemetry, team.rank if into is not None else current_rank())
    try:
        with recording(recorder):
            opened = _opened(uri, team, options, driver)
            printed, loaded = _load(opened, team, into, options, touched)
    except BaseException as error:
        seconds = time.perf_counter() - began_s
        announce(Outcome("load", printed_uri(uri), seconds, error=error))
        raise
    seconds = time.perf_counter() - began_s
    report = _report(printed, loaded, seconds, recorded_figures(recorder))
    log_safely(log_loaded, report)
    announce(Outcome("load", report.uri, report.seconds, report=report))
    if options.on_report is not None:
        options.on_report(report)
    return loaded.state


def _opened(uri: UriLike, team: Team, options: LoadOptions, driver: Driver | None) -> Driver:
    with announcing_errors(team):
        options.check()
        with span("wait"):
            fence()
        with span("open"):
            return driver or open_driver(uri, **(options.storage_options or {}))


def _load(
    driver: Driver, team: Team, into: object, options: LoadOptions, touched: set[str] | None
) -> tuple[str, _Loaded]:
    """Load; return the URI as the driver prints it, and the result."""
    part = None if options.only is None else Part(options.only)
    if into is None:
        loaded = _load_new(driver, part, options)
    else:
        loaded = _load_into(driver, team, part, into, options, touched)
    return driver.uri, loaded


class _Loaded(NamedTuple):
    state: object
    manifest: Manifest
    reader: ImageReader
    left: Differences
    """Names that were left out."""


def _report(uri: str, loaded: _Loaded, seconds: float, figures: dict[str, Any]) -> LoadReport:
    return LoadReport(
        uri=uri,
        attempt=loaded.manifest.attempt,
        bytes_wanted=loaded.reader.bytes_wanted,
        bytes_read=loaded.reader.bytes_read,
        seconds=seconds,
        step=loaded.manifest.step,
        bytes_received=loaded.reader.bytes_received,
        missing=loaded.left.missing,
        unexpected=loaded.left.unexpected,
        missing_count=loaded.left.missing_count,
        unexpected_count=loaded.left.unexpected_count,
        **figures,
    )


def _load_new(driver: Driver, part: Part | None, options: LoadOptions) -> _Loaded:
    rank = current_rank()

    async def build(reporter: ProgressReporter) -> tuple[object, Manifest, ImageReader]:
        async with closing(driver):
            return await run_build(
                driver, rank, options.budget_nbytes or BUDGET_NBYTES, reporter.report, part
            )

    with ProgressReporter(options.progress) as reporter:
        state, manifest, reader = run(build(reporter))
    return _Loaded(state, manifest, reader, Differences())


def _load_into(
    driver: Driver,
    team: Team,
    part: Part | None,
    into: object,
    options: LoadOptions,
    touched: set[str] | None,
) -> _Loaded:
    """Fill ``into``, which corresponds to the whole checkpoint or to ``part``, on every rank."""
    wrapped = into if part is None else part.around(into)

    async def fill(job: LoadJob) -> tuple[Manifest, ImageReader]:
        async with closing(driver):
            return await run_load(driver, team, job)

    with ProgressReporter(options.progress) as reporter:
        with announcing_errors(team, driver), _reading_early(driver, team) as early:
            with span("flatten"):
                flat = flatten(wrapped, loading=True)
            job = LoadJob(
                flat,
                part=part,
                strict=options.strict,
                cast=options.cast,
                budget_nbytes=options.budget_nbytes or BUDGET_NBYTES,
                shares_budget=options.budget_nbytes is not None,
                exchange=options.exchange,
                progress=reporter.report,
                touched=set() if touched is None else touched,
                early=early,
            )
        manifest, reader = run(fill(job))
    with span("finish"):
        state = finish(job, manifest, team.rank)
    if any(subtree.parent < 0 for subtree in job.flat.subtrees):
        state = into  # it is itself an object with a state
    if part is not None:
        state = part.within(state)
    return _Loaded(state, manifest, reader, job.left)


@contextlib.contextmanager
def _reading_early(driver: Driver, team: Team) -> Iterator[Future[tuple[Manifest, bytes]] | None]:
    """Read the manifest while the body flattens; None if another rank does."""
    if team.world > 1:
        yield None
        return
    early = start(read_manifest(driver))
    try:
        yield early
    except BaseException:
        early.cancel()
        raise
