"""Snapshots of tensors in host memory, readable while others may write to them.

At the moment of the snapshot, pages that hold bytes of a single tensor only are armed
(:mod:`.write_tracking`). Everything else is copied: small tensors, tensors known to be written to
soon, and the first and last bytes of large tensors, which share their pages with other memory.
Later, :meth:`HostSnapshot.copy` reads the armed pages and then asks whether they are still clean.
If so, the bytes are those of the snapshot. If not, those are lost, and it raises ChangedError.

Memory that others may write to unnoticed is not armed: files, shared memory, device memory, or all
memory if the kernel does not track writes. Its digests are taken at the snapshot, and later reads
are compared with them (:mod:`.process_memory`).

Everything copied at the snapshot is read twice. If both reads agree and no armed page was written
to, all of the state was as stored at one single moment.

Memory that was read is disarmed immediately, so that the trainer does not pay for marks that are no
longer needed. Disarming works in units of huge pages; the rest is disarmed once everything is
copied. Only memory that probably stays unchanged keeps its marks (:mod:`.unwritten`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....core.units import round_up
from ...runtime.buffers import HostBuffer, host_pool
from ..bits import copy_memory
from .process_memory import (
    BLOCK_NBYTES,
    GoneError,
    block_of,
    copy_digest,
    digests_of,
    gather,
    gather_segments,
    read,
)
from .unwritten import Unwritten
from .write_tracking import PAGE_NBYTES, Range, WriteTracker, merged, touches, without

GAP_NBYTES = 64 << 10
"""Ranges closer than this are armed together: a system call costs as much as arming 16 pages."""
HUGE_NBYTES = 2 << 20
"""Size of a huge page. Disarming part of one splits it, and the next save has to arm 512 pages."""
SMALL_NBYTES = 16 << 10
"""Tensors up to this size are copied rather than tracked."""
TRIES = 3
"""Attempts to copy memory at the call while another thread or process writes to it."""

PAUSE_S = 0.005
"""Pause between the two reads of untracked memory. A writer that is waiting for a processor in the
middle of its work would otherwise go unnoticed."""

Ints = npt.NDArray[np.int64]


class ChangedError(Exception):
    """A row has changed since the snapshot. Never leaves this package."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class Region:
    """The memory of one tensor.

    ``at_once``: copy it at the call. ``watch``: keep it armed after the copy, to see later writes.
    ``untracked``: the kernel does not see all writes to it.
    """

    row: int
    address: int
    nbytes: int
    at_once: bool = False
    watch: bool = False
    untracked: bool = False


