"""Options shared by all object stores, and the settings derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from ..options import Option, duration, integer, size, switch, url

COMMON_OPTIONS: Mapping[str, Option] = {
    "part_size": Option(
        size(5 << 20, 5 << 30), 16 << 20, "size of the parts of a large object; 16MiB saves a copy"
    ),
    "concurrency": Option(integer(1, 256), 16, "requests in flight"),
    "timeout": Option(duration(0.1, 3600), 90.0, "time limit of one request, including its data"),
    "read_timeout": Option(
        duration(0.1, 3600), 30.0, "time limit of silence while waiting for a response"
    ),
    "deadline": Option(
        duration(0, 86400), 60.0, "how long a temporarily failing request is retried"
    ),
    "conditional": Option(
        switch, True, "whether the store supports conditional puts; see how-to/use-object-storage"
    ),
    "anonymous": Option(switch, False, "send no credentials"),
    "ca": Option(
        str,
        "",
        ("PEM file of further trusted certificate authorities; see how-to/use-object-storage"),
    ),
    "proxy": Option(url, "", "URL of the HTTP proxy; else HTTPS_PROXY, HTTP_PROXY, NO_PROXY"),
}
"""Options of all object stores."""


class Requests(Enum):
    """Kind of a request. Each kind has its own HTTP client, because timeout and retries are set per
    client."""

    READING = "reading"
    """Requests that send almost nothing. Retried by the client; ended by silence."""
    SENDING = "sending"
    """Uploads of objects and parts. Retried by the client. The store is silent while bytes are
    sent, and the client cannot see how many have left, so only ``timeout`` limits them."""
    ONCE = "once"
    """Requests that the client never retries. A retried exclusive put could meet its own object and
    report a conflict, and an unsupported request would be repeated until ``deadline``. Callers
    retry temporary failures themselves."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings common to all object stores."""

    part_nbytes: int
    concurrency: int
    timeout_s: float
    """Limit of one request, from connecting to the last byte."""
    read_timeout_s: float
    """Limit of silence while a response is awaited or read."""
    deadline_s: float
    """Time during which temporary failures of a request are retried."""
    conditional: bool
    ca: str = ""
    proxy: str = ""

    @property
    def limit_s(self) -> float:
        """Time within which any operation has ended."""
        return self.deadline_s + self.timeout_s + 5

    def client(self, requests: Requests, *, http: bool) -> dict[str, Any]:
        """Return the settings of obstore's HTTP client, except for trusted certificates."""
        options: dict[str, Any] = {
            "timeout": _milliseconds(self.timeout_s),
            "connect_timeout": _milliseconds(min(self.timeout_s, 5.0)),
            "allow_http": http,
        }
        # the client's read timeout starts with the first byte sent
        if requests is not Requests.SENDING:
            options["read_timeout"] = _milliseconds(min(self.timeout_s, self.read_timeout_s))
        if self.proxy:
            options["proxy_url"] = self.proxy
        return options

    def retry(self, requests: Requests) -> dict[str, Any]:
        """Return obstore's retry settings. Retries are limited by time, not number, so that a
        server may restart."""
        if requests is Requests.ONCE:
            return {"max_retries": 0}
        limit_s = self.deadline_s
        if requests is Requests.SENDING and limit_s:
            # A request on a dead connection takes that long to fail.
            limit_s += self.timeout_s
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)}
        return {
            "max_retries": 10_000,
            "retry_timeout": timedelta(seconds=limit_s),
            "backoff": {**backoff, "base": 2},
        }


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Build the settings from the values of :data:`COMMON_OPTIONS`."""
    names = ("part_size", "concurrency", "timeout", "read_timeout", "deadline", "conditional")
    return Settings(*(values[name] for name in (*names, "ca", "proxy")))
