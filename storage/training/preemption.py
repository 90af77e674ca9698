"""SIGTERM: the launcher wants this process gone, and gives it a while. Saves are finished, then it goes as it would have.

The signal is only noted. What follows happens where training can be interrupted: at the next step. When the grace period is
over, or a second SIGTERM comes, what handled the signal before handles it, wherever training is.

Python calls handlers in the main thread, between two of its own instructions. So that the grace period begins, and ends,
also while that thread is within a long call of compiled code, a thread of our own watches for the signal, see
:class:`_Watcher`. It needs the interpreter's lock for that: while compiled code holds this, nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Preemption"]

_log = logging.getLogger(__name__)
_installed: list[Preemption] = []
"""In the order in which they were; a forked child undoes it."""


class Preemption:
    """Handles SIGTERM from :meth:`install` to :meth:`restore`, or until it is handed over."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._before: Any = None
        self._watcher: _Watcher | None = None
        self._handled = self._seen = 0
        self._until_s: float | None = None
        self._timer: threading.Timer | None = None
        self._insisted = False
        self._lock = threading.RLock()  # a handler may interrupt who holds it

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has come."""
        return self._until_s is not None

    @property
    def pending(self) -> bool:
        """Whether it has come, and is not handed over yet."""
        return self.asked and self in _installed

    @property
    def left_s(self) -> float:
        """Seconds of grace that are left."""
        return self._grace_s if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def install(self) -> None:
        """Python allows it in the main thread only; elsewhere this does nothing but say so."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("SIGTERM is not handled: the checkpointer was not made in the main thread")
            return
        self._before = signal.signal(signal.SIGTERM, self._handle)
        self._watcher = _Watcher(self._see)
        _installed.append(self)

    def hand_over(self) -> None:
        """Let what was there before handle the signal that has come: by default, the process ends here."""
        before = self._before
        if not self._undone():
            return
        if callable(before):
            before(signal.SIGTERM, None)
        elif before == signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        """SIGTERM is handled as before. Only in the main thread; elsewhere nothing was installed."""
        self._undone()

    def forget(self) -> None:
        """In a forked child, which has no thread that watches: SIGTERM is handled as before."""
        self._lock = threading.RLock()
        self._undo().forget()

    def _undone(self) -> bool:
        """Whether this call has put things back."""
        if threading.current_thread() is not threading.main_thread():
            return False
        with self._lock:
            time.sleep(0)  # what a thread of ours has sent under the lock is handled here, at the latest
            if self not in _installed:
                return False
            watcher = self._undo()
        watcher.end()
        if self._timer is not None:
            self._timer.cancel()
        return True

    def _undo(self) -> _Watcher:
        assert self._watcher is not None
        _installed.remove(self)
        # A handler that was not set from Python is None, and cannot be set again.
        if signal.getsignal(signal.SIGTERM) == self._handle and self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self._watcher.undo()
        return self._watcher

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Says nothing: it may have interrupted whoever was about to.
        self._handled += 1
        self._begin() if self._handled == 1 else self.hand_over()

    def _see(self) -> None:
        """In the watcher's thread: a signal has come, which the handler may have heard of, or not yet."""
        self._seen += 1
        self._begin() if self._seen == 1 else self._insist()

    def _begin(self) -> None:
        with self._lock:
            if self._until_s is not None:
                return
            self._until_s = time.monotonic() + self._grace_s
            self._timer = threading.Timer(self._grace_s, self._insist)
            self._timer.daemon = True
            self._timer.start()

    def _insist(self) -> None:
        """In a thread: no more grace, whatever the main thread is doing. What only that may call, it is woken up for."""
        with self._lock:
            if self._insisted or self not in _installed:  # once: the watcher hears of what is sent here, too
                return
            self._insisted = True
            if self._before == signal.SIG_DFL:  # signal.signal is the main thread's alone
                ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), ctypes.c_void_p(0))
                os.kill(os.getpid(), signal.SIGTERM)
            self._handled = max(1, self._handled)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)


class _Watcher:
    """A thread that hears of SIGTERM when it comes: Python writes the numbers of signals to a pipe as they come, whatever
    the main thread is doing. Whoever had them written elsewhere before gets them passed on."""

    def __init__(self, see: Callable[[], None]) -> None:
        self._see = see
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._before_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before_file = _file(self._before_fd)
        self._thread = threading.Thread(target=self._watch, name="holdfast-sigterm", daemon=True)
        self._thread.start()

    def undo(self) -> None:
        """Signals are written where they were before."""
        now_fd = signal.set_wakeup_fd(self._before_fd if self._unchanged() else -1, warn_on_full_buffer=False)
        if now_fd != self._write_fd:  # somebody came after us, and stays
            signal.set_wakeup_fd(now_fd, warn_on_full_buffer=False)
        os.close(self._write_fd)

    def end(self) -> None:
        """After :meth:`undo`: the thread has ended."""
        self._thread.join()

    def forget(self) -> None:
        """After :meth:`undo`, in a forked child: there is no thread."""
        os.close(self._read_fd)

    def _watch(self) -> None:
        try:
            while numbers := os.read(self._read_fd, 64):
                if self._unchanged():
                    with contextlib.suppress(OSError):  # full, or closed just now: so would Python do
                        os.write(self._before_fd, numbers)
                for _ in range(numbers.count(signal.SIGTERM)):
                    self._see()
        finally:
            os.close(self._read_fd)

    def _unchanged(self) -> bool:
        """Whether the descriptor from before is still that of the same file: its number may have been given to another."""
        return self._before_file is not None and _file(self._before_fd) == self._before_file


def _file(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_forking = threading.local()


def _hold() -> None:
    """Before a fork: until the child handles SIGTERM as it should, one that is meant for it has to wait. Else it would be
    lost in the child, or be written to our pipe, as if it had come to this process."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _installed else None


def _release() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _as_before() -> None:
    """In a forked child: SIGTERM ends it, as whoever started it expects, and the parent hears nothing of it."""
    for preemption in reversed(list(_installed)):
        preemption.forget()
    _release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_as_before)