class HostSnapshot:
    """A snapshot of host memory.

    Created at the call while the trainer waits, read by the copying threads, and closed when
    everything is copied. Stored column-wise, because a state may have thousands of tensors.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        tracker: WriteTracker | None,
        *,
        prove: bool = False,
        incremental: bool = False,
    ) -> None:
        """Arm, copy and digest ``regions``; the caller must then call :meth:`confirm`.

        ``tracker``: None if the system has none. ``prove``: take digests of tracked memory, too.
        ``incremental``: keep unchanged memory armed. Raises ChangedError if memory is no longer
        mapped.
        """
        self._tracker = tracker
        self._regions = regions
        self._at = {region.row: i for i, region in enumerate(regions)}
        self._lay_out()
        large = [i for i, region in enumerate(regions) if region.nbytes > SMALL_NBYTES]
        self._untracked = self._find_foreign(large)
        self._armed = self._arm()
        self.unwritten = Unwritten(tracker, self._armed) if incremental else Unwritten()
        self._untracked |= self._find_unarmed()
        self._disarmed: list[Range] = []
        self._whole: dict[int, HostBuffer] = {}
        self._digests: dict[int, list[bytes]] = {}
        self._arena: HostBuffer | None = None
        try:
            self._copy_edges()
            self._digest([i for i in large if prove or i in self._untracked])
        except BaseException:
            self.close()
            raise

    def confirm(self) -> None:
        """Read the copied memory again, and copy the tracked memory that was due at once.

        Raises ChangedError if another thread or process keeps writing to the copied memory.
        """
        if self._untracked:
            time.sleep(PAUSE_S)
        changed = set[int]()
        for _ in range(TRIES):
            changed = self._changed_edges() | self._changed_wholes()
            if not changed:
                break
        else:
            raise ChangedError(min(changed))
        for i, region in enumerate(self._regions):
            if region.at_once and region.nbytes > SMALL_NBYTES and i not in self._whole:
                whole = HostBuffer.allocate(region.nbytes)
                self.copy(region.row, 0, region.nbytes, whole.address)
                self._whole[i] = whole

    @property
    def arena_nbytes(self) -> int:
        """Upper bound of the memory for copies of small tensors and edges, both reads included."""
        return 0 if self._arena is None else 2 * len(self._arena.view)

    def __contains__(self, row: int) -> bool:
        return row in self._at

    def copy(self, row: int, start: int, stop: int, to: int, *, disarm: bool = True) -> None:
        """Copy bytes [start, stop) of ``row``, as of the snapshot, to address ``to``.

        ``disarm``: these bytes will not be read again. Raises ChangedError.
        """
        with _changed(row):
            if self.has_segments(row):
                gather_segments(self.segments(row, start, stop), to)
            else:
                self._copy_blocks(row, start, stop, to)
        self.check([(row, start, stop)], disarm=disarm)

    def has_segments(self, row: int) -> bool:
        """Return whether :meth:`segments` applies to ``row``: it is here, and not compared with
        digests."""
        i = self._at.get(row)
        return i is not None and (i not in self._digests or i in self._whole)

    def segments(self, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the (address, nbytes) pairs to read bytes [start, stop) of ``row`` from, in order.

        :meth:`has_segments` must hold for the row. The bytes are as of the snapshot only if a later
        :meth:`check` passes.
        """
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
        """Raise ChangedError if any (row, start, stop) in ``read`` has changed since the snapshot.

        ``disarm``: see :meth:`copy`.
        """
        pages = {part: self._pages(*part) for part in read}
        tracked = [range_ for range_ in pages.values() if range_[0] < range_[1]]
        # Neighbouring ranges share one query, which also covers the memory between them. Someone
        # may have written there, so a dirty answer has to be confirmed range by range.
        if not all(self._is_clean(range_) for range_ in merged(tracked, GAP_NBYTES)):
            for part, range_ in pages.items():
                if range_[0] < range_[1] and not self._is_clean(range_):
                    raise ChangedError(part[0])
        if disarm:
            for part in read:
                self._disarm_read(*part)

    def _pages(self, row: int, start: int, stop: int) -> Range:
        """Return the tracked pages behind bytes [start, stop) of ``row``; empty if those are
        copies."""
        i = self._at[row]
        first = max(start, self._head[i])
        last = min(stop, self._tail[i])
        if first >= last or i in self._whole or i in self._untracked:
            return 0, 0
        address = self._regions[i].address
        return (
            (address + first) // PAGE_NBYTES * PAGE_NBYTES,
            round_up(address + last, PAGE_NBYTES),
        )

    def _disarm_read(self, row: int, start: int, stop: int) -> None:
        i = self._at[row]
        region = self._regions[i]
        if stop - start < HUGE_NBYTES or not self._alone[i] or region.watch:
            return
        if i in self._whole or i in self._untracked:
            return
        first = region.address + max(start, self._head[i])
        last = region.address + min(stop, self._tail[i])
        self._disarm(round_up(first, HUGE_NBYTES), last // HUGE_NBYTES * HUGE_NBYTES)

    def sees_writes(self, row: int) -> bool:
        """Return whether :meth:`written` can answer for ``row``."""
        i = self._at.get(row)
        if i is None or self._regions[i].nbytes <= SMALL_NBYTES:
            return False
        return i in self._digests or i not in self._untracked

    def written(self, row: int) -> bool:
        """Return whether ``row`` has changed since the snapshot.

        For a row that is tracked without digests, its first and last bytes are ignored, and it must
        not have been disarmed.
        """
        i = self._at[row]
        if i not in self._digests:
            return not self._is_clean(self._tracked(i))
        try:
            return self._digests_of([i]) != [self._digests[i]]
        except ChangedError:
            return True

    def watch_again(self) -> None:
        """Re-arm everything that was disarmed, to see later writes. Dirty pages stay dirty."""
        if self._tracker is not None:
            self._tracker.arm_all(merged(self._disarmed))
        self._disarmed.clear()
        self._drop_copies()

    def end_copying(self) -> None:
        """Disarm everything but watched rows, and drop the copies: everything is copied."""
        watched = [self._tracked(i) for i, region in enumerate(self._regions) if region.watch]
        keep = merged(range_ for range_ in watched if range_[0] < range_[1])
        for start, stop in without(self._armed, [*self._disarmed, *keep]):
            self._disarm(start, stop)
        self._drop_copies()

    def close(self) -> None:
        """Disarm the rest and release everything."""
        for start, stop in without(self._armed, self._disarmed):
            self._disarm(start, stop)
        self._armed = []
        if self._tracker is not None:
            self._tracker.forgo(self)
        self._drop_copies()

    def _drop_copies(self) -> None:
        self._whole.clear()
        if self._arena is not None:
            host_pool(len(self._arena.view)).give(self._arena)
            self._arena = None

    def _lay_out(self) -> None:
        """Compute the tracked bytes [head, tail) of each region, and the arena offsets of the
        others."""
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

    def _find_foreign(self, large: Sequence[int]) -> set[int]:
        """Return the regions that must not be armed, and remove them from the ranges to arm."""
        if self._tracker is None:
            self._exact = []
            return set(large)
        foreign = self._tracker.foreign(self._exact)
        found = {i for i in large if self._regions[i].untracked}
        if foreign:
            found |= {i for i in large if touches(foreign, self._tracked(i))}
        if found:
            self._exact = merged(self._tracked(i) for i in large if i not in found)
        return found

    def _arm(self) -> list[Range]:
        if self._tracker is None or not self._exact:
            return []
        ranges = merged(self._exact, GAP_NBYTES)
        if self._tracker.claim(self, ranges):
            if not self._tracker.arm_all(ranges):
                return ranges
            for start, stop in ranges:
                self._tracker.disarm(start, stop)
            self._tracker.forgo(self)
        return self._arm_one_by_one(self._tracker, self._exact)

    def _arm_one_by_one(self, tracker: WriteTracker, ranges: Sequence[Range]) -> list[Range]:
        """Arm the ranges that no other snapshot tracks, as far as the kernel can. Returns them."""
        theirs = tracker.claimed_by_others(self)
        ours = [range_ for range_ in ranges if not touches(theirs, range_)]
        if not tracker.claim(self, ours):
            return []
        failed = set(tracker.arm_all(ours))
        for start, stop in failed:
            tracker.disarm(start, stop)
        return [range_ for range_ in ours if range_ not in failed]

    def _find_unarmed(self) -> set[int]:
        """Return the regions that should have been armed, but were not."""
        missing = without(self._exact, self._armed)
        if not missing:
            return set()
        return {
            i
            for i, region in enumerate(self._regions)
            if region.nbytes > SMALL_NBYTES and touches(missing, self._tracked(i))
        }

    def _copy_edges(self) -> None:
        addresses, sizes = self._edges
        nbytes = int(sizes.sum())
        if nbytes:
            self._arena = _memory(nbytes)
            self._gather(addresses, sizes, self._arena.address)

    def _changed_edges(self) -> set[int]:
        """Copy heads and tails again. Returns a row whose edges have changed, if any."""
        if self._arena is None:
            return set()
        addresses, sizes = self._edges
        again = _memory(int(sizes.sum()))
        self._arena, before = again, self._arena
        try:
            self._gather(addresses, sizes, again.address)
            differs = _first_difference(before, again, int(sizes.sum()))
        finally:
            host_pool(len(before.view)).give(before)
        return set() if differs is None else {self._row_at(differs)}

    def _digest(self, which: Sequence[int]) -> None:
        """Take digests of regions, and copy the regions that are due at once."""
        some = [i for i in which if not self._regions[i].at_once]
        found = self._digests_of(some)
        self._digests = dict(zip(some, found, strict=True))
        for i in which:
            if self._regions[i].at_once:
                self._whole[i] = HostBuffer.allocate(self._regions[i].nbytes)
                self._digests[i] = self._digests_of([i], self._whole[i].address)[0]

    def _changed_wholes(self) -> set[int]:
        """Read the wholly copied regions again, and repeat the copy of changed regions.

        Returns the rows that have changed.
        """
        copied = list(self._whole)
        again = self._digests_of(copied)
        changed = [i for i, found in zip(copied, again, strict=True) if found != self._digests[i]]
        for i in changed:
            self._digests[i] = self._digests_of([i], self._whole[i].address)[0]
        return {self._regions[i].row for i in changed}

    def _digests_of(self, which: Sequence[int], to: int | None = None) -> list[list[bytes]]:
        memory = [(self._regions[i].address, self._regions[i].nbytes) for i in which]
        try:
            return digests_of(memory, to)
        except GoneError:
            found = []
            for i, part in zip(which, memory, strict=True):
                with _changed(self._regions[i].row):
                    found += digests_of([part], to)
            return found

    def _copy_blocks(self, row: int, start: int, stop: int, to: int) -> None:
        """Copy bytes of a region, and compare the digests of all blocks they touch."""
        i = self._at[row]
        region = self._regions[i]
        spare = np.empty(BLOCK_NBYTES, np.uint8)
        for number in range(start // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)):
            address, nbytes = block_of(region.address, region.nbytes, number)
            first = address - region.address
            low = max(start, first)
            high = min(stop, first + nbytes)
            is_whole = high - low == nbytes
            at = to + low - start if is_whole else spare.ctypes.data
            if copy_digest(address, at, nbytes) != self._digests[i][number]:
                raise ChangedError(row)
            if not is_whole:
                copy_memory(to + low - start, at + low - first, high - low)

    def _gather(self, addresses: Ints, sizes: Ints, to: int) -> None:
        """Copy heads and tails. Raises ChangedError if one is no longer mapped."""
        try:
            gather(addresses, sizes, to)
        except GoneError:
            for address, size, place in zip(addresses, sizes, sizes.cumsum() - sizes, strict=True):
                with _changed(self._row_at(int(place))):
                    read(int(address), to, int(size))

    def _row_at(self, position: int) -> int:
        return self._regions[(int(self._places.searchsorted(position, side="right")) - 1) // 2].row

    def _arena_at(self, position: int) -> int:
        assert self._arena is not None
        return self._arena.address + position

    def _tracked(self, i: int) -> Range:
        address = self._regions[i].address
        return address + self._head[i], address + self._tail[i]

    def _is_clean(self, pages: Range) -> bool:
        return self._tracker is not None and self._tracker.is_clean(*pages)

    def _disarm(self, start: int, stop: int) -> None:
        if self._tracker is not None and start < stop:
            self._tracker.disarm(start, stop)
            self._disarmed.append((start, stop))


@contextlib.contextmanager
def _changed(row: int) -> Iterator[None]:
    try:
        yield
    except GoneError:
        raise ChangedError(row) from None


def _alone(start: Ints, stop: Ints) -> npt.NDArray[np.bool_]:
    """Return which ranges overlap no other, (n,) bool.

    Each page of such a range is read only once.
    """
    order = np.lexsort((stop, start))
    ends = np.maximum.accumulate(stop[order])
    touches = np.zeros(len(order) + 1, bool)
    touches[1:-1] = start[order][1:] < ends[:-1]
    alone = np.empty(len(order), bool)
    alone[order] = ~(touches[:-1] | touches[1:])
    return alone


def _first_difference(a: HostBuffer, b: HostBuffer, nbytes: int) -> int | None:
    """Return the first position at which two buffers differ within ``nbytes``; None if they are
    equal."""
    mine = np.frombuffer(a.view, np.uint8)
    theirs = np.frombuffer(b.view, np.uint8)
    whole = nbytes // 8 * 8
    words = mine[:whole].view(np.int64) == theirs[:whole].view(np.int64)
    if words.all() and (mine[whole:nbytes] == theirs[whole:nbytes]).all():
        return None
    return int((mine[:nbytes] != theirs[:nbytes]).argmax())


def _memory(nbytes: int) -> HostBuffer:
    """Return a pooled buffer of at least ``nbytes``: allocating fresh memory costs more than the
    copy."""
    size = max(1 << 20, 1 << (nbytes - 1).bit_length())
    return host_pool(size).take()
