"""Connections between ranks that hand each other what they have read: meeting, and messages. Who
sends what is ``exchange``.

Ranks of one host meet at a unix socket that has no name in any folder; the kernel vouches for the
user at the other end. What is handed on stays where it was read, in memory that is shared
(``arena``), and only where it lies is said. Ranks of different hosts meet over TCP, and the bytes
follow.

Both sides prove that they know the door's secret, which was told over the job's store alone, and is
never sent over the connection: each answers a fresh challenge of the other (HMAC). What follows
over TCP carries a digest under a key of this connection. So neither a process that has got hold of
a rank's name or port, nor one in between, can pass for a rank.

Scope: nothing is encrypted. Whoever can read the job's store, or is the same user on one of its
hosts and can look into its processes, is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ...core.forks.renewal import in_child
from .handshake import NONCE_NBYTES, PROOF_NBYTES, Handshake
from .shared_memory import Arena, Window, identity_of

__all__ = ["DIGEST_NBYTES", "Address", "Door", "Line", "host_key", "knock", "open_door"]

DIGEST_NBYTES = 16
GREET_S = 10.0
"""How long a visitor may take to prove who it is."""
KNOCK_S = 30.0
"""How long to wait for the answer: the rank may not have come to its door yet."""
STRANGERS = 64
"""So many visitors are heard at a time, besides members."""

_SECRET_NBYTES = 32
_HELLO = struct.Struct(f"<{NONCE_NBYTES}sI")  # the visitor's challenge, and its number
_ANSWER = struct.Struct(f"<{NONCE_NBYTES}s{PROOF_NBYTES}s")  # the door's challenge, and its proof
_CREDENTIALS = struct.Struct("3i")
_BY_WIRE = b"w"

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """Where other ranks reach a rank, and the secret that both sides prove to know. ``host``: see
    :func:`host_key`; ``unix``: the name of its unix socket; ``nbytes``: of the memory that it
    shares; ``tcp``: host and port, where ranks of other hosts may come."""

    host: str | None
    unix: str
    secret: bytes
    nbytes: int
    tcp: tuple[str, int] | None = None


def host_key() -> str | None:
    """What ranks have in common that can share memory: one boot of one host, one network namespace,
    one user. None where this cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return f"{boot}/{namespace}/{os.getuid()}"


