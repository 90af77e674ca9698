"""``MemoryStore``: an object store in the memory of a process, for ``peer://…?store=on``.

It shares the limits against strangers with the HTTP server of keepers. No client without the token
makes it receive a body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import ssl
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Self

from aiohttp import hdrs, web

from ...core.forks.renewal import in_child
from ...drivers.contract import check_key
from ...drivers.peer.driver import MODIFIED_HEADER, SIZE_HEADER, WAIT_HEADER
from ...drivers.peer.driver import token as checked_token
from ...errors import (
    DamagedError,
    ExistsError,
    FullError,
    HoldfastError,
    NotFoundError,
    UsageError,
)
from ..keeper.options import ServeOptions, new_token
from ..keeper.serving.connections import Connection, Connections, Refusals
from ..keeper.serving.http_requests import RequestError, asked_of, is_authorized, range_of
from ..keeper.serving.serve import address_and_port, address_of, interface_and_port
from .objects import MemoryObject, ObjectMemory

_PIECE_NBYTES = 1 << 20
_LINE_NBYTES_MAX = 8190
_BACKLOG = 1024
_GRACE_S = 5.0
_WAIT_S_MAX = 3600.0
_UPLOAD = re.compile(r"/v1/upload/([0-9a-f]{32})(?:/(.+))?", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_STATUS = {NotFoundError: 404, ExistsError: 412, FullError: 507, DamagedError: 400}

_log = logging.getLogger(__name__)
_unread = logging.getLogger(f"{__name__}.unread")
"""Logger for malformed requests. Silenced, since anyone can send these."""
_unread.setLevel(logging.CRITICAL)


class MemoryStore:
    """An object store in this process's memory, open during its ``with`` block.

    A thread of its own answers requests, so the caller may block. Objects are sent without being
    copied, and are lost when the block ends. ``token``: what clients have to send, as
    ``HOLDFAST_PEER_TOKEN``.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        budget_nbytes: int,
        token: str = "",
        certificate: str = "",
        key: str = "",
        upload_idle_s: float = 600.0,
        connections_max: int = 512,
    ) -> None:
        """Set up the store, without listening.

        ``address``: an interface or address, with an optional port after a colon. Holds at most
        ``budget_nbytes`` in objects and unfinished uploads. Without a ``token``, makes one.
        ``certificate`` and ``key``: PEM files for TLS; without them, the token and the objects
        cross the network in clear text. Uploads that receive nothing for ``upload_idle_s`` seconds
        are dropped. Serves ``connections_max`` clients with the token at a time. Raises UsageError
        for unusable values.
        """
        interface, port = interface_and_port(address)
        try:
            self.token = checked_token(token) or new_token()
        except ValueError as error:
            raise UsageError(f"the token of a store {error}") from error
        self._options = ServeOptions(
            self.token, interface, port, certificate, key, connections_max=connections_max
        )
        self._address = address_of(interface)
        self._tls = _tls(certificate, key)
        self._budget_nbytes = budget_nbytes
        self._idle_s = upload_idle_s
        self._refusals = Refusals()
        self._process = os.getpid()
        self._sent_nbytes = 0
        self._listening: socket.socket | None = None
        self._began: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, name="holdfast-store", daemon=True)

    @property
    def uri(self) -> str:
        """URI for drivers, without the token. Only valid in the block."""
        where = address_and_port(self._address, self._began.result())
        return f"peer://{where}/?store=on" + ("&tls=on" if self._tls else "")

    @property
    def used_nbytes(self) -> int:
        """Bytes of the budget in use. Only valid in the block; safe on any thread."""
        return self._memory.used_nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes of objects sent so far. Safe on any thread."""
        return self._sent_nbytes

    def __enter__(self) -> Self:
        """Start to listen. Raises UsageError if the address cannot be used."""
        self._thread.start()
        try:
            self._began.result()
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"a store cannot listen on {self._address}: {reason}") from error
        _stores.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening, allow running requests a few seconds to finish, and drop all objects. May
        be repeated. Does nothing in a forked child."""
        if os.getpid() == self._process and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._began.done():
                raise
            self._began.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._memory = ObjectMemory(self._budget_nbytes, self._idle_s)
        self._http = web.Server(
            self._answer,
            access_log=None,
            logger=_unread,
            keepalive_timeout=self._options.quiet_s,
            max_line_size=_LINE_NBYTES_MAX,
            max_field_size=_LINE_NBYTES_MAX,
            lingering_time=_GRACE_S,  # a client that is still sending finds a refusal afterwards
        )
        self._connections = Connections(
            self._options, self._tls, self._http, self._refusals, lambda: 0
        )
        where = (self._address, self._options.port)
        family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server(where, family=family, backlog=_BACKLOG) as listening:
            listening.setblocking(False)
            self._listening = listening
            self._connections.accept_from(listening)
            self._began.set_result(listening.getsockname()[1])
            while not self._end.is_set():
                self._memory.expire()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._end.wait(), self._idle_s / 4)
            self._connections.stop_accepting()
        self._memory.end_waits()
        self._http.pre_shutdown()
        await self._http.shutdown(_GRACE_S)
        await self._connections.close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = self._connections.get(request.protocol)
        if connection is None:
            raise ConnectionResetError("the client is gone")
        connection.request_began()
        try:
            response = await self._answered(request, connection)
        except RequestError as error:
            response = _refusal(error.status, str(error))
        except HoldfastError as error:
            response = _refusal(_STATUS.get(type(error), 500), error.message)
        except (ConnectionError, TimeoutError) as error:
            _log.debug("the client is gone, or has stopped sending or reading: %s", error)
            connection.abort()
            return web.Response(status=400)  # never delivered
        except Exception:  # must not affect other requests
            _log.exception("a request of %s has failed", request.remote)
            response = web.Response(status=500)
        finally:
            connection.request_ended()
        if connection.is_stranger:
            response.force_close()
        return response

    async def _answered(
        self, request: web.BaseRequest, connection: Connection
    ) -> web.StreamResponse:
        if not is_authorized(request.headers.get(hdrs.AUTHORIZATION), self.token):
            self._refusals.add("requests without the token of a store", request.remote)
            raise RequestError(401, "the token is missing or wrong")
        if not self._connections.authenticate(connection):
            raise RequestError(503, "too many connections")
        method = request.method
        upload = _UPLOAD.fullmatch(request.raw_path)
        if upload is not None:
            return await self._use_upload(request, upload[1], upload[2] or "")
        asked = asked_of(request.raw_path)
        if asked.what == "list" and method in (hdrs.METH_GET, hdrs.METH_HEAD):
            return web.Response(text=self._list(asked.key), content_type="application/jsonl")
        if asked.what == "list" and method == hdrs.METH_DELETE:
            self._memory.delete_all(asked.key)
            return web.Response()
        if asked.what != "object":
            raise RequestError(404, "no such path")
        return await self._use_object(request, connection, asked.key)

    async def _use_object(
        self, request: web.BaseRequest, connection: Connection, key: str
    ) -> web.StreamResponse:
        if request.method in (hdrs.METH_GET, hdrs.METH_HEAD):
            return await self._send_object(request, connection, key)
        if request.method == hdrs.METH_PUT:
            await self._put(request, key)
        elif request.method == hdrs.METH_DELETE:
            self._memory.delete(key)
        else:
            raise RequestError(405, "this method is not served")
        return web.Response()

    async def _put(self, request: web.BaseRequest, key: str) -> None:
        is_exclusive = request.headers.get(hdrs.IF_NONE_MATCH) == "*"
        if is_exclusive:
            self._memory.check_free(key)
        async with self._received(request) as data:
            if is_exclusive:  # another one may have taken it meanwhile
                self._memory.check_free(key)
            self._memory.put(key, data)

    async def _use_upload(
        self, request: web.BaseRequest, upload_id: str, rest: str
    ) -> web.Response:
        memory = self._memory
        if request.method == hdrs.METH_PUT and _NUMBER.fullmatch(rest):
            memory.use(upload_id)
            async with self._received(request) as data:
                memory.write(upload_id, int(rest), data)
        elif request.method == hdrs.METH_DELETE and not rest:
            memory.abort(upload_id)
        elif request.method == hdrs.METH_POST:
            text = request.headers.get(SIZE_HEADER, "")
            if not _NUMBER.fullmatch(text):
                raise RequestError(400, f"an upload has a size: {SIZE_HEADER}")
            if rest:
                memory.check_room(int(text))
                memory.begin(upload_id, check_key(asked_of(f"/v1/object/{rest}").key))
            else:
                memory.commit(upload_id, int(text))
        else:
            raise RequestError(405, "this method is not served")
        return web.Response()

    @asynccontextmanager
    async def _received(self, request: web.BaseRequest) -> AsyncIterator[memoryview]:
        """Receive the body into memory that the block gives to an object or upload. Raises
        RequestError without a length, FullError, TimeoutError and ConnectionResetError."""
        nbytes = request.content_length
        if nbytes is None:
            raise RequestError(411, "a body must state its length")
        with self._memory.reserved(nbytes) as memory:
            filled = 0
            while filled < nbytes:
                async with asyncio.timeout(self._options.quiet_s):
                    data = await request.content.readany()
                if not data:
                    raise ConnectionResetError("the body is cut short")
                memory[filled : filled + len(data)] = data
                filled += len(data)
            yield memory

    def _list(self, prefix: str) -> str:
        found = [(key, self._memory.objects[key]) for key in self._memory.below(prefix)]
        lines = [
            json.dumps({"key": key, "nbytes": one.nbytes, "modified_s": one.modified_s})
            for key, one in found
        ]
        return "".join(line + "\n" for line in lines)

    async def _send_object(
        self, request: web.BaseRequest, connection: Connection, key: str
    ) -> web.StreamResponse:
        known = request.headers.get(hdrs.IF_NONE_MATCH)
        if wait_s := _seconds(request.headers.get(WAIT_HEADER)):
            await self._memory.changed(key, known, wait_s)
        with ExitStack() as pinned:
            found = pinned.enter_context(self._memory.open(key))
            if found.tag == known:
                return web.Response(status=304, headers={hdrs.ETAG: found.tag})
            nbytes = found.nbytes
            try:
                wanted = range_of(request.headers.get(hdrs.RANGE), nbytes)
            except RequestError as error:
                if error.status != 416:
                    raise
                return _refusal(416, str(error), {hdrs.CONTENT_RANGE: f"bytes */{nbytes}"})
            response = _headed(found, wanted)
            await response.prepare(request)
            if request.method == hdrs.METH_GET:
                try:
                    await self._send(response, connection, found, wanted or range(nbytes))
                except BaseException:  # the client must not take a part for the whole
                    connection.abort()
                    raise
            return response

    async def _send(
        self,
        response: web.StreamResponse,
        connection: Connection,
        found: MemoryObject,
        wanted: range,
    ) -> None:
        for piece in found.pieces(wanted.start, wanted.stop, _PIECE_NBYTES):
            async with asyncio.timeout(self._options.quiet_s):
                await response.write(piece)
                await connection.drained()
            self._sent_nbytes += len(piece)

    def leave_to_parent(self) -> None:
        """Close the sockets in a forked child. Otherwise clients would not notice the end of this
        process as long as a child lives. Their numbers stay taken, as the objects stay."""
        sockets = [self._listening]
        for handler in self._http.connections:
            if handler.transport is not None:
                sockets.append(handler.transport.get_extra_info("socket"))
        nothing = os.open(os.devnull, os.O_RDWR)
        for sock in sockets:
            if sock is not None and sock.fileno() >= 0:
                os.dup2(nothing, sock.fileno(), inheritable=False)
        os.close(nothing)


