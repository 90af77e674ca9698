"""Where what is read lies until it is done with: in buffers of a pool, or in memory that the driver
hands over."""

from __future__ import annotations

from ...drivers.contract import Driver
from .buffers import HostBuffer, host_pool

__all__ = ["Inbox"]


class Inbox:
    """The bytes of each job, by its number. Memory that the driver hands over is taken as it is:
    nothing is copied; one that hands over none reads into the process's buffers of
    ``chunk_nbytes``."""

    def __init__(self, driver: Driver, chunk_nbytes: int) -> None:
        self._driver = driver
        traits = driver.traits
        self._pool = None if traits.hands_over else host_pool(chunk_nbytes)
        self._buffers: dict[int, HostBuffer] = {}
        self.job_nbytes = chunk_nbytes * (traits.read_copies if self._pool else 1)
        """What a job takes of the budget."""

    async def receive(self, job: int, key: str, start: int, nbytes: int) -> None:
        """Read for ``job``, at most a chunk. Raises what the driver raises. However it ends, the
        job is released later."""
        if self._pool is None:
            self._buffers[job] = HostBuffer.over(await self._driver.fetch(key, start, nbytes))
        else:
            self._buffers[job] = self._pool.take()
            await self._driver.read(key, start, self._buffers[job].view[:nbytes])

    def __getitem__(self, job: int) -> HostBuffer:
        return self._buffers[job]

    def release(self, job: int) -> None:
        """Nobody looks at the bytes of ``job`` any more, if any have come."""
        buffer = self._buffers.pop(job, None)
        if buffer is not None and self._pool is not None:
            self._pool.give(buffer)
