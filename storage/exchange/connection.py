"""A connection between two ranks: a socket, used by coroutines and by polling threads."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import select
import socket
import struct
import weakref

from ...core.forks.renewal import in_child
from ..arenas.memory import Memory
from ..arenas.sockets import peer_credentials

DIGEST_NBYTES = 16

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def closed_in_child(sock: socket.socket) -> socket.socket:
    """Return ``sock``, registered to be closed in forked children, so that its peer notices when
    this process dies."""
    _sockets.add(sock)
    return sock


class Connection:
    """A connection to another rank. Methods raise ConnectionError when that rank is gone.
    ``window``: its shared memory, if any. ``key``: key of :meth:`digest`, set after the
    handshake."""

    def __init__(self, sock: socket.socket, window: Memory | None = None) -> None:
        closed_in_child(sock)
        sock.setblocking(False)
        self.key = b""
        self.window = window
        self.over_network = sock.family != socket.AF_UNIX
        self._socket = sock
        self._sending = asyncio.Lock()

    async def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts in order. Safe to call from several tasks."""
        async with self._sending:
            for part in parts:
                await asyncio.get_running_loop().sock_sendall(self._socket, part)

    async def receive_into(self, buffer: memoryview) -> None:
        """Receive exactly ``len(buffer)`` bytes."""
        while buffer:
            nbytes = await asyncio.get_running_loop().sock_recv_into(self._socket, buffer)
            if not nbytes:
                raise ConnectionResetError("closed by the other side")
            buffer = buffer[nbytes:]

    async def receive(self, nbytes: int) -> bytes:
        """Receive and return exactly ``nbytes`` bytes."""
        data = bytearray(nbytes)
        await self.receive_into(memoryview(data))
        return bytes(data)

    def digest(self, context: bytes, data: bytes | memoryview) -> bytes:
        """Return 16 bytes that only the two ends of this connection can compute from ``data`` and
        its ``context``, such as its number."""
        mac = hmac.new(self.key, struct.pack("<I", len(context)) + context, "sha256")
        mac.update(data)
        return mac.digest()[:DIGEST_NBYTES]

    def register(self, poll: select.poll) -> int:
        """Register with ``poll`` for reading, and return the number that it will report."""
        poll.register(self._socket, select.POLLIN)
        return self._socket.fileno()

    def receive_now(self, nbytes: int) -> bytes:
        """Receive a message in a thread, after ``poll`` has reported this connection. Messages are
        short enough to arrive whole."""
        data = self._socket.recv(nbytes)
        if len(data) != nbytes:
            raise ConnectionResetError("closed by the other side")
        return data

    def send_now(self, data: bytes) -> None:
        """Send a message in a thread. Short messages always fit into the socket's buffer, since the
        other side keeps reading."""
        self._socket.sendall(data)

    def shut_down(self) -> None:
        """Wake up a thread that polls this connection, which sees the end of the stream."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def receive_descriptor(self, nbytes: int) -> tuple[bytes, int | None]:
        """Return the next message, of at most ``nbytes``, and its file descriptor, if any."""
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
        """Send a short message with a file descriptor. It fits into the socket's buffer, since
        little was sent before."""
        socket.send_fds(self._socket, [data], [fd])

    def peer_uid(self) -> int:
        """Return the user id of the process at the other end of a unix socket."""
        _, uid, _ = peer_credentials(self._socket)
        return uid

    def close(self) -> None:
        """Close the socket. Safe to call twice. Views of the window stay valid."""
        self._socket.close()
        self.window = None


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


in_child(_close_in_child)
