"""What an HTTP server answered, from the errors that Python's libraries make of it: the status, and
when to come back.

Scope: attributes that aiohttp, botocore, requests, urllib, gcsfs and Azure's libraries have,
without importing any of them.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "answer_of", "causes"]


@dataclass(frozen=True, slots=True)
class Answer:
    """``retry_after_s``: in how many seconds the server wants to be asked again; None where it did
    not say."""

    status: int
    retry_after_s: float | None = None


def answer_of(error: BaseException) -> Answer | None:
    """The answer that ``error``, or the nearest of its causes that tells of one, is made of. 4xx
    and 5xx alone."""
    for one in causes(error):
        answer = getattr(one, "response", None)
        if isinstance(answer, Mapping):  # botocore
            answer = answer.get("ResponseMetadata")
        for source in (answer, one):
            status, headers = _status_and_headers(source)
            if isinstance(status, int) and 400 <= status < 600:
                return Answer(status, _retry_after_s(headers))
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def _status_and_headers(source: Any) -> tuple[Any, Any]:
    if isinstance(source, Mapping):
        return source.get("HTTPStatusCode"), source.get("HTTPHeaders")
    statuses = (getattr(source, name, None) for name in ("status_code", "status", "code"))
    return next((s for s in statuses if isinstance(s, int)), None), getattr(source, "headers", None)


def _retry_after_s(headers: Any) -> float | None:
    """Seconds, or a date; what is neither says nothing."""
    get = getattr(headers, "get", None)
    value = str((get("Retry-After") or get("retry-after") or "") if callable(get) else "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
