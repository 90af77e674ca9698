"""Uploads to an object store: in one request, or in parts that are sent while others are still
being written.

obstore takes the parts of an upload from an iterator and references each until the store has it.
When it drops the reference, the part is finalized, and the write that supplied it returns. So a
caller's memory is only read until its write returns, and only parts assembled from several writes
are copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.aio import to_the_end
from ...core.units import ceil_div
from ...errors import NotFoundError, StorageDownError, StorageError
from ..contract import Buffer, ObjectInfo, Upload
from ..ranges import Ranges
from .errors import failures

PARTS_MAX = 10_000
"""Limit of S3 and GCS. Azure allows 50,000."""


class Part(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of one part. The sender references this very object until they are stored."""


def part_nbytes_for(nbytes: int, preferred_nbytes: int) -> int:
    """Return the size of all parts but the last: the smallest multiple of ``preferred_nbytes`` that
    needs at most :data:`PARTS_MAX` parts."""
    multiple = ceil_div(nbytes, PARTS_MAX * preferred_nbytes)
    return max(1, multiple) * preferred_nbytes


@dataclass
class Cutter:
    """Splits an object of at most ``nbytes`` into parts of ``part_nbytes``; the last may be
    shorter."""

    nbytes: int
    part_nbytes: int
    reached: int = 0
    """Number of bytes passed to :meth:`cut`."""
    _gathered: npt.NDArray[np.uint8] | None = None

    def cut(self, data: Buffer) -> Iterator[Part]:
        """Take the next bytes of the object and yield the parts they complete, in order.

        A part is a view of ``data`` or its own memory; the sender treats both alike. After the last
        of ``nbytes`` is cut, nothing remains.
        """
        taken = 0
        while taken < len(data):
            start = self.reached - self.reached % self.part_nbytes
            room = min(start + self.part_nbytes, self.nbytes) - self.reached
            piece = np.frombuffer(data[taken : taken + room], np.uint8)
            whole = self._add(piece, self.reached - start, room)
            taken += len(piece)
            self.reached += len(piece)
            if whole is not None:
                yield whole.view(Part)

    def rest(self) -> Part | None:
        """Return the unfinished last part of an object that ends here, before ``nbytes``; None if
        nothing is left over."""
        rest = self._gathered
        self._gathered = None
        if rest is None:
            return None
        return rest[: self.reached % self.part_nbytes].view(Part)

    def _add(
        self, piece: npt.NDArray[np.uint8], offset: int, room: int
    ) -> npt.NDArray[np.uint8] | None:
        """Add ``piece`` at ``offset`` of the current part and return the part if it is now
        complete."""
        full_nbytes = offset + room
        if offset == 0 and len(piece) == room == self.part_nbytes:
            return piece
        if self._gathered is None:
            self._gathered = np.empty(full_nbytes, np.uint8)
        np.copyto(self._gathered[offset : offset + len(piece)], piece)
        if len(piece) < room:
            return None
        whole = self._gathered
        self._gathered = None
        return whole


_RELEASE_S = 10.0
"""Seconds that obstore may take to release the parts of an ended upload."""
_CLOCKS_S = 60.0
"""Seconds that this host's clock may be ahead of the store's."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of an upload. ``uri``, redacted, and ``key`` appear in messages."""

    uri: str
    key: str
    place: tuple[str, ...]
    """Identifies the object across all drivers of this process."""
    nbytes: int
    part_nbytes: int
    concurrency: int
    limit_s: float
    """Seconds of inactivity after which the store counts as down."""
    put: Callable[..., Awaitable[Any]]
    """obstore's ``put_async``, bound to store and path."""
    stat: Callable[[], Awaitable[ObjectInfo]]
    """Returns the store's information about the object."""
    drop_unfinished: Callable[[float], Awaitable[None]]
    """Drops unfinished uploads to this path that began in the given last seconds."""


