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


class _SwitchInterval:
    def __init__(self) -> None:
        self._shortened_for = set[int]()
        self._before_s = 0.0
        self._lock = new_lock()

    @contextmanager
    def short(self) -> Iterator[None]:
        """Keep the interval short for the body."""
        user = object()
        self.shorten(user)
        try:
            yield
        finally:
            self.restore(user)

    def shorten(self, user: object) -> None:
        """Shorten the interval until :meth:`restore` has been called for ``user`` and all other
        users."""
        with self._lock:
            if not self._shortened_for:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._before_s))
            self._shortened_for.add(id(user))

    def restore(self, user: object) -> None:
        """Restore the former interval if ``user`` was the last. Idempotent."""
        with self._lock:
            if id(user) in self._shortened_for:
                self._shortened_for.remove(id(user))
                if not self._shortened_for:
                    sys.setswitchinterval(self._before_s)

    def forget(self) -> None:
        """Restore the interval in a forked child, which copies nothing."""
        if self._shortened_for:
            self._shortened_for.clear()
            sys.setswitchinterval(self._before_s)


switch_interval = _SwitchInterval()
in_child(switch_interval.forget)
