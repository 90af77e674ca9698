"""Checks of the storage, made by every save on small objects of its own: that the storage keeps
what the commit depends on, and that what it stores can be read.

Some S3 gateways ignore the condition of a conditional put and store the object all the same. Then a
commit record and an abort record both succeed, and a collector may delete the data of a save that
is about to commit. Some answer a range that covers the whole object with status 200, which clients
refuse. Then a save succeeds and its load fails.

Scope: what every save must know, for a request or two. ``holdfast drivers --check`` checks
everything else.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.aio import side_by_side
from ...drivers.contract import Driver
from ...drivers.layers.layer import bottom
from ...errors import CheckpointError, ExistsError, NotFoundError, StorageError

__all__ = ["TRIAL_NBYTES", "check_range_reads", "refuses_taken"]

TRIAL_NBYTES = 1
"""The size of the objects that :func:`refuses_taken` puts. No other object with such a key has
it."""
_TRIES = 3


async def refuses_taken(driver: Driver, key: str) -> bool:
    """Put an object exclusively to ``key``, where this process has just put one, and check that the
    storage refuses it.

    True where it is refused. False where the key was free because another process has deleted the
    object: then it holds one of ``TRIAL_NBYTES`` now. Raises StorageError where the storage ignores
    that the key is taken. Does nothing, and returns True, where the driver does not promise an
    atomic exclusive put.
    """
    if not driver.traits.exclusive_is_atomic:
        return True
    for n in range(_TRIES):
        try:
            # Other bytes each time: the retry layer takes equal ones for its own earlier put.
            await driver.put(key, b"%d" % n, exclusive=True)
        except ExistsError:
            return n == 0
        except NotFoundError:  # the folder is being deleted, too
            return False
    raise StorageError(
        "the storage stores an object although its key is taken, and was to refuse that: "
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
    """Read ``data``, which is the whole object ``key``, as one range that covers it and as one that
    does not.

    Raises StorageError where a read fails or returns other bytes, NotFoundError where there is no
    such object.
    """

    async def read(start: int, stop: int) -> None:
        into = bytearray(stop - start)
        try:
            await driver.read(key, start, memoryview(into))
        except (StorageError, CheckpointError) as error:
            if error.temporary or isinstance(error, NotFoundError):
                raise
            raise _unreadable(driver, key, start, stop, error.message) from error
        if into != data[start:stop]:
            raise _unreadable(driver, key, start, stop, "other bytes came")

    await side_by_side(read(0, len(data)), read(1, len(data) - 1))


def _unreadable(driver: Driver, key: str, start: int, stop: int, why: str) -> StorageError:
    return StorageError(
        f"what was stored cannot be read back as bytes {start} to {stop}, so no checkpoint could "
        f"be loaded: {why}",
        uri=driver.uri,
        key=key,
        advice=(
            "Use a store, or a gateway, that answers ranges of objects. holdfast drivers "
            "--check URI tells more."
        ),
    )
