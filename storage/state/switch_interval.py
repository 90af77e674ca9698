"""How often Python's threads take turns.

Beside a trainer that computes in Python, a thread that copies waits for its turn at each chunk, for
5 ms by default, and so takes many times as long. Turns are short while anything is copied.
"""

from __future__ import annotations

import sys

from ...core.forks.renewal import in_child, new_lock

__all__ = ["SWITCH_INTERVAL_S", "turns"]

SWITCH_INTERVAL_S = 0.0005
"""While something is copied: how long a thread of Python's may keep the interpreter's lock from one
that waits for it."""


class _Turns:
    def __init__(self) -> None:
        self._for = set[int]()
        self._before_s = 0.0
        self._lock = new_lock()

    def shorten(self, capture: object) -> None:
        """Until :meth:`restore` was called for ``capture``, too."""
        with self._lock:
            if not self._for:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._before_s))
            self._for.add(id(capture))

    def restore(self, capture: object) -> None:
        """As it was before. Called any number of times."""
        with self._lock:
            if id(capture) in self._for:
                self._for.remove(id(capture))
                if not self._for:
                    sys.setswitchinterval(self._before_s)

    def forget(self) -> None:
        """In a forked child, which copies nothing."""
        if self._for:
            self._for.clear()
            sys.setswitchinterval(self._before_s)


turns = _Turns()
in_child(turns.forget)
