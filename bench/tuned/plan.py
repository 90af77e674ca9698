"""Plans of tuning, checked before anything is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ...core.units import size_text
from ...errors import UsageError
from ..measured.plan import (
    COPIES_HELD,
    Plan,
    check_memory,
    check_room,
    free_nbytes,
    local_folder,
    write_something,
)
from .space import Space, space_of

__all__ = ["TuningPlan", "check_tuning"]

LEAST_NBYTES = 64 << 20
"""Smallest useful state. Below this, saves measure overhead, and large parts have no chance."""
_LEAST_LIMIT_S = 1.0
_COPIES_STORED = 2


@dataclass(frozen=True)
class TuningPlan(Plan):
    """Settings of tuning. ``nbytes`` is the size of the largest state, ``time_limit_s`` the
    approximate total time, and ``pairs_max`` the limit of comparisons with the defaults."""

    time_limit_s: float = 60.0
    pairs_max: int = 20

    @property
    def least_nbytes(self) -> int:
        """Size of the smallest state that is saved and loaded."""
        return min(LEAST_NBYTES, self.nbytes)


def check_tuning(plan: TuningPlan, free: Callable[[str], int] = free_nbytes) -> Space:
    """Return the candidates to try.

    Raises UsageError if there are none, for an invalid size or time, and for too little memory or
    space. Raises the storage's error if it cannot be written. ``free`` returns the free bytes of a
    local folder.
    """
    if plan.nbytes < 1 << 20:
        raise UsageError(
            f"{size_text(plan.nbytes)} is too little to measure", advice="Give 1 MiB or more."
        )
    if plan.time_limit_s < _LEAST_LIMIT_S:
        raise UsageError(
            f"{plan.time_limit_s:g} s is too short for tuning", advice="Give --time-limit 60s."
        )
    space = space_of(plan.parsed)
    check_memory(
        f"a state of {size_text(plan.nbytes)}",
        int(COPIES_HELD * plan.nbytes),
        advice="Give a smaller --size.",
    )
    folder = local_folder(plan.parsed)
    if folder is not None:
        check_room(folder, _COPIES_STORED * plan.nbytes, free(folder))
    asyncio.run(write_something(plan.parsed))
    return space
