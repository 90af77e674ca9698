"""The hosts that the demo of keepers makes of this machine: each has a keeper, an address of the
loopback and a failure domain of its own, and can break down."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...errors import CoordinationError, DeadlineError, UsageError
from ...storage.arenas.control import status_of, stop
from ...storage.arenas.folder import KEEPER_DIR_VARIABLE, KeeperFolder, keeper_folders

__all__ = ["HOSTS", "LINGER", "Hosts", "address_of", "folder_of"]

HOSTS = ("a", "b", "c", "d")
"""Each of one rank, in this order."""
LINGER = "2min"
"""Of keepers, should the demo itself be killed: more than torchrun takes to start a job."""
_END_S = 10.0
_LOOK_EVERY_S = 0.02


def address_of(rank: int) -> str:
    """Where the keeper of a rank's host serves."""
    return f"127.0.0.{rank + 2}"


def folder_of(base: Path, rank: int) -> Path:
    """Where the keeper of a rank's host is found."""
    return base / HOSTS[rank]


class Hosts:
    """All hosts, whose keepers have folders below ``base``; that is short, since the path of a
    socket is."""

    def __init__(self, base: Path) -> None:
        """Raises UsageError where ``base`` is too long."""
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
        """These hosts break down, with all that is in their memory; others take their places."""
        for name in names:
            for folder in keeper_folders(self.base / name):
                self._kill(folder)
            shutil.rmtree(self.base / name)
            (self.base / name).mkdir(mode=0o700)

    @property
    def environment(self) -> dict[str, str]:
        """For the processes of jobs; what says that a process is one of theirs."""
        return {KEEPER_DIR_VARIABLE: str(self.base)}

    def end(self) -> None:
        """End every keeper, and whatever else of a job there is: one that was interrupted may have
        left a keeper that is about to start."""
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
        """Raises DeadlineError where it lives on."""
        try:
            pid = _pid_of(folder)
        except CoordinationError:  # it holds its lock, but is too busy to answer
            pid = int(folder.lock.read_text())
        if pid is not None:
            _kill(pid)


def _processes_below(base: Path) -> Iterator[int]:
    """Those that were started with an environment in which keepers are in ``base``, or below it."""
    wanted = f"{KEEPER_DIR_VARIABLE}={base}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if any(one == wanted or one.startswith(wanted + b"/") for one in variables):
            yield int(path.parent.name)


def _kill(pid: int) -> None:
    """Raises DeadlineError where it lives on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _wait_for_end(pid)


def _pid_of(folder: KeeperFolder) -> int | None:
    """The process of a keeper; None where none is alive."""
    pid = (status_of(folder) or {}).get("pid")
    assert pid is None or isinstance(pid, int)
    return pid


def _wait_for_end(pid: int) -> None:
    """Until there is no such process, or none but an entry that its parent has not looked at."""
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
