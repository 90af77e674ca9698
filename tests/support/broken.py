"""Drivers that are wrong in one way each, to show that the conformance kit tells. All are the
memory driver but for that."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from holdfast.drivers.contract import Buffer, ObjectInfo, TakePiece, Upload, check_key, check_small
from holdfast.drivers.memory import MemoryDriver, _MemoryUpload
from holdfast.drivers.options import Option, choice, integer
from holdfast.drivers.uri import Uri
from holdfast.errors import DamagedError, HoldfastError, StorageError

__all__ = [
    "Appends", "Borrows", "CommitsHoles", "CutsAnywhere", "DefaultsElsewhere", "DeletesNeighbours", "DeletesNoRoots",
    "DeviationThatFails", "DeviationThatPasses", "EndsAnywhere", "EndsAsDeclared", "ErrorsSayNothing",
    "ExclusiveNotAtomic", "FetchesFewer", "FirstPage", "FoldsKeys", "GetsAnything", "Healthy", "IgnoresStart",
    "LeaksDescriptors", "LeaksTasks", "LeaksTemporaries", "LeaksThreads", "LooksTooLate", "LosesEmptyObjects",
    "OpenAfterClose", "OptionsInUri", "OverstatesItsLimit", "PlainErrors", "PrefixByLetters", "ReadsOn", "RefusesLate",
    "RefusesLateAndKeeps", "ReusesFetched", "ShortRead", "StaleReads", "SwallowsCancellation",
    "SwallowsErrors", "SweepsTheLiving", "TakesFewer", "TakesHalfAPiece", "TornByCancellation", "TornPut",
    "UnsafeKeys", "VisibleEarly",
]  # fmt: skip


class Healthy(MemoryDriver):
    """Nothing wrong: what a broken one is compared with. ``upload`` is the class of its uploads."""

    upload: ClassVar[type[_MemoryUpload]] = _MemoryUpload

    def __init__(self, location: str = "") -> None:
        super().__init__(location)
        self.traits = replace(self.traits, object_max_nbytes=1 << 20)

    async def create(self, key: str, nbytes: int) -> Upload:
        self._path(key)
        return self.upload(self, key, nbytes)

    def place(self, key: str, data: bytes) -> None:
        """Make an object at once."""
        self.objects[self._prefix + key] = (data, time.time())


class _EarlyUpload(_MemoryUpload):
    async def write(self, start: int, data: Buffer) -> None:
        await super().write(start, data)
        self._driver.place(self._key, bytes(self._open_content()))  # type: ignore[attr-defined]


class VisibleEarly(Healthy):
    """Shows what is being uploaded."""

    upload = _EarlyUpload


class TornPut(Healthy):
    """Puts one half, and then the other."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        await super().put(key, data[: len(data) // 2], exclusive=exclusive)
        await asyncio.sleep(0)
        self.place(key, data)


class ExclusiveNotAtomic(Healthy):
    """Looks first, and puts a moment later."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        if exclusive and self._path(key) not in self.objects:
            await asyncio.sleep(0)
            exclusive = False
        await super().put(key, data, exclusive=exclusive)


class IgnoresStart(Healthy):
    """Reads from the beginning, whatever was asked for."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        await super().read(key, 0, into)


