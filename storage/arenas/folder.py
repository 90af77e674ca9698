"""Where keepers of this host are found: a folder that is its user's alone, with one for each run.

    <base>/<run>/lock      held by the keeper of the run as long as it lives; names its process
    <base>/<run>/socket    where trainers connect
    <base>/<run>/token     what whoever reads its memory over HTTP has to know
    <base>/<run>/identity  its name among the keepers of the run, and the port that it serves at
    <base>/<run>/log       what the keeper says, if a trainer has started it

The base is what HOLDFAST_KEEPER_DIR names, else ``$XDG_RUNTIME_DIR/holdfast``, else
``/tmp/holdfast-<uid>``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError

__all__ = ["KEEPER_DIR_VARIABLE", "RUN_PATTERN", "KeeperFolder", "base_folder", "keeper_folders"]

KEEPER_DIR_VARIABLE = "HOLDFAST_KEEPER_DIR"
RUN_PATTERN = re.compile(r"[0-9a-f]{32}")
"""The ids of runs."""
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,100}")
"""The names of keepers."""
_PATH_NBYTES_MAX = 107
"""Of a unix socket."""


@dataclass(frozen=True, slots=True)
class KeeperFolder:
    """The folder of the keeper of one run."""

    path: Path

    @classmethod
    def of(cls, run: str, base: Path | None = None) -> KeeperFolder:
        """Of the run with this id. Nothing is made. Raises UsageError for what is no id, and where
        the path is too long for a socket."""
        if not RUN_PATTERN.fullmatch(run):
            raise UsageError(f"{run!r:.50} is no id of a run")
        folder = cls((base or base_folder()) / run)
        if len(os.fsencode(folder.socket)) > _PATH_NBYTES_MAX:
            raise UsageError(
                f"{folder.socket} is too long for the path of a socket",
                advice=f"Name a shorter folder by {KEEPER_DIR_VARIABLE}.",
            )
        return folder

    @property
    def socket(self) -> str:
        """Where trainers connect."""
        return str(self.path / "socket")

    @property
    def lock(self) -> Path:
        """Held by the keeper."""
        return self.path / "lock"

    @property
    def token(self) -> Path:
        """What whoever reads the keeper's memory over HTTP has to know."""
        return self.path / "token"

    def write_token(self, token: str) -> None:
        """Leave it for this user's processes."""
        _write(self.token, token)

    def read_token(self) -> str:
        """That of a former keeper; "" where there was none."""
        return _read(self.token)

    @property
    def identity(self) -> Path:
        """What a keeper that takes the place of another goes on as."""
        return self.path / "identity"

    def read_identity(self) -> tuple[str, int]:
        """The name and the port of the keeper before, "" and 0 where there was none."""
        name, _, port = _read(self.identity).partition(" ")
        if not NAME_PATTERN.fullmatch(name) or not port.isdecimal():
            return "", 0
        return name, int(port)

    def write_identity(self, name: str, port: int) -> None:
        """Leave it for the keeper that takes this one's place."""
        _write(self.identity, f"{name} {port}")

    @property
    def log(self) -> Path:
        """What a keeper says that a trainer has started."""
        return self.path / "log"

    def make(self) -> None:
        """Make it, and the base, for this user alone. Raises UsageError where another user could
        put something there."""
        for path in (self.path.parent, self.path):
            path.mkdir(mode=0o700, parents=path == self.path.parent, exist_ok=True)
            check_own(path)


def _write(path: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(path: Path) -> str:
    """A short file; "" where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        return os.read(fd, 4096).decode(errors="replace").strip()
    finally:
        os.close(fd)


def check_own(path: Path) -> None:
    """Raise UsageError unless ``path`` is a folder, no link, and this user's alone."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        problem = "is no folder"
    elif found.st_uid != os.getuid():
        problem = f"belongs to the user {found.st_uid}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise UsageError(
        f"{path} {problem}, so it is no place for keepers",
        advice=f"Name another folder by {KEEPER_DIR_VARIABLE}, or make this one yours: chmod 700.",
    )


def base_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder below which each run has its own."""
    named = environment.get(KEEPER_DIR_VARIABLE)
    if named:
        return Path(named)
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "holdfast"
    return Path("/tmp") / f"holdfast-{os.getuid()}"


def keeper_folders(base: Path | None = None) -> list[KeeperFolder]:
    """Those of all runs, by the ids of runs; none where there is no base. Raises UsageError where
    it is not this user's alone."""
    base = base or base_folder()
    if not base.exists():
        return []
    check_own(base)
    return [
        KeeperFolder(path)
        for path in sorted(base.iterdir())
        if RUN_PATTERN.fullmatch(path.name) and path.is_dir()
    ]
