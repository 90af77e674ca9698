"""Options of an HTTP server: where it listens, its token, TLS and limits."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import secrets
import socket
import ssl
import struct
from dataclasses import dataclass, field

from ...errors import UsageError

LOOPBACK = "127.0.0.1"
_TOKEN = re.compile(r"[0-9a-f]{32}")
_WHERE = re.compile(
    r"(?:(?P<bare>[^\[\]:\s]+)|\[(?P<bracketed>[0-9a-fA-F:.]+)\])(?::(?P<port>[0-9]{1,5}))?"
)
_PORT_MAX = 65535
_SIOCGIFADDR = 0x8915


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
    """Besides two of each keeper of the job. Further requests get status 503 and Retry-After."""
    connections_max: int = 256
    """Limit of connections that have sent the token, besides four of each keeper of the job.
    Further ones get status 503."""
    strangers_max: int = 64
    """Limit of connections that have not sent the token, besides one of each keeper of the job. A
    further one displaces the oldest of the address that has the most."""
    stranger_s: float = 5.0
    """Time limit from the connection, and before any TLS handshake, to a request with the token."""
    quiet_s: float = 60.0
    """Time limit for a client that has sent the token to send its next request, or to accept 1 MiB
    of an answer."""


def interface_and_port(text: str) -> tuple[str, int]:
    """Parse ``eth0:7070``, ``10.0.0.5``, ``[::1]:7070`` and the like; the port is 0 if omitted.
    Raises UsageError."""
    match = _WHERE.fullmatch(text)
    if match is None or int(match["port"] or 0) > _PORT_MAX:
        raise UsageError(
            f"{text!r} is not an address to serve at",
            advice="Give an interface or an address, with an optional port: eth0:7070.",
        )
    return match["bare"] or match["bracketed"], int(match["port"] or 0)


def address_of(interface: str) -> str:
    """Return the address to listen on, given the name of a network interface or an address. Raises
    UsageError if it is neither."""
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(
                asking.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15])
            )
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise UsageError(
            f"{interface!r} is neither an address nor an interface with one",
            advice=f"Interfaces of this host: {names}.",
        ) from error
    return socket.inet_ntoa(answer[20:24])


def address_and_port(address: str, port: int) -> str:
    """Return the address for other hosts. If the server listens on all interfaces, that is this
    host's name."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified:
        return f"{socket.gethostname()}:{port}"
    return f"[{address}]:{port}" if parsed.version == 6 else f"{address}:{port}"


def new_token() -> str:
    """Return 128 random bits in hexadecimal."""
    return secrets.token_hex(16)


def is_token(text: str) -> bool:
    """Return whether ``text`` has the format of a token."""
    return _TOKEN.fullmatch(text) is not None


def tls_of(options: ServeOptions) -> ssl.SSLContext | None:
    """Return the TLS of a server, None for none. Raises UsageError for unusable files."""
    if not options.certificate and not options.key:
        return None
    if not options.certificate or not options.key:
        raise UsageError("TLS needs both a certificate and its key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.certificate, options.key)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(
            f"the certificate {options.certificate} and its key {options.key}: {reason}"
        ) from error
    return context
