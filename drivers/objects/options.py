"""The options that all object stores share, and the settings that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from ..options import Option, duration, integer, size, switch, url

__all__ = ["COMMON_OPTIONS", "Requests", "Settings", "settings_of"]

COMMON_OPTIONS: Mapping[str, Option] = {
    "part_size": Option(
        size(5 << 20, 5 << 30), 16 << 20, "of the parts of a large object; 16MiB saves a copy"
    ),
    "concurrency": Option(integer(1, 256), 16, "requests in flight"),
    "timeout": Option(
        duration(0.1, 3600),
        90.0,
        "how long one request may take, with all that it sends and receives",
    ),
    "read_timeout": Option(
        duration(0.1, 3600), 30.0, "for how long nothing may come while an answer is awaited"
    ),
    "deadline": Option(
        duration(0, 86400), 60.0, "for how long a request that fails for the moment is repeated"
    ),
    "conditional": Option(
        switch, True, "whether the store knows conditional puts; see how-to/use-object-storage"
    ),
    "anonymous": Option(switch, False, "send no credentials"),
    "ca": Option(
        str,
        "",
        (
            "file, in PEM, of authorities whose certificates are trusted, too; else as "
            "how-to/use-object-storage"
        ),
    ),
    "proxy": Option(
        url, "", "URL of the HTTP proxy to go through; else HTTPS_PROXY, HTTP_PROXY, NO_PROXY"
    ),
}
"""What all object stores take."""


class Requests(Enum):
    """A kind of requests. Each kind has an HTTP client of its own, for a client has one time-out
    and one way to repeat."""

    READING = "reading"
    """Requests that send next to nothing. Repeated by the client; silence ends them."""
    SENDING = "sending"
    """Objects and parts on their way to the store. Repeated by the client. While bytes are sent,
    the store is silent, and the client cannot see how many have left: only ``timeout`` bounds them.
    """
    ONCE = "once"
    """Never repeated by the client: an exclusive put whose repetition meets its own object would
    report a conflict, and a store that does not know a request would be asked until ``deadline``.
    What failed for the moment is the caller's to repeat."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all object stores let one choose."""

    part_nbytes: int
    concurrency: int
    timeout_s: float
    """Of one request, from connecting to the last byte."""
    read_timeout_s: float
    """For how long nothing may come while an answer is awaited, or read."""
    deadline_s: float
    """How long a request that failed for the moment is repeated."""
    conditional: bool
    """Whether the store knows conditional puts."""
    ca: str = ""
    """A file of certificates to trust, where one is named."""
    proxy: str = ""
    """The URL of a proxy, where one is named."""

    @property
    def limit_s(self) -> float:
        """By when an operation has ended, one way or the other."""
        return self.deadline_s + self.timeout_s + 5

    def client(self, requests: Requests, *, http: bool) -> dict[str, Any]:
        """For obstore's HTTP client, but for the certificates that it trusts."""
        options: dict[str, Any] = {
            "timeout": _milliseconds(self.timeout_s),
            "connect_timeout": _milliseconds(min(self.timeout_s, 5.0)),
            "allow_http": http,
        }
        if requests is not Requests.SENDING:  # the client's runs from the first byte that is sent
            options["read_timeout"] = _milliseconds(min(self.timeout_s, self.read_timeout_s))
        if self.proxy:
            options["proxy_url"] = self.proxy
        return options

    def retry(self, requests: Requests) -> dict[str, Any]:
        """For obstore's retries: bounded by time, not by number, so that a server may restart
        meanwhile."""
        if requests is Requests.ONCE:
            return {"max_retries": 0}
        limit_s = self.deadline_s
        if requests is Requests.SENDING and limit_s:
            # A request whose connection went dead takes that long before it fails.
            limit_s += self.timeout_s
        backoff = {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        }
        return {
            "max_retries": 10_000,
            "retry_timeout": timedelta(seconds=limit_s),
            "backoff": backoff,
        }


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Out of the values of :data:`COMMON_OPTIONS`."""
    return Settings(
        values["part_size"],
        values["concurrency"],
        values["timeout"],
        values["read_timeout"],
        values["deadline"],
        values["conditional"],
        values["ca"],
        values["proxy"],
    )
