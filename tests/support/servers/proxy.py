"""A TCP proxy with faults on demand: slow, mute, or cutting connections. It runs in threads of this
process."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from dataclasses import dataclass

_PIECE_NBYTES = 64 << 10
_REQUEST = re.compile(rb"((?:GET|HEAD|PUT|POST|DELETE) [^ ]+) HTTP/1.1\r\n")


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of open and new connections. ``up`` is towards the server."""

    up_nbytes_per_s: float | None = None
    """Rate of each connection."""
    mute: bool = False
    """Accept data, and pass nothing on, in either direction."""
    refuse: bool = False
    """Cut new connections at once."""


class FaultProxy:
    """Listens on a free port of the loopback, for the server at ``upstream``. A context manager."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.faults = Faults()
        self.cuts = 0
        """Connections that were cut so far."""
        self.losing: re.Pattern[bytes] | None = None
        """A pattern for the beginning of a request. The answer to the next such request is lost:
        the server has executed it, and the connection is cut. None after that."""
        self.asked: list[str] = []
        """Method and path of each HTTP request so far."""
        self._lock = threading.Lock()
        self._upstream = upstream
        self._server = socket.create_server(("127.0.0.1", 0))
        self._port = self._server.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._unheard: set[socket.socket] = set()
        """Connections to servers whose next answer is lost."""
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def endpoint(self) -> str:
        """URL at which it listens."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> FaultProxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        try:
            self._server.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed already
            pass
        self._server.close()
        self.cut_all()
        for thread in self._threads:
            thread.join(5)

    def cut_all(self) -> None:
        """Reset every connection."""
        for one in tuple(self._sockets):
            self._cut(one)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self.faults.refuse:
                self._cut(client)
                continue
            try:
                server = socket.create_connection(self._upstream, 5)
            except OSError:
                self._stay_away(client)
                continue
            self._sockets |= {client, server}
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._pass_on, client, server, True)
            self._start(self._pass_on, server, client, False)

    def _stay_away(self, client: socket.socket) -> None:
        """Stop listening until the server is back, so that connections are refused as the server
        would refuse them. To accept and cut a connection is another fault, which clients take for
        an invalid answer."""
        self._server.close()
        self._cut(client)
        while not self._closed:
            try:
                socket.create_connection(self._upstream, 5).close()
            except OSError:
                time.sleep(0.02)
                continue
            self._server = socket.create_server(("127.0.0.1", self._port))
            return

    def _pass_on(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while piece := source.recv(_PIECE_NBYTES):
                if up and (request := _REQUEST.match(piece)):
                    self.asked.append(request[1].decode())
                while self.faults.mute and not self._closed:
                    time.sleep(0.02)
                if up and self._is_to_be_lost(piece):
                    self._unheard.add(sink)
                if source in self._unheard:
                    self._unheard.discard(source)
                    self._cut(sink)
                    self._cut(source)
                    return
                if up and self.faults.up_nbytes_per_s:
                    time.sleep(len(piece) / self.faults.up_nbytes_per_s)
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._cut(source)
            self._cut(sink)

    def _is_to_be_lost(self, piece: bytes) -> bool:
        with self._lock:
            found = self.losing is not None and self.losing.match(piece) is not None
            if found:
                self.losing = None
        return found

    def _cut(self, one: socket.socket) -> None:
        """Reset a connection: the bytes sent may or may not arrive."""
        self.cuts += 1
        self._sockets.discard(one)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.shutdown(socket.SHUT_RD)
        except OSError:
            pass
        one.close()
