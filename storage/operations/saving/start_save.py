"""Begins a save: objects of the state are touched on the calling thread, the rest runs on the
engine."""

from __future__ import annotations

import asyncio
import logging
import operator
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal, SupportsIndex

import torch

from ....core.forks.renewal import in_child, new_rlock
from ....core.garbage import collector_paused
from ....core.lru import LruCache
from ....core.spans import Recorder, recording, span
from ....drivers.contract import Driver
from ....drivers.registry import open_driver
from ....drivers.uri import Uri, join, parse
from ....errors import CoordinationError, DeadlineError, SaveError, UsageError
from ...arenas.messages import FlushEnd
from ...pipeline.base import Base
from ...pipeline.image_writer import Callbacks
from ...pipeline.patching import Publication
from ...ranks.calls import Call
from ...ranks.messages import Nothing
from ...ranks.process_group import current_rank, current_team, current_world
from ...ranks.team import Team
from ...runtime.engine import finish_before_exit, offload, start
from ...runtime.progress import ProgressReporter
from ...state.capture.lazy import LazyCapture
from ...state.device import Queued, beside, devices_of, refuse_capture, refuse_forked_child
from ...state.fingerprint import fingerprints
from ...state.flat_state import FlatState
from ...state.flattening.flatten import flatten
from ...state.flattening.placeholders import refuse_placeholders
from ..call_errors import announcing_errors, printed_step
from ..location import UriLike
from ..options import BUDGET_NBYTES, SaveOptions
from ..report import SaveReport
from ..rounds import MEET
from ..telemetry import (
    Operation,
    Outcome,
    announce,
    log_safely,
    log_saved,
    recorded_figures,
    recorder_of,
)
from .global_plan import GlobalPlans
from .handle import SaveHandle, StageHandle
from .keeper_request import ByKeeper, Keeping, Storage
from .keeper_save import make_agreement, run_memory_step
from .save import Saved, run_save
from .save_job import PLANS_KEPT, Admit, Deadline, SaveJob

LAZY_PAUSE_S = 0.002
"""Initial pause of a lazy save. Without it, the trainer, returning from the call, would wait for
the GIL held by our Python code, up to 5 ms each time."""

MEET_S = 5.0
"""Longest time that a rank with a new layout waits for the others. Training may wait with it."""

AGREED_S = 120.0
"""Time for which a step kept in memory waits for the other ranks."""

_log = logging.getLogger(__name__)
_in_flight: dict[str, Future[None]] = {}
_plans: GlobalPlans = LruCache(PLANS_KEPT)
_in_flight_lock = new_rlock()  # reentrant: a signal handler may save meanwhile


class Destination:
    """The driver of a save, closed at its end. ``by``: through keepers, if all have room.
    ``base``: where to borrow equal bytes. ``publication``: set for a version of a weight
    channel."""

    def __init__(
        self,
        uri: UriLike | Uri,
        storage_options: Mapping[str, object] | None,
        below: str = "",
        known: str = "",
        by: ByKeeper | None = None,
        base: Base | None = None,
        publication: Publication | None = None,
    ) -> None:
        """Open the destination, or prepare to. ``below``: the checkpoint's key below ``uri``.

        ``known``: the checkpoint's URI as the driver prints it, if known to be valid. Then the
        driver is opened on the engine's thread, because composing and opening a URI takes
        milliseconds, for which training would wait. Otherwise it is opened now; raises like
        :func:`join` and :func:`open_driver`.
        """
        self._place = (uri, below, storage_options or {})
        self._open = partial(_open, uri, below, current_world(), storage_options or {})
        self._driver = None
        self.uri = known
        self.by = by
        self.base = base
        self.publication = publication
        if not known:
            self._driver = self._open()
            self.uri = self._driver.uri

    def driver(self) -> Driver:
        """Return the driver. The first call may open it: that blocks."""
        if self._driver is None:
            self._driver = self._open()
        return self._driver

    def storage(self) -> Storage:
        """Return the destination for another process."""
        uri, below, options = self._place
        target = join(uri, below) if below else uri
        return Storage(str(target if isinstance(target, Uri) else parse(target)), options)

    async def close(self) -> None:
        """Close the driver if it was opened."""
        if self._driver is not None:
            await self._driver.close()


