"""Memory drivers with one defect each, to test the conformance kit."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import unquote

from holdfast.drivers.contract import (
    Buffer,
    Driver,
    ObjectInfo,
    TakePiece,
    Upload,
    check_key,
    check_small,
)
from holdfast.drivers.memory import MemoryDriver, _MemoryUpload
from holdfast.drivers.options import Option, choice, integer
from holdfast.drivers.uri import Uri
from holdfast.errors import DamagedError, HoldfastError, StorageError

CASES: dict[type[Healthy], str] = {}
"""The trial that must fail, by broken driver."""
PROBED: dict[type[Healthy], str] = {}
"""The probe of ``holdfast drivers --check`` that must fail, by broken driver."""


class Healthy(MemoryDriver):
    """A correct driver, the baseline of the broken ones. ``upload`` is the class of its uploads.

    A subclass names the ``trial`` and the ``probe`` that must fail.
    """

    upload: ClassVar[type[_MemoryUpload]] = _MemoryUpload

    def __init_subclass__(cls, trial: str = "", probe: str = "") -> None:
        for table, noticed_by in ((CASES, trial), (PROBED, probe)):
            if noticed_by:
                table[cls] = noticed_by

    def __init__(self, location: str = "") -> None:
        super().__init__(location)
        self.traits = replace(self.traits, part_nbytes=64 << 10, object_max_nbytes=1 << 20)

    async def create(self, key: str, nbytes: int) -> Upload:
        self._path(key)
        return self.upload(self, key, nbytes)

    def place(self, key: str, data: bytes) -> None:
        """Create an object in one step."""
        self.objects[self._prefix + key] = (data, time.time())


class VisibleEarly(Healthy, trial="an_upload_is_invisible_until_it_commits", probe="committed"):
    """Shows objects that are being uploaded."""

    class upload(_MemoryUpload):
        async def write(self, start: int, data: Buffer) -> None:
            await super().write(start, data)
            self._driver.place(self._key, bytes(self._content))  # type: ignore[attr-defined]


class TornPut(Healthy, trial="a_reader_sees_the_old_or_the_new_object"):
    """Puts one half, and then the other."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        await super().put(key, data[: len(data) // 2], exclusive=exclusive)
        await asyncio.sleep(0)
        self.place(key, data)


class ExclusiveNotAtomic(Healthy, trial="an_exclusive_put_has_one_winner", probe="race"):
    """Looks first, and puts a moment later."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        if exclusive and self._path(key) not in self.objects:
            await asyncio.sleep(0)
            exclusive = False
        await super().put(key, data, exclusive=exclusive)


class IgnoresStart(Healthy, trial="any_range_can_be_read", probe="ranges"):
    """Reads from the beginning, wherever the range starts."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        await super().read(key, 0, into)


