"""Decides which rank reads bytes that several ranks want, and sends them to the others.

Every rank of a group knows what all of its ranks want, so each computes the same decision without
further messages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .balance import water_fill
from .columns import Ints, cut, union
from .loading import LoadPlan


@dataclass(frozen=True, eq=False)
class WantedRanges:
    """Byte ranges that one rank wants to read, ascending by image and start, disjoint, not
    touching.

    ``image``, ``start``, ``stop``: (n,) each; bytes of the image's file.
    """

    image: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, plan: LoadPlan) -> WantedRanges:
        """Return the reads of ``plan``, joining those that touch."""
        begins = np.ones(len(plan.image), np.bool_)
        begins[1:] = (plan.image[1:] != plan.image[:-1]) | (plan.start[1:] != plan.stop[:-1])
        return cls(
            plan.image[begins],
            plan.start[begins],
            plan.stop[np.append(begins[1:], True)[: len(begins)]],
        )

    def to_bytes(self) -> bytes:
        """Return three columns of little-endian 64-bit integers."""
        return np.stack([self.image, self.start, self.stop]).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> WantedRanges:
        """Return the ranges that :meth:`to_bytes` encoded."""
        return cls(*np.frombuffer(data, "<i8").astype(np.int64).reshape(3, -1))


@dataclass(frozen=True, eq=False)
class Sharing:
    """U units, each read by one member, and W pairs of a unit and a member that wants a part of it.

    Units are cut at multiples of one size. They ascend by image and start, are disjoint, and
    contain every wanted byte:

    ``image``    (U,)
    ``start``    (U,) bytes of the image's file
    ``stop``     (U,)
    ``reader``   (U,) one of the members that want a part of it

    The pairs of unit u are the rows from ``first[u]`` to ``first[u + 1]``, ascending by member:

    ``first``    (U + 1,)
    ``member``   (W,)
    ``low``      (W,) the first byte of the unit that this member wants, in the image's file
    ``high``     (W,) past the last one
    """

    image: Ints
    start: Ints
    stop: Ints
    reader: Ints
    first: Ints
    member: Ints
    low: Ints
    high: Ints

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the units that several members want."""
        return int((self.stop - self.start)[np.diff(self.first) > 1].sum())

    def takers(self, unit: int) -> list[tuple[int, int, int]]:
        """Return ``(member, low, high)`` of each non-reading member that wants a part of
        ``unit``."""
        rows = range(int(self.first[unit]), int(self.first[unit + 1]))
        return [
            (int(self.member[row]), int(self.low[row]), int(self.high[row]))
            for row in rows
            if self.member[row] != self.reader[unit]
        ]

    def hull(self, unit: int, member: int) -> tuple[int, int]:
        """Return the range from the first to the last byte that ``member`` wants of ``unit``.

        It must want a part of it.
        """
        row = int(self.first[unit])
        row += int(np.searchsorted(self.member[row : int(self.first[unit + 1])], member))
        return int(self.low[row]), int(self.high[row])

    def handed_nbytes(self, member: int) -> int:
        """Return the number of bytes that other members send to ``member``."""
        units = np.repeat(np.arange(len(self.reader)), np.diff(self.first))
        rows = (self.member == member) & (self.reader[units] != member)
        return int((self.high - self.low)[rows].sum())


def share(wanted: Sequence[WantedRanges], unit_nbytes: int) -> Sharing:
    """Assign every wanted byte to one reader; ``wanted[m]`` are the ranges of member m.

    Units are cut at multiples of ``unit_nbytes``, as the members' reads are. Readers get as even a
    number of bytes as whole units allow. The union of overlapping ranges is read in one go, so a
    reader may read more than it wants itself.
    """
    last = max((int(ranges.stop.max(initial=0)) for ranges in wanted), default=0)
    room = (last // unit_nbytes + 1) * unit_nbytes  # per image, on the line of all images
    lines = [(w.image * room + w.start, w.image * room + w.stop) for w in wanted]
    starts, stops = _concatenated(lines, 2)
    start, stop = cut(*union(starts, stops, -1), unit_nbytes)
    pairs = [_hulls(*line, start, unit_nbytes) for line in lines]
    unit, low, high = _concatenated(pairs, 3)
    member = np.repeat(np.arange(len(pairs), dtype=np.int64), [len(p[0]) for p in pairs])
    order = np.lexsort((member, unit))
    unit = unit[order]
    member = member[order]
    first = np.searchsorted(unit, np.arange(len(start) + 1)).astype(np.int64, copy=False)
    image = start // room
    base = image * room
    return Sharing(
        image, start - base, stop - base, _readers(first, member, stop - start, len(wanted)),
        first, member, low[order] - base[unit], high[order] - base[unit],
    )  # fmt: skip


def _concatenated(parts: Sequence[tuple[Ints, ...]], columns: int) -> list[Ints]:
    none = np.empty(0, np.int64)
    return [np.concatenate([none, *(part[column] for part in parts)]) for column in range(columns)]


def regrouped(plan: LoadPlan, sharing: Sharing) -> tuple[LoadPlan, Ints]:
    """Return ``plan`` with whole units as its reads, and the indices of these units.

    The ranges that ``plan`` wants must be among those passed to :func:`share`.
    """
    room = int(max(sharing.stop.max(initial=0), plan.stop.max(initial=0))) + 1
    units = sharing.image * room + sharing.start
    of = np.searchsorted(units, plan.image * room + plan.start, side="right") - 1
    mine, at = np.unique(of, return_index=True)
    first = plan.first[np.append(at, len(plan.image))]
    wide = dataclasses.replace(
        plan,
        image=sharing.image[mine],
        start=sharing.start[mine],
        stop=sharing.stop[mine],
        first=first,
    )
    return wide, mine


def _hulls(start: Ints, stop: Ints, units: Ints, unit_nbytes: int) -> tuple[Ints, Ints, Ints]:
    """Return the units that one member wants parts of, with the hull of its bytes in each."""
    start, stop = cut(start, stop, unit_nbytes)
    unit, at = np.unique(np.searchsorted(units, start, side="right") - 1, return_index=True)
    if len(at):
        stop = stop[np.append(at[1:], len(stop)) - 1]
    return unit.astype(np.int64), start[at], stop


def _readers(first: Ints, member: Ints, nbytes: Ints, members: int) -> Ints:
    """Return the reader of each unit.

    Each member reads one run of the units that a given set of members wants: storage is fastest
    when a reader continues where it stopped. Small sets come first, so that large ones can even out
    the load.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    wanting = member.tolist()
    edges = first.tolist()
    for unit, (low, high) in enumerate(itertools.pairwise(edges)):
        groups.setdefault(tuple(wanting[low:high]), []).append(unit)
    reader = np.empty(len(nbytes), np.int64)
    loads = np.zeros(members, np.int64)
    for group, units in sorted(groups.items(), key=lambda item: len(item[0])):
        among = np.array(group)
        sizes = nbytes[units]
        ends = np.cumsum(water_fill(loads[among], float(sizes.sum())))
        chosen = among[np.searchsorted(ends[:-1], np.cumsum(sizes) - sizes / 2, side="right")]
        reader[units] = chosen
        np.add.at(loads, chosen, sizes)
    return reader
