"""How this process authenticates to name nodes: by Kerberos tickets, or by delegation tokens.

When a name node rejects a client, hdfs-native only sees a closed connection and retries until its
deadline. So :func:`unauthenticated` first compares the offered methods with the available ones. It
does not validate tickets; the library reports those errors at once.

HTTP requests are authenticated by SPNEGO tokens (RFC 4559), made by the system's
``libgssapi_krb5``, which hdfs-native loads as well; Python bindings have no Linux wheels. Scope:
the first token only, which is all that Kerberos needs. The server's reply is not authenticated,
just as the rest of the response is not over plain HTTP.

Delegation tokens come from the file named by ``HADOOP_TOKEN_FILE_LOCATION``, as written by ``hdfs
fetchdt`` and YARN. hdfs-native reads the file too, but does not resolve hosts, although Hadoop
writes IP addresses into tokens, and does not explain a malformed file. Scope: kinds and services of
tokens. Only the name node understands their content.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECK_S = 2.0
"""Seconds to wait for a name node's list of accepted methods."""

_ANSWER_NBYTES_MAX = 64 << 10

# Handshake of Hadoop's RPC, version 9, with SASL; then a message without a call, in state
# NEGOTIATE.
_PREAMBLE = b"hrpc" + bytes([9, 0, 0xDF])
_HEADER = bytes([0x08, 2, 0x10, 0, 0x18, 65, 0x22, 0, 0x28, 1])
_NEGOTIATE = bytes([0x10, 1])
_METHODS = ("SIMPLE", "KERBEROS", "TOKEN")


def unauthenticated(addresses: Sequence[str], authentication: str) -> tuple[str, str] | None:
    """Return the reason why this process cannot authenticate, and advice; None if it can, or if
    unknown.

    ``addresses`` are ``host:port`` of each name node. ``authentication`` is ``simple``,
    ``kerberos`` or ``token``. Blocks.
    """
    if authentication == "token":
        return None
    if authentication == "kerberos":
        try:
            _library()
        except NoTicket as error:
            advice = "apt-get install libgssapi-krb5-2, or yum install krb5-libs."
            return f"no Kerberos: {error}", advice
        return None
    for address in addresses:
        methods = offered(address)
        if methods and "SIMPLE" not in methods:
            return (
                f"the name node {address} requires {' or '.join(methods)}, but this client is "
                f"configured without",
                "Set HADOOP_CONF_DIR, or ?conf=, to a folder whose core-site.xml says "
                "hadoop.security.authentication=kerberos, and run kinit.",
            )
        if methods:
            return None
    return None


def offered(address: str) -> list[str]:
    """Return the authentication methods that a name node accepts; empty if it does not say."""
    host, _, port = address.rpartition(":")
    message = bytes([len(_HEADER)]) + _HEADER + bytes([len(_NEGOTIATE)]) + _NEGOTIATE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CHECK_S) as connection:
            connection.sendall(_PREAMBLE + len(message).to_bytes(4, "big") + message)
            with connection.makefile("rb") as stream:
                nbytes = int.from_bytes(stream.read(4), "big")
                answer = stream.read(min(nbytes, _ANSWER_NBYTES_MAX))
    except (OSError, ValueError):
        return []
    return [method for method in _METHODS if bytes([0x0A, len(method)]) + method.encode() in answer]


LIBRARY = "libgssapi_krb5.so.2"

_HOST_BASED_SERVICE = bytes.fromhex("2a864886f71201020104")  # 1.2.840.113554.1.2.1.4
_SPNEGO = bytes.fromhex("2b0601050502")  # 1.3.6.1.5.5.2
_COMPLETE = 0
_CONTINUE_NEEDED = 1
_OF_GSSAPI = 1
_OF_MECHANISM = 2


class NoTicket(Exception):
    """No token is available: the library is missing, or there is no valid ticket. The message says
    which."""


class _Buffer(ctypes.Structure):
    _fields_ = (("length", ctypes.c_size_t), ("value", ctypes.c_void_p))


class _Oid(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint32), ("elements", ctypes.c_char_p))


def negotiate_token(host: str) -> bytes:
    """Return the token, before base64 encoding, for the ``Authorization: Negotiate`` header of a
    request to ``host``.

    Blocks: may ask the KDC for a ticket. Raises NoTicket.
    """
    gss = _library()
    name = _service_name(gss, f"HTTP@{host}")
    context = ctypes.c_void_p()
    token = _Buffer()
    minor = ctypes.c_uint32()
    mechanism = _Oid(len(_SPNEGO), _SPNEGO)
    try:
        major = gss.gss_init_sec_context(
            ctypes.byref(minor),
            None,
            ctypes.byref(context),
            name,
            ctypes.byref(mechanism),
            ctypes.c_uint32(0),
            ctypes.c_uint32(0),
            None,
            None,
            None,
            ctypes.byref(token),
            None,
            None,
        )
        if major not in (_COMPLETE, _CONTINUE_NEEDED):
            raise NoTicket(_message(gss, major, minor.value))
        return _taken(gss, token)
    finally:
        gss.gss_delete_sec_context(ctypes.byref(minor), ctypes.byref(context), None)
        gss.gss_release_name(ctypes.byref(minor), ctypes.byref(name))


@functools.cache
def _library() -> Any:
    try:
        gss = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NoTicket(f"{LIBRARY} cannot be loaded: {error}") from error
    for function in ("gss_import_name", "gss_init_sec_context", "gss_display_status"):
        getattr(gss, function).restype = ctypes.c_uint32
    return gss


