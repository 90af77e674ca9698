"""Write tracking: asks the kernel which pages of this process were written to.

Uses userfaultfd in asynchronous write-protect mode together with the ioctl PAGEMAP_SCAN (Linux 6.7
and newer). *Arming* a range marks each of its pages. The first write to a marked page, by whatever
means, clears the mark. A page is *clean* while its mark is set. *Disarming* clears marks. No writer
is stopped or notified; the first write to a marked page costs the writer about a microsecond.

Two kinds of writes are not seen: by a device to memory it had access to before the page was armed
(RDMA, pinned host memory), and by another process to shared memory or a mapped file.
Such memory must not be tracked: see :meth:`WriteTracker.foreign`.

Scope: addresses and pages. Knows nothing of tensors.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import functools
import itertools
import logging
import mmap
import os
import platform
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

from ....core.forks.renewal import in_child, new_lock

Range = tuple[int, int]
"""First address, and the address after the last."""

PAGE_NBYTES = mmap.PAGESIZE

_SYSCALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_FEATURES = 1 << 15 | 1 << 13  # WP_ASYNC, WP_UNPOPULATED
_MODE_WP = 2
_WP_ALLOWED = 1
_WRITTEN = 2
_FILE = 4
_PRESENT = 8
_SWAPPED = 16
_CLEAN = (_WRITTEN | _FILE, _WP_ALLOWED | _WRITTEN | _FILE, _PRESENT | _SWAPPED)
"""Categories of clean pages: inverted, all of, any of."""
_CLEAN_ANONYMOUS = (_WRITTEN, _WP_ALLOWED | _WRITTEN, _PRESENT | _SWAPPED)
"""The same where no file is mapped. The kernel finds these three times as fast."""
_RUNS = 256
"""Runs of pages found by one scan."""
_LOOKS = 3
"""Looks at retained pages that are written to meanwhile, after which none is retained."""


def _ioctl(direction: int, kind: int, number: int, nbytes: int) -> int:
    return direction << 30 | nbytes << 16 | kind << 8 | number


_UFFDIO_API = _ioctl(3, 0xAA, 0x3F, 24)
_UFFDIO_REGISTER = _ioctl(3, 0xAA, 0x00, 32)
_UFFDIO_UNREGISTER = _ioctl(2, 0xAA, 0x01, 16)
_UFFDIO_WRITEPROTECT = _ioctl(3, 0xAA, 0x06, 24)
_PAGEMAP_SCAN = _ioctl(3, ord("f"), 16, 96)

_log = logging.getLogger(__name__)


class WriteTracker:
    """The write tracker of this process. Ranges must consist of whole pages.

    Thread-safe, except that two users must not share a page: see ``claim``.
    """

    def __init__(self, userfaultfd: int, pagemap: int) -> None:
        self._userfaultfd = userfaultfd
        self._pagemap = pagemap
        self._claims: dict[int, Sequence[Range]] = {}
        self._lock = new_lock()
        self._retained: list[Range] = []
        self.epoch: object = None
        """The epoch that :meth:`retain` has named last."""

    @classmethod
    def open(cls) -> WriteTracker:
        """Open a tracker. Raises OSError if the system has none, or refuses it."""
        number = _SYSCALL.get(platform.machine())
        if number is None:
            raise OSError(f"the system call number is unknown on {platform.machine()}")
        libc = ctypes.CDLL(None, use_errno=True)
        userfaultfd = libc.syscall(number, _USER_MODE_ONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if userfaultfd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"userfaultfd: {os.strerror(error)}")
        pagemap = -1
        try:
            pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            _control(userfaultfd, _UFFDIO_API, 0xAA, _FEATURES, 0)
            tracker = cls(userfaultfd, pagemap)
            tracker._try_out()
        except OSError:
            os.close(userfaultfd)
            if pagemap >= 0:
                os.close(pagemap)
            raise
        return tracker

    def _try_out(self) -> None:
        """Raise OSError if a write to an armed page goes unnoticed."""
        page = mmap.mmap(-1, PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page[0] = 1
        start = ctypes.addressof(ctypes.c_char.from_buffer(page))
        stop = start + PAGE_NBYTES
        self.arm(start, stop)
        clean = self.is_clean(start, stop)
        page[0] = 2
        if not clean or self.is_clean(start, stop):
            raise OSError("write tracking does not work here")

    def close(self) -> None:
        """Close the descriptors. All marks vanish."""
        os.close(self._userfaultfd)
        os.close(self._pagemap)

    def claim(self, owner: object, ranges: Sequence[Range]) -> bool:
        """Reserve ``ranges`` for ``owner``; return False if another owner holds one of their pages.

        Arming a page makes it clean, so the other owner would miss a write.
        """
        with self._lock:
            for theirs in self._claims.values():
                together = sorted([*theirs, *ranges])
                if any(right[0] < left[1] for left, right in itertools.pairwise(together)):
                    return False
            self._claims[id(owner)] = ranges
            return True

    def claimed_by_others(self, owner: object) -> list[Range]:
        """Return the ranges reserved for owners other than ``owner``."""
        with self._lock:
            return sorted(
                range_
                for claimant, ranges in self._claims.items()
                if claimant != id(owner)
                for range_ in ranges
            )

    def forgo(self, owner: object) -> None:
        """Release the claim of ``owner``, which must have disarmed all of it."""
        with self._lock:
            self._claims.pop(id(owner), None)

    def arm_all(self, ranges: Iterable[Range]) -> list[Range]:
        """Arm ``ranges``. Returns those that failed: another tracker has them, or they cannot be
        marked.

        One thread does all of it. A second one gains nothing: the cores have to notify each other
        at each step, and cutting ranges for it would cut huge pages, too.

        Retained pages are not armed again: that would hide writes since their epoch began. Those
        written to are retained no longer, and armed like all others. The retained pages are looked
        at last, again if some were dirty. So at one moment, all of them were clean and all others
        armed.
        """
        ranges = list(ranges)
        failed: list[Range] = []
        with self._lock:
            todo = without(ranges, self._retained)
            for look in itertools.count():
                failed += self._not_armed(todo)
                before = self._retained
                self._retained = [part for range_ in before for part in self.clean(*range_)]
                if look == _LOOKS:
                    self._retained = []
                todo = overlaps(without(before, self._retained), ranges)
                if not todo:
                    break
        return [range_ for range_ in ranges if touches(failed, range_)]

    def _not_armed(self, ranges: Iterable[Range]) -> Iterator[Range]:
        """Arm ranges and yield those that cannot be."""
        for start, stop in ranges:
            try:
                self.arm(start, stop)
            except OSError:
                yield start, stop

    def retain(self, epoch: object, ranges: list[Range]) -> list[Range]:
        """Keep ``ranges`` armed, which were just armed, until the next call: :meth:`disarm` leaves
        them alone. Ends the epoch before, and returns its retained pages that were clean when
        memory was last armed. All are sorted and disjoint. Mapped files are not retained.

        Pages that are retained no longer are not disarmed: another user may still need them.
        """
        kept = without(ranges, mapped_files(ranges))
        with self._lock:
            before, self._retained, self.epoch = self._retained, kept, epoch
        return before

    def arm(self, start: int, stop: int) -> None:
        """Mark each page of the range as clean. Raises OSError if the kernel cannot.

        PAGEMAP_SCAN can mark pages faster, but a page that the kernel is migrating loses such a
        mark on arrival, and would count as written to.
        """
        size = stop - start
        # A no-op for a range that is registered already; fails for a range of another tracker.
        _control(self._userfaultfd, _UFFDIO_REGISTER, start, size, _MODE_WP, 0)
        _control(self._userfaultfd, _UFFDIO_WRITEPROTECT, start, size, 1)

    def is_clean(self, start: int, stop: int) -> bool:
        """Return whether every page of the range is still the armed one and was not written to
        since.

        Also False if memory was unmapped, discarded or replaced. Such pages look unwritten, so this
        asks for marks and contents, not for writes.
        """
        return self._scan(start, stop, 1, *_CLEAN) == [(start, stop)]

    def clean(self, start: int, stop: int) -> list[Range]:
        """Return the clean parts of the range, in order; see :meth:`is_clean`. No file may have
        been mapped there when it was armed."""
        found: list[Range] = []
        at = start
        while at < stop:
            some = self._scan(at, stop, _RUNS, *_CLEAN_ANONYMOUS)
            found += some
            at = some[-1][1] if len(some) == _RUNS else stop
        return merged(found)

    def foreign(self, ranges: Sequence[Range]) -> list[Range]:
        """Return the parts of ``ranges`` (sorted, disjoint) that others may write to unnoticed.

        These are file mappings, shared memory and huge pages of hugetlbfs. A private mapping is
        exempt if each of its pages was replaced by this process's own copy.
        """
        return [
            part
            for part in mapped_files(ranges)
            if self._scan(*part, 1, _FILE, _FILE, _PRESENT | _SWAPPED) != [part]
        ]

    def _scan(
        self, start: int, stop: int, count: int, inverted: int, mask: int, any_of: int
    ) -> list[Range]:
        """Return the first runs of pages of these categories, up to ``count``; see PAGEMAP_SCAN for
        the masks."""
        runs = (ctypes.c_uint64 * (3 * count))()
        at = ctypes.addressof(runs)
        asked = (96, 0, start, stop, 0, at, count, 0, inverted, mask, any_of, 0)
        try:
            found = _control(self._pagemap, _PAGEMAP_SCAN, *asked)
        except OSError:
            return []
        return [(runs[3 * i], runs[3 * i + 1]) for i in range(found)]

    def disarm(self, start: int, stop: int) -> None:
        """Clear the marks in the range, wherever it is still mapped and not retained."""
        retained = self._retained
        if not retained:
            self._clear(start, stop)
            return
        for part in without([(start, stop)], overlaps(retained, [(start, stop)])):
            self._clear(*part)

    def _clear(self, start: int, stop: int) -> None:
        size = stop - start
        try:
            _control(self._userfaultfd, _UFFDIO_WRITEPROTECT, start, size, 0)
        except OSError:  # it stops at memory that replaced a registered range
            with contextlib.suppress(OSError):  # all of it is gone
                _control(self._userfaultfd, _UFFDIO_UNREGISTER, start, size)


def _control(descriptor: int, request: int, *words: int) -> int:
    """Call an ioctl whose argument consists of 64-bit ``words``. Raises OSError."""
    argument = bytearray(struct.pack(f"{len(words)}Q", *words))
    result: int = fcntl.ioctl(descriptor, request, argument)
    return result


def merged(ranges: Iterable[Range], gap_nbytes: int = 0) -> list[Range]:
    """Return ``ranges`` sorted, joining ranges that overlap or are within ``gap_nbytes``."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1] + gap_nbytes:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def without(ranges: Iterable[Range], holes: Iterable[Range]) -> list[Range]:
    """Return the parts of merged ``ranges`` that ``holes`` do not cover."""
    cut = merged(holes)
    left = []
    at = 0
    for start, stop in ranges:
        while at < len(cut) and cut[at][1] <= start:
            at += 1
        begin = start
        k = at
        while k < len(cut) and cut[k][0] < stop:
            if begin < cut[k][0]:
                left.append((begin, cut[k][0]))
            begin = max(begin, cut[k][1])
            k += 1
        if begin < stop:
            left.append((begin, stop))
    return left


