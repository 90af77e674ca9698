"""Probes of large objects: multipart uploads, their leftovers, and ranged reads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from ...errors import DamagedError, HoldfastError
from ..contract import Driver, Upload, segments
from .content import bytes_of, parts_of, write_parts
from .findings import Kept, UnkeptError
from .ground import Ground, Probe, outcome_of
from .warned import Warnings

__all__ = ["LARGE", "UNFINISHED"]

_SMALL_NBYTES = 4096
_ODD_NBYTES = 4099
_RANGE_NBYTES = 1000


async def _unfinished(ground: Ground) -> Kept:
    """Check that sweep and delete_all find an open upload."""
    key = ground.key("unfinished/upload")
    content = bytes_of(ground.part_nbytes + _ODD_NBYTES, 1)
    upload = await ground.driver.create(key, len(content))
    try:
        first = parts_of(len(content), ground.part_nbytes, ground.traits)
        await upload.write(0, memoryview(content)[: min(first)[1]])
        with Warnings() as warnings:
            await ground.other.sweep(ground.key("unfinished"))
            await ground.other.delete_all(ground.key("unfinished"))
        rest = [part for part in first if part[0] > 0]
        dropped = await outcome_of(_ended(upload, content, rest, ground))
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


async def _ended(
    upload: Upload, content: bytes, parts: list[tuple[int, int]], ground: Ground
) -> None:
    with _one_error():
        await write_parts(upload, memoryview(content), parts, ground.traits)
    await upload.commit()


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Raise the first error of a group of writes that failed together."""
    try:
        yield
    except ExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


async def _aborted(ground: Ground) -> Kept:
    key = ground.key("large/aborted")
    content = bytes_of(ground.part_nbytes + _ODD_NBYTES, 2)
    upload = await ground.driver.create(key, len(content))
    await upload.write(0, memoryview(content)[: ground.part_nbytes])
    await upload.abort()
    await ground.expect_gone(key, "after its upload was aborted")
    return Kept()


async def _committed(ground: Ground) -> Kept:
    """Upload several parts over an existing object, and check that the new one appears only at the
    commit."""
    key = ground.key("large/committed")
    content = bytes_of(2 * ground.part_nbytes + _ODD_NBYTES, 3)
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
        parts = [
            (begin + a, begin + b) for a, b in parts_of(end - begin, ground.part_nbytes, traits)
        ]
        await write_parts(upload, memoryview(content), parts, traits)

    with _one_error():
        async with asyncio.TaskGroup() as group:
            for begin, end in segments(len(content), traits):
                group.create_task(segment(begin, end))


async def _shorter(ground: Ground) -> Kept:
    """Check that an upload may end before its declared size, as compressed images do."""
    key = ground.key("large/shorter")
    content = bytes_of(ground.part_nbytes + _ODD_NBYTES, 4)
    upload = await ground.driver.create(key, 3 * ground.part_nbytes)
    try:
        await _write(upload, content, ground)
        await upload.commit(len(content))
    finally:
        await upload.abort()
    await ground.expect(key, content, "after an upload ended before the size that was declared")
    return Kept()


async def _ranges(ground: Ground) -> Kept:
    """Read ranges of a small and a large object, with ``read`` and ``fetch``."""
    small = ground.key("large/small")
    content = bytes_of(_SMALL_NBYTES, 5)
    upload = await ground.driver.create(small, len(content))
    try:
        await upload.write(0, memoryview(content))
        await upload.commit()
    finally:
        await upload.abort()
    await _read_ranges(ground, small, content)
    large = bytes_of(2 * ground.part_nbytes + _ODD_NBYTES, 3)
    key = ground.key("large/committed")
    if await outcome_of(ground.other.stat(key)) is not None:
        return Kept("of a small object only")
    began_s = time.perf_counter()
    await _expect_range(ground.other, key, large, 0, len(large), "that is all of a large object")
    seconds = time.perf_counter() - began_s
    at = ground.part_nbytes - _RANGE_NBYTES // 2
    await _expect_range(ground.other, key, large, at, at + _RANGE_NBYTES, "across two parts")
    return Kept(f"{len(large):,} bytes", nbytes_per_s=len(large) / seconds)


async def _read_ranges(ground: Ground, key: str, content: bytes) -> None:
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
    error = await outcome_of(ground.other.read(key, whole - 10, memoryview(bytearray(20))))
    if not isinstance(error, DamagedError):
        if error is None:
            outcome = "succeeds"
        else:
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


UNFINISHED = Probe(
    "unfinished",
    "unfinished uploads are found",
    "leftovers",
    "leftovers of dead saves are invisible, are not removed, and cost money",
    "Set a life-cycle rule in the store that drops unfinished uploads after a few days.",
    _unfinished,
)

LARGE = (
    Probe(
        "aborted",
        "an aborted upload leaves nothing",
        "leftovers",
        "failed saves leave files behind",
        "Look at the store after failed saves; holdfast prune removes what it finds.",
        _aborted,
    ),
    Probe(
        "committed",
        "an upload of several parts",
        "unsafe",
        "large images are not saved correctly",
        "Use other storage, or a larger ?part_size= if the driver has that option.",
        _committed,
    ),
    Probe(
        "shorter",
        "an upload that ends early",
        "unusable",
        "saves with compression fail",
        "Save without compression.",
        _shorter,
    ),
    Probe(
        "ranges",
        "ranges of objects",
        "unreadable",
        "checkpoints could not be loaded, so Holdfast refuses to save",
        (
            "Use a store, or a gateway, that answers ranges with status 206, even "
            "a range that is the whole object."
        ),
        _ranges,
    ),
)
