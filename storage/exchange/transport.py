"""Listeners and connections between ranks of an exchange. ``exchange`` decides which rank sends
which bytes.

Ranks of one host connect over a unix socket in the abstract namespace; the kernel reports the user
at the other end. Units stay in shared memory (``shared_memory``), and only their positions are
sent. Ranks of different hosts connect over TCP, and the bytes follow.

Both sides prove that they know the listener's secret, which is distributed through the job's store
only, never over the connection: each sends a fresh nonce, and gets an HMAC of both nonces under the
secret. The proofs of the two sides differ, so a proof cannot be reflected. Over TCP, all further
bytes carry a digest under a key of this connection. So neither a process that has taken a rank's
name or port, nor one in between, can impersonate a rank.

Nothing is encrypted. Any process is trusted that can read the job's store, or that runs as the same
user on one of its hosts and can inspect its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass

from ..arenas.memory import Memory
from ..arenas.sockets import listen_at
from .connection import DIGEST_NBYTES, Connection, closed_in_child
from .shared_memory import Arena, identity_of

HANDSHAKE_TIMEOUT_S = 10.0
"""Time limit for a client to authenticate itself."""
CONNECT_TIMEOUT_S = 30.0
"""Time limit for a server's answer; the rank may not be accepting connections yet."""
STRANGERS_MAX = 64
"""Limit of unauthenticated clients served at a time, in addition to the members."""
BACKLOG = 1024

_SECRET_NBYTES = 32
NONCE_NBYTES = 16
PROOF_NBYTES = 32
_CLIENT_HELLO = struct.Struct(f"<{NONCE_NBYTES}sI")  # nonce, number of the member
_SERVER_HELLO = struct.Struct(f"<{NONCE_NBYTES}s{PROOF_NBYTES}s")  # nonce, proof
_OVER_NETWORK = b"w"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handshake:
    """Nonces of a client and a server, and the values derived from them with the secret.
    ``member``: number of the client."""

    secret: bytes
    client_nonce: bytes
    server_nonce: bytes
    member: int

    def derived(self, purpose: bytes) -> bytes:
        """Return 32 bytes that are valid for one purpose in this connection only."""
        nonces = self.client_nonce + self.server_nonce + struct.pack("<I", self.member)
        return hmac.digest(self.secret, nonces + purpose, "sha256")


@dataclass(frozen=True, slots=True)
class Address:
    """A rank's address, and the secret that both sides prove to know. ``host``: see
    :func:`~holdfast.storage.ranks.hosts.host_key`; ``unix``: name of its unix socket; ``nbytes``:
    size of its shared memory; ``tcp``: host and port, if ranks of other hosts may connect."""

    host: str | None
    unix: str
    secret: bytes
    nbytes: int
    tcp: tuple[str, int] | None = None


class Listener:
    """Accepts connections of other members of a group. Raises OSError if it cannot listen."""

    def __init__(self, fd: int, host: str | None, job_host: str) -> None:
        """Start to listen. ``fd``: the memory shared with members of this host. ``host``: this
        host, as in an Address. ``job_host``: a host of the job, used to find this host's address on
        the way there; "" if all members are on this host."""
        self._fd = fd
        self._secret = secrets.token_bytes(_SECRET_NBYTES)
        name = f"\0holdfast-{secrets.token_hex(16)}"
        self._sockets = [_listening(socket.AF_UNIX, name)]
        tcp: tuple[str, int] | None = None
        if job_host:
            self._sockets.append(_listening(socket.AF_INET, (_own_address(job_host), 0)))
            tcp = self._sockets[1].getsockname()
        self.address = Address(host, name, self._secret, os.fstat(fd).st_size, tcp)

    async def accept(
        self,
        members: Collection[int],
        connections: dict[int, Connection],
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        """Accept connections until all of ``members`` have connected, and add them to
        ``connections``. Refuses clients of another user, clients that do not know the secret, and
        silent ones."""
        if not members:
            return
        complete = asyncio.Event()
        room = asyncio.Semaphore(STRANGERS_MAX + len(members))
        tasks: list[asyncio.Task[None]] = []

        async def serve(sock: socket.socket) -> None:
            connection = Connection(sock)
            try:
                async with asyncio.timeout(handshake_timeout_s):
                    member = await self._authenticate(connection)
                if member is not None and member in members and member not in connections:
                    connections[member] = connection
                    if len(connections) == len(members):
                        complete.set()
            except OSError as error:  # including timeouts
                _log.info("a client was refused: %s", str(error) or type(error).__name__)
            finally:
                room.release()
                if connection not in connections.values():
                    connection.close()

        async def listen(listening: socket.socket) -> None:
            while True:
                await room.acquire()
                sock, _ = await asyncio.get_running_loop().sock_accept(listening)
                tasks.append(group.create_task(serve(sock)))

        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(listen(listening)) for listening in self._sockets]
            await complete.wait()
            for task in tasks:  # including those that serve strangers
                task.cancel()

    async def _authenticate(self, connection: Connection) -> int | None:
        """Authenticate a client and give it access to the memory. Return its member number, or None
        for a stranger. Raises OSError."""
        if not connection.over_network and connection.peer_uid() != os.getuid():
            return None
        nonce, member = _CLIENT_HELLO.unpack(await connection.receive(_CLIENT_HELLO.size))
        handshake = Handshake(self._secret, nonce, secrets.token_bytes(NONCE_NBYTES), member)
        proof = handshake.derived(b"server")
        await connection.send(_SERVER_HELLO.pack(handshake.server_nonce, proof))
        proof = await connection.receive(PROOF_NBYTES)
        if not hmac.compare_digest(proof, handshake.derived(b"client")):
            return None
        connection.key = handshake.derived(b"digests")
        if connection.over_network:
            await connection.send(_OVER_NETWORK)
        else:
            proof = connection.digest(b"memory", identity_of(self._fd))
            connection.send_descriptor(proof, self._fd)
        return int(member)

    def close(self) -> None:
        """Stop listening. Connections stay open."""
        for sock in self._sockets:
            sock.close()


