"""A real server over sealed memory: reads by ``peer://``, and answers to bad requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drivers import used
from support.shelves import MemfdShelf, Showing, showing, until

from holdfast.drivers.registry import open_driver
from holdfast.errors import (
    AccessError,
    BusyError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UsageError,
)
from holdfast.storage.arenas.memory import reserved_memory
from holdfast.storage.keeper.serving.memory_catalog import Content
from holdfast.storage.keeper.serving.serve import serve
from holdfast.storage.serving.options import ServeOptions, address_of, new_token

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

BIG = os.urandom(5_000_001)


@pytest.fixture
def shelf() -> MemfdShelf:
    """Return a shelf with two runs in memory."""
    made = MemfdShelf()
    made.add("run/a/big", BIG)
    made.add("run/b", b"small")
    made.add("other/b", b"another run's")
    return made


@pytest.fixture
def shown(shelf: MemfdShelf) -> Iterator[Showing]:
    """Run a server of the shelf."""
    with showing(shelf, quiet_s=20.0) as server:
        yield server


def exchanged(shown: Showing, data: bytes, *, ends: bool = False) -> bytes:
    """Send ``data`` and return the response. With ``ends``, nothing more will be sent."""
    with socket.create_connection(("127.0.0.1", shown.port), timeout=60) as sock:
        sock.sendall(data)
        if ends:
            sock.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := sock.recv(1 << 20):
                received += chunk
        return received


def asked(
    shown: Showing, target: str, *headers: str, method: str = "GET", token: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers in lower case, and body of the answer to one request."""
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close"]
    lines.append(f"Authorization: Bearer {shown.token if token is None else token}")
    answer = exchanged(shown, "\r\n".join([*lines, *headers, "", ""]).encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    named = dict(field.lower().split(": ", 1) for field in fields)
    return int(status.split()[1]), named, body


def request_for(shown: Showing, key: str, *headers: str) -> bytes:
    """Return a request with the token for an object."""
    lines = (f"GET /v1/object/{key} HTTP/1.1", "Host: x", f"Authorization: Bearer {shown.token}")
    return "\r\n".join([*lines, *headers, "", ""]).encode()


@contextlib.contextmanager
def unread(shown: Showing, shelf: MemfdShelf) -> Iterator[socket.socket]:
    """Yield a connection that does not read the response to its request for a huge object."""
    shelf.add("run/huge", bytes(64 << 20))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", shown.port))
        sock.sendall(request_for(shown, "run/huge"))
        until(lambda: shelf.pinned.get("run/huge") == 1, "the response has begun")
        yield sock


def is_alive(shown: Showing) -> bool:
    """Return whether the server still answers."""
    return asked(shown, "/v1/object/run/b")[2] == b"small"


# Reading


def test_what_is_on_the_shelf_is_read(shown: Showing, shelf: MemfdShelf) -> None:
    """Ranges, objects, sizes, times and lists are right, and nothing stays pinned."""

    async def use() -> None:
        driver = open_driver(shown.uri("run"), token=shown.token)
        into = memoryview(bytearray(3_000_000))
        await driver.read("a/big", 1_234_567, into)
        assert into == BIG[1_234_567:4_234_567]
        assert await driver.fetch("a/big", 5_000_000, 1) == BIG[5_000_000:]
        pieces: list[bytes] = []
        await driver.read_pieces("a/big", 77, 4_000_000, lambda p: pieces.append(bytes(p)))
        assert b"".join(pieces) == BIG[77:4_000_077]
        assert len(pieces) == 4
        assert await driver.get("b") == b"small"
        info = await driver.stat("a/big")
        assert (info.nbytes, info.modified_s) == (len(BIG), shelf.modified_s)
        assert sorted([i.key async for i in driver.list()]) == ["a/big", "b"]
        assert [i.key async for i in driver.list("a")] == ["a/big"]
        assert [i.key async for i in driver.list("a/b")] == []
        await driver.close()

    asyncio.run(use())
    assert set(shelf.pinned.values()) == {0}


def test_connections_are_used_again(shelf: MemfdShelf) -> None:
    """Connections are reused, also after refusals, and replaced once the server has closed them."""

    async def use(shown: Showing) -> None:
        driver = open_driver(shown.uri("run"), token=shown.token, retries=0)
        for _ in range(5):
            assert await driver.get("b") == b"small"
            with pytest.raises(NotFoundError):
                await driver.get("x")
            assert len(shown.server.connections) == 1
        until(lambda: not len(shown.server.connections), "the connection is closed")
        assert await driver.get("b") == b"small"
        await driver.close()

    with showing(shelf, quiet_s=2.0) as shown:
        asyncio.run(use(shown))


# TLS


def issued(folder: Path) -> tuple[str, str, str]:
    """Return the files of a certificate for this host, of its key, and of its authority."""
    trustme = pytest.importorskip("trustme", reason="trustme is not installed")
    authority = trustme.CA()
    mine = authority.issue_cert("localhost", "127.0.0.1")
    certificate, key, ca = (str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    mine.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    for blob in mine.cert_chain_pems:
        blob.write_to_path(certificate, append=True)

    return certificate, key, ca


def test_tls(shelf: MemfdShelf, tmp_path: Path) -> None:
    """Clients that do not name the server's authority, or speak no TLS, get an error at once."""
    certificate, key, ca = issued(tmp_path)

    def got(shown: Showing, key: str, **options: str) -> bytes:
        return used(shown.uri("run", **options), lambda d: d.get(key), token=shown.token, retries=0)

    with showing(shelf, certificate=certificate, key=key) as shown:
        assert got(shown, "a/big", tls="on", ca=ca) == BIG
        began_s = time.monotonic()
        with pytest.raises(StorageError, match=r"not trusted.*\?ca="):
            got(shown, "b", tls="on")
        with pytest.raises(StorageError):
            got(shown, "b")
        assert time.monotonic() - began_s < 20
    with showing(shelf) as shown, pytest.raises(StorageError, match="no TLS connection"):
        got(shown, "b", tls="on", ca=ca)


def test_a_tls_connection_that_was_reset_is_replaced(tmp_path: Path) -> None:
    """A keeper that has dropped an idle connection, or one in its handshake, is asked again."""
    certificate, key, ca = issued(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    received, was_reset = threading.Event(), threading.Event()

    def answered(listening: socket.socket) -> ssl.SSLSocket:
        secured = context.wrap_socket(listening.accept()[0], server_side=True)
        assert secured.recv(65536)
        secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        return secured

    def serve(listening: socket.socket) -> None:
        with answered(listening) as idle:
            assert received.wait(10)
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        was_reset.set()
        listening.accept()[0].close()
        answered(listening).close()

    async def use(port: int) -> None:
        uri = f"peer://127.0.0.1:{port}/run?tls=on&ca={ca}&timeout=5s"
        driver = open_driver(uri, retries=1)
        assert await driver.get("b") == b"x"
        received.set()
        assert was_reset.wait(10)
        assert await driver.get("b") == b"x"
        await driver.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        asyncio.run(use(listening.getsockname()[1]))
        thread.join(10)


# Deadlines


def test_a_keeper_that_is_silent_is_given_up() -> None:
    """After ``timeout``, the error is a temporary one. A keeper that is gone fails at once."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"peer://127.0.0.1:{silent.getsockname()[1]}/run"
        with pytest.raises(StorageDownError, match="does not answer"):
            used(f"{uri}?timeout=300ms", lambda driver: driver.get("x"), retries=0)
    with pytest.raises(StorageDownError):
        used(uri, lambda driver: driver.get("x"), retries=0)


def test_a_client_that_does_not_read_is_cut_off(shelf: MemfdShelf) -> None:
    """Otherwise it would keep memory pinned."""
    with showing(shelf, quiet_s=0.5) as shown, unread(shown, shelf):
        until(lambda: shelf.pinned["run/huge"] == 0, "the answer is given up")
        assert is_alive(shown)


def test_memory_that_is_let_go_is_not_sent_from_any_more(shelf: MemfdShelf) -> None:
    """A slow client gets the content at its request, even if the slot is refilled right after."""
    nbytes = 8 << 20
    held = reserved_memory(nbytes)
    held.view[:] = b"\x01" * nbytes

    class Refilled(MemfdShelf):
        @contextlib.contextmanager
        def open(self, key: str) -> Iterator[Content]:
            yield Content(held.view, 0.0)
            held.view[:] = b"\x02" * nbytes

    with showing(Refilled()) as shown, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        slow.settimeout(60)
        slow.connect(("127.0.0.1", shown.port))
        slow.sendall(request_for(shown, "x", "Connection: close"))
        time.sleep(0.2)
        received = bytearray()
        while chunk := slow.recv(1 << 20):
            received += chunk
            time.sleep(0.001)
    body = received.partition(b"\r\n\r\n")[2]
    assert body == b"\x01" * nbytes
    assert held.view[:1] == b"\x02"


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX: "])
def test_a_request_that_never_ends_is_cut_off(shelf: MemfdShelf, sent: bytes) -> None:
    """A client that has sent the token has some time for each whole request."""
    with showing(shelf, quiet_s=0.5) as shown, connected(shown) as sock:
        authenticate(sock, shown)
        sock.sendall(sent)
        assert is_closed(sock)
        assert is_alive(shown)


# Clients without the token


def connected(shown: Showing) -> socket.socket:
    """Return a new connection."""
    return socket.create_connection(("127.0.0.1", shown.port), timeout=20)


def authenticate(sock: socket.socket, shown: Showing) -> None:
    """Send a request with the token, and receive the response."""
    sock.sendall(request_for(shown, "run/b"))
    received = b""
    while not received.endswith(b"small"):
        received += (data := sock.recv(1000))
        assert data, "the server has closed the connection"


def is_closed(sock: socket.socket) -> bool:
    """Wait until the server closes a connection. Return False if it sends something instead."""
    with contextlib.suppress(ConnectionError):
        return sock.recv(100) == b""
    return True


def trickle(clients: list[socket.socket], ended: threading.Event) -> None:
    """Send an endless header on each connection, a byte at a time."""
    data = b"GET /health HTTP/1.1\r\nX: "
    while not ended.wait(0.05):
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(data)
        data = b"x"


def reconnect(shown: Showing, clients: list[socket.socket], ended: threading.Event) -> None:
    """Replace the oldest connection by a new one, again and again."""
    while not ended.wait(0.003):
        with contextlib.suppress(OSError):
            clients.append(connected(shown))
            clients.pop(0).close()


def reported(shown: Showing, said: str = "report") -> bytes:
    """Return the response to a report of a keeper."""
    return asked(shown, "/v1/report", f"Content-Length: {len(said)}", "", said, method="POST")[2]


def metric(shown: Showing, name: str) -> int:
    """Return a counter of the HTTP server."""
    found = re.search(rf"http_{name}_total (\d+)", asked(shown, "/metrics")[2].decode())
    assert found is not None
    return int(found[1])


def test_strangers_do_not_keep_others_out(
    shelf: MemfdShelf, caplog: pytest.LogCaptureFixture
) -> None:
    """Idle, slow and reconnecting clients without the token delay no keeper, and log little."""

    async def hear(report: bytes) -> bytes:
        return b"heard " + report

    with showing(shelf, hear=hear, stranger_s=60.0) as shown, contextlib.ExitStack() as stack:
        old = stack.enter_context(connected(shown))
        authenticate(old, shown)
        clients = [connected(shown) for _ in range(300)]
        ended = threading.Event()
        threads = [threading.Thread(target=trickle, args=(clients[-20:], ended))]
        threads += [threading.Thread(target=reconnect, args=(shown, clients, ended))]
        try:
            for thread in threads:
                thread.start()
            for _ in range(10):
                began_s = time.monotonic()
                authenticate(old, shown)
                with connected(shown) as new:
                    authenticate(new, shown)
                assert reported(shown, "news") == b"heard news"
                assert time.monotonic() - began_s < 10
            assert asked(shown, "/health", token="wrong")[0] == 200
            assert metric(shown, "closed_strangers") > 200
        finally:
            ended.set()
            for thread in threads:
                thread.join(30)
            for client in clients:
                client.close()
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 0 < len(warned) <= 3


@pytest.mark.parametrize(
    ("sent", "then"),
    [
        (b"", b""),
        (b"GET /", b"x"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", b"x"),
        (b"POST /v1/report HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nX: ", b"x"),
    ],
)
def test_a_stranger_has_little_time(shelf: MemfdShelf, sent: bytes, then: bytes) -> None:
    """Bytes that trickle in do not prolong it. A client that has sent the token stays."""
    with (
        showing(shelf, stranger_s=0.5) as shown,
        connected(shown) as keeper,
        connected(shown) as stranger,
    ):
        authenticate(keeper, shown)
        began_s = time.monotonic()
        stranger.sendall(sent)
        while len(shown.server.connections) == 2:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(then)
            assert time.monotonic() - began_s < 5
            time.sleep(0.05)
        assert time.monotonic() - began_s > 0.4
        assert is_closed(stranger)
        authenticate(keeper, shown)
        assert metric(shown, "closed_strangers") == 1


def test_a_stranger_has_one_request(shown: Showing) -> None:
    """A wrong token and /health are answered, and the connection is closed."""
    for target in ("/health", "/status"):
        request = f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n\r\n"
        answer = exchanged(shown, request.encode() * 2)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer.lower()


def test_a_flood_displaces_itself(shelf: MemfdShelf) -> None:
    """A new stranger takes the place of the oldest of the address that has the most."""
    with (
        showing(shelf, interface="0.0.0.0", strangers_max=3) as shown,
        contextlib.ExitStack() as stack,
    ):
        other = stack.enter_context(
            socket.create_connection(("127.0.0.1", shown.port), 20, ("127.0.0.2", 0))
        )
        until(lambda: len(shown.server.connections) == 1, "the other address is there")
        flood = [stack.enter_context(connected(shown)) for _ in range(10)]
        for displaced in flood[:8]:
            assert is_closed(displaced)
        assert len(shown.server.connections) == 3
        for kept in (other, *flood[8:]):
            authenticate(kept, shown)


def test_tls_handshakes_are_limited_too(shelf: MemfdShelf, tmp_path: Path) -> None:
    """Clients that never finish a handshake have the same deadline and places as strangers."""
    certificate, key, ca = issued(tmp_path)

    def use(shown: Showing) -> None:
        uri = shown.uri("run", tls="on", ca=ca)
        assert used(uri, lambda driver: driver.get("b"), token=shown.token, retries=0) == b"small"

    with (
        showing(shelf, certificate=certificate, key=key, strangers_max=8, stranger_s=1.0) as shown,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(connected(shown)) for _ in range(20)]
        for client in clients[::2]:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"\x16\x03\x01\x02\x00")  # the head of a TLS record
        use(shown)
        assert all(is_closed(client) for client in clients)
        assert len(shown.server.connections) == 0
        use(shown)


# Limits


def test_connections_beyond_the_limit_are_refused(shelf: MemfdShelf) -> None:
    """Existing connections continue; when one ends there is room again."""
    with showing(shelf, connections_max=2) as shown, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(connected(shown)) for _ in range(2)]
        for sock in kept:
            authenticate(sock, shown)
        status, headers, _ = asked(shown, "/v1/object/run/b")
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert asked(shown, "/health")[0] == 200
        authenticate(kept[0], shown)
        kept[0].close()
        until(lambda: len(shown.server.connections) == 1, "one is gone")
        assert is_alive(shown)


def test_requests_beyond_the_limit_come_back_later(shelf: MemfdShelf) -> None:
    """Requests beyond the limit are refused as busy, and the retry layer repeats them."""
    with showing(shelf, requests_max=1) as shown, unread(shown, shelf) as slow:

        async def use() -> None:
            driver = open_driver(shown.uri("run"), token=shown.token, retries=0)
            with pytest.raises(BusyError) as raised:
                await driver.get("b")
            assert raised.value.retry_after_s == 1.0
            await driver.close()
            patient = open_driver(shown.uri("run"), token=shown.token)
            asyncio.get_running_loop().call_later(0.3, slow.close)
            assert await patient.get("b") == b"small"
            await patient.close()

        asyncio.run(use())


def test_keepers_of_a_large_job_have_places_beyond_the_limits() -> None:
    """All of them wait for the leader at the same time."""
    count = 20
    waiting = 0
    all_wait = asyncio.Event()

    async def hear(body: bytes) -> bytes:
        nonlocal waiting
        waiting += 1
        if waiting == count:
            all_wait.set()
        await all_wait.wait()
        return b"answer"

    shelf = MemfdShelf(others=count)
    limits = {"requests_max": 1, "connections_max": 1, "strangers_max": 1}
    with showing(shelf, hear=hear, **limits) as shown, ThreadPoolExecutor(count) as threads:
        assert list(threads.map(reported, [shown] * count)) == [b"answer"] * count


# Requests


def test_status_metrics_and_health(shown: Showing) -> None:
    """They are JSON, Prometheus' text format, and a word."""
    assert asked(shown, "/health", token="wrong")[::2] == (200, b"ok\n")
    status, headers, body = asked(shown, "/status")
    assert (status, json.loads(body)) == (200, {"objects": 3})
    assert headers["content-type"].startswith("application/json")
    body = asked(shown, "/metrics")[2]
    assert b"objects 3\n" in body
    assert re.search(rb"^holdfast_keeper_http_requests_total [1-9]", body, re.MULTILINE)


@pytest.mark.parametrize("token", ["", "0" * 32, "é", "a b"])
def test_a_wrong_token_gets_nothing(shown: Showing, token: str) -> None:
    """It does not learn whether an object exists. The driver's error says where tokens are read."""
    for path in ("/v1/list", "/v1/object/run/b", "/status", "/metrics", "/x"):
        status, headers, body = asked(shown, path, token=token)
        assert status in (400, 401)
        assert b"small" not in body
        if status == 401:
            assert headers["www-authenticate"] == "bearer"

    with pytest.raises(AccessError, match="HOLDFAST_PEER_TOKEN") as raised:
        used(shown.uri("run"), lambda driver: driver.get("b"), token="0123456789abcdef" * 2)
    assert "0123456789abcdef" not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "status", "found"),
    [
        ("bytes=0-0", 206, b"s"),
        ("bytes=1-", 206, b"mall"),
        ("bytes=-2", 206, b"ll"),
        ("bytes=2-100", 206, b"all"),
        ("bytes=5-", 416, b"the object ends before that range\n"),
        ("bytes=0-0,2-3", 400, None),
        ("lines=1-2", 400, None),
        ("bytes=" + "9" * 400 + "-", 400, None),
    ],
)
def test_ranges(shown: Showing, said: str, status: int, found: bytes | None) -> None:
    """A single range is served up to the end of the object; others are refused."""
    answered, headers, body = asked(shown, "/v1/object/run/b", f"Range: {said}")
    assert answered == status
    if found is not None:
        assert body == found
        assert re.fullmatch(r"bytes (\d-\d|\*)/5", headers["content-range"])


@pytest.mark.parametrize(
    ("method", "target", "header", "status"),
    [
        ("HEAD", "/v1/object/run/b", "X: y", 200),
        ("GET", "/v1/object/run/../other/b", "X: y", 400),
        ("GET", "/v1/object/run%2F..%2Fother/b", "X: y", 400),
        ("GET", "/v1/object/run/b%00", "X: y", 400),
        ("GET", "/v1/object/run/b?x=1", "X: y", 400),
        ("GET", "/v1/object/run", "X: y", 404),
        ("GET", "/etc/passwd", "X: y", 404),
        ("GET", "/v1/list?prefix=../..", "X: y", 400),
        ("GET", "http://other/v1/list", "X: y", 404),
        ("GET", "/v1/object/" + "x" * 20_000, "X: y", 400),
        ("PUT", "/v1/object/run/b", "X: y", 405),
        ("BREW", "/v1/object/run/b", "X: y", 405),
        ("GET", "/v1/object/run/b", "Content-Length: 5", 400),
        ("GET", "/v1/object/run/b", "Transfer-Encoding: chunked", 400),
    ],
)
def test_nothing_but_objects_of_the_shelf_is_served(
    shown: Showing, method: str, target: str, header: str, status: int
) -> None:
    """No path leads out of the shelf, no method changes it, and no request has a body."""
    answered, headers, body = asked(shown, target, header, method=method)
    assert answered == status or (status == 405 and answered == 400)
    assert b"small" not in body
    if method == "HEAD":
        assert (headers["content-length"], headers["accept-ranges"]) == ("5", "bytes")
    assert is_alive(shown)


def test_headers_are_bounded(shown: Showing) -> None:
    """Length and number are limited."""
    long = f"GET /health HTTP/1.1\r\nHost: x\r\nX: {'a' * 100_000}\r\n\r\n"
    many = "GET /health HTTP/1.1\r\nHost: x\r\n" + "X: a\r\n" * 50_000 + "\r\n"
    for request in (long, many):
        with contextlib.suppress(ConnectionError):
            answer = exchanged(shown, request.encode())
            assert answer == b"" or re.match(rb"HTTP/1\.[01] 400", answer)
    assert is_alive(shown)


PIECES = [
    b"GET ", b"HEAD ", b"POST ", b"/v1/object/run/b", b"/v1/object/run/a/big", b"/v1/list?prefix=", b"/health", b"/status", b"%2e%2e/", b"../", b"%", b"\0", b"\xff", b"?",
    b" HTTP/1.1\r\n", b" HTTP/0.9\r\n", b" HTTP/9.9\r\n", b"Host: x\r\n", b"Range: bytes=", b"0-", b"-5", b"99999999999999999999-", b",", b"\r\n", b"\n", b"\r", b" ", b"Authorization: Bearer ",
    b"Content-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n", b"5\r\nabcde\r\n0\r\n\r\n", b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Connection: keep-alive\r\n", b"A" * 9000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def tried() -> Iterator[tuple[Showing, MemfdShelf]]:
    """Run a server that gets arbitrary bytes."""
    shelf = MemfdShelf()
    shelf.add("run/b", b"small")
    shelf.add("run/a/big", BIG)
    with showing(shelf, quiet_s=20.0) as shown:
        yield shown, shelf


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=20)), max_size=14))
def test_anything_may_be_sent(tried: tuple[Showing, MemfdShelf], pieces: list[bytes]) -> None:
    """For any bytes without the token, the server returns no byte of an object, and survives."""
    shown, shelf = tried
    data = b"".join(pieces)
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = exchanged(shown, data, ends=True)
    assert b"small" not in answer
    assert BIG[:20] not in answer
    assert is_alive(shown)
    until(lambda: not any(shelf.pinned.values()), "nothing is pinned")


