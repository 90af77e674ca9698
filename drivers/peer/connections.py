"""Connections to one keeper: kept for the next request, and cut off where nobody waits any more.

All of this blocks, and is called from threads.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...core.forks.renewal import new_lock

__all__ = ["Connections", "Request"]

CONNECT_S = 10.0
"""A host that is up answers sooner."""

_PIECE_NBYTES = 1 << 20
"""So much is received between two looks whether the caller still waits."""
_REFUSAL_NBYTES_MAX = 64 << 10
"""A longer explanation is not received; its connection is closed instead."""


class Request:
    """One request, which its caller may cut off from another thread."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._socket: socket.socket | None = None
        self.is_cut = False

    def cut(self) -> None:
        """End it: whatever waits for an answer fails at once."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                _shut(self._socket)

    def check(self) -> None:
        """Raise ConnectionAbortedError where it was cut off."""
        if self.is_cut:
            raise ConnectionAbortedError("the caller no longer waits")

    def begin(self, sock: socket.socket) -> None:
        """From now on it uses ``sock``."""
        with self._lock:
            self._socket = sock
        self.check()

    def end(self) -> None:
        """Its socket may serve another request."""
        with self._lock:
            self._socket = None

    def fill(self, response: http.client.HTTPResponse, into: memoryview) -> None:
        """Receive into all of ``into``. Raises IncompleteRead where less comes."""
        filled = 0
        while filled < len(into):
            self.check()
            count = response.readinto(into[filled : filled + _PIECE_NBYTES])
            if not count:
                raise http.client.IncompleteRead(b"", len(into) - filled)
            filled += count


def _shut(sock: socket.socket) -> None:
    try:
        # Not SSLSocket.shutdown, which pulls the session away under the thread that reads.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:  # it has ended by itself
        pass


class Connections:
    """To one address: those that no request uses now are kept for the next. Thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float,
        tls: ssl.SSLContext | None,
        headers: Mapping[str, str],
    ) -> None:
        """``timeout_s``: for how long nothing may come. ``headers``: of every request."""
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._tls = tls
        self._headers = headers
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = new_lock()
        self._is_closed = False

    @contextmanager
    def answer(
        self, request: Request, method: str, target: str, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """The head of an answer, of whatever status. A connection whose answer has not been
        received as a whole by the end of the body is closed. Raises OSError and HTTPException."""
        connection, response = self._asked(request, method, target, {**self._headers, **headers})
        try:
            yield response
            request.check()
            _finish(response)
        except BaseException:
            response.close()
            connection.close()
            raise
        finally:
            request.end()
        if response.isclosed() and not request.is_cut:
            self._keep(connection)
        else:
            response.close()
            connection.close()

    def close(self) -> None:
        """Close all that are kept; others are closed when their requests end. Safe to call
        twice."""
        with self._lock:
            self._is_closed = True
            idle = self._idle
            self._idle = []
        for connection in idle:
            connection.close()

    def _asked(
        self, request: Request, method: str, target: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Over a connection that is kept; if the keeper has closed that one meanwhile, over a new
        one. Nothing is asked for that could not be asked for twice."""
        kept = self._kept()
        if kept is not None:
            try:
                return kept, _exchange(kept, request, method, target, headers)
            except (ConnectionError, http.client.BadStatusLine):
                request.check()
        request.check()
        connection = self._connected()
        return connection, _exchange(connection, request, method, target, headers)

    def _kept(self) -> http.client.HTTPConnection | None:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return None

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._is_closed and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()

    def _connected(self) -> http.client.HTTPConnection:
        connect_s = min(self._timeout_s, CONNECT_S)
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=connect_s)
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=connect_s, context=self._tls
            )
        try:
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection


def _exchange(
    connection: http.client.HTTPConnection,
    request: Request,
    method: str,
    target: str,
    headers: Mapping[str, str],
) -> http.client.HTTPResponse:
    """Where it fails, the connection is closed."""
    try:
        request.begin(connection.sock)
        connection.request(method, target, headers=dict(headers))
        return connection.getresponse()
    except BaseException:
        request.end()
        connection.close()
        raise


def _finish(response: http.client.HTTPResponse) -> None:
    """Receive what is left, if it is little."""
    if response.isclosed():
        return
    if response.length is not None and response.length <= _REFUSAL_NBYTES_MAX:
        response.read()
