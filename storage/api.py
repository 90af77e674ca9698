"""The API: save, async_save, load. Each is one call, on every rank alike."""

from __future__ import annotations

import asyncio
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from ..drivers.contract import Driver
from ..drivers.registry import open_driver
from ..errors import UsageError
from ..planner.image import CHUNK_NBYTES
from .buffers import host_pool
from .capture.fingerprint import fingerprints
from .capture.state import flatten
from .engine import start
from .frameworks.process_group import current_rank, current_team, current_world
from .handle import SaveHandle
from .image_writer import Progress
from .load import LoadJob, finish, run_build, run_load
from .report import LoadReport, SaveReport
from .save import SaveJob, run_save
from .team import Team

__all__ = ["BUDGET_NBYTES", "DEADLINE_S", "async_save", "load", "release_memory", "save"]

BUDGET_NBYTES = 512 << 20
DEADLINE_S = 300.0
_BUDGET_MIN_NBYTES = 32 << 20

T = TypeVar("T")

_log = logging.getLogger(__name__)
_in_flight: dict[str, Future[None]] = {}
_in_flight_lock = threading.Lock()

UriLike = str | os.PathLike[str]


def save(
    uri: UriLike,
    state: Any,
    *,
    step: int | None = None,
    budget_nbytes: int = BUDGET_NBYTES,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, object] | None = None,
) -> SaveReport:
    """Save ``state`` as the checkpoint ``uri``; return when it is committed, on every rank.

    ``state`` is a nested dict (or list, tuple) of tensors, DTensors, arrays, numbers, strings, bytes, and objects with a
    state: modules, optimizers, schedulers, random generators. In a distributed job every rank calls this with its own
    part; plain tensors that are equal on all ranks are stored once, others per rank. ``step`` is recorded with the
    checkpoint (default: ``state["step"]`` if that is an int). Extra host memory stays within ``budget_nbytes``.
    ``storage_options`` are options of the storage, by name; those in the URI win over them.

    Atomic: a checkpoint that was at ``uri`` is replaced whole, or, after any failure, untouched. Raises StateError for
    what cannot be saved and UriError, both before any I/O; SaveError, StorageError; RankFailedError and DeadlineError
    when another rank fails, or shows no sign of life for ``deadline_s`` seconds.
    """
    handle, future = _start_save(uri, state, step, _checked_budget(budget_nbytes), deadline_s, storage_options)
    try:
        handle.wait()
    except KeyboardInterrupt:
        future.cancel()
        raise
    assert handle.report is not None
    return handle.report


def async_save(
    uri: UriLike,
    state: Any,
    *,
    step: int | None = None,
    budget_nbytes: int | None = None,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, object] | None = None,
) -> SaveHandle:
    """Begin to save ``state`` as the checkpoint ``uri``; return when every byte of it is copied to host memory.

    The state may change as soon as this returns. With ``budget_nbytes`` smaller than this rank's image, copying runs at
    the pace of the storage, and this returns accordingly later; None keeps room for the whole image, also between saves
    (see :func:`release_memory`). The rest as in :func:`save`; what fails later is raised by the handle's ``wait()``, and
    logged. A save to a URI to which this process is still saving waits for that one first.
    """
    if budget_nbytes is not None:
        _checked_budget(budget_nbytes)
    handle, _future = _start_save(uri, state, step, budget_nbytes, deadline_s, storage_options)
    handle.captured.wait()
    return handle


def load(
    uri: UriLike,
    into: Any = None,
    *,
    strict: bool = True,
    cast: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, object] | None = None,
    on_report: Callable[[LoadReport], None] | None = None,
) -> Any:
    """Load the checkpoint ``uri`` into ``into``, whatever layouts the two have; return ``into``.

    Tensors, DTensors and arrays are filled in place; small values are replaced in their containers; modules, optimizers
    and other objects get their state back. Without ``into``, build and return the whole state, on the CPU, as this rank
    saved it. In a distributed job every rank calls this with its own part.

    ``strict``: what is in the state or in the checkpoint alone, and what differs in shape or dtype, is raised as one
    MismatchError that lists it all, before anything is read. ``strict=False`` fills what both have; shapes and dtypes
    must fit all the same, but ``cast=True`` converts dtypes. Every byte is verified before it is used.
    ``storage_options`` as in :func:`save`. ``on_report`` is told what was read, on this rank. Raises
    NotACheckpointError, DamagedError, StorageError, RankFailedError, DeadlineError; after those, tensors may be partly
    filled.
    """
    began_s = time.perf_counter()
    budget_nbytes = _checked_budget(budget_nbytes)
    driver = open_driver(uri, **(storage_options or {}))
    if into is None:
        root, manifest, reader = start(_closing(driver, run_build(driver, current_rank(), budget_nbytes))).result()
    else:
        team = current_team(deadline_s, saving=False)
        flat = _told(team, driver, flatten, into, loading=True)
        job = LoadJob(flat, strict=strict, cast=cast, budget_nbytes=budget_nbytes)
        manifest, reader = start(_closing(driver, run_load(driver, team, job))).result()
        root = finish(job, manifest, team.rank)
        root = into if any(s.parent < 0 for s in flat.subtrees) else root  # into is itself an object with a state
    if on_report is not None:
        seconds = time.perf_counter() - began_s
        on_report(LoadReport(driver.uri, manifest.attempt, reader.bytes_wanted, reader.bytes_read, seconds))
    return root


