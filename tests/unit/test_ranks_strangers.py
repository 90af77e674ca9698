"""Test connections between ranks: strangers are refused, and their data is not used."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference
from support.forked import in_a_fork
from support.ranks import load_as_ranks, saved_as_ranks

import holdfast
from holdfast.storage.arenas.memory import Memory
from holdfast.storage.exchange import broadcast, exchange
from holdfast.storage.exchange.connection import Connection
from holdfast.storage.exchange.group import ExchangeLimits
from holdfast.storage.exchange.shared_memory import Arena, identity_of
from holdfast.storage.exchange.transport import HANDSHAKE_TIMEOUT_S, Address, Listener, connect
from holdfast.storage.ranks.hosts import host_key
from holdfast.storage.runtime.buffers import HostBuffer

pytestmark = [pytest.mark.clocked, pytest.mark.timeout(60)]

DATA = b"what the rank has read" * 100


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Return a rank's memory that contains something."""
    made = Arena(4096, 1)
    made.fill(0, HostBuffer.over(memoryview(DATA)), len(DATA))
    yield made
    made.close()


@contextlib.asynccontextmanager
async def opened(
    arena: Arena, near: str = "", handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> AsyncIterator[tuple[Listener, dict[int, Connection]]]:
    """Yield a listener that admits member 1, and its connections."""
    listener, connections = Listener(arena.fd, host_key(), near), dict[int, Connection]()
    accepting = asyncio.ensure_future(listener.accept([1], connections, handshake_timeout_s))
    try:
        yield listener, connections
    finally:
        accepting.cancel()
        await asyncio.wait([accepting])
        listener.close()
        for connection in connections.values():
            connection.close()


def squatting(
    behave: Callable[[socket.socket], Any], family: int = socket.AF_UNIX
) -> tuple[Address, threading.Thread]:
    """Return the address of a rank whose name or port is taken by another, which calls ``behave``."""
    listener = socket.socket(family)
    listener.bind(
        f"\0holdfast-test-{os.getpid()}-{time.monotonic_ns()}"
        if family == socket.AF_UNIX
        else ("127.0.0.1", 0)
    )
    listener.listen(1)

    def serve() -> None:
        with listener, listener.accept()[0] as client, contextlib.suppress(OSError):
            client.settimeout(20)
            behave(client)

    thread = threading.Thread(target=serve)
    thread.start()
    secret = b"\xab" * 32
    if family == socket.AF_UNIX:
        name = listener.getsockname().decode()
        return Address(host_key(), name, secret, 4096), thread
    return Address("another", "", secret, 4096, listener.getsockname()), thread


def says(data: bytes) -> Callable[[socket.socket], None]:
    """Run a stranger that gives this answer, and listens on."""

    def behave(client: socket.socket) -> None:
        client.recv(100)
        client.sendall(data)
        while client.recv(1 << 16):
            pass

    return behave


def hands_over(client: socket.socket) -> None:
    """Run a stranger that hands over memory of its own, without a proof."""
    client.recv(100)
    fd = os.memfd_create("forged")
    os.write(fd, b"forged" + bytes(4090))
    socket.send_fds(client, [b"m"], [fd])
    os.close(fd)
    while client.recv(1 << 16):
        pass


STRANGERS = {
    "garbage": says(os.urandom(48)),
    "what could be an answer": says(os.urandom(48) + b"w"),
    "too little": lambda client: client.sendall(b"ab"),
    "too much": says(bytes(1 << 20)),
    "nothing": lambda client: client.recv(1),
    "silence": says(b""),
    "memory of its own": hands_over,
}


@pytest.mark.parametrize(
    "family", [socket.AF_UNIX, socket.AF_INET], ids=["on this host", "over the network"]
)
@pytest.mark.parametrize("behave", STRANGERS.values(), ids=STRANGERS)
def test_whoever_has_a_ranks_name_but_not_its_secret_is_refused(
    behave: Any, family: int, no_leaks: None
) -> None:
    """Any answer without the secret is an OSError within the limit."""
    address, serving = squatting(behave, family)
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on what was said
        asyncio.run(connect(address, 1, host_key(), timeout_s=0.5))
    serving.join(20)
    assert not serving.is_alive()


def test_a_process_of_another_user_is_refused_before_anything_is_said() -> None:
    """The kernel tells whose process has the rank's name."""
    if os.getuid():
        pytest.skip("only root can be another user")
    ready, name = threading.Event(), f"\0holdfast-other-user-{os.getpid()}"
    outcome: list[str] = []
    reading, writing = os.pipe()

    def other_user() -> None:
        os.setgid(65534)
        os.setuid(65534)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(name)
        listener.listen(1)
        os.write(writing, b"r")
        client, _ = listener.accept()
        client.settimeout(20)
        assert client.recv(100) == b""

    thread = threading.Thread(target=lambda: outcome.append(in_a_fork(other_user)))
    thread.start()
    os.read(reading, 1)
    ready.set()
    address = Address(host_key(), name, b"\xab" * 32, 4096)
    with pytest.raises(ConnectionRefusedError, match="another user, 65534"):
        asyncio.run(connect(address, 1, host_key()))
    thread.join()
    os.close(reading)
    os.close(writing)
    assert outcome == [""]


@pytest.mark.parametrize("near", ["", "127.0.0.1"], ids=["on this host", "over the network"])
def test_a_door_lets_in_those_who_know_its_secret(near: str, arena: Arena, no_leaks: None) -> None:
    """Strangers are rejected and block no rank; the secret is never sent."""

    async def run() -> None:
        async with opened(arena, near, handshake_timeout_s=0.3) as (listener, connections):
            address = listener.address
            to = (socket.AF_INET, address.tcp) if near else (socket.AF_UNIX, address.unix)
            strangers = []
            for said in (b"", b"x", bytes(20), os.urandom(200)):
                stranger = socket.socket(to[0])
                await asyncio.to_thread(stranger.connect, to[1])
                stranger.sendall(said)
                strangers.append(stranger)
            host = "another" if near else address.host
            with pytest.raises(OSError):  # noqa: PT011
                await connect(replace(address, secret=bytes(32), host=host), 1, host_key())
            assert connections == {}
            connection = await connect(
                replace(address, host="another") if near else address, 1, host_key()
            )
            while not connections:
                await asyncio.sleep(0.01)
            assert connection.digest(b"n", DATA) == connections[1].digest(b"n", DATA)
            assert (
                connection.window is None
                if near
                else bytes(connection.window.view[: len(DATA)]) == DATA
            )  # type: ignore[union-attr]
            connection.close()
            for stranger in strangers:
                stranger.settimeout(20)
                with contextlib.suppress(ConnectionResetError):
                    while heard := await asyncio.to_thread(stranger.recv, 1000):
                        assert address.secret not in heard
                stranger.close()

    asyncio.run(run())


def test_a_conversation_cannot_be_repeated(arena: Arena) -> None:
    """A recorded handshake proves nothing in another connection."""
    said = bytearray()

    async def heard(
        connection: Connection, send: Callable[..., Awaitable[None]], *parts: Any
    ) -> None:
        said.extend(b"".join(parts))
        await send(connection, *parts)

    async def run() -> None:
        plain = Connection.send
        async with opened(arena) as (listener, connections):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    Connection, "send", lambda connection, *parts: heard(connection, plain, *parts)
                )
                (await connect(listener.address, 1, host_key())).close()
            while not connections:
                await asyncio.sleep(0.01)
            nonce_and_number, client_proof = bytes(said[:20]), bytes(said[-32:])
        async with opened(arena) as (listener, connections):
            listener._secret = b"s" * 32
            stranger = socket.socket(socket.AF_UNIX)
            stranger.settimeout(20)
            await asyncio.to_thread(stranger.connect, listener.address.unix)
            stranger.sendall(nonce_and_number + client_proof)
            while await asyncio.to_thread(stranger.recv, 100):
                pass
            stranger.close()
            assert connections == {}

    asyncio.run(run())


