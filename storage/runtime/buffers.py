"""Page-aligned host memory that is reused. The first use of fresh memory costs a page fault per
page, an order of magnitude more than copying into it. So pools keep buffers after use, up to a
limit, and the next save has no page faults."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ...core.forks.renewal import in_child, new_lock
from ...drivers.contract import Driver
from ...errors import UsageError

KEPT_NBYTES = 256 << 20
"""Bytes a pool keeps by default. The capture of a whole image raises this to the image's size."""


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Memory of this process: ``view``, at ``address``. It is page-aligned and anonymous, unless
    created by :meth:`over`. ``owner`` keeps the memory alive if the view does not."""

    view: memoryview
    address: int
    owner: object = None

    @classmethod
    def allocate(cls, nbytes: int) -> HostBuffer:
        """Allocate fresh memory, freed with its last view. Raises MemoryError."""
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(
                f"cannot allocate {nbytes:,} bytes of host memory: {error.strerror}"
            ) from error
        memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)))

    @classmethod
    def over(cls, data: memoryview) -> HostBuffer:
        """Wrap the memory of ``data``, at any address. It must not be written to, nor used after
        this object is gone. The view is created from the address, because torch warns about
        read-only views."""
        if not len(data):
            return cls(data, 0)
        address = int(np.frombuffer(data, np.uint8).ctypes.data)
        memory = (ctypes.c_ubyte * len(data)).from_address(address)
        return cls(memoryview(memory).cast("B"), address, data)

    def part(self, start: int, stop: int) -> HostBuffer:
        """Return bytes [start, stop) of this buffer."""
        return HostBuffer(self.view[start:stop], self.address + start, self.owner)


@dataclass
class HostPool:
    """Buffers of one size. Thread-safe. Never blocks: the scheduler enforces budgets."""

    buffer_nbytes: int
    kept_nbytes: int = KEPT_NBYTES
    allocate: Callable[[int], HostBuffer] | None = None
    """Allocates a new buffer; None: ordinary memory."""
    _free: list[HostBuffer] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=new_lock)

    @property
    def free_nbytes(self) -> int:
        """Bytes of the unused buffers in the pool."""
        return len(self._free) * self.buffer_nbytes

    def take(self) -> HostBuffer:
        """Return a buffer of ``buffer_nbytes`` bytes with arbitrary contents."""
        with self._lock:
            if self._free:
                return self._free.pop()
        if self.allocate is None:
            return HostBuffer.allocate(self.buffer_nbytes)
        return self.allocate(self.buffer_nbytes)

    def give(self, buffer: HostBuffer) -> None:
        """Return ``buffer`` to the pool. The caller must hold no view of it."""
        with self._lock:
            if (len(self._free) + 1) * self.buffer_nbytes <= self.kept_nbytes:
                self._free.append(buffer)

    def keep(self, nbytes: int) -> None:
        """Keep at least ``nbytes`` of unused buffers from now on."""
        with self._lock:
            self.kept_nbytes = max(self.kept_nbytes, nbytes)

    def release(self) -> None:
        """Return all unused memory to the system, and reset the limit to the default."""
        with self._lock:
            self._free.clear()
            self.kept_nbytes = KEPT_NBYTES


_Allocate = Callable[[int], HostBuffer] | None
_pools: dict[tuple[int, _Allocate], HostPool] = {}


def host_pool(buffer_nbytes: int, allocate: _Allocate = None) -> HostPool:
    """Return the process's pool for this size and allocator (None: ordinary memory)."""
    return _pools.setdefault((buffer_nbytes, allocate), HostPool(buffer_nbytes, allocate=allocate))


def release_pools() -> None:
    """Release the unused memory of all pools, see :meth:`HostPool.release`."""
    for pool in list(_pools.values()):
        pool.release()


class ReadBuffers:
    """Holds the bytes read by each job of a pipeline until the job is released. Memory handed over
    by the driver is used in place (a zero-copy read). Other drivers read into the process's buffers
    of ``chunk_nbytes``, or, for jobs in ``places``, into the given memory."""

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


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Convert a MemoryError to UsageError: a manifest may describe more than fits in memory."""
    try:
        yield
    except MemoryError as error:
        raise UsageError(
            f"not enough host memory for {what}", advice="Read it piece by piece."
        ) from error


_of_parents: list[HostPool] = []


def _leave_to_parent() -> None:
    """Drop all buffers in a forked child: a page shared by two processes is copied on a write.
    Pinned memory is not freed: torch would ask CUDA whether it is still in use, and CUDA's error in
    a forked child ends the process."""
    _of_parents.extend(pool for pool in _pools.values() if pool.allocate is not None)
    _pools.clear()


in_child(_leave_to_parent)
