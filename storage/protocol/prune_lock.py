"""The sign that somebody deletes a checkpoint: there before its last look at the manifest, and gone
after the deletion.

No storage that is common deletes an object only if it is still the one that was looked at. So
whoever puts a manifest waits where this sign is: what stands behind it is argued in
``docs/explanation/consistency.md``.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable

from ...drivers.contract import Driver, ObjectInfo
from ...errors import NotFoundError, StorageDownError

__all__ = ["PRUNING_KEY", "is_sign", "new_sign", "pruned_since_s", "pruning_over", "take_away"]

PRUNING_KEY = "data/pruning"
_SIGN = re.compile(rb"[0-9a-f]{16}")


def new_sign() -> bytes:
    """What is put there: nobody else's file looks like it."""
    return secrets.token_hex(8).encode()


async def take_away(driver: Driver, sign: bytes, *, alone: bool) -> None:
    """Delete ``sign``. Unless it was put ``alone``, where no other was, another pruning may have
    replaced it meanwhile: then that one's stays, since savers are to wait for it. Raises
    StorageError."""
    try:
        if alone or await driver.get(PRUNING_KEY) == sign:
            await driver.delete(PRUNING_KEY)
    except NotFoundError:
        return


async def is_sign(driver: Driver, info: ObjectInfo) -> bool:
    """Whether that is one; below a folder of others may be a file of the same name, of any size,
    which is not fetched to find out. Raises StorageError."""
    try:
        return info.nbytes == 16 and _SIGN.fullmatch(await driver.get(info.key)) is not None
    except NotFoundError:
        return False


async def pruned_since_s(driver: Driver) -> float | None:
    """Since when the sign has been there, by the storage's clock; None where it is not. Raises
    StorageError."""
    try:
        return (await driver.stat(PRUNING_KEY)).modified_s
    except NotFoundError:
        return None


async def pruning_over(
    driver: Driver, now_s: Callable[[], Awaitable[float]], patience_s: float, grace_s: float
) -> None:
    """Wait until nobody is about to delete the manifest: the sign is gone, or older than
    ``grace_s`` at ``now_s()``, which is the storage's time. Raises StorageDownError after
    ``patience_s``, and StorageError.

    Asked twice: by a save that begins, which is better refused before it has written anything; and,
    since a pruning may begin later than that, by one that has put its manifest.
    """
    deadline_s = asyncio.get_running_loop().time() + patience_s
    pause_s = 0.01
    while (flagged_s := await pruned_since_s(driver)) is not None:
        if await now_s() - flagged_s > grace_s:
            return  # it has died
        if asyncio.get_running_loop().time() > deadline_s:
            raise StorageDownError(
                f"somebody has been deleting the checkpoint that was here for {patience_s:g} s, "
                f"or died doing it",
                uri=driver.uri,
                key=PRUNING_KEY,
                advice="Save to another URI, or to this one an hour after that began. "
                "If you know that nobody prunes here any more, delete this key.",
                temporary=False,
            )
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
