"""Translation of errors from fsspec's file systems into Holdfast's errors.

Some raise an OSError with an errno, some a subclass without one, and some the errors of their
library.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...errors import (
    AccessError,
    BusyError,
    ExistsError,
    FullError,
    HoldfastError,
    NotFoundError,
    StorageDownError,
    StorageError,
)
from ..local.errors import storage_errors
from ..uri import redact

_VAGUE = (StorageError, NotFoundError)
"""Classes that are too vague to trust if a cause of the error is more specific."""

# Most specific first. The TimeoutError of asyncio, and so of fsspec, is the built-in one.
_BY_CLASS: tuple[tuple[type[BaseException], type[StorageError]], ...] = (
    (IsADirectoryError, NotFoundError),
    (FileNotFoundError, NotFoundError),
    (FileExistsError, ExistsError),
    (PermissionError, AccessError),
    (TimeoutError, StorageDownError),
    (ConnectionError, StorageDownError),
)
_BY_NAME = (
    (("Credential", "Auth", "Forbidden", "Denied", "HostKey"), AccessError),
    (
        ("Connect", "Timeout", "SSHException", "EOFError", "Unavailable", "Disconnected"),
        StorageDownError,
    ),
)
_NO_KEY = "No authentication methods available"
"""Message of paramiko when there is no key to offer; the error's class stands for all kinds of
failures."""


@contextmanager
def fsspec_errors(doing: str, uri: str, key: str) -> Iterator[None]:
    """Translate any error of the body into the best-matching StorageError, with ``uri`` (redacted),
    ``key`` and cause. ``doing`` starts the message. Holdfast's own errors pass unchanged."""
    try:
        with storage_errors(doing, uri, key):
            yield
    except StorageError as error:
        cause = error.__cause__
        if type(error) not in _VAGUE or not isinstance(cause, OSError):
            raise
        kind = _kind_of(cause)
        if kind is None or kind is type(error):
            raise
        raise _made(kind, doing, uri, key, cause) from cause
    except HoldfastError:
        raise
    except Exception as error:
        raise _made(_kind_of(error) or StorageError, doing, uri, key, error) from error


def _kind_of(error: BaseException) -> type[StorageError] | None:
    answer = _answer_of(error)
    if answer is not None and (kind := _of_status(answer[0])):
        return kind
    if isinstance(error, FileNotFoundError) and any(
        _by_kind(one) is StorageDownError for one in _causes(error)
    ):
        return StorageDownError  # some file systems report every failed lookup as absence
    return _by_kind(error)


def _of_status(status: int) -> type[StorageError] | None:
    if status in (401, 403):
        return AccessError
    if status in (429, 503):
        return BusyError
    if status == 507:
        return FullError
    if status >= 500:
        return StorageDownError
    return None


def _by_kind(error: BaseException) -> type[StorageError] | None:
    kind = next((kind for cls, kind in _BY_CLASS if isinstance(error, cls)), None)
    if kind is not None:
        return kind
    if str(error) == _NO_KEY:
        return AccessError
    names = " ".join(cls.__name__ for cls in type(error).__mro__)
    return next((kind for words, kind in _BY_NAME if any(word in names for word in words)), None)


def _made(
    kind: type[StorageError], doing: str, uri: str, key: str, error: BaseException
) -> StorageError:
    text = redact(str(error)).strip().partition("\n")[0]
    message = f"{doing} failed: {type(error).__name__}" + (f": {text}" if text else "")
    if kind is BusyError:
        answer = _answer_of(error)
        retry_after_s = answer[1] if answer else None
        return BusyError(message, uri=uri, key=key, retry_after_s=retry_after_s)
    return kind(message, uri=uri, key=key)


def _answer_of(error: BaseException) -> tuple[int, float | None] | None:
    """Return the status and the requested delay in seconds of the HTTP error (4xx or 5xx) behind
    ``error`` or its nearest cause that has one."""
    for one in _causes(error):
        answer = getattr(one, "response", None)
        if isinstance(answer, Mapping):  # botocore
            answer = answer.get("ResponseMetadata")
        for source in (answer, one):
            status, headers = _status_and_headers(source)
            if isinstance(status, int) and 400 <= status < 600:
                return status, _retry_after_s(headers)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
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
