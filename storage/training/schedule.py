"""Schedules: when a save is due, by steps or by time, at the same step on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from ...core.units import parse_duration
from ...errors import UsageError
from ...planner.periods import Steps
from .decisions import Decision, Decisions

LOOK_S = 5.0
"""The longest interval between two questions to the leader."""


class _Time:
    """Due by the leader's clock, otherwise like :class:`Steps`. The leader also announces the step
    at which to ask again: after a fraction of the remaining time, estimated from the pace so far.
    Most steps need no question."""

    def __init__(self, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._clock = clock
        self._saved_s = clock()
        self._asked: tuple[int, float] | None = None  # (step, time) of the last question
        self._next: int | None = None

    def begin_at(self, step: int | None) -> None:
        self._asked = None
        self._next = None

    def due(self, step: int, decisions: Decisions) -> bool:
        if self._next is not None and step < self._next:
            return False
        saved_s = self._saved_s
        asked = self._asked
        try:
            decision = decisions.ask("due", step, lambda: self._look(step))
        except BaseException:
            # Nothing was saved: ask again at the next step.
            self._saved_s = saved_s
            self._asked = asked
            raise
        if decision is None:
            return False
        self._next = decision.again_at
        return bool(decision.value)

    def _look(self, step: int) -> Decision:
        """On the leader, decide whether a save is due, and at which step to ask again."""
        now_s = self._clock()
        due = now_s - self._saved_s >= self._every_s
        if due:
            self._saved_s = now_s
        decision = Decision(step, int(due), step + self._steps_ahead(step, now_s))
        self._asked = (step, now_s)
        return decision

    def _steps_ahead(self, step: int, now_s: float) -> int:
        if self._asked is None:
            return 1
        asked_step, asked_s = self._asked
        steps = step - asked_step
        if steps <= 0:
            return 1
        step_s = max(1e-6, (now_s - asked_s) / steps)
        left_s = self._saved_s + self._every_s - now_s
        wait_s = min(LOOK_S, max(left_s / 2, self._every_s / 100))
        return min(max(1, int(wait_s / step_s)), 2 * steps)


def schedule_of(
    every: int | str | None, clock: Callable[[], float] = time.monotonic
) -> Steps | _Time:
    """Return the schedule for ``every``: ``500`` steps, a time such as ``"10min"``, or None for
    never. ``clock`` returns the time in seconds. Raises UsageError."""
    if every is None or (type(every) is int and every > 0):
        return Steps(every)
    if isinstance(every, str):
        with suppress(ValueError):
            every_s = parse_duration(every, needs_unit=True)
            if every_s > 0:
                return _Time(every_s, clock)
    raise UsageError(
        f"every is {every!r}",
        advice='Give a number of steps, such as 500, or a time, such as "10min", "90s" or "2h".',
    )
