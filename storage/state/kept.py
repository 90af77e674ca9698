"""What is kept of former saves, so that the next one of the same state need not find it out again."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...core.forks.renewal import new_lock

__all__ = ["Kept"]

V = TypeVar("V")


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    asked: int  # when it was last asked for


class Kept(Generic[V]):
    """The last ``count`` values, by key; the one that was not asked for the longest goes first. For
    any thread.

    A look hashes its key once: that of a large state takes longer than all else about it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._entries: dict[Hashable, _Entry[V]] = {}
        self._now = itertools.count()
        self._lock = new_lock()

    def get(self, key: Hashable) -> V | None:
        """The value of ``key``, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.asked = next(self._now)
            return entry.value

    def put(self, key: Hashable, value: V) -> None:
        """Keep ``value``."""
        with self._lock:
            self._entries[key] = _Entry(value, next(self._now))
            while len(self._entries) > self._count:
                del self._entries[min(self._entries.items(), key=lambda item: item[1].asked)[0]]

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._entries.clear()