class ShortRead(Healthy):
    """Past the end it leaves the buffer as it was."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        try:
            await super().read(key, start, into)
        except DamagedError:
            part = (await self.get(key))[start : start + len(into)]
            into[: len(part)] = part


class ReusesFetched(Healthy):
    """Hands over a buffer that it fetches into again."""

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        kept = self.__dict__.setdefault("kept", bytearray(2 << 20))
        await self.read(key, start, memoryview(kept)[:nbytes])
        return memoryview(kept)[:nbytes]


class FetchesFewer(Healthy):
    """Past the end it hands over what there is."""

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return memoryview((await self.get(key))[start : start + nbytes])


class CutsAnywhere(Healthy):
    """Passes pieces that end where they like."""

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        data = await self.fetch(key, start, nbytes)
        for at in range(0, nbytes, 1000):
            take(data[at : at + 1000])


class TakesFewer(Healthy):
    """Past the end it passes what there is."""

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        there = (await self.get(key))[start : start + nbytes]
        await super().read_pieces(key, start, len(there), take)


class TakesHalfAPiece(Healthy):
    """Past the end it passes what there is of a piece, and then raises what is due."""

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        there = (await self.get(key))[start : start + nbytes]
        if 0 < len(there) < nbytes:
            await super().read_pieces(key, start, len(there), take)
        await super().read_pieces(key, start + len(there), nbytes - len(there), take)


class _LeakingUpload(_MemoryUpload):
    async def write(self, start: int, data: Buffer) -> None:
        await super().write(start, data)
        self._driver.place(f".unfinished/{id(self)}", b"")  # type: ignore[attr-defined]


class LeaksTemporaries(Healthy):
    """Keeps what an aborted upload has written."""

    upload = _LeakingUpload

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix):
            if ".unfinished" not in info.key:
                yield info


class _LaxUpload(_MemoryUpload):
    async def commit(self, nbytes: int | None = None) -> None:
        content = self._open_content()
        self._content = None
        await self._driver.put(self._key, bytes(content))


class CommitsHoles(Healthy):
    """Takes what was never written for zeros."""

    upload = _LaxUpload


class EndsAsDeclared(CommitsHoles):
    """Likewise, also what an upload that ends early was never to write."""


class _CuttingUpload(_MemoryUpload):
    async def commit(self, nbytes: int | None = None) -> None:
        content = self._open_content()
        if nbytes is None:
            self._written.check_complete()
        self._content = None
        await self._driver.put(self._key, bytes(content[:nbytes]))


class EndsAnywhere(Healthy):
    """Cuts an upload off where it is told to, whatever was written."""

    upload = _CuttingUpload


class _AppendingUpload(_MemoryUpload):
    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self._end = 0

    async def write(self, start: int, data: Buffer) -> None:
        self._end += len(data)
        await super().write(self._end - len(data), data)


class Appends(Healthy):
    """Parts lie in the order in which they came."""

    upload = _AppendingUpload


class _BorrowingUpload(_MemoryUpload):
    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self._borrowed: list[tuple[int, Buffer]] = []

    async def write(self, start: int, data: Buffer) -> None:
        await super().write(start, data)
        self._borrowed.append((start, data))

    async def commit(self, nbytes: int | None = None) -> None:
        content = self._open_content()
        for start, data in self._borrowed:
            content[start : start + len(data)] = data
        await super().commit(nbytes)


class Borrows(Healthy):
    """Copies the caller's memory only when it commits."""

    upload = _BorrowingUpload


class PrefixByLetters(Healthy):
    """``a`` lists ``ab``."""

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list():
            if info.key.startswith(check_key(prefix) if prefix else ""):
                yield info


class FirstPage(Healthy):
    """Lists a thousand objects and forgets the rest."""

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        count = 0
        async for info in super().list(prefix):
            if (count := count + 1) <= 1000:
                yield info


class DeletesNeighbours(Healthy):
    """Deleting ``a/b`` takes ``a/bc`` along."""

    async def delete_all(self, prefix: str) -> None:
        for path in [path for path in self.objects if path.startswith(self._path(prefix))]:
            del self.objects[path]


class UnsafeKeys(Healthy):
    """Takes any key."""

    async def get(self, key: str) -> bytes:
        return self.objects[self._prefix + key][0] if ".." in key else await super().get(key)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        self.place(key, data)


class FoldsKeys(Healthy):
    """Takes ``a%20b`` and ``a b`` for the same."""

    def _path(self, key: str) -> str:
        return super()._path(key).replace("%20", " ")


class PlainErrors(Healthy):
    """Lets its library's errors out."""

    async def get(self, key: str) -> bytes:
        return self.objects[self._path(key)][0]


class SwallowsErrors(Healthy):
    """What is not there is empty."""

    async def get(self, key: str) -> bytes:
        try:
            return await super().get(key)
        except HoldfastError:
            return b""


class ErrorsSayNothing(Healthy):
    """Raises the right kind, and does not say where."""

    async def get(self, key: str) -> bytes:
        try:
            return await super().get(key)
        except HoldfastError as error:
            raise type(error)("failed") from error


class SwallowsCancellation(Healthy):
    """Goes on when it is cancelled."""

    async def get(self, key: str) -> bytes:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            pass
        return await super().get(key)


class TornByCancellation(Healthy):
    """A put that is cancelled leaves half an object."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        old = self.objects.get(self._path(key))
        await super().put(key, data[: len(data) // 2], exclusive=exclusive)
        half = self.objects.pop(self._path(key))
        if old:
            self.objects[self._path(key)] = old
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.objects[self._path(key)] = half
            raise
        self.place(key, data)


class ReadsOn(Healthy):
    """A read that was cancelled goes on filling the buffer."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        data = bytearray(len(into))
        await super().read(key, start, memoryview(data))

        def fill() -> None:
            into[:] = data
            done.set()

        loop.call_later(0.005, fill)
        await done.wait()


