"""hdfs-native, with a deadline on every call and errors that are ours.

Its blocking client in threads, not its asynchronous one: that does its work with the interpreter's
lock held, in the thread of the event loop, and panics where it should wait for a name node that is
down. The library has no timeouts worth the name, see :mod:`..calls`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from ...errors import (
    AccessError,
    HoldfastError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UriError,
)
from ..calls import Call, run
from ..panics import is_panic
from .authentication import CHECK_S, unauthenticated
from .errors import storage_error

if TYPE_CHECKING:
    import hdfs_native
    from hdfs_native._internal import RawFileWriter

__all__ = ["Client", "appending", "creating", "pieces", "whole_reader"]

T = TypeVar("T")

THREADS = 64
"""Calls at a time: far more than are useful, few enough for any host."""

LISTING = 1000

_RETRY_S = 2.0

_BLOCKS_S = 10.0
"""How long a reader waits for DataNodes to tell the name node of what they hold; they do so several
times a second."""


class Client:
    """Calls to one file system. ``uri``, redacted, is for messages."""

    def __init__(
        self,
        url: str | None,
        config: Mapping[str, str],
        conf_dir: str | None,
        *,
        uri: str,
        timeout_s: float,
        namenodes: Sequence[str] = (),
        authentication: str = "simple",
    ) -> None:
        """Connects at its first call. Raises UriError where hdfs-native is missing, or cannot use
        what it is given.

        ``namenodes``: ``host:port`` of those that are asked at the first call whether
        ``authentication``, which is ``hadoop.security.authentication`` of the configuration, will
        do.
        """
        self.uri = uri
        self.timeout_s = timeout_s
        self._namenodes = namenodes
        self._authentication = authentication
        self._checked = False
        self._gate = asyncio.Semaphore(THREADS)
        from hdfs_native import Client as Inner

        try:
            self._inner: hdfs_native.Client | None = Inner(
                url, {**_timeouts(timeout_s), **config}, conf_dir
            )
        except Exception as error:
            raise UriError(
                f"hdfs-native cannot use this: {error}",
                uri=uri,
                advice="Name a host and port, or a name service that HADOOP_CONF_DIR or "
                "?namenodes= explains. "
                "A mount table of ViewFS needs a linkFallback.",
            ) from error

    @property
    def inner(self) -> hdfs_native.Client:
        """The library's own client. Raises StorageError once this one is closed."""
        if self._inner is None:
            raise StorageError("the driver is closed", uri=self.uri)
        return self._inner

    def close(self) -> None:
        """Let go of connections. What still runs on them ends when it ends."""
        self._inner = None

    async def call(self, doing: str, key: str, function: Callable[[Call], T]) -> T:
        """Return what ``function`` returns, from a thread. Raises a StorageError: StorageDownError
        at the deadline."""
        try:
            async with self._gate:
                began_s = time.monotonic()
                if not self._checked:
                    await self._check_authentication(doing, key)
                return await run(function, began_s + self.timeout_s - time.monotonic())
        except (HoldfastError, asyncio.CancelledError):
            raise
        except TimeoutError as error:
            raise StorageDownError(
                f"{doing}: no answer for {self.timeout_s:g} s",
                uri=self.uri,
                key=key,
                advice=(
                    "Are name node and DataNodes up, and can this host reach them? ?timeout= "
                    "allows more."
                ),
            ) from error
        except Exception as error:
            raise storage_error(error, doing, self.uri, key) from error
        except BaseException as error:
            if is_panic(error):
                raise storage_error(error, doing, self.uri, key) from error
            raise

    async def _check_authentication(self, doing: str, key: str) -> None:
        """Raises AccessError where name nodes want to know who asks, and this process cannot tell
        them."""
        reason = None
        with suppress(TimeoutError):  # the call itself will find out what is wrong
            wait_s = min(CHECK_S, self.timeout_s / 4)
            reason = await run(
                lambda call: unauthenticated(self._namenodes, self._authentication), wait_s
            )
        if reason is not None:
            message, advice = reason
            raise AccessError(f"{doing} failed: {message}", uri=self.uri, key=key, advice=advice)
        self._checked = True

    async def status(self, path: str, key: str, doing: str = "stat") -> hdfs_native.FileStatus:
        """Of a file or folder. Raises NotFoundError."""
        inner = self.inner
        return await self.call(doing, key, lambda call: inner.get_file_info(path))

    async def rename(self, source: str, target: str, key: str, *, overwrite: bool) -> None:
        """Atomic on the name node. Raises ExistsError where ``target`` is there and is not to be
        overwritten."""
        inner = self.inner
        await self.call("rename", key, lambda call: inner.rename(source, target, overwrite))

    async def delete(self, path: str, key: str, *, recursive: bool = False) -> None:
        """A file, or an empty folder, or all below it. Nothing there is no error."""
        inner = self.inner
        try:
            await self.call("delete", key, lambda call: inner.delete(path, recursive))
        except NotFoundError:
            return

    async def entries(self, path: str, key: str) -> AsyncIterator[hdfs_native.FileStatus]:
        """What lies in a folder; the file itself for a file; nothing where there is nothing (any
        more)."""
        listing = self.inner.list_status(path, False)
        while True:
            try:
                batch = await self.call("list", key, lambda call: _batch(listing))
            except NotFoundError:
                return
            for status in batch:
                yield status
            if len(batch) < LISTING:
                return


