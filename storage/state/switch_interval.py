"""Shortens the interval at which Python's threads take the interpreter's lock from each other.

Beside a trainer that computes in Python, a thread that copies waits for the lock at each chunk, for
5 ms by default, and so takes many times as long. So does one beside a thread that computes
checksums. The interval is short while anything is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ...core.forks.renewal import in_child, new_lock

__all__ = ["SWITCH_INTERVAL_S", "switch_interval"]

SWITCH_INTERVAL_S = 0.0005
"""While something is copied: how long a thread may keep the lock while another one waits for it."""


class _SwitchInterval:
    def __init__(self) -> None:
        self._shortened_for = set[int]()
        self._before_s = 0.0
        self._lock = new_lock()

    @contextmanager
    def short(self) -> Iterator[None]:
        """It is short until the end of the body."""
        user = object()
        self.shorten(user)
        try:
            yield
        finally:
            self.restore(user)

    def shorten(self, user: object) -> None:
        """Shorten it until :meth:`restore` was called for ``user``, and for all others."""
        with self._lock:
            if not self._shortened_for:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._before_s))
            self._shortened_for.add(id(user))

    def restore(self, user: object) -> None:
        """Set it to what it was before. May be called any number of times."""
        with self._lock:
            if id(user) in self._shortened_for:
                self._shortened_for.remove(id(user))
                if not self._shortened_for:
                    sys.setswitchinterval(self._before_s)

    def forget(self) -> None:
        """In a forked child, which copies nothing."""
        if self._shortened_for:
            self._shortened_for.clear()
            sys.setswitchinterval(self._before_s)


switch_interval = _SwitchInterval()
in_child(switch_interval.forget)
