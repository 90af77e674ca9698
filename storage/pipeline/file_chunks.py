"""Chunks of an image whose tensors lie in files: read from them when they are taken.

Models have thousands of small tensors, and a request for each would take longer than its bytes. So
what lies close together in a file is read at once, and copied from there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.aio import at_most, side_by_side
from ...core.units import in_groups
from ...drivers.contract import Driver
from ...planner.image import ImageLayout
from ..runtime.buffers import HostBuffer, host_pool
from ..runtime.engine import offload

__all__ = ["ENCLOSED_NBYTES_MAX", "Enclosed", "FileChunks", "Stretch"]

ENCLOSED_NBYTES_MAX = 1 << 20
"""More than this is not read to find something in it."""
_MERGED_NBYTES_MAX = 1 << 20
"""More than this is worth a request of its own, which needs no copy."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """``nbytes`` bytes of the file ``key``, from byte ``start`` on."""

    key: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Enclosed:
    """``nbytes`` bytes somewhere in ``around``, of at most ``ENCLOSED_NBYTES_MAX``. When that has
    been read, ``find(content)`` says where they begin: ``skip`` bytes behind what it returns. It
    raises what is wrong with the content, and runs in any thread."""

    around: Stretch
    nbytes: int
    skip: int
    find: Callable[[memoryview], int] = field(compare=False)

    def begin_in(self, content: memoryview) -> int:
        """Where in ``content`` they begin."""
        return self.find(content) + self.skip


@dataclass(frozen=True, slots=True)
class _Part:
    """``nbytes`` bytes that lie at ``at`` of a chunk. They are bytes [start, stop) of the file
    ``key``; or, where ``enclosed`` is given, in them, ``skip`` bytes from its beginning on."""

    key: str
    start: int
    stop: int
    at: int
    nbytes: int
    enclosed: Enclosed | None = None
    skip: int = 0

    def follows(self, other: _Part) -> bool:
        """Whether it is the continuation of ``other`` in file and chunk."""
        return (
            self.enclosed is None
            and other.enclosed is None
            and self.start == other.stop
            and self.at == other.at + other.nbytes
        )

    def copy(self, content: memoryview, into: memoryview) -> None:
        """Copy it from what was read for it to the chunk."""
        begin = self.skip
        if self.enclosed is not None:
            begin += self.enclosed.begin_in(content)
        into[self.at : self.at + self.nbytes] = content[begin : begin + self.nbytes]


@dataclass(slots=True)
class _Run:
    """Parts that are read at once. ``is_one``: they are one run in file and chunk."""

    parts: list[_Part]
    stop: int
    is_one: bool

    @property
    def key(self) -> str:
        """Of the file."""
        return self.parts[0].key

    @property
    def start(self) -> int:
        """Where in the file it begins."""
        return self.parts[0].start

    @property
    def nbytes(self) -> int:
        """What is read."""
        return self.stop - self.start


class FileChunks:
    """A :class:`.capture.ChunkSource` that reads from ``driver``. ``places`` are where the shards
    of ``layout`` lie, in its order of shards; ``skips`` are bytes before them there. ``check`` is
    awaited when everything is read; what it raises is raised in place of the last chunk.

    A chunk that is being read takes the memory of two. What encloses a place is at most as large as
    a chunk.
    """

    def __init__(
        self,
        layout: ImageLayout,
        driver: Driver,
        places: Sequence[tuple[Stretch | Enclosed, int, int]],
        check: Callable[[], Awaitable[None]],
    ) -> None:
        self.pool = host_pool(layout.chunk_nbytes)
        self.reads = driver.traits.concurrency
        self._layout = layout
        self._driver = driver
        self._places = [places[shard] for shard in layout.order.tolist()]
        self._start = layout.start[layout.order]
        nbytes = np.array([nbytes for _, _, nbytes in self._places], np.int64)
        self._stop = self._start + nbytes
        self._check = check
        self._untaken = layout.chunks

    async def take(self, chunk: int) -> HostBuffer:
        """See :class:`.capture.ChunkSource`. Raises what the driver's ``read`` raises, and the
        ``find`` of a place."""
        start, stop = self._layout.chunk_range(chunk)
        buffer = self.pool.take()
        view = buffer.view[: stop - start]
        self._fill_the_rest(view, start, stop)
        runs = list(self._runs(self._parts(start, stop)))
        try:
            await side_by_side(
                self._read_in_place([run for run in runs if run.is_one], view),
                self._read_and_copy([run for run in runs if not run.is_one], view),
            )
            self._untaken -= 1
            if not self._untaken:
                await self._check()
        except BaseException:
            self.pool.give(buffer)
            raise
        return buffer

    def close(self) -> None:
        """Nothing is held."""

    def _fill_the_rest(self, view: memoryview, start: int, stop: int) -> None:
        """What is in no file: the header, and zeros behind the data."""
        header = self._layout.header[start:stop]
        view[: len(header)] = header
        padding = max(self._layout.data_end, start)
        if stop > padding:
            view[padding - start :] = bytes(stop - padding)

    def _parts(self, start: int, stop: int) -> Iterator[_Part]:
        """What bytes [start, stop) of the image consist of."""
        first = int(self._stop.searchsorted(start, side="right"))
        last = int(self._start.searchsorted(stop, side="left"))
        shard_starts = self._start[first:last].tolist()
        for (place, before, nbytes), shard_start in zip(
            self._places[first:last], shard_starts, strict=True
        ):
            begin = max(shard_start, start)
            end = min(shard_start + nbytes, stop)
            skip = before + begin - shard_start
            at = begin - start
            if isinstance(place, Enclosed):
                around = place.around
                yield _Part(
                    around.key,
                    around.start,
                    around.start + around.nbytes,
                    at,
                    end - begin,
                    place,
                    skip,
                )
            else:
                file_start = place.start + skip
                yield _Part(place.key, file_start, file_start + end - begin, at, end - begin)

    def _runs(self, parts: Iterable[_Part]) -> Iterator[_Run]:
        """What is read at once: what continues what is before it, and small parts that are close
        together."""
        gap_nbytes = self._driver.traits.coalesce_nbytes
        run: _Run | None = None
        for part in sorted(parts, key=lambda part: (part.key, part.start)):
            if run is not None and part.key == run.key:
                if run.is_one and part.follows(run.parts[-1]):
                    run.parts.append(part)
                    run.stop = part.stop
                    continue
                stop = max(run.stop, part.stop)
                is_small = max(run.parts[-1].nbytes, part.nbytes) <= _MERGED_NBYTES_MAX
                is_close = part.start - run.stop <= gap_nbytes
                if is_small and is_close and stop - run.start <= self.pool.buffer_nbytes:
                    run.parts.append(part)
                    run.stop = stop
                    run.is_one = False
                    continue
            if run is not None:
                yield run
            run = _Run([part], part.stop, part.enclosed is None)
        if run is not None:
            yield run

    async def _read_in_place(self, runs: Sequence[_Run], view: memoryview) -> None:
        """Read what lies in the chunk as it lies in the file."""

        async def read(run: _Run) -> None:
            at = run.parts[0].at
            await self._driver.read(run.key, run.start, view[at : at + run.nbytes])

        await at_most(self._driver.traits.concurrency, map(read, runs))

    async def _read_and_copy(self, runs: Sequence[_Run], view: memoryview) -> None:
        """Read the others, as many at a time as one more buffer holds, and copy their parts."""
        if not runs:
            return
        scratch = self.pool.take()
        try:
            for batch in in_groups(runs, lambda run: run.nbytes, len(scratch.view)):
                reads = (
                    self._driver.read(r.key, r.start, into) for r, into in _laid(batch, scratch)
                )
                await at_most(self._driver.traits.concurrency, reads)
                await offload(_copy, list(_laid(batch, scratch)), view)
        finally:
            self.pool.give(scratch)


def _laid(batch: Sequence[_Run], scratch: HostBuffer) -> Iterator[tuple[_Run, memoryview]]:
    """The memory of each run of a batch."""
    at = 0
    for run in batch:
        yield run, scratch.view[at : at + run.nbytes]
        at += run.nbytes


def _copy(batch: Sequence[tuple[_Run, memoryview]], into: memoryview) -> None:
    for run, content in batch:
        for part in run.parts:
            at = part.start - run.start
            part.copy(content[at : at + part.stop - part.start], into)