@pytest.mark.parametrize("how", ["not sealed", "too small", "too large", "a file"])
def test_memory_that_could_be_cut_off_is_not_looked_at(how: str, tmp_path: Path) -> None:
    """Memory must be sealed and of the announced size, to exclude SIGBUS."""
    if how == "a file":
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    else:
        fd = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, {"too small": 100, "too large": 1 << 40}.get(how, 4096))
    if how.startswith("too"):
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    with pytest.raises(OSError):  # noqa: PT011
        Memory(fd, 4096, writable=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_other_memory_than_the_doors_is_refused(arena: Arena, no_leaks: None) -> None:
    """Somebody in between, who passes on what both sides say, cannot hand over memory of its own."""
    other = Arena(4096, 1)

    async def run() -> None:
        async with opened(arena) as (listener, _):

            def relay(client: socket.socket) -> None:
                with socket.socket(socket.AF_UNIX) as rank:
                    rank.connect(listener.address.unix)
                    rank.sendall(client.recv(100))
                    client.sendall(rank.recv(100))
                    rank.sendall(client.recv(100))
                    proof, fds, *_ = socket.recv_fds(rank, 100, 1)
                    os.close(fds[0])
                    socket.send_fds(client, [proof], [other.fd])
                    client.recv(1)

            squatted, serving = squatting(relay)
            with pytest.raises(OSError, match="not that rank's"):
                await connect(replace(listener.address, unix=squatted.unix), 1, host_key())
            await asyncio.to_thread(serving.join, 20)

    try:
        asyncio.run(run())
        assert identity_of(arena.fd) != identity_of(other.fd)
    finally:
        other.close()


def test_ranks_read_for_themselves_where_a_stranger_has_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks get every bit, of the manifest and of the tensors, whoever answers at their listeners."""
    state = {"t": torch.arange(9000.0)}
    driver = saved_as_ranks([state, state])
    strangers = []

    async def astray(address: Address, member: int, host: str | None) -> Connection:
        squatted, serving = squatting(hands_over)
        strangers.append(serving)
        return await connect(replace(address, unix=squatted.unix), member, host, timeout_s=0.5)

    monkeypatch.setattr(exchange, "connect", astray)
    monkeypatch.setattr(broadcast, "connect", astray)
    limits = ExchangeLimits(connect_all_timeout_s=1.0)
    into = [{"t": torch.zeros(9000)} for _ in range(2)]
    for found in load_as_ranks(driver, into, exchange=True, limits=limits):
        assert difference(state, found) is None
    assert len(strangers) >= 2
    for serving in strangers:
        serving.join(20)


def test_a_manifest_that_is_not_what_was_told_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shared memory must match the checksum sent through the store."""
    state = {"t": torch.arange(9000.0)}
    driver = saved_as_ranks([state, state])
    fill, manifests = Arena.fill, list[int]()

    def spoilt(self: Arena, start: int, data: HostBuffer, nbytes: int) -> None:
        if self.slots == 1:  # not one of an exchange
            data = HostBuffer.over(memoryview(bytes(data.view[:nbytes])[::-1]))
            manifests.append(nbytes)
        fill(self, start, data, nbytes)

    monkeypatch.setattr(Arena, "fill", spoilt)
    for found in load_as_ranks(driver, [{"t": torch.zeros(9000)} for _ in range(2)], exchange=True):
        assert difference(state, found) is None
    assert len(manifests) == 1


@pytest.mark.parametrize("part", [0, 1], ids=["digest", "data"])
def test_bytes_that_were_changed_on_the_way_are_not_taken(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flipped bit in the data or its digest is an error on all ranks."""
    state = {"t": torch.arange(9000.0)}
    driver = saved_as_ranks([state])
    plain, spoilt = Connection.send, list[int]()

    async def send(connection: Connection, *parts: Any) -> None:
        if len(parts) == 2:  # a unit: its header, which ends with the digest, and its bytes
            changed = [bytearray(sent) for sent in parts]
            changed[part][-1] ^= 1
            parts = tuple(changed)
            spoilt.append(part)
        await plain(connection, *parts)

    monkeypatch.setattr(Connection, "send", send)
    into = [{"t": torch.zeros(9000)} for _ in range(2)]
    with pytest.raises(holdfast.CoordinationError, match="has changed in transit"):
        load_as_ranks(driver, into, exchange=True, apart=True)
    assert spoilt
