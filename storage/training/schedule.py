"""When a save is due: every so many steps, or every so much time; on all ranks at the same step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from ...core.units import parse_duration
from ...errors import UsageError
from .decisions import Agreement, Word

__all__ = ["Cadence", "cadence_of"]

LOOK_S = 5.0
"""How often, at most, ranks ask whether it is time."""


class Cadence(ABC):
    """Asked once per step, in the order of steps."""

    @abstractmethod
    def due(self, step: int, agreement: Agreement) -> bool:
        """Whether a save is due at ``step``: the same on all ranks. May raise what ``agreement``
        raises."""

    def begin_at(self, step: int) -> None:  # noqa: B027 - time and never do not care
        """``step`` is what the checkpoint holds that training goes on from."""


class _Never(Cadence):
    def due(self, step: int, agreement: Agreement) -> bool:
        return False


class _Steps(Cadence):
    """Whenever a multiple of ``every`` is reached, or passed: steps may be counted in larger
    strides."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._last: int | None = None

    def due(self, step: int, agreement: Agreement) -> bool:
        last, self._last = self._last, step
        if last is None:
            return step % self._every == 0
        return step // self._every > last // self._every

    def begin_at(self, step: int) -> None:
        self._last = step


class _Time(Cadence):
    """By the leader's clock. The leader says at which step to ask again: after a small part of the
    time that is left, by the pace of the steps so far. So most steps ask nobody anything."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._saved_s = clock()
        self._asked: tuple[int, float] | None = None  # at which step, when
        self._next: int | None = None

    def begin_at(self, step: int) -> None:
        self._asked = self._next = None

    def due(self, step: int, agreement: Agreement) -> bool:
        if self._next is not None and step < self._next:
            return False
        before = (self._saved_s, self._asked)
        try:
            word = agreement.ask("due", step, lambda: self._look(step))
        except BaseException:
            self._saved_s, self._asked = (
                before  # it did not come to a save: the next step asks anew
            )
            raise
        if word is None:
            return False
        self._next = word.again_at
        return bool(word.decision)

    def _look(self, step: int) -> Word:
        """On the leader: whether a save is due, and at which step it is asked again."""
        now_s = self._clock()
        due = now_s - self._saved_s >= self._every_s
        if due:
            self._saved_s = now_s
        ahead = 1
        if self._asked is not None and step > self._asked[0]:
            step_s = max(1e-6, (now_s - self._asked[1]) / (step - self._asked[0]))
            left_s = self._saved_s + self._every_s - now_s
            wait_s = min(LOOK_S, max(left_s / 2, self._every_s / 100))
            ahead = min(max(1, int(wait_s / step_s)), 2 * (step - self._asked[0]))
        self._asked = (step, now_s)
        return Word(step, int(due), step + ahead)


def cadence_of(every: int | str | None) -> Cadence:
    """``500``: steps. ``"10min"``, ``"90s"``, ``"1.5h"``: time. None: never by itself. Raises
    UsageError."""
    if every is None:
        return _Never()
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return _Steps(every)
    if isinstance(every, str):
        with suppress(ValueError):
            every_s = parse_duration(every, needs_unit=True)
            if every_s > 0:
                return _Time(every_s)
    raise UsageError(
        f"every is {every!r}",
        advice='Give a number of steps, such as 500, or a time, such as "10min", "90s" or "2h".',
    )
