"""HTTP server on aiohttp. Sends memory without copies, 1 MiB at a time.

No client can stop the server: lines, headers, connections and idle times are limited. A connection
without the token serves a single request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Self

from aiohttp import hdrs, web

from ...drivers.contract import ObjectInfo
from ...drivers.peer.driver import MODIFIED_HEADER
from .connections import Connection, Connections
from .options import ServeOptions, address_of
from .requests import RequestError, is_authorized, range_of

Respond = Callable[[web.BaseRequest, Connection], Awaitable[web.StreamResponse]]
"""Answers a request. Raises RequestError to refuse it, and ConnectionError or TimeoutError if the
client is gone."""

GRACE_S = 5.0
_PIECE_NBYTES = 1 << 20
_LINE_NBYTES_MAX = 8190
_BACKLOG = 1024
_WITHOUT_TOKEN = "requests without the token"

_log = logging.getLogger(__name__)
_unread = logging.getLogger(f"{__name__}.unread")
"""Logger for malformed requests. Silenced, since anyone can send these."""
_unread.setLevel(logging.CRITICAL)


@dataclass
class Served:
    """Counters since the server began. ``refused``: requests answered with a 4xx or 503;
    ``nbytes``: bytes of objects sent."""

    requests: int = 0
    refused: int = 0
    nbytes: int = 0


class HttpServer:
    """An HTTP server that runs during its ``async with`` body.

    ``port``: the actual port, also if 0 was configured; known in the body only. ``connections``:
    the open ones. ``running``: number of requests that are being answered.
    """

    def __init__(
        self,
        respond: Respond,
        options: ServeOptions,
        keepers: Callable[[], int] = lambda: 0,
        lingering_s: float = 0.0,
    ) -> None:
        """Set up the server, without listening. ``keepers()``: see :class:`Connections`. A refused
        client may go on sending a body for ``lingering_s``, and then finds the refusal. Raises
        UsageError for unusable options."""
        self.address = address_of(options.interface)
        self.port = options.port
        self.options = options
        self.served = Served()
        self.running = 0
        self._respond = respond
        self._lingering_s = lingering_s
        self.connections = Connections(options, keepers)

    async def __aenter__(self) -> Self:
        """Start to listen. Raises OSError if the address cannot be used."""
        self._http = web.Server(
            self._answer,
            access_log=None,
            logger=_unread,
            keepalive_timeout=self.options.quiet_s,
            max_line_size=_LINE_NBYTES_MAX,
            max_field_size=_LINE_NBYTES_MAX,
            lingering_time=self._lingering_s,
        )
        family, _, _, _, address = socket.getaddrinfo(
            self.address, self.port, type=socket.SOCK_STREAM
        )[0]
        self._listening = socket.create_server(address, family=family, backlog=_BACKLOG)
        self._listening.setblocking(False)
        self.port = self._listening.getsockname()[1]
        self.connections.accept_from(self._listening, self._http)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and allow running requests a few seconds to finish."""
        self.connections.stop_accepting()
        self._listening.close()
        self._http.pre_shutdown()
        await self._http.shutdown(GRACE_S)
        await self.connections.close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = self.connections.get(request.protocol)
        if connection is None:
            raise ConnectionResetError("the client is gone")
        connection.request_began()
        self.served.requests += 1
        self.running += 1
        try:
            response = await self._respond(request, connection)
        except RequestError as error:
            self.served.refused += 1
            response = _refusal(error)
        except (ConnectionError, TimeoutError) as error:
            _log.debug("the client is gone, or has stopped sending or reading: %s", error)
            connection.abort()
            return web.Response(status=400)  # never delivered
        except Exception:  # must not affect other requests
            _log.exception("a request of %s has failed", request.remote)
            response = web.Response(status=500)
        finally:
            self.running -= 1
            connection.request_ended()
        if connection.is_stranger:
            response.force_close()
        return response

    def authenticate(self, request: web.BaseRequest, connection: Connection) -> None:
        """Raise RequestError without the token, or if too many connections have sent it."""
        if not is_authorized(request.headers.get(hdrs.AUTHORIZATION), self.options.token):
            self.connections.refusals.add(_WITHOUT_TOKEN, request.remote)
            bearer = {"WWW-Authenticate": "Bearer"}
            raise RequestError(401, "the token is missing or wrong", bearer)
        if not self.connections.authenticate(connection):
            raise RequestError(503, "too many connections")

    async def send(
        self,
        request: web.BaseRequest,
        connection: Connection,
        parts: Sequence[memoryview],
        modified_s: float,
        tag: str = "",
    ) -> web.StreamResponse:
        """Answer a GET or HEAD of an object, or of a range of it. ``parts`` are its bytes in order.

        On return the kernel has copied them, so the memory may be reused. Raises RequestError for
        an unusable range. After any other error the connection is aborted: the client must not take
        a part for the whole.
        """
        nbytes = sum(map(len, parts))
        wanted = range_of(request.headers.get(hdrs.RANGE), nbytes)
        headers = {
            hdrs.ACCEPT_RANGES: "bytes",
            hdrs.CONTENT_TYPE: "application/octet-stream",
            hdrs.LAST_MODIFIED: formatdate(modified_s, usegmt=True),
            MODIFIED_HEADER: repr(modified_s),
        }
        if tag:
            headers[hdrs.ETAG] = tag
        if wanted is not None:
            headers[hdrs.CONTENT_RANGE] = f"bytes {wanted.start}-{wanted.stop - 1}/{nbytes}"
        response = web.StreamResponse(status=200 if wanted is None else 206, headers=headers)
        sent = range(nbytes) if wanted is None else wanted
        response.content_length = len(sent)
        await response.prepare(request)
        if request.method == hdrs.METH_GET:
            try:
                for piece in _pieces(parts, sent):
                    async with asyncio.timeout(self.options.quiet_s):
                        await response.write(piece)
                        await connection.drained()
                    self.served.nbytes += len(piece)
            except BaseException:  # cancelled, timed out, or disconnected
                connection.abort()
                raise
        return response

    def leave_to_parent(self) -> None:
        """Close the sockets in a forked child. Otherwise clients would not notice the end of this
        process as long as a child lives. Their numbers stay taken, as their objects stay."""
        sockets: list[socket.socket | None] = [self._listening]
        for handler in self._http.connections:
            if handler.transport is not None:
                sockets.append(handler.transport.get_extra_info("socket"))
        nothing = os.open(os.devnull, os.O_RDWR)
        for sock in sockets:
            if sock is not None and sock.fileno() >= 0:
                os.dup2(nothing, sock.fileno(), inheritable=False)
        os.close(nothing)


def _pieces(parts: Sequence[memoryview], wanted: range) -> Iterator[memoryview]:
    begin = 0
    for part in parts:
        end = begin + len(part)
        last = min(wanted.stop, end)
        for at in range(max(wanted.start, begin), last, _PIECE_NBYTES):
            yield part[at - begin : min(at + _PIECE_NBYTES, last) - begin]
        begin = end


def listing(objects: Iterable[ObjectInfo]) -> web.Response:
    """Answer with a line of JSON for each object."""
    lines = [
        json.dumps({"key": one.key, "nbytes": one.nbytes, "modified_s": one.modified_s}) + "\n"
        for one in objects
    ]
    return web.Response(text="".join(lines), content_type="application/jsonl")


def _refusal(error: RequestError) -> web.Response:
    response = web.Response(status=error.status, text=f"{error}\n", headers=error.headers)
    if error.status == 503:
        response.headers[hdrs.RETRY_AFTER] = "1"
    if error.status in (400, 405):  # an unread body may follow
        response.force_close()
    return response
