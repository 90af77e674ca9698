"""Memory that ranks of one host share: what one has read into it, others copy from.

A memfd: it has no name, so nobody finds it but those who are handed its descriptor, no limit of /dev/shm applies, and it
is gone when the last process lets go of it, however that one ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass, field

import numpy as np

from ..pipeline.buffers import HostBuffer

__all__ = ["Arena", "Window"]


@dataclass
class Arena:
    """``slots`` buffers of ``slot_nbytes`` each, handed out like those of a pool. Raises OSError where there is no memfd.

    Pages are taken from the system when they are first written to.
    """

    slot_nbytes: int
    slots: int
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd")
        self.fd = os.memfd_create("holdfast", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self._memory = mmap.mmap(self.fd, self.nbytes)
        except OSError:
            os.close(self.fd)
            raise
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._all = [self._slot(start) for start in range(0, self.nbytes, self.slot_nbytes)]
        self._free = self._all[::-1]

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.slot_nbytes * self.slots

    def take(self) -> HostBuffer:
        """A slot of any content. The caller takes no more than there are."""
        return self._free.pop()

    def give(self, buffer: HostBuffer) -> None:
        """Take a slot back: nobody looks at it any more."""
        self._free.append(buffer)

    def offset_of(self, buffer: HostBuffer) -> int:
        """Where a slot lies in the memfd, in bytes."""
        return buffer.address - self._address

    def close(self) -> None:
        """The memory goes, whoever still holds a buffer, as the frames of an error may; or when the last view into one goes.
        Safe to call twice."""
        if self._all:
            for buffer in self._all:
                with contextlib.suppress(BufferError):
                    buffer.view.release()
            self._all, self._free = [], []
            del self._memory
            os.close(self.fd)

    def _slot(self, start: int) -> HostBuffer:
        return HostBuffer(memoryview(self._memory)[start : start + self.slot_nbytes], self._address + start)


class Window:
    """Another rank's arena, seen from here; not to be written to. Takes over ``fd``. Raises OSError."""

    def __init__(self, fd: int) -> None:
        try:
            self.nbytes = os.fstat(fd).st_size
            self._memory = mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)

    def first(self, nbytes: int) -> memoryview:
        """The first bytes of it, which keep it open. Raises ValueError beyond its end."""
        if nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes of {self.nbytes}")
        return memoryview(self._memory)[:nbytes]

    def at(self, offset: int, nbytes: int) -> HostBuffer:
        """Bytes of it, which keep it open. Raises ValueError beyond its end."""
        if not 0 <= offset <= self.nbytes - nbytes:
            raise ValueError(f"bytes {offset}:{offset + nbytes} of {self.nbytes}")
        # By address: torch warns of views that cannot be written to, though nobody does.
        memory = (ctypes.c_ubyte * nbytes).from_address(self._address + offset)
        return HostBuffer(memoryview(memory).cast("B"), self._address + offset, self)
