"""Translation of a keeper's responses and of connection failures into Holdfast's errors."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import (
    AccessError,
    BusyError,
    NotFoundError,
    StorageDownError,
    StorageError,
)

__all__ = ["failures", "refusal"]

_REASON_MAX = 200
_PAUSE_S_MAX = 60.0
_TOKEN = "Each run has a token, which HOLDFAST_PEER_TOKEN holds. It changes when the run restarts."
_TRUST = "Name the file of the authority that signed the keeper's certificate: ?ca=/path/ca.pem."
_ANOTHER = "Does a keeper listen there? With TLS it takes ?tls=on, without it ?tls=off."


@contextmanager
def failures(doing: str, uri: str, key: str) -> Iterator[None]:
    """Translate connection errors into a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except ssl.SSLCertVerificationError as error:
        message = f"the keeper's certificate is not trusted: {error.verify_message}"
        raise StorageError(message, uri=uri, key=key, advice=_TRUST) from error
    except ssl.SSLError as error:
        reason = error.reason or type(error).__name__
        message = f"{doing}: no TLS connection: {reason}"
        raise StorageError(message, uri=uri, key=key, advice=_ANOTHER) from error
    except TimeoutError as error:
        message = f"{doing}: the keeper does not answer"
        raise StorageDownError(message, uri=uri, key=key) from error
    except (ConnectionError, http.client.IncompleteRead) as error:
        message = f"{doing}: the connection to the keeper is lost: {_said(error)}"
        raise StorageDownError(message, uri=uri, key=key) from error
    except http.client.HTTPException as error:
        message = f"{doing}: the answer is not HTTP: {_said(error)}"
        raise StorageError(message, uri=uri, key=key, advice=_ANOTHER) from error
    except OSError as error:
        message = f"{doing}: the keeper cannot be reached: {_said(error)}"
        raise StorageDownError(message, uri=uri, key=key) from error


def refusal(status: int, retry_after: str | None, doing: str, uri: str, key: str) -> StorageError:
    """Return the error for an unsuccessful response."""
    message = f"{doing}: the keeper answers {status}"
    if status in (401, 403):
        return AccessError(message, uri=uri, key=key, advice=_TOKEN)
    if status == 404:
        return NotFoundError("no such object", uri=uri, key=key)
    if status in (429, 503):
        return BusyError(message, retry_after_s=_seconds(retry_after), uri=uri, key=key)
    if status >= 500:
        return StorageDownError(message, uri=uri, key=key)
    return StorageError(message, uri=uri, key=key, advice=_ANOTHER)


def _seconds(retry_after: str | None) -> float | None:
    if retry_after is None or not retry_after.isdecimal() or len(retry_after) > 6:
        return None
    return min(float(retry_after), _PAUSE_S_MAX)


def _said(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_REASON_MAX]