class WholeUpload(Upload):
    """An object sent in one request at commit. Its bytes are copied."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._written = Ranges(target.nbytes, uri=target.uri, key=target.key)
        self._content = np.empty(target.nbytes, np.uint8)

    async def begin(self) -> None:
        """Do nothing: the store is only contacted at commit."""

    async def write(self, start: int, data: Buffer) -> None:
        self._written.check(start, len(data))
        self._content[start : start + len(data)] = np.frombuffer(data, np.uint8)
        self._written.add(start, len(data))

    async def commit(self, nbytes: int | None = None) -> None:
        """See :meth:`Upload.commit`. If cancelled, it still runs to completion, so the object may
        become visible."""
        self._written.check_open()
        content = self._content
        target = self._target
        await self.abort()
        self._written.check_complete(nbytes)
        with failures("upload", target.uri, target.key):
            await to_the_end(target.put(content[: self._written.nbytes], use_multipart=False))

    async def abort(self) -> None:
        self._written.end()
        self._content = np.empty(0, np.uint8)


@dataclass
class _Place:
    """Uploads of this process to one object: the number in progress, and since when there may be
    leftovers."""

    live: int = 0
    left_since_s: float | None = None


_places: dict[tuple[str, ...], _Place] = {}


def is_live(place: tuple[str, ...]) -> bool:
    """Return whether this process has a multipart upload to an object in progress."""
    return place in _places


class _Feed:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set when obstore asks for the first part: the store has started the upload."""
        self._parts: deque[Part] = deque()
        self._news = asyncio.Event()
        self._ended = False

    def give(self, part: Part) -> None:
        self._parts.append(part)
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    def drop(self) -> None:
        self._parts.clear()
        self.end()

    def __aiter__(self) -> _Feed:
        return self

    async def __anext__(self) -> Part:
        self.asked.set()
        while not self._parts:
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._parts.popleft()


