"""Memory that was not written to since an earlier save of this process.

Memory that was unchanged in a save is likely to be unchanged in the next one. It stays armed
(:mod:`.write_tracking`) after its copy, so the next save learns from the kernel that its digests
are those of this save. All other memory is disarmed as soon as it is copied, and hashed next time.

An :class:`Epoch` begins when a save arms its memory. The proof is one of addresses, not of tensors:
a byte of an image is unchanged if it lay at the same address in that epoch, and that page has been
armed and clean since the epoch began. Freed memory that was used again has been written to, mapped
anew, or still has the same bytes. A page is armed again only after it was found dirty, and then it
proves nothing about earlier epochs.

An epoch counts only with the attempt that it was committed as. So after a failed save, a step back,
or a save to another run, nothing is known, and everything is hashed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....core.units import round_up
from .write_tracking import PAGE_NBYTES, Range, WriteTracker, merged, overlaps

Ints = npt.NDArray[np.int64]

_PINNED = re.compile(rb"^VmPin:\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Places:
    """Where the parts of an image lie: bytes [start, stop) at ``address``, which is 0 for memory
    that is not tracked. Columns (n,), in the order of the image."""

    start: Ints
    stop: Ints
    address: Ints

    def same(self, other: Places) -> npt.NDArray[np.bool_]:
        """Return which parts lie at the same place in both, (n,)."""
        if len(self.start) != len(other.start):
            return np.zeros(len(self.start), bool)
        same: npt.NDArray[np.bool_] = (self.start == other.start) & (self.stop == other.stop)
        same &= (self.address == other.address) & (self.address != 0)
        return same

    def memory(self, ranges: Sequence[Range]) -> list[Range]:
        """Return the pages that hold these ranges of bytes of the image."""
        is_tracked = self.address != 0
        return merged(
            [
                _pages(low + shift, high + shift)
                for start, stop in ranges
                for low, high, shift in self.parts(start, stop, is_tracked)
            ]
        )

    def parts(
        self, start: int, stop: int, wanted: npt.NDArray[np.bool_]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (low, high, shift) of the ``wanted`` (n,) parts of bytes [start, stop) of the
        image: the bytes [low, high) lie ``shift`` bytes further in memory."""
        first = int(self.stop.searchsorted(start, side="right"))
        last = int(self.start.searchsorted(stop, side="left"))
        for i in (first + np.flatnonzero(wanted[first:last])).tolist():
            shift = int(self.address[i] - self.start[i])
            yield max(start, int(self.start[i])), min(stop, int(self.stop[i])), shift


@dataclass(eq=False)
class Epoch:
    """The time since a save armed its memory. ``attempt``: what it was committed as; "" before.
    ``likely``: memory that its successor should keep armed."""

    likely: list[Range] = field(default_factory=list)
    places: Places | None = None
    attempt: str = ""

    def commit(self, attempt: str, unchanged: Sequence[Range]) -> None:
        """Record that the save was committed, with these bytes of its image ``unchanged``."""
        if self.places is not None:
            self.likely = self.places.memory(unchanged)
            self.attempt = attempt


class Unwritten:
    """Answers which bytes of a save's image are those of the save before. Created when its memory
    was armed, before any of it is disarmed."""

    def __init__(self, tracker: WriteTracker | None = None, armed: Sequence[Range] = ()) -> None:
        """Begin an epoch. ``armed``: the memory that was just armed, sorted and disjoint. Without a
        tracker, nothing is known."""
        self._before = self.epoch = Epoch()
        self._clean: list[Range] = []
        if tracker is None:
            return
        before = tracker.epoch
        if isinstance(before, Epoch):
            self._before = before
        keep = [] if _has_pinned_memory() else overlaps(self._before.likely, armed)
        self.epoch = Epoch(keep)
        self._clean = overlaps(tracker.retain(self.epoch, keep), armed)

    @property
    def may_know(self) -> bool:
        """True if something is known about changes since some attempt."""
        return bool(self._clean and self._before.attempt)

    def since(self, attempt: str) -> bool:
        """Return whether anything is known about changes since ``attempt``."""
        return self.may_know and self._before.attempt == attempt

    def proven(self, places: Places) -> list[Range]:
        """Return which bytes of the image were unchanged when the memory was armed: sorted,
        disjoint. Later writes do not matter: nobody has to read these bytes."""
        before = self._before.places
        if before is None:
            return []
        found: list[Range] = []
        parts = places.parts(0, int(places.stop.max(initial=0)), places.same(before))
        for low, high, shift in parts:
            for begin, end in overlaps(self._clean, [_pages(low + shift, high + shift)]):
                found.append((max(begin - shift, low), min(end - shift, high)))
        return merged(found)


def _pages(start: int, stop: int) -> Range:
    """Return the whole pages that hold bytes [start, stop) of memory."""
    return start // PAGE_NBYTES * PAGE_NBYTES, round_up(stop, PAGE_NBYTES)


def _has_pinned_memory() -> bool:
    """Return whether a device may write to memory of this process: unseen, if it was pinned before
    it was armed (RDMA, ``io_uring``)."""
    try:
        with open("/proc/self/status", "rb") as status:
            found = _PINNED.search(status.read())
    except OSError:
        return True
    return found is None or int(found[1]) > 0
