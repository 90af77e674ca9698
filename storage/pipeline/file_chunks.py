"""Chunks of an image whose tensors lie in files, read on demand.

A request for each of a model's thousands of small tensors would take longer than its bytes. So
neighbouring parts of a file are read together and copied from there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...core.aio import at_most, side_by_side
from ...core.units import in_groups, round_up
from ...drivers.contract import Driver
from ...planner.image import ImageLayout
from ..runtime.buffers import HostBuffer, host_pool
from ..runtime.engine import offload
from .chunks import Parts, fill_frame

ENCLOSED_NBYTES_MAX = 1 << 20
"""Largest range that is read to locate bytes in it."""
_MERGED_NBYTES_MAX = 1 << 20
"""Larger parts get a request of their own, which needs no copy."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """``nbytes`` bytes at offset ``start`` of the file ``key``."""

    key: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Enclosed:
    """``nbytes`` bytes at an unknown position in ``around``, which has at most
    ``ENCLOSED_NBYTES_MAX``.

    Given the content of ``around``, ``find(content)`` returns a position; the bytes begin ``skip``
    bytes after it. It raises if the content is invalid, and runs in any thread.
    """

    around: Stretch
    nbytes: int
    skip: int
    find: Callable[[memoryview], int] = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Part:
    """``nbytes`` bytes at offset ``at`` of a chunk.

    They are bytes [start, stop) of the file ``key``; or, with ``enclosed``, in that range, ``skip``
    bytes after its beginning. A part spans several tensors if these are adjacent in both file and
    chunk; none is larger than ``tensor_nbytes``.
    """

    key: str
    enclosed: Enclosed | None
    start: int
    stop: int
    at: int
    nbytes: int
    tensor_nbytes: int
    skip: int

    def is_followed_by(self, part: _Part) -> bool:
        """Return whether ``part`` is adjacent to this one, in the file and in the chunk."""
        is_plain = self.enclosed is None and part.enclosed is None
        is_adjacent = part.start == self.stop and part.at == self.at + self.nbytes
        return is_plain and is_adjacent and part.key == self.key

    def joined_with(self, part: _Part) -> _Part:
        """Return one part for this one and ``part``, which follows it."""
        return replace(
            self,
            stop=part.stop,
            nbytes=self.nbytes + part.nbytes,
            tensor_nbytes=max(self.tensor_nbytes, part.tensor_nbytes),
        )

    def copy(self, content: memoryview, into: memoryview) -> None:
        """Copy the part from the content read for it into the chunk."""
        begin = 0
        if self.enclosed is not None:
            begin = self.skip + self.enclosed.find(content) + self.enclosed.skip
        source = np.frombuffer(content, np.uint8)
        # Unlike an assignment to a memoryview, this releases the GIL.
        np.frombuffer(into, np.uint8)[self.at : self.at + self.nbytes] = source[
            begin : begin + self.nbytes
        ]


@dataclass(slots=True)
class _Run:
    """Parts that are read together."""

    parts: list[_Part]
    stop: int

    @property
    def key(self) -> str:
        return self.parts[0].key

    @property
    def start(self) -> int:
        return self.parts[0].start

    @property
    def is_one(self) -> bool:
        """True if the run is contiguous in the chunk exactly as in the file."""
        return len(self.parts) == 1 and self.parts[0].enclosed is None

    def takes(self, part: _Part, gap_nbytes: int) -> bool:
        """Return whether to read ``part``, which comes later in the file, together with this
        run."""
        return (
            part.key == self.key
            and part.start - self.stop <= gap_nbytes
            and max(self.parts[-1].tensor_nbytes, part.tensor_nbytes) <= _MERGED_NBYTES_MAX
        )


class FileChunks:
    """A :class:`.chunks.ChunkSource` that reads from ``driver``.

    ``places`` locate the shards of ``layout``, in its order of shards: place, bytes to skip in it,
    size. ``check`` is awaited after the last read; an error from it replaces the last chunk. A
    chunk being read takes the memory of two. An enclosing range is no larger than a chunk.
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
        self._align_nbytes = driver.traits.align_nbytes
        self._places = [places[shard] for shard in layout.order.tolist()]
        self._start = layout.start[layout.order]
        self._stop = self._start + np.array([nbytes for _, _, nbytes in self._places], np.int64)
        self._check = check
        self._untaken = layout.chunks

    async def take(self, chunk: int, parts: Parts | None = None) -> HostBuffer:
        """Read a chunk; see :class:`.chunks.ChunkSource`. Raises errors of ``driver.read`` and
        of ``find``."""
        start, stop = self._layout.chunk_range(chunk)
        buffer = self.pool.take()
        view = buffer.view[: stop - start]
        fill_frame(self._layout, view, start)
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
        """Do nothing: no resources are held."""

    def _parts(self, start: int, stop: int) -> list[_Part]:
        """Return the parts of bytes [start, stop) of the image, ordered by file."""
        first = int(self._stop.searchsorted(start, side="right"))
        last = int(self._start.searchsorted(stop, side="left"))
        parts = [self._part(shard, start, stop) for shard in range(first, last)]
        parts.sort(key=lambda part: (part.key, part.start))
        joined: list[_Part] = []
        for part in parts:
            if joined and joined[-1].is_followed_by(part):
                joined[-1] = joined[-1].joined_with(part)
            else:
                joined.append(part)
        return joined

    def _part(self, shard: int, start: int, stop: int) -> _Part:
        """Return the part of a shard in bytes [start, stop) of the image."""
        place, before, _ = self._places[shard]
        begin = max(int(self._start[shard]), start)
        nbytes = min(int(self._stop[shard]), stop) - begin
        skip = before + begin - int(self._start[shard])
        at = begin - start
        if isinstance(place, Enclosed):
            around = place.around
            end = around.start + around.nbytes
            return _Part(around.key, place, around.start, end, at, nbytes, nbytes, skip)
        read = place.start + skip
        return _Part(place.key, None, read, read + nbytes, at, nbytes, nbytes, 0)

    def _runs(self, parts: Iterable[_Part]) -> Iterator[_Run]:
        """Yield runs: parts on their own, and groups of small parts that are close together."""
        gap_nbytes = self._driver.traits.coalesce_nbytes
        run: _Run | None = None
        for part in parts:
            if run is not None and run.takes(part, gap_nbytes):
                stop = max(run.stop, part.stop)
                if stop - self._aligned(run.start) <= self.pool.buffer_nbytes:
                    run.parts.append(part)
                    run.stop = stop
                    continue
            if run is not None:
                yield run
            run = _Run([part], part.stop)
        if run is not None:
            yield run

    def _aligned(self, start: int) -> int:
        """Align ``start`` downwards: aligned reads avoid a copy."""
        return start // self._align_nbytes * self._align_nbytes

    async def _read_in_place(self, runs: Sequence[_Run], view: memoryview) -> None:
        """Read runs that are contiguous in the chunk directly into it."""

        async def read(part: _Part) -> None:
            into = view[part.at : part.at + part.nbytes]
            await self._driver.read(part.key, part.start, into)

        await at_most(self._driver.traits.concurrency, (read(run.parts[0]) for run in runs))

    async def _read_and_copy(self, runs: Sequence[_Run], view: memoryview) -> None:
        """Read other runs into a scratch buffer, a batch at a time, and copy their parts."""
        if not runs:
            return
        scratch = self.pool.take()
        try:
            for batch in in_groups(runs, self._room_of, len(scratch.view)):
                laid = list(self._laid(batch, scratch.view))
                reads = (self._driver.read(run.key, start, into) for run, start, into in laid)
                await at_most(self._driver.traits.concurrency, reads)
                await offload(_copy, laid, view)
        finally:
            self.pool.give(scratch)

    def _room_of(self, run: _Run) -> int:
        """Return the bytes that a run takes in the scratch buffer."""
        return round_up(run.stop - self._aligned(run.start), self._align_nbytes)

    def _laid(
        self, batch: Sequence[_Run], memory: memoryview
    ) -> Iterator[tuple[_Run, int, memoryview]]:
        """Yield each run of a batch with its aligned file offset and its memory."""
        at = 0
        for run in batch:
            start = self._aligned(run.start)
            yield run, start, memory[at : at + run.stop - start]
            at += self._room_of(run)


def _copy(batch: Sequence[tuple[_Run, int, memoryview]], into: memoryview) -> None:
    for run, start, content in batch:
        for part in run.parts:
            part.copy(content[part.start - start : part.stop - start], into)
