"""``MemoryStore``: an object store in the memory of a process, for ``peer://…?store=on``.

No client without the token makes it receive a body.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Self

from aiohttp import hdrs, web

from ...core.forks.renewal import in_child
from ...drivers.contract import ObjectInfo, check_key
from ...drivers.peer.driver import SIZE_HEADER, WAIT_HEADER
from ...drivers.peer.driver import token as checked_token
from ...errors import (
    DamagedError,
    ExistsError,
    FullError,
    HoldfastError,
    NotFoundError,
    UsageError,
)
from .connections import Connection
from .objects import ObjectMemory
from .options import ServeOptions, address_and_port, interface_and_port, new_token
from .requests import RequestError, asked_of
from .server import GRACE_S, HttpServer, listing

_WAIT_S_MAX = 3600.0
_UPLOAD = re.compile(r"/v1/upload/([0-9a-f]{32})(?:/(.+))?", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_STATUS = {NotFoundError: 404, ExistsError: 412, FullError: 507, DamagedError: 400}


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
        options = ServeOptions(
            self.token, interface, port, certificate, key, connections_max=connections_max
        )
        self._server = HttpServer(self._answered, options, lingering_s=GRACE_S)
        self._budget_nbytes = budget_nbytes
        self._idle_s = upload_idle_s
        self._process = os.getpid()
        self._began: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, name="holdfast-store", daemon=True)

    @property
    def uri(self) -> str:
        """URI for drivers, without the token. Only valid in the block."""
        where = address_and_port(self._server.address, self._began.result())
        return f"peer://{where}/?store=on" + ("&tls=on" if self._server.options.certificate else "")

    @property
    def used_nbytes(self) -> int:
        """Bytes of the budget in use. Only valid in the block; safe on any thread."""
        return self._memory.used_nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes of objects sent so far. Safe on any thread."""
        return self._server.served.nbytes

    def __enter__(self) -> Self:
        """Start to listen. Raises UsageError if the address cannot be used."""
        self._thread.start()
        try:
            self._began.result()
        except OSError as error:
            reason = error.strerror or error
            where = self._server.address
            raise UsageError(f"a store cannot listen on {where}: {reason}") from error
        _servers.add(self._server)
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
        async with self._server:
            self._began.set_result(self._server.port)
            while not self._end.is_set():
                self._memory.expire()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._end.wait(), self._idle_s / 4)
            self._memory.end_waits()

    async def _answered(
        self, request: web.BaseRequest, connection: Connection
    ) -> web.StreamResponse:
        self._server.authenticate(request, connection)
        try:
            return await self._authorized(request, connection)
        except HoldfastError as error:
            raise RequestError(_STATUS.get(type(error), 500), error.message) from error

    async def _authorized(
        self, request: web.BaseRequest, connection: Connection
    ) -> web.StreamResponse:
        method = request.method
        upload = _UPLOAD.fullmatch(request.raw_path)
        if upload is not None:
            return await self._use_upload(request, upload[1], upload[2] or "")
        asked = asked_of(request.raw_path)
        if asked.what == "list" and method in (hdrs.METH_GET, hdrs.METH_HEAD):
            return listing(self._below(asked.key))
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
                async with asyncio.timeout(self._server.options.quiet_s):
                    data = await request.content.readany()
                if not data:
                    raise ConnectionResetError("the body is cut short")
                memory[filled : filled + len(data)] = data
                filled += len(data)
            yield memory

    def _below(self, prefix: str) -> list[ObjectInfo]:
        found = [(key, self._memory.objects[key]) for key in self._memory.below(prefix)]
        return [ObjectInfo(key, one.nbytes, one.modified_s) for key, one in found]

    async def _send_object(
        self, request: web.BaseRequest, connection: Connection, key: str
    ) -> web.StreamResponse:
        known = request.headers.get(hdrs.IF_NONE_MATCH)
        if wait_s := _seconds(request.headers.get(WAIT_HEADER)):
            await self._memory.changed(key, known, wait_s)
        with self._memory.open(key) as found:
            if found.tag == known:
                return web.Response(status=304, headers={hdrs.ETAG: found.tag})
            send = self._server.send
            return await send(request, connection, found.parts, found.modified_s, found.tag)


_servers: weakref.WeakSet[HttpServer] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for server in tuple(_servers):
        server.leave_to_parent()


in_child(_leave_all_to_parent)


def _seconds(text: str | None) -> float:
    """Parse how long a client wants to wait; 0 if it does not."""
    if text is None:
        return 0.0
    try:
        return max(0.0, min(float(text), _WAIT_S_MAX))
    except ValueError as error:
        raise RequestError(400, f"{WAIT_HEADER} is a number of seconds") from error
