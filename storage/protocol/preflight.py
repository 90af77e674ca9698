"""Storage checks made by every save: the commit's preconditions hold, and data can be read back.

Some S3 gateways ignore the condition of a conditional put and store the object. Then a commit
record and an abort record both succeed, and a collector may delete the data of a save that is about
to commit. Some answer a range that covers the whole object with status 200, which clients refuse.
Then a save succeeds and its load fails.

Scope: checks that every save needs, at the cost of a request or two. ``holdfast drivers --check``
checks everything else.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.aio import side_by_side
from ...drivers.contract import Driver
from ...drivers.layers.layer import bottom
from ...errors import CheckpointError, ExistsError, NotFoundError, StorageError

TRIAL_NBYTES = 1
"""Size of the objects that :func:`refuses_taken` puts. Other objects with these keys have other
sizes."""
_TRIES = 3


async def refuses_taken(driver: Driver, key: str) -> bool:
    """Check that the storage refuses an exclusive put to ``key``, where this process has put an
    object.

    Returns True if it refuses. Returns False if the key was free because another process deleted
    the object; the key then holds an object of ``TRIAL_NBYTES``. Raises StorageError if the storage
    ignores that the key is taken. Does nothing and returns True if the driver does not promise
    atomic exclusive puts.
    """
    if not driver.traits.exclusive_is_atomic:
        return True
    for n in range(_TRIES):
        try:
            # Different bytes each time: the retry layer takes equal ones for its own earlier put.
            await driver.put(key, b"%d" % n, exclusive=True)
        except ExistsError:
            return n == 0
        except NotFoundError:  # the folder is being deleted, too
            return False
    raise StorageError(
        "the storage stores an object although its key is taken, instead of refusing it: "
        "saves to one URI could destroy each other's data",
        uri=driver.uri,
        key=key,
        advice=_advice(driver),
    )


def _advice(driver: Driver) -> str:
    options: Mapping[str, object] = getattr(bottom(driver), "OPTIONS", {})
    if "conditional" in options:
        return (
            "It ignores conditional puts: add ?conditional=off to the URI, and let no two jobs "
            "save to one URI at the same time; or use a store that has them. "
            "holdfast drivers --check URI tells more."
        )
    return (
        "Use other storage, or a driver whose traits say that exclusive puts are not atomic. "
        "holdfast drivers --check URI tells more."
    )


async def check_range_reads(driver: Driver, key: str, data: bytes) -> None:
    """Check that ``data``, the whole object ``key``, can be read as one full range and as a partial
    one. Raises StorageError if a read fails or returns other bytes, NotFoundError if the object
    does not exist."""

    async def read(start: int, stop: int) -> None:
        into = bytearray(stop - start)
        try:
            await driver.read(key, start, memoryview(into))
        except (StorageError, CheckpointError) as error:
            if error.temporary or isinstance(error, NotFoundError):
                raise
            raise _unreadable(driver, key, start, stop, error.message) from error
        if into != data[start:stop]:
            raise _unreadable(driver, key, start, stop, "other bytes were returned")

    await side_by_side(read(0, len(data)), read(1, len(data) - 1))


def _unreadable(driver: Driver, key: str, start: int, stop: int, why: str) -> StorageError:
    return StorageError(
        f"stored data cannot be read back as bytes {start} to {stop}, so no checkpoint could "
        f"be loaded: {why}",
        uri=driver.uri,
        key=key,
        advice=(
            "Use a store, or a gateway, that answers ranges of objects. holdfast drivers "
            "--check URI tells more."
        ),
    )
