"""HTTP connections to one server: reused between requests, and cut when the caller stops waiting.

Everything here blocks, and is called from threads.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from ...core.forks.renewal import new_lock
from ...errors import (
    AccessError,
    BusyError,
    ExistsError,
    FullError,
    NotFoundError,
    StorageDownError,
    StorageError,
)

CONNECT_S = 10.0
"""Timeout of connecting: a live host answers sooner."""

_PIECE_NBYTES = 1 << 20
"""Bytes received between two checks of whether the caller is still waiting."""
_REFUSAL_NBYTES_MAX = 64 << 10
"""Longest error body that is read in order to reuse the connection; with a longer one, it is
closed."""


@dataclass(frozen=True, slots=True)
class Question:
    """Content of a request. ``data``: its body. ``once``: it must not be sent twice."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    data: memoryview | None = None
    once: bool = False

    def ask(self, connection: http.client.HTTPConnection, headers: Mapping[str, str]) -> None:
        """Send the request, with more ``headers``."""
        whole = {**headers, **self.headers}
        if self.data is None:
            connection.request(self.method, self.target, headers=whole)
            return
        whole["Content-Length"] = str(len(self.data))
        starts = range(0, len(self.data), _PIECE_NBYTES)  # each has the time limit of silence
        pieces = (self.data[start : start + _PIECE_NBYTES] for start in starts)
        connection.request(self.method, self.target, pieces, whole)


class Request:
    """One request, which its caller may cut from another thread."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._socket: socket.socket | None = None
        self.is_cut = False

    def cut(self) -> None:
        """Abort the request: pending socket calls fail at once."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                with suppress(OSError):  # already closed
                    # Not SSLSocket.shutdown: it removes the session that a reading thread is using.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise ConnectionAbortedError if the request was cut."""
        if self.is_cut:
            raise ConnectionAbortedError("the caller no longer waits")

    def begin(self, sock: socket.socket) -> None:
        """Attach the request to ``sock``."""
        with self._lock:
            self._socket = sock
        self.check()

    def end(self) -> None:
        """Detach the socket, so that another request can use it."""
        with self._lock:
            self._socket = None

    def fill(self, response: http.client.HTTPResponse, into: memoryview) -> None:
        """Receive into all of ``into``. Raises IncompleteRead if the response is shorter."""
        filled = 0
        while filled < len(into):
            self.check()
            count = response.readinto(into[filled : filled + _PIECE_NBYTES])
            if not count:
                raise http.client.IncompleteRead(b"", len(into) - filled)
            filled += count


