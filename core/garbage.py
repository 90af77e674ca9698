"""Pauses Python's collector of cyclic garbage while a great many objects are made that stay.

The collector looks at all new objects again and again. Where thousands of tensors are described by
a million small objects, that takes as long as making them, and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .forks.renewal import new_lock

__all__ = ["collector_paused"]

_lock = new_lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, of the whole process, until the last of all that have paused it goes on.
    It stays off where it was. For work of seconds that awaits nothing."""
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
