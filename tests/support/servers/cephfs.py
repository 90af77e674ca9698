"""CephFS, mounted twice by FUSE: two clients, each with a cache of its own, as on two hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.servers.ceph import CephCluster, find_ceph
from support.servers.mounts import await_mount, unmount

__all__ = ["Cephfs", "find_cephfs"]

CONFIG = """
[mds]
mds_data = {folder}/mds
[client]
client_mount_timeout = 30
fuse_default_permissions = false
"""


def find_cephfs() -> bool:
    """Tell whether Ceph is there, with its metadata server and its client."""
    ceph = find_ceph()
    return ceph is not None and all(
        (ceph.programs / name).exists() for name in ("ceph-mds", "ceph-fuse")
    )


@dataclass
class Cephfs(CephCluster):
    """A file system below ``folder``. ``start`` it, ``stop`` it."""

    def __post_init__(self) -> None:
        """Add a section for the metadata server, and one for clients, to the configuration."""
        self.extra = CONFIG.format(folder=self.folder) + self.extra

    @property
    def mounts(self) -> tuple[Path, Path]:
        """Return where it is mounted."""
        return self.folder / "first", self.folder / "second"

    def _boot(self) -> None:
        super()._boot()
        for pool in ("metadata", "data"):
            self.admin("osd", "pool", "create", pool, "8")
        self.admin("fs", "new", "holdfast", "metadata", "data")
        (self.folder / "mds").mkdir()
        self._spawn("mds", "ceph-mds", "-i", "a", "-f")
        self._until("the metadata server", lambda: b"up:active" in self.admin("mds", "stat"))
        for folder in self.mounts:
            folder.mkdir()
            self._spawn(folder.name, "ceph-fuse", "-n", "client.admin", "-f", str(folder))
            log = self.folder / "log" / f"{folder.name}.out"
            await_mount(folder, self._running[folder.name], log)

    def stop(self) -> None:
        """Unmount it, and end all of its processes."""
        for folder in self.mounts:
            unmount(folder)
        super().stop()
