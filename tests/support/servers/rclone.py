"""rclone's S3 server: it ignores the conditions of puts, and answers a range that is the whole
object with status 200."""

from __future__ import annotations

import os
from pathlib import Path

from support.servers.daemon import INSTALLED, Daemon
from support.servers.ports import free_port
from support.servers.s3_server import S3Program

__all__ = ["Rclone", "find_rclone"]


def find_rclone() -> Path | None:
    """The program, if it is installed."""
    program = INSTALLED / "rclone/rclone"
    return program if os.access(program, os.X_OK) else None


class Rclone(S3Program):
    """A server of a folder with an empty bucket, ``holdfast``. Its log lies in ``folder``."""

    def __init__(self, folder: Path) -> None:
        program = find_rclone()
        if program is None:
            raise RuntimeError("rclone is not installed: make test-servers")
        port = free_port()
        self.served = folder / "served"
        address = [
            "--addr",
            f"127.0.0.1:{port}",
            "--auth-key",
            f"{self.access_key},{self.secret_key}",
        ]
        command = [program, "serve", "s3", "--config", os.devnull, *address, str(self.served)]
        super().__init__(Daemon(command, port=port, log=folder / "rclone.log"))

    def start(self) -> None:
        """Start it, with the bucket, which is a folder."""
        (self.served / "holdfast").mkdir(parents=True)
        self._program.start()
