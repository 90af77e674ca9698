"""From what a file system of fsspec raises to the error that a handler can act on.

Some raise an OSError with an errno, some one of its kinds without, some whatever their library raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import AccessError, ExistsError, HoldfastError, NotFoundError, StorageDownError, StorageError
from .oserrors import storage_errors
from .uri import redact

__all__ = ["fsspec_errors"]

# The more special first. asyncio's TimeoutError, and so fsspec's, is the built-in one.
_BY_CLASS: tuple[tuple[type[BaseException], type[StorageError]], ...] = (
    (IsADirectoryError, NotFoundError),
    (FileNotFoundError, NotFoundError),
    (FileExistsError, ExistsError),
    (PermissionError, AccessError),
    (TimeoutError, StorageDownError),
    (ConnectionError, StorageDownError),
)
_BY_NAME = (
    (("Credential", "Auth", "Forbidden", "Denied"), AccessError),
    (("Connect", "Timeout", "SSHException", "EOFError", "Unavailable", "Disconnected"), StorageDownError),
)


@contextmanager
def fsspec_errors(doing: str, uri: str, key: str) -> Iterator[None]:
    """Turn whatever the body raises into a StorageError of the kind that fits best, with ``uri`` (redacted), ``key`` and
    its cause. ``doing`` begins the message. Our own errors pass unchanged."""
    try:
        with _without_errno(doing, uri, key), storage_errors(doing, uri, key):
            yield
    except (HoldfastError, OSError):
        raise
    except Exception as error:
        names = " ".join(cls.__name__ for cls in type(error).__mro__)
        kind = next((kind for words, kind in _BY_NAME if any(word in names for word in words)), StorageError)
        raise _made(kind, doing, uri, key, error) from error


@contextmanager
def _without_errno(doing: str, uri: str, key: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        cause = error.__cause__
        kind = next((kind for cls, kind in _BY_CLASS if isinstance(cause, cls)), None)
        if type(error) is StorageError and kind is not None and isinstance(cause, OSError):
            raise _made(kind, doing, uri, key, cause) from cause
        raise


def _made(kind: type[StorageError], doing: str, uri: str, key: str, error: BaseException) -> StorageError:
    text = redact(str(error)).strip().partition("\n")[0]
    return kind(f"{doing} failed: {type(error).__name__}" + (f": {text}" if text else ""), uri=uri, key=key)