# Options


def test_options_that_cannot_be_right_are_refused(shelf: MemfdShelf, tmp_path: Path) -> None:
    """Examples are a weak token, half of a certificate, a missing file, and a missing interface."""
    token = new_token()
    assert len(token) == 32
    assert token != new_token()
    assert token not in repr(ServeOptions(token))
    (tmp_path / "file").write_text("no certificate")
    file = str(tmp_path / "file")
    for options in (
        *map(ServeOptions, ("", "secret")),
        ServeOptions(token, certificate=file),
        ServeOptions(token, certificate=file, key=file),
        ServeOptions(token, certificate=file + "x", key=file),
        ServeOptions(token, interface="no-such-interface"),
    ):
        with pytest.raises(UsageError):
            serve(shelf, options)
    assert address_of("lo") == "127.0.0.1"
    assert address_of("::1") == "::1"


def test_a_host_without_aiohttp_is_told_what_to_install(
    shelf: MemfdShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before the server listens."""
    module = "holdfast.storage.keeper.serving.memory_server"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UsageError, match="pip install aiohttp"):
        serve(shelf, ServeOptions(new_token()))


def test_it_listens_on_loopback_alone(shown: Showing) -> None:
    """Only a named interface changes that."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", shown.port), timeout=60)
    assert is_alive(shown)