class ShortRead(Healthy, trial="a_read_past_the_end_is_damage", probe="ranges"):
    """Past the end it leaves the buffer as it was."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        try:
            await super().read(key, start, into)
        except DamagedError:
            part = (await self.get(key))[start : start + len(into)]
            into[: len(part)] = part


class ReusesFetched(Healthy, trial="fetched_memory_stays_as_it_is"):
    """Hands over a buffer that it fetches into again."""

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        kept = self.__dict__.setdefault("kept", bytearray(2 << 20))
        await self.read(key, start, memoryview(kept)[:nbytes])
        return memoryview(kept)[:nbytes]


class FetchesFewer(Healthy, trial="a_read_past_the_end_is_damage"):
    """Returns fewer bytes past the end instead of failing."""

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return memoryview((await self.get(key))[start : start + nbytes])


class CutsAnywhere(Healthy, trial="pieces_hold_the_bytes_of_any_range"):
    """Passes pieces that end where they like."""

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        data = await self.fetch(key, start, nbytes)
        for at in range(0, nbytes, 1000):
            take(data[at : at + 1000])


class TakesFewer(Healthy, trial="a_read_past_the_end_is_damage"):
    """Passes fewer bytes past the end instead of failing."""

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        there = (await self.get(key))[start : start + nbytes]
        await super().read_pieces(key, start, len(there), take)


class TakesHalfAPiece(Healthy, trial="a_read_past_the_end_is_damage"):
    """Passes a partial piece past the end before it raises the error."""

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        there = (await self.get(key))[start : start + nbytes]
        if 0 < len(there) < nbytes:
            await super().read_pieces(key, start, len(there), take)
        await super().read_pieces(key, start + len(there), nbytes - len(there), take)


class LeaksTemporaries(Healthy, trial="an_aborted_upload_leaves_nothing"):
    """Leaks a temporary object when an upload is aborted."""

    class upload(_MemoryUpload):
        async def write(self, start: int, data: Buffer) -> None:
            await super().write(start, data)
            self._driver.place(f".unfinished/{id(self)}", b"")  # type: ignore[attr-defined]

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix):
            if ".unfinished" not in info.key:
                yield info


class CommitsHoles(Healthy, trial="an_incomplete_upload_does_not_commit"):
    """Commits an incomplete upload, with zeros in the gaps."""

    class upload(_MemoryUpload):
        async def commit(self, nbytes: int | None = None) -> None:
            self._written.check_open()
            content = bytes(self._content)
            await self.abort()
            await self._driver.put(self._key, content)


class EndsAsDeclared(CommitsHoles, trial="an_upload_may_end_early", probe="shorter"):
    """Likewise, even after the end of an upload that ends early."""


class EndsAnywhere(Healthy, trial="an_upload_that_lacks_its_end_does_not_commit"):
    """Truncates an upload at the committed size without checking that all of it was written."""

    class upload(_MemoryUpload):
        async def commit(self, nbytes: int | None = None) -> None:
            self._written.check_open()
            if nbytes is None:
                self._written.check_complete()
            content = bytes(self._content[:nbytes])
            await self.abort()
            await self._driver.put(self._key, content)


class Appends(Healthy, trial="parts_from_any_address_make_the_object"):
    """Appends parts in order of arrival and ignores their offsets."""

    class upload(_MemoryUpload):
        def __init__(self, *where: Any) -> None:
            super().__init__(*where)
            self._end = 0

        async def write(self, start: int, data: Buffer) -> None:
            self._end += len(data)
            await super().write(self._end - len(data), data)


class Borrows(Healthy, trial="a_written_part_belongs_to_the_upload"):
    """Copies the caller's memory only when it commits."""

    class upload(_MemoryUpload):
        def __init__(self, *where: Any) -> None:
            super().__init__(*where)
            self._borrowed: list[tuple[int, Buffer]] = []

        async def write(self, start: int, data: Buffer) -> None:
            await super().write(start, data)
            self._borrowed.append((start, data))

        async def commit(self, nbytes: int | None = None) -> None:
            for start, data in self._borrowed:
                self._content[start : start + len(data)] = data
            await super().commit(nbytes)


class CopiesTheBeginning(Healthy, trial="copies_and_writes_make_the_object"):
    """Copies from the beginning, wherever the range starts."""

    class upload(_MemoryUpload):
        async def copy(self, start: int, source: Driver, key: str, at: int, nbytes: int) -> None:
            await super().copy(start, source, key, 0, nbytes)


class CopiesItsOwn(Healthy, trial="a_whole_object_is_copied_from_another_root"):
    """Looks for the source below its own root."""

    class upload(_MemoryUpload):
        async def copy(self, start: int, source: Driver, key: str, at: int, nbytes: int) -> None:
            await super().copy(start, self._driver, key, at, nbytes)


class CopiesFromAnywhere(Healthy, trial="a_whole_object_is_copied_from_another_root"):
    """Accepts drivers of other storage."""

    def copies_from(self, source: Driver) -> bool:
        return True


class CopiesFewer(Healthy, trial="bytes_that_cannot_be_copied_can_be_written"):
    """Takes a source that is too short, with zeros at the end."""

    class upload(_MemoryUpload):
        async def copy(self, start: int, source: Driver, key: str, at: int, nbytes: int) -> None:
            data = (await source.get(key))[at : at + nbytes]
            await self.write(start, memoryview(data.ljust(nbytes, b"\0")))


class CountsFailedCopies(Healthy, trial="bytes_that_cannot_be_copied_can_be_written"):
    """Counts bytes as written that it could not copy."""

    class upload(_MemoryUpload):
        async def copy(self, start: int, source: Driver, key: str, at: int, nbytes: int) -> None:
            self._written.add(start, nbytes)
            data = await source.fetch(key, at, nbytes)
            self._content[start : start + nbytes] = data


class CopiesTwice(Healthy, trial="a_copy_counts_as_a_write"):
    """Takes a second copy of the same bytes for a repetition of the first."""

    class upload(_MemoryUpload):
        async def copy(self, start: int, source: Driver, key: str, at: int, nbytes: int) -> None:
            if (start, start + nbytes) not in self._written._written:
                await super().copy(start, source, key, at, nbytes)


class CopiesLate(Healthy, trial="copied_bytes_stay_without_their_source"):
    """Copies only when it commits."""

    class upload(_MemoryUpload):
        def __init__(self, *where: Any) -> None:
            super().__init__(*where)
            self._promised: list[tuple[Any, ...]] = []

        async def copy(self, start: int, source: Driver, key: str, at: int, nbytes: int) -> None:
            await super().copy(start, source, key, at, nbytes)
            self._promised.append((start, source, key, at, nbytes))

        async def commit(self, nbytes: int | None = None) -> None:
            for start, source, key, at, length in self._promised:
                self._content[start : start + length] = await source.fetch(key, at, length)
            await super().commit(nbytes)