def release_memory() -> None:
    """Give back the host memory that asynchronous saves keep for the next one."""
    host_pool(CHUNK_NBYTES).release()


def _start_save(
    uri: UriLike,
    state: Any,
    step: int | None,
    budget_nbytes: int | None,
    deadline_s: float,
    storage_options: Mapping[str, object] | None,
) -> tuple[SaveHandle, Future[None]]:
    began_s = time.perf_counter()
    step = None if step is None else _checked_step(step)
    driver = open_driver(uri, current_world(), **(storage_options or {}))
    team = current_team(deadline_s, saving=True)
    flat = _told(team, driver, flatten, state)
    plain = _told(team, driver, fingerprints, flat, team.world) if team.world > 1 else {}
    job = SaveJob(flat, _step_of(state) if step is None else step, plain, budget_nbytes)
    handle = SaveHandle(driver.uri)
    with _in_flight_lock:
        before = _in_flight.get(driver.uri)
        future = _in_flight[driver.uri] = start(_run(driver, team, job, handle, began_s, before))
    future.add_done_callback(lambda done: _forget(driver.uri, done))
    return handle, future


async def _run(
    driver: Driver, team: Team, job: SaveJob, handle: SaveHandle, began_s: float, before: Future[None] | None
) -> None:
    """Perform a save; its outcome, good or bad, goes to the handle."""
    reached: dict[str, float] = {}

    def reach(name: str) -> None:
        reached[name] = time.perf_counter() - began_s
        handle.reach(name)

    job.progress = Progress(lambda: reach("captured"), lambda: reach("sealed"))
    try:
        if before is not None:
            await asyncio.wait([asyncio.wrap_future(before)])
        attempt, nbytes = await run_save(driver, team, job)
        durable_s = time.perf_counter() - began_s
        handle.report = SaveReport(handle.uri, attempt, nbytes, reached["captured"], reached["sealed"], durable_s)
        reach("durable")
    except BaseException as error:
        if handle.captured.done():  # the caller may have gone on, and never ask
            _log.error("the save to %s failed: %s", handle.uri, error)
        handle.fail(error)
        if not isinstance(error, Exception):
            raise
    finally:
        await driver.close()


def _forget(uri: str, future: Future[None]) -> None:
    with _in_flight_lock:
        if _in_flight.get(uri) is future:
            del _in_flight[uri]


def _told(team: Team, driver: Driver, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call ``function``; where it raises, tell the other ranks at once rather than let them wait for this one."""
    try:
        return function(*args, **options)
    except BaseException as error:
        start(_closing(driver, _give_up(team, error))).result()
        raise


async def _give_up(team: Team, error: BaseException) -> None:
    async with team.session():
        await team.fail(error)


async def _closing(driver: Driver, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    finally:
        await driver.close()


def _checked_step(step: Any) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise UsageError(f"step is {step!r}, which is no whole number")
    return operator.index(step)


def _step_of(state: Any) -> int | None:
    step = state.get("step") if isinstance(state, Mapping) else None
    return step if type(step) is int else None


def _checked_budget(budget_nbytes: int) -> int:
    if budget_nbytes < _BUDGET_MIN_NBYTES:
        raise UsageError(
            f"a budget of {budget_nbytes:,} bytes is too small", advice=f"Give at least {_BUDGET_MIN_NBYTES:,}."
        )
    return budget_nbytes


os.register_at_fork(after_in_child=_in_flight.clear)
