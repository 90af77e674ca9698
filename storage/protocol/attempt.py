"""An attempt at writing a checkpoint: its keys, its marker, and its deletion.

The keys below a checkpoint's root are listed in :mod:`.commit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from ...drivers.contract import Driver, ObjectInfo
from ...errors import (
    AccessError,
    ExistsError,
    HoldfastError,
    NotFoundError,
    StorageError,
    SupersededError,
)
from ..format.manifest import ATTEMPT_PATTERN
from .preflight import TRIAL_NBYTES, refuses_taken

__all__ = [
    "ATTEMPT_KEY_PATTERN",
    "Attempt",
    "AttemptFiles",
    "announce",
    "check_exclusive_puts",
    "check_marker",
    "delete_attempt",
    "list_attempts",
    "probe",
    "storage_time_s",
    "superseded",
    "time_of_marker_s",
]

ATTEMPT_KEY_PATTERN = rf"data/(?P<attempt>{ATTEMPT_PATTERN})/.+"
"""A regular expression of every key that belongs to an attempt."""
_ATTEMPT_KEY = re.compile(ATTEMPT_KEY_PATTERN)
_SECOND_LOOK_S = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at writing a checkpoint."""

    id: str

    @classmethod
    def new(cls) -> Attempt:
        """An attempt whose id no other attempt has: the time, and four random bytes."""
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        return cls(f"{began}-{secrets.token_hex(4)}")

    @property
    def prefix(self) -> str:
        """The folder of its files."""
        return f"data/{self.id}"

    @property
    def marker_key(self) -> str:
        """The key that exists until the attempt is settled or is being deleted."""
        return f"data/{self.id}/attempt.json"

    @property
    def record_key(self) -> str:
        """The key of the commit record or the abort record, whichever was put first."""
        return f"data/{self.id}/fate"


@dataclass(slots=True)
class AttemptFiles:
    """What the files of an attempt tell: whether it has a commit or abort record, when its last
    file was written, and how many bytes they have."""

    has_record: bool = False
    written_s: float = float("-inf")
    nbytes: int = 0


async def list_attempts(driver: Driver) -> Mapping[Attempt, AttemptFiles]:
    """Return every attempt that has at least one file, and whose folders can all be entered."""
    found: dict[Attempt, AttemptFiles] = {}
    try:
        async for info in driver.list("data"):
            match = _ATTEMPT_KEY.fullmatch(info.key)
            if match is None:
                continue
            attempt = Attempt(match["attempt"])
            files = found.setdefault(attempt, AttemptFiles())
            files.has_record |= info.key == attempt.record_key
            files.written_s = max(files.written_s, info.modified_s)
            files.nbytes += info.nbytes
    except AccessError as error:
        if not error.unlisted:
            raise
        for folder in error.unlisted:
            found.pop(Attempt(folder.split("/")[1]), None)
    return found


async def announce(driver: Driver, contents: Mapping[str, object] | None = None) -> Attempt:
    """Put the marker of a new attempt, with ``contents`` as JSON, or empty."""
    if contents:
        data = json.dumps(contents).encode()
    else:
        data = b""
    try:
        return await _put_marker(driver, data)
    except ExistsError:
        # Ids are unique, so the storage or its client has sent the request twice, and this is the
        # answer to the second. The marker of the first is collected like that of a dead attempt.
        return await _put_marker(driver, data)


async def _put_marker(driver: Driver, data: bytes) -> Attempt:
    attempt = Attempt.new()
    await driver.put(attempt.marker_key, data, exclusive=True)
    return attempt


async def check_marker(driver: Driver, attempt: Attempt) -> ObjectInfo:
    """Return the marker's ``stat``. Raises SupersededError where the marker is gone, because
    another save is deleting this attempt. The marker is also gone if an object of ``TRIAL_NBYTES``
    has taken its place: a late put of :func:`check_exclusive_puts`, which the storage accepted
    after the deletion."""
    try:
        info = await driver.stat(attempt.marker_key)
    except NotFoundError:
        info = await _second_look(driver, attempt)
    if info.nbytes == TRIAL_NBYTES:
        raise superseded(driver)
    return info


async def _second_look(driver: Driver, attempt: Attempt) -> ObjectInfo:
    """Return the marker's ``stat`` a little later: object stores under load now and then report an
    object that exists as missing, whereas a deleted marker stays away."""
    await asyncio.sleep(_SECOND_LOOK_S)
    try:
        return await driver.stat(attempt.marker_key)
    except NotFoundError as error:
        raise await lost(driver, attempt) from error


async def time_of_marker_s(driver: Driver, attempt: Attempt) -> float:
    """When the marker of a live attempt was put, by the storage's clock."""
    return (await check_marker(driver, attempt)).modified_s


async def check_exclusive_puts(driver: Driver, attempt: Attempt) -> None:
    """Check that the storage refuses an exclusive put of a key that is taken, before this process
    puts any abort record. Raises StorageError where it does not, SupersededError where another save
    has deleted the marker."""
    if not await refuses_taken(driver, attempt.marker_key):
        raise superseded(driver)


def superseded(driver: Driver) -> HoldfastError:
    """The error of an attempt that a later save has aborted."""
    return SupersededError(
        "another save to this URI began later and took over",
        uri=driver.uri,
        advice="Give every job, and every save in flight, a URI of its own.",
    )


async def lost(driver: Driver, attempt: Attempt) -> HoldfastError:
    """Return the error of an attempt whose files are gone: :func:`superseded`, unless nothing is
    left that another save could have put there."""
    with contextlib.suppress(StorageError):
        async for info in driver.list():
            if not info.key.startswith(f"{attempt.prefix}/"):
                return superseded(driver)
        return SupersededError(
            "the files of this save were deleted while it was under way, and no other save is here",
            uri=driver.uri,
            advice="Did somebody remove the folder, or did a pruning take the save for dead?",
        )
    return superseded(driver)


@contextlib.asynccontextmanager
async def probe(driver: Driver) -> AsyncIterator[Attempt]:
    """An attempt that exists for the length of a block and is never committed. The times of its
    files are the storage's time."""
    attempt = await announce(driver)
    try:
        await check_exclusive_puts(driver, attempt)
        yield attempt
    finally:
        await delete_attempt(driver, attempt)


async def storage_time_s(driver: Driver) -> float:
    """The time by the storage's clock. Raises StorageError, SupersededError."""
    async with probe(driver) as attempt:
        return await time_of_marker_s(driver, attempt)


async def delete_attempt(driver: Driver, attempt: Attempt) -> bool:
    """Delete an attempt that no manifest names or ever will; return whether that worked. Does not
    raise StorageError: the next save collects what is left."""
    try:
        await driver.delete(attempt.marker_key)  # first: see step 5 of the protocol
        await driver.delete_all(attempt.prefix)
    except StorageError as error:
        _log.warning("leftovers of attempt %s stay until the next save: %s", attempt.id, error)
        return False
    return True
