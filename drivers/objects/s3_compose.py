"""Uploads to S3 with parts that the store copies from other objects (UploadPartCopy). By botocore,
because obstore cannot."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ...core.aio import to_the_end
from ...errors import DamagedError, HoldfastError, NotFoundError, StorageError
from ..contract import Buffer, Driver
from .uploads import MultipartUpload, Target

_SENT_NBYTES = 1 << 20
_PART_MIN_NBYTES = 5 << 20
"""S3's minimum, except for the last part."""
_PART_MAX_NBYTES = 16 << 20


def part_min_nbytes(preferred_nbytes: int) -> int:
    """Return the minimum size of a part with copies. As many parts of it as S3 takes make the
    largest object."""
    return min(max(preferred_nbytes, _PART_MIN_NBYTES), _PART_MAX_NBYTES)


class Body(io.RawIOBase):
    """A request's content, which botocore reads from the caller's memory without copying it."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).toreadonly()
        self._at = 0

    def md5(self) -> str:
        """Return the digest, as the store takes it to check the content."""
        digest = hashlib.md5(self._data, usedforsecurity=False).digest()
        return base64.b64encode(digest).decode()

    def read(self, nbytes: int | None = -1) -> Any:
        """Return up to 1 MiB, whatever ``nbytes``: botocore asks for 16 KiB at a time."""
        piece = self._data[self._at : self._at + _SENT_NBYTES]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


class Ask(Protocol):
    """Sends one request for the object. ``doing`` starts messages, and ``operation`` names
    botocore's method. Raises StorageError."""

    def __call__(
        self, doing: str, operation: str, **params: Any
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        """Return the response."""


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    before: bytes
    """Bytes, fewer than a part may have, that were written before it and belong to it."""


class ComposedUpload(MultipartUpload):
    """A multipart upload whose parts are the caller's writes and copies.

    A write that is smaller than a part may be is kept, and sent with the next one. After a failed
    call, its part stays reserved, so that the same bytes can be written even after later ones.
    """

    def __init__(
        self,
        target: Target,
        ask: Ask,
        copied_from: Callable[[Driver, str], dict[str, Any]],
    ) -> None:
        """``copied_from`` returns the parameters that name an object of another driver."""
        super().__init__(target)
        self._ask = ask
        self._copied_from = copied_from
        self._min_nbytes = part_min_nbytes(target.part_nbytes)
        self._upload: dict[str, str] = {}
        self._reached = 0
        self._kept = bytearray()
        self._numbers = 0
        self._failed: dict[tuple[int, int], _Part] = {}
        """Parts of failed calls, by first byte and size."""
        self._tags: dict[int, str] = {}
        """Entity tags of the stored parts, by number."""
        self._running: set[asyncio.Future[Any]] = set()
        self._sizes: dict[tuple[str, str], int] = {}
        """Sizes of the objects copied from, by URI and key."""

    async def begin(self) -> None:
        """Start the upload on the store. Raises StorageError."""
        try:
            answer = await self._run(self._ask("begin", "create_multipart_upload"))
            self._upload = {"UploadId": answer["UploadId"]}
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
        params = {"PartNumber": part.number, "Body": data, **self._upload}
        return str((await self._ask("write", "upload_part", **params))["ETag"])

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
        answer = await self._ask(
            "copy",
            "upload_part_copy",
            PartNumber=part.number,
            CopySourceRange=f"bytes={key_start}-{stop - 1}",
            **self._copied_from(source, key),
            **self._upload,
        )
        return str(answer["CopyPartResult"]["ETag"])

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
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        params = {"MultipartUpload": {"Parts": parts}, **self._upload}
        await self._completed(self._ask("commit", "complete_multipart_upload", **params))

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

    async def _drop(self) -> bool:
        """Return whether nothing is left. Raises StorageError."""
        if not self._upload:
            return False  # the store may have begun it
        with suppress(NotFoundError):  # completed, or dropped by another process
            await self._ask("abort", "abort_multipart_upload", **self._upload)
        return True
