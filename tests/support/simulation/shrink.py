"""Shrink a failing schedule to a short one that fails alike: fewer actors, faults, chunks and
delays.

Delta debugging removes whole halves first, then smaller parts, until no part can be removed. It
runs each candidate and keeps those with the same kind of failure. The result is deterministic,
because runs are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from .run import Failure, run
from .schedule import Schedule

__all__ = ["shrunk"]

T = TypeVar("T")


def shrunk(failure: Failure, most_runs: int = 600) -> Failure:
    """Return the shortest schedule found within ``most_runs`` runs that fails likewise."""
    runs = 0
    best = failure

    def fails(schedule: Schedule) -> bool:
        nonlocal runs, best
        if runs >= most_runs:
            return False
        runs += 1
        found = run(schedule)
        if found is None or _kind(found) != _kind(failure):
            return False
        best = replace(found, schedule=schedule)
        return True

    while True:
        before = best.schedule
        _shrink_all(lambda: best.schedule, fails)
        if best.schedule == before or runs >= most_runs:
            return best


def _shrink_all(now: Callable[[], Schedule], fails: Callable[[Schedule], bool]) -> None:
    """Each part of the schedule once."""
    assert now().delays is not None
    _minimised(now().actors, lambda kept: fails(replace(now(), actors=tuple(kept))))
    _minimised(now().faults, lambda kept: fails(replace(now(), faults=tuple(kept))))
    for chunks in (2, 4, 8):
        if chunks < now().chunks and fails(replace(now(), chunks=chunks)):
            break
    for i in range(len(now().actors)):
        for change in ({"begin_s": 0.0}, {"again": False}, {"world": 1}, {"world": 2}):
            actor = replace(now().actors[i], **change)  # type: ignore[arg-type]
            if actor != now().actors[i] and actor.world <= now().actors[i].world:
                fails(replace(now(), actors=(*now().actors[:i], actor, *now().actors[i + 1 :])))
    delays = now().delays or {}
    _minimised(list(delays.items()), lambda kept: fails(replace(now(), delays=dict(kept))))


def _minimised(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> None:
    """Remove parts of ``items``: halves first, then quarters, down to single items."""
    kept = list(items)
    size = len(kept)
    while size and kept:
        start = 0
        while start < len(kept):
            without = kept[:start] + kept[start + size :]
            if fails(without):
                kept = without
            else:
                start += size
        size //= 2


def _kind(failure: Failure) -> str:
    """Return the kind of a failure: its message without names and numbers."""
    return re.sub(r"[0-9a-f]*\d[\w.-]*|'[^']*'|\{.*\}|\[.*\]", "#", failure.why)[:60]
