"""What the machine can do at best: raw O_DIRECT writes and reads of as many bytes as the state has,
and a memcpy of it.

No format, no checksum, no metadata: threads that write (or read) chunks of 16 MiB at their places
in one file, then fsync of file and folder. The best of several settings is the limit; the limit is
then measured again in every round.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..core.units import round_up
from ..storage.runtime.buffers import HostBuffer
from .contest import Contestant, contest, header, rows
from .machine import describe, drop_caches, flush, sync_tree
from .options import Options, parse, work_folder
from .report import Report, Series
from .states import State, build, flat_tensors, nbytes_of

__all__ = ["Memcpy", "RawFile", "best_setting"]

CHUNK_NBYTES = 16 << 20
SETTINGS = tuple(itertools.product((4, 8, 16), (False, True)))
_SOURCES = 16
_MEMCPY_NBYTES = 1 << 30


@dataclass
class RawFile:
    """A file of ``nbytes`` (rounded up to 4096), written and read as fast as the storage goes."""

    path: Path
    nbytes: int
    threads: int = 8
    preallocate: bool = False

    def __post_init__(self) -> None:
        self._buffers = _random_chunks(_SOURCES)
        self._ranges = [
            (start, min(CHUNK_NBYTES, round_up(self.nbytes - start, 4096)))
            for start in range(0, self.nbytes, CHUNK_NBYTES)
        ]

    def write(self) -> None:
        """Write it anew, durably."""
        fd = self.open(os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            size = sum(self._ranges[-1])
            if self.preallocate:
                os.posix_fallocate(fd, 0, size)
            else:
                os.ftruncate(fd, size)
            self._all(lambda buffer, start: os.pwrite(fd, buffer, start))
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_tree(self.path)

    def read(self) -> None:
        """Read all of it into memory that is already there."""
        fd = self.open(os.O_RDONLY)
        try:
            self._all(lambda buffer, start: os.preadv(fd, [buffer], start))
        finally:
            os.close(fd)

    def open(self, flags: int) -> int:
        """A descriptor of it, past the page cache where that can be."""
        try:
            return os.open(self.path, flags | os.O_DIRECT, 0o666)
        except OSError:  # refused here (tmpfs, overlay): the page cache is all there is
            return os.open(self.path, flags, 0o666)

    def _all(self, call: Callable[[memoryview, int], int]) -> None:
        def one(number: int, start: int, nbytes: int) -> None:
            if call(self._buffers[number % _SOURCES][:nbytes], start) != nbytes:
                raise OSError(f"the device did not take, or give, {nbytes} bytes at once")

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda job: one(job[0], *job[1]), enumerate(self._ranges)))


@functools.cache
def _random_chunks(count: int) -> list[memoryview]:
    """Page-aligned chunks of random normals, as many as threads at most: each thread has its own to
    read into."""
    random = np.random.default_rng(0)
    chunks = []
    for _ in range(count):
        chunk = HostBuffer.allocate(CHUNK_NBYTES).view
        np.frombuffer(chunk, np.float32)[:] = random.standard_normal(CHUNK_NBYTES // 4, np.float32)
        chunks.append(chunk)
    return chunks


def best_setting(path: Path, nbytes: int, *, reading: bool, settle_s: float) -> RawFile:
    """The fastest of the settings, each tried once. For reading, ``path`` is written first and
    stays."""
    tried: list[tuple[float, RawFile]] = []
    settings = SETTINGS
    if reading:
        RawFile(path, nbytes, preallocate=True).write()  # in few pieces
        settings = tuple((threads, False) for threads, preallocate in SETTINGS if not preallocate)
    for threads, preallocate in settings:
        raw = RawFile(path, nbytes, threads, preallocate)
        if not reading:
            path.unlink(missing_ok=True)
        drop_caches(path.parent)
        flush()
        time.sleep(settle_s)
        began_s = time.perf_counter()
        if reading:
            raw.read()
        else:
            raw.write()
        tried.append((time.perf_counter() - began_s, raw))
    if not reading:
        path.unlink()
    best = min(tried, key=lambda pair: pair[0])[1]
    print(
        f"  limit: {best.threads} threads{', preallocated' if best.preallocate else ''}", flush=True
    )
    return best


class Memcpy:
    """A copy of a state into memory that is already there, and warm; by all of torch's threads.

    Of that memory there is at most 1 GiB, used again and again: far more than any cache, and room
    is left for others.
    """

    def __init__(self, state: State) -> None:
        self._tensors = [t.view(-1).view(torch.uint8) for t in flat_tensors(state).values()]
        largest = max(t.nbytes for t in self._tensors)
        room = HostBuffer.allocate(max(largest, min(nbytes_of(state), _MEMCPY_NBYTES)))
        self._room = torch.frombuffer(room.view, dtype=torch.uint8)
        self._room.zero_()

    def best_s(self, runs: int = 3) -> float:
        """Seconds of the fastest of some copies."""
        return min(timeit.repeat(self.run, number=1, repeat=runs))

    def run(self) -> None:
        """Copy all of it once."""
        at = 0
        for source in self._tensors:
            if at + source.nbytes > self._room.nbytes:
                at = 0
            self._room[at : at + source.nbytes].copy_(source)
            at += source.nbytes


def _contestants(folder: Path, state: State, options: Options) -> list[Contestant]:
    nbytes = nbytes_of(state)
    writing = best_setting(folder / "written", nbytes, reading=False, settle_s=options.settle_s)
    reading = best_setting(folder / "read", nbytes, reading=True, settle_s=options.settle_s)
    return [
        Contestant("write", writing.write, after=writing.path.unlink),
        Contestant("read", reading.read, before=lambda: drop_caches(folder)),
        Contestant("memcpy", Memcpy(state).run),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the limits of this machine and this file system."""
    options = parse("limits", __doc__, argv)
    with work_folder(options.folder) as folder:
        state = build(options.gib)
        found: list[Series] = contest(
            _contestants(folder, state, options), options.runs, options.settle_s
        )
        nbytes = nbytes_of(state)
        columns = [0, 1, 2, 3, 4]  # the others compare with a limit
        report = Report(
            "limits",
            f"Limits: {nbytes / 1e9:.2f} GB, {options.runs} rounds",
            describe(folder),
            [header()[c] for c in columns],
            [[row[c] for c in columns] for row in rows(found, nbytes)],
            series=found,
        )
        report.emit(options.json, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
