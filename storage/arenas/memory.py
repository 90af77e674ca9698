"""Anonymous memory shared between processes of one host by descriptor: sealed memfds.

They are not subject to the limit of /dev/shm, only a process that gets the descriptor can open
them, and they vanish with the last process that has them open, however it ends. The size is sealed:
nobody can truncate mapped memory, which would kill its readers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...core.units import round_up
from ..runtime.buffers import HostBuffer
from .numa import prefer_node

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ALL_SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE
RESERVE_NBYTES = 256 << 20
"""Memory to leave to the rest of the system."""
_RESERVED_AT_ONCE_NBYTES = 256 << 20
_HUGE_NBYTES = 2 << 20
_COLLAPSED_AT_ONCE_NBYTES = 8 * _HUGE_NBYTES
_HUGE_S_MAX = 0.002
"""Longest time for a huge page of memory for one save. Small pages take half as long."""
_RESERVED_HUGE_S_MAX = 0.01
"""The same for reserved memory, which is read, too. Compacting memory takes some 5 ms."""
_POPULATE_WRITE = 23
_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def sealed_memory(nbytes: int) -> int:
    """Return the descriptor of ``nbytes`` (at least one) zero bytes, writable. Raises OSError."""
    fd = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def reserved_memory(
    nbytes: int, moved: Callable[[], None] = lambda: None, node: int = -1
) -> Memory:
    """Return sealed memory of ``nbytes`` zero bytes, with all pages allocated now instead of on
    first write, as huge pages if possible, on the NUMA ``node`` if that has any left (-1: on any).
    Calls ``moved()`` on progress. Raises OSError.

    Pages are charged to the control group of this process. Exceeding its limit kills the process,
    so check :func:`available_nbytes` first.
    """
    memory = Memory(sealed_memory(nbytes), nbytes)
    prefer_node(memory.address, nbytes, node)
    try:
        for start in range(0, nbytes, _RESERVED_AT_ONCE_NBYTES):
            stop = min(start + _RESERVED_AT_ONCE_NBYTES, nbytes)
            memory.allocate(start, stop, _RESERVED_HUGE_S_MAX)
            os.posix_fallocate(memory.fd, start, stop - start)
            moved()
    except OSError:
        memory.close()
        raise
    memory.is_populated = True
    return memory


def sealed_bytes(data: bytes) -> int:
    """Return the descriptor of immutable memory that holds ``data`` (at least one byte). Raises
    OSError."""
    fd = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ALL_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_shared(fd: int, nbytes: int, prot: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Map the memory behind ``fd``. Raises OSError, also for 0 bytes, which cannot be mapped."""
    if not nbytes:
        raise OSError(errno.EINVAL, "memory of 0 bytes cannot be mapped")
    return mmap.mmap(fd, nbytes, prot=prot)


def _map_aligned(fd: int, nbytes: int, prot: int) -> tuple[mmap.mmap, int]:
    """Map the memory behind ``fd`` at an address where it can have huge pages. Return a mapping
    that contains it, and where it begins there. Raises OSError, also for 0 bytes."""
    if not nbytes:
        raise OSError(errno.EINVAL, "memory of 0 bytes cannot be mapped")
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    around = mmap.mmap(-1, nbytes + _HUGE_NBYTES, flags=private)
    first = int(np.frombuffer(around, np.uint8).ctypes.data)
    start = -first % _HUGE_NBYTES
    mapped = _libc.mmap(
        ctypes.c_void_p(first + start),
        ctypes.c_size_t(nbytes),
        prot,
        mmap.MAP_SHARED | _MAP_FIXED,
        fd,
        ctypes.c_long(0),
    )
    if mapped != first + start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return around, start


def check_sealed(fd: int, nbytes: int | None = None, *, unchangeable: bool = False) -> int:
    """Return the size of the memory behind ``fd``. Raises OSError if it is not sealed, is not of
    ``nbytes``, or, with ``unchangeable``, is writable."""
    seals = _ALL_SEALS if unchangeable else SIZE_SEALS
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals != seals:
        raise OSError(errno.EPERM, "that memory is not sealed: its owner could truncate it")
    found = os.fstat(fd).st_size
    if nbytes is not None and found != nbytes:
        raise OSError(errno.EINVAL, f"that memory has {found:,} bytes instead of {nbytes:,}")
    return found


