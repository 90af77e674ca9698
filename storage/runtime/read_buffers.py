"""Holds the bytes that each job of a pipeline has read, until the job is released: in buffers of a
pool, in memory that the driver hands over, or in the very memory where they are wanted."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ...drivers.contract import Driver
from .buffers import HostBuffer, host_pool

__all__ = ["ReadBuffers"]


class ReadBuffers:
    """The buffer of each job. Memory that the driver hands over is used where it is (a zero-copy
    read); other drivers read into the process's buffers of ``chunk_nbytes``, or, for jobs that are
    in ``places``, into what is there."""

    def __init__(
        self,
        driver: Driver,
        chunk_nbytes: int,
        places: Mapping[Hashable, HostBuffer] | None = None,
    ) -> None:
        self._driver = driver
        self._places = places or {}
        self._buffers: dict[Hashable, HostBuffer] = {}
        traits = driver.traits
        if traits.hands_over:
            self._pool = None
            copies = 1
        else:
            self._pool = host_pool(chunk_nbytes)
            copies = traits.read_copies
        self.job_nbytes = chunk_nbytes * copies
        """What a job takes of the budget."""

    async def read(self, job: Hashable, key: str, start: int, nbytes: int) -> None:
        """Read for ``job``, at most a chunk. Raises what the driver raises. The job must be
        released later, also after an error."""
        if self._pool is None:
            self._buffers[job] = HostBuffer.over(await self._driver.fetch(key, start, nbytes))
        else:
            buffer = self._places.get(job) or self._pool.take()
            self._buffers[job] = buffer
            await self._driver.read(key, start, buffer.view[:nbytes])

    def __getitem__(self, job: Hashable) -> HostBuffer:
        return self._buffers[job]

    def release(self, job: Hashable) -> None:
        """Free the buffer of ``job``, if it has one. Its bytes must not be used any more."""
        buffer = self._buffers.pop(job, None)
        if buffer is not None and self._pool is not None and job not in self._places:
            self._pool.give(buffer)
