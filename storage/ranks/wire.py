"""Connections between ranks that hand each other what they have read: meeting, and messages. Who sends what is ``exchange``.

Ranks of one host meet at a unix socket that has no name in any folder; the kernel vouches for the user at the other end.
What is handed on stays where it was read, in memory that is shared (``arena``), and only where it lies is said. Ranks of
different hosts meet over TCP, and the bytes follow.

Who knocks shows the door's token, which was told over the job's store alone. Nothing is encrypted: whoever can listen to
this network, or can read the job's store, is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import select
import socket
import struct
from collections.abc import Collection
from pathlib import Path

from .arena import Arena, Window

__all__ = ["Door", "Line", "host_key", "knock", "open_door"]

TOKEN_NBYTES = 16
_HELLO = struct.Struct(f"<{TOKEN_NBYTES}sI")
_CREDENTIALS = struct.Struct("3i")
_BY_MEMORY, _BY_WIRE = b"m", b"w"
_log = logging.getLogger(__name__)


def host_key() -> str | None:
    """What ranks have in common that can share memory: one boot of one host, one network namespace, one user. None where
    this cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return f"{boot}/{namespace}/{os.getuid()}"


class Line:
    """A connection to another rank. Raises ConnectionError when that rank is gone. ``window``: its memory, if shared."""

    def __init__(self, sock: socket.socket, window: Window | None = None) -> None:
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

    def watched_by(self, poll: select.poll) -> int:
        """Have ``poll`` tell when :meth:`receive_now` has something to do; the number it says then."""
        poll.register(self._socket, select.POLLIN)
        return self._socket.fileno()

    def receive_now(self, nbytes: int) -> bytes:
        """:meth:`receive` for a thread, that ``poll`` has sent here: of a message, all bytes come at once."""
        if len(data := self._socket.recv(nbytes)) != nbytes:
            raise ConnectionResetError("closed by the other side")
        return data

    def send_now(self, data: bytes) -> None:
        """:meth:`send` for a thread, to one who listens: there is room for what is as short as this."""
        self._socket.sendall(data)

    def hang_up(self) -> None:
        """Have a thread that waits for this line see that nothing comes any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def receive_descriptor(self) -> tuple[bytes, int | None]:
        """The next byte, and the file descriptor that came with it."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._socket)
        data, descriptors, *_ = socket.recv_fds(self._socket, 1, 1)
        return data, next(iter(descriptors), None)

    def send_descriptor(self, data: bytes, fd: int) -> None:
        """Send a byte, and a file descriptor with it. Nothing was sent before: there is room for it."""
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
        """``fd``: the memory that members on this host are let in to. ``near``: a host of the job, to find the address that
        this host has on the way there; "" where nobody comes over the network."""
        self._fd = fd
        self._token = secrets.token_bytes(TOKEN_NBYTES)
        name = f"\0holdfast-{secrets.token_hex(16)}"
        self._sockets = [_listening(socket.AF_UNIX, name)]
        told = {"host": host_key(), "unix": name, "token": self._token.hex(), "tcp": None}
        if near:
            self._sockets.append(_listening(socket.AF_INET, (_own_address(near), 0)))
            told["tcp"] = self._sockets[1].getsockname()
        self.address = json.dumps(told)

    async def admit(self, members: Collection[int], lines: dict[int, Line]) -> None:
        """Until all of ``members`` have come: to ``lines``. Who has not the token, or is another user, is turned away."""
        complete = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []

        async def greet(sock: socket.socket) -> None:
            line = Line(sock)
            try:
                member = await self._member(line)
                if member is not None and member in members and member not in lines:
                    lines[member] = line
                    complete.set() if len(lines) == len(members) else None
            finally:
                if line not in lines.values():
                    line.close()

        async def listen(door: socket.socket) -> None:
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(door)
                tasks.append(group.create_task(greet(sock)))

        if members:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(listen(door)) for door in self._sockets]
                await complete.wait()
                for task in tasks:  # also those that greet strangers
                    task.cancel()

    async def _member(self, line: Line) -> int | None:
        """Who has knocked, told where to look; None for a stranger."""
        try:
            if not line.by_wire and line.user() != os.getuid():
                return None
            token, member = _HELLO.unpack(await line.receive(_HELLO.size))
            if not hmac.compare_digest(token, self._token):
                return None
            if line.by_wire:
                await line.send(_BY_WIRE)
            else:
                line.send_descriptor(_BY_MEMORY, self._fd)
        except ConnectionError:
            return None
        return int(member)

    def close(self) -> None:
        """No more knocking. Lines stay."""
        for sock in self._sockets:
            sock.close()


def open_door(
    mine: contextlib.ExitStack, slot_nbytes: int, slots: int, near: str = ""
) -> tuple[Arena, Door] | tuple[None, None]:
    """Memory for other members, and the door to it, which ``mine`` closes. Where there can be none, that is logged."""
    try:
        arena = Arena(slot_nbytes, slots)
        mine.callback(arena.close)
        door = Door(arena.fd, near)
        mine.callback(door.close)
    except OSError as error:
        _log.warning("no memory can be shared with other ranks here: %s", error)
        return None, None
    return arena, door


async def knock(address: str, member: int) -> Line:
    """A line to the rank whose door this is, for member number ``member``. Raises OSError."""
    told = json.loads(address)
    here = told["host"] == host_key()
    if not here and told["tcp"] is None:
        raise ConnectionRefusedError("that rank is on another host, and has no door to the network")
    sock = socket.socket(socket.AF_UNIX if here else socket.AF_INET, socket.SOCK_STREAM)
    line = Line(sock)
    try:
        await asyncio.get_running_loop().sock_connect(sock, told["unix"] if here else tuple(told["tcp"]))
        await line.send(_HELLO.pack(bytes.fromhex(told["token"]), member))
        if here:
            _, fd = await line.receive_descriptor()
            if fd is None:
                raise ConnectionRefusedError("that rank let nobody in")
            line.window = Window(fd)
        elif await line.receive(1) != _BY_WIRE:
            raise ConnectionRefusedError("that rank speaks another language")
    except BaseException:
        line.close()
        raise
    return line


def _listening(family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
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
