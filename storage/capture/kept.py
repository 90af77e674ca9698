"""What is kept of former saves, so that the next one of the same state need not find it out again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Kept"]

V = TypeVar("V")


class Kept(Generic[V]):
    """The last ``count`` values, by key; the one that was not asked for the longest goes first. For any thread."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """The value of ``key``, or None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Keep ``value``."""
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._count:
                self._values.popitem(last=False)

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._values.clear()
