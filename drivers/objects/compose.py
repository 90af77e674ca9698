"""Uploads with parts that the store copies from other objects, which obstore cannot request."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...core.aio import to_the_end
from ...errors import DamagedError, HoldfastError, StorageError
from ..contract import Buffer, Driver
from .uploads import MultipartUpload, Target

_PART_MIN_NBYTES = 5 << 20
"""S3's minimum, except for the last part. On other stores, a request for less gains little."""
_PART_MAX_NBYTES = 16 << 20


def part_min_nbytes(preferred_nbytes: int) -> int:
    """Return the minimum size of a part with copies. As many parts of it as the store takes
    make the largest object."""
    return min(max(preferred_nbytes, _PART_MIN_NBYTES), _PART_MAX_NBYTES)


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    before: bytes
    """Bytes, fewer than a part may have, that were written before it and belong to it."""


class ComposedUpload(MultipartUpload):
    """A multipart upload whose parts are the caller's writes and copies.

    A write that is smaller than a part may be is kept, and sent with the next one. After a failed
    call, its part stays reserved, so that the same bytes can be written even after later ones.
    Subclasses send the requests, and raise StorageError.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._min_nbytes = part_min_nbytes(target.part_nbytes)
        self._reached = 0
        self._kept = bytearray()
        self._numbers = 0
        self._failed: dict[tuple[int, int], _Part] = {}
        """Parts of failed calls, by first byte and size."""
        self._tags: dict[int, str] = {}
        """The store's names of the stored parts, by number."""
        self._running: set[asyncio.Future[Any]] = set()
        self._sizes: dict[tuple[str, str], int] = {}
        """Sizes of the objects copied from, by URI and key."""

    @abstractmethod
    async def _begin(self) -> None:
        """Start the upload."""

    @abstractmethod
    async def _send_part(self, number: int, data: Buffer) -> str:
        """Store a part, and return its tag. The part is empty only if the object is."""

    @abstractmethod
    async def _copy_part(self, number: int, source: Driver, key: str, start: int, stop: int) -> str:
        """Have the store copy a part, and return its tag."""

    @abstractmethod
    async def _complete(self, tags: dict[int, str]) -> None:
        """Make the parts visible, in the order of their numbers."""

    @abstractmethod
    async def _drop(self) -> bool:
        """Discard the parts. Return whether nothing is left."""

    async def begin(self) -> None:
        """Start the upload on the store. Raises StorageError."""
        try:
            await self._run(self._begin())
        except BaseException:
            await self.abort()
            raise

    async def write(self, start: int, data: Buffer) -> None:
        """See :meth:`Upload.write`."""
        self._written.check(start, len(data))
        part = self._failed.pop((start, len(data)), None)
        if part is None:
            self._take(start, len(data))
            if len(self._kept) + len(data) < self._min_nbytes:
                self._kept += data
                self._written.add(start, len(data))
                return
            part = self._new_part()
        await self._store(part, start, len(data), self._sent(part, data))

    async def copy(self, start: int, source: Driver, key: str, key_start: int, nbytes: int) -> None:
        """See :meth:`Upload.copy`. The store copies in one request."""
        self._written.check(start, nbytes)
        is_last = start + nbytes == self._written.nbytes
        if nbytes < self._min_nbytes and not is_last:
            raise self._too_small(nbytes)
        part = self._failed.pop((start, nbytes), None)
        if part is None:
            self._take(start, nbytes)
            part = self._new_part()
        copied = self._copied(part, source, key, key_start, nbytes)
        await self._store(part, start, nbytes, copied)

    def _take(self, start: int, nbytes: int) -> None:
        self._check_next(start, nbytes, self._reached)
        self._reached += nbytes

    def _new_part(self) -> _Part:
        self._numbers += 1
        part = _Part(self._numbers, bytes(self._kept))
        self._kept.clear()
        return part

    async def _store(
        self, part: _Part, start: int, nbytes: int, tag: Coroutine[Any, Any, str]
    ) -> None:
        try:
            self._tags[part.number] = await self._run(tag)
        except HoldfastError:
            self._failed[start, nbytes] = part
            raise
        self._written.add(start, nbytes)

    async def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of ``work``, which runs to the end if the caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await to_the_end(task)

    async def _sent(self, part: _Part, data: Buffer) -> str:
        if part.before:
            data = memoryview(b"".join((part.before, data)))
        return await self._send_part(part.number, data)

    async def _copied(
        self, part: _Part, source: Driver, key: str, key_start: int, nbytes: int
    ) -> str:
        if part.before:
            raise self._too_small(len(part.before))
        stop = key_start + nbytes
        if (source.uri, key) not in self._sizes:
            self._sizes[source.uri, key] = (await source.stat(key)).nbytes
        end = self._sizes[source.uri, key]
        if not 0 <= key_start <= stop <= end:
            message = f"object ends at byte {end}, and does not have {key_start}:{stop}"
            raise DamagedError(message, uri=source.uri, key=key)
        return await self._copy_part(part.number, source, key, key_start, stop)

    def _too_small(self, nbytes: int) -> StorageError:
        return StorageError(
            f"{nbytes} bytes are too few for a part: {self._min_nbytes} are needed",
            uri=self._target.uri,
            key=self._target.key,
        )

    async def commit(self, nbytes: int | None = None) -> None:
        """See :meth:`Upload.commit`. If cancelled, it still runs to completion, so the object may
        become visible."""
        self._written.check_open()
        try:
            self._written.check_complete(nbytes)
            await self._run(self._finish())
        except BaseException:
            await self.abort()
            raise
        await self._over_and(self._leave(failed=False))

    async def _finish(self) -> None:
        if self._kept or not self._tags:
            part = self._new_part()
            self._tags[part.number] = await self._sent(part, memoryview(b""))
        await self._completed(self._complete(dict(sorted(self._tags.items()))))

    async def abort(self) -> None:
        """See :meth:`Upload.abort`. Asks the store to discard the parts. If it is unreachable, they
        stay until :meth:`Driver.sweep` or :meth:`Driver.delete_all` finds them."""
        if self._leaving is None:
            await self._over_and(self._clean_up())
        else:
            await to_the_end(self._leaving)

    async def _clean_up(self) -> None:
        if self._running:
            await asyncio.wait(self._running)
        is_dropped = False
        with suppress(StorageError):
            is_dropped = await self._drop()
        await self._leave(failed=not is_dropped)
