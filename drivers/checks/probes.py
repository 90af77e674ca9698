"""The probes, in the order of a check."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...core.aio import side_by_side
from ...errors import DamagedError, ExistsError, HoldfastError, NotFoundError
from ..contract import Driver, Upload, segments
from .findings import Effect, Kept, UnkeptError
from .ground import Ground, Warnings, begun, bytes_of, parts_of, store, write_parts

_UNSAFE_EXCLUSIVE = "saves to one URI could destroy each other's data, so Holdfast refuses to save"
_CONDITIONAL = (
    "For an object store add ?conditional=off to the URI, and let no two jobs save to one URI at "
    "the same time; or use a store that has conditional puts."
)
_NO_EXCLUSIVE = Kept(
    "exclusive puts are not promised here: checkpoints are whole, but either of two overlapping "
    "saves may win, and leftovers of dead saves stay for a day",
    "not promised",
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
_SMALL_NBYTES = 4096
_ODD_NBYTES = 4099
_RANGE_NBYTES = 1000
_TREE = ("tree/a", "tree/ab", "tree/b/1", "tree/b/2", "tree/b/c/3", "tree/bc")
_MANY = 24
_ODD = (
    "with space", "back\\slash", "plus+and%25percent", "größe-日本", "~a!b'c(d)*", "a=b&c;d,e",
    "what?#hash", "colon:at@",
)  # fmt: skip

_Run = Callable[[Ground], Awaitable[Kept | None]]


@dataclass(frozen=True, slots=True)
class Probe:
    """One property to try, and the consequence if the storage lacks it."""

    name: str
    title: str
    effect: Effect
    follows: str
    advice: str
    run: _Run
    """Coroutine function that raises UnkeptError or a HoldfastError if the storage lacks the
    property."""
    exclusive: bool = False
    """True for a property of atomic exclusive puts, which some drivers do not promise."""

    async def tried(self, ground: Ground) -> Kept:
        """Try the property. Raises the errors of ``run``."""
        if self.exclusive and not ground.traits.exclusive_is_atomic:
            return _NO_EXCLUSIVE
        return await self.run(ground) or Kept()


PROBES: list[Probe] = []
"""All probes, in order. If the first is broken, the others are not tried."""


def _probe(
    title: str, effect: Effect, follows: str, advice: str, *, exclusive: bool = False
) -> Callable[[_Run], _Run]:
    """Add a function to the probes, under its own name."""

    def added(run: _Run) -> _Run:
        name = run.__name__.strip("_")
        PROBES.append(Probe(name, title, effect, follows, advice, run, exclusive))
        return run

    return added


async def _outcome_of(call: Awaitable[object]) -> HoldfastError | None:
    try:
        await call
    except HoldfastError as error:
        return error
    return None


@_probe(
    "put and read back",
    "unusable",
    "nothing can be saved here",
    "Look at the error. Are the credentials, the endpoint and the permissions right? An https:// "
    "URI is only for loading.",
)
async def _put(ground: Ground) -> None:
    key = ground.key("small/put")
    await ground.expect_gone(key, "before it was put")
    await ground.put_and_expect(key, bytes_of(1000), "right after the put")
    await ground.put_and_expect(ground.key("small/empty"), b"", "right after the put of nothing")


@_probe(
    "unfinished uploads are found",
    "leftovers",
    "leftovers of dead saves are invisible, are not removed, and cost money",
    "Set a life-cycle rule in the store that drops unfinished uploads after a few days.",
)
async def _unfinished(ground: Ground) -> Kept:
    """Check that sweep and delete_all find an open upload."""
    content = memoryview(bytes_of(ground.traits.part_nbytes + _ODD_NBYTES, 1))
    parts = parts_of(len(content), ground.traits.part_nbytes, ground.traits)
    upload = await ground.driver.create(ground.key("unfinished/upload"), len(content))

    async def finish() -> None:
        await write_parts(upload, content, [part for part in parts if part[0] > 0], ground.traits)
        await upload.commit()

    try:
        await upload.write(0, content[: min(parts)[1]])
        with Warnings() as warnings:
            await ground.other.sweep(ground.key("unfinished"))
            await ground.other.delete_all(ground.key("unfinished"))
        dropped = await _outcome_of(finish())
    finally:
        await upload.abort()
    if warnings.texts:
        raise UnkeptError(warnings.texts[0])
    if dropped is not None:
        return Kept("an open upload was found and dropped")
    if ground.driver.remote:
        return Kept(
            "an open upload was not found: leftovers of dead saves stay until the store drops them",
            "not promised",
        )
    return Kept("an open upload was left alone")


@_probe("replace", "unsafe", "readers may load a replaced object", "Use other storage.")
async def _replace(ground: Ground) -> None:
    for seed, nbytes in enumerate((1000, 3000, 10)):
        await ground.put_and_expect(
            ground.key("small/replaced"),
            bytes_of(nbytes, seed),
            "right after the object was replaced",
        )


@_probe(
    "delete",
    "leftovers",
    "deleted objects may stay, or seem to",
    "May this user delete objects? Does a cache stand in between?",
)
async def _delete(ground: Ground) -> None:
    key = ground.key("small/deleted")
    await ground.put_and_expect(key, b"deleted", "right after the put")
    await ground.driver.delete(key)
    await ground.expect_gone(key, "right after it was deleted")
    error = await _outcome_of(ground.driver.delete(key))
    if error is not None:
        raise UnkeptError(f"deleting a missing object fails: {error.message}") from error


@_probe(
    "readers see whole objects",
    "unsafe",
    "a load may read a half-written manifest",
    "Use other storage, or the driver that was made for it.",
)
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

    async def replace() -> int:
        try:
            for version in versions[1:]:
                await ground.driver.put(key, version)
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            over.set()
        return 0

    looks = await side_by_side(look(ground.driver), look(ground.other), replace())
    return Kept(f"{sum(looks)} looks at {_VERSIONS} versions")


@_probe("exclusive put, twice", "unsafe", _UNSAFE_EXCLUSIVE, _CONDITIONAL, exclusive=True)
async def _exclusive(ground: Ground) -> None:
    key = ground.key("small/exclusive")
    await ground.driver.put(key, b"first", exclusive=True)
    for driver, who in ((ground.driver, "the same"), (ground.other, "another")):
        error = await _outcome_of(driver.put(key, b"second", exclusive=True))
        if error is None:
            raise UnkeptError(
                f"the key was taken, and an exclusive put by {who} client succeeded anyway"
            )
        if not isinstance(error, ExistsError):
            raise UnkeptError(
                f"an exclusive put to a taken key fails with the wrong error: {error.message}"
            ) from error
        await ground.expect(key, b"first", "after an exclusive put was refused")


@_probe(
    "exclusive puts at the same time", "unsafe", _UNSAFE_EXCLUSIVE, _CONDITIONAL, exclusive=True
)
async def _race(ground: Ground) -> Kept:
    drivers = [ground.driver, ground.other]
    for race in range(_RACES):
        key = ground.key(f"small/race-{race}")
        puts = [
            _outcome_of(drivers[n % 2].put(key, b"%d" % n * 1000, exclusive=True))
            for n in range(_RACERS)
        ]
        errors = await asyncio.gather(*puts)
        winners = [n for n, error in enumerate(errors) if error is None]
        if len(winners) != 1:
            raise UnkeptError(f"{len(winners)} of {_RACERS} concurrent exclusive puts succeeded")
        await ground.expect(key, b"%d" % winners[0] * 1000, "after a race")
    return Kept(f"{_RACES} races of {_RACERS} puts")


@_probe(
    "exclusive put after a delete",
    "unusable",
    "a save may fail where an earlier one was deleted",
    "Use other storage. Are objects locked, or deletions delayed?",
    exclusive=True,
)
async def _again(ground: Ground) -> None:
    key = ground.key("small/again")
    await ground.driver.put(key, b"first", exclusive=True)
    await ground.driver.delete(key)
    error = await _outcome_of(ground.other.put(key, b"second", exclusive=True))
    if error is not None:
        raise UnkeptError(
            f"an exclusive put to a key that was deleted fails: {error.message}"
        ) from error
    await ground.expect(key, b"second", "after it was put again")


@_probe(
    "the storage's clock",
    "leftovers",
    "leftovers of dead saves are collected too late, and object stores may refuse requests",
    "Synchronize the clocks of this host and of the servers (NTP).",
)
async def _clock(ground: Ground) -> Kept | None:
    key = ground.key("small/clock")
    before_s = time.time()
    await ground.driver.put(key, b"clock")
    after_s = time.time()
    told_s = (await ground.other.stat(key)).modified_s
    listed_s = [info.modified_s async for info in ground.other.list(key)]
    if not listed_s or abs(listed_s[0] - told_s) > 1.0:
        raise UnkeptError("list and stat report different times for an object")
    # Some storages report times in whole seconds.
    skew_s = abs(told_s - min(max(told_s, before_s - 1), after_s + 1))
    differ = f"the storage's clock and this host's differ by {skew_s:,.0f} s"
    if skew_s > SKEW_MAX_S:
        raise UnkeptError(differ)
    if skew_s > SKEW_S:
        return Kept(differ, "not promised")
    return Kept(f"the clocks differ by {skew_s:.0f} s at most" if skew_s > 1 else "")


@_probe(
    "an aborted upload leaves nothing",
    "leftovers",
    "failed saves leave files behind",
    "Look at the store after failed saves; holdfast prune removes what it finds.",
)
async def _aborted(ground: Ground) -> None:
    key = ground.key("large/aborted")
    part_nbytes = ground.traits.part_nbytes
    upload = await begun(ground.driver, key, bytes_of(part_nbytes, 2), part_nbytes + _ODD_NBYTES)
    await upload.abort()
    await ground.expect_gone(key, "after its upload was aborted")


@_probe(
    "an upload of several parts",
    "unsafe",
    "large images are not saved correctly",
    "Use other storage, or a larger ?part_size= if the driver has that option.",
)
async def _committed(ground: Ground) -> Kept:
    """Upload several parts over an existing object, and check that the new one appears only at the
    commit."""
    key = ground.key("large/committed")
    content = bytes_of(2 * ground.traits.part_nbytes + _ODD_NBYTES, 3)
    await ground.driver.put(key, b"before")
    began_s = time.perf_counter()
    upload = await ground.driver.create(key, len(content))
    try:
        await _write(upload, content, ground)
        await ground.expect(key, b"before", "before the new object was committed")
        await upload.commit()
    finally:
        await upload.abort()
    seconds = time.perf_counter() - began_s
    if (await ground.other.stat(key)).nbytes != len(content):
        raise UnkeptError("after the commit the object has the wrong size")
    return Kept(f"{len(content):,} bytes", nbytes_per_s=len(content) / seconds)


async def _write(upload: Upload, content: bytes, ground: Ground) -> None:
    """Write all parts, several segments at once if the driver asks for that."""
    traits = ground.traits

    async def segment(begin: int, end: int) -> None:
        parts = parts_of(end - begin, traits.part_nbytes, traits)
        shifted = [(begin + start, begin + stop) for start, stop in parts]
        await write_parts(upload, memoryview(content), shifted, traits)

    await side_by_side(*(segment(begin, end) for begin, end in segments(len(content), traits)))


@_probe(
    "an upload that ends early",
    "unusable",
    "saves with compression fail",
    "Save without compression.",
)
async def _shorter(ground: Ground) -> None:
    """Check that an upload may end before its declared size, as compressed images do."""
    key = ground.key("large/shorter")
    content = bytes_of(ground.traits.part_nbytes + _ODD_NBYTES, 4)
    upload = await ground.driver.create(key, 3 * ground.traits.part_nbytes)
    try:
        await _write(upload, content, ground)
        await upload.commit(len(content))
    finally:
        await upload.abort()
    await ground.expect(key, content, "after an upload ended before the size that was declared")


@_probe(
    "ranges of objects",
    "unreadable",
    "checkpoints could not be loaded, so Holdfast refuses to save",
    "Use a store, or a gateway, that answers ranges with status 206, even a range that is the "
    "whole object.",
)
async def _ranges(ground: Ground) -> Kept:
    """Read ranges of a small and a large object, with ``read`` and ``fetch``."""
    small = ground.key("large/small")
    await _read_ranges(ground, small)
    key = ground.key("large/committed")
    large = bytes_of(2 * ground.traits.part_nbytes + _ODD_NBYTES, 3)
    if await _outcome_of(ground.other.stat(key)) is not None:
        return Kept("of a small object only")
    began_s = time.perf_counter()
    await _expect_range(ground.other, key, large, 0, len(large), "that is all of a large object")
    seconds = time.perf_counter() - began_s
    at = ground.traits.part_nbytes - _RANGE_NBYTES // 2
    await _expect_range(ground.other, key, large, at, at + _RANGE_NBYTES, "across two parts")
    return Kept(f"{len(large):,} bytes", nbytes_per_s=len(large) / seconds)


async def _read_ranges(ground: Ground, key: str) -> None:
    content = bytes_of(_SMALL_NBYTES, 5)
    await store(ground.driver, key, content)
    n = _RANGE_NBYTES
    whole = len(content)
    middle = (whole - n) // 2
    for start, stop, what in (
        (0, whole, "that is the whole object"),
        (0, n, "at the beginning"),
        (middle, middle + n, "in the middle"),
        (whole - n, whole, "at the end"),
        (whole - 1, whole, "of the last byte"),
    ):
        await _expect_range(ground.other, key, content, start, stop, what)
    error = await _outcome_of(ground.other.read(key, whole - 10, memoryview(bytearray(20))))
    if not isinstance(error, DamagedError):
        outcome = "succeeds"
        if error is not None:
            outcome = f"fails with the wrong error: {error.message}"
        raise UnkeptError(f"a range beyond the end of the object {outcome}") from error


async def _expect_range(
    driver: Driver, key: str, content: bytes, start: int, stop: int, what: str
) -> None:
    into = bytearray(stop - start)
    try:
        await driver.read(key, start, memoryview(into))
        fetched = bytes(await driver.fetch(key, start, stop - start))
    except HoldfastError as error:
        raise UnkeptError(f"a range {what} cannot be read: {error.message}") from error
    if not into == fetched == content[start:stop]:
        raise UnkeptError(f"a range {what} has wrong bytes")


@_probe(
    "list at and below a prefix",
    "leftovers",
    "checkpoints are missing in listings, and leftovers of dead saves are not found. Saves and "
    "loads need no listings",
    "Expect ls, prune and the clean-up of dead saves to lag, or to miss files.",
)
async def _list(ground: Ground) -> None:
    for name in _TREE:
        await ground.driver.put(ground.key(name), name.encode())
    for prefix in ("tree", "tree/b", "tree/a", "tree/b/1", "tree/nothing"):
        keys = [
            ground.key(name) for name in _TREE if name == prefix or name.startswith(prefix + "/")
        ]
        await ground.expect_listed(ground.key(prefix), keys, "right after the puts")
    await ground.driver.delete(ground.key("tree/b/1"))
    left = [ground.key(name) for name in _TREE if name != "tree/b/1"]
    await ground.expect_listed(ground.key("tree"), left, "right after a delete")


@_probe(
    "delete many objects at once",
    "leftovers",
    "checkpoints cannot be pruned, and failed saves cost money",
    "Does the server support DeleteObjects? Use the driver's option that switches it off, if it "
    "has one (holdfast drivers URI lists options).",
)
async def _bulk(ground: Ground) -> Kept:
    keys = [ground.key(f"many/{n % 3}/{n}") for n in range(_MANY)]
    spared = ground.key("many-others/0")
    for key in (*keys, spared):
        await ground.driver.put(key, b"many")
    await ground.driver.delete_all(ground.key("many"))
    await ground.expect_listed(
        ground.key("many"), [], f"right after {_MANY} objects were deleted at once"
    )
    await ground.expect(spared, b"many", "after others were deleted")
    return Kept(f"{_MANY} objects")


@_probe(
    "keys with odd characters",
    "names",
    "two checkpoints whose names differ in such a character may be confused",
    "Name checkpoints with letters, digits, '-', '_' and '.' only.",
)
async def _odd(ground: Ground) -> Kept:
    kept = {}
    refused = []
    for n, name in enumerate(_ODD):
        if await _outcome_of(ground.driver.put(ground.key(f"odd/{name}"), b"%d" % n)) is None:
            kept[ground.key(f"odd/{name}")] = b"%d" % n
        else:
            refused.append(repr(name))
    for key, content in kept.items():
        await ground.expect(key, content, f"the key has {key.rpartition('/')[2]!r}, and")
    await ground.expect_listed(ground.key("odd"), [*kept], "of odd names")
    return Kept(f"refused: {', '.join(refused)}" if refused else "")
