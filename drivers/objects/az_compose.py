"""Uploads to Azure with copies (Put Block From URL), by urllib, because obstore cannot.

Each request has a connection of its own, and a URL that is signed for one blob. Whoever reads such
a URL can use it, so errors never contain one.
"""

from __future__ import annotations

import base64
import http.client
import re
import secrets
import ssl
import time
import urllib.error
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from ...errors import StorageDownError, StorageError
from ..contract import Buffer, Driver
from ..threads import Threads
from .compose import ComposedUpload
from .errors import translated
from .trust import TRUST
from .uploads import Target

BLOCKS_MAX = 50_000
SIGNED_S = 3600.0
"""Validity of a signed URL, in seconds. It is replaced after half of this time."""
_VERSION = "2023-11-03"
_CODE = re.compile(rb"<Code>\s*(\w{1,80})\s*</Code>")
_ERROR_NBYTES = 64 << 10
_EARLY = re.compile("AuthenticationFailed|CannotVerifyCopySource, status 403")
"""Refusals of a signed URL that is not valid yet, since the store's clock is behind this host's."""
_PAUSES_S = (0.2, 1.0, 4.0)
"""Seconds before each further attempt of a request that has failed temporarily."""


def hides_signatures(endpoint: str) -> bool:
    """Return whether nobody can read signed URLs on the way to ``endpoint``."""
    server = urlsplit(endpoint)
    return server.scheme == "https" or server.hostname in ("localhost", "127.0.0.1", "::1")


def opener(ca: str | None, proxy: str) -> OpenerDirector:
    """Return urllib's client. It trusts the authorities in the file ``ca``."""
    handlers = [HTTPSHandler(context=ssl.create_default_context(cafile=ca))]
    proxies = [ProxyHandler({"http": proxy, "https": proxy})] if proxy else []
    return build_opener(*handlers, *proxies)


def _failure(error: Exception, doing: str, target: Target) -> StorageError:
    where: dict[str, Any] = {"uri": target.uri, "key": target.key}
    if isinstance(error, urllib.error.HTTPError):
        with error:
            code = _CODE.search(error.read(_ERROR_NBYTES))
        stated = f"<Code>{code[1].decode()}</Code>" if code else ""
        return translated(RuntimeError(f"{stated} status {error.code}"), doing, **where)
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLError):
        message = f"{doing} failed: the server's certificate is not trusted: {reason}"
        return StorageError(message, **where, advice=TRUST)
    if not isinstance(reason, OSError):
        reason = type(reason).__name__
    return StorageDownError(f"{doing} failed: {reason}", **where)


class AzureComposedUpload(ComposedUpload):
    """An upload to Azure with copies. The store discards its blocks a week after an abort."""

    def __init__(
        self,
        target: Target,
        sign: Callable[[str, str], Awaitable[str]],
        path_of: Callable[[Driver, str], str],
        send: Callable[[Request], Any],
        threads: Threads,
    ) -> None:
        """``sign`` returns a URL for requests with a method, for a blob of this container;
        ``path_of`` returns the blob of another driver's key; ``send`` is urllib's ``open``."""
        super().__init__(target)
        self._sign = sign
        self._path_of = path_of
        self._send = send
        self._threads = threads
        self._urls: dict[tuple[str, str], tuple[str, float]] = {}
        """Signed URLs, and until when they are used."""

    async def _url(self, method: str, path: str) -> str:
        url, until_s = self._urls.get((method, path), ("", 0.0))
        if time.monotonic() >= until_s:
            url = await self._sign(method, path)
            self._urls[method, path] = url, time.monotonic() + SIGNED_S / 2
        return url

    async def _put(
        self, doing: str, query: Mapping[str, str], data: Buffer | bytes, **headers: str
    ) -> None:
        """Send a request about this upload. ``doing`` starts messages."""
        url = f"{await self._url('PUT', self._target.place[-1])}&{urlencode(query)}"
        headers |= {"Content-Type": "application/octet-stream", "x-ms-version": _VERSION}
        headers |= {"Content-Length": str(len(data))}
        request = Request(url, data, headers, method="PUT")

        def put() -> None:
            for pause_s in (*_PAUSES_S, None):
                try:
                    with self._send(request) as answer:
                        answer.read()
                    return
                except (OSError, http.client.HTTPException) as error:
                    failure = _failure(error, doing, self._target)
                if pause_s is None or not (failure.temporary or _EARLY.search(failure.message)):
                    raise failure
                time.sleep(pause_s)

        await self._threads.run(put)

    async def _begin(self) -> None:
        """Only the first block creates something."""

    async def _send_part(self, number: int, data: Buffer) -> str:
        if not data:
            return ""
        block = _new_block(number)
        await self._put("write", {"comp": "block", "blockid": block}, data)
        return block

    async def _copy_part(self, number: int, source: Driver, key: str, start: int, stop: int) -> str:
        block = _new_block(number)
        url = await self._url("GET", self._path_of(source, key))
        headers = {"x-ms-copy-source": url, "x-ms-source-range": f"bytes={start}-{stop - 1}"}
        await self._put("copy", {"comp": "block", "blockid": block}, b"", **headers)
        return block

    async def _complete(self, tags: dict[int, str]) -> None:
        blocks = "".join(f"<Latest>{block}</Latest>" for block in tags.values() if block)
        data = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{blocks}</BlockList>'
        await self._put("commit", {"comp": "blocklist"}, data.encode())

    async def _drop(self) -> bool:
        return True


def _new_block(number: int) -> str:
    """Return a name that no other block has. It is as long as obstore's: the store requires equal
    lengths of all blocks of a blob."""
    return base64.b64encode(f"{secrets.token_hex(12)}{number:08x}".encode()).decode()
