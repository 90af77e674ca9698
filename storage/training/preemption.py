"""SIGTERM handling: finish saves within a grace period, then let the process end as before.

The handler only records the signal; the work happens at the next training step. A process may have
several Checkpointers, each with its own grace period. One signal notifies all of them, in whatever
order they were created and closed. Once each has saved, was closed, or has run out of time, the
previous handler runs. A second SIGTERM runs it at once.

Python calls signal handlers in the main thread, between bytecode instructions. A long call into
compiled code would delay the grace period, so a thread of ours also watches for the signal, see
:class:`_Watcher`. It needs the GIL: nothing happens while compiled code holds that.
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

END_S = 2.0

_log = logging.getLogger(__name__)


class Preemption:
    """One Checkpointer's registration for SIGTERM, from :meth:`install` to :meth:`leave`."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._until_s: float | None = None

    @property
    def asked(self) -> bool:
        """Return whether SIGTERM has arrived."""
        return self._until_s is not None

    @property
    def pending(self) -> bool:
        """Return whether SIGTERM has arrived and was not handed over yet."""
        return self.asked and _process.has(self)

    @property
    def left_s(self) -> float:
        """Seconds of grace left."""
        if self._until_s is None:
            return self.grace_s
        return max(0.0, self._until_s - time.monotonic())

    def install(self) -> None:
        """Register for SIGTERM, if this is the main thread; otherwise log a warning."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "SIGTERM is not handled: the Checkpointer was not created in the main thread"
            )
            return
        _process.add(self)

    def ask(self, came_s: float) -> None:
        """Start the grace period. SIGTERM came at ``came_s`` (``time.monotonic()``)."""
        if self._until_s is None:
            self._until_s = came_s + self.grace_s

    def cut_short(self) -> None:
        """End the grace period now, or as soon as SIGTERM arrives. May be called by any thread."""
        self.grace_s = 0.0
        if self._until_s is not None:
            self._until_s = time.monotonic()
        _process.cut_short()

    def leave(self) -> None:
        """Leave; the last one restores the handler, which gets a SIGTERM that has come."""
        _process.leave(self)


class _Process:
    """The SIGTERM handler and watcher thread shared by all Checkpointers of this process. Members
    are weakly referenced: a Checkpointer that was dropped without being closed does not delay the
    end of the process."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Preemption]] = []
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._watcher: _Watcher | None = None
        self._handled = self._seen = 0
        self._came_s: float | None = None
        self._timer: threading.Timer | None = None
        self._insisted = False
        self._lock = new_rlock()  # reentrant: a handler may interrupt the thread that holds it

    @property
    def is_installed(self) -> bool:
        return self._watcher is not None

    def has(self, member: Preemption) -> bool:
        return member in self._there()

    def add(self, member: Preemption) -> None:
        """Register ``member``, in the main thread; notify it now if SIGTERM has already come."""
        with self._lock:
            # A handler that was set meanwhile runs after ours.
            if signal.getsignal(signal.SIGTERM) != self._handle:
                self._before = signal.signal(signal.SIGTERM, self._handle)
            if self._watcher is None:
                self._watcher = _Watcher(self._see)
            self._members.append(weakref.ref(member))
            if self._came_s is not None:
                member.ask(self._came_s)
                self._set_timer()

    def cut_short(self) -> None:
        """Apply a grace period that has become shorter."""
        with self._lock:
            if self._came_s is not None and self.is_installed:
                self._set_timer()

    def leave(self, member: Preemption) -> None:
        """Unregister ``member``. The last one to leave restores the previous handler, and hands
        over a signal that has come. Outside the main thread, it makes the main thread do so."""
        with self._lock:
            time.sleep(0)  # let Python handle signals now that a thread of ours sent under the lock
            if not self.has(member):
                return
            self._members = [weakref.ref(other) for other in self._there() if other is not member]
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
        """Return whether a Checkpointer still handles SIGTERM or has grace left."""
        if self._came_s is None:
            return bool(self._there())
        return any(member.left_s > 0 for member in self._there())

    def _there(self) -> list[Preemption]:
        return [member for ref in self._members if (member := ref()) is not None]

    def _end(self) -> None:
        """Restore the previous handler, in the main thread; hand over a signal that has come."""
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
        """Call the previous handler for a signal that came late, or through a later handler."""
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
        # getsignal() returns None for a handler set outside Python; it cannot be set again.
        if signal.getsignal(signal.SIGTERM) == self._handle and self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        watcher.undo()
        return watcher

    def forget(self) -> None:
        """Restore the previous handler in a forked child, which has no watcher thread."""
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
        """Count a signal seen by the watcher thread, unless another watcher has replaced it."""
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
            for member in self._there():
                member.ask(self._came_s)
            self._set_timer()

    def _set_timer(self) -> None:
        """Schedule :meth:`_insist` for the end of the longest grace period."""
        if self._timer is not None:
            self._timer.cancel()
        left_s = max((member.left_s for member in self._there()), default=0.0)
        self._timer = threading.Timer(left_s, self._insist)
        self._timer.daemon = True
        self._timer.start()

    def _insist(self) -> None:
        """End the grace period from another thread, even if the main thread is blocked."""
        with self._lock:
            # Once: the watcher also sees the signal sent below.
            if self._insisted or not self.is_installed:
                return
            self._insisted = True
            if self._before == signal.SIG_DFL:  # only the main thread may call signal.signal
                ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), ctypes.c_void_p(0))
                os.kill(os.getpid(), signal.SIGTERM)
            self._handled = max(1, self._handled)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)


class _Watcher:
    """A thread that sees SIGTERM at once, even while the main thread is blocked. Python writes
    signal numbers to a wakeup pipe as they arrive. The watcher forwards them to the previous wakeup
    descriptor, if there was one."""

    def __init__(self, see: Callable[[_Watcher], None]) -> None:
        self._see = see
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._before_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before_file = _file(self._before_fd)
        self._thread = threading.Thread(target=self._watch, name="holdfast-sigterm", daemon=True)
        self._thread.start()

    def undo(self) -> None:
        now_fd = signal.set_wakeup_fd(
            self._before_fd if self._unchanged() else -1, warn_on_full_buffer=False
        )
        if now_fd != self._write_fd:  # set by someone after us: leave it in place
            signal.set_wakeup_fd(now_fd, warn_on_full_buffer=False)
        os.close(self._write_fd)

    def end(self) -> None:
        """Wait for the thread after :meth:`undo`, up to END_S: a frame below may hold its lock."""
        self._thread.join(END_S)

    def forget(self) -> None:
        """Close the pipe in a forked child, after :meth:`undo`."""
        os.close(self._read_fd)

    def _watch(self) -> None:
        try:
            while numbers := os.read(self._read_fd, 64):
                if self._unchanged():
                    # Full, or just closed: Python ignores these too.
                    with contextlib.suppress(OSError):
                        os.write(self._before_fd, numbers)
                for _ in range(numbers.count(signal.SIGTERM)):
                    self._see(self)
        finally:
            os.close(self._read_fd)

    def _unchanged(self) -> bool:
        """Return whether the previous wakeup descriptor is still the same file."""
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
    """Block SIGTERM before a fork, until the child has restored its handler. Otherwise a signal
    sent to the child would be lost, or written to our pipe as if it had come to this process."""
    if _process.is_installed:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    else:
        _forking.mask = None


def _release() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _as_before() -> None:
    """Restore the default SIGTERM behaviour in a forked child."""
    _process.forget()
    _release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_as_before)
