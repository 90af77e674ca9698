"""Delegation tokens from the file named by ``HADOOP_TOKEN_FILE_LOCATION``, as written by ``hdfs
fetchdt`` and YARN.

hdfs-native reads the file too, but does not resolve hosts, although Hadoop writes IP addresses into
tokens, and does not explain a malformed file.

Scope: kinds and services of tokens. Only the name node understands their content.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    return [token for token in parse(Path(location).read_bytes()) if token.kind == _KIND]


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


def parse(content: bytes) -> list[Token]:
    """Parse a token file in either of its formats. Raises ValueError."""
    if content[:4] != _MAGIC or len(content) < 6 or content[4] not in (_WRITABLE, _PROTOBUF):
        raise ValueError("this is not a token file")
    reader = _Reader(content[5:])
    return list(_from_writables(reader) if content[4] == _WRITABLE else _from_protobuf(reader))


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    @property
    def more(self) -> bool:
        return self._at < len(self._content)

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
        while self.more:
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
