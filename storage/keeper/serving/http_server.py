"""HTTP server of a keeper, on aiohttp. Sends memory without copies, 1 MiB at a time.

No client can stop the server: lines, headers, concurrent requests, connections and idle times are
limited. Only reports of other keepers have a body, of limited size. A connection without the token
serves a single request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from email.utils import formatdate
from typing import Self

from aiohttp import hdrs, web

from ....errors import CoordinationError, HoldfastError, NotFoundError
from ..options import ServeOptions
from ..reporting import REPORT_NBYTES_MAX, StaleReportError
from .connections import Connection, Connections, Refusals
from .http_requests import REPORT_PATH, Asked, RequestError, asked_of, is_authorized, range_of
from .memory_catalog import Content, MemoryCatalog

Hear = Callable[[bytes], Awaitable[bytes]]
"""Takes the report of another keeper, and returns the answer. Raises CoordinationError if it is no
report, :class:`..reporting.StaleReportError`."""

MODIFIED_HEADER = "X-Holdfast-Modified"
"""Modification time in seconds since the epoch, with the fraction that Last-Modified lacks."""

_WRITE_NBYTES = 1 << 20
_LINE_NBYTES_MAX = 8190
_GRACE_S = 5.0
_BACKLOG = 1024
_WITHOUT_TOKEN = "requests without the token of this run"

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


class MemoryServer:
    """An HTTP server that runs during its ``async with`` body.

    ``port``: the actual port, also if 0 was configured; known in the body only.
    """

    def __init__(
        self,
        catalog: MemoryCatalog,
        options: ServeOptions,
        address: str,
        tls: ssl.SSLContext | None,
        hear: Hear | None = None,
    ) -> None:
        """Create the server. ``hear`` answers other keepers' reports; without it they get a 404."""
        self.address = address
        self.port = options.port
        self.served = Served()
        self._catalog = catalog
        self._hear = hear
        self._options = options
        self._refusals = Refusals()
        self._connections = Connections(
            options, tls, self._handler, self._refusals, catalog.keepers
        )
        self._running = 0

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    async def __aenter__(self) -> Self:
        """Start to listen. Raises OSError if the address cannot be used."""
        self._http = web.Server(
            self._answer,
            access_log=None,
            logger=_unread,
            keepalive_timeout=self._options.quiet_s,
            max_line_size=_LINE_NBYTES_MAX,
            max_field_size=_LINE_NBYTES_MAX,
            lingering_time=0,
        )
        family, _, _, _, address = socket.getaddrinfo(
            self.address, self.port, type=socket.SOCK_STREAM
        )[0]
        self._listening = socket.create_server(address, family=family, backlog=_BACKLOG)
        self._listening.setblocking(False)
        self.port = self._listening.getsockname()[1]
        self._connections.accept_from(self._listening)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and allow running requests a few seconds to finish."""
        self._connections.stop_accepting()
        self._listening.close()
        self._http.pre_shutdown()
        await self._http.shutdown(_GRACE_S)
        await self._connections.close()

    def _handler(self) -> web.RequestHandler:
        return self._http()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = self._connections.get(request.protocol)
        if connection is None:
            raise ConnectionResetError("the client is gone")
        connection.request_began()
        self.served.requests += 1
        self._running += 1
        try:
            response = await self._answered(request, connection)
        except RequestError as error:
            self.served.refused += 1
            response = _refusal(error)
        except (ConnectionError, TimeoutError) as error:
            _log.debug("the client is gone, or has stopped reading: %s", error)
            connection.abort()
            return web.Response(status=400)  # never delivered
        except Exception:  # must not affect other requests
            _log.exception("a request of %s has failed", request.remote)
            return web.Response(status=500)
        finally:
            self._running -= 1
            connection.request_ended()
        if connection.is_stranger:
            response.force_close()
        return response

    async def _answered(
        self, request: web.BaseRequest, connection: Connection
    ) -> web.StreamResponse:
        is_report = request.raw_path == REPORT_PATH and request.method == hdrs.METH_POST
        if not is_report and request.method not in (hdrs.METH_GET, hdrs.METH_HEAD):
            raise RequestError(405, "only GET and HEAD are served")
        if not is_report and request.can_read_body:
            raise RequestError(400, "this request takes no body")
        target = request.raw_path
        if target.partition("?")[0] != "/health":
            self._authenticate(request, connection)
        # Each keeper of the job may have two reports here, one of which waits for an answer.
        if self._running > self._options.requests_max + 2 * self._catalog.keepers():
            raise RequestError(503, "too many requests at a time")
        if is_report:
            return await self._report(request)
        asked = asked_of(target)
        if asked.what == "object":
            return await self._send_object(request, connection, asked.key)
        return self._small(asked)

    def _authenticate(self, request: web.BaseRequest, connection: Connection) -> None:
        """Raise RequestError without the token, or if too many connections have sent it."""
        if not is_authorized(request.headers.get(hdrs.AUTHORIZATION), self._options.token):
            self._refusals.add(_WITHOUT_TOKEN, request.remote)
            raise RequestError(401, "the token of the run is missing or wrong")
        if not self._connections.authenticate(connection):
            raise RequestError(503, "too many connections")

    async def _report(self, request: web.BaseRequest) -> web.Response:
        if self._hear is None:
            raise RequestError(404, "this keeper takes no reports")
        body = await self._body(request)
        try:
            answer = await self._hear(body)
        except CoordinationError as error:
            raise RequestError(400, error.message) from error
        except StaleReportError as error:
            raise RequestError(503 if error.later else 409, str(error)) from error
        return web.Response(body=answer)

    async def _body(self, request: web.BaseRequest) -> bytes:
        """Receive the whole body within ``quiet_s``.

        Raises RequestError without a valid length, TimeoutError, and ConnectionResetError.
        """
        nbytes = request.content_length
        if not nbytes or nbytes > REPORT_NBYTES_MAX:
            raise RequestError(
                400, f"a report must state its length, at most {REPORT_NBYTES_MAX:,}"
            )
        try:
            async with asyncio.timeout(self._options.quiet_s):
                return await request.content.readexactly(nbytes)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the report is cut short") from error

    def _small(self, asked: Asked) -> web.Response:
        if asked.what == "health":
            return web.Response(text="ok\n")
        if asked.what == "status":
            return web.json_response(self._catalog.status())
        if asked.what == "metrics":
            return web.Response(text=self._metrics(), headers={hdrs.CONTENT_TYPE: _PROMETHEUS})
        return web.Response(text=self._list(asked.key), content_type="application/jsonl")

    def _list(self, prefix: str) -> str:
        lines = [
            json.dumps({"key": item.key, "nbytes": item.nbytes, "modified_s": item.modified_s})
            for item in self._catalog.listing()
            if not prefix or item.key == prefix or item.key.startswith(prefix + "/")
        ]
        return "".join(line + "\n" for line in lines)

    def _metrics(self) -> str:
        counted = {
            "requests": self.served.requests,
            "refused_requests": self.served.refused,
            "closed_strangers": self._connections.closed_strangers,
            "sent_bytes": self.served.nbytes,
        }
        own = "".join(
            f"# TYPE holdfast_keeper_http_{name}_total counter\n"
            f"holdfast_keeper_http_{name}_total {value}\n"
            for name, value in counted.items()
        )
        return self._catalog.metrics() + own

    async def _send_object(
        self, request: web.BaseRequest, connection: Connection, key: str
    ) -> web.StreamResponse:
        with ExitStack() as pinned:
            try:
                content = pinned.enter_context(self._catalog.open(key))
            except NotFoundError as error:
                raise RequestError(404, "no such object") from error
            except HoldfastError as error:
                _log.warning("%s cannot be served: %s", key, error)
                raise RequestError(503, "the object cannot be served now") from error
            nbytes = len(content.view)
            try:
                wanted = range_of(request.headers.get(hdrs.RANGE), nbytes)
            except RequestError as error:
                if error.status == 416:
                    self.served.refused += 1
                    return web.Response(
                        status=416, headers={hdrs.CONTENT_RANGE: f"bytes */{nbytes}"}
                    )
                raise
            response = _headed(content, wanted)
            await response.prepare(request)
            if request.method == hdrs.METH_GET:
                await self._write(response, connection, content.view, wanted or range(nbytes))
            return response

    async def _write(
        self,
        response: web.StreamResponse,
        connection: Connection,
        view: memoryview,
        wanted: range,
    ) -> None:
        """Send the bytes ``wanted`` of ``view``. On any error, abort the connection and raise it.

        On return the kernel has copied all of them, so the memory may be reused.
        """
        try:
            for start in range(wanted.start, wanted.stop, _WRITE_NBYTES):
                async with asyncio.timeout(self._options.quiet_s):
                    part = view[start : min(start + _WRITE_NBYTES, wanted.stop)]
                    await response.write(part)
                    await connection.drained()
                self.served.nbytes += len(part)
        except BaseException:  # cancelled, timed out, or disconnected
            connection.abort()
            raise


_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def _headed(content: Content, wanted: range | None) -> web.StreamResponse:
    """Return the response with its headers and without a body: status 206 for the byte range
    ``wanted``, 200 for the whole object if that is None."""
    nbytes = len(content.view)
    headers = {
        hdrs.ACCEPT_RANGES: "bytes",
        hdrs.CONTENT_TYPE: "application/octet-stream",
        hdrs.LAST_MODIFIED: formatdate(content.modified_s, usegmt=True),
        MODIFIED_HEADER: repr(content.modified_s),
    }
    if wanted is None:
        response = web.StreamResponse(status=200, headers=headers)
        response.content_length = nbytes
        return response
    headers[hdrs.CONTENT_RANGE] = f"bytes {wanted.start}-{wanted.stop - 1}/{nbytes}"
    response = web.StreamResponse(status=206, headers=headers)
    response.content_length = len(wanted)
    return response


def _refusal(error: RequestError) -> web.Response:
    headers = {}
    if error.status == 401:
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    elif error.status == 405:
        headers[hdrs.ALLOW] = "GET, HEAD"
    elif error.status == 503:
        headers[hdrs.RETRY_AFTER] = "1"
    response = web.Response(status=error.status, text=f"{error}\n", headers=headers)
    if error.status in (400, 405):  # an unread body may follow
        response.force_close()
    return response