def overlaps(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return what ``ranges`` have in common with ``others``; all are sorted and disjoint."""
    found = []
    for start, stop in others:
        at = bisect.bisect_right(ranges, start, key=lambda range_: range_[1])
        while at < len(ranges) and ranges[at][0] < stop:
            found.append((max(start, ranges[at][0]), min(stop, ranges[at][1])))
            at += 1
    return found


def touches(ranges: Sequence[Range], range_: Range) -> bool:
    """Return whether ``range_`` overlaps one of ``ranges``, which are sorted and disjoint."""
    at = bisect.bisect_right(ranges, range_[0], key=lambda other: other[1])
    return at < len(ranges) and ranges[at][0] < range_[1]


@functools.cache
def write_tracker() -> WriteTracker | None:
    """Return the tracker of this process. None if the system has none, which is logged once."""
    try:
        return WriteTracker.open()
    except OSError as error:
        _log.info(
            "writes to memory cannot be tracked here, so saves compare tensors in host memory by "
            "digests: %s",
            error,
        )
        return None


def _forget_parent() -> None:
    """Close the tracker in a forked child: its descriptors refer to the parent's memory."""
    if write_tracker.cache_info().currsize:
        tracker = write_tracker()
        if tracker is not None:
            tracker.close()
    write_tracker.cache_clear()


in_child(_forget_parent)


_QUERY = struct.Struct("3Q 64x 16x")
"""A ``procmap_query``: size, flags, address. The answer begins after the address."""
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17
_NEXT_FILE = 0x10 | 0x20
"""COVERING_OR_NEXT_VMA and FILE_BACKED_VMA."""


def mapped_files(ranges: Sequence[Range]) -> list[Range]:
    """Return the parts of ``ranges`` (sorted, disjoint) that are mapped from a file.

    To the kernel, all shared memory is a file, and so are huge pages of hugetlbfs. Asks the kernel
    (Linux 6.11 and newer), or reads its list of mappings.
    """
    with open("/proc/self/maps", "rb", buffering=0) as maps:
        try:
            return _overlaps(ranges, lambda address: _ask(maps.fileno(), address))
        except OSError:  # an older kernel
            return listed_files(ranges, maps.read())


def listed_files(ranges: Sequence[Range], maps: bytes) -> list[Range]:
    """Return the same as :func:`mapped_files`, from the contents of ``/proc/self/maps``."""
    files = []
    for line in maps.splitlines():
        addresses, permissions, _, _, inode, *_ = line.split(None, 5)
        if permissions.endswith(b"s") or inode != b"0":  # shared memory, or a file
            start, stop = addresses.split(b"-")
            files.append((int(start, 16), int(stop, 16)))

    def following(address: int) -> Range | None:
        at = bisect.bisect_right(files, address, key=lambda file: file[1])
        return files[at] if at < len(files) else None

    return _overlaps(ranges, following)


def _overlaps(ranges: Sequence[Range], following: Callable[[int], Range | None]) -> list[Range]:
    """Return the overlaps of ``ranges`` with file mappings.

    ``following`` returns the file mapping that contains an address, or the next one above it.
    """
    found = []
    file: Range | None = (0, 0)
    for start, stop in ranges:
        at = start
        while at < stop:
            if file is not None and file[1] <= at:
                file = following(at)
            if file is None or file[0] >= stop:
                break
            found.append((max(at, file[0]), min(stop, file[1])))
            at = file[1]
    return found


def _ask(maps: int, address: int) -> Range | None:
    asked = bytearray(_QUERY.pack(_QUERY.size, _NEXT_FILE, address))
    try:
        fcntl.ioctl(maps, _PROCMAP_QUERY, asked)
    except FileNotFoundError:
        return None
    start, stop = struct.unpack_from("2Q", asked, 24)
    return start, stop
