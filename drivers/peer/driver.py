"""``peer://host:port/run/step-00000500``: read-only access to the memory of a keeper on another
host.

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
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPResponse
from itertools import pairwise
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote_from_bytes, urlsplit

from ...core.aio import to_the_end
from ...errors import DamagedError, HoldfastError, StorageDownError, StorageError, UriError
from ..contract import (
    Buffer,
    Driver,
    ObjectInfo,
    ReadOnly,
    TakePiece,
    Traits,
    check_key,
    check_small,
)
from ..options import Option, duration, integer, option_values, switch
from ..pieces import Rooms, piece_ends
from ..threads import Threads
from ..uri import Uri, root_key
from .connections import Connections, Request, failures, refusal

MODIFIED_HEADER = "X-Holdfast-Modified"
LIST_NBYTES_MAX = 256 << 20
"""Longest listing accepted: about a million objects."""
CLOSE_TIMEOUT_S = 60.0

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


class PeerDriver(ReadOnly, Driver):
    """Objects below one key of a keeper. Every writing method raises StorageError."""

    reading_only: ClassVar[str] = "peer:// is read-only"
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "token": Option(token, "", "token of the run; never in the URI: set HOLDFAST_PEER_TOKEN"),
        "tls": Option(switch, False, "whether the keeper speaks TLS"),
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
            exclusive_is_atomic=False,
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
            with self._answer(request, "get", key, "GET", target) as response:
                check_small(self._nbytes(response, key), self.uri, key)
                return bytes(self._body(request, response, key))

        return await self._run("get", key, get)

    async def stat(self, key: str) -> ObjectInfo:
        target = self._target(key)

        def stat(request: Request) -> ObjectInfo:
            with self._answer(request, "stat", key, "HEAD", target) as response:
                modified_s = _seconds(response.getheader(MODIFIED_HEADER))
                return ObjectInfo(key, self._nbytes(response, key), modified_s)

        return await self._run("stat", key, stat)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        target = f"/v1/list?prefix={self._quoted(prefix)}"

        def list_all(request: Request) -> bytearray:
            with self._answer(request, "list", prefix, "GET", target) as response:
                nbytes = self._nbytes(response, prefix)
                if nbytes > LIST_NBYTES_MAX:
                    raise self._senseless(f"a list of {nbytes:,} bytes", prefix)
                return self._body(request, response, prefix)

        for line in (await self._run("list", prefix, list_all)).splitlines():
            info = self._info(line)
            if not prefix or info.key == prefix or info.key.startswith(prefix + "/"):
                yield info

    async def close(self) -> None:
        try:
            await self._threads.close(CLOSE_TIMEOUT_S)
        finally:
            self._connections.close()

    async def _run(self, doing: str, key: str, call: Callable[[Request], T]) -> T:
        """Run ``call`` in a thread. On cancellation, cut the request and wait for the thread, which
        uses the caller's memory."""
        request = Request()
        task = asyncio.ensure_future(self._threads.run(call, request))

        def cut() -> None:
            task.cancel()
            request.cut()

        with failures(doing, self.uri, key):
            return await to_the_end(task, on_cancel=cut)

    @contextmanager
    def _answer(
        self, request: Request, doing: str, key: str, method: str, target: str, **headers: str
    ) -> Iterator[HTTPResponse]:
        """Yield the head of a successful response. Blocks. Raises StorageError for any other
        response, in addition to connection errors."""
        wanted = 206 if "Range" in headers else 200
        refused: HoldfastError | None = None
        with self._connections.answer(request, method, target, headers) as response:
            if response.status == wanted:
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

        def read(request: Request) -> None:
            with self._answer(request, "read", key, "GET", target, Range=asked) as response:
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
            f"the keeper answers with {what}",
            uri=self.uri,
            key=key or None,
            advice="Is it another version, or a different server?",
        )


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