def begin_save(
    to: Destination,
    state: object,
    step: int | None,
    options: SaveOptions,
    *,
    after: Future[None] | None = None,
    admit: Admit | None = None,
    logs_failure: bool = True,
) -> tuple[SaveHandle, Future[None]]:
    """Begin a save and return immediately: its handle, and a future that completes when it has
    ended. Writing waits for the end of ``after``; ``admit``: see
    :data:`.save_job.Admit`.
    ``logs_failure``: log a failure, because the caller may never ask the handle for the outcome."""
    began_s = time.perf_counter()
    if step is None:
        step = step_of_state(state)
    call = Call("save", to.uri, printed_step(step))
    team = current_team(call, options.deadline_s, saving=True)
    recorder = recorder_of(options.telemetry, team.rank)
    save = _RunningSave(SaveHandle(to.uri), options, began_s, recorder, to.by, logs_failure)
    if to.publication is not None:
        save.operation = "push"
    with announcing_errors(team, to), recording(recorder):
        save.flatten(state, step, team.world, incremental=to.base is not None)
        save.job.after = after
        save.job.admit = admit
        save.job.base = to.base
        save.job.publication = to.publication
        if options.asynchronous:
            save.job.storage = to.storage
        with _in_flight_lock:
            before = _in_flight.get(to.uri)
            future = _in_flight[to.uri] = start(_run(to, team, save, before))
    future.add_done_callback(lambda done: _forget(to.uri, done))
    finish_before_exit()
    save.wait_in_call()
    return save.handle, future


def begin_memory_step(
    uri: str,
    state: object,
    step: int,
    options: SaveOptions,
    by: ByKeeper,
    *,
    agrees: bool,
    meets: Literal["never", "new", "always"],
) -> tuple[SaveHandle, Future[None], bool]:
    """Begin to keep a step in a keeper's memory and return immediately.

    Returns its handle, a future that completes when the step is agreed or has failed, and whether
    the layout is new. Involves neither storage nor other ranks, unless ``agrees``: then all ranks
    call this, and first agree on a plan. ``meets``: "new" agrees on a plan for a new layout, too,
    if all ranks have begun to do so at this step within :data:`MEET_S`. "always" also does for a
    known layout, since it may be new on other ranks. ``uri``: the name of the step.
    """
    began_s = time.perf_counter()
    rank = current_rank()
    recorder = recorder_of(options.telemetry, rank)
    team: Team | None = None
    if agrees:
        team = current_team(Call("keep", uri, step), options.deadline_s, saving=True)
    meeting: Team | None = None
    is_new = False
    save = _RunningSave(SaveHandle(uri), options, began_s, recorder, by, logs_failure=False)
    with recording(recorder), announcing_errors(team or Team()):
        world = current_world()
        save.flatten(state, step, world)
        layout_id = save.job.flat.layout_id
        if team is None and world > 1 and layout_id is not None:
            is_new = meets == "always" or _plans.get((layout_id, rank, world)) is None
        if is_new and meets != "never":
            # A thread of its own: a rank that meets nobody must not seem to be in another call than
            # the others.
            meeting = current_team(Call("meet", uri, step, "meet"), MEET_S, saving=True)
            team = current_team(Call("keep", uri, step), options.deadline_s, saving=True)
        future = start(_run_in_memory(rank, world, team, save, meeting))
    finish_before_exit()
    save.wait_in_call()
    return save.handle, future, is_new


