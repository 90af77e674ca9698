"""The fate of an attempt: an object that is put once, exclusively, and decides between commit and
abort.

A *claim* says who claims, by bytes that nobody else has. So whoever is told that the key is taken
can see whether that was its own earlier put, whose answer was lost; two copies that go on with one
attempt never both take it for theirs. Checkpoints of earlier versions have empty claims. A
*sentence* is the same for everybody: it makes no difference whose it was.
"""

from __future__ import annotations

import contextlib
import secrets

from ...drivers.contract import Driver
from ...errors import ExistsError, NotFoundError

__all__ = ["SENTENCE", "claim", "fate_of", "put_once", "sentence"]

SENTENCE = b"abort"
_CLAIM = b"claim "


async def claim(driver: Driver, key: str) -> bytes:
    """Claim the attempt whose fate is ``key``; return what the key holds now. Raises ExistsError
    where somebody else has claimed or sentenced it; NotFoundError where it is being deleted;
    StorageError."""
    data = _new_claim()
    await put_once(driver, key, data)
    return data


def _new_claim() -> bytes:
    return _CLAIM + secrets.token_hex(8).encode()


async def sentence(driver: Driver, key: str) -> None:
    """Sentence the attempt whose fate is ``key``, unless it is decided, or gone. Raises
    StorageError."""
    with contextlib.suppress(ExistsError, NotFoundError):
        await driver.put(key, SENTENCE, exclusive=True)


async def fate_of(driver: Driver, key: str) -> bytes | None:
    """What is stored as the fate: ``SENTENCE``, or a claim; None where there is none. Raises
    StorageError."""
    try:
        return await driver.get(key)
    except NotFoundError:
        return None


async def put_once(driver: Driver, key: str, data: bytes) -> None:
    """Put ``data``, which nobody else would put, exclusively. Success also where the key turns out
    to hold these bytes.

    A client may repeat a request whose answer was lost, without telling, and get to hear of its own
    success that the key is taken. Raises ExistsError where the key holds something else;
    StorageError.
    """
    try:
        await driver.put(key, data, exclusive=True)
    except ExistsError:
        if await fate_of(driver, key) != data:
            raise
