"""An object store in the memory of a process, as ``peer://…?store=on`` uses it."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.conformance_run import run_conformance
from support.drivers import asynchronous, bare, changes, keys, stored
from support.shelves import MemfdShelf, showing, until

import holdfast
from holdfast.drivers.contract import AtMost, Driver, UploadLostError
from holdfast.drivers.registry import open_driver
from holdfast.errors import (
    AccessError,
    FullError,
    StorageDownError,
    StorageError,
    UsageError,
)

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
from holdfast.storage.serving.objects import ObjectMemory
from holdfast.storage.serving.store import MemoryStore

pytestmark = pytest.mark.clocked

MIB = 1 << 20


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """Run a store of 64 MiB, whose token is in the environment."""
    with MemoryStore(budget_nbytes=64 * MIB) as made:
        monkeypatch.setenv("HOLDFAST_PEER_TOKEN", made.token)
        yield made


def driver_of(store: MemoryStore, **options: Any) -> Driver:
    """Return a driver without layers."""
    return bare(store.uri.replace("/?", "/run?"), token=store.token, **options)


def port_of(store: MemoryStore) -> int:
    """Return the port on which it listens."""
    return int(store.uri.split("/")[2].rpartition(":")[2])


async def parts_of(upload: Any, content: bytes, nbytes: int) -> None:
    """Write all parts of an upload at once, in random order."""
    starts = list(range(0, len(content), nbytes))
    random.shuffle(starts)
    view = memoryview(content)
    await asyncio.gather(*(upload.write(at, view[at : at + nbytes]) for at in starts))


@pytest.mark.nightly(20)
@pytest.mark.timeout(240)
def test_the_kit_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial that applies passes, including atomic exclusive puts, and nothing is left."""
    with MemoryStore(budget_nbytes=1 << 30) as store:
        monkeypatch.setenv("HOLDFAST_PEER_TOKEN", store.token)
        output = run_conformance(store.uri.replace("/?", "/kit/root?"), cwd=tmp_path)
        assert "deviations      0 declared, 0 cases deviated" in output
        assert "exclusive puts are not atomic" not in output
        assert store.used_nbytes == 0


@pytest.mark.nightly(15)
def test_checkpoints_are_saved_and_loaded(store: MemoryStore) -> None:
    """A store can be used like any other storage until it ends."""
    torch = pytest.importorskip("torch")
    state = {"weight": torch.arange(1 << 20, dtype=torch.float32)}
    uri = store.uri.replace("/?", "/run/step-1?")
    holdfast.save(uri, state)
    target = {"weight": torch.zeros(1 << 20)}
    holdfast.load(uri, into=target)
    assert torch.equal(target["weight"], state["weight"])


# Uploads


@asynchronous
async def test_an_object_of_parts_is_read_in_any_range(store: MemoryStore) -> None:
    """Ranges across parts, and of a deleted object that is being read, are the written bytes."""
    driver = driver_of(store)
    content = random.randbytes(9 * MIB + 5)
    upload = await driver.create("x", AtMost(1 << 40))  # no memory is taken in advance
    await parts_of(upload, content, 2 * MIB + 3)
    await upload.commit(len(content))
    for start, stop in [(0, 1), (2 * MIB + 2, 2 * MIB + 4), (MIB, 9 * MIB), (0, len(content))]:
        assert await driver.fetch("x", start, stop - start) == content[start:stop]
    assert store.used_nbytes == len(content)
    await driver.close()


@asynchronous
async def test_a_read_survives_the_deletion_of_its_object(store: MemoryStore) -> None:
    """A reader that has begun gets the old bytes to their end, also if the key has a new object.
    Then their memory is free."""
    content = random.randbytes(32 * MIB)
    driver = driver_of(store)
    await stored(driver, "x", content)
    with socket.create_connection(("127.0.0.1", port_of(store))) as sock:
        sock.sendall(
            f"GET /v1/object/run/x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {store.token}\r\n\r\n".encode()
        )
        head = sock.recv(1000)
        received = head.partition(b"\r\n\r\n")[2]
        await driver.delete("x")
        await driver.put("x", b"new")
        assert store.used_nbytes == len(content) + 3
        while len(received) < len(content):
            received += sock.recv(1 << 20)
    assert received == content
    until(lambda: store.used_nbytes == 3, "the memory is not free")
    assert await driver.get("x") == b"new"
    await driver.close()


@asynchronous
async def test_a_full_store_says_so_and_keeps_nothing_of_a_refused_body(store: MemoryStore) -> None:
    """Beyond the budget, put, create and write raise FullError. Existing objects stay whole, and a
    deletion makes room."""
    driver = driver_of(store)
    await driver.put("kept", b"k" * 40 * MIB)
    for refused in (
        driver.put("kept", bytes(30 * MIB)),
        driver.put("new", bytes(30 * MIB), exclusive=True),
        driver.create("new", 30 * MIB),
    ):
        with pytest.raises(FullError, match="no room"):
            await refused
    upload = await driver.create("new", AtMost(30 * MIB))
    await upload.write(0, memoryview(bytes(20 * MIB)))
    with pytest.raises(FullError):
        await upload.write(20 * MIB, memoryview(bytes(10 * MIB)))
    assert store.used_nbytes == 60 * MIB
    await upload.abort()
    assert await keys(driver) == ["kept"]
    assert await driver.get("kept") == b"k" * 40 * MIB
    await driver.delete("kept")
    assert store.used_nbytes == 0
    await driver.put("new", bytes(64 * MIB))
    await driver.close()