def open_listener(
    resources: contextlib.ExitStack,
    slot_nbytes: int,
    slots: int,
    host: str | None,
    job_host: str = "",
) -> tuple[Arena, Listener] | tuple[None, None]:
    """Allocate memory for other members, and a listener that gives access to it; ``resources``
    closes both. A failure is logged."""
    try:
        arena = Arena(slot_nbytes, slots)
        resources.callback(arena.close)
        listener = Listener(arena.fd, host, job_host)
        resources.callback(listener.close)
    except OSError as error:
        _log.warning("cannot share memory with other ranks: %s", error)
        return None, None
    return arena, listener


async def connect(
    address: Address, member: int, host: str | None, timeout_s: float = CONNECT_TIMEOUT_S
) -> Connection:
    """Connect to the rank at ``address``, as member number ``member`` on ``host``. Raises OSError
    if nothing answers in time, the answer is not from that rank, or its memory is not valid."""
    is_local = address.host == host
    target: str | tuple[str, int] | None
    if is_local:
        target = address.unix
    else:
        target = address.tcp
    if target is None:
        raise ConnectionRefusedError(
            "that rank is on another host, and does not listen on the network"
        )
    sock = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET, socket.SOCK_STREAM)
    connection = Connection(sock)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, target)
            if is_local and connection.peer_uid() != os.getuid():
                raise ConnectionRefusedError(
                    f"a process of another user, {connection.peer_uid()}, has that rank's name"
                )
            await _introduce(connection, address.secret, member)
            if is_local:
                connection.window = await _window(connection, address.nbytes)
            elif await connection.receive(1) != _OVER_NETWORK:
                raise ConnectionRefusedError("that rank speaks another protocol")
    except BaseException:
        connection.close()
        raise
    return connection


async def _introduce(connection: Connection, secret: bytes, member: int) -> None:
    nonce = secrets.token_bytes(NONCE_NBYTES)
    await connection.send(_CLIENT_HELLO.pack(nonce, member))
    server_nonce, proof = _SERVER_HELLO.unpack(await connection.receive(_SERVER_HELLO.size))
    handshake = Handshake(secret, nonce, server_nonce, member)
    if not hmac.compare_digest(proof, handshake.derived(b"server")):
        raise ConnectionRefusedError("the peer is not that rank: it does not know the secret")
    connection.key = handshake.derived(b"digests")
    await connection.send(handshake.derived(b"client"))


async def _window(connection: Connection, nbytes: int) -> Memory:
    proof, fd = await connection.receive_descriptor(DIGEST_NBYTES)
    if fd is None:
        raise ConnectionRefusedError("that rank has refused the connection")
    if not hmac.compare_digest(proof, connection.digest(b"memory", identity_of(fd))):
        os.close(fd)
        raise OSError(errno.EBADMSG, "the memory received is not that rank's")
    return Memory(fd, nbytes, writable=False)


def _listening(family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
    sock = closed_in_child(socket.socket(family, socket.SOCK_STREAM))
    listen_at(sock, address, BACKLOG)
    return sock


def _own_address(job_host: str) -> str:
    """Return the address of this host on the way to ``job_host``. Sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((job_host, 1))
        return str(probe.getsockname()[0])
