"""hdfs-native with a deadline on every call, and with Holdfast's errors.

Uses its blocking client in threads, not the asynchronous one, which works in the event loop's
thread while holding the GIL, and panics when it should wait for a name node that is down. The
library has no usable timeouts; see :mod:`..calls`.
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
from ..calls import Call, is_panic, run
from .authentication import CHECK_S, unauthenticated
from .errors import storage_error

if TYPE_CHECKING:
    import hdfs_native


T = TypeVar("T")

THREADS = 64
"""Maximum concurrent calls: far more than useful, few enough for any host."""

LISTING = 1000

_RETRY_S = 2.0

_BLOCKS_S = 10.0
"""Seconds that a reader waits for DataNodes to report their blocks, which they do several times a
second."""


class Client:
    """Calls to one file system. ``uri``, redacted, appears in messages."""

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
        """Prepare to connect at the first call. Raises UriError if hdfs-native rejects the
        configuration.

        At the first call, the ``namenodes`` (``host:port``) are asked whether they accept
        ``authentication``, the configured ``hadoop.security.authentication``.
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
                f"hdfs-native rejects the configuration: {error}",
                uri=uri,
                advice="Name a host and port, or a name service that HADOOP_CONF_DIR or "
                "?namenodes= defines. A mount table of ViewFS needs a linkFallback.",
            ) from error

    @property
    def inner(self) -> hdfs_native.Client:
        """The library's own client. Raises StorageError after close()."""
        if self._inner is None:
            raise StorageError("the driver is closed", uri=self.uri)
        return self._inner

    def close(self) -> None:
        """Release the connections. Calls still running on them end on their own."""
        self._inner = None

    async def call(self, doing: str, key: str, function: Callable[[Call], T]) -> T:
        """Run ``function`` in a thread and return its result. Raises a StorageError:
        StorageDownError at the deadline."""
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
                advice="Are name node and DataNodes up, and can this host reach them? ?timeout= "
                "allows more.",
            ) from error
        except Exception as error:
            raise storage_error(error, doing, self.uri, key) from error
        except BaseException as error:
            if is_panic(error):
                raise storage_error(error, doing, self.uri, key) from error
            raise

    async def _check_authentication(self, doing: str, key: str) -> None:
        reason = None
        with suppress(TimeoutError):  # the call itself will report the problem
            wait_s = min(CHECK_S, self.timeout_s / 4)
            reason = await run(
                lambda call: unauthenticated(self._namenodes, self._authentication), wait_s
            )
        if reason is not None:
            message, advice = reason
            raise AccessError(f"{doing} failed: {message}", uri=self.uri, key=key, advice=advice)
        self._checked = True

    async def status(self, path: str, key: str, doing: str = "stat") -> hdfs_native.FileStatus:
        """Return the status of a file or folder. Raises NotFoundError."""
        inner = self.inner
        return await self.call(doing, key, lambda call: inner.get_file_info(path))

    async def rename(self, source: str, target: str, key: str, *, overwrite: bool) -> None:
        """Rename atomically on the name node. Raises ExistsError if ``target`` exists and
        ``overwrite`` is false."""
        inner = self.inner
        await self.call("rename", key, lambda call: inner.rename(source, target, overwrite))

    async def delete(self, path: str, key: str, *, recursive: bool = False) -> None:
        """Delete a file, an empty folder, or with ``recursive`` a whole tree. A missing path is not
        an error."""
        inner = self.inner
        with suppress(NotFoundError):
            await self.call("delete", key, lambda call: inner.delete(path, recursive))

    async def entries(self, path: str, key: str) -> AsyncIterator[list[hdfs_native.FileStatus]]:
        """Yield the entries of a folder in batches, or a file itself; nothing if the path does not
        exist (any more)."""
        listing = self.inner.list_status(path, False)
        while True:
            try:
                batch = await self.call("list", key, lambda call: list(islice(listing, LISTING)))
            except NotFoundError:
                return
            yield batch
            if len(batch) < LISTING:
                return


def _timeouts(timeout_s: float) -> dict[str, str]:
    """Return the library's own timeouts, shorter than ours: it retries name nodes until close to
    the deadline, and abandons a silent DataNode early enough to try another."""
    return {
        "dfs.client.failover.sleep.base.millis": "200",
        "dfs.client.failover.sleep.max.millis": str(int(_RETRY_S * 1000)),
        "dfs.client.failover.max.attempts": str(max(2, int(timeout_s / _RETRY_S))),
        "dfs.client.socket-timeout": str(int(min(60.0, timeout_s / 3) * 1000)),
    }


def pieces(reader: hdfs_native.FileReader, start: int, nbytes: int) -> Iterator[bytes]:
    """Return ``nbytes`` of a file from ``start`` in pieces of about 64 KiB: the fastest way, with
    the fewest copies."""
    if nbytes:
        return reader.read_range_stream(start, nbytes)
    return iter(())


def whole_reader(
    inner: hdfs_native.Client, path: str, nbytes: int | None = None
) -> hdfs_native.FileReader:
    """Return a reader that sees at least ``nbytes`` of a file, or its whole length if that is less
    or ``nbytes`` is None.

    With ``dfs.namenode.file.close.num-committed-allowed``, a file is closed before a DataNode has
    reported its last block, and readers do not see that block until then. So this waits, and raises
    OSError if the report does not come.
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
