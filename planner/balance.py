"""Balances a job whose tensors have different holders: computes each member's share of a group.

Even shares balance each group alone, but not the job: if some ranks hold more bytes that no other
rank has, the others should write more of the shared bytes. So each group in turn is distributed
over its members by water-filling (Cover and Thomas, Elements of Information Theory, section 9.4),
until no share changes any more. This is block coordinate descent on the sum of the squares of all
loads, and the minimum of that sum also has the lowest maximum load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .columns import Ints

Group = tuple[int, ...]
"""Ranks, ascending, that hold the same bytes."""
Loads = npt.NDArray[np.float64]

SHARE_UNIT = 1 << 20
"""Denominator of shares."""
WORTH = 0.01
"""Smallest reduction of the maximum load, as a fraction, that uneven shares must bring."""
ROUNDS_MAX = 200
POURED_MAX = 20_000
"""Limits on the rounds over all groups, and on the groups filled in all rounds together, so that
many groups take no longer than seconds."""


@dataclass(slots=True)
class _Pool:
    """The bytes that one group holds, and the bytes that each member writes."""

    members: Ints
    nbytes: float
    written: Loads


def balance(held: Mapping[Group, int], world: int) -> dict[Group, tuple[int, ...]]:
    """Compute the shares of groups that are not divided evenly.

    For n members, these are n + 1 ascending cuts from 0 to SHARE_UNIT. ``held`` maps each group to
    the number of bytes that its members have in common. Returns {} if even shares are as good,
    within 1%. With up to several thousand groups, the maximum load is as low as the holders allow,
    within 1%; with more, the limits above may end the search earlier.
    """
    load = np.zeros(world)
    for group, nbytes in held.items():
        load[list(group)] += nbytes / len(group)
    alone = np.zeros(world)
    for group, nbytes in held.items():
        if len(group) == 1:
            alone[group[0]] += nbytes
    least = max(load.sum() / max(world, 1), alone.max(initial=0.0))
    if load.max(initial=0.0) <= least * (1 + WORTH):
        return {}
    pools = [
        _Pool(np.array(group), float(nbytes), np.full(len(group), nbytes / len(group)))
        for group, nbytes in sorted(held.items(), key=lambda item: (len(item[0]), item[0]))
        if len(group) > 1 and nbytes
    ]
    even = load.max()
    _pour(pools, load, least)
    if load.max() > even * (1 - WORTH):
        return {}
    return {tuple(pool.members.tolist()): _cuts(pool) for pool in pools}


def _pour(pools: Sequence[_Pool], load: Loads, least: float) -> None:
    """Update shares and ``load`` until the maximum is ``least`` or nothing changes."""
    for _ in range(min(ROUNDS_MAX, 2 + POURED_MAX // max(len(pools), 1))):
        before = load.copy()
        for pool in pools:
            others = load[pool.members] - pool.written
            pool.written = water_fill(others, pool.nbytes)
            load[pool.members] = others + pool.written
        if (
            load.max() <= least * (1 + WORTH / 10)
            or np.abs(load - before).max() <= load.max() * 1e-4
        ):
            return


def water_fill(loads: Loads | Ints, nbytes: float) -> Loads:
    """Return the part of ``nbytes`` that each must get to make the loads as even as possible."""
    # The first entry is the level if the lowest load got all of it, the second if two shared it.
    levels = (np.cumsum(np.sort(loads)) + nbytes) / np.arange(1, len(loads) + 1)
    parts: Loads = np.maximum(levels.min() - loads, 0.0)
    return parts


def _cuts(pool: _Pool) -> tuple[int, ...]:
    ends = np.round(np.cumsum(pool.written) / pool.written.sum() * SHARE_UNIT).astype(np.int64)
    return (0, *ends[:-1].tolist(), SHARE_UNIT)
