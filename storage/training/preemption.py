"""SIGTERM: the launcher wants this process gone, and gives it a while. Saves are finished, then it
goes as it would have.

The signal is only noted. What follows happens where training can be interrupted: at the next step.
There may be several Checkpointers in a process, each with a grace period of its own. One signal
asks all of them, whatever the order in which they were made and are closed. When each has saved,
was closed, or has no more grace, what handled the signal before handles it; so it does at once when
a second SIGTERM comes, wherever training is.

Python calls handlers in the main thread, between two of its own instructions. So that the grace
period begins, and ends, also while that thread is within a long call of compiled code, a thread of
our own watches for the signal, see :class:`_Watcher`. It needs the interpreter's lock for that:
while compiled code holds this, nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

from ...core.forks.renewal import new_rlock

__all__ = ["Preemption"]

END_S = 2.0

_log = logging.getLogger(__name__)


class Preemption:
    """One Checkpointer's share in the handling of SIGTERM, from :meth:`install` to
    :meth:`hand_over` or :meth:`restore`."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._until_s: float | None = None

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has come."""
        return self._until_s is not None

    @property
    def pending(self) -> bool:
        """Whether it has come, and is not handed over yet."""
        return self.asked and _process.has(self)

    @property
    def left_s(self) -> float:
        """Seconds of grace that are left."""
        if self._until_s is None:
            return self.grace_s
        return max(0.0, self._until_s - time.monotonic())

    def install(self) -> None:
        """Python allows it in the main thread only; elsewhere this does nothing but say so."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("SIGTERM is not handled: the checkpointer was not made in the main thread")
            return
        _process.add(self)

    def ask(self, came_s: float) -> None:
        """SIGTERM has come, at that time by ``time.monotonic()``."""
        if self._until_s is None:
            self._until_s = came_s + self.grace_s

    def hand_over(self) -> None:
        """This Checkpointer is done with the signal that has come. Once all are, what was there
        before handles it: by default, the process ends here."""
        _process.leave(self)

    def restore(self) -> None:
        """This Checkpointer handles SIGTERM no more."""
        _process.leave(self)


