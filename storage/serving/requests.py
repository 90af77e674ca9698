"""Parses HTTP requests into values. No I/O."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote_to_bytes

from ...drivers.contract import check_key
from ...errors import UriError

LIST_PATH = "/v1/list"
OBJECT_PATH = "/v1/object/"
REPORT_PATH = "/v1/report"
"""The only path that accepts POST."""

What = Literal["health", "status", "metrics", "list", "object"]

_PLAIN: dict[str, What] = {"/health": "health", "/status": "status", "/metrics": "metrics"}
# Longer numbers exceed any memory.
_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{1,18})?|-(\d{1,18}))", re.ASCII)


class RequestError(Exception):
    """A rejected request. ``status``: HTTP status code; ``headers`` of the answer."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request. ``key``: an object's key, or the prefix of a listing."""

    what: What
    key: str = ""


def asked_of(target: str) -> Asked:
    """Parse the target of a request line: a path with an optional query. Raises RequestError."""
    path, _, query = target.partition("?")
    if path == LIST_PATH:
        return Asked("list", _prefix(query))
    if query:
        raise RequestError(400, "only a listing takes a query")
    if path.startswith(OBJECT_PATH):
        return Asked("object", _key(path.removeprefix(OBJECT_PATH)))
    if path in _PLAIN:
        return Asked(_PLAIN[path])
    raise RequestError(404, "no such path")


def _prefix(query: str) -> str:
    if not query:
        return ""
    name, equals, text = query.partition("=")
    if name != "prefix" or not equals or "&" in text:
        raise RequestError(400, "a listing takes one parameter, prefix")
    if not text:
        return ""
    return _key(text)


def _key(text: str) -> str:
    try:
        return check_key(os.fsdecode(unquote_to_bytes(text)))
    except (UriError, UnicodeError) as error:
        raise RequestError(400, "that is not a plain relative path") from error


def is_below(key: str, prefix: str) -> bool:
    """Return whether an object is at or below a key; "" for any."""
    return not prefix or key == prefix or key.startswith(prefix + "/")


def range_of(header: str | None, nbytes: int) -> range | None:
    """Return the bytes that a ``Range`` header selects of an object of ``nbytes``; None without a
    header. Raises RequestError: 416 if the object ends before them, 400 for anything but a single
    range of bytes."""
    if header is None:
        return None
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        raise RequestError(400, "only a single range of bytes is served")
    first, last, suffix = match.groups()
    if suffix is not None:
        start = max(0, nbytes - int(suffix))
        stop = nbytes
    else:
        start = int(first)
        stop = nbytes
        if last is not None:
            if int(last) < start:
                raise RequestError(400, "that range ends before it begins")
            stop = min(nbytes, int(last) + 1)
    if start >= stop:
        whole = {"Content-Range": f"bytes */{nbytes}"}
        raise RequestError(416, "the object ends before that range", whole)
    return range(start, stop)


def is_authorized(header: str | None, token: str) -> bool:
    """Return whether the ``Authorization`` header carries ``token``. Compares in constant time."""
    if header is None:
        return False
    kind, _, given = header.partition(" ")
    if kind.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode())
