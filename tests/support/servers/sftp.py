"""An SFTP server (asyncssh) in a thread of this process, and the conformance kit's probe of it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import asyncssh

from holdfast.drivers.conformance.probes import FolderProbe
from holdfast.drivers.uri import Uri
from support.servers.ports import free_port


class _Folder:
    """An open folder, which can be synced."""

    def __init__(self, path: bytes) -> None:
        self._fd = os.open(path, os.O_RDONLY)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def flush(self) -> None:
        """Do nothing: a folder has no buffer."""


class _Files(asyncssh.SFTPServer):
    """The host's files. Clients may open folders, as on OpenSSH."""

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> object:
        return _Folder(path) if os.path.isdir(path) else super().open(path, pflags, attrs)


class SftpServer:
    """Serves the host's files on a free port. Tests keep theirs below ``root``.

    Clients find the only user's private key, and the server's public one, in the home folder that
    ``environment`` names.
    """

    host = "127.0.0.1"
    username = "tester"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.root = folder / "root"
        self._home = folder / "home"
        self._host_key = asyncssh.generate_private_key("ssh-ed25519")
        self._connections: set[asyncssh.SSHServerConnection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def environment(self) -> dict[str, str]:
        """Return the variables that clients need."""
        return {"HOME": str(self._home)}

    def start(self) -> None:
        """Make the keys and listen."""
        self.root.mkdir()
        keys = self._home / ".ssh"
        keys.mkdir(parents=True)
        user_key = asyncssh.generate_private_key("ssh-ed25519")
        user_key.write_private_key(keys / "id_ed25519")
        user_key.write_public_key(keys / "authorized_keys")
        public = self._host_key.export_public_key().decode()
        (keys / "known_hosts").write_text(f"[{self.host}]:{self.port} {public}")
        self._thread.start()
        self.listen()

    def listen(self) -> None:
        """Listen, again after :meth:`kill`."""
        connections = self._connections

        class Noted(asyncssh.SSHServer):
            def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
                connections.add(conn)

        async def listening() -> asyncssh.SSHAcceptor:
            return await asyncssh.listen(
                self.host,
                self.port,
                server_factory=Noted,
                server_host_keys=[self._host_key],
                authorized_client_keys=str(self._home / ".ssh/authorized_keys"),
                sftp_factory=_Files,
            )

        self._listener = self._run(listening())

    def kill_sessions(self) -> None:
        """Cut every connection, as the loss of a network would."""

        async def cut() -> None:
            while self._connections:
                self._connections.pop().abort()

        self._run(cut())

    def kill(self) -> None:
        """Stop listening and cut every connection, as a crash would."""
        self._loop.call_soon_threadsafe(self._listener.close)
        self.kill_sessions()

    def stop(self) -> None:
        """End the server."""
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


class SftpProbe(FolderProbe):
    """Files below the location of a URI that names the host."""

    def __init__(self, uri: Uri) -> None:
        super().__init__(Uri("file", "/" + uri.location.partition("/")[2]))
