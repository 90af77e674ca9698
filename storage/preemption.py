"""SIGTERM: the launcher wants this process gone, and gives it a while. Saves are finished, then it goes as it would have.

The handler only takes note. What follows happens where training can be interrupted: at the next step. When the grace period
is over, or a second SIGTERM comes, what handled the signal before handles it, wherever training is.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

__all__ = ["Preemption"]

_log = logging.getLogger(__name__)


class Preemption:
    """Handles SIGTERM from :meth:`install` to :meth:`restore`, or until it is handed over."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._installed = False
        self._before: Any = None
        self._until_s: float | None = None
        self._timer: threading.Timer | None = None

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has come."""
        return self._until_s is not None

    @property
    def pending(self) -> bool:
        """Whether it has come, and is not handed over yet."""
        return self.asked and self._installed

    @property
    def left_s(self) -> float:
        """Seconds of grace that are left."""
        return self._grace_s if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def install(self) -> None:
        """Python allows it in the main thread only; elsewhere this does nothing but say so."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("SIGTERM is not handled: the checkpointer was not made in the main thread")
            return
        self._before = signal.signal(signal.SIGTERM, self._take_note)
        self._installed = True

    def hand_over(self) -> None:
        """Let what was there before handle the signal that has come: by default, the process ends here."""
        if not self._installed:
            return
        before = self._before
        self.restore()
        if callable(before):
            before(signal.SIGTERM, None)
        elif before == signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        """SIGTERM is handled as before. Only in the main thread; elsewhere nothing was installed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            # A handler that was not set from Python is None, and cannot be set again.
            if signal.getsignal(signal.SIGTERM) == self._take_note and self._before is not None:
                signal.signal(signal.SIGTERM, self._before)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        # Says nothing: it may have interrupted whoever was about to.
        if self._until_s is not None:
            self.hand_over()
            return
        self._until_s = time.monotonic() + self._grace_s
        main = threading.main_thread().ident
        assert main is not None
        self._timer = threading.Timer(self._grace_s, signal.pthread_kill, (main, signal.SIGTERM))
        self._timer.daemon = True
        self._timer.start()
