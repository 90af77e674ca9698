"""Translation of errors from obstore and the stores behind it into Holdfast's errors, with secrets
removed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    UriError,
)
from ..calls import is_panic
from .trust import untrusted

_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS = re.compile(r"status(?:[ _]code)?[:\s]+(\d{3})\b", re.IGNORECASE)
_OF_ONE = re.compile(r"request failed for key [^\n]*\(code: (\w+)\)")
"""Result for one object of a bulk delete: a code or a status."""
_MESSAGE = re.compile(r"<Message>\s*([^<]{1,200})</Message>")
_QUERY = re.compile(r"(?<=://)([^\s?\"'\\)>]+)\?[^\s\"'\\)>]+")

_SECRETS = re.compile(
    r"((?:authorization|cookie|[\w-]*(?:token|secret|password|signature)[\w-]*)"
    r"\\?[\"']?[ \t]*[:>][ \t]*)[^\n\\<]+",
    re.I,
)
"""Secrets of the request, which a gateway in debug mode repeats in its response."""

_MISSING = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_BUSY = {
    "SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "Throttling", "ThrottlingException",
    "TooManyRequests", "ServerBusy", "rateLimitExceeded", "OperationAborted",
}  # fmt: skip
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "Conflict", "conflict"}
"""Codes for a conflict with a concurrent request for the same key: nothing was done, and the object
need not exist."""
_CREDENTIALS = re.compile(
    r"credential|service account|access key|sas key|token|private key|pem file", re.I
)
_QUOTED = re.compile(r"(invalid (?:type|value): ).*?(?=, expected)", re.S)
"""Text that a parser quotes from a malformed file, which may contain secrets."""
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "AccountQuotaExceeded"}
_ACCESS = {
    "AccessDenied": (
        "The credentials are good, but do not allow this: look at the policies of user and bucket."
    ),
    "InvalidAccessKeyId": (
        "The store does not know this access key: which profile, environment or role is it from?"
    ),
    "SignatureDoesNotMatch": "The secret key is not the one that belongs to the access key.",
    "ExpiredToken": "The session token has expired: get a new one.",
    "RequestTimeTooSkewed": "The clock of this host is wrong.",
}
_REGION = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_DOWN = (
    "timed out", "timeout", "error sending request", "connect", "connection", "reset",
    "broken pipe", "incomplete", "error decoding response", "request error", "http error",
    "deadline",
)  # fmt: skip
_NOT_IMPLEMENTED = "This store does not support such requests."
_TOO_MANY = "The store asks for fewer requests: lower ?concurrency=…."
_POLICIES = "Which credentials were used, and what do the store's policies allow them?"
_UNREACHABLE = "Is the endpoint right, and can this host reach it?"
_INVALID_ANSWER = re.compile(r"Got invalid [\w ]+ response")
_BULK = "Got invalid DeleteObjects response"
_WEB_PAGE = re.compile(r"<!doctype html|<html[\s>]", re.IGNORECASE)
_NO_STORE = (
    "Is the endpoint the store itself, and not its console? Is there a proxy or a login page "
    "in between?"
)
_REDIRECTED = ("Received redirect without LOCATION", "error following redirect")
WRONG_PLACE = (
    "The bucket is in another region, or at another endpoint: name it, ?region=… or ?endpoint=…."
)
"""Advice for stores that redirect clients elsewhere."""
_PLACES = re.compile(r"<(Region|Endpoint)>\s*([\w.:/-]{1,200})\s*</")
_WHOLE = ("Range request not supported", "Received non-partial response")
"""obstore's messages if a server answers a range request with the whole object."""
_NO_RANGES = (
    "Use a server, or a gateway, that answers ranges with status 206, even one that is the whole "
    "object."
)
_TOO_SLOW = (
    "A request ends after ?timeout=…, or after ?read_timeout=… of silence. On a slow "
    "connection raise these, or "
    "lower ?concurrency=… or ?part_size=…, because all parts in flight share the connection."
)


