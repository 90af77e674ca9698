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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.aio import side_by_side
from ...errors import StorageDownError, StorageError
from ..calls import Call, CallerGone
from ..contract import Buffer, Upload
from ..ranges import Ranges
from .client import Client, appending, creating, whole_reader
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
            writer = creating(inner, self.path, options)
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


class HdfsUpload(Upload):
    """An upload in segments. Segments may be written concurrently; within each, writes are
    ascending."""

    def __init__(
        self,
        client: Client,
        webhdfs: WebHdfs | None,
        path: str,
        key: str,
        cuts: Sequence[tuple[int, int]],
        options: FileOptions,
        on_over: Callable[[HdfsUpload], None],
    ) -> None:
        """Take (start, stop) of each segment as ``cuts``. ``on_over`` is called when nothing is
        left to drop."""
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/{temporary_name(name)}"
        self._client = client
        self._webhdfs = webhdfs
        self._path = path
        self._key = key
        self._cuts = cuts
        self._next = [start for start, _ in cuts]
        self._files = [
            _File(client, f"{temporary}.{n}.tmp", key, start, options)
            for n, (start, _) in enumerate(cuts)
        ]
        self._written = Ranges(cuts[-1][1], uri=client.uri, key=key)
        self._over = False
        self._on_over = on_over
        self._touched_s = time.monotonic()

    async def begin(self) -> None:
        """Create the first file, so that errors surface early."""
        await self._files[0].opened()

    async def write(self, start: int, data: Buffer) -> None:
        """See :meth:`Upload.write`. Raises StorageError for bytes that are not next in their
        segment."""
        self._check_open()
        self._written.check(start, len(data))
        # Assign offsets before the first await, so that writes keep their order.
        pieces = list(self._pieces(start, data))
        try:
            for file, at, piece in pieces:
                await file.write(at, piece)
        except BaseException as error:
            for file, _, _ in pieces:
                file.spoil(error)
            raise
        self._written.add(start, len(data))
        await self._touch()

    async def commit(self, nbytes: int | None = None, *, overwrite: bool = True) -> None:
        """See :meth:`Upload.commit`. If cancelled or unanswered near its end, the object may still
        become visible.

        Without ``overwrite``, raises ExistsError if the key is taken.
        """
        self._check_open()
        try:
            self._written.check_complete(nbytes)
            reached = zip(self._files, self._cuts, self._next, strict=True)
            # Segments that were never started have no file.
            self._files[1:] = [file for file, (start, _), at in reached if at > start > 0]
            await side_by_side(*(file.close() for file in self._files))
            await self._join()
            await self._publish(overwrite)
            del self._files[0]  # it has the key now; abort deletes the files copied into it
        finally:
            await self.abort()

    async def abort(self) -> None:
        self._over = True
        for file in self._files:
            file.spoil(self._error("the upload is over", StorageError))
        # If the creation of a file is unanswered, the thread waiting for the answer deletes the
        # file; a silent name node would stall us here too.
        made = [file for file in self._files if file.answered]
        # The next use of the storage will report the problem; a sweep removes the rest.
        with contextlib.suppress(StorageError, TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await side_by_side(*map(self._delete, made))
        self._on_over(self)

    async def _delete(self, file: _File) -> None:
        await self._client.delete(file.path, self._key)
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
        owner = (await self._client.status(target, self._key, "commit")).owner
        try:
            if self._webhdfs is None:
                raise ConcatRefused("WebHDFS is switched off")
            await self._webhdfs.concat(target, others, owner)
        except ConcatRefused as refused:
            joined = (
                await self._client.status(target, self._key, "commit")
            ).length == self._written.nbytes
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
            writer = appending(inner, target)
            for path in others:
                reader = whole_reader(inner, path)
                for piece in reader.read_range_stream(0, len(reader)):
                    writer.write(piece)
                    with call:
                        pass  # counts as progress
            writer.close()

        await self._client.call("join", self._key, copy)

    async def _publish(self, overwrite: bool) -> None:
        path = self._files[0].path
        ours = await self._client.status(path, self._key, "commit")
        if ours.length != self._written.nbytes:
            raise self._error(
                f"commit: {ours.length} of {self._written.nbytes} bytes arrived", StorageDownError
            )
        if self._written.nbytes:  # a key must be readable by everyone at once
            inner = self._client.inner
            await self._client.call(
                "commit", self._key, lambda call: whole_reader(inner, path, self._written.nbytes)
            )
        try:
            await self._client.rename(path, self._path, self._key, overwrite=overwrite)
        except StorageError:
            # The library retries on a broken connection, and then finds the source gone or the
            # target taken.
            if not await self._renamed(path, ours):
                raise

    async def _renamed(self, path: str, ours: hdfs_native.FileStatus) -> bool:
        """Return whether the file formerly at ``path``, with status ``ours``, now has the key. A
        rename keeps time and length."""
        with contextlib.suppress(StorageError):
            await self._client.status(path, self._key, "commit")
            return False
        with contextlib.suppress(StorageError):
            there = await self._client.status(self._path, self._key, "commit")
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

        await self._client.call("touch", self._key, touch)

    def _check_open(self) -> None:
        if self._over:
            raise self._error("the upload is over: committed, failed or aborted", StorageError)

    def _error(self, message: str, kind: type[StorageError]) -> StorageError:
        return kind(message, uri=self._client.uri, key=self._key)


def _warn_once(uri: str, addresses: tuple[str, ...], reason: str) -> None:
    """Warn once per file system, not per upload, that parts are joined by copying."""
    if addresses not in _warned_of:
        _warned_of.add(addresses)
        _log.warning("%s: parts are joined by copying: %s; ?streams=1 avoids it", uri, reason)
