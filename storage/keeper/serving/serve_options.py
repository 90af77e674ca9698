"""Options of the HTTP server for a keeper's memory."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

__all__ = ["LOOPBACK", "ServeOptions", "new_token"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """``token``: from :func:`new_token`. ``interface``: a name such as ``eth0``, or an address.
    ``port``: 0 for any free one. ``certificate`` and ``key``: PEM files; empty for no TLS."""

    token: str = field(repr=False)
    interface: str = LOOPBACK
    port: int = 0
    certificate: str = ""
    key: str = ""
    requests_max: int = 64
    """Further requests get status 503 and Retry-After."""
    connections_max: int = 256
    """Further connections are closed at once."""
    quiet_s: float = 60.0
    """Time limit for a client to send its next request, or to accept 1 MiB of an answer."""


def new_token() -> str:
    """Return 128 random bits in hexadecimal."""
    return secrets.token_hex(16)
