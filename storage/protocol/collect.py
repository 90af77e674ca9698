"""Garbage collection: deletes attempts that can never become the checkpoint, and unfinished
files of killed savers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.aio import side_by_side
from ...drivers.contract import Driver
from ...errors import DamagedError, NotFoundError, StorageError
from ..format.manifest import MANIFEST_KEY
from . import limits
from .attempt import (
    ABORT_RECORD,
    Attempt,
    AttemptFiles,
    check_marker,
    delete_attempt,
    list_attempts,
    probe,
    put_abort_record,
    time_of_marker_s,
)
from .current import current_attempt
from .prune_lock import PRUNING_KEY, locked_since_s

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Survey:
    """All attempts, as seen at one time. ``now_s``: the storage's time. ``current``: the id of
    the attempt that is the checkpoint. ``grace_s``: how long an attempt with a commit record is
    spared."""

    now_s: float
    current: str | None
    grace_s: float
    files: Mapping[Attempt, AttemptFiles]


async def survey_attempts(driver: Driver, attempt: Attempt) -> Survey:
    """List all attempts. ``attempt``: the caller's own, whose marker tells the storage's time. The
    requests may be answered in any order: an attempt that changes in between has a record, which is
    read again before anything is deleted, or is too young to be deleted."""
    now_s, (current, grace_s), files = await side_by_side(
        time_of_marker_s(driver, attempt), _current_and_grace_s(driver), list_attempts(driver)
    )
    return Survey(now_s, current, grace_s, files)


async def _current_and_grace_s(driver: Driver) -> tuple[str | None, float]:
    try:
        return await current_attempt(driver), limits.GRACE_S
    except DamagedError:
        # The manifest may have named any attempt with a commit record, and its data may be
        # salvageable, so all of them are kept.
        return None, float("inf")


async def collect_others(
    driver: Driver,
    attempt: Attempt,
    survey: Survey,
    *,
    spare: Attempt | None = None,
    idle_s: float = float("-inf"),
) -> None:
    """Abort and delete attempts that wrote nothing for ``idle_s`` seconds, except those that may
    still become the checkpoint. The default disregards idle time.

    Never deletes ``attempt`` (the caller's own), ``spare`` and the current checkpoint. Raises
    StorageError, but only logs a permanent one for an attempt idle for over ``limits.IDLE_S``.
    """
    for other, files in survey.files.items():
        if other in (attempt, spare) or other.id == survey.current:
            continue
        # Some storages give whole seconds for one object and fractions in a list: not below zero.
        silent_s = max(0.0, survey.now_s - files.written_s)
        if silent_s < idle_s:
            continue
        try:
            await _collect_one(driver, other, survey, silent_s)
        except StorageError as error:
            if error.temporary or silent_s <= limits.IDLE_S:
                raise  # it may be alive, and commit later
            _log.warning("leftovers of attempt %s cannot be deleted: %s", other.id, error)


async def _collect_one(driver: Driver, attempt: Attempt, survey: Survey, silent_s: float) -> None:
    """Delete an attempt that can never become the checkpoint."""
    if driver.traits.exclusive_is_atomic:
        has_record = survey.files[attempt].has_record
        await abort_and_delete(driver, attempt, has_record, survey.now_s, survey.grace_s)
    elif silent_s > max(survey.grace_s, limits.IDLE_S):
        await delete_attempt(driver, attempt)


async def abort_and_delete(
    driver: Driver, attempt: Attempt, has_record: bool, now_s: float, grace_s: float
) -> None:
    """Abort an attempt unless it has a record, and delete it if it can never become the checkpoint.

    That is certain if it is aborted, or if it has a commit record older than ``grace_s`` seconds
    without being the checkpoint. ``has_record``: it has a commit or abort record already.
    ``now_s``: the storage's time.
    """
    if not has_record:
        await put_abort_record(driver, attempt.record_key)
    try:
        is_aborted = await driver.get(attempt.record_key) == ABORT_RECORD
        age_s = now_s - (await driver.stat(attempt.record_key)).modified_s
    except NotFoundError:
        return  # another collector was faster
    if is_aborted or age_s > grace_s:
        await delete_attempt(driver, attempt)


async def collect(driver: Driver, idle_s: float) -> None:
    """Delete the leftovers that a new save would delete, except for attempts that may be alive. An
    attempt counts as dead after ``idle_s`` seconds without a write. Also deletes a stale prune
    lock. Raises StorageError, SupersededError and UnsupportedFormatError."""
    async with probe(driver) as attempt:
        survey = await survey_attempts(driver, attempt)
        await collect_others(driver, attempt, survey, idle_s=idle_s)
        await _delete_stale_lock(driver, attempt)
        await sweep(driver)


async def _delete_stale_lock(driver: Driver, attempt: Attempt) -> None:
    """Delete a prune lock older than ``limits.GRACE_S``, by the storage's clock."""
    since_s = await locked_since_s(driver)
    if since_s is None:
        return
    now_s = (await check_marker(driver, attempt)).modified_s
    if now_s - since_s > limits.GRACE_S:
        await driver.delete(PRUNING_KEY)


async def give_up(driver: Driver, attempt: Attempt) -> None:
    """Delete a failed attempt, within a time limit, because the caller waits for the result."""
    try:
        async with asyncio.timeout(limits.CLEAN_UP_S):
            if await delete_attempt(driver, attempt):
                await sweep(driver)  # also the folder of all attempts, if this was the only one
    except TimeoutError:
        _log.warning(
            "leftovers of attempt %s stay until the next save: %g s were not enough",
            attempt.id,
            limits.CLEAN_UP_S,
        )


async def sweep(driver: Driver, limit_s: float | None = None) -> None:
    """Delete unfinished files of killed savers, within ``limit_s`` seconds. Logs errors."""
    try:
        async with asyncio.timeout(limit_s):
            await driver.sweep("data")
            await driver.sweep(MANIFEST_KEY)
    except StorageError as error:
        _log.warning("unfinished files stay until the next save: %s", error)
    except TimeoutError:
        _log.warning("unfinished files stay until the next save: %s s were not enough", limit_s)
