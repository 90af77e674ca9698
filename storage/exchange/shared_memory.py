"""Memory shared by ranks of one host: one rank writes, the others copy from it.

It is a memfd: only processes that get its descriptor can open it, the limit of /dev/shm does not
apply, and it vanishes with the last process that has it open, however that ends. It is sealed:
nobody can truncate it, which would kill its readers, and the readers cannot write to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from dataclasses import dataclass, field

from ..arenas.memory import SIZE_SEALS, map_shared
from ..runtime.buffers import HostBuffer

_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; missing in module fcntl


@dataclass
class Arena:
    """Memory for ``slots`` pieces of up to ``slot_nbytes`` each. Raises OSError if that is
    nothing, or the system has no memfd. Pages are allocated on first write."""

    slot_nbytes: int
    slots: int
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd")
        self.fd = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self._memory = map_shared(self.fd, self.nbytes)
            with contextlib.suppress(OSError):  # older kernel
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
        except OSError:
            os.close(self.fd)
            raise
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free = list(range(self.nbytes - self.slot_nbytes, -1, -self.slot_nbytes))

    @property
    def nbytes(self) -> int:
        """Size of all slots."""
        return self.slot_nbytes * self.slots

    def take(self) -> int | None:
        """Take a free slot, and return its offset; None if all are taken. Thread-safe."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def fill(self, start: int, data: HostBuffer, nbytes: int) -> None:
        """Copy the first ``nbytes`` of ``data`` into the slot at ``start``, without the GIL."""
        ctypes.memmove(self._address + start, data.address, nbytes)

    def free(self, start: int) -> None:
        """Free the slot at ``start``, once no process reads it any more. Thread-safe."""
        self._free.append(start)

    def close(self) -> None:
        """Unmap the memory, even if frames of an error still refer to it. Safe to call twice."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.fd)


def identity_of(fd: int) -> bytes:
    """Return an identifier of the memory behind ``fd``, the same in all processes of this host."""
    status = os.fstat(fd)
    return struct.pack("<QQ", status.st_dev, status.st_ino)
