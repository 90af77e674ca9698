"""What all object stores share that needs no store: options, settings, and how locations and keys are written."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote

from ...errors import UriError
from ..contract import check_key
from ..options import Option, duration, integer, size, switch
from ..uri import WHERE_SECRETS_GO, Uri

__all__ = ["COMMON_OPTIONS", "Settings", "encoded", "needs", "settings", "split_location"]

COMMON_OPTIONS: Mapping[str, Option] = {
    "part_size": Option(size(5 << 20, 5 << 30), 16 << 20, "of the parts of a large object; 16MiB saves a copy"),
    "concurrency": Option(integer(1, 256), 16, "requests in flight"),
    "timeout": Option(duration(0.1, 3600), 30.0, "how long one request may take"),
    "deadline": Option(duration(0, 86400), 60.0, "for how long a request that fails for the moment is repeated"),
    "conditional": Option(switch, True, "whether the store knows conditional puts; see how-to/use-object-storage"),
    "anonymous": Option(switch, False, "send no credentials"),
}
"""What all object stores take."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all object stores let one choose."""

    part_nbytes: int
    concurrency: int
    timeout_s: float
    """Of one request, from connecting to the last byte."""
    deadline_s: float
    """How long a request that failed for the moment is repeated."""
    conditional: bool
    """Whether the store knows conditional puts."""

    @property
    def limit_s(self) -> float:
        """By when an operation has ended, one way or the other."""
        return self.deadline_s + self.timeout_s + 5

    def client(self, *, http: bool) -> dict[str, Any]:
        """For obstore's HTTP client."""
        seconds = f"{round(self.timeout_s * 1000)}ms"
        connect = f"{round(min(self.timeout_s, 5.0) * 1000)}ms"
        return {"timeout": seconds, "connect_timeout": connect, "allow_http": http}

    def retry(self) -> dict[str, Any]:
        """For obstore's retries: bounded by time, not by number, so that a server may restart meanwhile."""
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
        return {"max_retries": 10_000, "retry_timeout": timedelta(seconds=self.deadline_s), "backoff": backoff}


def split_location(uri: Uri) -> tuple[str, str]:
    """(bucket, root): the root without slashes at its ends, decoded. Raises UriError."""
    bucket, _, path = uri.location.partition("/")
    if not bucket:
        raise UriError(f"{uri.scheme}:// names no bucket", uri=uri.redacted, advice=f"Write {uri.scheme}://bucket/run.")
    if "@" in bucket:
        raise UriError("a URI is no place for a user", uri=uri.redacted, advice=WHERE_SECRETS_GO)
    try:
        root = unquote(path.strip("/"), errors="strict")
    except UnicodeDecodeError as error:
        raise UriError("the path is no UTF-8", uri=uri.redacted) from error
    return bucket, encoded(check_key(root, uri=uri.redacted)) if root else ""


def encoded(key: str) -> str:
    """``key`` with what cannot be printed percent-encoded, and so "%" too: listings, which are XML, could not carry it.
    Raises UnicodeEncodeError for what is no text."""
    return "".join(c if c.isprintable() and c != "%" else quote(c, safe="") for c in key)


def needs(uri: Uri, extra: str, *modules: str) -> None:
    """Raise UriError where one of ``modules`` is not installed; ``extra`` brings it."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise UriError(
            f"{uri.scheme}:// needs {' and '.join(missing)}",
            uri=uri.redacted,
            advice=f"pip install 'holdfast[{extra}]'",
        )


def settings(values: Mapping[str, Any]) -> Settings:
    """Out of the values of :data:`COMMON_OPTIONS`."""
    return Settings(
        values["part_size"], values["concurrency"], values["timeout"], values["deadline"], values["conditional"]
    )
