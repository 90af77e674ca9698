"""The HTTP status and retry delay behind the errors of Python's HTTP libraries.

Scope: reads the attributes used by aiohttp, botocore, requests, urllib, gcsfs and the Azure
libraries, without importing any of them.
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
    """An HTTP error response. ``retry_after_s`` is the delay the server asks for; None if it does
    not."""

    status: int
    retry_after_s: float | None = None


def answer_of(error: BaseException) -> Answer | None:
    """Return the response behind ``error`` or the nearest of its causes that has one; 4xx and 5xx
    only."""
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
    """Yield the error and its chain of causes."""
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
    """Parse the header, given as seconds or a date. Returns None for anything else."""
    get = getattr(headers, "get", None)
    value = str((get("Retry-After") or get("retry-after") or "") if callable(get) else "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