@dataclass(eq=False)
class _RunningSave:
    """A save in progress. ``began_s``: when it was called; ``by``: its keeper, if it has one."""

    handle: SaveHandle
    _options: SaveOptions
    _began_s: float
    _recorder: Recorder | None
    _by: ByKeeper | None
    logs_failure: bool
    _captured_s: float = 0.0
    _sealed_s: float = 0.0
    _job: SaveJob | None = None
    operation: Operation = "save"

    def __post_init__(self) -> None:
        self.reporter = ProgressReporter(self._options.progress)

    @collector_paused()
    def flatten(
        self, state: object, step: int | None, world: int, *, incremental: bool = False
    ) -> None:
        """Flatten the state, and copy or watch data that may change before it is copied."""
        options = self._options
        self._deadline = Deadline.of(options.timeout_s)
        self._step = None if step is None else _checked_step(step)
        refuse_capture()
        with span("flatten"):
            flat = flatten(state, default=options.default)
        if options.allow_empty:
            flat.placeholders = {}
        elif world == 1:
            refuse_placeholders([flat.placeholders if flat.names else None])
        devices = devices_of(flat.locals)
        if devices:
            refuse_forked_child()
        lazy = LazyCapture(
            flat,
            prove=options.lazy == "prove",
            eager=not options.lazy,
            incremental=incremental and options.compression is None,
        )
        self._lazy = lazy
        self._add_stages(lazy.seen)
        keeping = None
        if self._by is not None:
            keeping = Keeping(self._by, self.handle, self._sealed)
        budget_nbytes = options.budget_nbytes
        if budget_nbytes is None and not options.asynchronous:
            budget_nbytes = BUDGET_NBYTES
        if budget_nbytes is not None:
            budget_nbytes = max(1, budget_nbytes - lazy.host.arena_nbytes)
        self._job = SaveJob(
            flat,
            self._step,
            budget_nbytes,
            lazy=lazy,
            callbacks=Callbacks(self._captured, self._sealed, wrote=self.reporter.report),
            digests=partial(_digests, flat, lazy, devices),
            plans=_plans,
            deadline=self._deadline,
            compression=options.compression,
            overwrite=options.overwrite,
            keeping=keeping,
            shares_budget=options.budget_nbytes is not None,
        )
        self._queued = Queued.now(devices)  # the work that devices have pending

    def _add_stages(self, seen: Callable[[], None]) -> None:
        handle = self.handle
        handle.captured = StageHandle("captured", seen)
        handle.durable = StageHandle("durable", seen)
        if self._by is None:
            return
        handle.agreed = StageHandle("agreed", seen)
        if self._by.local:
            handle.local = StageHandle("local", seen)
        if self._by.protects:
            handle.protected = StageHandle("protected", seen)
        if self._by.storage is None:
            handle.durable = StageHandle("durable", absent="this step stays in memory")

    def _captured(self) -> None:
        self._lazy.copied()
        self._captured_s = self._elapsed_s()
        self.handle.captured.reach()

    def _sealed(self) -> None:
        self._sealed_s = self._elapsed_s()
        self.handle.sealed.reach()

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def prepare(self, to: Destination, before: Future[None] | None, team: Team) -> Driver:
        """Wait until copying may begin, and for ``before``, a save to the same URI."""
        async with self._deadline.holds(self.handle.uri, team.rank):
            with span("wait"):
                await self.until_ready(before)
        return to.driver()

    async def until_ready(self, before: Future[None] | None) -> None:
        if not self._lazy.waits:
            await asyncio.sleep(LAZY_PAUSE_S)
        if before is not None:
            await asyncio.wait([asyncio.wrap_future(before)])
        if self._queued.events:
            await offload(self._queued.wait)

    @property
    def job(self) -> SaveJob:
        assert self._job is not None
        return self._job

    def wait_in_call(self) -> None:
        """Wait as long as the call of the save must not return."""
        if self._lazy.waits and not self._lazy.eager:
            self._lazy.wait_in_call()

    async def until_kept(self, rank: int) -> FlushEnd | None:
        """Wait for the keeper to finish: until durable, if the step goes to storage."""
        keeping = self.job.keeping
        assert keeping is not None
        self.job.release_state()
        async with self._deadline.holds(self.handle.uri, rank):
            if keeping.storage is not None:
                return await asyncio.wrap_future(keeping.ended)
            return await _agreed(keeping, rank)

    def stay_in_memory(self) -> None:
        _log.debug("step %s is in memory after %.3f s", self._step, self._elapsed_s())
        self.handle.agreed.reach()

    def succeed(self, saved: Saved) -> None:
        report = SaveReport(
            self.handle.uri,
            saved.attempt,
            saved.nbytes,
            captured_s=self._captured_s,
            sealed_s=self._sealed_s,
            durable_s=self._elapsed_s(),
            fenced_s=self._lazy.waited_s,
            stored_nbytes=saved.stored_nbytes,
            borrowed_nbytes=saved.borrowed_nbytes,
            base=saved.base,
            why_whole=saved.why_whole,
            **recorded_figures(self._recorder),
        )
        self.handle.report = report
        log_safely(log_saved, report, self._step, self.operation)
        uri, seconds = self.handle.uri, report.durable_s
        announce(Outcome(self.operation, uri, seconds, step=self._step, report=report))
        self._release_state()
        self.handle.durable.reach()

    def fail(self, error: BaseException) -> None:
        caller_went_on = not self._lazy.eager or self.handle.captured.done()
        try:
            if self.logs_failure and caller_went_on:
                _log.error("the %s to %s failed: %s", self.operation, self.handle.uri, error)
        finally:  # even if a user's log handler raises
            self.end_capture()
            self._release_state()
            _clear_frames(error)
            seconds = self._elapsed_s()
            uri = self.handle.uri
            announce(Outcome(self.operation, uri, seconds, step=self._step, error=error))
            self.handle.fail(error)

    def end_capture(self) -> None:
        self._lazy.end()

    def _release_state(self) -> None:
        """Drop all references to the state, even if the caller keeps the handle."""
        if self._job is not None:
            self._job.release_state()
            self._job = None


