"""The prune lock: an object that exists while a process deletes a checkpoint.

It exists from before the last check of the manifest until after the deletion. No common storage can
delete an object on the condition that it is unchanged. Therefore a process that puts a manifest
waits while the lock exists; ``docs/explanation/consistency.md`` argues why that suffices.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable

from ...drivers.contract import Driver, ObjectInfo
from ...errors import AccessError, ExistsError, NotFoundError, StorageDownError
from ..format.manifest import MANIFEST_KEY
from . import limits
from .attempt import Attempt, put_once, storage_time_s
from .current import current_attempt

PRUNING_KEY = "data/pruning"
_LOCK = re.compile(rb"[0-9a-f]{16}")
_LOCK_NBYTES = 16


def new_lock() -> bytes:
    """Return the unique contents of a new lock."""
    return secrets.token_hex(_LOCK_NBYTES // 2).encode()


async def is_lock(driver: Driver, info: ObjectInfo) -> bool:
    """Return whether the object is a lock, or has its size and may not be read."""
    if info.nbytes != _LOCK_NBYTES:
        return False
    try:
        return _LOCK.fullmatch(await driver.get(info.key)) is not None
    except AccessError:
        return True
    except NotFoundError:
        return False


async def locked_since_s(driver: Driver) -> float | None:
    """Return when a lock was put, by the storage's clock; None without one."""
    try:
        with contextlib.suppress(AccessError):
            # Read first: a login page that answers every request is not a lock.
            if _LOCK.fullmatch(await driver.get(PRUNING_KEY)) is None:
                return None
        return (await driver.stat(PRUNING_KEY)).modified_s
    except NotFoundError:
        return None


async def wait_for_prunings(driver: Driver, now_s: Callable[[], Awaitable[float]]) -> None:
    """Wait until no pruning may delete the manifest.

    That is, until the lock is gone or older than the grace period at ``now_s()``, the storage's
    time. Raises StorageDownError after ``CLEAN_UP_S``, and StorageError. A save calls this twice:
    at its beginning, to fail before writing anything; and after putting its manifest, because a
    pruning may begin in between.
    """
    loop = asyncio.get_running_loop()
    patience_s = limits.CLEAN_UP_S
    deadline_s = loop.time() + patience_s
    pause_s = 0.01
    while (since_s := await locked_since_s(driver)) is not None:
        if await now_s() - since_s > limits.GRACE_S:
            return  # the pruning has died
        if loop.time() > deadline_s:
            raise StorageDownError(
                f"another process has been deleting the checkpoint that was here for "
                f"{patience_s:g} s, or died doing it",
                uri=driver.uri,
                key=PRUNING_KEY,
                advice="Save to another URI, or to this one an hour after that began. "
                "If you know that no process prunes here any more, delete this key.",
                temporary=False,
            )
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


async def delete_manifest(driver: Driver, attempt: Attempt) -> bool:
    """Delete the manifest durably if it belongs to ``attempt``, which must be settled.

    A manifest that a save puts meanwhile is left alone. Returns False if the manifest belongs to
    another attempt, or another pruning is about to delete it. If the outcome of the deletion is
    unknown, the lock stays, and nobody can delete the manifest or save here for an hour. Raises
    StorageError, DamagedError and UnsupportedFormatError.
    """
    since_s = await locked_since_s(driver)
    if since_s is not None and await storage_time_s(driver) - since_s <= limits.GRACE_S:
        return False
    lock = new_lock()
    replaces_stale = since_s is not None
    try:
        if replaces_stale:
            await driver.put(PRUNING_KEY, lock)
        else:
            await put_once(driver, PRUNING_KEY, lock)
    except ExistsError:
        return False
    is_current = False
    try:
        is_current = await current_attempt(driver) == attempt.id
    finally:
        if not is_current:  # nothing will be deleted, so saves need not wait
            await _release(driver, lock, replaces_stale)
    if is_current:
        await driver.delete(MANIFEST_KEY)
        await _release(driver, lock, replaces_stale)
    return is_current


async def _release(driver: Driver, lock: bytes, replaces_stale: bool) -> None:
    """Delete ``lock``, unless a pruning that took it for stale has replaced it."""
    try:
        if replaces_stale and await driver.get(PRUNING_KEY) != lock:
            return
        await driver.delete(PRUNING_KEY)
    except NotFoundError:
        return
