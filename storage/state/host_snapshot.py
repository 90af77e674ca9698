"""Tensors in host memory as they were at one moment, read while others may write to them.

At that moment, pages that lie within one tensor alone are armed (:mod:`.write_tracking`), and the
rest is copied: small tensors, tensors that are known to be written to soon, and the first and last
bytes of large ones, which share their pages with other memory. Later, :meth:`HostSnapshot.copy`
reads, and then asks whether the pages that it read are still clean. If they are, what was read is
what was there at that moment. If they are not, it raises: there is no way to get it back.

Memory that was read is disarmed at once, so the trainer does not pay for marks that are no longer
needed. This is done in units of huge pages, and what lies between them is disarmed when
all is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.units import round_up
from ..runtime.buffers import HostBuffer, host_pool
from .process_memory import GoneError, gather, gather_segments
from .write_tracking import PAGE_NBYTES, Range, WriteTracker, merged, touches, without

__all__ = ["SMALL_NBYTES", "ChangedError", "HostSnapshot", "Region"]

GAP_NBYTES = 64 << 10
"""Ranges that are closer than this are armed together: a system call costs as much as arming so
many pages."""
HUGE_NBYTES = 2 << 20
"""A huge page. To disarm a part of one splits it, and then the next save has 512 pages to arm."""
SMALL_NBYTES = 16 << 10
"""So much is copied rather than tracked."""
TRIES = 3
"""So often small tensors are copied at the call, where another thread writes to them meanwhile."""

Ints = npt.NDArray[np.int64]


class ChangedError(Exception):
    """A row is not what it was at the moment of the snapshot. Not seen outside of this package."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class Region:
    """Where the bytes of a tensor lie.

    ``at_once``: they are copied at the call. ``watch``: they stay armed after they are copied, to
    see later writes.
    """

    row: int
    address: int
    nbytes: int
    at_once: bool = False
    watch: bool = False


