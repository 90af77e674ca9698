"""File names below a root: objects, temporary files, and hidden files of network file systems."""

from __future__ import annotations

import re
import secrets

_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.tmp", re.DOTALL)
_HIDDEN = re.compile(r"\.nfs[0-9a-f]{24}|\.fuse_hidden[0-9a-f]{16}")


def temporary_name(name: str) -> str:
    """Return a new temporary name for ``name``: hidden from listings, at most 255 bytes long."""
    return f".{name[:48]}.{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether this is the name of an unfinished or dead upload."""
    return name.endswith(".tmp") and _TEMPORARY.fullmatch(name) is not None


def is_hidden(name: str) -> bool:
    """Return whether an NFS client or libfuse gives such names to removed files that a process on
    this host still has open. It removes the file when that process closes it."""
    return name.startswith((".nfs", ".fuse_hidden")) and _HIDDEN.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    """Return whether objects must not have this name."""
    return is_temporary(name) or is_hidden(name)


def split(key: str) -> tuple[str, str]:
    """Return the key of the folder that holds ``key`` ("" is the root), and the name in it."""
    folder, _, name = key.rpartition("/")
    return folder, name