class Line:
    """A connection to another rank. Raises ConnectionError when that rank is gone. ``window``: its
    memory, if shared. ``key``: of :meth:`digest`, once both sides have proved who they are."""

    def __init__(self, sock: socket.socket, window: Window | None = None) -> None:
        _sockets.add(sock)
        self.key = b""
        sock.setblocking(False)
        self.window = window
        self.by_wire = sock.family != socket.AF_UNIX
        self._socket = sock
        self._turn = asyncio.Lock()

    async def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts, one after the other. Several tasks may call this at once."""
        async with self._turn:
            for part in parts:
                await asyncio.get_running_loop().sock_sendall(self._socket, part)

    async def fill(self, into: memoryview) -> None:
        """Receive exactly ``len(into)`` bytes."""
        while into:
            got = await asyncio.get_running_loop().sock_recv_into(self._socket, into)
            if not got:
                raise ConnectionResetError("closed by the other side")
            into = into[got:]

    async def receive(self, nbytes: int) -> bytes:
        """The next ``nbytes`` bytes."""
        data = bytearray(nbytes)
        await self.fill(memoryview(data))
        return bytes(data)

    def digest(self, about: bytes, data: bytes | memoryview) -> bytes:
        """16 bytes that only the two ends of this line can make: of ``data``, and what it is, such
        as its number."""
        made = hmac.new(self.key, struct.pack("<I", len(about)) + about, "sha256")
        made.update(data)
        return made.digest()[:DIGEST_NBYTES]

    def watched_by(self, poll: select.poll) -> int:
        """Have ``poll`` tell when :meth:`receive_now` has something to do; the number it says then."""
        poll.register(self._socket, select.POLLIN)
        return self._socket.fileno()

    def receive_now(self, nbytes: int) -> bytes:
        """:meth:`receive` for a thread, that ``poll`` has sent here: of a message, all bytes come
        at once."""
        if len(data := self._socket.recv(nbytes)) != nbytes:
            raise ConnectionResetError("closed by the other side")
        return data

    def send_now(self, data: bytes) -> None:
        """:meth:`send` for a thread, to one who listens: there is room for what is as short as
        this."""
        self._socket.sendall(data)

    def hang_up(self) -> None:
        """Have a thread that waits for this line see that nothing comes any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def receive_descriptor(self, nbytes: int) -> tuple[bytes, int | None]:
        """The next message, of at most ``nbytes``, and the file descriptor that came with it."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._socket)
        data, descriptors, *_ = socket.recv_fds(self._socket, nbytes, 1)
        return data, next(iter(descriptors), None)

    def send_descriptor(self, data: bytes, fd: int) -> None:
        """Send a short message, and a file descriptor with it. Little was sent before: there is
        room for it."""
        socket.send_fds(self._socket, [data], [fd])

    def user(self) -> int:
        """Who is at the other end of a unix socket."""
        told = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(told)[1])

    def close(self) -> None:
        """Safe to call twice. What was taken of the window keeps it."""
        self._socket.close()
        self.window = None


class Door:
    """Where other members of a circle find this rank. Raises OSError where it cannot be opened."""

    def __init__(self, fd: int, near: str) -> None:
        """``fd``: the memory that members on this host are let in to. ``near``: a host of the job,
        to find the address that this host has on the way there; "" where nobody comes over the
        network."""
        self._fd = fd
        self._secret = secrets.token_bytes(_SECRET_NBYTES)
        name = f"\0holdfast-{secrets.token_hex(16)}"
        self._sockets = [_listening(socket.AF_UNIX, name)]
        tcp: tuple[str, int] | None = None
        if near:
            self._sockets.append(_listening(socket.AF_INET, (_own_address(near), 0)))
            tcp = self._sockets[1].getsockname()
        self.address = Address(host_key(), name, self._secret, os.fstat(fd).st_size, tcp)

    async def admit(self, members: Collection[int], lines: dict[int, Line]) -> None:
        """Until all of ``members`` have come: to ``lines``. Turned away are visitors of another
        user, those who do not know the secret, and those who say nothing."""
        complete = asyncio.Event()
        room = asyncio.Semaphore(STRANGERS + len(members))
        tasks: list[asyncio.Task[None]] = []

        async def greet(sock: socket.socket) -> None:
            line = Line(sock)
            try:
                async with asyncio.timeout(GREET_S):
                    member = await self._member(line)
                if member is not None and member in members and member not in lines:
                    lines[member] = line
                    complete.set() if len(lines) == len(members) else None
            except OSError as error:  # a timeout, too
                _log.info("a visitor was turned away: %s", str(error) or type(error).__name__)
            finally:
                room.release()
                if line not in lines.values():
                    line.close()

        async def listen(door: socket.socket) -> None:
            while True:
                await room.acquire()
                sock, _ = await asyncio.get_running_loop().sock_accept(door)
                tasks.append(group.create_task(greet(sock)))

        if members:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(listen(door)) for door in self._sockets]
                await complete.wait()
                for task in tasks:  # also those that greet strangers
                    task.cancel()

    async def _member(self, line: Line) -> int | None:
        """Who has knocked, told where to look; None for a stranger. Raises OSError."""
        if not line.by_wire and line.user() != os.getuid():
            return None
        nonce, member = _HELLO.unpack(await line.receive(_HELLO.size))
        hands = Handshake(self._secret, nonce, secrets.token_bytes(NONCE_NBYTES), member)
        await line.send(_ANSWER.pack(hands.door_nonce, hands.of_door))
        if not hmac.compare_digest(await line.receive(PROOF_NBYTES), hands.of_visitor):
            return None
        line.key = hands.key
        if line.by_wire:
            await line.send(_BY_WIRE)
        else:
            line.send_descriptor(line.digest(b"memory", identity_of(self._fd)), self._fd)
        return int(member)

    def close(self) -> None:
        """No more knocking. Lines stay."""
        for sock in self._sockets:
            sock.close()


def open_door(
    mine: contextlib.ExitStack, slot_nbytes: int, slots: int, near: str = ""
) -> tuple[Arena, Door] | tuple[None, None]:
    """Memory for other members, and the door to it, which ``mine`` closes. Where there can be none,
    that is logged."""
    try:
        arena = Arena(slot_nbytes, slots)
        mine.callback(arena.close)
        door = Door(arena.fd, near)
        mine.callback(door.close)
    except OSError as error:
        _log.warning("no memory can be shared with other ranks here: %s", error)
        return None, None
    return arena, door


async def knock(address: Address, member: int) -> Line:
    """A line to the rank whose door this is, for member number ``member``. Raises OSError: where
    nobody answers in time, where whoever answers is not that rank, and where its memory is not what
    it ought to be."""
    here = address.host == host_key()
    target = address.unix if here else address.tcp
    if target is None:
        raise ConnectionRefusedError("that rank is on another host, and has no door to the network")
    sock = socket.socket(socket.AF_UNIX if here else socket.AF_INET, socket.SOCK_STREAM)
    line = Line(sock)
    try:
        async with asyncio.timeout(KNOCK_S):
            await asyncio.get_running_loop().sock_connect(sock, target)
            if here and line.user() != os.getuid():
                raise ConnectionRefusedError(
                    f"a process of another user, {line.user()}, has that rank's name"
                )
            await _introduce(line, address.secret, member)
            if here:
                line.window = await _window(line, address.nbytes)
            elif await line.receive(1) != _BY_WIRE:
                raise ConnectionRefusedError("that rank speaks another language")
    except BaseException:
        line.close()
        raise
    return line


async def _introduce(line: Line, secret: bytes, member: int) -> None:
    """Have the other side prove who it is, and then prove it likewise."""
    nonce = secrets.token_bytes(NONCE_NBYTES)
    await line.send(_HELLO.pack(nonce, member))
    door_nonce, proof = _ANSWER.unpack(await line.receive(_ANSWER.size))
    hands = Handshake(secret, nonce, door_nonce, member)
    if not hmac.compare_digest(proof, hands.of_door):
        raise ConnectionRefusedError(
            "what answers there is not that rank: it does not know the secret"
        )
    line.key = hands.key
    await line.send(hands.of_visitor)


async def _window(line: Line, nbytes: int) -> Window:
    """The memory that the other side hands over. Raises OSError."""
    proof, fd = await line.receive_descriptor(DIGEST_NBYTES)
    if fd is None:
        raise ConnectionRefusedError("that rank let nobody in")
    if not hmac.compare_digest(proof, line.digest(b"memory", identity_of(fd))):
        os.close(fd)
        raise OSError(errno.EBADMSG, "the memory that was handed over is not that rank's")
    return Window(fd, nbytes)


def _listening(family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    _sockets.add(sock)
    try:
        sock.bind(address)
        sock.listen(1024)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _own_address(near: str) -> str:
    """The address that this host has on the way to ``near``. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((near, 1))
        return str(probe.getsockname()[0])


def _hang_up_in_child() -> None:
    """A forked child lets go of its parent's lines: who is at their other end is to see when the
    parent dies."""
    for sock in list(_sockets):
        sock.close()


in_child(_hang_up_in_child)
