"""Files of delegation tokens, as Hadoop writes them in both of its forms."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from holdfast.drivers.hdfs.driver import HdfsDriver
from holdfast.drivers.hdfs.tokens import Token, parse, service_address, token_of, tokens, url_form
from holdfast.drivers.uri import parse as parse_uri
from holdfast.errors import UriError

KIND = "HDFS_DELEGATION_TOKEN"
TOKENS = [
    Token(b"identifier" * 30, b"password", KIND, "127.0.0.1:8020"),
    Token(b"other", b"secret", KIND, "ha-hdfs:ns"),
    Token(b"kms", b"key", "kms-dt", "kms:9600"),
]


def writable(parts: list[bytes]) -> bytes:
    """Each part with its length before it, as Hadoop's Writables have it; lengths are below 65536."""
    found = b""
    for part in parts:
        small = len(part) < 128
        length = bytes([len(part)]) if small else bytes([256 - 114]) + len(part).to_bytes(2)
        if 128 <= len(part) < 256:
            length = bytes([256 - 113, len(part)])
        found += length + part
    return found


def varint(number: int) -> bytes:
    """As protobuf has it."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def message(fields: list[tuple[int, bytes]]) -> bytes:
    """A protobuf message of counted bytes."""
    return b"".join(
        varint(number << 3 | 2) + varint(len(content)) + content for number, content in fields
    )


def fields_of(token: Token) -> list[bytes]:
    """The parts of a token in their order."""
    return [token.identifier, token.password, token.kind.encode(), token.service.encode()]


def writable_file() -> bytes:
    """As ``hdfs fetchdt`` writes it."""
    entries = b"".join(writable([b"alias", *fields_of(token)]) for token in TOKENS)
    return b"HDTS\0" + bytes([len(TOKENS)]) + entries + b"\0"


def protobuf_file() -> bytes:
    """As ``hdfs dtutil`` writes it."""
    entries = [
        message([(1, b"alias"), (2, message(list(enumerate(fields_of(token), 1))))])
        for token in TOKENS
    ]
    content = message([*((1, entry) for entry in entries), (2, b"a secret key")])
    return b"HDTS\1" + varint(len(content)) + content


@pytest.mark.parametrize(
    "content", [writable_file(), protobuf_file()], ids=["writable", "protobuf"]
)
def test_both_forms_are_read(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of a file; of those only HDFS's count."""
    assert parse(content) == TOKENS
    (tmp_path / "tokens").write_bytes(content)
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "tokens"))
    assert tokens() == TOKENS[:2]


@pytest.mark.parametrize(
    "content", [writable_file(), protobuf_file()], ids=["writable", "protobuf"]
)
def test_a_file_that_was_cut_off_is_refused(content: bytes) -> None:
    """At whatever byte, but for a list of secret keys that is missing; as a ValueError, and never
    by reading on."""
    end = len(content) - (1 if content[4] == 0 else 0)
    for nbytes in range(end):
        with pytest.raises(ValueError, match="token file"):
            parse(content[:nbytes])


def test_a_token_is_found_by_its_service() -> None:
    """By the authority of the URI, by the name service, and by the address of a host; others are
    nobody's."""
    assert token_of("127.0.0.1:8020", TOKENS) == TOKENS[0]
    assert token_of("ns", TOKENS) == TOKENS[1]
    assert service_address("localhost:8020", TOKENS) == "127.0.0.1:8020"
    for authority in ("localhost:8021", "ns", "nowhere.invalid:8020", "localhost:port", ""):
        assert service_address(authority, TOKENS) == authority
    assert service_address("localhost:8020", []) == "localhost:8020"


def test_a_request_carries_a_token_in_its_own_form() -> None:
    """Identifier and password, each counted, without kind and service, in base 64 that a URL may
    hold."""
    form = url_form(TOKENS[0])
    assert "=" not in form
    content = base64.urlsafe_b64decode(form + "=" * (-len(form) % 4))
    assert content == writable([TOKENS[0].identifier, TOKENS[0].password, b"", b""])


def test_what_a_token_proves_is_not_printed() -> None:
    """A traceback shows tokens, and not their passwords."""
    assert "password" not in repr(TOKENS[0])


@pytest.mark.parametrize("content", [b"", b"HDTS\2 ", b"HDTS\0\5short", None])
def test_a_file_without_tokens_is_an_error_before_any_call(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is damaged, of another kind, or not there: the error names the variable."""
    if content is not None:
        (tmp_path / "tokens").write_bytes(content)
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "tokens"))
    with pytest.raises(UriError, match="HADOOP_TOKEN_FILE_LOCATION"):
        HdfsDriver.open(parse_uri("hdfs://localhost:8020/x"))
