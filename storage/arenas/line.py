"""A line between a trainer and a keeper of one host: a unix socket that keeps messages apart, and
passes descriptors along with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = [
    "DESCRIPTORS_MAX",
    "MESSAGE_NBYTES_MAX",
    "Line",
    "MessageError",
    "Received",
    "connected",
    "listening",
]

MESSAGE_NBYTES_MAX = 64 << 10
DESCRIPTORS_MAX = 2
_CREDENTIALS = struct.Struct("3i")
_PEERPIDFD = 77  # Linux 6.5; which socket does not name
_BACKLOG = 128


class MessageError(Exception):
    """What arrived is no message of ours: the line is of no use any more."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message, and the descriptors that came with it, which are the receiver's to close."""

    data: bytes
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self.fds:
            os.close(fd)


class Line:
    """One end of a line. Raises ConnectionError when the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sending = asyncio.Lock()
        self._waiting: set[asyncio.Event] = set()
        self._closed = False

    @property
    def peer_uid(self) -> int:
        """The user of the process at the other end."""
        return self._credentials()[1]

    @property
    def peer_pid(self) -> int:
        """The process at the other end, when the line was made."""
        return self._credentials()[0]

    def _credentials(self) -> tuple[int, int, int]:
        data = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, gid = _CREDENTIALS.unpack(data)
        return pid, uid, gid

    def peer_pidfd(self) -> int:
        """A descriptor that is readable once the process at the other end has ended, and its memory
        is gone. The line itself does not tell: a forked child keeps it open. Raises OSError."""
        try:
            data = self._socket.getsockopt(socket.SOL_SOCKET, _PEERPIDFD, 4)
        except OSError:  # an older kernel
            return os.pidfd_open(self.peer_pid)
        (fd,) = struct.unpack("i", data)
        os.set_inheritable(fd, False)
        return int(fd)

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, and descriptors with it. Several tasks may call this at once. Raises
        ValueError for a message that no other end would take."""
        if not 0 < len(data) <= MESSAGE_NBYTES_MAX:
            raise ValueError(f"a message of {len(data):,} bytes")
        # Copies: while this waits for an end that does not read, their owner may close them, and
        # their numbers may become those of other files.
        copies = [os.dup(fd) for fd in fds]
        try:
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
        """The next message. Raises MessageError for what is cut, empty of sense, or too large: all
        that came with it is closed."""
        while True:
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._socket, MESSAGE_NBYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await self._until(loop.add_reader, loop.remove_reader)
        received = Received(data, tuple(fds))
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            received.close()
            raise MessageError(f"a message of more than {MESSAGE_NBYTES_MAX:,} bytes")
        if not data:
            received.close()
            raise ConnectionResetError("closed by the other side")
        return received

    async def _until(
        self,
        add: Callable[[socket.socket, Callable[[], object]], object],
        remove: Callable[[socket.socket], object],
    ) -> None:
        """Return when the socket can be read from, or written to. Raises ConnectionError where it
        is closed here."""
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

    def close(self) -> None:
        """Whoever waits for it gets a ConnectionError. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._waiting:
            # Before it is closed: the number of its descriptor is used again at once.
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
            for ready in self._waiting:
                ready.set()
        self._socket.close()


def connected(path: str) -> Line:
    """A line to the keeper that listens at ``path``. Raises OSError where none does."""
    sock = _socket()
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return Line(sock)


def listening(path: str) -> socket.socket:
    """A socket that trainers can connect to at ``path``, in a folder that is its user's alone. What
    a keeper that died has left there is replaced. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    sock = _socket()
    try:
        sock.bind(path)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
