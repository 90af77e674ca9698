"""Which configuration file of a user is to be trusted: where it is, whose it is, and who may write
to it.

What stands in it decides where credentials and checkpoints go. So it is trusted if only the user
and root can have written it: the file, the folder it is in, and the folder above that.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from ...errors import UsageError

__all__ = ["FILE_NAME", "check_trusted", "file_of_user"]

FILE_NAME = "holdfast.toml"


def file_of_user() -> Path | None:
    """Where the user's file would be: ``holdfast/holdfast.toml`` in XDG_CONFIG_HOME, or else in
    ``~/.config``; None for a user without a home. Relative paths in the environment are ignored:
    they would name places in the working directory."""
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
        except KeyError:  # a container may run as any number
            return None
    if os.path.isabs(home):
        return home
    return None


def check_trusted(file: Path, status: os.stat_result) -> None:
    """Raise UsageError unless only this user and root can have written ``file``, whose
    ``status`` is that of what was opened; OSError where a folder cannot be looked at."""
    folder = file.parent
    _check(file, status, "file")
    for above in dict.fromkeys((folder, folder.parent, Path(os.path.realpath(file)).parent)):
        _check(above, os.stat(above), "folder")


def _check(path: Path, status: os.stat_result, kind: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"{path}, a {kind} of configuration, belongs to user {status.st_uid}, "
            f"not to user {os.geteuid()}, as whom this runs",
            advice="Who owns it says where credentials and checkpoints go. "
            "If you trust it, name the file by HOLDFAST_CONFIG; if you want none, set that empty.",
        )
    if _others_may_write(status):
        raise UsageError(
            f"{path}, a {kind} of configuration, may be written to by others",
            advice=(
                f"They could say where credentials and checkpoints go. Forbid it: chmod go-w "
                f"'{path}'."
            ),
        )


def _others_may_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid)


def _is_private_group(gid: int) -> bool:
    """Whether it is the group of root or of this user alone, by the convention that it has the
    user's name: many systems create files that such a group may write to."""
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
