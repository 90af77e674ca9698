"""The commit record and the abort record of an attempt: one exclusive object that decides its fate.

A *commit record* holds random bytes of the process that put it. A process whose put is refused can
therefore tell whether the key holds its own earlier put, whose answer was lost; and of two copies
that work on one attempt, only one takes the record for its own. An *abort record* is the same for
every process: it does not matter which one put it.
"""

from __future__ import annotations

import contextlib
import secrets

from ...drivers.contract import Driver
from ...errors import ExistsError, NotFoundError

ABORT_RECORD = b"abort"
_COMMIT_RECORD = b"claim "


async def put_commit_record(driver: Driver, key: str) -> bytes:
    """Put a commit record at ``key``, the attempt's ``record_key``; return its bytes. Raises
    ExistsError if another process has put a commit or abort record; NotFoundError if the attempt is
    being deleted; StorageError."""
    data = _new_commit_record()
    await put_once(driver, key, data)
    return data


def _new_commit_record() -> bytes:
    return _COMMIT_RECORD + secrets.token_hex(8).encode()


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