_stores: weakref.WeakSet[MemoryStore] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for store in tuple(_stores):
        store.leave_to_parent()


in_child(_leave_all_to_parent)


def _headed(found: MemoryObject, wanted: range | None) -> web.StreamResponse:
    headers = {
        hdrs.ACCEPT_RANGES: "bytes",
        hdrs.CONTENT_TYPE: "application/octet-stream",
        hdrs.ETAG: found.tag,
        MODIFIED_HEADER: repr(found.modified_s),
    }
    nbytes = found.nbytes
    if wanted is not None:
        headers[hdrs.CONTENT_RANGE] = f"bytes {wanted.start}-{wanted.stop - 1}/{nbytes}"
    response = web.StreamResponse(status=200 if wanted is None else 206, headers=headers)
    response.content_length = nbytes if wanted is None else len(wanted)
    return response


def _refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    response = web.Response(status=status, text=f"{reason}\n", headers=headers)
    if status == 503:
        response.headers[hdrs.RETRY_AFTER] = "1"
    return response


def _seconds(text: str | None) -> float:
    """Parse how long a client wants to wait; 0 if it does not."""
    if text is None:
        return 0.0
    try:
        return max(0.0, min(float(text), _WAIT_S_MAX))
    except ValueError as error:
        raise RequestError(400, f"{WAIT_HEADER} is a number of seconds") from error


def _tls(certificate: str, key: str) -> ssl.SSLContext | None:
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise UsageError("TLS needs both a certificate and its key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(f"the certificate {certificate} and its key {key}: {reason}") from error
    return context
