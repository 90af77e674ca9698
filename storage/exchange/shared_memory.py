"""Memory that ranks of one host share: one rank writes to it, others copy from it.

A memfd: it has no name, so only processes that are handed its descriptor can open it, no limit of
/dev/shm applies, and it is gone when the last process closes it, however that process ends. It is
sealed: it cannot be truncated, which would kill the processes that have it mapped, and those that
are handed it cannot write to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass, field

import numpy as np

from ..arenas.memory import SIZE_SEALS, check_sealed
from ..runtime.buffers import HostBuffer

__all__ = ["Arena", "Window", "identity_of"]

_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; which fcntl does not name


@dataclass
class Arena:
    """Room for ``slots`` pieces of up to ``slot_nbytes`` each. Raises OSError where there is no
    memfd.

    Pages are taken from the system when they are first written to.
    """

    slot_nbytes: int
    slots: int
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd")
        self.fd = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self._memory = mmap.mmap(self.fd, self.nbytes)
            with contextlib.suppress(OSError):  # an older kernel
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
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
        """Copy the first ``nbytes`` of ``data`` into the slot that begins there, without the
        GIL."""
        ctypes.memmove(self._address + start, data.address, nbytes)

    def free(self, start: int) -> None:
        """Take back the slot that begins there: no process reads it any more. Thread-safe."""
        self._free.append(start)

    def close(self) -> None:
        """Unmap the memory, also where frames of an error still refer to it. Safe to call twice."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.fd)


class Window:
    """Another rank's arena, of ``nbytes``, mapped read-only. Takes over ``fd``. Raises OSError
    where it is of another size, or could be truncated: to read beyond its end would kill this
    process."""

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            self.nbytes = check_sealed(fd, nbytes)
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
        # By address: torch warns of read-only views, though it is only read here.
        memory = (ctypes.c_ubyte * nbytes).from_address(self._address + offset)
        return HostBuffer(memoryview(memory).cast("B"), self._address + offset, self)


def identity_of(fd: int) -> bytes:
    """What identifies the memory behind ``fd`` in all processes of this host."""
    status = os.fstat(fd)
    return struct.pack("<QQ", status.st_dev, status.st_ino)
