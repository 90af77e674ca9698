"""Holds the bytes read by each job of a pipeline until the job is released. They are in buffers of
a pool, in memory handed over by the driver, or directly at their destination."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ...drivers.contract import Driver
from .buffers import HostBuffer, host_pool


class ReadBuffers:
    """The buffer of each job. Memory handed over by the driver is used in place (a zero-copy read).
    Other drivers read into the process's buffers of ``chunk_nbytes``, or, for jobs in ``places``,
    into the given memory."""

    def __init__(
        self, driver: Driver, chunk_nbytes: int, places: Mapping[Hashable, HostBuffer] | None = None
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
        """Each job's share of the budget."""

    async def read(self, job: Hashable, key: str, start: int, nbytes: int) -> None:
        """Read up to a chunk for ``job``, which must be released later, even after an error."""
        if self._pool is None:
            self._buffers[job] = HostBuffer.over(await self._driver.fetch(key, start, nbytes))
        else:
            buffer = self._places.get(job) or self._pool.take()
            self._buffers[job] = buffer
            await self._driver.read(key, start, buffer.view[:nbytes])

    def __getitem__(self, job: Hashable) -> HostBuffer:
        return self._buffers[job]

    def release(self, job: Hashable) -> None:
        """Free the buffer of ``job``, if it has one. Its bytes must not be used afterwards."""
        buffer = self._buffers.pop(job, None)
        if buffer is not None and self._pool is not None and job not in self._places:
            self._pool.give(buffer)