def _batch(listing: Iterator[hdfs_native.FileStatus]) -> list[hdfs_native.FileStatus]:
    return list(islice(listing, LISTING))


def _timeouts(timeout_s: float) -> dict[str, str]:
    """The library's own waits, shorter than ours: it tries other name nodes, or the same again,
    until the deadline is near, and leaves a DataNode that is silent in time to try another one."""
    return {
        "dfs.client.failover.sleep.base.millis": "200",
        "dfs.client.failover.sleep.max.millis": str(int(_RETRY_S * 1000)),
        "dfs.client.failover.max.attempts": str(max(2, int(timeout_s / _RETRY_S))),
        "dfs.client.socket-timeout": str(int(min(60.0, timeout_s / 3) * 1000)),
    }


def creating(
    inner: hdfs_native.Client, path: str, options: hdfs_native.WriteOptions
) -> RawFileWriter:
    """A new file. Its writer may be dropped at any time, in any thread.

    That is why it is the one within the library's own, which closes its file when it is forgotten:
    whichever thread the last reference dies in, be it the event loop's, then waits for the name
    node for a minute or more.
    """
    return inner.inner.create(path, options)


def appending(inner: hdfs_native.Client, path: str) -> RawFileWriter:
    """The end of a file; see :func:`creating`."""
    return inner.inner.append(path)


def pieces(reader: hdfs_native.FileReader, start: int, nbytes: int) -> Iterator[bytes]:
    """``nbytes`` of a file from ``start``, in pieces of 64 KiB or so: the fastest way, and the one
    that copies least."""
    if nbytes:
        return reader.read_range_stream(start, nbytes)
    return iter(())


def whole_reader(
    inner: hdfs_native.Client, path: str, nbytes: int | None = None
) -> hdfs_native.FileReader:
    """A reader that knows of ``nbytes`` of a file, or of all there is of it if that is less, or not
    given.

    With ``dfs.namenode.file.close.num-committed-allowed`` a file is closed before a DataNode has
    told the name node of its last block, and readers do not see that block until then: so this
    waits. Raises OSError when the DataNode does not.
    """
    stop_s = time.monotonic() + _BLOCKS_S
    wait_s = 0.01
    while True:
        reader = inner.read(path)
        if nbytes is not None and len(reader) >= nbytes:
            return reader
        length = inner.get_file_info(path).length
        if len(reader) >= length:
            return reader
        if time.monotonic() > stop_s:
            raise OSError(
                f"no DataNode has told of bytes {len(reader)}:{length} for {_BLOCKS_S:g} s"
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.5)
