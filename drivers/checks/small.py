"""Probes of small objects: put and get, replacement, exclusive puts, and the storage's clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ...errors import ExistsError, HoldfastError, NotFoundError
from ..contract import Driver
from .content import bytes_of
from .findings import Kept, UnkeptError
from .ground import Ground, Probe, outcome_of

__all__ = ["PUT_AND_GET", "SMALL"]

_UNSAFE_EXCLUSIVE = "saves to one URI could destroy each other's data, so Holdfast refuses to save"
_CONDITIONAL = (
    "For an object store add ?conditional=off to the URI, and let no two jobs save to one URI at "
    "the same time; "
    "or use a store that has conditional puts."
)
_NO_EXCLUSIVE = (
    "exclusive puts are not promised here: checkpoints are whole, but either of two overlapping "
    "saves may win, and leftovers of "
    "dead saves stay for a day"
)
SKEW_S = 60.0
"""Clock difference that is worth reporting."""
SKEW_MAX_S = 15 * 60.0
"""Clock difference beyond which AWS and others reject requests."""
_RACERS = 8
_RACES = 3
_VERSIONS = 8
_LOOK_EVERY_S = 0.002
_ROOM_NBYTES = 100_000


async def _put_and_get(ground: Ground) -> Kept:
    key = ground.key("small/put")
    content = bytes_of(1000)
    await ground.expect_gone(key, "before it was put")
    await ground.driver.put(key, content)
    await ground.expect(key, content, "right after the put")
    await ground.driver.put(ground.key("small/empty"), b"")
    await ground.expect(ground.key("small/empty"), b"", "right after the put of nothing")
    return Kept()


async def _replace(ground: Ground) -> Kept:
    key = ground.key("small/replaced")
    for seed, nbytes in enumerate((1000, 3000, 10)):
        content = bytes_of(nbytes, seed)
        await ground.driver.put(key, content)
        await ground.expect(key, content, "right after the object was replaced")
    return Kept()


async def _delete(ground: Ground) -> Kept:
    key = ground.key("small/deleted")
    await ground.driver.put(key, b"deleted")
    await ground.expect(key, b"deleted", "right after the put")
    await ground.driver.delete(key)
    await ground.expect_gone(key, "right after it was deleted")
    error = await outcome_of(ground.driver.delete(key))
    if error is not None:
        raise UnkeptError(f"deleting a missing object fails: {error.message}") from error
    return Kept()


async def _atomic(ground: Ground) -> Kept:
    """Replace an object while two readers poll it."""
    key = ground.key("small/atomic")
    versions = [bytes([n]) * (_ROOM_NBYTES - n) for n in range(_VERSIONS)]
    await ground.driver.put(key, versions[0])
    over = asyncio.Event()

    async def look(driver: Driver) -> int:
        looks = 0
        while not over.is_set():
            try:
                found = await driver.get(key)
            except NotFoundError as error:
                raise UnkeptError("while an object is replaced, a reader finds none") from error
            if found not in versions:
                raise UnkeptError(
                    "while an object is replaced, a reader gets a mixture of versions"
                )
            looks += 1
            await asyncio.sleep(_LOOK_EVERY_S)
        return looks

    async def replace() -> None:
        try:
            for version in versions[1:]:
                await ground.driver.put(key, version)
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            over.set()

    looks = await _together([look(ground.driver), look(ground.other), replace()])
    return Kept(f"{sum(filter(None, looks))} looks at {_VERSIONS} versions")


async def _together(works: Sequence[object]) -> list[int | None]:
    """Run coroutines concurrently and return their results. Raises the first error after all have
    ended."""
    results = await asyncio.gather(*works, return_exceptions=True)  # type: ignore[call-overload]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


async def _exclusive(ground: Ground) -> Kept:
    if not ground.traits.exclusive_is_atomic:
        return Kept(_NO_EXCLUSIVE, "not promised")
    key = ground.key("small/exclusive")
    await ground.driver.put(key, b"first", exclusive=True)
    for driver, who in ((ground.driver, "the same"), (ground.other, "another")):
        error = await outcome_of(driver.put(key, b"second", exclusive=True))
        if error is None:
            raise UnkeptError(
                f"the key was taken, and an exclusive put by {who} client succeeded anyway"
            )
        if not isinstance(error, ExistsError):
            raise UnkeptError(
                f"an exclusive put to a taken key fails with the wrong error: {error.message}"
            ) from error
        await ground.expect(key, b"first", "after an exclusive put was refused")
    return Kept()


async def _exclusive_again(ground: Ground) -> Kept:
    if not ground.traits.exclusive_is_atomic:
        return Kept(_NO_EXCLUSIVE, "not promised")
    key = ground.key("small/again")
    await ground.driver.put(key, b"first", exclusive=True)
    await ground.driver.delete(key)
    error = await outcome_of(ground.other.put(key, b"second", exclusive=True))
    if error is not None:
        raise UnkeptError(
            f"an exclusive put to a key that was deleted fails: {error.message}"
        ) from error
    await ground.expect(key, b"second", "after it was put again")
    return Kept()


async def _race(ground: Ground) -> Kept:
    if not ground.traits.exclusive_is_atomic:
        return Kept(_NO_EXCLUSIVE, "not promised")
    for n in range(_RACES):
        await _one_race(ground, ground.key(f"small/race-{n}"))
    return Kept(f"{_RACES} races of {_RACERS} puts")


async def _one_race(ground: Ground, key: str) -> None:
    drivers = [ground.driver, ground.other]
    puts = [
        outcome_of(drivers[n % 2].put(key, b"%d" % n * 1000, exclusive=True))
        for n in range(_RACERS)
    ]
    errors: list[HoldfastError | None] = await asyncio.gather(*puts)
    winners = [n for n, error in enumerate(errors) if error is None]
    if len(winners) != 1:
        raise UnkeptError(f"{len(winners)} of {_RACERS} concurrent exclusive puts succeeded")
    await ground.expect(key, b"%d" % winners[0] * 1000, "after a race")


async def _clock(ground: Ground) -> Kept:
    key = ground.key("small/clock")
    before_s = time.time()
    await ground.driver.put(key, b"clock")
    after_s = time.time()
    told_s = (await ground.other.stat(key)).modified_s
    listed_s = [info.modified_s async for info in ground.other.list(key)]
    if not listed_s or abs(listed_s[0] - told_s) > 1.0:
        raise UnkeptError("list and stat report different times for an object")
    # Some storages report times in whole seconds.
    skew_s = told_s - min(max(told_s, before_s - 1), after_s + 1)
    if abs(skew_s) > SKEW_MAX_S:
        raise UnkeptError(f"the storage's clock and this host's differ by {abs(skew_s):,.0f} s")
    if abs(skew_s) > SKEW_S:
        return Kept(
            f"the storage's clock and this host's differ by {abs(skew_s):,.0f} s", "not promised"
        )
    return Kept(f"the clocks differ by {abs(skew_s):.0f} s at most" if abs(skew_s) > 1 else "")


PUT_AND_GET = Probe(
    "put",
    "put and read back",
    "unusable",
    "nothing can be saved here",
    (
        "Look at the error. Are the credentials, the endpoint and the permissions right? An "
        "https:// "
        "URI is only for loading."
    ),
    _put_and_get,
)

SMALL = (
    Probe(
        "replace",
        "replace",
        "unsafe",
        "readers may load a replaced object",
        "Use other storage.",
        _replace,
    ),
    Probe(
        "delete",
        "delete",
        "leftovers",
        "deleted objects may stay, or seem to",
        "May this user delete objects? Does a cache stand in between?",
        _delete,
    ),
    Probe(
        "atomic",
        "readers see whole objects",
        "unsafe",
        "a load may read a half-written manifest",
        "Use other storage, or the driver that was made for it.",
        _atomic,
    ),
    Probe(
        "exclusive", "exclusive put, twice", "unsafe", _UNSAFE_EXCLUSIVE, _CONDITIONAL, _exclusive
    ),
    Probe(
        "race", "exclusive puts at the same time", "unsafe", _UNSAFE_EXCLUSIVE, _CONDITIONAL, _race
    ),
    Probe(
        "again",
        "exclusive put after a delete",
        "unusable",
        "a save may fail where an earlier one was deleted",
        "Use other storage. Are objects locked, or deletions delayed?",
        _exclusive_again,
    ),
    Probe(
        "clock",
        "the storage's clock",
        "leftovers",
        "leftovers of dead saves are collected too late, and object stores may refuse requests",
        "Synchronize the clocks of this host and of the servers (NTP).",
        _clock,
    ),
)
