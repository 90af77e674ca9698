"""Connections between trainers and the keeper of one host: unix sockets that keep message
boundaries and pass descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import CoordinationError
from .memory import read_sealed, sealed_bytes

PACKET_NBYTES_MAX = 64 << 10
"""Larger messages travel in sealed memory, whose descriptor accompanies a packet of one byte."""
MESSAGE_NBYTES_MAX = 64 << 20
DESCRIPTORS_MAX = 2
_IN_MEMORY = b"\0"
_CREDENTIALS = struct.Struct("3i")
_PEERPIDFD = 77  # Linux 6.5; missing in module socket
_BACKLOG = 128


class MessageError(Exception):
    """An incoming message is malformed, so the connection is unusable."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message and its descriptors, owned by the receiver."""

    data: bytes
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Line:
    """One end of a connection. Methods raise ConnectionError when the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sending = asyncio.Lock()
        self._waiting: set[asyncio.Event] = set()
        self._closed = False

    @property
    def peer_uid(self) -> int:
        """User id of the process at the other end."""
        return peer_credentials(self._socket)[1]

    @property
    def peer_pid(self) -> int:
        """Id of the process at the other end, when it connected."""
        return peer_credentials(self._socket)[0]

    def peer_pidfd(self) -> int:
        """Return a descriptor that becomes readable when the process at the other end has ended and
        its memory is gone. The socket cannot tell: a forked child keeps it open. Raises OSError."""
        try:
            data = self._socket.getsockopt(socket.SOL_SOCKET, _PEERPIDFD, 4)
        except OSError:  # older kernel
            return os.pidfd_open(self.peer_pid)
        (fd,) = struct.unpack("i", data)
        os.set_inheritable(fd, False)
        return int(fd)

    def peer_identity(self, pidfd: int) -> int:
        """Return a number that no other process has, given :meth:`peer_pidfd`; 0 if it is unknown:
        the process is in another PID namespace, and Linux older than 6.9."""
        eventfd = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            if os.fstat(pidfd).st_dev != os.fstat(eventfd).st_dev:
                return os.fstat(pidfd).st_ino  # in a file system of pidfds, one inode per process
        finally:
            os.close(eventfd)
        return self.peer_pid

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message with descriptors. Safe to call from several tasks. Raises ValueError for
        an empty or oversize message, and OSError if there is no memory for a large one."""
        if not 0 < len(data) <= MESSAGE_NBYTES_MAX:
            raise ValueError(f"a message of {len(data):,} bytes")
        # Copies, since the caller may close them while this waits for a slow reader, and their
        # numbers may be reused for other files.
        copies = [os.dup(fd) for fd in fds]
        try:
            if len(data) > PACKET_NBYTES_MAX:
                copies.insert(0, sealed_bytes(data))
                data = _IN_MEMORY
            async with self._sending:
                await self._send(data, copies)
        finally:
            for fd in copies:
                os.close(fd)

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        while True:
            try:
                socket.send_fds(self._socket, [data], fds)
                return
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await self._until(loop.add_writer, loop.remove_writer)

    async def receive(self) -> Received:
        """Return the next message. Raises MessageError for a truncated message, after closing its
        descriptors, and ConnectionError at the end of the stream."""
        while True:
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._socket,
                    PACKET_NBYTES_MAX,
                    DESCRIPTORS_MAX + 1,
                    socket.MSG_CMSG_CLOEXEC,
                )
                break
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await self._until(loop.add_reader, loop.remove_reader)
        received = Received(data, tuple(fds))
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            received.close()
            raise MessageError(f"a packet of more than {PACKET_NBYTES_MAX:,} bytes")
        if not data:
            received.close()
            raise ConnectionResetError("closed by the other side")
        return _large(received) if data == _IN_MEMORY else received

    async def _until(
        self,
        add: Callable[[socket.socket, Callable[[], object]], object],
        remove: Callable[[socket.socket], object],
    ) -> None:
        """Wait until the socket is readable or writable. Raises ConnectionError if it is closed
        here."""
        ready = asyncio.Event()
        self._waiting.add(ready)
        add(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            self._waiting.discard(ready)
            if not self._closed:
                remove(self._socket)
        if self._closed:
            raise ConnectionResetError("closed on this side")

    def hang_up(self) -> None:
        """Tell the other end that nothing will follow. Needs no running loop."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Waiting tasks get a ConnectionError. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._waiting:
            # Before closing: the descriptor's number is reused at once.
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
            for ready in self._waiting:
                ready.set()
        self._socket.close()


def _large(received: Received) -> Received:
    """Return the message whose contents are in the memory of its first descriptor. Raises
    MessageError, after closing all descriptors."""
    try:
        if not received.fds:
            raise OSError("it lacks its memory")
        data = read_sealed(received.fds[0], MESSAGE_NBYTES_MAX)
    except OSError as error:
        received.close()
        raise MessageError(f"a large message: {error}") from error
    os.close(received.fds[0])
    return Received(data, received.fds[1:])


def connected(path: str) -> Line:
    """Connect to the keeper at ``path``, without waiting. Raises OSError if none listens,
    BlockingIOError if one listens but has not accepted many earlier connections, and
    CoordinationError if it belongs to another user."""
    sock = _socket()
    line = Line(sock)
    try:
        sock.connect(path)
        if line.peer_uid != os.getuid():
            raise CoordinationError(f"the process listening at {path} belongs to another user")
    except BaseException:
        line.close()
        raise
    return line


def listening(path: str) -> socket.socket:
    """Return a listening socket at ``path``, in a folder private to this user. Replaces the socket
    of a dead keeper. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    sock = _socket()
    listen_at(sock, path, _BACKLOG)
    return sock


def listen_at(sock: socket.socket, address: str | tuple[str, int], backlog: int) -> None:
    """Make ``sock`` listen at ``address``, without blocking. Raises OSError, after closing it."""
    try:
        sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group id of the other end of a unix socket, when it
    connected."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
