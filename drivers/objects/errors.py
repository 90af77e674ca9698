"""From what obstore, or the store behind it, says to the error that a handler can act on. Nothing
secret passes."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    UriError,
)
from ..panics import is_panic
from .trust import untrusted

__all__ = [
    "WRONG_PLACE",
    "connecting",
    "failures",
    "missing_container",
    "no_store",
    "states_code",
    "translated",
]

_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS = re.compile(r"status(?:[ _]code)?[:\s]+(\d{3})\b", re.IGNORECASE)
_OF_ONE = re.compile(r"request failed for key [^\n]*\(code: (\w+)\)")
"""What became of one object of those that one request was to delete: a code, or a status."""
_MESSAGE = re.compile(r"<Message>\s*([^<]{1,200})</Message>")
_QUERY = re.compile(r"(?<=://)([^\s?\"'\\)>]+)\?[^\s\"'\\)>]+")

_SECRETS = re.compile(
    r"((?:authorization|cookie|[\w-]*(?:token|secret|password|signature)[\w-]*)"
    r"\\?[\"']?[ \t]*[:>][ \t]*)[^\n\\<]+",
    re.I,
)
"""Secrets of the request, which a gateway in debug mode repeats in its answer."""

_MISSING = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_BUSY = {
    "SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "Throttling", "ThrottlingException",
    "TooManyRequests", "ServerBusy", "rateLimitExceeded", "OperationAborted",
}  # fmt: skip
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "Conflict", "conflict"}
"""Another request for the same key was under way: nothing was done, and the object need not exist.
"""
_CREDENTIALS = re.compile(
    r"credential|service account|access key|sas key|token|private key|pem file", re.I
)
_QUOTED = re.compile(r"(invalid (?:type|value): ).*?(?=, expected)", re.S)
"""What a parser repeats of a file that it does not understand, which may hold secrets."""
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
_NOT_IMPLEMENTED = "This store does not know such requests."
_INVALID_ANSWER = re.compile(r"Got invalid [\w ]+ response")
_BULK = "Got invalid DeleteObjects response"
_WEB_PAGE = re.compile(r"<!doctype html|<html[\s>]", re.IGNORECASE)
_NO_STORE = (
    "Is the endpoint that of the store itself, and not of its console? Does a proxy, or a page to "
    "log in, stand in between?"
)
_REDIRECTED = ("Received redirect without LOCATION", "error following redirect")
WRONG_PLACE = (
    "The bucket is in another region, or at another endpoint: name it, ?region=… or ?endpoint=…."
)
"""Advice where a store sends clients elsewhere."""
_PLACES = re.compile(r"<(Region|Endpoint)>\s*([\w.:/-]{1,200})\s*</")
_WHOLE = ("Range request not supported", "Received non-partial response")
"""What obstore says where a range was asked for, and the server has answered with all of the
object."""
_TOO_SLOW = (
    "A request ends after ?timeout=…, or once nothing has come for ?read_timeout=…. For a slow "
    "line make them longer, or "
    "lower ?concurrency=… or ?part_size=…, for all parts in flight share the line."
)


@contextmanager
def failures(doing: str, uri: str, key: str) -> Iterator[None]:
    """Turn what obstore raises in the body into the error of its kind. ``doing`` begins the
    message: "read", say. Errors of ours pass unchanged, and so does what is not obstore's."""
    from obstore.exceptions import BaseError

    try:
        yield
    except HoldfastError:
        raise
    except (BaseError, OSError, NotImplementedError, ValueError) as error:
        raise translated(error, doing, uri, key) from _clean(error)
    except BaseException as error:
        if is_panic(error):
            raise _panicked(error, doing, uri, key) from error
        raise


