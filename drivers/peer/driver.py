"""``peer://host:port/run/step-00000500``: access to the memory of another process: read-only to a
keeper's, and with ``?store=on`` also writing, to a ``MemoryStore``.

Blocking threads receive responses directly into the caller's memory: image ranges are large, and
Python's own client uses the least CPU for them. A cancelled request is cut at its socket, so it
never waits for a dead host.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPResponse
from itertools import pairwise
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote_from_bytes, urlsplit

from ...core.aio import side_by_side, to_the_end
from ...errors import (
    DamagedError,
    HoldfastError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UriError,
)
from ..contract import (
    AtMost,
    Buffer,
    Driver,
    ObjectInfo,
    TakePiece,
    Traits,
    Upload,
    UploadLostError,
    check_key,
    check_small,
)
from ..options import Option, duration, integer, option_values, switch
from ..pieces import Rooms, piece_ends
from ..ranges import Ranges
from ..threads import Threads
from ..uri import Uri, root_key
from ..watching import news, poll
from .connections import Connections, Question, Request, failures, refusal

MODIFIED_HEADER = "X-Holdfast-Modified"
SIZE_HEADER = "X-Holdfast-Nbytes"
"""Size of an upload: the declared one, or 0 if it will probably be smaller, and at its commit the
final one."""
WAIT_HEADER = "X-Holdfast-Wait"
"""Time limit, in seconds, of waiting for an object whose tag differs from ``If-None-Match``;
without a tag, for any object."""
LIST_NBYTES_MAX = 256 << 20
"""Longest listing accepted: about a million objects."""
CLOSE_TIMEOUT_S = 60.0
_WATCHES_MAX = 16
"""Watches at a time, each with a thread. Further ones wait for a turn."""

_PIECE_NBYTES = 1 << 20
_SAFE = "/"
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_SIZE = re.compile(r"bytes \*/(\d{1,18})", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,256}", re.ASCII)

T = TypeVar("T")


def token(text: str) -> str:
    """Parse the token that authenticates requests for a run. Raises ValueError, which does not
    repeat the token."""
    if text and not _TOKEN.fullmatch(text):
        raise ValueError("must be up to 256 letters, digits and characters of -._~+/=")
    return text


class PeerDriver(Driver):
    """Objects below one key of a keeper, or of a store. Without ``?store=on``, every writing method
    raises StorageError before any I/O."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "token": Option(token, "", "token of the run; never in the URI: set HOLDFAST_PEER_TOKEN"),
        "store": Option(switch, False, "whether the server is a MemoryStore, which can be written"),
        "tls": Option(switch, False, "whether the server speaks TLS"),
        "ca": Option(str, "", "PEM file of certificate authorities to trust instead"),
        "concurrency": Option(integer(1, 64), 4, "requests in flight, each in a thread"),
        "timeout": Option(duration(0.1, 3600), 30.0, "time limit of silence"),
    }

    def __init__(self, uri: Uri, values: Mapping[str, Any]) -> None:
        """Take one value for each of OPTIONS. Raises UriError if the URI names no keeper."""
        self.uri = uri.root
        authority, _, path = uri.location.partition("/")
        host, port = _address(authority, uri)
        self._prefix = root_key(path, uri)
        self.traits = Traits(
            part_nbytes=16 << 20,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=values["concurrency"],
            coalesce_nbytes=256 << 10,
            part_order="any",
            exclusive_is_atomic=values["store"],
            shared=True,
            piece_nbytes=_PIECE_NBYTES,
        )
        headers = {"User-Agent": "holdfast"}
        if values["token"]:
            headers["Authorization"] = f"Bearer {values['token']}"
        self._connections = Connections(
            host,
            port,
            timeout_s=values["timeout"],
            tls=_tls(values["ca"], uri) if values["tls"] else None,
            headers=headers,
        )
        self._threads = Threads(values["concurrency"], uri=self.uri)
        self._rooms = Rooms(_PIECE_NBYTES)
        self._is_store: bool = values["store"]
        self._wait_s: float = values["timeout"] / 2
        self._watchers = Threads(_WATCHES_MAX, uri=self.uri)
        self._watches: set[Request] = set()
        self._uploads: set[_PeerUpload] = set()

    @classmethod
    def open(cls, uri: Uri) -> PeerDriver:
        """Return the driver for ``uri``. Raises UriError for an unknown option or an invalid
        value."""
        return cls(uri, option_values(cls.OPTIONS, uri))

    async def read(self, key: str, start: int, into: Buffer) -> None:
        def receive(request: Request, response: HTTPResponse) -> None:
            request.fill(response, into)

        await self._read(key, start, len(into), receive)

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """See :meth:`Driver.read_pieces`. Each piece is taken while it is in the CPU cache."""

        def receive(request: Request, response: HTTPResponse) -> None:
            with self._rooms.room() as room:
                for begin, end in pairwise(piece_ends(start, nbytes, _PIECE_NBYTES)):
                    piece = memoryview(room)[: end - begin]
                    request.fill(response, piece)
                    request.check()
                    take(piece)

        await self._read(key, start, nbytes, receive)

    async def get(self, key: str) -> bytes:
        target = self._target(key)

        def get(request: Request) -> bytes:
            with self._answer(request, "get", key, Question("GET", target)) as response:
                check_small(self._nbytes(response, key), self.uri, key)
                return bytes(self._body(request, response, key))

        return await self._run("get", key, get)

    async def watch(self, key: str, known: bytes | None, timeout_s: float) -> bytes | None:
        """See :meth:`Driver.watch`. A store answers as soon as the object changes; a keeper is
        polled."""
        target = self._target(key)
        end_s = time.monotonic() + timeout_s
        tag: str | None = None
        may_wait = known is None

        def look(request: Request) -> bytes:
            nonlocal tag, may_wait
            headers = {}
            if may_wait:
                left_s = min(max(0.0, end_s - time.monotonic()), self._wait_s)
                headers[WAIT_HEADER] = f"{left_s:.3f}"
            if tag is not None:
                headers["If-None-Match"] = tag
            may_wait = True
            question = Question("GET", target, headers)
            with self._answer(request, "watch", key, question, also=304) as response:
                if response.status == 304:
                    return known or b""
                check_small(self._nbytes(response, key), self.uri, key)
                tag = response.getheader("ETag")
                return bytes(self._body(request, response, key))

        async def get() -> bytes:
            nonlocal tag
            try:
                return await self._run("watch", key, look, watches=True)
            except NotFoundError:
                tag = None
                raise

        return await poll(lambda: news(get, known), timeout_s)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        headers = {"If-None-Match": "*"} if exclusive else {}
        question = Question("PUT", self._target(key), headers, memoryview(data), once=exclusive)
        await self._change("put", key, question)

    async def create(self, key: str, nbytes: int) -> Upload:
        """See :meth:`Driver.create`. The store drops an upload that receives nothing for some
        minutes."""
        self._check_store(key)
        upload = _PeerUpload(self, key, nbytes)
        self._uploads.add(upload)
        try:
            await upload.begin()
        except BaseException:
            await upload.abort()
            raise
        return upload

    async def delete(self, key: str) -> None:
        await self._change("delete", key, Question("DELETE", self._target(key)))

    async def delete_all(self, prefix: str) -> None:
        check_key(prefix, uri=self.uri)
        target = f"/v1/list?prefix={self._quoted(prefix)}"
        await self._change("delete", prefix, Question("DELETE", target))

    async def sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. Does nothing: the store itself drops dead uploads."""
        self._check_store(prefix)
        self._threads.check_open()

    async def stat(self, key: str) -> ObjectInfo:
        target = self._target(key)

        def stat(request: Request) -> ObjectInfo:
            with self._answer(request, "stat", key, Question("HEAD", target)) as response:
                modified_s = _seconds(response.getheader(MODIFIED_HEADER))
                return ObjectInfo(key, self._nbytes(response, key), modified_s)

        return await self._run("stat", key, stat)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        target = f"/v1/list?prefix={self._quoted(prefix)}"

        def list_all(request: Request) -> bytearray:
            with self._answer(request, "list", prefix, Question("GET", target)) as response:
                nbytes = self._nbytes(response, prefix)
                if nbytes > LIST_NBYTES_MAX:
                    raise self._senseless(f"a list of {nbytes:,} bytes", prefix)
                return self._body(request, response, prefix)

        for line in (await self._run("list", prefix, list_all)).splitlines():
            info = self._info(line)
            if not prefix or info.key == prefix or info.key.startswith(prefix + "/"):
                yield info

    async def close(self) -> None:
        """See :meth:`Driver.close`. Aborts uploads that are neither committed nor aborted."""
        await side_by_side(*(upload.abort() for upload in tuple(self._uploads)))
        for request in tuple(self._watches):
            request.cut()
        try:
            await self._watchers.close(CLOSE_TIMEOUT_S)
            await self._threads.close(CLOSE_TIMEOUT_S)
        finally:
            self._connections.close()

    async def _run(
        self,
        doing: str,
        key: str,
        call: Callable[[Request], T],
        *,
        may_cut: bool = True,
        watches: bool = False,
    ) -> T:
        """Run ``call`` in a thread. On cancellation, cut the request unless ``may_cut`` is false,
        and wait for the thread, which uses the caller's memory."""
        request = Request()
        if watches:
            self._watches.add(request)
        threads = self._watchers if watches else self._threads
        task = asyncio.ensure_future(threads.run(call, request))

        def cut() -> None:
            if may_cut:
                task.cancel()
                request.cut()

        try:
            with failures(doing, self.uri, key):
                return await to_the_end(task, on_cancel=cut)
        finally:
            self._watches.discard(request)

    async def _change(
        self, doing: str, key: str, question: Question, *, may_cut: bool = False
    ) -> None:
        """Send a changing request. Unless it ``may_cut`` the request, a cancellation waits for the
        outcome: the server could still obey a cut request after the caller's next one."""
        self._check_store(key)

        def change(request: Request) -> None:
            with self._answer(request, doing, key, question):
                pass

        await self._run(doing, key, change, may_cut=may_cut)

    def _check_store(self, key: str) -> None:
        check_key(key, uri=self.uri)
        if not self._is_store:
            raise StorageError(
                "keepers are read-only",
                uri=self.uri,
                key=key,
                advice="Save to another URI. If a MemoryStore listens there, add ?store=on.",
            )

    @contextmanager
    def _answer(
        self, request: Request, doing: str, key: str, question: Question, also: int | None = None
    ) -> Iterator[HTTPResponse]:
        """Yield the head of a successful response, or of one with the status ``also``. Blocks.
        Raises StorageError for any other response, in addition to connection errors."""
        wanted = 206 if "Range" in question.headers else 200
        refused: HoldfastError | None = None
        with self._connections.answer(request, question) as response:
            if response.status in (wanted, also):
                yield response
            else:
                refused = self._refused(response, doing, key)
        # Outside the block, so that the connection is kept for reuse.
        if refused is not None:
            raise refused

    def _refused(self, response: HTTPResponse, doing: str, key: str) -> HoldfastError:
        if response.status == 416:
            size = _SIZE.fullmatch(response.getheader("Content-Range") or "")
            return self._short(int(size[1]) if size else None, key)
        retry_after = response.getheader("Retry-After")
        return refusal(response.status, retry_after, doing, self.uri, key)

    async def _read(
        self, key: str, start: int, nbytes: int, receive: Callable[[Request, HTTPResponse], None]
    ) -> None:
        """Request a range and call ``receive``, in a thread, with a response of exactly these
        bytes."""
        target = self._target(key)
        if not nbytes:
            object_nbytes = (await self.stat(key)).nbytes
            if not 0 <= start <= object_nbytes:
                raise self._short(object_nbytes, key)
            return
        if start < 0:
            raise self._short(None, key)
        asked = f"bytes={start}-{start + nbytes - 1}"

        question = Question("GET", target, {"Range": asked})

        def read(request: Request) -> None:
            with self._answer(request, "read", key, question) as response:
                said = response.getheader("Content-Range") or ""
                match = _RANGE.fullmatch(said)
                if match is None:
                    raise self._senseless(f"the range {said!r}", key)
                first, last, size = map(int, match.groups())
                if size < start + nbytes:
                    raise self._short(size, key)
                if first != start or last != start + nbytes - 1 or response.length != nbytes:
                    raise self._senseless(f"the range {said!r} for {asked!r}", key)
                receive(request, response)

        await self._run("read", key, read)

    def _nbytes(self, response: HTTPResponse, key: str) -> int:
        text = response.getheader("Content-Length") or ""
        if not text.isdecimal() or len(text) > 18:
            raise self._senseless("an answer without a length", key)
        return int(text)

    def _body(self, request: Request, response: HTTPResponse, key: str) -> bytearray:
        data = bytearray(self._nbytes(response, key))
        request.fill(response, memoryview(data))
        return data

    def _info(self, line: bytearray) -> ObjectInfo:
        """Parse one line of a listing. Raises StorageError if it is malformed or not below the
        root."""
        try:
            said = json.loads(line)
            whole, nbytes, modified_s = said["key"], said["nbytes"], said["modified_s"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._senseless("a line that is not an object", "") from error
        root = f"{self._prefix}/" if self._prefix else ""
        if not (
            isinstance(whole, str)
            and whole.startswith(root)
            and type(nbytes) is int
            and 0 <= nbytes < 1 << 63
            and isinstance(modified_s, int | float)
            and math.isfinite(modified_s)
        ):
            raise self._senseless("a line that is not an object of this folder", "")
        try:
            key = check_key(whole.removeprefix(root))
        except UriError as error:
            raise self._senseless("a key that is not a plain path", "") from error
        return ObjectInfo(key, nbytes, float(modified_s))

    def _target(self, key: str) -> str:
        check_key(key, uri=self.uri)
        return f"/v1/object/{self._quoted(key)}"

    def _quoted(self, key: str) -> str:
        if key:
            check_key(key, uri=self.uri)
        whole = "/".join(filter(None, (self._prefix, key)))
        try:
            return quote_from_bytes(os.fsencode(whole), _SAFE)
        except UnicodeEncodeError as error:
            message = f"key {key!r} cannot be encoded"
            raise UriError(message, uri=self.uri, key=key) from error

    def _short(self, nbytes: int | None, key: str) -> DamagedError:
        where = "" if nbytes is None else f" at byte {nbytes}"
        return DamagedError(
            f"the object ends{where} before the requested bytes", uri=self.uri, key=key
        )

    def _senseless(self, what: str, key: str) -> StorageError:
        return StorageDownError(
            f"the server answers with {what}",
            uri=self.uri,
            key=key or None,
            advice="Is it another version, or a different server?",
        )


class _PeerUpload(Upload):
    """Parts that a store keeps under an id until the commit."""

    def __init__(self, driver: PeerDriver, key: str, nbytes: int) -> None:
        self._written = Ranges(nbytes, uri=driver.uri, key=key)
        self._driver = driver
        self._key = key
        self._target = f"/v1/upload/{secrets.token_hex(16)}"
        self._is_committed = False

    async def begin(self) -> None:
        """Make the upload known to the store."""
        size = 0 if isinstance(self._written.nbytes, AtMost) else self._written.nbytes
        target = f"{self._target}/{self._driver._quoted(self._key)}"
        await self._change("create", Question("POST", target, {SIZE_HEADER: f"{size:d}"}))

    async def write(self, start: int, data: Buffer) -> None:
        self._written.check(start, len(data))
        if data:
            question = Question("PUT", f"{self._target}/{start}", data=data)
            await self._change("write", question, may_cut=True)
        self._written.add(start, len(data))

    async def commit(self, nbytes: int | None = None) -> None:
        self._written.check_open()
        self._written.end()
        self._written.check_complete(nbytes)
        headers = {SIZE_HEADER: f"{self._written.nbytes:d}"}
        await self._change("commit", Question("POST", self._target, headers, once=True))
        self._is_committed = True
        self._driver._uploads.discard(self)

    async def abort(self) -> None:
        self._written.end()
        if not self._is_committed:
            with suppress(StorageError):  # unreachable, or closed: the store drops it in time
                await self._change("abort", Question("DELETE", self._target))
        self._driver._uploads.discard(self)

    async def _change(self, doing: str, question: Question, *, may_cut: bool = False) -> None:
        try:
            await self._driver._change(doing, self._key, question, may_cut=may_cut)
        except NotFoundError as error:
            message = f"{doing}: the store does not know the upload: it was dropped, or restarted"
            raise UploadLostError(message, uri=self._driver.uri, key=self._key) from error


def _address(authority: str, uri: Uri) -> tuple[str, int]:
    advice = "Write peer://host:port/run/step; an IPv6 address stands in brackets."
    if "@" in authority:
        raise UriError("peer:// URIs cannot contain a user", uri=uri.redacted, advice=advice)
    try:
        parts = urlsplit(f"//{authority}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        message = f"the address of a keeper: {error}"
        raise UriError(message, uri=uri.redacted, advice=advice) from error
    if not host or not port:
        raise UriError("a keeper has a host and a port", uri=uri.redacted, advice=advice)
    return host, port


def _seconds(text: str | None) -> float:
    """Parse the keeper's modification time, in seconds since the epoch; 0 if missing or invalid."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    if not math.isfinite(seconds):
        return 0.0
    return seconds


def _tls(ca: str, uri: Uri) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or "it contains none in PEM format"
        raise UriError(
            f"the certificates to trust, {ca}: {reason}",
            uri=uri.redacted,
            advice="The option ca names this file.",
        ) from error
