"""Memory without a name that processes of one host share by its descriptor: a memfd, sealed.

No limit of /dev/shm applies to it, nobody who is not handed its descriptor can open it, and it is
gone when the last process closes it, however that process ends. Its size is sealed: memory that is
mapped cannot be cut off by anyone, which would kill the processes that read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..runtime.buffers import HostBuffer

__all__ = [
    "SIZE_SEALS",
    "Memory",
    "check_sealed",
    "read_sealed",
    "reserved_memory",
    "sealed_bytes",
    "sealed_memory",
]

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ALL_SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE
_RESERVED_AT_ONCE_NBYTES = 256 << 20
_POPULATE_READ = 22
_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def sealed_memory(nbytes: int) -> int:
    """The descriptor of ``nbytes`` of zeros, at least one, that can be written to. Raises
    OSError."""
    fd = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def reserved_memory(nbytes: int, moved: Callable[[], None] = lambda: None) -> Memory:
    """Sealed memory of ``nbytes`` of zeros, whose pages are taken from the system now, rather than
    when they are first written to: huge pages, where it gives them. ``moved()`` is called for each
    part of them. Raises OSError.

    The pages are charged to the control group of this process, which is killed if they are beyond
    its limit: compare with :func:`.room.available_nbytes` first.
    """
    memory = Memory(sealed_memory(nbytes), nbytes)
    try:
        for start in range(0, nbytes, _RESERVED_AT_ONCE_NBYTES):
            part_nbytes = min(_RESERVED_AT_ONCE_NBYTES, nbytes - start)
            # Through the mapping first: the descriptor alone cannot ask for huge pages.
            memory.populate(start, start + part_nbytes)
            os.posix_fallocate(memory.fd, start, part_nbytes)
            moved()
    except OSError:
        memory.close()
        raise
    return memory


def sealed_bytes(data: bytes) -> int:
    """The descriptor of memory that holds ``data``, at least one byte, which nobody can change.
    Raises OSError."""
    fd = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ALL_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_sealed(fd: int, nbytes: int | None = None, *, unchangeable: bool = False) -> int:
    """The size of the memory behind ``fd``. Raises OSError where it is no sealed memory, or not of
    ``nbytes``; with ``unchangeable``, also where it can be written to."""
    seals = _ALL_SEALS if unchangeable else SIZE_SEALS
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals != seals:
        raise OSError(errno.EPERM, "that memory is not sealed: its owner could cut it off")
    found = os.fstat(fd).st_size
    if nbytes is not None and found != nbytes:
        raise OSError(errno.EINVAL, f"that memory has {found:,} bytes, and not {nbytes:,}")
    return found


def read_sealed(fd: int, nbytes_max: int) -> bytes:
    """What :func:`sealed_bytes` has put behind ``fd``. Raises OSError where it is something else,
    or larger than ``nbytes_max``."""
    nbytes = check_sealed(fd, unchangeable=True)
    if nbytes > nbytes_max:
        raise OSError(errno.EFBIG, f"that memory has {nbytes:,} bytes, more than {nbytes_max:,}")
    data = os.pread(fd, nbytes, 0)
    if len(data) != nbytes:
        raise OSError(errno.EIO, "that memory could not be read as a whole")
    return data


def _advise(address: int, nbytes: int, advice: int) -> None:
    """madvise without the GIL, unlike :mod:`mmap`."""
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


class _Mapping:
    """A mapping, which lasts as long as this object. ``before_unmapping``: called before it is
    undone; raises nothing."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.mapped = mapped
        self.address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
        self._nbytes = len(mapped)
        self.before_unmapping: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.before_unmapping is not None:
            self.before_unmapping()
        # Without the GIL, which the interpreter holds while it unmaps. The bytes stay.
        _advise(self.address, self._nbytes, mmap.MADV_DONTNEED)


@dataclass(eq=False)
class Memory:
    """Sealed memory of ``nbytes``, mapped into this process. Owns ``fd``. Raises OSError where it
    is not sealed, or of another size; then ``fd`` is closed.

    A forked child does not inherit the mapping: memory that a living process has mapped cannot be
    used for anything else.
    """

    fd: int
    nbytes: int
    writable: bool = True
    view: memoryview = field(init=False)
    address: int = field(init=False)
    _mapping: _Mapping | None = field(init=False)
    """None once it is closed: buffers have it still."""

    def __post_init__(self) -> None:
        try:
            check_sealed(self.fd, self.nbytes)
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            mapped = mmap.mmap(self.fd, self.nbytes, prot=prot)
        except (OSError, ValueError):
            os.close(self.fd)
            raise
        mapped.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel that has none
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._mapping = _Mapping(mapped)
        self.view = memoryview(mapped)
        self.address = self._mapping.address

    def populate(self, start: int = 0, stop: int | None = None) -> None:
        """Have the system enter the pages of bytes [start, stop), by default of all, into this
        process's table, without the GIL: copying through a mapping that is not populated takes four
        times as long. Does nothing on a kernel before 5.14."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = (self.nbytes if stop is None else stop) - first
        advice = _POPULATE_WRITE if self.writable else _POPULATE_READ
        _advise(self.address + first, nbytes, advice)

    def buffer(self, start: int, nbytes: int) -> HostBuffer:
        """Bytes of it, which keep it mapped. Raises ValueError beyond its end."""
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise ValueError(f"bytes {start}:{start + nbytes} of {self.nbytes}")
        # By address: torch warns of read-only views, though it is only read here.
        memory = (ctypes.c_ubyte * nbytes).from_address(self.address + start)
        return HostBuffer(memoryview(memory).cast("B"), self.address + start, self._mapping)

    @property
    def before_unmapping(self) -> Callable[[], None] | None:
        """Called when no buffer uses the mapping any more, before it is undone. Raises nothing."""
        return None if self._mapping is None else self._mapping.before_unmapping

    @before_unmapping.setter
    def before_unmapping(self, call: Callable[[], None]) -> None:
        if self._mapping is not None:
            self._mapping.before_unmapping = call

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped until the last buffer and view of it are
        gone. Safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view = memoryview(b"")
            self._mapping = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()
