"""The bytes that a bare client moves: a state's tensors, or random bytes.

Every program that uses a client directly has to move tensors as well. Random bytes show the best
that the client can do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch

from ..planner.image import BLOCK_NBYTES
from ..storage.format.digest import page_of
from .states import State, flat_tensors

__all__ = ["Checked", "Content", "Noise", "StateBytes"]


class Content(Protocol):
    """A sequence of bytes, sent or received in ranges by several threads at once."""

    def take(self, start: int, stop: int) -> Any:
        """Return the bytes [start, stop) as a buffer."""

    def place(self, start: int, data: Any) -> None:
        """Store the received ``data`` at ``start``."""


class Noise:
    """Sends the same ``nbytes`` random bytes over and over, and discards received bytes."""

    def __init__(self, nbytes: int) -> None:
        self._data = np.random.default_rng(0).bytes(nbytes)

    def take(self, start: int, stop: int) -> bytes:
        """Return random bytes, without a copy for a full block."""
        return self._data[: stop - start]

    def place(self, start: int, data: Any) -> None:
        """Discard the data."""


class StateBytes:
    """The bytes of a state's tensors, one after the other."""

    def __init__(self, state: State) -> None:
        tensors = flat_tensors(state).values()
        self._views = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors]
        self._starts = list(accumulate((len(view) for view in self._views), initial=0))

    def take(self, start: int, stop: int) -> Any:
        """Return a range, without a copy if it lies within one tensor."""
        found = list(self._slices(start, stop))
        if len(found) == 1:
            return found[0]
        return np.concatenate(found)

    def place(self, start: int, data: Any) -> None:
        """Copy ``data`` into the tensors."""
        received = np.frombuffer(data, np.uint8)
        at = 0
        for view in self._slices(start, start + len(received)):
            view[:] = received[at : at + len(view)]
            at += len(view)

    def _slices(self, start: int, stop: int) -> Iterator[Any]:
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            first = self._starts[number]
            view = self._views[number][start - first : stop - first]
            yield view
            start += len(view)
            number += 1


class Checked:
    """Another content, plus the checksums that a save or load computes. They are not compared."""

    def __init__(self, inner: Content) -> None:
        self._inner = inner

    def take(self, start: int, stop: int) -> Any:
        """Compute the checksums of the bytes to send."""
        data = self._inner.take(start, stop)
        page_of(memoryview(data), BLOCK_NBYTES)
        return data

    def place(self, start: int, data: Any) -> None:
        """Compute the checksums of the received bytes first."""
        page_of(memoryview(data), BLOCK_NBYTES)
        self._inner.place(start, data)
