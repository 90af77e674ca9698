"""Even load over a whole job, in which tensors have different holders: how much of what a group
holds each of it writes.

Divided evenly among its holders, each group is balanced by itself. Where some ranks hold more that
nobody else has, the job is not: then what they share with others is better written by the others.
Here each group in turn is poured over its members like water over steps, until nothing moves. That
is descent, group by group, on the sum of the squares of all loads, whose minimum has the least
highest load, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .columns import Ints

__all__ = ["SHARE_UNIT", "Group", "balance"]

Group = tuple[int, ...]
"""Ranks, ascending, that hold the same bytes."""
Loads = npt.NDArray[np.float64]

SHARE_UNIT = 1 << 20
"""Shares are told in parts of this."""
WORTH = 0.01
"""Even shares stay as they are where the highest load could not be lower by more than this part of
it."""
ROUNDS_MAX = 200
POURED_MAX = 20_000
"""Rounds over all groups; and, so that many groups take no longer than seconds, groups poured, all
together."""


@dataclass(slots=True)
class _Pool:
    """What one group holds, and what each member writes of it."""

    members: Ints
    nbytes: float
    written: Loads


def balance(held: Mapping[Group, int], world: int) -> dict[Group, tuple[int, ...]]:
    """Shares of the groups that are not to be divided evenly: of n members, n + 1 ascending cuts
    from 0 to SHARE_UNIT.

    ``held`` tells the bytes that each group holds together. {} where even shares are as good,
    within 1%. The highest load is then as low as the holders allow, within 1%, up to several
    thousand groups; beyond that it comes as close as time allows.
    """
    load = np.zeros(world)
    for group, nbytes in held.items():
        load[list(group)] += nbytes / len(group)
    alone = np.zeros(world)
    for group, nbytes in held.items():
        if len(group) == 1:
            alone[group[0]] += nbytes
    least = max(load.mean(), alone.max(initial=0.0)) if world else 0.0
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
    """Change what members write, and ``load`` with it, until the highest load is ``least``, or
    nothing moves any more."""
    for _ in range(min(ROUNDS_MAX, 2 + POURED_MAX // max(len(pools), 1))):
        before = load.copy()
        for pool in pools:
            others = load[pool.members] - pool.written
            pool.written = _poured(others, pool.nbytes)
            load[pool.members] = others + pool.written
        if (
            load.max() <= least * (1 + WORTH / 10)
            or np.abs(load - before).max() <= load.max() * 1e-4
        ):
            return


def _poured(others: Loads, nbytes: float) -> Loads:
    """What each writes where the least loaded are filled up to one level: (n,) that sum up to
    ``nbytes``."""
    steps = np.sort(others)
    levels = (np.cumsum(steps) + nbytes) / np.arange(1, len(steps) + 1)
    filled = int(np.flatnonzero(steps < levels)[-1])  # steps below their level are the first ones
    written: Loads = np.maximum(levels[filled] - others, 0.0)
    return written


def _cuts(pool: _Pool) -> tuple[int, ...]:
    ends = np.round(np.cumsum(pool.written) / pool.written.sum() * SHARE_UNIT).astype(np.int64)
    return (0, *ends[:-1].tolist(), SHARE_UNIT)