class LeaksCopies(Healthy, trial="an_aborted_composition_leaves_nothing"):
    """Leaks an object when an upload with copies is aborted."""

    class upload(_MemoryUpload):
        async def copy(self, start: int, source: Driver, key: str, at: int, nbytes: int) -> None:
            await super().copy(start, source, key, at, nbytes)
            self._driver.place(f"copy/{id(self)}", b"")  # type: ignore[attr-defined]


class LeaksCancelledCopies(Healthy, trial="a_cancelled_copy_can_only_be_aborted"):
    """Leaks an object when a copy is cancelled."""

    class upload(_MemoryUpload):
        async def copy(self, start: int, source: Driver, key: str, at: int, nbytes: int) -> None:
            self._driver.place("d/copy", b"")  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            await self._driver.delete("d/copy")
            await super().copy(start, source, key, at, nbytes)


class PrefixByLetters(Healthy, trial="a_listing_goes_by_whole_names", probe="list"):
    """``a`` lists ``ab``."""

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list():
            if info.key.startswith(check_key(prefix) if prefix else ""):
                yield info


class FirstPage(Healthy, trial="a_listing_of_many_objects_is_complete"):
    """Lists a thousand objects and forgets the rest."""

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        count = 0
        async for info in super().list(prefix):
            if (count := count + 1) <= 1000:
                yield info


class DeletesNeighbours(
    Healthy, trial="deleting_all_takes_what_lies_below_and_no_more", probe="bulk"
):
    """Deleting ``a/b`` takes ``a/bc`` along."""

    async def delete_all(self, prefix: str) -> None:
        for path in [path for path in self.objects if path.startswith(self._path(prefix))]:
            del self.objects[path]


class UnsafeKeys(Healthy, trial="an_unsafe_key_is_refused_everywhere"):
    """Takes any key."""

    async def get(self, key: str) -> bytes:
        return self.objects[self._prefix + key][0] if ".." in key else await super().get(key)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        self.place(key, data)


class FoldsKeys(Healthy, trial="strange_keys_are_stored_faithfully_or_refused", probe="odd"):
    """Takes ``a%20b`` and ``a b`` for the same."""

    def _path(self, key: str) -> str:
        return unquote(super()._path(key))


class PlainErrors(Healthy, trial="errors_say_where"):
    """Lets its library's errors out."""

    async def get(self, key: str) -> bytes:
        return self.objects[self._path(key)][0]


class SwallowsErrors(Healthy, trial="an_object_comes_back"):
    """Returns empty bytes for a missing object."""

    async def get(self, key: str) -> bytes:
        try:
            return await super().get(key)
        except HoldfastError:
            return b""


class ErrorsSayNothing(Healthy, trial="errors_say_where"):
    """Raises the right kind, and does not say where."""

    async def get(self, key: str) -> bytes:
        try:
            return await super().get(key)
        except HoldfastError as error:
            raise type(error)("failed") from error


class SwallowsCancellation(Healthy, trial="cancelled_looks_change_nothing"):
    """Ignores cancellation."""

    async def get(self, key: str) -> bytes:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            pass
        return await super().get(key)


class TornByCancellation(Healthy, trial="a_cancelled_put_is_whole_or_absent"):
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


class ReadsOn(Healthy, trial="a_cancelled_read_leaves_the_buffer_alone"):
    """Fills the buffer after the read was cancelled."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        data = bytearray(len(into))
        await super().read(key, start, memoryview(data))

        def fill() -> None:
            into[:] = data
            done.set()

        loop.call_later(0.005, fill)
        await done.wait()


class StaleReads(Healthy, trial="a_replaced_or_deleted_object_is_not_read_again"):
    """Serves stale reads from a cache."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        seen = self.__dict__.setdefault("seen", {})
        if (key, start, len(into)) not in seen:
            await super().read(key, start, into)
            seen[key, start, len(into)] = bytes(into)
        into[:] = seen[key, start, len(into)]


class SweepsTheLiving(Healthy, trial="a_sweep_harms_nobody_alive"):
    """A sweep ends every upload."""

    async def create(self, key: str, nbytes: int) -> Upload:
        upload = await super().create(key, nbytes)
        _LIVE.append(upload)
        return upload

    async def sweep(self, prefix: str) -> None:
        while _LIVE:
            await _LIVE.pop().abort()


_LIVE: list[Upload] = []


