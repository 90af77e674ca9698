"""Chunks of an image whose tensors lie whole in files: read from them when they are taken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.aio import at_most
from ...drivers.contract import Driver
from ...planner.image import ImageLayout
from ..runtime.buffers import HostBuffer, host_pool

__all__ = ["FileChunks", "Stretch"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """``nbytes`` bytes of the file ``key``, from byte ``start`` on."""

    key: str
    start: int
    nbytes: int


class FileChunks:
    """A :class:`.capture.ChunkSource` that reads from ``driver``. ``stretches`` are where the shards
    of ``layout`` lie, in its order of shards. ``check`` is awaited when everything is read; what it
    raises is raised in place of the last chunk."""

    def __init__(
        self,
        layout: ImageLayout,
        driver: Driver,
        stretches: Sequence[Stretch],
        check: Callable[[], Awaitable[None]],
    ) -> None:
        self.pool = host_pool(layout.chunk_nbytes)
        self.reads = driver.traits.concurrency
        self._layout = layout
        self._driver = driver
        self._stretches = [stretches[shard] for shard in layout.order.tolist()]
        self._start = layout.start[layout.order]
        nbytes = np.array([stretch.nbytes for stretch in self._stretches], np.int64)
        self._stop = self._start + nbytes
        self._check = check
        self._untaken = layout.chunks

    async def take(self, chunk: int) -> HostBuffer:
        """See :class:`.capture.ChunkSource`. Raises what the driver's ``read`` raises."""
        start, stop = self._layout.chunk_range(chunk)
        buffer = self.pool.take()
        view = buffer.view[: stop - start]
        self._fill_the_rest(view, start, stop)
        reads = (
            self._driver.read(part.key, part.start, view[at : at + part.nbytes])
            for at, part in self._parts(start, stop)
        )
        try:
            await at_most(self._driver.traits.concurrency, reads)
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

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, Stretch]]:
        """What bytes [start, stop) of the image consist of: where in it, and where in a file. What
        is one run on both sides is one part."""
        begin = 0
        run: Stretch | None = None
        for at, part in self._slices(start, stop):
            if run is not None and _continues(begin, run, at, part):
                run = Stretch(run.key, run.start, run.nbytes + part.nbytes)
                continue
            if run is not None:
                yield begin, run
            begin = at
            run = part
        if run is not None:
            yield begin, run

    def _slices(self, start: int, stop: int) -> Iterator[tuple[int, Stretch]]:
        """The same, shard by shard."""
        first = int(self._stop.searchsorted(start, side="right"))
        last = int(self._start.searchsorted(stop, side="left"))
        for shard in range(first, last):
            shard_start = int(self._start[shard])
            begin = max(shard_start, start)
            end = min(int(self._stop[shard]), stop)
            stretch = self._stretches[shard]
            yield (
                begin - start,
                Stretch(stretch.key, stretch.start + begin - shard_start, end - begin),
            )


def _continues(begin: int, run: Stretch, at: int, part: Stretch) -> bool:
    """Whether ``part``, at ``at`` of the image, follows ``run``, at ``begin``, in image and file."""
    ends = (run.key, run.start + run.nbytes, begin + run.nbytes)
    return ends == (part.key, part.start, at)
