"""Folders by which keepers of this host are found, private to one user, one per run.

    <base>/<run>/lock      locked by the live keeper; contains its process id
    <base>/<run>/socket    where trainers connect
    <base>/<run>/token     secret for reading the memory over HTTP
    <base>/<run>/identity  the keeper's name in the run, and its HTTP port
    <base>/<run>/log       output of a keeper that a trainer has started

The base is HOLDFAST_KEEPER_DIR if set, else ``$XDG_RUNTIME_DIR/holdfast``, else
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

KEEPER_DIR_VARIABLE = "HOLDFAST_KEEPER_DIR"
RUN_PATTERN = re.compile(r"[0-9a-f]{32}")
"""Format of run ids."""
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,100}")
"""Format of keeper names."""
_PATH_NBYTES_MAX = 107
"""Limit of the path of a unix socket."""


@dataclass(frozen=True, slots=True)
class KeeperFolder:
    """Folder of one run's keeper."""

    path: Path

    @classmethod
    def of(cls, run: str, base: Path | None = None) -> KeeperFolder:
        """Return the folder for a run id, without creating it. Raises UsageError for a malformed
        id, or if the path is too long for a socket."""
        if not RUN_PATTERN.fullmatch(run):
            raise UsageError(f"{run!r:.50} is not the id of a run")
        folder = cls((base or base_folder()) / run)
        if len(os.fsencode(folder.socket)) > _PATH_NBYTES_MAX:
            raise UsageError(
                f"{folder.socket} is too long for a socket path",
                advice=f"Set {KEEPER_DIR_VARIABLE} to a shorter path.",
            )
        return folder

    @property
    def socket(self) -> str:
        """Path of the socket where trainers connect."""
        return str(self.path / "socket")

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def token(self) -> Path:
        """Path of the file with the secret for reading over HTTP."""
        return self.path / "token"

    def write_token(self, token: str) -> None:
        """Write the token, readable by this user alone."""
        _write(self.token, token)

    def read_token(self) -> str:
        """Return the token of the previous keeper, unvalidated; "" if there is none."""
        return _read(self.token)

    @property
    def identity(self) -> Path:
        """Path of the file with a keeper's name and port, which its successor reuses."""
        return self.path / "identity"

    def read_identity(self) -> tuple[str, int]:
        """Return the name and port of the previous keeper; ("", 0) if there is none, or its file is
        malformed."""
        name, _, port = _read(self.identity).partition(" ")
        if not NAME_PATTERN.fullmatch(name) or not port.isdecimal():
            return "", 0
        return name, int(port)

    def write_identity(self, name: str, port: int) -> None:
        """Write the name and port for the next keeper. ``port``: 0 if memory is not served."""
        _write(self.identity, f"{name} {port}")

    @property
    def log(self) -> Path:
        """Path of the log of a keeper that a trainer has started."""
        return self.path / "log"

    def make(self) -> None:
        """Create the folder and the base, private to this user. Raises UsageError if another user
        could write there."""
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
    """Return the text of a file without surrounding whitespace; "" if it does not exist.

    Reads at most 4096 bytes, and replaces invalid UTF-8. Raises OSError, also for a symbolic link.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        return os.read(fd, 4096).decode(errors="replace").strip()
    finally:
        os.close(fd)


def check_own(path: Path) -> None:
    """Raise UsageError unless ``path`` is a real folder, private to this user."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a folder"
    elif found.st_uid != os.getuid():
        problem = f"belongs to the user {found.st_uid}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise UsageError(
        f"{path} {problem}, so keepers cannot use it",
        advice=f"Set {KEEPER_DIR_VARIABLE} to another folder, or make this one private: chmod 700.",
    )


def base_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that holds the folders of all runs."""
    named = environment.get(KEEPER_DIR_VARIABLE)
    if named:
        return Path(named)
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "holdfast"
    return Path("/tmp") / f"holdfast-{os.getuid()}"


def keeper_folders(base: Path | None = None) -> list[KeeperFolder]:
    """Return the folders of all runs, by run id. Raises UsageError if the base is not private to
    this user."""
    base = base or base_folder()
    if not base.exists():
        return []
    check_own(base)
    return [
        KeeperFolder(path)
        for path in sorted(base.iterdir())
        if RUN_PATTERN.fullmatch(path.name) and path.is_dir()
    ]