@contextmanager
def connecting(uri: str) -> Iterator[None]:
    """Turn what obstore raises in the body, which makes a client and asks no server, into
    AccessError, where it is about credentials, or UriError. Errors of ours pass unchanged."""
    from obstore.exceptions import BaseError

    try:
        yield
    except HoldfastError:
        raise
    except (BaseError, OSError, NotImplementedError, ValueError, TypeError) as error:
        raise _unusable(error, uri) from _clean(error)
    except BaseException as error:
        if is_panic(error):
            raise _panicked(error, "connecting", uri, None) from error
        raise


def _unusable(error: BaseException, uri: str) -> HoldfastError:
    """Options or the environment say something that no client can be made of."""
    reason = _reason(str(error), "", 0)
    if "Account must be specified" in reason:
        advice = "Say which storage account: ?account=…, or AZURE_STORAGE_ACCOUNT_NAME."
        return UriError("az:// needs the name of an account", uri=uri, advice=advice)
    if _CREDENTIALS.search(reason):
        advice = (
            "Look at the variables and files that the credentials come from, and at who may "
            "read these files."
        )
        return AccessError(f"the credentials cannot be used: {reason}", uri=uri, advice=advice)
    advice = (
        "Look at the URI's options, and at the variables for this kind of store (AWS_…, "
        "AZURE_…, GOOGLE_…)."
    )
    return UriError(f"the store's client cannot be set up: {reason}", uri=uri, advice=advice)


def _panicked(error: BaseException, doing: str, uri: str, key: str | None) -> StorageError:
    """The client came upon what its authors took for impossible: mostly a name that makes no valid
    URL."""
    reason = " ".join(_QUERY.sub(r"\1?…", str(error)).split())[:200]
    return StorageError(
        f"{doing} failed: the store's client panicked: {reason}",
        uri=uri,
        key=key,
        advice="Is the name of the bucket, and the endpoint, one that can stand in a URL?",
    )


def translated(error: BaseException, doing: str, uri: str, key: str) -> StorageError:
    """The error of ours for ``error``, which obstore raised. Its cause is left to the caller."""
    text = str(error)
    name = type(error).__name__
    code, status = _answer(text)
    where: dict[str, Any] = {"uri": uri, "key": key}
    if code in _MISSING:
        return missing_container(uri, key)
    if code == "NoSuchUpload":
        return _dropped_upload(doing, **where)
    if status == 404 and _WEB_PAGE.search(text) and not uri.startswith("http"):
        return no_store(uri, key)
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        return NotFoundError("no such object", **where)
    if name in ("AlreadyExistsError", "PreconditionError") and _is_taken(code, status):
        return ExistsError("object exists already", **where)
    if code in _CONFLICT:
        advice = "Another request for this key was under way; this one changed nothing."
        return BusyError(f"{doing} failed: {_reason(text, code, status)}", **where, advice=advice)
    return _refusal(
        f"{doing} failed: {_reason(text, code, status)}", text, name, code, status, where
    )


def _answer(text: str) -> tuple[str, int]:
    """(code, status) of what the store answered; "" and 0 where it did not say."""
    if match := _CODE.search(text):
        code = match[1]
    else:
        code = ""
    if match := _STATUS.search(text):
        status = int(match[1])
    else:
        status = 0
    if not code and not status and (match := _OF_ONE.search(text)):
        if match[1].isdigit():
            status = int(match[1])
        else:
            code = match[1]
            if code == "InternalError":
                status = 500
            else:
                status = 0
    return code, status


def _is_taken(code: str, status: int) -> bool:
    """Whether a refused condition says that the object exists. Status 409 has other meanings,
    too."""
    return status != 409 or not code or "Exists" in code or code == "PreconditionFailed"


def missing_container(uri: str, key: str | None = None) -> StorageError:
    """The bucket, or container, itself is not there: no sign that nothing was saved."""
    advice = "Create it, or look for a slip in its name, the endpoint, the region, or the account."
    return StorageError("the bucket (or container) does not exist", uri=uri, key=key, advice=advice)


