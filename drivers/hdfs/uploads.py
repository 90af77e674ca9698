"""An upload to HDFS: one temporary file per segment, joined into one and renamed to its key.

A failing HDFS writer may still *complete* its file. So files with a key are never written to, and
the length is checked with the name node before the rename.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.aio import side_by_side
from ...errors import StorageDownError, StorageError
from ..asynchronous import AsyncDriver, AsyncUpload
from ..calls import Call, CallerGone
from ..contract import Buffer, segments
from .client import Client, whole_reader
from .names import temporary_name
from .webhdfs import ConcatRefused, WebHdfs

if TYPE_CHECKING:
    import hdfs_native
    from hdfs_native._internal import RawFileWriter


PIECE_NBYTES = 1 << 20
"""Bytes copied per call. hdfs-native only accepts ``bytes``, so each piece is copied first, while
holding the GIL. This size fits the CPU cache and lets the allocator reuse memory. Pieces of 4 MiB
cost a tenth of a second more per GiB, plus page faults; 256 KiB means more calls."""

PLACEMENTS = 4
"""Attempts to recreate a file whose first write fails. For ten minutes the name node keeps choosing
a dead DataNode, and the library does not ask for another."""

TOUCH_S = 600.0
"""Interval at which a live upload touches its files; far below the age at which they are swept."""

ABORT_S = 10.0
"""Seconds an abort spends deleting; a later save sweeps the rest."""

_log = logging.getLogger(__name__)
_warned_of: set[tuple[str, ...]] = set()
"""File systems, by the addresses of their name nodes, already mentioned in a warning."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Options of new files; None for the name node's default. ``sync`` waits for the DataNodes'
    disks, not just their memory."""

    block_nbytes: int | None
    replication: int | None
    sync: bool


class _File:
    """One temporary file, written without gaps from offset ``start`` of the object."""

    def __init__(
        self, client: Client, path: str, key: str, start: int, options: FileOptions
    ) -> None:
        self.path = path
        self._client = client
        self._key = key
        self._options = options
        self._start = self._at = start
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Writes waiting for the bytes before theirs, by start offset."""
        self._writer: RawFileWriter | None = None
        self._broken: BaseException | None = None
        self.answered = False
        """True if the name node has answered the request to create the file."""

    async def write(self, start: int, data: Buffer) -> None:
        """Append ``data`` once everything before ``start`` is written; those writes have already
        started."""
        if self._at != start:
            turn = self._turns[start] = asyncio.get_running_loop().create_future()
            await turn
        await self._append(data)
        self._at += len(data)
        waiting = self._turns.pop(self._at, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def _append(self, data: Buffer) -> None:
        for last in (*[False] * PLACEMENTS, True):
            writer = await self.opened()
            try:
                await self._client.call(
                    "write", self._key, functools.partial(_write, writer=writer, data=data)
                )
                return
            except StorageDownError as error:
                if last or self._at != self._start or isinstance(error.__cause__, TimeoutError):
                    raise
            self._writer = None
            await self._client.delete(self.path, self._key)

    async def close(self) -> None:
        """Complete the file: as many DataNodes hold it as the name node requires."""
        writer = await self.opened()
        sync = self._options.sync

        def close(call: Call) -> None:
            if sync:
                writer.hsync()
            writer.close()

        await self._client.call("close", self._key, close)
        self._writer = None

    def spoil(self, error: BaseException) -> None:
        """Make every further call fail, and release connections and lease. The file's length is
        then unknown and irrelevant."""
        self._broken = self._broken or error
        self._writer = None
        for turn in self._turns.values():
            if not turn.done():
                turn.set_result(None)

    async def opened(self) -> RawFileWriter:
        """Return the file's writer, creating the file and the folders above it if needed."""
        self._check()
        if self._writer is None:
            self.answered = False
            create = functools.partial(self._create, inner=self._client.inner)
            self._writer = await self._client.call("create", self._key, create)
            self._check()
        return self._writer

    def _create(self, call: Call, *, inner: hdfs_native.Client) -> RawFileWriter:
        from hdfs_native import WriteOptions

        options = WriteOptions(
            block_size=self._options.block_nbytes,
            replication=self._options.replication,
            overwrite=False,
            create_parent=True,
        )
        try:
            # The library's inner writer may be dropped at any time, in any thread. The outer one
            # closes its file when it is garbage-collected, so whichever thread drops the last
            # reference, possibly the event loop's, would wait a minute or more for the name node.
            writer = inner.inner.create(self.path, options)
        finally:
            self.answered = True
        try:
            with call:
                return writer
        except CallerGone:  # the caller aborted before the answer, so its abort has deleted nothing
            inner.delete(self.path, False)
            raise

    def _check(self) -> None:
        if self._broken is not None:
            raise StorageError(
                "an earlier write failed", uri=self._client.uri, key=self._key
            ) from self._broken


def _write(call: Call, *, writer: RawFileWriter, data: Buffer) -> None:
    for start in range(0, len(data), PIECE_NBYTES):
        with call:
            piece = bytes(data[start : start + PIECE_NBYTES])
        writer.write(piece)


class HdfsUpload(AsyncUpload):
    """An upload in segments. Segments may be written concurrently; within each, writes are
    ascending."""

    def __init__(
        self,
        driver: AsyncDriver,
        key: str,
        nbytes: int,
        path: str,
        client: Client,
        webhdfs: WebHdfs | None,
        options: FileOptions,
    ) -> None:
        """``path`` is that of the key, ``options`` are those of new files."""
        super().__init__(driver, key, nbytes)
        self._client = client
        self._webhdfs = webhdfs
        self._path = path
        self._cuts = segments(nbytes, driver.traits)
        self._next = [start for start, _ in self._cuts]
        folder, _, name = self._path.rpartition("/")
        temporary = f"{folder}/{temporary_name(name)}"
        self._files = [
            _File(self._client, f"{temporary}.{n}.tmp", key, start, options)
            for n, (start, _) in enumerate(self._cuts)
        ]
        self._touched_s = time.monotonic()

    async def _begin(self) -> None:
        """Create the first file, so that errors surface early."""
        await self._files[0].opened()

    async def _write(self, start: int, data: Buffer) -> None:
        """See :meth:`AsyncUpload._write`. Raises StorageError for bytes that are not next in their
        segment."""
        # Assign offsets before the first await, so that writes keep their order.
        pieces = list(self._pieces(start, data))
        try:
            for file, at, piece in pieces:
                await file.write(at, piece)
        except BaseException as error:
            for file, _, _ in pieces:
                file.spoil(error)
            raise
        await self._touch()

    async def _commit(self, *, exclusive: bool) -> None:
        """See :meth:`AsyncUpload._commit`. If cancelled or unanswered near its end, the object may
        still become visible."""
        reached = zip(self._files, self._cuts, self._next, strict=True)
        # Segments that were never started have no file.
        self._files[1:] = [file for file, (start, _), at in reached if at > start > 0]
        await side_by_side(*(file.close() for file in self._files))
        await self._join()
        await self._publish(overwrite=not exclusive)
        del self._files[0]  # it has the key now; the others were copied into it
        await self._drop()

    async def _drop(self) -> None:
        for file in self._files:
            file.spoil(self._error("the upload is over", StorageError))
        # If the creation of a file is unanswered, the thread waiting for the answer deletes the
        # file; a silent name node would stall us here too.
        made = [file for file in self._files if file.answered]
        # The next use of the storage will report the problem; a sweep removes the rest.
        with contextlib.suppress(StorageError, TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await side_by_side(*map(self._delete, made))

    async def _delete(self, file: _File) -> None:
        await self._client.delete(file.path, self.key)
        # close() may abort an upload that is already being aborted.
        with contextlib.suppress(ValueError):
            self._files.remove(file)

    def _pieces(self, start: int, data: Buffer) -> Iterator[tuple[_File, int, Buffer]]:
        stop = start + len(data)
        for n, (begin, end) in enumerate(self._cuts):
            first = max(start, begin)
            last = min(stop, end)
            if first >= last:
                continue
            if self._next[n] != first:
                raise self._error(
                    f"bytes {first}:{last} are not next: {self._next[n]} is", StorageError
                )
            self._next[n] = last
            yield self._files[n], first, data[first - start : last - start]

    async def _join(self) -> None:
        target, *others = [file.path for file in self._files]
        if not others:
            return
        owner = (await self._client.status(target, self.key, "commit")).owner
        try:
            if self._webhdfs is None:
                raise ConcatRefused("WebHDFS is switched off")
            await self._webhdfs.concat(target, others, owner)
        except ConcatRefused as refused:
            joined = (
                await self._client.status(target, self.key, "commit")
            ).length == self.written.nbytes
            if not joined:  # not just a lost answer
                _warn_once(
                    self._client.uri, self._webhdfs.addresses if self._webhdfs else (), str(refused)
                )
                await self._copy(target, others)
                return
        del self._files[1:]

    async def _copy(self, target: str, others: Sequence[str]) -> None:
        inner = self._client.inner

        def copy(call: Call) -> None:
            whole_reader(inner, target)  # only a fully reported file can be appended to
            writer = inner.inner.append(target)  # see _File._create
            for path in others:
                reader = whole_reader(inner, path)
                for piece in reader.read_range_stream(0, len(reader)):
                    writer.write(piece)
                    with call:
                        pass  # counts as progress
            writer.close()

        await self._client.call("join", self.key, copy)

    async def _publish(self, *, overwrite: bool) -> None:
        path = self._files[0].path
        ours = await self._client.status(path, self.key, "commit")
        if ours.length != self.written.nbytes:
            raise self._error(
                f"commit: {ours.length} of {self.written.nbytes} bytes arrived", StorageDownError
            )
        if self.written.nbytes:  # a key must be readable by everyone at once
            inner = self._client.inner
            await self._client.call(
                "commit", self.key, lambda call: whole_reader(inner, path, self.written.nbytes)
            )
        try:
            await self._client.rename(path, self._path, self.key, overwrite=overwrite)
        except StorageError:
            # The library retries on a broken connection, and then finds the source gone or the
            # target taken.
            if not await self._renamed(path, ours):
                raise

    async def _renamed(self, path: str, ours: hdfs_native.FileStatus) -> bool:
        """Return whether the file formerly at ``path``, with status ``ours``, now has the key. A
        rename keeps time and length."""
        with contextlib.suppress(StorageError):
            await self._client.status(path, self.key, "commit")
            return False
        with contextlib.suppress(StorageError):
            there = await self._client.status(self._path, self.key, "commit")
            return (there.modification_time, there.length) == (ours.modification_time, ours.length)
        return False

    async def _touch(self) -> None:
        """Touch the files to mark the upload as live: the name node does not update their times
        while they grow."""
        now_s = time.monotonic()
        if now_s - self._touched_s < TOUCH_S:
            return
        self._touched_s = now_s
        inner = self._client.inner
        at_ms = int(time.time() * 1000)

        def touch(call: Call) -> None:
            for file in self._files:
                with contextlib.suppress(FileNotFoundError):  # its segment has not started
                    inner.set_times(file.path, at_ms, at_ms)

        await self._client.call("touch", self.key, touch)

    def _error(self, message: str, kind: type[StorageError]) -> StorageError:
        return kind(message, uri=self._client.uri, key=self.key)


def _warn_once(uri: str, addresses: tuple[str, ...], reason: str) -> None:
    """Warn once per file system, not per upload, that parts are joined by copying."""
    if addresses not in _warned_of:
        _warned_of.add(addresses)
        _log.warning("%s: parts are joined by copying: %s; ?streams=1 avoids it", uri, reason)