class HostSnapshot:
    """Made at the call, while the trainer waits; used by the threads that copy; closed when
    everything is copied.

    Stored column-wise, because a state may have thousands of tensors.
    """

    def __init__(
        self, regions: Sequence[Region], tracker: WriteTracker, *, check_files: Collection[int] = ()
    ) -> None:
        """``check_files``: rows whose memory has not been looked at yet. What cannot be tracked is
        copied at once.

        Raises ChangedError where another thread writes to what is to be copied at once.
        """
        self._tracker = tracker
        self._regions = regions
        self._at = {region.row: i for i, region in enumerate(regions)}
        self._lay_out()
        self.untrackable = set[int]()
        """Rows in memory of a kind that cannot be tracked."""
        self._armed = self._arm()
        self._untracked = self._find_untracked(set(check_files))
        self._disarmed: list[Range] = []
        self._whole: dict[int, HostBuffer] = {}
        self._arena: HostBuffer | None = None
        try:
            # What is tracked shows that it was not written to while the rest was copied.
            self._copy_edges()
            at_once = {i for i, region in enumerate(regions) if region.at_once} | self._untracked
            for i in sorted(at_once):
                if regions[i].nbytes > SMALL_NBYTES:
                    self._copy_whole(i)
        except BaseException:
            self.close()
            raise

    def __contains__(self, row: int) -> bool:
        return row in self._at

    def copy(self, row: int, start: int, stop: int, to: int, *, disarm: bool = True) -> None:
        """Copy bytes [start, stop) of the tensor in ``row``, as they were, to address ``to``.
        Raises ChangedError.

        ``disarm``: these bytes are not asked for again.
        """
        try:
            gather_segments(self.segments(row, start, stop), to)
        except GoneError:
            raise ChangedError(row) from None
        self.check([(row, start, stop)], disarm=disarm)

    def segments(self, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Where bytes [start, stop) of the tensor in ``row`` are to be read from, in order, as
        addresses and numbers of bytes. They are as they were if :meth:`check` says so later."""
        i = self._at[row]
        if i in self._whole:
            return [(self._whole[i].address + start, stop - start)]
        head = self._head[i]
        tail = self._tail[i]
        found = []
        if start < head:
            found.append((self._arena_at(self._head_at[i] + start), min(stop, head) - start))
        first = max(start, head)
        last = min(stop, tail)
        if first < last:
            found.append((self._regions[i].address + first, last - first))
        if stop > tail:
            first = max(start, tail)
            found.append((self._arena_at(self._tail_at[i] + first - tail), stop - first))
        return found

    def check(self, read: Sequence[tuple[int, int, int]], *, disarm: bool = True) -> None:
        """Raise ChangedError unless what was read is what was there: of rows, bytes [start, stop)
        each. ``disarm``: see :meth:`copy`."""
        pages = {part: self._pages(*part) for part in read}
        tracked = [range_ for range_ in pages.values() if range_[0] < range_[1]]
        # Neighbours are asked for at once. What lies between them may have been written to.
        if not all(self._tracker.is_clean(*range_) for range_ in merged(tracked, GAP_NBYTES)):
            for part, range_ in pages.items():
                if range_[0] < range_[1] and not self._tracker.is_clean(*range_):
                    raise ChangedError(part[0])
        if disarm:
            for part in read:
                self._disarm_read(*part)

    def _pages(self, row: int, start: int, stop: int) -> Range:
        """The tracked pages of which bytes [start, stop) of ``row`` are read; empty where those are
        copies."""
        i = self._at[row]
        first = max(start, self._head[i])
        last = min(stop, self._tail[i])
        if first >= last or i in self._whole:
            return 0, 0
        address = self._regions[i].address
        return (
            (address + first) // PAGE_NBYTES * PAGE_NBYTES,
            round_up(address + last, PAGE_NBYTES),
        )

    def _disarm_read(self, row: int, start: int, stop: int) -> None:
        i = self._at[row]
        region = self._regions[i]
        if stop - start < HUGE_NBYTES or not self._alone[i] or region.watch or i in self._whole:
            return
        first = region.address + max(start, self._head[i])
        last = region.address + min(stop, self._tail[i])
        self._disarm(round_up(first, HUGE_NBYTES), last // HUGE_NBYTES * HUGE_NBYTES)

    def tracks(self, row: int) -> bool:
        """Whether writes to ``row`` are seen, but for its first and last bytes."""
        i = self._at.get(row)
        return i is not None and self._head[i] < self._tail[i] and i not in self._untracked

    def written(self, row: int) -> bool:
        """Whether ``row``, which is tracked, and was not disarmed, is not as it was."""
        return not self._tracker.is_clean(*self._tracked(self._at[row]))

    def watch_again(self) -> None:
        """Arm anew what was disarmed, to see later writes. What was written to stays dirty."""
        self._tracker.arm_all(merged(self._disarmed))
        self._disarmed.clear()
        self._drop_copies()

    def end_copying(self) -> None:
        """All is copied: disarm what is not watched, and forget the copies."""
        watched = [self._tracked(i) for i, region in enumerate(self._regions) if region.watch]
        keep = merged(range_ for range_ in watched if range_[0] < range_[1])
        for start, stop in without(self._armed, [*self._disarmed, *keep]):
            self._tracker.disarm(start, stop)
            self._disarmed.append((start, stop))
        self._drop_copies()

    def close(self) -> None:
        """Disarm what is left, and forget all."""
        for start, stop in without(self._armed, self._disarmed):
            self._tracker.disarm(start, stop)
        self._armed = []
        self._tracker.forgo(self)
        self._drop_copies()

    def _drop_copies(self) -> None:
        self._whole.clear()
        if self._arena is not None:
            host_pool(len(self._arena.view)).give(self._arena)
            self._arena = None

    def _lay_out(self) -> None:
        """Say of each region which bytes are tracked, [head, tail), and where in the arena the
        others are copied to."""
        address = np.array([region.address for region in self._regions], np.int64)
        nbytes = np.array([region.nbytes for region in self._regions], np.int64)
        first = round_up(address, PAGE_NBYTES)
        last = np.maximum(first, (address + nbytes) // PAGE_NBYTES * PAGE_NBYTES)
        small = nbytes <= SMALL_NBYTES
        head = np.where(small, nbytes, first - address)
        tail = np.where(small, nbytes, last - address)
        sizes = np.stack([head, nbytes - tail], axis=1).ravel()
        places = np.concatenate([[0], sizes.cumsum()])
        edges = np.stack([address, address + tail], axis=1).ravel()
        self._edges = (edges[sizes > 0], sizes[sizes > 0])
        self._places: Ints = places
        self._head = head.tolist()
        self._tail = tail.tolist()
        self._head_at = places[0:-1:2].tolist()
        self._tail_at = places[1:-1:2].tolist()
        self._alone = _alone(address, address + nbytes).tolist()
        self._exact = merged(zip(first[~small].tolist(), last[~small].tolist(), strict=True))

    def _arm(self) -> list[Range]:
        """Arm what is to be tracked. Returns what was armed."""
        for ranges in (merged(self._exact, GAP_NBYTES), self._exact):
            if not self._tracker.claim(self, ranges):
                continue
            if not self._tracker.arm_all(ranges):
                return ranges
            for start, stop in ranges:
                self._tracker.disarm(start, stop)
            self._tracker.forgo(self)
        return self._arm_one_by_one(self._exact)

    def _arm_one_by_one(self, ranges: Sequence[Range]) -> list[Range]:
        """Arm each of ``ranges`` that no other snapshot tracks, and that can be armed."""
        theirs = self._tracker.claimed_by_others(self)
        ours = [range_ for range_ in ranges if not touches(theirs, range_)]
        if not self._tracker.claim(self, ours):
            return []
        failed = set(self._tracker.arm_all(ours))
        for start, stop in failed:
            self._tracker.disarm(start, stop)
        return [range_ for range_ in ours if range_ not in failed]

    def _find_untracked(self, check_files: set[int]) -> set[int]:
        """Those that were to be armed, and are not, or must not be."""
        missing = without(self._exact, self._armed)
        files = []
        if check_files:
            files = [range_ for range_ in self._armed if self._tracker.has_file_pages(*range_)]
        if not missing and not files:
            return set()
        theirs = self._tracker.claimed_by_others(self)
        found = set()
        for i, region in enumerate(self._regions):
            pages = self._tracked(i)
            if pages[0] == pages[1]:
                continue
            armed = not touches(missing, pages)
            suspect = region.row in check_files and touches(files, pages)
            if not armed or (suspect and self._tracker.has_file_pages(*pages)):
                found.add(i)
                if not touches(theirs, pages):
                    self.untrackable.add(region.row)
        return found

    def _copy_edges(self) -> None:
        """Copy heads and tails to the arena, twice: if the copies are the same, there was a moment
        at which the memory was so."""
        addresses, sizes = self._edges
        nbytes = int(sizes.sum())
        if not nbytes:
            return
        arena = _memory(nbytes)
        again = _memory(nbytes)
        try:
            self._gather(addresses, sizes, arena.address)
            differs: int | None = None
            for _ in range(TRIES):
                self._gather(addresses, sizes, again.address)
                differs = _first_difference(arena, again, nbytes)
                if differs is None:
                    return
                arena, again = again, arena
            assert differs is not None
            raise ChangedError(self._row_at(differs))
        finally:
            self._arena = arena
            host_pool(len(again.view)).give(again)

    def _gather(self, addresses: Ints, sizes: Ints, to: int) -> None:
        try:
            gather(addresses, sizes, to)
        except GoneError:
            raise ChangedError(self._regions[0].row) from None

    def _copy_whole(self, i: int) -> None:
        """Copy a large region, and disarm it."""
        region = self._regions[i]
        whole = HostBuffer.allocate(region.nbytes)
        if i not in self._untracked:
            self.copy(region.row, 0, region.nbytes, whole.address)
        else:
            self._gather(np.array([region.address]), np.array([region.nbytes]), whole.address)
        self._whole[i] = whole

    def _row_at(self, position: int) -> int:
        """Which row a byte of the arena belongs to."""
        return self._regions[(int(self._places.searchsorted(position, side="right")) - 1) // 2].row

    def _arena_at(self, position: int) -> int:
        assert self._arena is not None
        return self._arena.address + position

    def _tracked(self, i: int) -> Range:
        address = self._regions[i].address
        return address + self._head[i], address + self._tail[i]

    def _disarm(self, start: int, stop: int) -> None:
        if start < stop:
            self._tracker.disarm(start, stop)
            self._disarmed.append((start, stop))


def _alone(start: Ints, stop: Ints) -> npt.NDArray[np.bool_]:
    """Which ranges have no byte in common with another: a page that was read for one is not read
    again."""
    order = np.lexsort((stop, start))
    ends = np.maximum.accumulate(stop[order])
    touches = np.zeros(len(order) + 1, bool)
    touches[1:-1] = start[order][1:] < ends[:-1]
    alone = np.empty(len(order), bool)
    alone[order] = ~(touches[:-1] | touches[1:])
    return alone


def _first_difference(a: HostBuffer, b: HostBuffer, nbytes: int) -> int | None:
    """Where the first ``nbytes`` of two buffers differ first; None where they do not."""
    mine = np.frombuffer(a.view, np.uint8)
    theirs = np.frombuffer(b.view, np.uint8)
    whole = nbytes // 8 * 8
    words = mine[:whole].view(np.int64) == theirs[:whole].view(np.int64)
    if words.all() and (mine[whole:nbytes] == theirs[whole:nbytes]).all():
        return None
    return int((mine[:nbytes] != theirs[:nbytes]).argmax())


def _memory(nbytes: int) -> HostBuffer:
    """A buffer of ``nbytes`` at least. Kept, as all of a pool: fresh memory costs more than the
    copy."""
    size = max(1 << 20, 1 << (nbytes - 1).bit_length())
    return host_pool(size).take()
