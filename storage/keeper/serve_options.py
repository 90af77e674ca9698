"""Where a keeper serves its memory, to whom, and within which limits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

__all__ = ["LOOPBACK", "ServeOptions", "new_token"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """``token``: of :func:`new_token`. ``interface``: a name such as ``eth0``, or an address.
    ``port``: 0 for any that is free. ``certificate`` and ``key``: files in PEM; empty: no TLS."""

    token: str = field(repr=False)
    interface: str = LOOPBACK
    port: int = 0
    certificate: str = ""
    key: str = ""
    requests_max: int = 64
    """More at a time are told to come back later."""
    connections_max: int = 256
    """More are closed as they come."""
    quiet_s: float = 60.0
    """How long a client may take for its next request, or to take a mebibyte of an answer."""


def new_token() -> str:
    """128 random bits, as text."""
    return secrets.token_hex(16)
