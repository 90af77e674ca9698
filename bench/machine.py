"""The measured machine: its description, its memory, its caches."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from pathlib import Path

from ..drivers.local.tree import sync_path
from ..drivers.mounts import fs_type

_LOOK_S = 0.5


def describe(folder: Path) -> dict[str, str]:
    """Describe the machine and the file system of ``folder``, without anything that identifies
    them."""
    import torch

    return {
        "cpu": f"{os.cpu_count()} × {_field('/proc/cpuinfo', 'model name')}",
        "memory": f"{int(_field('/proc/meminfo', 'MemTotal').split()[0]) / (1 << 20):.1f} GiB",
        "file system": fs_type(str(folder)) or "unknown",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "page cache": "dropped before each read"
        if _may_drop_caches()
        else "evicted file by file before each read",
    }


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0 unknown"


def available_nbytes() -> int:
    """Return the bytes of memory that programs can still take without swapping."""
    return int(_field("/proc/meminfo", "MemAvailable").split()[0]) << 10


def read_from_device_nbytes() -> int:
    """Return the bytes that the kernel has fetched from storage for this process so far."""
    return int(_field("/proc/self/io", "read_bytes"))


def busy_part() -> float:
    """Watch the processors for half a second, and return the share that is busy."""
    before_s = _busy_s()
    time.sleep(_LOOK_S)
    return (_busy_s() - before_s) / (_LOOK_S * (os.cpu_count() or 1))


def _busy_s() -> float:
    """Return the seconds of processor time so far of the whole machine, with its kernel."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:8]]
    idle = sum(ticks[3:5])  # includes waits for disks
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


class PeakMemory:
    """``with PeakMemory() as memory``: afterwards ``memory.nbytes`` is the greatest growth of
    resident memory since entry.

    Pages of mapped files count as well, because the kernel counts them.
    """

    nbytes = 0

    def __enter__(self) -> PeakMemory:
        trim_heap()
        self._begin = _status_nbytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present size
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = max(0, _status_nbytes("VmHWM") - self._begin)


def _status_nbytes(name: str) -> int:
    return int(_field("/proc/self/status", name).split()[0]) << 10


def trim_heap() -> None:
    """Return freed memory that the C library keeps. Otherwise the next contestant would reuse it
    warm and uncounted."""
    with contextlib.suppress(OSError, AttributeError):  # without glibc there is nothing to trim
        ctypes.CDLL(None).malloc_trim(0)


def sync_tree(path: Path) -> None:
    """Make ``path``, a file or a folder with everything below it, durable: contents and names."""
    for entry in (path, *path.rglob("*"), path.parent):
        sync_path(str(entry), 0)


def drop_caches(path: Path) -> None:
    """Make the next reads below ``path`` come from the device. As root drop all clean pages,
    otherwise those of ``path``.

    As root also compact free memory. Otherwise fragmentation left by one contestant would slow down
    the next, whose reads would go to the device page by page.
    """
    os.sync()
    evict(path)
    if _may_drop_caches():
        Path("/proc/sys/vm/drop_caches").write_text("1")
        with contextlib.suppress(OSError):  # not supported on all systems
            Path("/proc/sys/vm/compact_memory").write_text("1")


def evict(path: Path) -> None:
    """Drop the clean pages of files below ``path``, and no others."""
    for entry in (path, *path.rglob("*")):
        if entry.is_file():
            fd = os.open(entry, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def flush() -> None:
    """Wait until all earlier writes and deletions of any process have reached their devices."""
    os.sync()


def _may_drop_caches() -> bool:
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)
