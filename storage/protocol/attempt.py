"""An attempt at writing a checkpoint: its keys, its marker and record, and its deletion.

The *record* is one exclusive object that decides the attempt's fate. A *commit record* holds random
bytes of the process that put it. A process whose put is refused can therefore tell whether the key
holds its own earlier put, whose answer was lost; and of two copies that work on one attempt, only
one takes the record for its own. An *abort record* is the same for every process: it does not
matter which one put it.
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
from dataclasses import dataclass, field

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

ATTEMPT_KEY_PATTERN = rf"data/(?P<attempt>{ATTEMPT_PATTERN})/.+"
"""Regular expression for every key that belongs to an attempt."""
_ATTEMPT_KEY = re.compile(ATTEMPT_KEY_PATTERN)
ABORT_RECORD = b"abort"
_COMMIT_RECORD = b"claim "
_SECOND_LOOK_S = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at writing a checkpoint. ``record``: the contents of its commit record; b"": new
    ones. Of the processes that share them, the one that commits must outlive the others."""

    id: str
    record: bytes = field(default=b"", compare=False)

    @classmethod
    def new(cls) -> Attempt:
        """Return an attempt with a unique id: the time and four random bytes."""
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        return cls(f"{began}-{secrets.token_hex(4)}")

    @property
    def prefix(self) -> str:
        """The folder of its files."""
        return f"data/{self.id}"

    @property
    def marker_key(self) -> str:
        """Key of the marker, which exists until the attempt is settled or its deletion begins."""
        return f"data/{self.id}/attempt.json"

    @property
    def record_key(self) -> str:
        """Key of the commit record or the abort record, whichever was put first."""
        return f"data/{self.id}/fate"


@dataclass(slots=True)
class AttemptFiles:
    """Facts about an attempt from its files: its record, its last write, and its size."""

    has_record: bool = False
    written_s: float = float("-inf")
    nbytes: int = 0


async def list_attempts(driver: Driver) -> Mapping[Attempt, AttemptFiles]:
    """Return every attempt with at least one file whose folders can all be listed."""
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
    # Empty for saves: HDFS holds up the writer of other files until their replicas are counted.
    data = json.dumps(contents).encode() if contents else b""
    try:
        return await _put_marker(driver, data)
    except ExistsError:
        # Ids are unique, so the request must have been sent twice, by the client or the storage,
        # and this is the second answer. The first marker is collected like a dead attempt's.
        return await _put_marker(driver, data)


async def _put_marker(driver: Driver, data: bytes) -> Attempt:
    attempt = Attempt.new()
    await driver.put(attempt.marker_key, data, exclusive=True)
    return attempt


async def check_marker(driver: Driver, attempt: Attempt) -> ObjectInfo:
    """Return the marker's ``stat``. Raises SupersededError if the marker is gone, because another
    save is deleting this attempt. An object of ``TRIAL_NBYTES`` in its place also counts as gone:
    it is a late put of :func:`check_exclusive_puts`, accepted after the deletion."""
    try:
        info = await driver.stat(attempt.marker_key)
    except NotFoundError:
        info = await _second_look(driver, attempt)
    if info.nbytes == TRIAL_NBYTES:
        raise await lost(driver, attempt)
    return info


async def _second_look(driver: Driver, attempt: Attempt) -> ObjectInfo:
    """Return the marker's ``stat`` after a pause: busy object stores may miss it."""
    await asyncio.sleep(_SECOND_LOOK_S)
    try:
        return await driver.stat(attempt.marker_key)
    except NotFoundError as error:
        raise await lost(driver, attempt) from error


async def time_of_marker_s(driver: Driver, attempt: Attempt) -> float:
    """Return when the marker of a live attempt was put, by the storage's clock."""
    return (await check_marker(driver, attempt)).modified_s


def new_commit_record() -> bytes:
    """Return the contents of a commit record. Processes that share them count as one."""
    return _COMMIT_RECORD + secrets.token_hex(8).encode()


async def put_commit_record(driver: Driver, attempt: Attempt) -> bytes:
    """Put the commit record of ``attempt``; return its bytes. Raises ExistsError if another process
    has put a commit or abort record; NotFoundError if the attempt is being deleted;
    StorageError."""
    data = attempt.record or new_commit_record()
    await put_once(driver, attempt.record_key, data)
    return data


async def put_abort_record(driver: Driver, key: str) -> None:
    """Put an abort record at ``key``, unless the attempt has a record or is gone."""
    with contextlib.suppress(ExistsError, NotFoundError):
        await driver.put(key, ABORT_RECORD, exclusive=True)


async def read_record(driver: Driver, key: str) -> bytes | None:
    """Return the record at ``key``: ``ABORT_RECORD``, or any other to commit; None without one."""
    try:
        return await driver.get(key)
    except NotFoundError:
        return None


async def put_once(driver: Driver, key: str, data: bytes) -> None:
    """Put ``data``, unique to this process, exclusively; succeeds if the key already holds it."""
    try:
        await driver.put(key, data, exclusive=True)
    except ExistsError:
        if await read_record(driver, key) != data:
            raise


async def check_exclusive_puts(driver: Driver, attempt: Attempt) -> None:
    """Raise unless the storage refuses to replace a key. Precedes any abort record."""
    if not await refuses_taken(driver, attempt.marker_key):
        raise await lost(driver, attempt)


def _superseded(driver: Driver) -> HoldfastError:
    return SupersededError(
        "another save to this URI began later and took over",
        uri=driver.uri,
        advice="Give every job, and every save in flight, a URI of its own.",
    )


async def lost(driver: Driver, attempt: Attempt) -> HoldfastError:
    """Return the error for an attempt whose files are gone: superseded if another has files."""
    with contextlib.suppress(StorageError):
        async for info in driver.list():
            if not info.key.startswith(f"{attempt.prefix}/"):
                return _superseded(driver)
        return SupersededError(
            "the files of this save were deleted while it was in progress, and there is no other "
            "save here",
            uri=driver.uri,
            advice="Did somebody remove the folder, or did a pruning take the save for dead?",
        )
    return _superseded(driver)


@contextlib.asynccontextmanager
async def probe(driver: Driver) -> AsyncIterator[Attempt]:
    """Create an attempt during the block that is never committed, to learn the storage's time."""
    attempt = await announce(driver)
    try:
        await check_exclusive_puts(driver, attempt)
        yield attempt
    finally:
        await delete_attempt(driver, attempt)


async def storage_time_s(driver: Driver) -> float:
    """Return the time by the storage's clock. Raises StorageError and SupersededError."""
    async with probe(driver) as attempt:
        return await time_of_marker_s(driver, attempt)


async def delete_attempt(driver: Driver, attempt: Attempt) -> bool:
    """Delete an attempt that no manifest will name; return whether that worked. Logs errors."""
    try:
        await driver.delete(attempt.marker_key)  # first: see step 5 of the protocol
        await driver.delete_all(attempt.prefix)
    except StorageError as error:
        _log.warning("leftovers of attempt %s stay until the next save: %s", attempt.id, error)
        return False
    return True