class StaleReads(Healthy):
    """Remembers what it has read."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        seen = self.__dict__.setdefault("seen", {})
        if (key, start, len(into)) not in seen:
            await super().read(key, start, into)
            seen[key, start, len(into)] = bytes(into)
        into[:] = seen[key, start, len(into)]


class SweepsTheLiving(Healthy):
    """A sweep ends every upload."""

    async def create(self, key: str, nbytes: int) -> Upload:
        upload = await super().create(key, nbytes)
        _LIVE.append(upload)
        return upload

    async def sweep(self, prefix: str) -> None:
        while _LIVE:
            await _LIVE.pop().abort()


_LIVE: list[Upload] = []


class LeaksThreads(Healthy):
    """Starts a thread that nobody ends."""

    def __init__(self, location: str = "") -> None:
        super().__init__(location)
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


class LeaksDescriptors(Healthy):
    """Opens a file that nobody closes."""

    async def get(self, key: str) -> bytes:
        _OPEN.append(os.open(os.devnull, os.O_RDONLY))
        return await super().get(key)


_OPEN: list[int] = []


class LeaksTasks(Healthy):
    """Leaves a task behind."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        await super().put(key, data, exclusive=exclusive)
        self.__dict__.setdefault("tasks", []).append(asyncio.create_task(asyncio.sleep(60)))


class OpenAfterClose(Healthy):
    """Goes on after close()."""

    async def close(self) -> None:
        """Nothing."""


class LosesEmptyObjects(Healthy):
    """Takes an empty object for none, where one is replaced."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        replaces = self._path(key) in self.objects
        await super().put(key, data, exclusive=exclusive)
        if not data and replaces:
            await self.delete(key)


class GetsAnything(Healthy):
    """Gets what is too large for that."""

    async def get(self, key: str) -> bytes:
        return self._lookup(key)[0]


class LooksTooLate(Healthy):
    """Reads first, and then looks how large it was."""

    async def get(self, key: str) -> bytes:
        data = bytes(bytearray(self._lookup(key)[0]))
        check_small(len(data), self.uri, key)
        return data


class OptionsInUri(Healthy):
    """Prints its options as a part of its URI."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "threads": Option(integer(1, 64), 4, "operations in flight")
    }

    @classmethod
    def open(cls, uri: Uri) -> MemoryDriver:
        driver = cls(uri.location)
        driver.uri = uri.redacted
        return driver


class DefaultsElsewhere(Healthy):
    """Takes the default of an option for something else than its absence."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {"folder": Option(choice("a", "b"), "a", "where")}

    @classmethod
    def open(cls, uri: Uri) -> MemoryDriver:
        driver = cls(uri.location + uri.options.get("folder", ""))
        driver.uri = uri.root
        return driver


class _LateUpload(_MemoryUpload):
    async def commit(self, nbytes: int | None = None) -> None:
        try:
            self._driver._check_length(self._key)  # type: ignore[attr-defined]
        except HoldfastError:
            await self.abort()
            raise
        await super().commit(nbytes)


class RefusesLate(Healthy):
    """Not wrong: only when all has come does the server say that a name is too long for it."""

    upload = _LateUpload

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        self._check_length(key)
        await super().put(key, data, exclusive=exclusive)

    def _check_length(self, key: str) -> None:
        if len(key) > 200:
            raise StorageError("KeyTooLong", uri=self.uri, key=key)


class RefusesLateAndKeeps(RefusesLate):
    """Says so, and shows the object all the same."""

    upload = _MemoryUpload

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        self.place(key, data)
        self._check_length(key)


class _LimitedUpload(_MemoryUpload):
    async def commit(self, nbytes: int | None = None) -> None:
        if self._nbytes == 1 << 20:
            raise StorageError("EntityTooLarge", uri=self._driver.uri, key=self._key)
        await super().commit(nbytes)


class OverstatesItsLimit(Healthy):
    """Says that it takes an object of a size which it refuses."""

    upload = _LimitedUpload


class DeletesNoRoots(Healthy):
    """Cannot remove what the kit leaves at its end."""

    async def delete_all(self, prefix: str) -> None:
        if prefix.startswith("conformance-"):
            raise OSError(16, "Device or resource busy")
        await super().delete_all(prefix)


class DeviationThatPasses(Healthy):
    """Declares what it need not."""

    deviations: ClassVar[dict[str, str]] = {"an_object_comes_back": "it does"}


class DeviationThatFails(ShortRead):
    """Declares what it does wrong."""

    deviations: ClassVar[dict[str, str]] = {
        "a_read_past_the_end_is_damage": "past the end it reads nothing"
    }
