"""Simulated hosts of the keeper demo, all on this machine.

Each has a keeper, a loopback address and a failure domain of its own, and can be lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from ...errors import CoordinationError, DeadlineError, UsageError
from ...storage.arenas.client import stop
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
        """Lose these hosts and everything in their memory. Empty hosts replace them. Raises
        DeadlineError if a keeper survives."""
        for name in names:
            _kill_below(self.base / name)
            shutil.rmtree(self.base / name)
            (self.base / name).mkdir(mode=0o700)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the jobs' processes. They also identify those processes."""
        return {KEEPER_DIR_VARIABLE: str(self.base)}

    def end(self) -> None:
        """Stop every keeper, and kill all processes of the jobs that do not end soon. An
        interrupted job may have left a keeper that is still starting. Raises DeadlineError if a
        process survives."""
        stopped = 0
        for name in HOSTS:
            for folder in keeper_folders(self.base / name):
                with contextlib.suppress(CoordinationError):  # it is too busy to answer
                    stopped += stop(folder)
        if not (stopped and _are_gone_below(self.base)):
            _kill_below(self.base)


def _kill_below(base: Path) -> None:
    for pid in _processes_below(base):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not _are_gone_below(base):
        raise DeadlineError(f"processes with keepers in {base} did not end within {_END_S:g} s")


def _are_gone_below(base: Path) -> bool:
    """Wait for the end of all processes with keepers in or below ``base``, and return whether they
    ended in time."""
    end_s = time.monotonic() + _END_S
    while _processes_below(base):
        if time.monotonic() > end_s:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def _processes_below(base: Path) -> list[int]:
    """Return the ids of processes whose environment places keepers in or below ``base``. A zombie
    has no environment."""
    wanted = f"{KEEPER_DIR_VARIABLE}={base}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        if any(one == wanted or one.startswith(wanted + b"/") for one in variables):
            found.append(int(path.parent.name))
    return found
