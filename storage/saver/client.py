"""The trainer's end of its saver: starts it, hands images to it, and notices when it dies.

Runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from ...core.aio import wait_out
from ...core.forks.renewal import in_child
from ...core.pool import is_exiting
from ...errors import CoordinationError
from ..arenas.memory import Memory
from ..arenas.sockets import Line, MessageError
from ..runtime.engine import CLEAN_UP_S, offload
from .messages import (
    BEAT_S,
    Cancel,
    Counted,
    Failed,
    Forget,
    Message,
    Moved,
    Write,
    Wrote,
    decode,
    encode,
)

SWITCH = "HOLDFAST_SAVER"
"""Environment variable; "off": write in this process, by threads."""
LOSSES_MAX = 3
"""Number of savers in a row that may die without having written anything."""
SILENT_S = 60.0
"""Time without a sign of life after which a saver is killed: it is stopped, or hangs."""
END_S = 2.0
"""Longest time that the exiting interpreter waits for an idle saver."""

_log = logging.getLogger(__name__)


class SaverLost(Exception):
    """The saver has died, and nothing of the image is visible. Another one may write it."""


@dataclass
class _Pending:
    """A request that is not answered. ``moved``: called for its progress."""

    moved: Callable[[Moved], None]
    answer: asyncio.Future[Wrote | Failed] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Saver:
    """A saver of this process."""

    def __init__(self, process: subprocess.Popen[bytes], line: Line) -> None:
        self._process = process
        self._line = line
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._reading = asyncio.ensure_future(self._read())
        self.has_written = False
        self._heard = 0
        """Number of messages received."""

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True until its death is noticed."""
        return not self._reading.done()

    @property
    def is_idle(self) -> bool:
        """True while no image is being written."""
        return not self._pending

    @contextlib.asynccontextmanager
    async def writing(
        self, write: Write, memory: Memory, moved: Callable[[Moved], None] = lambda moved: None
    ) -> AsyncIterator[Wrote | Failed]:
        """Have an image written, and yield the answer. If this process dies during the body, the
        saver commits the save. ``memory`` must not change before the end. Raises SaverLost."""
        number = next(self._numbers)
        pending = self._pending[number] = _Pending(moved)
        watching = asyncio.ensure_future(self._watch())
        try:
            try:
                await self._line.send(encode(number, write), [memory.fd])
            except OSError as error:
                raise await self._lost() from error
            yield await self._answer(number, pending)
        finally:
            watching.cancel()
            self._pending.pop(number, None)
            with contextlib.suppress(OSError):
                await self._line.send(encode(number, Forget()))

    async def _watch(self) -> None:
        """Kill a silent saver. Time while this process is stopped does not count."""
        silent_s = 0.0
        while silent_s < SILENT_S:
            heard = self._heard
            await asyncio.sleep(BEAT_S)
            silent_s = silent_s + BEAT_S if heard == self._heard else 0.0
        _log.warning("the saver, process %d, has been silent for %g s", self.pid, silent_s)
        self.kill()

    async def _answer(self, number: int, pending: _Pending) -> Wrote | Failed:
        cancelled = await wait_out(
            [pending.answer], on_cancel=lambda: self._cancel(number, pending)
        )
        if cancelled is not None:
            raise cancelled
        answer = pending.answer.result()
        if isinstance(answer, Wrote):
            self.has_written = True
        return answer

    def _cancel(self, number: int, pending: _Pending) -> None:
        """Have a write end. A saver that does not answer in time is killed."""

        async def cancel() -> None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLEAN_UP_S):
                    await self._line.send(encode(number, Cancel()))
                    await asyncio.wait([pending.answer])
                    return
            self.kill()

        self._cancelling = asyncio.ensure_future(cancel())

    async def _read(self) -> None:
        try:
            while True:
                received = await self._line.receive()
                self._heard += 1
                number, message = decode(received.data)
                self._handle(number, message)
        except (ConnectionError, MessageError, CoordinationError):
            self.kill()
        finally:
            lost = await self._lost()
            for pending in self._pending.values():
                if not pending.answer.done():
                    pending.answer.set_exception(lost)
            self._line.close()

    def _handle(self, number: int, message: Message) -> None:
        if isinstance(message, Counted):
            message.add()
        pending = self._pending.get(number)
        if pending is None:
            return
        if isinstance(message, Moved):
            pending.moved(message)
        elif isinstance(message, Wrote | Failed) and not pending.answer.done():
            pending.answer.set_result(message)

    async def _lost(self) -> SaverLost:
        code: object = "unknown"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = await offload(self._process.wait, END_S)
        return SaverLost(f"the saver, process {self.pid}, has ended with status {code}")

    def kill(self) -> None:
        """End its process at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def end(self) -> None:
        """Let its process end, which it does at once if nothing is under way. Blocks briefly."""
        self._line.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)


@dataclass
class _State:
    """The saver of this process. ``losses``: see :data:`LOSSES_MAX`."""

    saver: Saver | None = None
    losses: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


_state = _State()
_of_parents: list[_State] = []


def is_wanted() -> bool:
    """Return whether this process may use a saver."""
    if is_exiting() or not sys.executable or os.environ.get(SWITCH) == "off":
        return False
    return _state.losses < LOSSES_MAX


async def running() -> Saver | None:
    """Return the saver of this process; start one if it has none. None if it may not, or cannot,
    have one; that is logged."""
    async with _state.turn:
        saver = _state.saver
        if saver is not None and saver.is_alive:
            return saver
        if saver is not None:
            _state.saver = None
            _state.losses = 0 if saver.has_written else _state.losses + 1
        if not is_wanted():
            return None
        try:
            _state.saver = Saver(*await offload(_started))
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            _state.losses = LOSSES_MAX
            _log.warning("saves are written by threads, since no process can be started: %s", error)
        return _state.saver


def _started() -> tuple[subprocess.Popen[bytes], Line]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            trainer = os.pidfd_open(os.getpid())
            try:
                process = subprocess.Popen(
                    [*_PROGRAM, str(theirs.fileno()), str(trainer)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), trainer),
                    start_new_session=True,
                    # Drivers of third parties are found like here. Nothing is imported from the
                    # working folder (-P).
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            finally:
                os.close(trainer)
        except BaseException:
            ours.close()
            raise
    return process, Line(ours)


_PROGRAM = (sys.executable, "-P", "-m", "holdfast.storage.saver.process")


def _end() -> None:
    if _state.saver is not None and _state.saver.is_idle:
        _state.saver.end()


def _forget_parents() -> None:
    global _state  # noqa: PLW0603
    _of_parents.append(_state)  # its process object must not be finalized here
    _state = _State()


atexit.register(_end)
in_child(_forget_parents)
