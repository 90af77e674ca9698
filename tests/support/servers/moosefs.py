"""MooseFS, mounted twice by FUSE: two clients, each with a cache of its own, as on two hosts.

One master and one chunk server, in a network of their own: a chunk server accepts no master on the
loopback, and nothing outside this host shall reach them.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.servers.daemon import DIES_WITH_US, INSTALLED, Daemon
from support.servers.mounts import await_mount, unmount
from support.servers.own_network import ADDRESS, OwnNetwork

__all__ = ["Moosefs", "find_moosefs"]

PORTS = {"control": 9419, "chunks": 9420, "clients": 9421, "data": 9422}

MASTER = """
WORKING_USER = {user}
WORKING_GROUP = {group}
DATA_PATH = {folder}/master
EXPORTS_FILENAME = {folder}/exports.cfg
NICE_LEVEL = 0
DISABLE_OOM_KILLER = 0
MATOML_LISTEN_HOST = {address}
MATOML_LISTEN_PORT = {control}
MATOCS_LISTEN_HOST = {address}
MATOCS_LISTEN_PORT = {chunks}
MATOCL_LISTEN_HOST = {address}
MATOCL_LISTEN_PORT = {clients}
"""
CHUNKS = """
WORKING_USER = {user}
WORKING_GROUP = {group}
DATA_PATH = {folder}/chunks
HDD_CONF_FILENAME = {folder}/disks.cfg
HDD_TEST_SPEED = 0
NICE_LEVEL = 0
DISABLE_OOM_KILLER = 0
MASTER_HOST = {address}
MASTER_PORT = {chunks}
MASTER_RECONNECTION_DELAY = 1
BIND_HOST = {address}
CSSERV_LISTEN_HOST = {address}
CSSERV_LISTEN_PORT = {data}
"""


def find_moosefs() -> Path | None:
    """Return where MooseFS is unpacked; None if it is not."""
    folder = INSTALLED / "moosefs"
    return folder if (folder / "usr/bin/mfsmount").exists() else None


class Moosefs:
    """A file system below ``folder``. ``start`` it, ``stop`` it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounts = folder / "first", folder / "second"
        self._network = OwnNetwork()
        self._programs: list[Daemon] = []
        self._clients: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Boot it, and mount it twice. Raises RuntimeError, with the end of a log, where it does not
        come up."""
        try:
            self._boot()
        except BaseException:
            self.stop()
            raise

    def _boot(self) -> None:
        root = find_moosefs()
        if root is None:
            raise RuntimeError("MooseFS is not installed")
        self._network.start()
        values: dict[str, object] = {
            "folder": self.folder,
            "address": ADDRESS,
            "user": pwd.getpwuid(os.geteuid()).pw_name,
            "group": grp.getgrgid(os.getegid()).gr_name,
            **PORTS,
        }
        for name in ("master", "chunks", "disk"):
            (self.folder / name).mkdir(parents=True)
        shutil.copy(root / "var/lib/mfs/metadata.mfs.empty", self.folder / "master/metadata.mfs")
        self._write("exports.cfg", f"{ADDRESS} / rw,alldirs,maproot=0:0\n")
        self._write("disks.cfg", f"{self.folder / 'disk'}\n")
        self._write("master.cfg", MASTER.format_map(values))
        self._write("chunks.cfg", CHUNKS.format_map(values))
        folders = (*root.glob("lib/*-linux-gnu"), *root.glob("usr/lib/*-linux-gnu"))
        libraries = {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}
        for program, name, port in (
            ("mfsmaster", "master", "clients"),
            ("mfschunkserver", "chunks", "data"),
        ):
            daemon = Daemon(
                [
                    *self._network.enter,
                    *(root / "usr/sbin" / program, "-f"),
                    *("-c", self.folder / f"{name}.cfg", "start"),
                ],
                host=ADDRESS,
                port=PORTS[port],
                listens=self._network.listens,
                log=self.folder / f"{name}.log",
                environment=libraries,
            )
            self._programs.append(daemon)
            daemon.start()
        options = f"mfsmaster={ADDRESS},mfsport={PORTS['clients']},mfsnice=0,mfsallowoomkiller"
        for folder in self.mounts:
            self._mount([root / "usr/bin/mfsmount", "-f", folder, "-o", options], folder, libraries)

    def _mount(
        self, command: Sequence[str | Path], folder: Path, environment: dict[str, str]
    ) -> None:
        folder.mkdir()
        log = self.folder / f"{folder.name}.log"
        with open(log, "wb") as out:
            client = subprocess.Popen(
                [*DIES_WITH_US, *self._network.enter, *command],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._clients.append(client)
        await_mount(folder, client, log)

    def stop(self) -> None:
        """Unmount it, and end all of its processes. Safe to call twice."""
        for folder in self.mounts:
            unmount(folder)
        for client in self._clients:
            client.terminate()
            try:
                client.wait(10)
            except subprocess.TimeoutExpired:
                client.kill()
                client.wait(10)
        for daemon in reversed(self._programs):
            daemon.stop()
        self._network.stop()

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
