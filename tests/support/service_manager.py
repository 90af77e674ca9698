"""What systemd does for one service, as far as descriptors are concerned: it keeps those that are
sent to it, each once, until they are not wanted any more."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ServiceManager:
    """``kept``: names and descriptors, the newest first, as systemd 252 hands them over."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.address)
        self._sock.setblocking(False)
        self.kept: list[tuple[str, int]] = []

    def hear(self) -> list[str]:
        """Take what was sent; the names that are kept now."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 4096, 16)
            except BlockingIOError:
                return sorted({name for name, _ in self.kept})
            lines = dict(line.split("=", 1) for line in data.decode().splitlines())
            name = lines.get("FDNAME", "")
            if "FDSTOREREMOVE" in lines:
                for one in [one for one in self.kept if one[0] == name]:
                    os.close(one[1])
                    self.kept.remove(one)
            for fd in fds:
                if any(os.path.samestat(os.fstat(fd), os.fstat(other)) for _, other in self.kept):
                    os.close(fd)
                else:
                    self.kept.insert(0, (name, fd))

    def handed_over(self) -> list[tuple[str, int]]:
        """What the service gets when it is started anew: descriptors of its own."""
        self.hear()
        return [(name, os.dup(fd)) for name, fd in self.kept]

    def close(self) -> None:
        """Keep nothing any more."""
        self._sock.close()
        while self.kept:
            os.close(self.kept.pop()[1])


@contextmanager
def service_manager() -> Iterator[ServiceManager]:
    """One that listens. The path of a socket is short."""
    with tempfile.TemporaryDirectory(prefix="sd") as folder:
        manager = ServiceManager(Path(folder) / "notify")
        try:
            yield manager
        finally:
            manager.close()
