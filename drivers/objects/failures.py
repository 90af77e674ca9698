"""From what obstore, or the store behind it, says to the error that a handler can act on. Nothing secret passes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import (
    AccessError,
    BusyError,
    DamagedError,
    ExistsError,
    FullError,
    NotFoundError,
    StorageDownError,
    StorageError,
)

__all__ = ["failures", "missing_container", "translated"]

_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS = re.compile(r"status(?:[ _]code)?[:\s]+(\d{3})\b", re.IGNORECASE)
_MESSAGE = re.compile(r"<Message>\s*([^<]{1,200})</Message>")
_QUERY = re.compile(r"(?<=://)([^\s?\"'\\)>]+)\?[^\s\"'\\)>]+")

_TOLD = re.compile(
    r"((?:authorization|cookie|[\w-]*(?:token|secret|password|signature)[\w-]*)\\?[\"']?[ \t]*[:>][ \t]*)[^\n\\<]+",
    re.I,
)
"""What a gateway in debug mode says back of what it was told."""

_MISSING = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_BUSY = {
    "SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequests",
    "ServerBusy", "rateLimitExceeded", "OperationAborted",
}  # fmt: skip
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "AccountQuotaExceeded"}
_ACCESS = {
    "AccessDenied": "The credentials are good, but do not allow this: look at the policies of user and bucket.",
    "InvalidAccessKeyId": "The store does not know this access key: which profile, environment or role is it from?",
    "SignatureDoesNotMatch": "The secret key is not the one that belongs to the access key.",
    "ExpiredToken": "The session token has expired: get a new one.",
    "RequestTimeTooSkewed": "The clock of this host is wrong.",
}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_DOWN = ("timed out", "timeout", "error sending request", "connect", "connection", "reset", "broken pipe", "incomplete",
         "error decoding response", "request error", "http error", "deadline")  # fmt: skip


@contextmanager
def failures(doing: str, uri: str, key: str) -> Iterator[None]:
    """Turn what obstore raises in the body into the error of its kind. ``doing`` begins the message: "read", say.
    A StorageError or DamagedError passes unchanged, and so does what is not obstore's."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (StorageError, DamagedError):
        raise
    except (BaseError, OSError, NotImplementedError, ValueError) as error:
        raise translated(error, doing, uri, key) from _clean(error)


def translated(error: BaseException, doing: str, uri: str, key: str) -> StorageError:
    """The error of ours for ``error``, which obstore raised. Its cause is left to the caller."""
    text, name = str(error), type(error).__name__
    code = match[1] if (match := _CODE.search(text)) else ""
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    where: dict[str, Any] = {"uri": uri, "key": key}
    if code in _MISSING:
        return missing_container(uri, key)
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        return NotFoundError("no such object", **where)
    if name in ("AlreadyExistsError", "PreconditionError"):
        return ExistsError("object exists already", **where)
    return _refusal(f"{doing} failed: {_reason(text, code, status)}", text, name, code, status, where)


def missing_container(uri: str, key: str | None = None) -> StorageError:
    """The bucket, or container, itself is not there: no sign that nothing was saved."""
    advice = "Create it, or look for a slip in its name, the endpoint, the region, or the account."
    return StorageError("the bucket (or container) does not exist", uri=uri, key=key, advice=advice)


def _refusal(message: str, text: str, name: str, code: str, status: int, where: dict[str, Any]) -> StorageError:
    if code in _FULL or status == 507:
        return FullError(message, **where, advice="Raise the quota, or keep fewer checkpoints.")
    if code in _REGION or status in (301, 307):
        return StorageError(message, **where, advice="The bucket is in another region: name it, ?region=….")
    if code in _BUSY or status in (429, 503):
        return BusyError(message, **where, advice="The store asks for fewer requests: lower ?concurrency=….")
    if code in _ACCESS or name in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        advice = _ACCESS.get(code, "Which credentials were used, and what do the store's policies allow them?")
        return AccessError(message, **where, advice=advice)
    if status >= 500 or (not status and any(sign in text.lower() for sign in _DOWN)):
        return StorageDownError(message, **where, advice="Is the endpoint right, and can this host reach it?")
    return StorageError(message, **where)


def _reason(text: str, code: str, status: int) -> str:
    """In a few words, from the store's own where it has sent some."""
    said = match[1].strip() if (match := _MESSAGE.search(text)) else ""
    told = ", ".join(filter(None, [code, f"status {status}" if status else "", said]))
    reason = told or _QUERY.sub(r"\1", text.partition("Debug source:")[0])
    return " ".join(_TOLD.sub(r"\1…", reason).split())[:300]


def _clean(error: BaseException) -> BaseException:
    """The same error without the queries of URLs, where some stores carry signatures, and without the secrets that a
    store has said back."""
    text = _TOLD.sub(r"\1…", _QUERY.sub(r"\1?…", str(error)))
    try:
        return type(error)(text)
    except TypeError:  # a class that wants more than a message
        return StorageError(text)