class _Process:
    """What handles SIGTERM for all Checkpointers of this process: there is one handler, and one
    thread that watches.

    Members are not kept alive: a Checkpointer that was dropped without being closed makes no
    process wait.
    """

    def __init__(self) -> None:
        self._members: list[weakref.ref[Preemption]] = []
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._watcher: _Watcher | None = None
        self._handled = self._seen = 0
        self._came_s: float | None = None
        self._timer: threading.Timer | None = None
        self._insisted = False
        self._lock = new_rlock()  # a handler may interrupt the thread that holds it

    @property
    def is_installed(self) -> bool:
        """Whether SIGTERM is handled here."""
        return self._watcher is not None

    def has(self, member: Preemption) -> bool:
        """Whether ``member`` still has its share."""
        return any(ref() is member for ref in self._members)

    def add(self, member: Preemption) -> None:
        """In the main thread: SIGTERM asks ``member``, too; at once, where it has come already."""
        with self._lock:
            if (
                signal.getsignal(signal.SIGTERM) != self._handle
            ):  # a handler that was set meanwhile is called after ours
                self._before = signal.signal(signal.SIGTERM, self._handle)
            if self._watcher is None:
                self._watcher = _Watcher(self._see)
            self._members.append(weakref.ref(member))
            if self._came_s is not None:
                member.ask(self._came_s)
                self._set_timer()

    def leave(self, member: Preemption) -> None:
        """``member`` has no share any more. The last one to leave puts things back, and hands over
        a signal that has come; where that is not in the main thread, the main thread does so when
        it can."""
        with self._lock:
            time.sleep(
                0
            )  # what a thread of ours has sent under the lock is handled here, at the latest
            if not self.has(member):
                return
            self._members = [ref for ref in self._members if ref() not in (None, member)]
            if self._waits():
                if self._came_s is not None:
                    self._set_timer()
                return
            if threading.current_thread() is not threading.main_thread():
                if self._came_s is not None:
                    self._insist()
                return
        self._end()

    def _waits(self) -> bool:
        """Whether there is a Checkpointer that handles SIGTERM, or, where it has come, has grace
        left for it."""
        there = [member for ref in self._members if (member := ref()) is not None]
        if self._came_s is None:
            return bool(there)
        return any(member.left_s > 0 for member in there)

    def _end(self) -> None:
        """In the main thread: put things back, and hand over a signal that has come."""
        with self._lock:
            if not self.is_installed:
                return
            came = self._came_s is not None
            before = self._before
            watcher = self._undo()
        watcher.end()
        if not came:
            return
        if callable(before):
            before(signal.SIGTERM, None)
        elif before == signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """A signal that came while things were put back, or from a handler that was set after ours,
        and calls it."""
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _undo(self) -> _Watcher:
        assert self._watcher is not None
        watcher = self._watcher
        self._watcher = None
        self._members = []
        self._came_s = None
        self._handled = self._seen = 0
        self._insisted = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A handler that was not set from Python is None, and cannot be set again.
        if signal.getsignal(signal.SIGTERM) == self._handle and self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        watcher.undo()
        return watcher

    def forget(self) -> None:
        """In a forked child, which has no thread that watches: SIGTERM is handled as before."""
        self._timer = None
        if self.is_installed:
            self._undo().forget()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Logs nothing: it may have interrupted a thread that was logging.
        if not self.is_installed:
            self._pass_on(number, frame)
            return
        self._handled += 1
        if self._handled == 1:
            self._begin()
        if self._handled > 1 or not self._waits():
            self._end()

    def _see(self, watcher: _Watcher) -> None:
        """In the thread of ``watcher``: a signal has come, which the handler may have heard of, or
        not yet. A watcher that has ended, but not yet its thread, speaks of signals that have been
        handed over."""
        with self._lock:
            if watcher is not self._watcher:
                return
            self._seen += 1
            is_first = self._seen == 1
        if is_first:
            self._begin()
        else:
            self._insist()

    def _begin(self) -> None:
        with self._lock:
            if self._came_s is not None or not self.is_installed:
                return
            self._came_s = time.monotonic()
            for ref in self._members:
                member = ref()
                if member is not None:
                    member.ask(self._came_s)
            self._set_timer()

    def _set_timer(self) -> None:
        """Insist when the longest grace period is over."""
        if self._timer is not None:
            self._timer.cancel()
        left_s = max(
            (member.left_s for ref in self._members if (member := ref()) is not None), default=0.0
        )
        self._timer = threading.Timer(left_s, self._insist)
        self._timer.daemon = True
        self._timer.start()

    def _insist(self) -> None:
        """In a thread: no more grace, whatever the main thread is doing. What only that may call,
        it is woken up for."""
        with self._lock:
            if (
                self._insisted or not self.is_installed
            ):  # once: the watcher hears of what is sent here, too
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
    """A thread that hears of SIGTERM when it comes: Python writes the numbers of signals to a pipe
    as they come, whatever the main thread is doing. If they were
    written elsewhere before, they are passed on to there."""

    def __init__(self, see: Callable[[_Watcher], None]) -> None:
        self._see = see
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._before_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before_file = _file(self._before_fd)
        self._thread = threading.Thread(target=self._watch, name="holdfast-sigterm", daemon=True)
        self._thread.start()

    def undo(self) -> None:
        """Signals are written where they were before."""
        now_fd = signal.set_wakeup_fd(
            self._before_fd if self._unchanged() else -1, warn_on_full_buffer=False
        )
        if now_fd != self._write_fd:  # somebody came after us, and stays
            signal.set_wakeup_fd(now_fd, warn_on_full_buffer=False)
        os.close(self._write_fd)

    def end(self) -> None:
        """After :meth:`undo`: the thread has ended; or it is about to, and waits for what a frame
        below this one holds."""
        self._thread.join(END_S)

    def forget(self) -> None:
        """After :meth:`undo`, in a forked child: there is no thread."""
        os.close(self._read_fd)

    def _watch(self) -> None:
        try:
            while numbers := os.read(self._read_fd, 64):
                if self._unchanged():
                    with contextlib.suppress(
                        OSError
                    ):  # full, or closed just now: so would Python do
                        os.write(self._before_fd, numbers)
                for _ in range(numbers.count(signal.SIGTERM)):
                    self._see(self)
        finally:
            os.close(self._read_fd)

    def _unchanged(self) -> bool:
        """Whether the descriptor from before is still that of the same file: its number may have
        been given to another."""
        return self._before_file is not None and _file(self._before_fd) == self._before_file


def _file(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_process = _Process()
_forking = threading.local()


def _hold() -> None:
    """Before a fork: block SIGTERM until the child handles it as it should. Until then, one that is
    meant for the child would be lost there, or be written to our pipe as if it had come to this
    process."""
    if _process.is_installed:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    else:
        _forking.mask = None


def _release() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _as_before() -> None:
    """In a forked child: SIGTERM ends it, as the parent expects, and the parent hears
    nothing of it."""
    _process.forget()
    _release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_as_before)