class MultipartUpload(Upload):
    """A multipart upload. Writes are in ascending order."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._written = Ranges(target.nbytes, uri=target.uri, key=target.key)
        self._began_s = time.monotonic()
        self._leaving: asyncio.Future[None] | None = None
        """Cleanup of an ended upload, which every caller of abort awaits."""
        _places.setdefault(target.place, _Place()).live += 1

    def _check_next(self, start: int, nbytes: int, reached: int) -> None:
        """Raise StorageError unless ``nbytes`` bytes at ``start`` lie in the object and come next:
        ``reached`` bytes came before."""
        self._written.check(start, nbytes)
        if start != reached:
            raise StorageError(
                f"bytes {start}:{start + nbytes} are out of order: byte {reached} is next",
                uri=self._target.uri,
                key=self._target.key,
                advice="The parts of an object store's upload are written in ascending order.",
            )

    async def _completed(self, completion: Awaitable[Any]) -> None:
        """Await ``completion``, and check what the store has then. Raises StorageError."""
        began_s = time.time()
        try:
            await completion
        except NotFoundError:
            if not await self._was_completed(began_s):
                raise
            return
        # Some stores acknowledge data that they did not keep.
        stored_nbytes = (await self._target.stat()).nbytes
        if stored_nbytes != self._written.nbytes:
            raise StorageError(
                f"the store acknowledged {self._written.nbytes} bytes, but has {stored_nbytes}",
                uri=self._target.uri,
                key=self._target.key,
            )

    async def _was_completed(self, began_s: float) -> bool:
        """Return whether the store has the object although it no longer knows the upload.

        The client repeats the completion request if its answer is lost, when the store may have
        already performed it. So the object counts if it has the right size and is no older than the
        request, which began at ``began_s`` by this host's clock. If somebody dropped the upload
        instead, there is no such object.
        """
        try:
            found = await self._target.stat()
        except NotFoundError:
            return False
        return found.nbytes == self._written.nbytes and found.modified_s >= began_s - _CLOCKS_S

    async def _over_and(self, leave: Coroutine[Any, Any, None]) -> None:
        self._written.end()
        self._leaving = asyncio.ensure_future(leave)
        await to_the_end(self._leaving)

    async def _leave(self, *, failed: bool) -> None:
        """Deregister the upload. The process's last upload to an object drops the leftovers of the
        failed ones.

        The store does not tell who started an upload, so leftovers are identified by object and
        time, and nothing is dropped while another upload is in progress.
        """
        place = _places[self._target.place]
        place.live -= 1
        if failed:
            place.left_since_s = min(self._began_s, place.left_since_s or self._began_s)
        if place.live:
            return
        del _places[self._target.place]
        if place.left_since_s is not None:
            try:
                await self._target.drop_unfinished(time.monotonic() - place.left_since_s)
            except StorageError as error:
                _log.warning("parts of a failed upload stay until they are swept: %s", error)


class PartsUpload(MultipartUpload):
    """A multipart upload by obstore."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._cutter = Cutter(target.nbytes, part_nbytes_for(target.nbytes, target.part_nbytes))
        self._feed = _Feed()
        self._put: asyncio.Future[Any] | None = None
        self._given_up = False
        """True if a failed or cancelled write has stopped the upload."""
        self._first_returned = asyncio.Event()
        """Set when that write returns."""

    async def begin(self) -> None:
        """Start the upload on the store. Raises StorageError if the store rejects it."""
        self._put = asyncio.ensure_future(self._run())
        asked = asyncio.ensure_future(self._feed.asked.wait())
        try:
            await asyncio.wait(
                [self._put, asked],
                timeout=self._target.limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not asked.done():
                await self._raise_failure("begin")
        except BaseException:
            await self.abort()
            raise
        finally:
            asked.cancel()

    async def _run(self) -> None:
        target = self._target
        with failures("upload", target.uri, target.key):
            await target.put(
                self._feed,
                use_multipart=True,
                chunk_size=self._cutter.part_nbytes,
                max_concurrency=target.concurrency,
            )

    async def write(self, start: int, data: Buffer) -> None:
        """See :meth:`Upload.write`. An upload with a failed or cancelled write cannot be committed.
        A rejected part may only be reported by a later write or by ``commit``."""
        self._check_next(start, len(data), self._cutter.reached)
        stored = [
            future for part in self._cutter.cut(data) if (future := self._send(part)) is not None
        ]
        try:
            await self._wait_for(stored)
        except BaseException:
            await self._give_up(stored)
            raise
        self._written.add(start, len(data))

    def _send(self, part: Part) -> asyncio.Future[None] | None:
        """Hand a part to obstore. Returns a future that is done when the store has it; None for a
        short last part, which is in our own memory and is only sent at commit."""
        short = len(part) < self._cutter.part_nbytes
        stored = None
        if not short:
            loop = asyncio.get_running_loop()
            stored = loop.create_future()
            weakref.finalize(part, _mark_stored, loop, stored).atexit = False
        self._feed.give(part)
        return stored

    async def _wait_for(self, stored: Collection[asyncio.Future[None]]) -> None:
        assert self._put is not None
        waiting: set[asyncio.Future[Any]] = set(stored)
        while waiting:
            done, _ = await asyncio.wait(
                {*waiting, self._put},
                timeout=self._target.limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._put in done or not done:
                await self._raise_failure("write")
            waiting -= done

    async def _raise_failure(self, doing: str) -> None:
        assert self._put is not None
        if not self._put.done():
            message = f"{doing} failed: no answer for {self._target.limit_s:g} s"
            raise StorageDownError(message, uri=self._target.uri, key=self._target.key)
        if self._put.cancelled() or self._put.exception() is None:
            raise self._written.over()
        await self._put

    async def commit(self, nbytes: int | None = None) -> None:
        """See :meth:`Upload.commit`. If cancelled, it still runs to completion, so the object may
        become visible."""
        self._written.check_open()
        try:
            self._written.check_complete(nbytes)
            if (last := self._cutter.rest()) is not None:
                self._feed.give(last)
            self._feed.end()
            await to_the_end(self._completed(self._finish()))
        except BaseException:
            await self.abort()
            raise
        await self._over_and(self._leave(failed=False))

    async def _finish(self) -> None:
        assert self._put is not None
        await asyncio.wait([self._put], timeout=self._target.limit_s)
        if not self._put.done():
            await self._raise_failure("commit")
        await self._put

    async def abort(self) -> None:
        """See :meth:`Upload.abort`. Asks the store to discard the parts it has. If it is
        unreachable, they stay until :meth:`Driver.sweep` or :meth:`Driver.delete_all` finds
        them."""
        if self._put is None:
            return
        if self._leaving is None:
            self._stop()
            await self._over_and(self._clean_up())
        else:
            await to_the_end(self._leaving)

    async def _clean_up(self) -> None:
        assert self._put is not None
        await asyncio.wait([self._put], timeout=_RELEASE_S)
        if self._put.done() and not self._put.cancelled():
            self._put.exception()  # retrieved, so that asyncio does not warn about it
        await self._leave(failed=self._feed.asked.is_set())

    def _stop(self) -> None:
        assert self._put is not None
        self._feed.drop()
        self._put.cancel()

    async def _give_up(self, stored: Collection[asyncio.Future[None]]) -> None:
        """Stop the upload and wait until the memory of a failed or cancelled write belongs to the
        caller again.

        Only the write that stops the upload knows the reason, so it returns first, followed by
        concurrent writes.
        """
        is_first = not self._given_up
        self._given_up = True
        self._stop()
        try:
            if stored:
                await to_the_end(asyncio.wait(stored, timeout=_RELEASE_S))
        finally:
            if is_first:
                self._first_returned.set()
        if not is_first:
            await self._first_returned.wait()


def _mark_stored(loop: asyncio.AbstractEventLoop, stored: asyncio.Future[None]) -> None:
    """Mark a part as stored. Called in any thread, when the last reference to it is dropped."""

    def set_result() -> None:
        if not stored.done():
            stored.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting
        loop.call_soon_threadsafe(set_result)
