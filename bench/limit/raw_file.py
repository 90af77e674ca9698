"""The limit of a file system: several threads write and read one file past the page cache.

No format, no checksum, no metadata. Threads write or read chunks of 16 MiB at their offsets; a
write ends with an fsync of file and folder.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.units import ceil_div, round_up
from ...storage.runtime.buffers import HostBuffer
from ..machine import sync_tree

CHUNK_NBYTES = 16 << 20
THREADS = (8, 4, 16)
_ALIGN_NBYTES = 4096
_SOURCES = 16


@dataclass(frozen=True)
class RawFile:
    """A file of ``nbytes``, rounded up to 4096, written and read as fast as the storage allows."""

    path: Path
    nbytes: int
    threads: int = 8
    preallocate: bool = False

    @property
    def name(self) -> str:
        """Name, such as "O_DIRECT, 8 threads"."""
        way = "O_DIRECT" if _takes_direct(self.path.parent) else "page cache"
        threads = f"{way}, {self.threads} threads"
        if self.preallocate:
            return f"{threads}, preallocated"
        return threads

    @property
    def stored(self) -> object:
        """See :class:`.client.Setting`."""
        return self.path

    def write(self) -> None:
        """Replace the file with random bytes; return when it and its folder are durable. Raises
        OSError."""
        fd = self.open(os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            nbytes = round_up(self.nbytes, _ALIGN_NBYTES)
            if self.preallocate:
                os.posix_fallocate(fd, 0, nbytes)
            else:
                os.ftruncate(fd, nbytes)
            self._all(lambda buffer, start: os.pwrite(fd, buffer, start))
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_tree(self.path)

    def read(self) -> None:
        """Read the whole file into a few reused buffers, and discard the data. Raises OSError."""
        fd = self.open(os.O_RDONLY)
        try:
            self._all(lambda buffer, start: os.preadv(fd, [buffer], start))
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)

    def open(self, flags: int) -> int:
        """Return a descriptor of the file, with O_DIRECT if possible."""
        try:
            return os.open(self.path, flags | os.O_DIRECT, 0o666)
        except OSError:  # refused here (tmpfs, overlay): use the page cache
            return os.open(self.path, flags, 0o666)

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the start and length of each chunk."""
        return [
            (start, min(CHUNK_NBYTES, round_up(self.nbytes - start, _ALIGN_NBYTES)))
            for start in range(0, self.nbytes, CHUNK_NBYTES)
        ]

    def _all(self, call: Callable[[memoryview, int], int]) -> None:
        ranges = self._ranges()
        count = min(_SOURCES, len(ranges))
        # At most one per thread, so that each thread has its own to read into.
        buffers = [_random_chunk(number) for number in range(count)]

        def one(number: int, start: int, nbytes: int) -> None:
            if call(buffers[number % count][:nbytes], start) != nbytes:
                raise OSError(f"the device did not take, or give, {nbytes} bytes at once")

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda job: one(job[0], *job[1]), enumerate(ranges)))


def writing_settings(path: Path, nbytes: int) -> list[RawFile]:
    """Return the settings to try for writes. Generate the bytes to write as well, before any
    timing."""
    for number in range(min(_SOURCES, ceil_div(nbytes, CHUNK_NBYTES))):
        _random_chunk(number)
    return [
        RawFile(path, nbytes, threads, preallocate)
        for threads, preallocate in itertools.product(THREADS, (False, True))
    ]


def reading_settings(path: Path, nbytes: int) -> list[RawFile]:
    """Return the settings to try for reads of a file with few extents."""
    return [RawFile(path, nbytes, threads, preallocate=True) for threads in THREADS]


def _takes_direct(folder: Path) -> bool:
    """Return whether files in ``folder`` can be opened with O_DIRECT."""
    probe = folder / f".direct-{os.getpid()}"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    except OSError:
        return False
    else:
        os.close(fd)
        return True
    finally:
        with contextlib.suppress(FileNotFoundError):
            probe.unlink()


@functools.cache
def _random_chunk(number: int) -> memoryview:
    """Return a page-aligned chunk of random normals."""
    random = np.random.default_rng(number)
    chunk = HostBuffer.allocate(CHUNK_NBYTES).view
    np.frombuffer(chunk, np.float32)[:] = random.standard_normal(CHUNK_NBYTES // 4, np.float32)
    return chunk
