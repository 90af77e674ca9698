"""What became of each save and load of this process, for whoever counts: metrics, traces, loggers.

Scope: handing it on. A listener that raises harms nobody: the error is printed.
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
    """How a save or a load of this rank has ended.

    ``uri`` as it is printed, without secrets. ``seconds``: from the call to its end. ``report``:
    its figures, if it succeeded; ``error``: what it failed with, otherwise. ``step``: None where a
    checkpoint has none, and of loads."""

    operation: Literal["save", "load"]
    uri: str
    seconds: float
    step: int | None = None
    report: SaveReport | LoadReport | None = None
    error: BaseException | None = None


Listener = Callable[[Outcome], object]


class _Listeners:
    """Those of this process. What is being told goes on with the listeners that there were."""

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
    """Call ``listener`` with the :class:`Outcome` of every save and load that ends from now on in
    this process; return what ends that.

    It is called on the thread that ends the operation: the engine's for a save, the caller's for a
    load. Others wait for it, so it should do little. What it raises is printed, and changes
    nothing.
    """

    def told(outcome: Outcome) -> None:
        listener(outcome)

    _listeners.add(told)
    return lambda: _listeners.remove(told)


def announce(outcome: Outcome) -> None:
    """Tell every listener."""
    _listeners.tell(outcome)
