"""Simulated hosts of the keeper demo, all on this machine.

Each has a keeper, a loopback address and a failure domain of its own, and can be lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...errors import CoordinationError, DeadlineError, UsageError
from ...storage.arenas.client import status_of, stop
from ...storage.arenas.folder import KEEPER_DIR_VARIABLE, KeeperFolder, keeper_folders

HOSTS = ("a", "b", "c", "d")
"""Hosts in rank order, one rank each."""
LINGER = "2min"
"""Time that keepers outlive the demo if it is killed: longer than torchrun takes to start a job."""
_END_S = 10.0
_LOOK_EVERY_S = 0.02


def address_of(rank: int) -> str:
    """Return the address at which the keeper of a rank's host serves."""
    return f"127.0.0.{rank + 2}"


def folder_of(base: Path, rank: int) -> Path:
    """Return the keeper folder of a rank's host."""
    return base / HOSTS[rank]


class Hosts:
    """All hosts. Their keepers have folders below ``base``, which is short because socket paths are
    limited."""

    def __init__(self, base: Path) -> None:
        """Make the folders. Raises UsageError if ``base`` is too long."""
        self.base = base
        for rank in range(len(HOSTS)):
            folder = folder_of(base, rank)
            try:
                KeeperFolder.of("0" * 32, folder)
            except UsageError as error:
                raise UsageError(
                    f"{folder} is too long for the sockets of keepers",
                    advice="Name a shorter folder by TMPDIR.",
                ) from error
            folder.mkdir(mode=0o700)

    def lose(self, names: Iterable[str]) -> None:
        """Lose these hosts and everything in their memory. Empty hosts replace them."""
        for name in names:
            for folder in keeper_folders(self.base / name):
                self._kill(folder)
            shutil.rmtree(self.base / name)
            (self.base / name).mkdir(mode=0o700)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the jobs' processes. They also identify those processes."""
        return {KEEPER_DIR_VARIABLE: str(self.base)}

    def end(self) -> None:
        """End every keeper and every other process of the jobs. An interrupted job may have left a
        keeper that is still starting."""
        for name in HOSTS:
            for folder in keeper_folders(self.base / name):
                self._end(folder)
        for pid in _processes_below(self.base):
            _kill(pid)

    def _end(self, folder: KeeperFolder) -> None:
        try:
            pid = _pid_of(folder)
            if pid is not None and stop(folder):
                _wait_for_end(pid)
        except (CoordinationError, DeadlineError):
            self._kill(folder)

    def _kill(self, folder: KeeperFolder) -> None:
        """Kill a keeper. Raises DeadlineError if it survives."""
        try:
            pid = _pid_of(folder)
        except CoordinationError:  # it holds its lock, but is too busy to answer
            pid = int(folder.lock.read_text())
        if pid is not None:
            _kill(pid)


def _processes_below(base: Path) -> Iterator[int]:
    """Yield the ids of processes whose environment places keepers in or below ``base``."""
    wanted = f"{KEEPER_DIR_VARIABLE}={base}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        if any(one == wanted or one.startswith(wanted + b"/") for one in variables):
            yield int(path.parent.name)


def _kill(pid: int) -> None:
    """Kill a process. Raises DeadlineError if it survives."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _wait_for_end(pid)


def _pid_of(folder: KeeperFolder) -> int | None:
    """Return the process id of a keeper; None if none is alive."""
    pid = (status_of(folder) or {}).get("pid")
    assert pid is None or isinstance(pid, int)
    return pid


def _wait_for_end(pid: int) -> None:
    """Wait until the process is gone or a zombie. Raises DeadlineError."""
    end_s = time.monotonic() + _END_S
    while time.monotonic() < end_s:
        if not _lives(pid):
            return
        time.sleep(_LOOK_EVERY_S)
    raise DeadlineError(f"process {pid} did not end within {_END_S:g} s")


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
