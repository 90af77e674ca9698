"""How a save begins: in the caller's thread what touches the state's objects, all else on the
engine's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, TypeVar

from ...core.forks.renewal import in_child, new_lock
from ...core.lru import LruCache
from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...drivers.uri import Uri, join, parse, redact
from ...errors import HoldfastError, UsageError
from ..format.packed import Compression
from ..pipeline.image_writer import Progress
from ..ranks.calls import Call
from ..ranks.process_group import current_team, current_world
from ..ranks.team import Team
from ..runtime.engine import offload, start
from ..runtime.progress import ProgressCallback, ProgressReporter
from ..state.device import Queued, beside, devices_of
from ..state.fingerprint import fingerprints
from ..state.flat_state import FlatState
from ..state.flatten import flatten
from ..state.lazy import LazyCapture
from ..state.placeholders import refuse_placeholders, reported_placeholders
from .deadline import Deadline
from .global_plan import Accords
from .handle import SaveHandle, StageHandle
from .report import SaveReport
from .save import ACCORDS, SaveJob, run_save

__all__ = [
    "Destination",
    "Lazy",
    "UriLike",
    "begin_save",
    "closing",
    "named",
    "step_of_state",
    "telling",
    "telling_of",
]

OUT_OF_THE_CALL_S = 0.002
"""How long a lazy save lies still at first. What it does in Python would keep the trainer, on its
way out of the call, waiting for the GIL, up to 5 ms each time."""

T = TypeVar("T")
Lazy = bool | Literal["prove"]
"""Whether training goes on while the state is copied; ``prove``: and digests tell that nothing
changed meanwhile."""
UriLike = str | os.PathLike[str]

_log = logging.getLogger(__name__)
_in_flight: dict[str, Future[None]] = {}
_accords: Accords = LruCache(ACCORDS)
_in_flight_lock = new_lock()


class Destination:
    """Where a save goes: a driver, which is closed when the save has ended."""

    def __init__(
        self,
        uri: UriLike | Uri,
        storage_options: Mapping[str, object] | None,
        below: str = "",
        known: str = "",
    ) -> None:
        """``below``: the key of what is meant below ``uri``. ``known``: the URI of that as the
        driver prints it, where that is known, and the URI to be right. Then it is opened on the
        engine's thread: to put a URI together, and to open it, takes some milliseconds, for which
        training would wait. Else now; raises as :func:`join` and :func:`open_driver`."""
        self._opens = partial(_opened, uri, below, current_world(), storage_options or {})
        self._driver = None if known else self._opens()
        self.uri = self._driver.uri if self._driver else known

    def driver(self) -> Driver:
        """The driver."""
        if self._driver is None:
            self._driver = self._opens()
        return self._driver

    async def close(self) -> None:
        """Close it, if it was opened."""
        if self._driver is not None:
            await self._driver.close()


def begin_save(
    to: Destination,
    state: Any,
    step: int | None,
    budget_nbytes: int | None,
    deadline_s: float,
    *,
    lazy: Lazy,
    timeout_s: float | None,
    after: Future[None] | None = None,
    compression: Compression | None = None,
    allow_empty: bool = False,
    admit: Callable[[], Awaitable[str]] | None = None,
    asks: bool = False,
    progress: ProgressCallback | None = None,
) -> tuple[SaveHandle, Future[None]]:
    """Begin a save, and wait for nothing; return its handle, and a future that is done when it has
    ended, well or not. The writing of it waits for the end of ``after``; ``admit``: see
    :class:`SaveJob`. ``asks``: the caller asks the handle what has become of it, so that a failure
    is not logged."""
    began_s = time.perf_counter()
    step = step_of_state(state) if step is None else step
    team = current_team(Call("save", to.uri, shown_step(step)), deadline_s, saving=True)
    with telling(team, to):
        deadline = Deadline.of(timeout_s)
        step = None if step is None else _checked_step(step)
        flat = flatten(state)
        if allow_empty:
            flat.placeholders = {}
        elif team.world == 1:
            refuse_placeholders([reported_placeholders(flat)])
        capture = LazyCapture(flat, prove=lazy == "prove") if lazy else None
        job = SaveJob(
            flat,
            step,
            budget_nbytes,
            lazy=capture,
            after=after,
            accords=_accords,
            deadline=deadline,
            compression=compression,
        )
        job.admit = admit
        save = _Save(
            job, _handle(to.uri, capture), began_s, asks=asks, reporter=ProgressReporter(progress)
        )
        with _in_flight_lock:
            before = _in_flight.get(to.uri)
            future = _in_flight[to.uri] = start(_run(to, team, save, before))
    future.add_done_callback(lambda done: _forget(to.uri, done))
    if capture is not None and capture.waits:
        capture.wait_in_call()
    return save.handle, future


def _opened(uri: UriLike | Uri, below: str, world: int, options: Mapping[str, object]) -> Driver:
    return open_driver(join(uri, below) if below else uri, world, **options)


def _handle(uri: str, lazy: LazyCapture | None) -> SaveHandle:
    if lazy is None:
        return SaveHandle(uri)
    seen = lazy.seen
    return SaveHandle(
        uri, captured=StageHandle("captured", seen), durable=StageHandle("durable", seen)
    )


class _Save:
    """One save on its way. ``queued``: what devices had to do when it was called."""

    def __init__(
        self,
        job: SaveJob,
        handle: SaveHandle,
        began_s: float,
        *,
        asks: bool,
        reporter: ProgressReporter,
    ) -> None:
        self._job: SaveJob | None = job
        self.handle = handle
        self._began_s = began_s
        self._deadline = job.deadline
        self.lazy = job.lazy
        self.devices = devices_of(job.flat.locals)
        self.queued = Queued.now(self.devices)
        self._reached: dict[str, float] = {}
        self.asks = asks
        self.reporter = reporter
        job.progress = Progress(
            self._captured, lambda: self._reach("sealed"), wrote=reporter.report
        )
        job.digests = self._digests

    async def begins(self, to: Destination, before: Future[None] | None, team: Team) -> Driver:
        """The driver, when ``before``, to the same URI, has ended, and what is to be done before a
        byte is copied has been."""
        async with self._deadline.holds(self.handle.uri, team.rank):
            if self.lazy is not None and not self.lazy.waits:
                await asyncio.sleep(OUT_OF_THE_CALL_S)
            if before is not None:
                await asyncio.wait([asyncio.wrap_future(before)])
            if self.queued.events:
                await offload(self.queued.wait)
        return to.driver()

    def taken(self) -> SaveJob:
        """What is to be saved. Whoever has it holds the state."""
        assert self._job is not None
        return self._job

    def let_go(self, error: BaseException | None = None) -> None:
        """Hold nothing of the state any more, though the handle be kept: nor in the frames that
        ``error`` came through."""
        if self._job is not None:
            self._job.flat = FlatState()
            self._job = None
        seen = set[int]()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__

    def durable(self, attempt: str, nbytes: int, stored_nbytes: int) -> None:
        """It is committed."""
        times = (
            self._reached["captured"],
            self._reached["sealed"],
            time.perf_counter() - self._began_s,
        )
        fenced_s = 0.0 if self.lazy is None else self.lazy.waited_s
        self.handle.report = SaveReport(
            self.handle.uri, attempt, nbytes, *times, fenced_s, stored_nbytes
        )
        self.let_go()
        self._reach("durable")

    def _digests(self, rows: Sequence[int]) -> dict[int, bytes]:
        with beside(self.devices):
            return fingerprints(self.taken().flat, rows, self.lazy)

    def _captured(self) -> None:
        if self.lazy is not None:
            self.lazy.copied()
        self._reach("captured")

    def _reach(self, name: str) -> None:
        self._reached[name] = time.perf_counter() - self._began_s
        self.handle.reach(name)


async def _run(to: Destination, team: Team, save: _Save, before: Future[None] | None) -> None:
    """Perform a save; its outcome, good or bad, goes to the handle."""
    handle = save.handle
    try:
        try:
            driver = await save.begins(to, before, team)
        except BaseException as error:
            await team.fail(error)
            raise
        async with save.reporter:
            saved = await run_save(driver, team, save.taken())
        save.durable(*saved)
    except BaseException as error:
        let_go = save.lazy is not None or handle.captured.done()
        try:
            if let_go and not save.asks:  # the caller may have gone on, and never ask
                _log.error("the save to %s failed: %s", handle.uri, error)
        finally:  # also where a handler of the user's raises
            if save.lazy is not None:
                save.lazy.end()
            save.let_go(error)
            handle.fail(error)
        if not isinstance(error, Exception):
            raise
    finally:
        if save.lazy is not None:
            save.lazy.end()
        await to.close()
        if (
            before is not None
        ):  # it may be late: whoever comes next waits for this one, and so for that one
            await asyncio.wait([asyncio.wrap_future(before)])


def _forget(uri: str, future: Future[None]) -> None:
    with _in_flight_lock:
        if _in_flight.get(uri) is future:
            del _in_flight[uri]


@contextlib.contextmanager
def telling(team: Team, to: Driver | Destination | None = None) -> Iterator[None]:
    """Where the body raises, tell the other ranks at once rather than let them wait for this one,
    and close ``to``."""
    try:
        yield
    except BaseException as error:
        start(_give_up(team, error, to)).result()
        raise


@contextlib.contextmanager
def telling_of(kind: str, uri: UriLike, step: Any, deadline_s: float) -> Iterator[None]:
    """:func:`telling`, for what comes before a call has a team: an error that only this rank sees
    must not make the others wait, nor any rank miss the next call."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(UsageError):
            team = current_team(Call(kind, named(uri), shown_step(step)), deadline_s, saving=True)
            start(team.fail(error)).result()
        raise


def named(uri: UriLike | Uri) -> str:
    """``uri`` as its driver prints it, whether there is such a driver or not."""
    try:
        parsed = uri if isinstance(uri, Uri) else parse(uri)
        return Uri(parsed.scheme, parsed.location).redacted
    except (HoldfastError, TypeError, ValueError):
        return redact(str(uri))


def shown_step(step: Any) -> int | None:
    """The step that a call is about, where it is a number at all."""
    try:
        return None if step is None else operator.index(step)
    except TypeError:
        return None


async def _give_up(team: Team, error: BaseException, to: Driver | Destination | None) -> None:
    try:
        await team.fail(error)
    finally:
        if to is not None:
            await to.close()


async def closing(to: Driver | Destination, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; then ``to`` is closed."""
    try:
        return await work
    finally:
        await to.close()


def _checked_step(step: Any) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise UsageError(f"step is {step!r}, which is no whole number")
    return operator.index(step)


def step_of_state(state: Any) -> int | None:
    """What is recorded where the caller names no step: ``state["step"]``, if that is an int."""
    step = state.get("step") if isinstance(state, Mapping) else None
    return step if type(step) is int else None


in_child(_in_flight.clear)
in_child(_accords.clear)
