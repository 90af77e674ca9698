"""Connections of the HTTP server: accepts them, and limits their number and their idle time.

A connection is a *stranger* until it sends a request with the token. Strangers have a short
deadline and a limit of their own, so they cannot keep other keepers and trainers out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from typing import cast

from aiohttp import web

from .options import ServeOptions, tls_of

CONNECTIONS_PER_KEEPER = 4
_ACCEPT_PAUSE_S = 0.1
_WARN_EVERY_S = 60.0
_LATE = "clients closed because they sent no token in time"
_DISPLACED = "clients without the token closed to make room"
_TOO_MANY = "clients refused because of too many connections"
_NOT_ACCEPTED = "failures to accept a connection"

_log = logging.getLogger(__name__)


class Refusals:
    """Logs each kind of refusal at most once a minute, with the number since the last line.
    Strangers cause refusals at will, so a line for each could fill a disk."""

    def __init__(self) -> None:
        self._unlogged = Counter[str]()
        self._logged_s: dict[str, float] = {}

    def add(self, kind: str, detail: object) -> None:
        """Count a refusal. ``kind``: a constant in the plural; ``detail``: usually the client's
        address."""
        self._unlogged[kind] += 1
        now_s = time.monotonic()
        if now_s - self._logged_s.get(kind, -math.inf) >= _WARN_EVERY_S:
            self._logged_s[kind] = now_s
            _log.warning("%d %s; the last: %s", self._unlogged.pop(kind), kind, detail)


class Connections:
    """Open connections of a server; ``len()`` counts them.

    ``keepers()`` returns the number of keepers of the job, which get places beyond the limits.
    ``closed_strangers`` counts those closed at their deadline or to make room.
    """

    def __init__(self, options: ServeOptions, keepers: Callable[[], int]) -> None:
        """Raise UsageError for unusable options of TLS."""
        self.closed_strangers = 0
        self.refusals = Refusals()
        self._options = options
        self._tls = tls_of(options)
        self._keepers = keepers
        self._by_handler: dict[object, Connection] = {}  # oldest first
        self._listening: socket.socket | None = None

    def __len__(self) -> int:
        return len(self._by_handler)

    def get(self, handler: object) -> Connection | None:
        """Return the connection of ``handler``, or None if it is closed."""
        return self._by_handler.get(handler)

    def accept_from(
        self, listening: socket.socket, make_handler: Callable[[], web.RequestHandler]
    ) -> None:
        """Accept connections until :meth:`stop_accepting`. A task that waited for them might be
        cancelled with an accepted one. ``make_handler()`` returns aiohttp's handler for each."""
        self._listening = listening
        self._make_handler = make_handler
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def stop_accepting(self) -> None:
        """Accept no more connections."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening = None

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client has gone
        except OSError as error:  # too many open files, for example
            self.refusals.add(_NOT_ACCEPTED, error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
            return
        sock.setblocking(False)
        self._admit(sock, address[0])

    def _accept_again(self) -> None:
        if self._listening is not None:
            self.accept_from(self._listening, self._make_handler)

    def _admit(self, sock: socket.socket, remote: str) -> None:
        strangers = [one for one in self._by_handler.values() if one.is_stranger]
        if len(strangers) >= self._options.strangers_max + self._keepers():
            # Close the oldest stranger of the address that has the most. A flood then displaces
            # itself. A client behind the same address sends its request long before its turn.
            counts = Counter(stranger.remote for stranger in strangers)
            self._close_stranger(max(strangers, key=lambda one: counts[one.remote]), _DISPLACED)
        handler = self._make_handler()
        connection = Connection(
            handler, remote, self._options.quiet_s, lambda: self._by_handler.pop(handler, None)
        )
        self._by_handler[handler] = connection
        connection.open(sock, self._tls)
        connection.close_after(self._options.stranger_s, self._close_stranger, connection, _LATE)

    def _close_stranger(self, stranger: Connection, kind: str) -> None:
        self.closed_strangers += 1
        self.refusals.add(kind, stranger.remote)
        stranger.abort()

    def authenticate(self, connection: Connection) -> bool:
        """Note that ``connection`` has sent the token. Return False, and leave it a stranger, if
        there are too many."""
        if connection.is_stranger:
            authenticated = sum(not one.is_stranger for one in self._by_handler.values())
            most = self._options.connections_max + CONNECTIONS_PER_KEEPER * self._keepers()
            if authenticated >= most:
                self.refusals.add(_TOO_MANY, connection.remote)
                return False
            connection.authenticate()
        return True

    async def close(self) -> None:
        """Abort all connections."""
        for connection in list(self._by_handler.values()):
            connection.abort()
        await asyncio.sleep(0)  # transports close their sockets in the next turn of the loop


class Connection(asyncio.Protocol):
    """Wraps aiohttp's handler of one connection, from before the TLS handshake.

    Tells when the system has taken all written data. Once authenticated, it is closed if no
    complete request arrives within ``quiet_s``. ``ended`` may be called twice.
    """

    def __init__(
        self,
        handler: web.RequestHandler,
        remote: str,
        quiet_s: float,
        ended: Callable[[], object],
    ) -> None:
        self.remote = remote
        self.is_stranger = True
        self._handler = handler
        self._quiet_s = quiet_s
        self._ended = ended
        self._opening: asyncio.Task[object] | None = None
        self._is_tls = False
        self._transport: asyncio.Transport | None = None
        self._is_drained = asyncio.Event()
        self._is_drained.set()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Begin to receive, after a TLS handshake if configured. Takes over ``sock``."""
        loop = asyncio.get_running_loop()
        self._is_tls = tls is not None
        opening = loop.create_task(loop.connect_accepted_socket(lambda: self, sock, ssl=tls))

        def opened(task: asyncio.Task[object]) -> None:
            if task.cancelled() or task.exception() is not None:
                sock.close()
                self._end()

        opening.add_done_callback(opened)
        self._opening = opening

    def connection_made(self, made: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, made)
        self._transport = transport
        self._handler.connection_made(transport)
        # Writers wait until the system has taken everything. TLS copies data when it encrypts; a
        # limit of 0 would then make writers wait with nothing left to send.
        transport.set_write_buffer_limits(high=1 if self._is_tls else 0, low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._is_drained.set()
        self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._is_drained.clear()
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._is_drained.set()
        self._handler.resume_writing()

    def authenticate(self) -> None:
        """Lift the deadline of a stranger."""
        self.is_stranger = False
        self._stop_timer()

    def request_began(self) -> None:
        """Suspend the limit of idle time: a request is complete. A stranger's deadline stays."""
        if not self.is_stranger:
            self._stop_timer()

    def request_ended(self) -> None:
        """Limit the idle time until the next request."""
        if not self.is_stranger and self._transport and not self._transport.is_closing():
            self.close_after(self._quiet_s, self.abort)

    def close_after(self, delay_s: float, close: Callable[..., None], *arguments: object) -> None:
        """Call ``close`` after ``delay_s``, unless a request or the end comes first."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, close, *arguments)

    async def drained(self) -> None:
        """Wait until the system has taken everything that was written."""
        await self._is_drained.wait()

    def abort(self) -> None:
        """Close the connection at once, and drop unsent data."""
        self._end()
        if self._transport is not None:
            self._transport.abort()
        elif self._opening is not None:
            self._opening.cancel()

    def _end(self) -> None:
        self._stop_timer()
        self._ended()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
