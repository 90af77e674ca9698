"""A cache of recently used values that evicts the least recently used one."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .forks.renewal import new_lock

V = TypeVar("V")


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    used: int
    """Time of the last use, counted in uses of the cache."""


class LruCache(Generic[V]):
    """Up to ``count`` values, by key. Thread-safe.

    A lookup hashes its key once. An ``OrderedDict`` would do so twice, and hashing the signature of
    a large state takes longer than the rest of the lookup.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._entries: dict[Hashable, _Entry[V]] = {}
        self._clock = itertools.count()
        self._lock = new_lock()

    def get(self, key: Hashable) -> V | None:
        """Return the value of ``key``, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.used = next(self._clock)
            return entry.value

    def put(self, key: Hashable, value: V) -> None:
        """Set the value of ``key``; evict the least recently used value if there are too many."""
        with self._lock:
            self._entries[key] = _Entry(value, next(self._clock))
            while len(self._entries) > self._count:
                oldest, _ = min(self._entries.items(), key=lambda item: item[1].used)
                del self._entries[oldest]

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._entries.clear()