class LeaksThreads(Healthy, trial="nothing_outlives_close"):
    """Starts a thread that nobody ends."""

    def __init__(self, location: str = "") -> None:
        super().__init__(location)
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


class LeaksDescriptors(Healthy, trial="nothing_outlives_close"):
    """Opens a file that nobody closes."""

    async def get(self, key: str) -> bytes:
        _OPEN.append(os.open(os.devnull, os.O_RDONLY))
        return await super().get(key)


_OPEN: list[int] = []


class CollectsDescriptors(Healthy, trial="an_object_comes_back"):
    """Opens a descriptor that only garbage collection closes."""

    async def get(self, key: str) -> bytes:
        cycle: list[Any] = [select.epoll()]
        cycle.append(cycle)
        return await super().get(key)


class LeaksTasks(Healthy, trial="nothing_outlives_close"):
    """Leaves a task behind."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        await super().put(key, data, exclusive=exclusive)
        self.__dict__.setdefault("tasks", []).append(asyncio.create_task(asyncio.sleep(60)))


class OpenAfterClose(Healthy, trial="a_closed_driver_says_so"):
    """Accepts calls after close()."""

    async def close(self) -> None:
        """Nothing."""


class LosesEmptyObjects(Healthy, trial="the_same_calls_give_the_same_results_as_memory"):
    """Takes an empty object for none, where one is replaced."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        replaces = self._path(key) in self.objects
        await super().put(key, data, exclusive=exclusive)
        if not data and replaces:
            await self.delete(key)


class GetsAnything(Healthy, trial="what_is_not_small_is_not_got"):
    """Gets objects above the size limit of get."""

    async def get(self, key: str) -> bytes:
        return self._lookup(key)[0]


class LooksTooLate(Healthy, trial="what_is_not_small_is_not_got"):
    """Reads first, and then looks how large it was."""

    async def get(self, key: str) -> bytes:
        data = bytes(bytearray(self._lookup(key)[0]))
        check_small(len(data), self.uri, key)
        return data


class OptionsInUri(Healthy, trial="the_uri_is_without_options"):
    """Prints its options as a part of its URI."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "threads": Option(integer(1, 64), 4, "operations in flight")
    }

    @classmethod
    def open(cls, uri: Uri) -> MemoryDriver:
        driver = cls(uri.location)
        driver.uri = uri.redacted
        return driver


class DefaultsElsewhere(Healthy, trial="every_option_takes_its_default"):
    """Takes the default of an option for something else than its absence."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {"folder": Option(choice("a", "b"), "a", "where")}

    @classmethod
    def open(cls, uri: Uri) -> MemoryDriver:
        driver = cls(uri.location + uri.options.get("folder", ""))
        driver.uri = uri.root
        return driver


class RefusesLate(Healthy):
    """Not wrong: only when all has come does the server say that a name is too long for it."""

    class upload(_MemoryUpload):
        async def commit(self, nbytes: int | None = None) -> None:
            try:
                self._driver._check_length(self._key)  # type: ignore[attr-defined]
            except HoldfastError:
                await self.abort()
                raise
            await super().commit(nbytes)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        self._check_length(key)
        await super().put(key, data, exclusive=exclusive)

    def _check_length(self, key: str) -> None:
        if len(key) > 200:
            raise StorageError("KeyTooLong", uri=self.uri, key=key)


class RefusesLateAndKeeps(RefusesLate, trial="strange_keys_are_stored_faithfully_or_refused"):
    """Says so, and shows the object all the same."""

    upload = _MemoryUpload

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        self.place(key, data)
        self._check_length(key)


class OverstatesItsLimit(Healthy, trial="an_object_may_be_as_large_as_the_traits_say"):
    """Says that it takes an object of a size which it refuses."""

    class upload(_MemoryUpload):
        async def commit(self, nbytes: int | None = None) -> None:
            if self._nbytes == 1 << 20:
                raise StorageError("EntityTooLarge", uri=self._driver.uri, key=self._key)
            await super().commit(nbytes)


class DeletesNoRoots(Healthy):
    """Fails to remove the root that the kit cleans up at its end."""

    async def delete_all(self, prefix: str) -> None:
        if prefix.startswith("conformance-"):
            raise OSError(16, "Device or resource busy")
        await super().delete_all(prefix)


class DeviationThatPasses(Healthy):
    """Declares a deviation although the trial passes."""

    deviations: ClassVar[dict[str, str]] = {"an_object_comes_back": "it does"}


class DeviationThatFails(ShortRead):
    """Declares a deviation, and the trial fails."""

    deviations: ClassVar[dict[str, str]] = {
        "a_read_past_the_end_is_damage": "past the end it reads nothing"
    }