@asynchronous
async def test_an_idle_upload_expires() -> None:
    """Parts without a successor free their memory; the upload is then lost, and a new one works."""
    with MemoryStore(budget_nbytes=MIB, upload_idle_s=0.4) as store:
        driver = driver_of(store)
        upload = await driver.create("x", 10)
        await upload.write(0, memoryview(b"01234"))
        assert store.used_nbytes == 5
        until(lambda: store.used_nbytes == 0, "the upload is still there")
        with pytest.raises(UploadLostError):
            await upload.write(5, memoryview(b"56789"))
        await stored(driver, "x", b"again")
        await driver.close()


@asynchronous
async def test_one_of_many_exclusive_puts_succeeds(store: MemoryStore) -> None:
    """Bodies that arrive at the same time do not overtake the check."""
    drivers = [driver_of(store, concurrency="8") for _ in range(4)]
    contents = [bytes([n]) * MIB for n in range(16)]
    done = await asyncio.gather(
        *(drivers[n % 4].put("x", c, exclusive=True) for n, c in enumerate(contents)),
        return_exceptions=True,
    )
    assert sorted(type(one).__name__ for one in done) == ["ExistsError"] * 15 + ["NoneType"]
    assert await drivers[0].get("x") == contents[done.index(None)]
    assert store.used_nbytes == MIB
    for driver in drivers:
        await driver.close()


def test_parts_that_do_not_make_the_object_are_refused_by_the_store() -> None:
    """The store checks every commit: holes, overlaps and another size drop the upload."""

    async def run() -> None:
        for starts, nbytes in [((0, 4), 7), ((1,), 4), ((0, 2), 5), ((0,), 4), ((), 1)]:
            memory = ObjectMemory(100, 60.0)
            memory.begin("u", "x")
            for start in starts:
                with memory.reserved(3) as part:
                    memory.write("u", start, part)
            with pytest.raises(holdfast.DamagedError):
                memory.commit("u", nbytes)
            assert (memory.used_nbytes, memory.below("")) == (0, [])

    asyncio.run(run())


# Watches


@asynchronous
async def test_a_watch_is_told_at_once(store: MemoryStore) -> None:
    """A store answers a watch as soon as the object changes, without polls, and few requests are
    made meanwhile. Watches take no thread of other operations."""
    driver = driver_of(store, concurrency="1")
    watching = [asyncio.create_task(driver.watch("x", None, 60)) for _ in range(8)]
    await asyncio.sleep(1.0)  # polls would now be 0.8 s apart
    began_s = time.monotonic()
    await driver.put("other", b"1")
    await driver.put("x", b"one")
    assert await asyncio.gather(*watching) == [b"one"] * 8
    assert time.monotonic() - began_s < 0.4
    changing = asyncio.create_task(driver.watch("x", b"one", 60))
    await asyncio.sleep(0.3)
    await driver.put("x", b"one")
    await driver.delete("x")
    await asyncio.sleep(0.3)
    await driver.put("x", b"two")
    assert await changing == b"two"
    assert await driver.watch("x", b"two", 0.2) is None
    await driver.close()


@asynchronous
async def test_a_watch_outlasts_a_restart_of_the_store(store: MemoryStore) -> None:
    """Another store at the same address, with the same number of objects, is noticed."""
    with MemoryStore(budget_nbytes=MIB, token=store.token) as first:
        uri, port = first.uri, port_of(first)
        driver = open_driver(uri)
        await driver.put("x", b"one")
        watching = asyncio.create_task(driver.watch("x", b"one", 60))
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.3)
    with MemoryStore(f"127.0.0.1:{port}", budget_nbytes=MIB, token=store.token) as second:
        writer = bare(second.uri, token=store.token)
        await writer.put("x", b"two")
        assert await watching == b"two"
        await writer.close()
        await driver.close()


# Access


@asynchronous
async def test_nothing_without_the_token(store: MemoryStore) -> None:
    """Neither reads nor changes, of any size, reach the store without its token."""
    stranger = bare(store.uri, token="0" * 32)
    *sent, sweep = changes(stranger, "x")
    await sweep
    for call in [*sent, stranger.get("x"), stranger.watch("x", None, 9)]:
        with pytest.raises(AccessError):
            await call
    with pytest.raises((AccessError, StorageDownError)):  # cut while it sends
        await stranger.put("x", bytes(40 * MIB))
    assert store.used_nbytes == 0
    await stranger.close()


