"""The limit of HDFS: hdfs-native alone, with several files written and read in parallel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...core.units import ceil_div
from ...drivers.hdfs.client import whole_reader
from ...drivers.uri import Uri
from ..content import Content, Noise
from .client import bare_driver

if TYPE_CHECKING:
    from hdfs_native import Client, WriteOptions

__all__ = ["Streams", "settings"]

STREAMS = (4, 8, 2)
PIECE_NBYTES = 4 << 20


@dataclass(frozen=True)
class Streams:
    """``streams`` files in ``folder``, each written and read by a thread: no format, no
    concatenation.

    ``content`` makes the source of the bytes to send and the sink of those received. Each run makes
    a new one, because saves and loads also look up their tensors. hdfs-native verifies HDFS's own
    checksums here as well.
    """

    client: Client
    folder: str
    nbytes: int
    options: WriteOptions
    streams: int
    content: Callable[[], Content] = lambda: Noise(PIECE_NBYTES)

    @property
    def name(self) -> str:
        """Name, such as "hdfs-native, 4 streams"."""
        return f"hdfs-native, {self.streams} streams"

    @property
    def stored(self) -> object:
        """See :class:`.client.Setting`."""
        return self.streams

    def at_size(self, nbytes: int) -> Streams:
        """See :class:`.client.Setting`."""
        return replace(self, nbytes=nbytes)

    def write(self) -> None:
        """Write the files in parallel."""
        self._each(self._write)

    def read(self) -> None:
        """Read the files in parallel."""
        self._each(self._read)

    def remove(self) -> None:
        """Delete the folder."""
        self.client.delete(self.folder, recursive=True)

    def _each(self, work: Callable[[Content, int, int, int], None]) -> None:
        content = self.content()
        part_nbytes = ceil_div(self.nbytes, self.streams)
        starts = range(0, self.nbytes, part_nbytes)
        with ThreadPoolExecutor(self.streams) as threads:
            running = [
                threads.submit(work, content, number, start, min(start + part_nbytes, self.nbytes))
                for number, start in enumerate(starts)
            ]
        for future in running:
            future.result()

    def _write(self, content: Content, number: int, start: int, stop: int) -> None:
        with self.client.create(f"{self.folder}/{number}", self.options) as file:
            for begin in range(start, stop, PIECE_NBYTES):
                data = content.take(begin, min(begin + PIECE_NBYTES, stop))
                if not isinstance(data, bytes):
                    data = bytes(data)  # hdfs-native reads other buffers byte by byte
                file.write(data)

    def _read(self, content: Content, number: int, start: int, stop: int) -> None:
        at = start
        reader = whole_reader(self.client, f"{self.folder}/{number}", stop - start)
        for piece in reader.read_range_stream(0, stop - start):
            content.place(at, piece)
            at += len(piece)
        if at != stop:
            raise OSError(f"{stop - at} bytes of stream {number} did not come")


def settings(uri: Uri, nbytes: int) -> list[Streams]:
    """Return the settings to try, for writes and reads: streams into the folder ``uri``, with our
    driver's connection, block size and replication."""
    from hdfs_native import WriteOptions

    driver = bare_driver(uri)
    files = driver._files
    given = {"block_size": files.block_nbytes, "replication": files.replication}
    known = {name: value for name, value in given.items() if value is not None}
    options = WriteOptions(overwrite=True, create_parent=True, **known)
    client, root = driver._client.inner, driver._names.root
    return [Streams(client, root, nbytes, options, streams) for streams in STREAMS]