def states_code(text: str) -> bool:
    """Return whether an answer states an error code in XML, as only object stores do."""
    return _CODE.search(text) is not None


def no_store(uri: str, key: str | None = None) -> StorageError:
    """Return the error for a server that answers, but not as an object store does."""
    message = "the server does not answer as an object store does, but like a web site"
    return StorageError(message, uri=uri, key=key or None, advice=_NO_STORE)


def _dropped_upload(doing: str, **where: Any) -> NotFoundError:
    return NotFoundError(
        f"{doing} failed: the store has dropped the unfinished upload",
        **where,
        advice="Does a life-cycle rule of the bucket abort uploads too early, or has somebody "
        "deleted this checkpoint?",
    )


def _refusal(
    message: str, text: str, name: str, code: str, status: int, where: dict[str, Any]
) -> StorageError:
    if code in _FULL or status == 507:
        return FullError(message, **where, advice="Raise the quota, or keep fewer checkpoints.")
    if code in _REGION or status in (301, 307, 308) or any(sign in text for sign in _REDIRECTED):
        stated = "; ".join(f"{name.lower()} {place}" for name, place in _PLACES.findall(text))
        advice = WRONG_PLACE
        if stated:
            advice += f" The store says: {stated}."
        return StorageError(message, **where, advice=advice)
    if code == "NotImplemented":
        return StorageError(message, **where, advice=_NOT_IMPLEMENTED)
    if code in _BUSY or status in (429, 503):
        return BusyError(
            message, **where, advice="The store asks for fewer requests: lower ?concurrency=…."
        )
    if (
        code in _ACCESS
        or name in ("PermissionDeniedError", "UnauthenticatedError")
        or status in (401, 403)
    ):
        advice = _ACCESS.get(
            code, "Which credentials were used, and what do the store's policies allow them?"
        )
        return AccessError(message, **where, advice=advice)
    return _failure(message, text, status, where)


def _failure(message: str, text: str, status: int, where: dict[str, Any]) -> StorageError:
    """Of a request that was not refused: the connection, the server, or the client failed."""
    refusal = untrusted(text, where["uri"], where["key"])
    if not status and refusal is not None:
        return refusal
    if status == 501:
        return StorageError(message, **where, advice=_NOT_IMPLEMENTED)
    if _BULK in text:
        return StorageError(message, **where)
    if _INVALID_ANSWER.search(text):
        return StorageError(message, **where, advice=_NO_STORE)
    if any(sign in text for sign in _WHOLE):
        advice = (
            "Use a server, or a gateway, that answers ranges with status 206, also one that "
            "is the whole object."
        )
        return StorageError(message, **where, advice=advice)
    if not status and "kind: Timeout" in text:
        return StorageDownError(f"{message}: it took too long", **where, advice=_TOO_SLOW)
    if status >= 500 or (not status and any(sign in text.lower() for sign in _DOWN)):
        return StorageDownError(
            message, **where, advice="Is the endpoint right, and can this host reach it?"
        )
    return StorageError(message, **where)


def _reason(text: str, code: str, status: int) -> str:
    """In a few words, from the store's own where it has sent some."""
    if match := _MESSAGE.search(text):
        message = match[1].strip()
    else:
        message = ""
    stated = ", ".join(filter(None, [code, f"status {status}" if status else "", message]))
    reason = stated or _QUERY.sub(r"\1", text.partition("Debug source:")[0])
    return " ".join(_QUOTED.sub(r"\1…", _SECRETS.sub(r"\1…", reason)).split())[:300]


def _clean(error: BaseException) -> BaseException:
    """The same error without the queries of URLs, where some stores carry signatures, and without
    the secrets that a store has said back."""
    text = _QUOTED.sub(r"\1…", _SECRETS.sub(r"\1…", _QUERY.sub(r"\1?…", str(error))))
    try:
        return type(error)(text)
    except TypeError:  # a class that wants more than a message
        return StorageError(text)
