"""The limit of HDFS: hdfs-native alone, with several files written and read in parallel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...core.units import ceil_div
from ...drivers.hdfs.client import whole_reader
from ...drivers.uri import Uri
from .client import bare_driver

if TYPE_CHECKING:
    from hdfs_native import Client, WriteOptions


STREAMS = (4, 8, 2)
PIECE_NBYTES = 4 << 20


@dataclass(frozen=True)
class Streams:
    """``streams`` files in ``folder``, each written and read by a thread: no format, no
    concatenation.
    hdfs-native verifies HDFS's own checksums here as well."""

    client: Client
    folder: str
    nbytes: int
    options: WriteOptions
    streams: int

    @property
    def name(self) -> str:
        """Name, such as "hdfs-native, 4 streams"."""
        return f"hdfs-native, {self.streams} streams"

    @property
    def stored(self) -> object:
        """See :class:`.client.Setting`."""
        return self.streams

    def write(self) -> None:
        """Write the files in parallel."""
        self._each(self._write)

    def read(self) -> None:
        """Read the files in parallel."""
        self._each(self._read)

    def remove(self) -> None:
        """Delete the folder."""
        self.client.delete(self.folder, recursive=True)

    def _each(self, work: Callable[[int, int], None]) -> None:
        part_nbytes = ceil_div(self.nbytes, self.streams)
        starts = range(0, self.nbytes, part_nbytes)
        with ThreadPoolExecutor(self.streams) as threads:
            running = [
                threads.submit(work, number, min(part_nbytes, self.nbytes - start))
                for number, start in enumerate(starts)
            ]
        for future in running:
            future.result()

    def _write(self, number: int, nbytes: int) -> None:
        data = np.random.default_rng(0).bytes(PIECE_NBYTES)
        with self.client.create(f"{self.folder}/{number}", self.options) as file:
            for begin in range(0, nbytes, PIECE_NBYTES):
                file.write(data[: nbytes - begin])

    def _read(self, number: int, nbytes: int) -> None:
        reader = whole_reader(self.client, f"{self.folder}/{number}", nbytes)
        received = sum(map(len, reader.read_range_stream(0, nbytes)))
        if received != nbytes:
            raise OSError(f"{nbytes - received} bytes of stream {number} did not come")


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
