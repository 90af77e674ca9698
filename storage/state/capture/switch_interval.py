"""Shortens the interval at which Python's threads hand over the GIL.

Next to a trainer that computes in Python, a copying thread waits 5 ms (the default) for the lock at
each chunk, which multiplies the copy's duration. The same holds next to a thread that computes
checksums. The interval is short while anything is being copied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ....core.forks.renewal import in_child, new_lock

SWITCH_INTERVAL_S = 0.0005
"""Longest time that a thread keeps the lock during a copy while another one waits for it."""

_users = set[object]()
"""The blocks in progress, in all threads."""
_before_s = sys.getswitchinterval()
_lock = new_lock()


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Keep the interval short for the body. The last of several users restores it."""
    global _before_s  # noqa: PLW0603
    user = object()
    with _lock:
        if not _users:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_INTERVAL_S, _before_s))
        _users.add(user)
    try:
        yield
    finally:
        with _lock:
            if user in _users:
                _users.remove(user)
                if not _users:
                    sys.setswitchinterval(_before_s)


def _forget_parent() -> None:
    """Restore the interval in a forked child, which copies nothing."""
    if _users:
        _users.clear()
        sys.setswitchinterval(_before_s)


in_child(_forget_parent)
