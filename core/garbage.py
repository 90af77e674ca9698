"""Pauses Python's cyclic garbage collector while very many long-lived objects are created.

The collector scans all new objects repeatedly. If thousands of tensors are described by a million
small objects, that takes as long as creating them, and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .forks.renewal import new_lock

_lock = new_lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector for the whole process until every overlapping pause has ended.

    A collector that was disabled before stays disabled. Use it for seconds of work without awaits.
    """
    global _pauses, _was_enabled  # noqa: PLW0603
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