def _open(uri: UriLike | Uri, below: str, world: int, options: Mapping[str, object]) -> Driver:
    return open_driver(join(uri, below) if below else uri, world, **options)


def _digests(
    flat: FlatState, lazy: LazyCapture, devices: Sequence[torch.device], rows: Sequence[int]
) -> dict[int, bytes]:
    with beside(devices):
        return fingerprints(flat, rows, lazy)


async def _agreed(keeping: Keeping, rank: int) -> FlushEnd | None:
    """Wait for a step to be agreed. Raises DeadlineError if other ranks do not keep it."""
    try:
        async with asyncio.timeout(AGREED_S):
            return await asyncio.wrap_future(keeping.ended)
    except TimeoutError as error:
        raise DeadlineError(
            f"the step is in memory here, but not on all ranks within {AGREED_S:g} s", rank=rank
        ) from error


def _clear_frames(error: BaseException) -> None:
    seen = set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


async def _run(
    to: Destination, team: Team, save: _RunningSave, before: Future[None] | None
) -> None:
    try:
        try:
            driver = await save.prepare(to, before, team)
        except BaseException as error:
            await team.fail(error)
            raise
        async with save.reporter:
            saved = await run_save(driver, team, save.job)
        if saved is None:
            durable = await save.until_kept(team.rank)
            assert durable is not None
            saved = Saved(
                *(durable.attempt, durable.nbytes, durable.nbytes),
                *(durable.borrowed_nbytes, durable.base, durable.why_whole),
            )
        elif save.job.keeping is not None:
            for stage in (save.handle.agreed, save.handle.local, save.handle.protected):
                stage.fail(UsageError("this step went to storage without a keeper"))
        save.succeed(saved)
    except BaseException as error:
        save.fail(error)
        if not isinstance(error, Exception):
            raise
    finally:
        save.end_capture()
        await to.close()
        if before is not None:
            # It may end later: a save that waits for this one must wait for ``before`` too.
            await asyncio.wait([asyncio.wrap_future(before)])


async def _run_in_memory(
    rank: int, world: int, team: Team | None, save: _RunningSave, meeting: Team | None
) -> None:
    try:
        await save.until_ready(None)
        if meeting is not None:
            await _meet(meeting)
        if team is not None:
            await make_agreement(team, save.handle.uri, save.job)
        await run_memory_step(rank, world, save.job)
        await save.until_kept(rank)
        save.stay_in_memory()
    except BaseException as error:
        save.fail(error)
        if not isinstance(error, Exception):
            raise
    finally:
        save.end_capture()


async def _meet(team: Team) -> None:
    """Wait until all ranks have begun this step with a new layout. Raises SaveError if they do not
    in time."""

    async def met(statements: Sequence[Nothing]) -> Nothing:
        return Nothing()

    try:
        async with team.session():
            await team.round(MEET, Nothing(), met)
    except CoordinationError as error:
        raise SaveError(
            f"the layout of the state is new, but not on all ranks within {MEET_S:g} s",
            rank=team.rank,
            advice="Steps are kept again once the others notice, at the latest after the next save "
            "to storage.",
        ) from error


def _forget(uri: str, future: Future[None]) -> None:
    with _in_flight_lock:
        if _in_flight.get(uri) is future:
            del _in_flight[uri]


def _checked_step(step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise UsageError(f"step is {step!r}, which is not a whole number")
    return operator.index(step)


def step_of_state(state: object) -> int | None:
    """Return the default step to record: ``state["step"]`` if it is an int."""
    step = state.get("step") if isinstance(state, Mapping) else None
    return step if type(step) is int else None


in_child(_in_flight.clear)
in_child(_plans.clear)
