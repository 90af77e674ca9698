"""How a save begins: in the caller's thread what touches the state's objects, all else on the engine's."""

from __future__ import annotations

import asyncio
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, TypeVar

from ..drivers.contract import Driver
from ..drivers.registry import open_driver
from ..drivers.uri import Uri, join
from ..errors import UsageError
from .accord import Accords
from .capture.device import Queued, beside, devices_of
from .capture.fingerprint import fingerprints
from .capture.kept import Kept
from .capture.lazy import LazyCapture
from .capture.state import FlatState, flatten
from .deadline import Deadline
from .format.packed import Compression
from .frameworks.process_group import current_team, current_world
from .handle import SaveHandle, StageHandle
from .pipeline.engine import offload, start
from .pipeline.image_writer import Progress
from .ranks.team import Team
from .report import SaveReport
from .save import ACCORDS, SaveJob, run_save

__all__ = ["Destination", "Lazy", "UriLike", "begin_save", "closing", "told"]

OUT_OF_THE_CALL_S = 0.002
"""How long a lazy save lies still at first. What it does in Python would keep the trainer, on its way out of the call,
waiting for the GIL, up to 5 ms each time."""

T = TypeVar("T")
Lazy = bool | Literal["prove"]
"""Whether training goes on while the state is copied; ``prove``: and digests tell that nothing changed meanwhile."""
UriLike = str | os.PathLike[str]

_log = logging.getLogger(__name__)
_in_flight: dict[str, Future[None]] = {}
_accords: Accords = Kept(ACCORDS)
_in_flight_lock = threading.Lock()


class Destination:
    """Where a save goes: a driver, which is closed when the save has ended."""

    def __init__(
        self, uri: UriLike | Uri, storage_options: Mapping[str, object] | None, below: str = "", known: str = ""
    ) -> None:
        """``below``: the key of what is meant below ``uri``. ``known``: the URI of that as the driver prints it, where that
        is known, and the URI to be right. Then it is opened on the engine's thread: to put a URI together, and to open it,
        takes some milliseconds, for which training would wait. Else now; raises as :func:`join` and :func:`open_driver`."""
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
) -> tuple[SaveHandle, Future[None]]:
    """Begin a save, and wait for nothing; return its handle, and a future that is done when it has ended, well or not.
    The writing of it waits for the end of ``after``."""
    began_s, deadline = time.perf_counter(), Deadline.of(timeout_s)
    step = None if step is None else _checked_step(step)
    team = current_team(deadline_s, saving=True)
    flat = told(team, to, flatten, state)
    if lazy:
        flat.lazy = told(team, to, LazyCapture, flat, prove=lazy == "prove")
    step = _step_of(state) if step is None else step
    job = SaveJob(flat, step, budget_nbytes, after=after, accords=_accords, deadline=deadline, compression=compression)
    save = _Save(job, _handle(to.uri, flat), began_s)
    with _in_flight_lock:
        before = _in_flight.get(to.uri)
        future = _in_flight[to.uri] = start(_run(to, team, save, before))
    future.add_done_callback(lambda done: _forget(to.uri, done))
    return save.handle, future


def _opened(uri: UriLike | Uri, below: str, world: int, options: Mapping[str, object]) -> Driver:
    return open_driver(join(uri, below) if below else uri, world, **options)


def _handle(uri: str, flat: FlatState) -> SaveHandle:
    if flat.lazy is None:
        return SaveHandle(uri)
    return SaveHandle(uri, captured=StageHandle("captured", flat.lazy.tell))


class _Save:
    """One save on its way. ``queued``: what devices had to do when it was called."""

    def __init__(self, job: SaveJob, handle: SaveHandle, began_s: float) -> None:
        self.job, self.handle, self._began_s = job, handle, began_s
        self.lazy = job.flat.lazy
        self.devices = devices_of(job.flat.locals)
        self.queued = Queued.now(self.devices)
        self._reached: dict[str, float] = {}
        job.progress = Progress(self._captured, lambda: self._reach("sealed"))
        job.digests = self._digests

    async def begins(self, to: Destination, before: Future[None] | None, team: Team) -> Driver:
        """The driver, when ``before``, to the same URI, has ended, and what is to be done before a byte is copied has
        been."""
        async with self.job.deadline.holds(self.handle.uri, team.rank):
            if self.lazy is not None:
                await asyncio.sleep(OUT_OF_THE_CALL_S)
            if before is not None:
                await asyncio.wait([asyncio.wrap_future(before)])
            if self.queued.events:
                await offload(self.queued.wait)
        return to.driver()

    def durable(self, attempt: str, nbytes: int, stored_nbytes: int) -> None:
        """It is committed."""
        times = (self._reached["captured"], self._reached["sealed"], time.perf_counter() - self._began_s)
        fenced_s = 0.0 if self.lazy is None else self.lazy.waited_s
        self.handle.report = SaveReport(self.handle.uri, attempt, nbytes, *times, fenced_s, stored_nbytes)
        self._reach("durable")

    def _digests(self, rows: Sequence[int]) -> dict[int, bytes]:
        with beside(self.devices):
            return fingerprints(self.job.flat, rows)

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
        driver = await _told_later(team, save.begins(to, before, team))
        save.durable(*await run_save(driver, team, save.job))
    except BaseException as error:
        if handle.captured.done() or save.lazy is not None:  # the caller may have gone on, and never ask
            _log.error("the save to %s failed: %s", handle.uri, error)
        handle.fail(error)
        if not isinstance(error, Exception):
            raise
    finally:
        if save.lazy is not None:
            save.lazy.end()
        await to.close()
        if before is not None:  # it may be late: whoever comes next waits for this one, and so for that one
            await asyncio.wait([asyncio.wrap_future(before)])


def _forget(uri: str, future: Future[None]) -> None:
    with _in_flight_lock:
        if _in_flight.get(uri) is future:
            del _in_flight[uri]


def told(team: Team, to: Driver | Destination, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call ``function``; where it raises, tell the other ranks at once rather than let them wait for this one, and close
    ``to``."""
    try:
        return function(*args, **options)
    except BaseException as error:
        start(closing(to, _give_up(team, error))).result()
        raise


async def _told_later(team: Team, work: Coroutine[Any, Any, T]) -> T:
    """As :func:`told`, on the engine's loop."""
    try:
        return await work
    except BaseException as error:
        await _give_up(team, error)
        raise


async def _give_up(team: Team, error: BaseException) -> None:
    async with team.session():
        await team.fail(error)


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


def _step_of(state: Any) -> int | None:
    step = state.get("step") if isinstance(state, Mapping) else None
    return step if type(step) is int else None


os.register_at_fork(after_in_child=_in_flight.clear)