def test_tls(tmp_path: Path) -> None:
    """With a certificate, requests and long bodies go through TLS; others get no answer."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    certificate, key, ca = (tmp_path / name for name in ("c.pem", "k.pem", "ca.pem"))
    made.cert_chain_pems[0].write_to_path(certificate)
    made.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    content = random.randbytes(5 * MIB)

    async def use(store: MemoryStore) -> None:
        driver = driver_of(store, ca=str(ca))
        await stored(driver, "x", content)
        assert await driver.get("x") == content
        await driver.close()
        plain = bare(store.uri.replace("&tls=on", ""), token=store.token)
        with pytest.raises(StorageError):
            await plain.get("x")
        await plain.close()

    with MemoryStore(budget_nbytes=9 * MIB, certificate=str(certificate), key=str(key)) as store:
        assert store.uri.endswith("/?store=on&tls=on")
        asyncio.run(use(store))
    with pytest.raises(UsageError, match="its key"):
        MemoryStore(budget_nbytes=1, certificate=str(certificate))


def test_values_that_no_store_can_have(store: MemoryStore) -> None:
    """A bad address or token, and a port that is taken, are errors."""
    for bad in ({"address": "nowhere!"}, {"token": "a b"}):
        with pytest.raises(UsageError):
            MemoryStore(budget_nbytes=1, **bad)  # type: ignore[arg-type]
    taken = store.uri.split("/")[2]
    with pytest.raises(UsageError, match="cannot listen"), MemoryStore(taken, budget_nbytes=1):
        pass


@asynchronous
async def test_a_keeper_is_read_only_whatever_the_uri_says() -> None:
    """Without ``store=on`` nothing is sent; with it, a keeper refuses, and can be watched."""
    shelf = MemfdShelf()
    shelf.add("run/b", b"small")
    with showing(shelf) as shown:
        for options in ("", "?store=on"):
            driver = bare(f"peer://127.0.0.1:{shown.port}/run{options}", token=shown.token)
            *calls, sweep = changes(driver, "b")
            if options:
                await sweep  # sends nothing
            for call in calls if options else [*calls, sweep]:
                with pytest.raises(StorageError, match="read-only") as caught:
                    await call
                assert not caught.value.temporary
            assert await driver.watch("b", None, 5) == b"small"
            assert await driver.watch("b", b"small", 0.2) is None
            await driver.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_clients_notice_the_end_of_a_store_whose_process_has_forked() -> None:
    """A child, such as a worker that loads data, keeps neither port nor connections open."""
    with MemoryStore(budget_nbytes=MIB) as ending, socket.socket() as client:
        ending_port = port_of(ending)
        client.connect(("127.0.0.1", ending_port))
        client.sendall(
            f"HEAD /v1/object/x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {ending.token}\r\n\r\n".encode()
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 404")
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            ending.__exit__()
            client.settimeout(10)
            assert client.recv(1) == b""
            with socket.create_server(("127.0.0.1", ending_port)):
                pass
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


@asynchronous
async def test_strangers_do_not_keep_others_out(store: MemoryStore) -> None:
    """Idle connections without the token are closed, and cost no place of those with it."""
    port = port_of(store)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    driver = driver_of(store)
    await driver.put("x", b"1")
    assert await driver.get("x") == b"1"
    for stranger in strangers:
        stranger.settimeout(15)
        try:
            assert await asyncio.to_thread(stranger.recv, 1) == b""
        except ConnectionResetError:
            pass
        stranger.close()
    await driver.close()


@asynchronous
async def test_requests_that_no_driver_makes(store: MemoryStore) -> None:
    """Malformed requests get a 4xx and change nothing."""
    port = port_of(store)
    token = f"Authorization: Bearer {store.token}"
    upload = "/v1/upload/" + "0" * 32
    for line, header, status in [
        ("PUT /v1/object/x", "Transfer-Encoding: chunked", 411),
        ("PUT /v1/object/../x", "Content-Length: 0", 400),
        ("PATCH /v1/object/x", "Content-Length: 0", 405),
        ("POST /v1/object/x", "Content-Length: 0", 405),
        ("GET /nothing", "X: y", 404),
        ("PUT /v1/list", "Content-Length: 0", 404),
        (f"PUT {upload}/0", "Content-Length: 0", 404),
        (f"PUT {upload}/-1", "Content-Length: 0", 405),
        (f"POST {upload}/x", "Content-Length: 0", 400),
        (f"POST {upload}", "X-Holdfast-Nbytes: 0", 404),
        (f"POST {upload}/../x", "X-Holdfast-Nbytes: 0", 400),
        (f"POST {upload}/x", "X-Holdfast-Nbytes: 99999999999", 507),
        ("PUT /v1/object/x", "Content-Length: 99999999999", 507),
        ("GET /v1/object/x", "X-Holdfast-Wait: soon", 400),
        ("GET /v1/object/x", "X-Holdfast-Wait: nan", 404),
    ]:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.settimeout(10)
            sock.sendall(f"{line} HTTP/1.1\r\nHost: h\r\n{token}\r\n{header}\r\n\r\n".encode())
            answer = await asyncio.to_thread(sock.recv, 1000)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (line, header, answer)
    assert store.used_nbytes == 0
