"""What nobody writes to is clean, whatever the kernel does to its pages meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from holdfast.storage.state.capture.write_tracking import PAGE_NBYTES, write_tracker

NBYTES = 256 << 20
COMPACT = "/proc/sys/vm/compact_memory"


def in_small_pages() -> mmap.mmap:
    """Return memory all of which is written to, in pages of 4 KiB."""
    memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.write(bytes([7]) * NBYTES)
    return memory


def fragment() -> None:
    """Free half of some memory in small pieces, so that there is something to compact."""
    with in_small_pages() as memory:
        for at in range(0, NBYTES, 16 * PAGE_NBYTES):
            memory.madvise(mmap.MADV_DONTNEED, at, 8 * PAGE_NBYTES)
        time.sleep(0.05)


def compact() -> None:
    """Have the kernel move pages together."""
    with open(COMPACT, "w") as file:
        file.write("1")


@contextmanager
def repeated(*actions: Callable[[], None]) -> Iterator[None]:
    """Do each action again and again, in a thread of its own."""
    over = threading.Event()

    def repeat(action: Callable[[], None]) -> None:
        while not over.is_set():
            action()

    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.drill
@pytest.mark.skipif(write_tracker() is None, reason="writes cannot be tracked on this machine")
@pytest.mark.skipif(not os.access(COMPACT, os.W_OK), reason="only root may compact memory")
def test_pages_that_the_kernel_moves_stay_clean() -> None:
    """Arming a page on its way lost the mark at its arrival: 13 of 800 times, in 30 seconds."""
    tracker = write_tracker()
    assert tracker is not None
    memory = in_small_pages()
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pages = start, start + NBYTES
    ends_s = time.monotonic() + 30
    with repeated(compact, fragment):
        while time.monotonic() < ends_s:
            tracker.arm(*pages)
            assert tracker.is_clean(*pages)
            time.sleep(0.02)
            assert tracker.is_clean(*pages)
            tracker.disarm(*pages)