def read_sealed(fd: int, nbytes_max: int) -> bytes:
    """Return the bytes that :func:`sealed_bytes` has stored. Raises OSError if ``fd`` is anything
    else, or larger than ``nbytes_max``."""
    nbytes = check_sealed(fd, unchangeable=True)
    if nbytes > nbytes_max:
        raise OSError(errno.EFBIG, f"that memory has {nbytes:,} bytes, more than {nbytes_max:,}")
    data = os.pread(fd, nbytes, 0)
    if len(data) != nbytes:
        raise OSError(errno.EIO, "that memory could not be read as a whole")
    return data


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Call madvise without the GIL, unlike :mod:`mmap`."""
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def release_unused() -> None:
    """Return memory that was freed to the system."""
    with contextlib.suppress(AttributeError):  # another C library
        _libc.malloc_trim(0)


class _Mapping:
    """A mapping that lasts as long as this object. ``before_unmapping``: called before it is
    unmapped; must not raise."""

    def __init__(self, mapped: mmap.mmap, start: int, nbytes: int) -> None:
        self.view = memoryview(mapped)[start : start + nbytes]
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)
        self._nbytes = nbytes
        self.before_unmapping: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.before_unmapping is not None:
            self.before_unmapping()
        # Drop the pages without the GIL, which unmapping would hold. The memfd keeps its bytes.
        _advise(self.address, self._nbytes, mmap.MADV_DONTNEED)


@dataclass(eq=False)
class Memory:
    """Sealed memory of ``nbytes``, mapped into this process. Owns ``fd``. Raises OSError if ``fd``
    is not sealed or has another size, after closing it.

    Forked children do not inherit the mapping, since a slot is not reused while any live process
    has it mapped.
    """

    fd: int
    nbytes: int
    writable: bool = True
    view: memoryview = field(init=False)
    address: int = field(init=False)
    is_populated: bool = field(default=False, init=False)
    """Whether all pages are known to be mapped."""
    _seeks_huge: bool = field(default=True, init=False)
    _mapping: _Mapping | None = field(init=False)
    """None after close(); exported buffers may still reference the memory."""

    def __post_init__(self) -> None:
        try:
            check_sealed(self.fd, self.nbytes)
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            mapped, start = _map_aligned(self.fd, self.nbytes, prot)
        except (OSError, ValueError):
            fd, self.fd = self.fd, -1  # or __del__ would close whatever has that number by then
            os.close(fd)
            raise
        mapped.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # older kernel
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._mapping = _Mapping(mapped, start, self.nbytes)
        self.view = self._mapping.view if self.writable else self._mapping.view.toreadonly()
        self.address = self._mapping.address

    def allocate(self, start: int, stop: int, huge_s_max: float = _HUGE_S_MAX) -> None:
        """Allocate bytes [start, stop) of fresh memory, and map them to be written: as huge pages,
        until these take longer than ``huge_s_max`` each. Releases the GIL.

        Hosts rarely give huge pages to page faults in shared memory (``shmem_enabled``). They allow
        to replace a small page and the holes around it (``MADV_COLLAPSE``, Linux 6.1), which takes
        a tenth of the time of the small pages, but more if memory has to be compacted first.
        """
        whole = range(round_up(start, _HUGE_NBYTES), stop // _HUGE_NBYTES * _HUGE_NBYTES)
        for begin in whole[::_COLLAPSED_AT_ONCE_NBYTES]:
            if not self._seeks_huge:
                break
            end = min(begin + _COLLAPSED_AT_ONCE_NBYTES, whole.stop)
            began_s = time.perf_counter()
            np.frombuffer(self.view, np.uint8)[begin:end:_HUGE_NBYTES] = 0
            _advise(self.address + begin, end - begin, _COLLAPSE)
            took_s = (time.perf_counter() - began_s) * _HUGE_NBYTES / (end - begin)
            self._seeks_huge = took_s <= huge_s_max
        self.populate(start, stop)

    def populate(self, start: int = 0, stop: int | None = None) -> None:
        """Map the pages of bytes [start, stop), by default all, to be written, without the GIL.
        Copying through unmapped pages takes four times as long. No effect before Linux 5.14."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = (self.nbytes if stop is None else stop) - first
        _advise(self.address + first, nbytes, _POPULATE_WRITE)

    def read(self, start: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``start``, without the GIL and without mapping pages. Raises
        ValueError beyond the end."""
        done = 0
        while done < len(into):
            nbytes = os.preadv(self.fd, [into[done:]], start + done)
            if not nbytes:
                raise ValueError(f"bytes {start}:{start + len(into)} of {self.nbytes}")
            done += nbytes

    def buffer(self, start: int, nbytes: int) -> HostBuffer:
        """Return bytes that keep the memory mapped. Raises ValueError beyond its end."""
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise ValueError(f"bytes {start}:{start + nbytes} of {self.nbytes}")
        # By address: torch warns about read-only views, although it only reads here.
        memory = (ctypes.c_ubyte * nbytes).from_address(self.address + start)
        return HostBuffer(memoryview(memory).cast("B"), self.address + start, self._mapping)

    @property
    def before_unmapping(self) -> Callable[[], None] | None:
        """Function called after the last buffer is gone, before unmapping; must not raise."""
        return None if self._mapping is None else self._mapping.before_unmapping

    @before_unmapping.setter
    def before_unmapping(self, call: Callable[[], None]) -> None:
        if self._mapping is not None:
            self._mapping.before_unmapping = call

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped until the last buffer or view is gone. Safe
        to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view = memoryview(b"")
            self._mapping = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


_GROUPS = Path("/sys/fs/cgroup")


def available_nbytes(proc: Path = Path("/proc"), groups: Path = _GROUPS) -> int:
    """Return the number of bytes that this process can allocate without swapping or being
    killed, also within the limits of its control groups, version 1 or 2."""
    found = [_system_nbytes(proc)]
    for root, path, files in _groups_of_this_process(proc, groups):
        folder = root / path
        while folder.is_relative_to(root):
            left = _left_in_group(folder, files)
            if left is not None:
                found.append(left)
            if folder == root:
                break
            folder = folder.parent
    return max(0, min(found))


def _system_nbytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise OSError("/proc/meminfo does not say how much memory is available")


def _groups_of_this_process(
    proc: Path, groups: Path
) -> Iterator[tuple[Path, str, tuple[str, str, str]]]:
    """Yield the hierarchies of control groups that limit memory, each as its root, the path of
    this process's group below it, and the names of files and statistics there."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return  # no control groups
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield groups, path.lstrip("/"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield groups / "memory", path.lstrip("/"), files


def _left_in_group(folder: Path, files: tuple[str, str, str]) -> int | None:
    """Return the memory left in a group, None without a limit. Reclaimable file cache counts as
    free."""
    limit_file, used_file, reclaimable = files
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / used_file).read_text())
        statistics = dict(
            line.split() for line in (folder / "memory.stat").read_text().splitlines()
        )
    except (OSError, ValueError):
        return None
    return int(limit) - used + int(statistics.get(reclaimable, "0"))