class Connections:
    """Pool of connections to one address; idle ones are reused. Thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float,
        tls: ssl.SSLContext | None,
        headers: Mapping[str, str],
    ) -> None:
        """Set up the pool without connecting. ``timeout_s`` limits each wait for data; ``headers``
        are sent with every request."""
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._tls = tls
        self._headers = headers
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = new_lock()
        self._is_closed = False

    @contextmanager
    def answer(self, request: Request, question: Question) -> Iterator[http.client.HTTPResponse]:
        """Yield the head of a response, whatever its status. If the response was not fully received
        by the end of the body, its connection is closed. Raises OSError and HTTPException."""
        connection, response = self._asked(request, question)
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
        """Close idle connections; others close when their requests end. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            idle = self._idle
            self._idle = []
        for connection in idle:
            connection.close()

    def _asked(
        self, request: Request, question: Question
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send the request on an idle connection, or on a new one if the server has closed the idle
        one meanwhile. A request to be sent once gets a new one."""
        kept = None
        with self._lock:
            if self._idle and not question.once:
                kept = self._idle.pop()
        if kept is not None:
            try:
                return kept, self._exchange(kept, request, question)
            except (ConnectionError, ssl.SSLEOFError, http.client.BadStatusLine):
                request.check()
        request.check()
        connection = self._connected()
        return connection, self._exchange(connection, request, question)

    def _exchange(
        self, connection: http.client.HTTPConnection, request: Request, question: Question
    ) -> http.client.HTTPResponse:
        """Send the request and return the response head. Closes the connection on failure."""
        try:
            request.begin(connection.sock)
            question.ask(connection, self._headers)
            return connection.getresponse()
        except BaseException:
            request.end()
            connection.close()
            raise

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._is_closed and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()

    def _connected(self) -> http.client.HTTPConnection:
        connect_s = min(self._timeout_s, CONNECT_S)
        connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if self._tls is not None:
            connect = partial(http.client.HTTPSConnection, context=self._tls)
        connection = connect(self._host, self._port, timeout=connect_s)
        try:
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection


def _finish(response: http.client.HTTPResponse) -> None:
    if response.isclosed():
        return
    if response.length is not None and response.length <= _REFUSAL_NBYTES_MAX:
        response.read()


_REASON_MAX = 200
_PAUSE_S_MAX = 60.0
_TOKEN = "Each run or store has a token, which HOLDFAST_PEER_TOKEN holds. It changes at a restart."
_TRUST = "Name the file of the authority that signed the server's certificate: ?ca=/path/ca.pem."
_NO_STORE = "With ?store=on, the address has to be that of a MemoryStore."
_FULL = "Raise its budget_nbytes, or delete objects."
_ANOTHER = "Does a keeper or a store listen there? With TLS it takes ?tls=on, without it ?tls=off."


@contextmanager
def failures(doing: str, uri: str, key: str) -> Iterator[None]:
    """Translate connection errors into a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except ssl.SSLCertVerificationError as error:
        message = f"the server's certificate is not trusted: {error.verify_message}"
        raise StorageError(message, uri=uri, key=key, advice=_TRUST) from error
    except (ConnectionError, ssl.SSLEOFError, http.client.IncompleteRead) as error:
        message = f"{doing}: the connection to the server is lost: {_said(error)}"
        raise StorageDownError(message, uri=uri, key=key) from error
    except ssl.SSLError as error:
        reason = error.reason or type(error).__name__
        message = f"{doing}: no TLS connection: {reason}"
        raise StorageError(message, uri=uri, key=key, advice=_ANOTHER) from error
    except TimeoutError as error:
        message = f"{doing}: the server does not answer"
        raise StorageDownError(message, uri=uri, key=key) from error
    except http.client.HTTPException as error:
        message = f"{doing}: the answer is not HTTP: {_said(error)}"
        raise StorageError(message, uri=uri, key=key, advice=_ANOTHER) from error
    except OSError as error:
        message = f"{doing}: the server cannot be reached: {_said(error)}"
        raise StorageDownError(message, uri=uri, key=key) from error


def refusal(status: int, retry_after: str | None, doing: str, uri: str, key: str) -> StorageError:
    """Return the error for an unsuccessful response."""
    message = f"{doing}: the server answers {status}"
    if status in (401, 403):
        return AccessError(message, uri=uri, key=key, advice=_TOKEN)
    if status == 404:
        return NotFoundError("no such object", uri=uri, key=key)
    if status == 405:
        return StorageError("keepers are read-only", uri=uri, key=key, advice=_NO_STORE)
    if status == 412:
        return ExistsError("the object already exists", uri=uri, key=key)
    if status == 507:
        return FullError(f"{doing}: the store has no room", uri=uri, key=key, advice=_FULL)
    if status in (429, 503):
        return BusyError(message, retry_after_s=_seconds(retry_after), uri=uri, key=key)
    if status >= 500:
        return StorageDownError(message, uri=uri, key=key)
    return StorageError(message, uri=uri, key=key, advice=_ANOTHER)


def _seconds(retry_after: str | None) -> float | None:
    if retry_after is None or not retry_after.isdecimal() or len(retry_after) > 6:
        return None
    return min(float(retry_after), _PAUSE_S_MAX)


def _said(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_REASON_MAX]
