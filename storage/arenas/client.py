"""A trainer's line to the keeper of its host: requests and their answers, and what the keeper
tells.

For the engine's loop. Every wait has a deadline: a keeper that does not answer is as good as none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...errors import CoordinationError, DeadlineError
from .hosts import KeeperHost
from .line import Line, MessageError, Received, connected
from .messages import (
    Answer,
    Event,
    Hello,
    Refused,
    Request,
    UnderWay,
    Welcome,
    decode,
    encode,
)

__all__ = ["KeeperClient", "Refusal", "go_on"]

_EVENTS = Event.__args__
A = TypeVar("A")


class Refusal(Exception):
    """The keeper has refused a request. ``reason``: one word, for what to do about it."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that waits for its ``answer``. ``goes_on()`` is called where that takes long, and
    comes nearer."""

    answer: asyncio.Future[tuple[Answer, tuple[int, ...]]]
    goes_on: Callable[[], None]


class KeeperClient:
    """A line to a keeper. ``told(event, fds)`` is called for all that the keeper tells, in order;
    the descriptors are the caller's to close. ``lost()`` is called once when the line is gone
    without :meth:`close`."""

    def __init__(
        self,
        line: Line,
        deadline_s: float,
        told: Callable[[Event, Sequence[int]], None],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._line = line
        self._deadline_s = deadline_s
        self._told = told
        self._lost = lost
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._closed = False
        self.host = KeeperHost("", "")
        """Which keeper it is."""
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def open(
        cls,
        path: str,
        hello: Hello,
        deadline_s: float,
        told: Callable[[Event, Sequence[int]], None] = lambda event, fds: None,
        lost: Callable[[], None] = lambda: None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> KeeperClient:
        """A line to the keeper at ``path``, which has welcomed this rank; ``goes_on()`` is called
        where it says that it is about to. Raises OSError where none listens there,
        CoordinationError where it belongs to another user, DeadlineError, and :class:`Refusal`."""
        line = connected(path)
        if line.peer_uid != os.getuid():
            line.close()
            raise CoordinationError(f"what listens at {path} belongs to another user")
        client = cls(line, deadline_s, told, lost)
        try:
            welcome, _ = await client.ask(hello, Welcome, goes_on=goes_on)
            client.host = welcome.host
        except BaseException:
            await client.close()
            raise
        return client

    async def ask(
        self,
        request: Request,
        answer: type[A],
        fds: Sequence[int] = (),
        deadline_s: float | None = None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> tuple[A, tuple[int, ...]]:
        """The answer to ``request``, and the descriptors that came with it, which are the caller's
        to close. ``deadline_s``: for what takes longer than other requests: until the answer, or
        until the keeper says that it goes on, which is when ``goes_on()`` is called. Raises
        :class:`Refusal`; CoordinationError where the line is gone, or the keeper answers something
        else; DeadlineError."""
        deadline_s = deadline_s or self._deadline_s
        if self._closed or self._reading.done():
            raise CoordinationError("the keeper is gone")
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Answer, tuple[int, ...]]] = loop.create_future()
        answered = False
        try:
            async with asyncio.timeout(deadline_s) as wait:
                self._asked[number] = _Asked(future, partial(go_on, wait, deadline_s, goes_on))
                await self._line.send(encode(number, request), fds)
                found, received = await asyncio.shield(future)
                answered = True
        except TimeoutError as error:
            raise DeadlineError(f"the keeper has not answered within {deadline_s:g} s") from error
        except ConnectionError as error:
            raise CoordinationError("the keeper is gone") from error
        finally:
            self._asked.pop(number, None)
            if not answered and future.done() and future.exception() is None:
                _close(future.result()[1])  # it came too late by a moment
        if isinstance(found, answer):
            return found, received
        _close(received)
        if isinstance(found, Refused):
            raise Refusal(found.reason, found.text)
        raise CoordinationError(f"the keeper has answered with a {type(found).__name__}")

    async def _read(self) -> None:
        try:
            while True:
                received = await self._line.receive()
                self._take(received)
        except (ConnectionError, MessageError, CoordinationError, OSError) as error:
            for asked in self._asked.values():
                if not asked.answer.done():
                    asked.answer.set_exception(ConnectionResetError(str(error)))
            self._line.close()
            if not self._closed:
                self._lost()

    def _take(self, received: Received) -> None:
        try:
            number, message = decode(received.data)
        except CoordinationError:
            received.close()
            raise
        if isinstance(message, _EVENTS):
            self._told(message, received.fds)
            return
        asked = self._asked.get(number)
        if asked is None or asked.answer.done():  # it was given up
            received.close()
            return
        if isinstance(message, UnderWay):
            received.close()
            asked.goes_on()
            return
        asked.answer.set_result((message, received.fds))  # type: ignore[arg-type]

    async def close(self) -> None:
        """Close the line. The keeper goes on. Safe to call twice."""
        self._closed = True
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self._line.close()


def go_on(wait: asyncio.Timeout, deadline_s: float, goes_on: Callable[[], None]) -> None:
    """A wait of ``deadline_s`` begins anew, unless it is over; and ``goes_on()`` is called."""
    if not wait.expired():
        wait.reschedule(asyncio.get_running_loop().time() + deadline_s)
        goes_on()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