def _service_name(gss: Any, service: str) -> ctypes.c_void_p:
    encoded = service.encode()
    text = _Buffer(len(encoded), ctypes.cast(ctypes.c_char_p(encoded), ctypes.c_void_p))
    kind = _Oid(len(_HOST_BASED_SERVICE), _HOST_BASED_SERVICE)
    name = ctypes.c_void_p()
    minor = ctypes.c_uint32()
    major = gss.gss_import_name(
        ctypes.byref(minor), ctypes.byref(text), ctypes.byref(kind), ctypes.byref(name)
    )
    if major != _COMPLETE:
        raise NoTicket(_message(gss, major, minor.value))
    return name


def _message(gss: Any, major: int, minor: int) -> str:
    texts = []
    for code, kind in ((major, _OF_GSSAPI), (minor, _OF_MECHANISM)):
        more = ctypes.c_uint32()
        ignored = ctypes.c_uint32()
        text = _Buffer()
        found = gss.gss_display_status(
            ctypes.byref(ignored),
            ctypes.c_uint32(code),
            ctypes.c_int(kind),
            None,
            ctypes.byref(more),
            ctypes.byref(text),
        )
        if found == _COMPLETE:
            texts.append(_taken(gss, text).decode(errors="replace"))
    return ": ".join(texts) or f"GSSAPI says {major:#x}"


def _taken(gss: Any, buffer: _Buffer) -> bytes:
    content = b""
    if buffer.value:
        content = ctypes.string_at(buffer.value, buffer.length)
    gss.gss_release_buffer(ctypes.byref(ctypes.c_uint32()), ctypes.byref(buffer))
    return content


VARIABLE = "HADOOP_TOKEN_FILE_LOCATION"

_MAGIC = b"HDTS"
_WRITABLE = 0
_PROTOBUF = 1
_KIND = "HDFS_DELEGATION_TOKEN"
_HIGH_AVAILABILITY = "ha-hdfs:"


@dataclass(frozen=True, slots=True)
class Token:
    """A token for one ``service``: ``address:port`` of a name node, or ``ha-hdfs:name`` of a name
    service."""

    identifier: bytes
    password: bytes = field(repr=False)
    kind: str
    service: str


def tokens() -> list[Token]:
    """Return the HDFS tokens named by the environment. Raises OSError, and ValueError if the file
    is not a token file."""
    location = os.environ.get(VARIABLE)
    if not location:
        return []
    return [token for token in parse_tokens(Path(location).read_bytes()) if token.kind == _KIND]


def token_of(authority: str, found: Sequence[Token]) -> Token | None:
    """Return the token for a name node or name service, if any."""
    services = (authority, _HIGH_AVAILABILITY + authority)
    return next((token for token in found if token.service in services), None)


def service_address(authority: str, found: Sequence[Token]) -> str:
    """Return ``authority`` as the tokens spell it, mostly with the host's IP address; unchanged if
    no token matches."""
    host, _, port = authority.rpartition(":")
    if not host or not found or token_of(authority, found) is not None:
        return authority
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return authority
    candidates = [f"{where[0]}:{port}" for *_, where in addresses]
    return next(
        (address for address in candidates if token_of(address, found) is not None), authority
    )


def url_form(token: Token) -> str:
    """Encode a token for a WebHDFS request. Kind and service are left empty: the server knows
    them."""
    content = b"".join(_counted(part) for part in (token.identifier, token.password, b"", b""))
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def parse_tokens(content: bytes) -> list[Token]:
    """Parse a token file in either of its formats. Raises ValueError."""
    if content[:4] != _MAGIC or len(content) < 6 or content[4] not in (_WRITABLE, _PROTOBUF):
        raise ValueError("this is not a token file")
    reader = _Reader(content[5:])
    return list(_from_writables(reader) if content[4] == _WRITABLE else _from_protobuf(reader))


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def take(self, nbytes: int) -> bytes:
        if nbytes < 0 or nbytes > len(self._content) - self._at:
            raise ValueError("the token file ends too early")
        self._at += nbytes
        return self._content[self._at - nbytes : self._at]

    def writable(self) -> int:
        """Read a number in the format of Hadoop's WritableUtils.writeVLong. Raises ValueError for
        negative ones: lengths never are."""
        first = int.from_bytes(self.take(1), signed=True)
        if first >= -112:
            return first
        if first < -120:
            raise ValueError("the token file contains a negative length")
        return int.from_bytes(self.take(-112 - first))

    def varint(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("the token file contains a number without end")

    def fields(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and content of each field of a protobuf message. Token messages only have
        length-delimited fields."""
        while self._at < len(self._content):
            tag = self.varint()
            if tag & 7 != 2:
                raise ValueError("the token file contains an unknown field")
            yield tag >> 3, self.take(self.varint())


def _from_writables(reader: _Reader) -> Iterator[Token]:
    for _ in range(reader.writable()):
        reader.take(reader.writable())  # the alias
        parts = [reader.take(reader.writable()) for _ in range(4)]
        yield Token(parts[0], parts[1], parts[2].decode(), parts[3].decode())


def _from_protobuf(reader: _Reader) -> Iterator[Token]:
    message = _Reader(reader.take(reader.varint()))
    for number, entry in message.fields():
        if number == 1:  # field 2 is a secret key
            token = dict(_Reader(dict(_Reader(entry).fields()).get(2, b"")).fields())
            parts = [token.get(part, b"") for part in range(1, 5)]
            yield Token(parts[0], parts[1], parts[2].decode(), parts[3].decode())


def _counted(part: bytes) -> bytes:
    """Return ``part`` with its length in front, as :meth:`_Reader.writable` reads it."""
    if len(part) < 128:
        return bytes([len(part)]) + part
    length = len(part).to_bytes((len(part).bit_length() + 7) // 8)
    return bytes([256 - 112 - len(length)]) + length + part
