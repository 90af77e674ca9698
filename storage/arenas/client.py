"""A trainer's connection to the keeper of its host: requests, answers and events.

Runs on the engine's loop. Every wait has a deadline: a keeper that does not answer counts as dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...core.decoded_json import Json, object_in
from ...errors import CoordinationError, DeadlineError
from . import messages
from .folder import KeeperFolder
from .hosts import KeeperHost
from .sockets import Line, MessageError, Received, connected

_EVENTS = messages.Event.__args__
A = TypeVar("A")


class Refusal(Exception):
    """Raised when the keeper refuses a request. ``reason``: one word, for the caller to act on."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that waits for its ``answer``. ``goes_on()`` is called on progress."""

    answer: asyncio.Future[tuple[messages.Answer, tuple[int, ...]]]
    goes_on: Callable[[], None]


class KeeperClient:
    """A connection to a keeper. ``told(event, fds)`` is called for all events in order, and owns
    the descriptors. ``lost()`` is called once if the connection ends without :meth:`close`."""

    def __init__(
        self,
        line: Line,
        deadline_s: float,
        told: Callable[[messages.Event, Sequence[int]], None],
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
        """Identity of the keeper."""
        self.fixed: tuple[str, ...] = ()
        """Options of the keeper that differ from those requested."""
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def open(
        cls,
        path: str,
        hello: messages.Hello,
        deadline_s: float,
        told: Callable[[messages.Event, Sequence[int]], None] = lambda event, fds: None,
        lost: Callable[[], None] = lambda: None,
        goes_on: Callable[[], None] = lambda: None,
        welcome_s: float | None = None,
    ) -> KeeperClient:
        """Connect to the keeper at ``path`` and introduce this rank. Calls ``goes_on()`` while the
        keeper is still starting. ``welcome_s``: deadline of its first answer. Raises OSError if
        nobody listens, CoordinationError if the keeper belongs to another user, DeadlineError, and
        :class:`Refusal`."""
        client = cls(connected(path), deadline_s, told, lost)
        try:
            welcome, _ = await client.ask(
                hello, messages.Welcome, deadline_s=welcome_s, goes_on=goes_on
            )
            client.host = welcome.host
            client.fixed = welcome.fixed
        except BaseException:
            await client.close()
            raise
        return client

    async def ask(
        self,
        request: messages.Request,
        answer: type[A],
        fds: Sequence[int] = (),
        deadline_s: float | None = None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> tuple[A, tuple[int, ...]]:
        """Send a request, and return the answer with its descriptors, owned by the caller.

        ``deadline_s``: for requests that take longer than usual. The deadline applies until the
        answer or the next sign of progress, which also calls ``goes_on()``. Raises
        :class:`Refusal`; CoordinationError if the connection is lost or the answer is of another
        kind; DeadlineError.
        """
        deadline_s = deadline_s or self._deadline_s
        if self._closed or self._reading.done():
            raise CoordinationError("the keeper is gone")
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[messages.Answer, tuple[int, ...]]] = loop.create_future()
        answered = False
        try:
            async with asyncio.timeout(deadline_s) as wait:
                self._asked[number] = _Asked(future, partial(go_on, wait, deadline_s, goes_on))
                await self._line.send(messages.encode(number, request), fds)
                found, received = await asyncio.shield(future)
                answered = True
        except TimeoutError as error:
            raise DeadlineError(f"the keeper has not answered within {deadline_s:g} s") from error
        except ConnectionError as error:
            raise CoordinationError("the keeper is gone") from error
        finally:
            self._asked.pop(number, None)
            if not answered and future.done() and future.exception() is None:
                _close(future.result()[1])  # a moment too late
        if isinstance(found, answer):
            return found, received
        _close(received)
        if isinstance(found, messages.Refused):
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
            number, message = messages.decode(received.data)
        except CoordinationError:
            received.close()
            raise
        if isinstance(message, _EVENTS):
            self._told(message, received.fds)
            return
        asked = self._asked.get(number)
        if asked is None or asked.answer.done():  # nobody waits any more
            received.close()
            return
        if isinstance(message, messages.Progress):
            received.close()
            asked.goes_on()
            return
        asked.answer.set_result((message, received.fds))  # type: ignore[arg-type]

    async def close(self) -> None:
        """Close the connection; the keeper lives on. Safe to call twice."""
        self._closed = True
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self._line.close()


def go_on(wait: asyncio.Timeout, deadline_s: float, goes_on: Callable[[], None]) -> None:
    """Restart a wait of ``deadline_s``, unless it has expired, and call ``goes_on()``."""
    if not wait.expired():
        wait.reschedule(asyncio.get_running_loop().time() + deadline_s)
        goes_on()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


ANSWER_S = 5.0


def status_of(folder: KeeperFolder) -> dict[str, Json] | None:
    """Return the status of a run's keeper as JSON, or None if no keeper is alive. Raises
    CoordinationError if it does not answer."""
    answer = _answer(folder, messages.StatusAsked())
    if answer is None:
        return None
    if not isinstance(answer, messages.Status):
        raise CoordinationError(f"a keeper has answered with a {type(answer).__name__}")
    try:
        return object_in(json.loads(answer.text), "a status")
    except ValueError as error:
        raise CoordinationError(f"a keeper's status cannot be read: {error}") from error


def stop(folder: KeeperFolder) -> bool:
    """Stop the keeper of a run; return False if none is alive. It finishes its flushes, and
    releases all memory. Raises CoordinationError if it does not answer."""
    answer = _answer(folder, messages.Stop())
    if answer is not None and not isinstance(answer, messages.Done):
        raise CoordinationError(f"a keeper has answered with a {type(answer).__name__}")
    return answer is not None


def _answer(folder: KeeperFolder, request: messages.Message) -> messages.Message | None:
    try:
        return asyncio.run(_asked(folder, request))
    except (FileNotFoundError, ConnectionError):
        return None
    except TimeoutError as error:
        raise CoordinationError(
            f"the keeper at {folder.path} has not answered within {ANSWER_S:g} s"
        ) from error
    except (MessageError, OSError) as error:
        raise CoordinationError(f"the keeper at {folder.path} does not answer: {error}") from error


async def _asked(folder: KeeperFolder, request: messages.Message) -> messages.Message:
    line = connected(folder.socket)
    try:
        async with asyncio.timeout(ANSWER_S):
            await line.send(messages.encode(1, request))
            received = await line.receive()
        received.close()
        return messages.decode(received.data)[1]
    finally:
        line.close()
