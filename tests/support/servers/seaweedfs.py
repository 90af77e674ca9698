"""SeaweedFS: a store with a master, volumes and a filer below its S3 gateway, in one process."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

from support.servers.daemon import INSTALLED, Daemon
from support.servers.ports import free_port
from support.servers.s3_server import S3Program

__all__ = ["Seaweedfs", "find_seaweedfs"]

READY_S = 60.0
PORTS = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port.grpc",
)  # fmt: skip


def find_seaweedfs() -> Path | None:
    """Return SeaweedFS's program if it is installed."""
    program = INSTALLED / "seaweedfs/weed"
    return program if program.exists() else None


class Seaweedfs(S3Program):
    """A server below ``folder``, with an empty bucket, ``holdfast``."""

    def __init__(self, folder: Path) -> None:
        program = find_seaweedfs()
        if program is None:
            raise RuntimeError("SeaweedFS is not installed: make test-servers")
        self.secret_key = secrets.token_hex(16)
        credentials = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "List", "Write", "Tagging"]
        users = {"identities": [{"name": "test", "credentials": [credentials], "actions": actions}]}
        (folder / "users.json").write_text(json.dumps(users))
        (folder / "data").mkdir()
        port = free_port()
        others = [f"-{name}={free_port()}" for name in PORTS]
        at = [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={folder / 'data'}",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=100",
        ]
        gateway = [
            "-s3",
            f"-s3.port={port}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={folder / 'users.json'}",
        ]
        command = [program, "server", *at, *others, *gateway]
        super().__init__(Daemon(command, port=port, log=folder / "seaweedfs.log"))

    def start(self) -> None:
        """Start it, and make the bucket, as soon as the gateway has found the filer."""
        self._program.start()
        client = self.client(attempts=1)
        deadline_s = time.monotonic() + READY_S
        while True:
            try:
                client.create_bucket(Bucket="holdfast")
                client.put_object(Bucket="holdfast", Key="ready", Body=b"")
                client.delete_object(Bucket="holdfast", Key="ready")
            except Exception:  # the gateway has no filer or volume yet
                if time.monotonic() > deadline_s:
                    self.stop()
                    raise
                time.sleep(0.2)
            else:
                return