def failures(doing: str, uri: str, key: str) -> AbstractContextManager[None]:
    """Translate obstore's errors in the body into Holdfast's. ``doing`` starts the message, for
    example "read". Holdfast's own errors, and those of other libraries, pass unchanged."""
    return _translating(lambda error: translated(error, doing, uri, key), doing, uri, key)


def connecting(uri: str) -> AbstractContextManager[None]:
    """Translate obstore's errors in a body that creates a client without sending requests:
    AccessError if it concerns credentials, else UriError. Holdfast's own errors pass unchanged."""
    return _translating(lambda error: _unusable(error, uri), "connecting", uri, None, (TypeError,))


@contextmanager
def _translating(
    translate: Callable[[BaseException], HoldfastError],
    doing: str,
    uri: str,
    key: str | None,
    more: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    from obstore.exceptions import BaseError

    known: tuple[type[Exception], ...] = (BaseError, OSError, NotImplementedError, ValueError)
    try:
        yield
    except HoldfastError:
        raise
    except known + more as error:
        raise translate(error) from _clean(error)
    except BaseException as error:
        if not is_panic(error):
            raise
        # Mostly caused by a name that forms no valid URL.
        reason = " ".join(_QUERY.sub(r"\1?…", str(error)).split())[:200]
        raise StorageError(
            f"{doing} failed: the store's client panicked: {reason}",
            uri=uri,
            key=key,
            advice="Are the names of the bucket and the endpoint valid in a URL?",
        ) from error


def _unusable(error: BaseException, uri: str) -> HoldfastError:
    reason = _reason(str(error), "", 0)
    if "Account must be specified" in reason:
        advice = "Say which storage account: ?account=…, or AZURE_STORAGE_ACCOUNT_NAME."
        return UriError("az:// needs the name of an account", uri=uri, advice=advice)
    if _CREDENTIALS.search(reason):
        advice = (
            "Check the variables and files that hold the credentials, and who may read these files."
        )
        return AccessError(f"the credentials cannot be used: {reason}", uri=uri, advice=advice)
    advice = (
        "Check the URI's options, and the variables for this kind of store (AWS_…, "
        "AZURE_…, GOOGLE_…)."
    )
    return UriError(f"the store's client cannot be set up: {reason}", uri=uri, advice=advice)


def translated(error: BaseException, doing: str, uri: str, key: str) -> StorageError:
    """Return the Holdfast error for ``error``, raised by obstore. The caller sets its cause."""
    text = str(error)
    name = type(error).__name__
    code, status = _answer(text)
    where: dict[str, Any] = {"uri": uri, "key": key}
    if code in _MISSING:
        return missing_container(uri, key)
    if code == "NoSuchUpload":
        advice = (
            "Does a life-cycle rule of the bucket abort uploads too early, or has somebody "
            "deleted this checkpoint?"
        )
        message = f"{doing} failed: the store has dropped the unfinished upload"
        return NotFoundError(message, **where, advice=advice)
    if status == 404 and _WEB_PAGE.search(text) and not uri.startswith("http"):
        return no_store(uri, key)
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        return NotFoundError("no such object", **where)
    if name in ("AlreadyExistsError", "PreconditionError") and _is_taken(code, status):
        return ExistsError("the object already exists", **where)
    if code in _CONFLICT:
        advice = "Another request for this key was under way; this one changed nothing."
        return BusyError(f"{doing} failed: {_reason(text, code, status)}", **where, advice=advice)
    return _refusal(
        f"{doing} failed: {_reason(text, code, status)}", text, name, code, status, where
    )


def is_unchanged(error: StorageError) -> bool:
    """Return whether a conditional request failed only because the object has not changed."""
    return type(error.__cause__).__name__ == "NotModifiedError"


def _answer(text: str) -> tuple[str, int]:
    """Return the code and status of the store's response; "" and 0 if not stated."""
    code = ""
    status = 0
    if match := _CODE.search(text):
        code = match[1]
    if match := _STATUS.search(text):
        status = int(match[1])
    if not code and not status and (match := _OF_ONE.search(text)):
        if match[1].isdigit():
            status = int(match[1])
        else:
            code = match[1]
            if code == "InternalError":
                status = 500
    return code, status


def _is_taken(code: str, status: int) -> bool:
    """Return whether a failed precondition means that the object exists. Status 409 also has other
    meanings."""
    return status != 409 or not code or "Exists" in code or code == "PreconditionFailed"


def missing_container(uri: str, key: str | None = None) -> StorageError:
    """Return the error for a missing bucket or container, which does not mean that nothing was
    saved."""
    advice = "Create it, or check its name, the endpoint, the region, or the account."
    return StorageError("the bucket (or container) does not exist", uri=uri, key=key, advice=advice)


def states_code(text: str) -> bool:
    """Return whether a response contains an error code in XML, as only object stores send."""
    return _CODE.search(text) is not None


def no_store(uri: str, key: str | None = None) -> StorageError:
    """Return the error for a server that does not respond like an object store."""
    message = "the server answers like a web site, not like an object store"
    return StorageError(message, uri=uri, key=key or None, advice=_NO_STORE)


def _refusal(
    message: str, text: str, name: str, code: str, status: int, where: dict[str, Any]
) -> StorageError:
    """Return the error for a response, or for a failure of the connection or the client. The first
    row that applies decides."""
    if not status and not code and (refusal := untrusted(text, where["uri"], where["key"])):
        return refusal
    too_slow = not status and "kind: Timeout" in text
    redirected = status in (301, 307, 308) or any(sign in text for sign in _REDIRECTED)
    denied = name in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403)
    lost = not status and any(sign in text.lower() for sign in _DOWN)
    rows: tuple[tuple[object, type[StorageError], str | None], ...] = (
        (code in _FULL or status == 507, FullError, "Raise the quota, or keep fewer checkpoints."),
        (code in _REGION or redirected, StorageError, _elsewhere(text)),
        (code == "NotImplemented" or status == 501, StorageError, _NOT_IMPLEMENTED),
        (code in _BUSY or status in (429, 503), BusyError, _TOO_MANY),
        (code in _ACCESS or denied, AccessError, _ACCESS.get(code, _POLICIES)),
        (_BULK in text, StorageError, None),
        (_INVALID_ANSWER.search(text), StorageError, _NO_STORE),
        (any(sign in text for sign in _WHOLE), StorageError, _NO_RANGES),
        (too_slow, StorageDownError, _TOO_SLOW),
        (status >= 500 or lost, StorageDownError, _UNREACHABLE),
        (True, StorageError, None),
    )
    if too_slow:
        message += ": it took too long"
    kind, advice = next((kind, advice) for applies, kind, advice in rows if applies)
    return kind(message, **where, advice=advice)


def _elsewhere(text: str) -> str:
    stated = "; ".join(f"{name.lower()} {place}" for name, place in _PLACES.findall(text))
    return f"{WRONG_PLACE} The store says: {stated}." if stated else WRONG_PLACE


def _reason(text: str, code: str, status: int) -> str:
    """Return a short reason, in the store's own words if it sent any."""
    message = ""
    if match := _MESSAGE.search(text):
        message = match[1].strip()
    stated = ", ".join(filter(None, [code, f"status {status}" if status else "", message]))
    reason = stated or _QUERY.sub(r"\1", text.partition("Debug source:")[0])
    return " ".join(_QUOTED.sub(r"\1…", _SECRETS.sub(r"\1…", reason)).split())[:300]


def _clean(error: BaseException) -> BaseException:
    """Return the error without URL queries, which may contain signatures, and without secrets that
    the store repeated."""
    text = _QUOTED.sub(r"\1…", _SECRETS.sub(r"\1…", _QUERY.sub(r"\1?…", str(error))))
    try:
        return type(error)(text)
    except TypeError:  # the class requires further arguments
        return StorageError(text)
