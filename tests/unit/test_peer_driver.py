"""``peer://`` without a keeper: URIs, options, its secret, and answers that no keeper gives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drivers import asynchronous, changes, keys
from support.shelves import until

from holdfast.drivers.contract import Driver
from holdfast.drivers.peer.driver import LIST_NBYTES_MAX, PeerDriver
from holdfast.drivers.registry import open_driver, resolved_options
from holdfast.drivers.uri import parse
from holdfast.errors import (
    AccessError,
    BusyError,
    DamagedError,
    HoldfastError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UriError,
)
from holdfast.storage.serving.requests import (
    is_authorized,
)

TOKEN = "0123456789abcdef" * 2


@contextmanager
def answering(answer: bytes, *, keeps: bool = False) -> Iterator[str]:
    """Return the URI of a server with a fixed answer, which closes or keeps the connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with contextlib.suppress(OSError):
                    connection.settimeout(10)
                    asked = b""
                    while not asked.endswith(b"\r\n\r\n") and (more := connection.recv(65536)):
                        asked += more
                    connection.sendall(answer)
                if keeps:
                    kept.append(connection)
                else:
                    connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"peer://127.0.0.1:{listening.getsockname()[1]}/run"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for connection in kept:
            connection.close()
        thread.join(10)


def outcome(uri: str, use: Callable[[Driver], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of ``use`` of a driver without layers, or its error, which must be ours."""

    async def run() -> Any:
        driver = PeerDriver.open(parse(uri))
        try:
            async with asyncio.timeout(30):
                return await use(driver)
        except HoldfastError as error:
            return error
        finally:
            await driver.close()

    return asyncio.run(run())


async def read_four(driver: Driver) -> bytes:
    """Read bytes 2 to 6 of x."""
    into = memoryview(bytearray(4))
    await driver.read("x", 2, into)
    return bytes(into)


def http(status: int, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    """Return an answer."""
    nbytes = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {nbytes}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


# URIs and options


@pytest.mark.parametrize(
    "uri",
    ["peer://", "peer://host", "peer://host/run", "peer://:80/run", "peer://host:0/run", "peer://host:x/run", "peer://host:99999/run", "peer://user@host:80/run", "peer://[::1/run", "peer://host:80/run/../other", "peer://host:80/a%2F%2Fb"],
)  # fmt: skip
def test_uris_that_name_no_keeper(uri: str) -> None:
    """They are refused before any connection."""
    with pytest.raises(UriError):
        open_driver(uri)


def test_a_token_is_never_part_of_a_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the environment or a keyword, and no text shows it, nor one that is wrong."""
    with pytest.raises(UriError, match="secret"):
        open_driver(f"peer://host:80/run?token={TOKEN}")
    monkeypatch.setenv("HOLDFAST_PEER_TOKEN", TOKEN)
    found = resolved_options(parse("peer://host:80/run"))["token"]
    assert (found.value, found.source) == (TOKEN, "HOLDFAST_PEER_TOKEN")
    assert TOKEN not in repr(found)
    for wrong in ("hidden\r\nX-Header: 1", "hiddén", "hidden hidden", "hidden" * 50):
        with pytest.raises(UriError, match="token") as raised:
            open_driver("peer://host:80/run", token=wrong)
        assert "hidd" not in str(raised.value)


def test_certificates_that_are_none(tmp_path: Path) -> None:
    """A file that is missing, or has none, is refused at once."""
    (tmp_path / "empty").write_text("nothing")
    for ca in (tmp_path / "missing", tmp_path / "empty"):
        with pytest.raises(UriError, match="certificates to trust"):
            open_driver(f"peer://host:80/run?tls=on&ca={ca}")


@asynchronous
async def test_nothing_can_be_changed() -> None:
    """Every such call is an error that says so; nobody is asked."""
    driver = open_driver("peer://host.invalid:80/run")
    for call in changes(driver, "x"):
        with pytest.raises(StorageError, match="read-only"):
            await call
    for key in ("../x", "/x", "a//b", "\0"):
        for call in (driver.get(key), driver.stat(key), driver.put(key, b"")):
            with pytest.raises(UriError):
                await call
    await driver.close()
    with pytest.raises(StorageError, match="closed"):
        await driver.get("x")


# Answers


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (http(401), AccessError), (http(403), AccessError), (http(404), NotFoundError), (http(416, b"", "Content-Range: bytes */3"), DamagedError), (http(416), DamagedError),
        (http(429), BusyError), (http(503, b"", "Retry-After: 2"), BusyError), (http(503, b"", "Retry-After: never"), BusyError), (http(500), StorageDownError), (http(502, b"<html>" * 20_000), StorageDownError),
        (http(302, b"", "Location: http://127.0.0.1:1/"), StorageError), (http(200, b"all of it"), StorageError), (http(204), StorageError),
        (http(206, b"four"), StorageError), (http(206, b"four", "Content-Range: bytes 2-5"), StorageError), (http(206, b"four", "Content-Range: bytes 1-4/9"), StorageError),
        (http(206, b"fours", "Content-Range: bytes 2-5/9"), StorageError), (http(206, b"four", "Content-Range: bytes 2-5/4"), DamagedError), (http(206, b"thr", "Content-Range: bytes 2-4/5"), DamagedError),
        (http(206, b"fo", "Content-Range: bytes 2-5/9", length=4), StorageDownError), (http(206, b"four", "Content-Range: bytes 2-5/9", length=-1), StorageError), (http(206, b"4\r\nfour\r\n0\r\n\r\n", "Content-Range: bytes 2-5/9", "Transfer-Encoding: chunked"), StorageError),
        (b"", StorageDownError), (b"SSH-2.0-OpenSSH_9.6\r\n", StorageError), (b"HTTP/1.1 2", StorageError), (b"HTTP/1.1 206 x\r\n" + b"X: y\r\n" * 200 + b"\r\n", StorageError), (b"HTTP/1.1 206 x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", StorageError), (b"\x00" * 100, StorageError),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_what_was_asked_for(answer: bytes, kind: type[HoldfastError]) -> None:
    """Each is an error of its kind. None is read as the bytes of an object."""
    with answering(answer) as uri:
        assert isinstance(outcome(uri, read_four), kind)


def test_when_to_come_back_is_bounded() -> None:
    """A keeper that says a year is not believed."""
    for said, expected in (("2", 2.0), ("99999", 60.0), ("9" * 50, None), ("-1", None)):
        with answering(http(503, b"", f"Retry-After: {said}")) as uri:
            assert outcome(uri, read_four).retry_after_s == expected


@pytest.mark.parametrize(
    "line",
    [b"x", b"[]", b"{}", b"3", b"[" * 100_000, b'{"key": 3, "nbytes": 1, "modified_s": 1}', *(json.dumps({"key": key, "nbytes": nbytes, "modified_s": when}).encode() for key, nbytes, when in [("other/x", 1, 1), ("run/../x", 1, 1), ("run//x", 1, 1), ("run/", 1, 1), ("run", 1, 1), ("run/x", -1, 1), ("run/x", True, 1), ("run/x", 1 << 64, 1), ("run/x", 1.5, 1), ("run/x", 1, "now"), ("run/x", 1, float("nan")), ("run/x\0", 1, 1)])],
)  # fmt: skip
def test_a_list_that_makes_no_sense(line: bytes) -> None:
    """None of its keys leaves the root: it is an error."""
    with answering(http(200, line + b"\n")) as uri:
        assert isinstance(outcome(uri, keys), StorageError)


@pytest.mark.parametrize(
    ("use", "nbytes", "kind"),
    [
        (keys, LIST_NBYTES_MAX + 1, StorageError),
        (lambda driver: driver.get("x"), (4 << 30) + 1, DamagedError),
    ],
    ids=["list", "object"],
)
def test_an_answer_that_is_too_long_is_refused(use: Any, nbytes: int, kind: type) -> None:
    """A list or an object without an end is refused before memory is taken for it."""
    with answering(http(200, b"", length=nbytes)) as uri:
        assert isinstance(outcome(uri, use), kind)


def test_a_read_that_is_cancelled_midway_ends(tmp_path: Path) -> None:
    """It ends when half of its answer has come. Its thread does not touch the memory after that."""
    before = _threads()
    head = http(206, b"fo", "Content-Range: bytes 2-5/9", length=4)
    with answering(head, keeps=True) as uri:

        async def use() -> bytes:
            driver = PeerDriver.open(parse(uri))
            into = bytearray(4)
            read = asyncio.ensure_future(driver.read("x", 2, memoryview(into)))
            await asyncio.sleep(0.2)
            read.cancel()
            async with asyncio.timeout(10):
                with pytest.raises(asyncio.CancelledError):
                    await read
                await driver.close()
            return bytes(into)

        assert asyncio.run(use()) in (b"fo\0\0", b"\0\0\0\0")
    until(lambda: _threads() <= before, "no thread is left")


def _threads() -> set[int | None]:
    return {t.ident for t in threading.enumerate() if t.name.startswith("holdfast-io")}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=30), st.sampled_from([b"HTTP/1.1 206 OK\r\n", b"HTTP/1.1 200 OK\r\n", b"Content-Length: 4\r\n", b"Content-Range: bytes 2-5/9\r\n", b"Content-Range: bytes 2-5/99999999999999999999\r\n", b"Content-Length: 4, 4\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n", b"four", b"HTTP/1.1 100 Continue\r\n\r\n"])), max_size=8))  # fmt: skip
def test_any_answer_is_read_or_refused(pieces: list[bytes]) -> None:
    """Any answer gives an error of ours, or four bytes."""
    with answering(b"".join(pieces)) as uri:
        found = outcome(uri, read_four)
    assert isinstance(found, HoldfastError) or len(found) == 4


# Requests, as the server understands them


def test_only_the_token_is_the_token() -> None:
    """Anything else in the header is refused; the word before the token may be in any case."""
    for header in (None, "", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \udc80"):
        assert not is_authorized(header, TOKEN)
    for word in ("Bearer", "bearer"):
        assert is_authorized(f"{word} {TOKEN}", TOKEN)
