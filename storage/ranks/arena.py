"""Memory that ranks of one host share: what one has put there, others copy from.

A memfd: it has no name, so nobody finds it but those who are handed its descriptor, no limit of /dev/shm applies, and it
is gone when the last process lets go of it, however that one ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field

import numpy as np

from ..pipeline.buffers import HostBuffer

__all__ = ["Arena", "Window"]


@dataclass
class Arena:
    """Room for ``slots`` pieces of up to ``slot_nbytes`` each. Raises OSError where there is no memfd.

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
        self._free = list(range(self.nbytes - self.slot_nbytes, -1, -self.slot_nbytes))

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.slot_nbytes * self.slots

    def take(self) -> int | None:
        """A slot: where in the memfd it begins. None where none is free. Thread-safe."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def fill(self, start: int, data: HostBuffer, nbytes: int) -> None:
        """Copy the first ``nbytes`` of ``data`` into the slot that begins there, without the GIL."""
        ctypes.memmove(self._address + start, data.address, nbytes)

    def free(self, start: int) -> None:
        """Take back the slot that begins there: nobody looks at it any more. Thread-safe."""
        self._free.append(start)

    def close(self) -> None:
        """The memory is gone for this rank: no error whose frames somebody keeps can keep it. Safe to call twice."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.fd)


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
