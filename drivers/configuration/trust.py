"""Location of the user's configuration file, whether it can be trusted, and its tables.

The file decides where credentials and checkpoints go. So it is trusted only if nobody except the
user and root can have written the file, its folder, or the folder above.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path
from typing import Any

from ...errors import UsageError

FILE_NAME = "holdfast.toml"
_FILE_NBYTES_MAX = 1 << 20


def file_of_user() -> Path | None:
    """Return the path of the user's file: ``holdfast/holdfast.toml`` in XDG_CONFIG_HOME, else in
    ``~/.config``; None for a user without a home. Ignores relative paths in the environment, which
    would point into the working directory."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):
        home = _home()
        if home is None:
            return None
        folder = os.path.join(home, ".config")
    return Path(folder, "holdfast", FILE_NAME)


def _home() -> str | None:
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:  # containers may run as a UID without an account
            return None
    if os.path.isabs(home):
        return home
    return None


def tables_of(file: Path, *, check: bool) -> dict[str, Any]:
    """Return the tables of a TOML file, checked by :func:`check_trusted` if ``check``. Raises
    UsageError for an untrusted file, OSError, ValueError, and RecursionError."""
    import tomllib  # imported here because most users have no such file

    with file.open("rb") as opened:
        if check:
            check_trusted(file, os.fstat(opened.fileno()))
        data = opened.read(_FILE_NBYTES_MAX + 1)
    if len(data) > _FILE_NBYTES_MAX:
        raise ValueError(f"it has more than {_FILE_NBYTES_MAX:,} bytes")
    return tomllib.loads(data.decode())


def check_trusted(file: Path, status: os.stat_result) -> None:
    """Raise UsageError unless only this user and root can have written ``file``. ``status`` is that
    of the opened file. Raises OSError if a folder cannot be inspected."""
    folder = file.parent
    _check(file, status, "file")
    for above in dict.fromkeys((folder, folder.parent, Path(os.path.realpath(file)).parent)):
        _check(above, os.stat(above), "folder")


def _check(path: Path, status: os.stat_result, kind: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"the configuration {kind} {path} belongs to user {status.st_uid}, "
            f"but this process runs as user {os.geteuid()}",
            advice="Its owner decides where credentials and checkpoints go. "
            "If you trust it, set HOLDFAST_CONFIG to the file. To read none, set it to nothing.",
        )
    by_group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    if status.st_mode & stat.S_IWOTH or by_group:
        raise UsageError(
            f"others may write to the configuration {kind} {path}",
            advice=(
                f"They could redirect credentials and checkpoints. To prevent that: chmod go-w "
                f"'{path}'."
            ),
        )


def _is_private_group(gid: int) -> bool:
    """Return whether the group is root's or this user's alone, by the convention that such a group
    has the user's name. Many systems create files that this group may write to."""
    if gid == 0:
        return True
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )
