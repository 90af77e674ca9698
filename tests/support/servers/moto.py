"""moto: a second S3 server, written independently of Ceph's. It keeps objects in memory and accepts
any credentials."""

from __future__ import annotations

from pathlib import Path

from support.servers.daemon import INSTALLED, Daemon
from support.servers.ports import free_port
from support.servers.s3_server import S3Program

__all__ = ["Moto", "find_moto"]


def find_moto() -> Path | None:
    """The Python that has moto, if it is installed."""
    folder = INSTALLED / "moto"
    return folder / "bin/python" if (folder / ".ready").exists() else None


class Moto(S3Program):
    """A server with an empty bucket, ``holdfast``. Its log lies in ``folder``."""

    def __init__(self, folder: Path) -> None:
        python = find_moto()
        if python is None:
            raise RuntimeError("moto is not installed: make test-servers")
        port = free_port()
        command = [python, "-P", Path(__file__).with_name("moto_in_turn.py"), str(port)]
        super().__init__(Daemon(command, port=port, log=folder / "moto.log"))
