"""Answers HTTP requests to a keeper: objects in its memory, its status, and other keepers' reports.

Requests in flight are limited. Only reports have a body, of limited size.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from aiohttp import hdrs, web

from ....errors import CoordinationError, HoldfastError, NotFoundError
from ...serving.connections import Connection
from ...serving.options import ServeOptions
from ...serving.requests import REPORT_PATH, Asked, RequestError, asked_of, is_below
from ...serving.server import HttpServer, listing
from ..reporting import REPORT_NBYTES_MAX, StaleReportError
from .memory_catalog import MemoryCatalog, counters_text

Hear = Callable[[bytes], Awaitable[bytes]]
"""Takes the report of another keeper, and returns the answer. Raises CoordinationError if it is no
report, :class:`..reporting.StaleReportError`."""

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger(__name__)


class MemoryServer(HttpServer):
    """The HTTP server of a keeper."""

    def __init__(
        self, catalog: MemoryCatalog, options: ServeOptions, hear: Hear | None = None
    ) -> None:
        """Set up the server, without listening. ``hear`` answers other keepers' reports; without it
        they get a 404. Raises UsageError for unusable options."""
        super().__init__(self._answered, options, catalog.keepers)
        self._catalog = catalog
        self._hear = hear

    async def _answered(
        self, request: web.BaseRequest, connection: Connection
    ) -> web.StreamResponse:
        is_report = request.raw_path == REPORT_PATH and request.method == hdrs.METH_POST
        if not is_report and request.method not in (hdrs.METH_GET, hdrs.METH_HEAD):
            raise RequestError(405, "only GET and HEAD are served", {"Allow": "GET, HEAD"})
        if not is_report and request.can_read_body:
            raise RequestError(400, "this request takes no body")
        target = request.raw_path
        if target.partition("?")[0] != "/health":
            self.authenticate(request, connection)
        # Each keeper of the job may have two reports here, one of which waits for an answer.
        if self.running > self.options.requests_max + 2 * self._catalog.keepers():
            raise RequestError(503, "too many requests at a time")
        if is_report:
            return await self._report(request)
        asked = asked_of(target)
        if asked.what == "object":
            return await self._send_object(request, connection, asked.key)
        return self._small(asked)

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
            async with asyncio.timeout(self.options.quiet_s):
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
        return listing(one for one in self._catalog.listing() if is_below(one.key, asked.key))

    def _metrics(self) -> str:
        counters = {
            "http_requests": self.served.requests,
            "http_refused_requests": self.served.refused,
            "http_closed_strangers": self.connections.closed_strangers,
            "http_sent_bytes": self.served.nbytes,
        }
        return self._catalog.metrics() + counters_text(counters)

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
            return await self.send(request, connection, [content.view], content.modified_s)
