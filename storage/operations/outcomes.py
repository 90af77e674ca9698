"""Reports the outcome of each save and load of this process to listeners: metrics, traces, loggers.

An exception from a listener is printed and otherwise ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...core.forks.renewal import new_lock
from .report import LoadReport, SaveReport
from .telemetry import log_safely

__all__ = ["Outcome", "announce", "listen"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a save or a load on this rank.

    ``uri`` is redacted. ``seconds``: from the call to the end. ``report``: set on success;
    ``error``: set on failure. ``step``: None for loads and for checkpoints without a step.
    """

    operation: Literal["save", "load"]
    uri: str
    seconds: float
    step: int | None = None
    report: SaveReport | LoadReport | None = None
    error: BaseException | None = None


Listener = Callable[[Outcome], object]


class _Listeners:
    """The listeners of this process. Changes do not affect an announcement in progress."""

    def __init__(self) -> None:
        self._all: tuple[Listener, ...] = ()
        self._lock = new_lock()

    def add(self, listener: Listener) -> None:
        with self._lock:
            self._all = (*self._all, listener)

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._all = tuple(other for other in self._all if other is not listener)

    def tell(self, outcome: Outcome) -> None:
        for listener in self._all:
            log_safely(listener, outcome)


_listeners = _Listeners()


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` with the :class:`Outcome` of every future save and load of this process.

    Returns a function that unsubscribes. The listener runs on the thread that ends the operation:
    the engine's for a save, the caller's for a load. Others wait for it, so it should return
    quickly. Its exceptions are printed and ignored.
    """

    def told(outcome: Outcome) -> None:
        listener(outcome)

    _listeners.add(told)
    return lambda: _listeners.remove(told)


def announce(outcome: Outcome) -> None:
    """Call every listener."""
    _listeners.tell(outcome)
