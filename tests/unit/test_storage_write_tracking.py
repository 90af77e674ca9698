"""Test that unwritten memory counts as clean, whatever the kernel does to its pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time

import pytest

from holdfast.storage.state.capture.write_tracking import PAGE_NBYTES, write_tracker

NBYTES = 256 << 20
COMPACT = "/proc/sys/vm/compact_memory"


def in_small_pages() -> mmap.mmap:
    """Return written memory in pages of 4 KiB."""
    memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.write(bytes([7]) * NBYTES)
    return memory


def compact_until(over: threading.Event) -> None:
    """Fragment memory, and make the kernel move pages together, again and again."""
    while not over.is_set():
        with in_small_pages() as memory:
            for at in range(0, NBYTES, 16 * PAGE_NBYTES):
                memory.madvise(mmap.MADV_DONTNEED, at, 8 * PAGE_NBYTES)
            with open(COMPACT, "w") as file:
                file.write("1")


@pytest.mark.drill
@pytest.mark.skipif(write_tracker() is None, reason="writes cannot be tracked on this machine")
@pytest.mark.skipif(not os.access(COMPACT, os.W_OK), reason="only root may compact memory")
def test_pages_that_the_kernel_moves_stay_clean() -> None:
    """A page that is armed while the kernel moves it must not lose its mark."""
    tracker = write_tracker()
    assert tracker is not None
    memory = in_small_pages()
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pages = start, start + NBYTES
    over = threading.Event()
    compacting = threading.Thread(target=compact_until, args=(over,))
    compacting.start()
    try:
        ends_s = time.monotonic() + 30
        while time.monotonic() < ends_s:
            tracker.arm(*pages)
            assert tracker.is_clean(*pages)
            time.sleep(0.02)
            assert tracker.is_clean(*pages)
            tracker.disarm(*pages)
    finally:
        over.set()
        compacting.join()
