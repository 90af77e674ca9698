"""Who reads what for whom: of ranks that want the same bytes, one reads them, and hands them to the
others.

All ranks of a circle know each other's wishes, and work this out alike, without a word.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .columns import Ints, cut, union
from .loading import LoadPlan

__all__ = ["Sharing", "Wish", "regrouped", "share"]


@dataclass(frozen=True, eq=False)
class Wish:
    """Ranges of bytes that one rank is to read: ascending by image and start, disjoint, not
    touching.

    ``image``, ``start``, ``stop``: (n,) each; bytes of the image's file.
    """

    image: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, plan: LoadPlan) -> Wish:
        """The reads of ``plan``, those that touch made one."""
        begins = np.ones(len(plan.image), np.bool_)
        begins[1:] = (plan.image[1:] != plan.image[:-1]) | (plan.start[1:] != plan.stop[:-1])
        return cls(
            plan.image[begins],
            plan.start[begins],
            plan.stop[np.append(begins[1:], True)[: len(begins)]],
        )

    def to_bytes(self) -> bytes:
        """Three columns of little-endian 64-bit integers."""
        return np.stack([self.image, self.start, self.stop]).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Wish:
        """What :meth:`to_bytes` made."""
        return cls(*np.frombuffer(data, "<i8").astype(np.int64).reshape(3, -1))


@dataclass(frozen=True, eq=False)
class Sharing:
    """U units, all cut at the same multiples of bytes, each read by one member; and the W pairs of
    a unit and a member that wants of it.

    A unit, ascending by image and start, disjoint; all that is wanted lies in one:

    ``image``    (U,)
    ``start``    (U,) bytes of the image's file
    ``stop``     (U,)
    ``reader``   (U,) one of the members that want of it

    A pair; those of unit u are the rows from ``first[u]`` to ``first[u + 1]``, ascending by member:

    ``first``    (U + 1,)
    ``member``   (W,)
    ``low``      (W,) first, and past the last, byte that this member wants of the unit, as above
    ``high``     (W,)
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
        """``(member, low, high)`` of those that want of ``unit`` what another reads."""
        rows = range(int(self.first[unit]), int(self.first[unit + 1]))
        told = [(int(self.member[row]), int(self.low[row]), int(self.high[row])) for row in rows]
        return [taker for taker in told if taker[0] != self.reader[unit]]

    def hull(self, unit: int, member: int) -> tuple[int, int]:
        """First, and past the last, byte that ``member``, who wants something of it, wants of
        ``unit``."""
        row = int(self.first[unit])
        row += int(np.searchsorted(self.member[row : int(self.first[unit + 1])], member))
        return int(self.low[row]), int(self.high[row])

    def handed_nbytes(self, member: int) -> int:
        """What ``member`` is handed by others, in bytes."""
        units = np.repeat(np.arange(len(self.reader)), np.diff(self.first))
        rows = (self.member == member) & (self.reader[units] != member)
        return int((self.high - self.low)[rows].sum())


def share(wishes: Sequence[Wish], unit_nbytes: int) -> Sharing:
    """Give every byte that is wished for one reader; wish m is that of member m. Units are cut at
    multiples of ``unit_nbytes``, as reads of members are; bytes per reader are as even as units
    are.

    What is wanted by overlapping wishes is read in one go, so a reader may read more than it wants
    itself.
    """
    last = max((int(wish.stop.max(initial=0)) for wish in wishes), default=0)
    room = (last // unit_nbytes + 1) * unit_nbytes  # of one image, on the line of all images
    lines = [(w.image * room + w.start, w.image * room + w.stop) for w in wishes]
    none = np.empty(0, np.int64)
    starts, stops = (
        (np.concatenate([none, *side]) for side in zip(*lines, strict=True))
        if lines
        else (none, none)
    )
    start, stop = cut(*union(starts, stops, -1), unit_nbytes)
    pairs = [_hulls(*line, start, unit_nbytes) for line in lines]
    unit, low, high = (
        (np.concatenate([none, *column]) for column in zip(*pairs, strict=True))
        if pairs
        else (none,) * 3
    )
    member = np.repeat(np.arange(len(pairs), dtype=np.int64), [len(p[0]) for p in pairs])
    order = np.lexsort((member, unit))
    unit = unit[order]
    member = member[order]
    first = np.searchsorted(unit, np.arange(len(start) + 1)).astype(np.int64, copy=False)
    image = start // room
    base = image * room
    return Sharing(
        image, start - base, stop - base, _readers(first, member, stop - start, len(wishes)),
        first, member, low[order] - base[unit], high[order] - base[unit],
    )  # fmt: skip


def regrouped(plan: LoadPlan, sharing: Sharing) -> tuple[LoadPlan, Ints]:
    """``plan`` with the units that it takes part in for its reads, and which ones these are.
    ``sharing`` has its wish."""
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
    """One member's units, ascending, and the first byte, and past the last one, that it wants of
    each."""
    start, stop = cut(start, stop, unit_nbytes)
    unit, at = np.unique(np.searchsorted(units, start, side="right") - 1, return_index=True)
    return (
        unit.astype(np.int64),
        start[at],
        stop[np.append(at[1:], len(stop)) - 1] if len(at) else stop,
    )


def _readers(first: Ints, member: Ints, nbytes: Ints, members: int) -> Ints:
    """Per unit, who reads it. Of what the same members want, each reads one run: storage is fastest
    where a reader goes on where it was. Small groups of members come first, and large ones make up
    for what is uneven then."""
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
        ends = np.cumsum(_shares(loads[among], int(sizes.sum())))
        chosen = among[np.searchsorted(ends[:-1], np.cumsum(sizes) - sizes / 2, side="right")]
        reader[units] = chosen
        np.add.at(loads, chosen, sizes)
    return reader


def _shares(loads: Ints, nbytes: int) -> npt.NDArray[np.floating]:
    """What each has to get of ``nbytes`` so that loads are as even as can be."""
    ascending = np.sort(loads)
    levels = (np.cumsum(ascending) + nbytes) / np.arange(
        1, len(loads) + 1
    )  # if the first 1, 2, ... got it all
    shares: npt.NDArray[np.floating] = np.maximum(levels.min() - loads, 0)
    return shares
