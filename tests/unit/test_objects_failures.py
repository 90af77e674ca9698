"""The errors that refusals of object stores become. The texts are the servers' and obstore's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.drivers.objects.errors import connecting, failures, translated
from holdfast.errors import (
    AccessError,
    BusyError,
    ExistsError,
    FullError,
    NotFoundError,
    StorageDownError,
    StorageError,
)

exceptions = pytest.importorskip("obstore.exceptions", reason="obstore is not installed")

ANSWER = (
    "Error performing {method} http://host/bucket/key in 4.8ms - Server returned non-2xx status "
    "code: {status}: "
    '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
)


OF_ONE = "Generic {store} error: {request} request failed for key run/x: Told why. (code: {code})"
"""Text of obstore's error for one object of a bulk delete."""


def answer(status: str, code: str, message: str = "", method: str = "PUT") -> str:
    """Return obstore's message for a response of the server."""
    return ANSWER.format(method=method, status=status, code=code, message=message)


def of_one(request: str, code: str) -> str:
    """Return obstore's message for one object of a bulk delete."""
    store = "S3" if request == "DeleteObjects" else "MicrosoftAzure"
    return OF_ONE.format(store=store, request=request, code=code)


@pytest.mark.parametrize(
    ("error", "text", "kind", "advice"),
    [
        ("Generic", answer("503 Slow Down", "SlowDown"), BusyError, "concurrency"),
        ("Generic", answer("429 Too Many", "TooManyRequests"), BusyError, "concurrency"),
        ("Generic", answer("500 Server", "InternalError"), StorageDownError, "endpoint"),
        ("Generic", "HTTP error: error sending request", StorageDownError, "endpoint"),
        ("Generic", "operation timed out", StorageDownError, "endpoint"),
        ("PermissionDenied", answer("403 Forbidden", "AccessDenied"), AccessError, "policies"),
        ("PermissionDenied", answer("403 F", "RequestTimeTooSkewed"), AccessError, "clock"),
        ("PermissionDenied", answer("403 F", "QuotaExceeded"), FullError, "quota"),
        ("Generic", answer("507 Insufficient Storage", "X"), FullError, "quota"),
        ("Generic", answer("301 Moved", "PermanentRedirect"), StorageError, "region"),
        ("Generic", answer("400 Bad Request", "KeyTooLongError"), StorageError, None),
        ("Generic", "Received non-partial response when range", StorageError, "ranges"),
        ("NotSupported", "Range request not supported by run/x", StorageError, "ranges"),
        ("Generic", of_one("DeleteObjects", "AccessDenied"), AccessError, "policies"),
        ("Generic", of_one("DeleteObjects", "SlowDown"), BusyError, "concurrency"),
        ("Generic", of_one("DeleteObjects", "InternalError"), StorageDownError, "endpoint"),
        ("Generic", of_one("Bulk delete", "403"), AccessError, "policies"),
        ("Generic", of_one("Bulk delete", "503"), BusyError, "concurrency"),
        ("AlreadyExists", "Object at location x already exists", ExistsError, None),
        ("AlreadyExists", answer("409 Conflict", "BlobAlreadyExists"), ExistsError, None),
        ("AlreadyExists", answer("409 C", "BlobImmutableDueToPolicy"), StorageError, None),
        ("Precondition", "Request precondition failure", ExistsError, None),
        ("", "Object at location x not found", NotFoundError, None),
        ("", answer("404 Not Found", "NoSuchBucket"), StorageError, "Create it"),
    ],
)
def test_each_refusal_is_the_error_that_a_handler_expects(
    error: str, text: str, kind: type[StorageError], advice: str | None
) -> None:
    """It has a class, a place, and advice. It is temporary only if a retry may succeed."""
    cls = getattr(exceptions, f"{error}Error") if error else FileNotFoundError
    found = translated(cls(text), "put", "s3://b", "k")
    assert type(found) is kind
    assert (found.uri, found.key) == ("s3://b", "k")
    assert found.temporary == issubclass(kind, StorageDownError)
    assert found.advice is None if advice is None else advice in str(found.advice)


def test_a_signature_in_a_url_reaches_nobody() -> None:
    """Neither an error nor its cause shows the credentials in the query of a URL."""
    text = "error sending request for url (https://host/c/key?sv=2024&sig=s3cr3t)"
    with pytest.raises(StorageDownError) as caught, failures("get", "az://c", "key"):
        raise exceptions.GenericError(text)
    shown = f"{caught.value} {caught.value.__cause__} {caught.value.__cause__!r}"
    assert "s3cr3t" not in shown
    assert "https://host/c/key" in shown
    assert type(caught.value.__cause__) is exceptions.GenericError


@pytest.mark.parametrize(
    "said",
    [
        "Authorization: AWS4 {}",
        "x-amz-security-token: {}",
        '"secret": {}',
        "<SecretKey>{}<",
        "cookie:{}",
    ],
)
def test_what_a_server_says_back_of_credentials_is_not_repeated(said: str) -> None:
    """Gateways in debug mode do; neither the error nor its cause passes it on."""
    text = answer("403 Forbidden", "SignatureDoesNotMatch", f"Hello\n{said.format('hunter2')}\nBye")
    with pytest.raises(AccessError) as caught, failures("put", "s3://b", "k"):
        raise exceptions.PermissionDeniedError(text)
    assert "hunter2" not in f"{caught.value} {caught.value.__cause__!r}"
    assert "Bye" in str(caught.value.__cause__)


@pytest.mark.parametrize("base", [Exception, BaseException])
@pytest.mark.parametrize(
    "body", [lambda: failures("get", "s3://b", "k"), lambda: connecting("s3://b")]
)
def test_a_panic_of_the_client_is_an_error_of_ours(
    base: type[BaseException], body: Callable[[], Any]
) -> None:
    """A panic of Rust code, even if no Exception, becomes a StorageError; other things pass."""
    panic = type("RustPanic" if base is Exception else "PanicException", (base,), {})
    with pytest.raises(StorageError, match="client panicked: called `unwrap`") as caught, body():
        raise panic("called `unwrap` on an Err value: InvalidUri")
    assert isinstance(caught.value.__cause__, panic)
    with pytest.raises(KeyboardInterrupt), body():
        raise KeyboardInterrupt
