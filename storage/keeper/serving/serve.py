"""Configures the HTTP server for a keeper's memory: address, token, TLS and limits.

It listens on loopback unless an interface is given. Everything but ``/health`` needs the run's
token, known only to the ranks of its job. Without a certificate there is no TLS: token and images
cross the network in clear text.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import ssl
import struct
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from ....errors import UsageError
from ..options import ServeOptions

if TYPE_CHECKING:
    from .http_server import Hear, MemoryServer
    from .memory_catalog import MemoryCatalog


_TOKEN = re.compile(r"[0-9a-f]{32}")
_WHERE = re.compile(
    r"(?:(?P<bare>[^\[\]:\s]+)|\[(?P<bracketed>[0-9a-fA-F:.]+)\])(?::(?P<port>[0-9]{1,5}))?"
)
_PORT_MAX = 65535
_SIOCGIFADDR = 0x8915


def serve(
    catalog: MemoryCatalog, options: ServeOptions, hear: Hear | None = None
) -> AbstractAsyncContextManager[MemoryServer]:
    """Serve ``catalog`` for the body, with ``hear`` to take reports. Raises UsageError for bad
    options or if aiohttp is not installed, and OSError if the address cannot be used."""
    if not is_token(options.token):
        raise UsageError("the token of a run has 32 hexadecimal digits")
    try:
        from .http_server import MemoryServer
    except ModuleNotFoundError as error:
        raise UsageError(
            "serving memory to other hosts needs aiohttp, which is not installed",
            advice="pip install aiohttp",
        ) from error
    return MemoryServer(catalog, options, address_of(options.interface), _tls(options), hear)


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


def is_token(text: str) -> bool:
    """Return whether ``text`` has the format of a token."""
    return _TOKEN.fullmatch(text) is not None


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
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
